"""The files of a destination, laid out before a byte is written: where each canonical tensor goes,
and all that stands beside the weights. Who writes the tensors' bytes, one process or the ranks
of a trainer, is not said here: the same weights give the same files."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from reshard.storage.io.files import OpenFiles
from reshard.storage.io.streams import Strip, TensorInfo
from reshard.storage.manifest import NAME as MANIFEST
from reshard.storage.manifest import file_entry, manifest_json
from reshard.storage.run.workdir import Workdir


class Destination(ABC):
    """A checkpoint that is to be written.

    `format` names its format in the manifest, `sizes` are the bytes of the files with weights,
    `stored` are the tensors as the files hold them, and the manifest lists (codes of weights and their scales
    apart), and `copies` those that it has no place for besides another that has to be equal.
    """

    format: str
    has_slow_files = False
    copies: Mapping[str, str] = MappingProxyType({})
    sizes: dict[str, int]
    stored: dict[str, TensorInfo]

    @cached_property
    @abstractmethod
    def strips(self) -> dict[str, list[Strip]]:
        """Strips of each stored tensor; paths are relative to the destination. Bytes outside of all
        strips are zero, or belong to a frame."""

    def matrix_bytes(self) -> int:
        """Return the bytes of the largest matrix that is put together in memory before it is written."""
        return 0

    @abstractmethod
    def write_frames(self, root: Path, names: set[str], files: OpenFiles) -> None:
        """Write everything but the tensors' bytes of the named files, below `root`."""

    @abstractmethod
    def fields(self, family: str, source: object, quantized: list[str]) -> dict[str, Any]:
        """Return the head of the manifest."""

    @abstractmethod
    def small_files(self) -> dict[str, bytes | str]:
        """Return the files without weights, by name."""

    @abstractmethod
    def entries(self) -> dict[str, dict[str, Any]]:
        """Return the manifest's entry for each file with weights."""

    def slow_files(self) -> dict[str, bytes]:
        """Return further files without weights, by name, that take so long to make that a
        conversion makes them while tensors are written. There are some where `has_slow_files`."""
        return {}

    def finish(
        self,
        work: Workdir,
        fields: dict[str, Any],
        checksums: dict[str, str],
        sync: bool,
        slow_files: dict[str, bytes] | None = None,
    ) -> None:
        """Write the files without weights, and the manifest of all; `slow_files` where they have
        been made before."""
        made_now = self.slow_files() if slow_files is None else slow_files
        data = {
            name: text.encode() if isinstance(text, str) else text
            for name, text in (made_now | self.small_files()).items()
        }
        entries = self.entries() | {
            name: file_entry(len(content), [content]) for name, content in data.items()
        }
        data[MANIFEST] = manifest_json(fields, self.stored, checksums, entries).encode()
        for name, content in data.items():
            work.write_file(name, content, sync)
