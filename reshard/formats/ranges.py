"""Files whose bytes lie in an object store: a hole of the same length stands for each on this host, so that it has a
name, a size and a directory, and whoever reads one asks here first where its bytes are."""

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence


class RangedFile(ABC):
    """A file of `size_bytes` that is read by ranges. All calls raise ReshardError if the store does not answer."""

    size_bytes: int

    @abstractmethod
    def read(self, offset: int, length: int) -> bytes:
        """Return `length` bytes, fewer at the end of the file."""

    @abstractmethod
    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill buffers, one after the other; other reads near this one are expected. Raises ReshardError if the file
        ends before."""

    @abstractmethod
    def version(self) -> tuple[int, int, int, int] | None:
        """Return size, time, a digest of the store's tag, and 0, as the store has them; None if it has no such
        file any more."""

    @abstractmethod
    def forget_version(self) -> None:
        """Have the next `version` ask the store again."""


FILES: dict[str, RangedFile] = {}


def ranged(path: str | os.PathLike[str]) -> RangedFile | None:
    """Return the file that a path stands for; None for one whose bytes are on this host."""
    return FILES.get(os.fspath(path)) if FILES else None


def forget_versions() -> None:
    """Have the next look at any file's version ask its store again."""
    for file in list(FILES.values()):
        file.forget_version()
