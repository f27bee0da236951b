"""Published tensors of a directory of either format for somebody who takes them one by one: whole,
or boxes of them, read by threads ahead of the one that is wanted.

A Hugging Face directory is read as it is stored, of whatever architecture; a Megatron checkpoint by
its table.
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cache
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np

from reshard.formats import safetensors
from reshard.megatron.parameters import expand
from reshard.storage.io.boxes import BoxReader, Rows
from reshard.storage.io.files import OpenFiles
from reshard.storage.io.streams import Strip, TensorInfo
from reshard.storage.sources.megatron import MegatronSource
from reshard.storage.sources.versions import FileVersions

# Of what is read ahead of the tensor that is wanted, in all.
AHEAD_BYTES = 256 << 20
# One thread's part of a large box.
PIECE_BYTES = 8 << 20


class TensorSlice(NamedTuple):
    """Rows `start` .. `stop` and columns `column` .. `column + columns` of a published tensor, as
    `TensorInfo` counts both. `key` belongs to the caller."""

    key: Hashable
    name: str
    start: int
    stop: int
    column: int
    columns: int


@dataclass
class Weights:
    """The published tensors of a directory: shapes and dtypes by name, where each lies, a check that
    its files are those that were opened, and the
    views that some are of what published files have under other names."""

    tensors: dict[str, TensorInfo]
    strips: Callable[[str], list[Strip]]
    files: OpenFiles
    # around what reads: raises ReshardError where files were changed since they were opened
    unchanged: Callable[[], AbstractContextManager[None]]
    packed: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.reader = BoxReader(self.tensors, self.files, self.strips)

    @property
    def read_bytes(self) -> int:
        """Bytes read from the files so far."""
        return self.reader.read_bytes

    def whole(self, name: str) -> TensorSlice:
        """Return a whole tensor as one region."""
        info = self.tensors[name]
        return TensorSlice(name, name, 0, info.rows, 0, info.columns)

    def region_bytes(self, region: TensorSlice) -> int:
        """Return the bytes of a region."""
        return (region.stop - region.start) * region.columns * self.tensors[region.name].dtype.size

    def read_into(self, region: TensorSlice, out: np.ndarray) -> None:
        """Read a region into bytes ``[rows, columns * size]``. Raises ReshardError if a file
        cannot be read."""
        self.reader.read(region.name, Rows(region.start, region.stop, region.column, region.columns), out)

    def read_ahead(
        self, regions: Iterable[TensorSlice], allocate: Callable[[int], np.ndarray], threads: int
    ) -> Iterator[tuple[TensorSlice, np.ndarray]]:
        """Yield each region in turn, with its bytes ``[rows, columns * size]``, in memory that
        `allocate(bytes)` gives.

        No more than `AHEAD_BYTES`, or one region, is held besides the region that was yielded.
        """
        waiting: deque[tuple[TensorSlice, np.ndarray, list[Future]]] = deque()
        held = 0
        with ThreadPoolExecutor(threads, "reshard-read") as pool:

            def start(region: TensorSlice) -> None:
                nonlocal held
                held += self.region_bytes(region)
                rows, width = (
                    region.stop - region.start,
                    region.columns * self.tensors[region.name].dtype.size,
                )
                out = allocate(rows * width)[: rows * width].reshape(rows, width)
                step = max(1, PIECE_BYTES // max(1, width))
                parts = range(region.start, region.stop, step)
                waiting.append((region, out, [pool.submit(self._part, region, a, step, out) for a in parts]))

            def first() -> tuple[TensorSlice, np.ndarray]:
                nonlocal held
                region, out, parts = waiting.popleft()
                for part in parts:
                    part.result()
                held -= self.region_bytes(region)
                return region, out

            try:
                for region in regions:
                    while waiting and held + self.region_bytes(region) > AHEAD_BYTES:
                        yield first()
                    start(region)
                while waiting:
                    yield first()
            finally:
                for _, _, parts in waiting:
                    for part in parts:
                        part.cancel()

    def _part(self, region: TensorSlice, start: int, step: int, out: np.ndarray) -> None:
        stop = min(start + step, region.stop)
        rows = out[start - region.start : stop - region.start]
        self.read_into(region._replace(start=start, stop=stop), rows)

    def close(self) -> None:
        """Close the files."""
        self.files.close()


def weights_of_megatron(source: MegatronSource) -> Weights:
    """Return the weights of a Megatron checkpoint by published name, with tied ones. Closing them
    closes the source. Some may be views of what a file has under the published name."""
    model = source.model
    packed = {} if model.family.experts_apart else expand(model).packed
    return Weights(dict(source.held), cache(source.strips), source.files, source.unchanged, packed)


def weights_of_huggingface(path: Path) -> Weights:
    """Return the weights of a Hugging Face directory as its files have them. Raises ReshardError
    if these are damaged."""
    versions = FileVersions(path)
    stored = safetensors.read_directory(path)
    files = [path / safetensors.INDEX, *sorted({path / tensor.file for tensor in stored.values()})]
    tensors = {name: TensorInfo(tensor.shape, tensor.dtype) for name, tensor in stored.items()}

    def strips(name: str) -> list[Strip]:
        info, tensor = tensors[name], stored[name]
        width = info.columns
        return (
            [Strip(0, info.rows, 0, width, path / tensor.file, tensor.offset, width)]
            if prod(info.shape)
            else []
        )

    return Weights(tensors, strips, OpenFiles(), lambda: versions.unchanged(lambda: files))
