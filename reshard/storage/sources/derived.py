"""A source that is another one with some of its tensors changed."""

from abc import abstractmethod
from functools import cached_property
from pathlib import Path

import numpy as np

from reshard.storage.io.streams import Strip, TensorInfo
from reshard.storage.sources.base import Source
from reshard.storage.sources.verify import SourceChecks


class DerivedSource(Source):
    """The tensors of `base`; a subclass reads those that it `changes`."""

    def __init__(self, base: Source) -> None:
        self.base, self.path, self.model, self.mapping = base, base.path, base.model, base.mapping
        self.tensors, self.copies = base.tensors, base.copies
        self.files, self.versions = base.files, base.versions
        self.experts_packed, self.uncast = base.experts_packed, base.uncast
        self.notices = list(base.notices)

    @abstractmethod
    def changes(self, name: str) -> bool:
        """Return True for a tensor that is not as the base has it."""

    def checks(self) -> SourceChecks:
        """Return the checksums of the base's manifest for the tensors that stay as they are, and for codes, which are
        read again to be checked."""
        checks = SourceChecks(self.base)
        checks.entries = {
            name: entry
            for name, entry in checks.entries.items()
            if not self.changes(name) or not checks.plain(name)
        }
        return checks

    def check_read(self, part: int, parts: int, workers: int | None) -> None:
        """Compare what else is read with the manifests of its files, before anything is made of it; of
        several processes each does a part. Raises ReshardError."""

    @cached_property
    def held(self) -> dict[str, TensorInfo]:  # type: ignore[override]
        return {
            name: info if self.changes(name) else self.base.held[name] for name, info in self.tensors.items()
        }

    def strips(self, name: str) -> list[Strip] | None:
        return None if self.changes(name) else self.base.strips(name)

    def compute(self, name: str, start: int, stop: int) -> np.ndarray:
        make = self.changed_rows if self.changes(name) else self.base.compute
        return make(name, start, stop)

    @abstractmethod
    def changed_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Make rows of a tensor that is not as the base has it."""

    def spans(self, file: str) -> list[tuple[int, int]]:
        return self.base.spans(file)

    def row_multiple(self, name: str) -> int:
        return self.base.row_multiple(name)

    def matrix_bytes(self) -> int:
        return self.base.matrix_bytes()

    def hf_directory(self) -> Path | None:
        return self.base.hf_directory()

    def hf_files(self) -> dict[str, Path]:
        return self.base.hf_files()

    def dequantized_names(self) -> list[str]:
        return self.base.dequantized_names()
