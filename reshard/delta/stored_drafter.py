"""The drafter of a chain in files: its checkpoint, as the safetensors files of a directory have it, and a version of
it, written as such a directory."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np

from reshard.core.errors import ReshardError, listed
from reshard.delta.records import RECORD_BYTES
from reshard.digests.numbers import seed_of, start_of, sum_rows, text_of, total_of
from reshard.formats import safetensors
from reshard.models.drafters import DRAFTER
from reshard.storage.io.casts import cast
from reshard.storage.io.files import OpenFiles
from reshard.storage.io.streams import TensorInfo
from reshard.storage.sources.beside import beside
from reshard.storage.sources.versions import FileVersions


class StoredDrafter:
    """The checkpoint of a drafter in a directory: `tensors` by published name. Raises ReshardError if its safetensors
    files are missing or damaged."""

    def __init__(self, directory: Path) -> None:
        self.path, self.versions = directory, FileVersions(directory)
        stored = safetensors.read_directory(directory)
        self._stored, self.files = stored, OpenFiles()
        self.tensors = {name: TensorInfo(tensor.shape, tensor.dtype) for name, tensor in stored.items()}

    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Read rows `start` .. `stop` of a tensor, ``[rows, columns]``."""
        tensor, info = self._stored[name], self.tensors[name]
        rows = np.empty((stop - start, info.columns), info.dtype.numpy())
        offset = tensor.offset + start * info.columns * info.dtype.size
        self.files.read_into(self.path / tensor.file, offset, memoryview(rows.view(np.uint8)).cast("B"))
        return rows

    def digest(self, tensors: Mapping[str, TensorInfo], whose: str) -> str:
        """Return the digest of these tensors, by their canonical names, with their numbers in these dtypes. Raises
        ReshardError if it is another drafter than that, by name or shape, of `whose` they are."""
        self.check_has(tensors, whose)
        parts = []
        for name, info in tensors.items():
            seed = seed_of(name, info)
            parts.append(start_of(seed))
            parts += [sum_rows(seed, rows, start) for start, rows in self.slabs(name, info)]
        return text_of(total_of(parts))

    def check_has(self, tensors: Mapping[str, TensorInfo], whose: str) -> None:
        """Raise ReshardError unless these tensors of a drafter, of `whose` they are, are there in their shapes, whole
        numbers in their dtypes."""
        held = {DRAFTER + name: info for name, info in self.tensors.items()}
        lacking = [
            name.removeprefix(DRAFTER)
            for name, info in tensors.items()
            if name not in held
            or held[name].shape != info.shape
            or not (held[name].dtype == info.dtype or (held[name].dtype.floating and info.dtype.floating))
        ]
        if lacking:
            raise ReshardError(
                f"{self.path} is another drafter than {whose}: it has no {listed(lacking, 3)} of that shape"
            )

    def slabs(self, name: str, info: TensorInfo) -> Iterator[tuple[int, np.ndarray]]:
        """Yield a tensor by its canonical name, some rows at a time, each with the number of the first, in the dtype of
        this `info`."""
        published = name.removeprefix(DRAFTER)
        for start, stop in info.slabs(RECORD_BYTES):
            yield (
                start,
                cast(self.read_rows(published, start, stop), self.tensors[published].dtype, info.dtype),
            )

    def read_files(self) -> list[Path]:
        """Return the files with its tensors, and those that lie beside them."""
        weights = {self.path / tensor.file for tensor in self._stored.values()}
        return [*sorted(weights), *beside(self.path).files.values()]

    def unchanged(self) -> AbstractContextManager[None]:
        """Raise ReshardError at the end of the `with` block, naming them, where files were changed since this was
        made."""
        return self.versions.unchanged(self.read_files)

    def close(self) -> None:
        """Close the files."""
        self.files.close()
