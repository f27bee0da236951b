"""The files of a destination, laid out before a byte is written: where each canonical tensor goes, and all that
stands beside the weights. Who writes the tensors' bytes, one process or the ranks of a trainer, is not said
here: the same weights give the same files."""

from abc import ABC, abstractmethod
from functools import cached_property
from pathlib import Path
from typing import Any

from reshard.storage.io.files import OpenFiles
from reshard.storage.io.streams import Strip, TensorInfo
from reshard.storage.manifest import NAME as MANIFEST
from reshard.storage.manifest import file_entry, manifest_json
from reshard.storage.run.workdir import Workdir


class Destination(ABC):
    """What is to be written.

    `sizes` are the bytes of the files with weights, `stored` the tensors as they are listed in the manifest
    (codes of weights and their scales apart), `format` the name of the format there.
    """

    format: str
    sizes: dict[str, int]
    stored: dict[str, TensorInfo]

    @cached_property
    @abstractmethod
    def strips(self) -> dict[str, list[Strip]]:
        """Where the rows of each stored tensor go; paths are relative to the destination. What is none of
        these strips is zero, or a frame."""

    @abstractmethod
    def write_frames(self, root: Path, names: set[str], files: OpenFiles) -> None:
        """Write everything but the tensors' bytes of the named files, below `root`."""

    @abstractmethod
    def fields(self, family: str, source: object, quantized: list[str]) -> dict[str, Any]:
        """The head of the manifest."""

    @abstractmethod
    def small_files(self) -> dict[str, bytes | str]:
        """The files without weights, by name."""

    @abstractmethod
    def entries(self) -> dict[str, dict[str, Any]]:
        """What the manifest says of each file with weights."""

    def finish(self, work: Workdir, fields: dict[str, Any], checksums: dict[str, str], sync: bool) -> None:
        """Write the files without weights, and the manifest of all."""
        data = {
            name: text.encode() if isinstance(text, str) else text
            for name, text in self.small_files().items()
        }
        entries = self.entries() | {name: file_entry(len(found), [found]) for name, found in data.items()}
        data[MANIFEST] = manifest_json(fields, self.stored, checksums, entries).encode()
        for name, found in data.items():
            work.write_file(name, found, sync)
