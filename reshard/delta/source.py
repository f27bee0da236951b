"""A checkpoint with the deltas of a chain applied to it, read as one source."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from reshard.core.errors import ReshardError
from reshard.delta.chain import Chain, check_digest, check_tensors
from reshard.delta.files import DeltaFiles
from reshard.delta.manifests import BASE, Delta
from reshard.delta.records import RECORD_BYTES
from reshard.digests.numbers import bits_of, seed_of, start_of, sum_change, sum_rows, text_of, total_of
from reshard.storage.io.casts import cast
from reshard.storage.io.files import OpenFiles
from reshard.storage.io.streams import TensorInfo
from reshard.storage.run.workers import Progress, run_jobs
from reshard.storage.sources.base import Source
from reshard.storage.sources.derived import DerivedSource


def own_tensors(source: Source) -> dict[str, TensorInfo]:
    """Return the tensors of a source that repeat no other. Raises ReshardError if they are stored as codes."""
    coded = source.dequantized_names()
    if coded:
        raise ReshardError(
            f"{source.path} is quantized ({coded[0]} and {len(coded) - 1} more), and deltas are of plain weights: "
            f"give the checkpoint that it was made of"
        )
    return {name: info for name, info in source.tensors.items() if name not in source.copies}


class DeltaSource(DerivedSource):
    """The tensors of `base` as they are after these deltas of a chain, in the dtypes of the chain: a trainer
    may hold some in fp32 that its checkpoint has in bf16. A drafter is left out. Raises ReshardError if the base has
    others."""

    kind = "delta"

    def __init__(self, base: Source, chain: Chain, deltas: list[Delta]) -> None:
        self.begun = chain.base.of_model()
        check_tensors(self.begun, own_tensors(base), str(base.path), chain.where, may_widen=True)
        super().__init__(base)
        self.tensors = {name: self.begun.tensors[base.copies.get(name, name)] for name in base.tensors}
        self.chain = chain
        self.delta_files = OpenFiles()
        self.deltas = [DeltaFiles(chain, delta, self.delta_files) for delta in deltas]
        self.changed_names = {name for files in self.deltas for name in files.records}
        self.changed_names |= {name for name, info in self.tensors.items() if info != base.tensors[name]}

    def check(self, workers: int | None = None, progress: Progress | None = None) -> None:
        """Raise ReshardError unless the base's weights, and those after each delta, have the digests that the
        chain says. Everything is read and decoded once, and nothing is kept."""
        sizes = {name: info.size_bytes for name, info in self.begun.tensors.items()}
        parts = run_jobs(sizes, self._digests, workers, progress)
        sums = [total_of(of_tensor[i] for of_tensor in parts.values()) for i in range(len(self.deltas) + 1)]
        base, where = self.begun, self.chain.where
        check_digest(base, text_of(sums[0]), str(self.path), where)
        for number, files in enumerate(self.deltas, 1):
            if text_of(total_of(sums[: number + 1])) != files.delta.of_model:
                raise ReshardError(
                    f"{where}: version {files.delta.version} does not give the weights that it says: begin a new chain"
                )

    def _digests(self, name: str) -> list[int]:
        """Return what a tensor adds to the digest, and what each delta adds to that."""
        seed, info = seed_of(name, self.tensors[name]), self.tensors[name]
        parts = [start_of(seed), *(0 for _ in self.deltas)]
        for start, stop in info.slabs(RECORD_BYTES, self.base.row_multiple(name)):
            rows = self._base_rows(name, start, stop)
            parts[0] += sum_rows(seed, rows, start)
            bits = bits_of(rows)
            for number, files in enumerate(self.deltas, 1):
                for change in files.changes(name, start, stop):
                    at = change.rows - start, change.columns
                    parts[number] += sum_change(seed, bits[at], change.values, change.rows, change.columns)
                    bits[at] = change.values
        return parts

    def changed_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        rows, primary = self._base_rows(name, start, stop), self.copies.get(name, name)
        bits = bits_of(rows)
        for files in self.deltas:
            for change in files.changes(primary, start, stop):
                bits[change.rows - start, change.columns] = change.values
        return rows

    def _base_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Read rows of the base in the dtype of the chain, to be changed in place."""
        return cast(
            self.base.read_rows(name, start, stop), self.base.tensors[name].dtype, self.tensors[name].dtype
        )

    def row_multiple(self, name: str) -> int:
        """The rows of a step: as many as a record has, so that each is decoded once."""
        info, multiple = self.tensors[name], self.base.row_multiple(name)
        if not self.changes(name):
            return multiple
        rows = RECORD_BYTES // max(1, info.columns * info.dtype.size)
        return max(1, min(rows, info.rows) // multiple) * multiple

    def changes(self, name: str) -> bool:
        return self.copies.get(name, name) in self.changed_names

    def read_files(self) -> list[Path]:
        changes = (path for files in self.deltas for path in files.paths)
        return [*self.base.read_files(), self.chain.store.local(BASE), *changes]

    def pinned_files(self) -> list[Path]:
        return self.base.pinned_files()

    def identity(self) -> tuple[list[Any], list[Any]]:
        contents, places = self.base.identity()
        return [*contents, [self.begun.digest, *(files.delta.of_model for files in self.deltas)]], places

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        with self.base.unchanged(), self.chain.unchanged():
            yield

    def close(self) -> None:
        """Close the files of the deltas; those of the base are its opener's."""
        self.delta_files.close()
