"""The disk executor: canonical tensors, a slab of rows at a time, from where they lie to where they
go.

A canonical tensor is a matrix of rows (dim 0). A *strip* says where a run of rows, or some columns
of them, lies in a file. The executor reads a slab through the source's strips, converts and hashes
it, and writes it through the destination's: memory stays at a slab for each worker, whatever the
size of the model.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np

from reshard.core.dtypes import Dtype
from reshard.core.errors import ReshardError
from reshard.core.scratch import Scratch
from reshard.core.views import View
from reshard.storage.io.casts import less_one, plus_one
from reshard.storage.io.files import OpenFiles

# Small enough that a slab is still in the core's cache when it is hashed and written, large enough
# that calls cost little.
SLAB_BYTES = 512 << 10


class Strip(NamedTuple):
    """Rows `start` .. `stop` and columns `column` .. `column + columns` of a canonical tensor lie
    in a file.

    The first element is at byte `offset`; rows follow each other every `width` elements.
    """

    start: int
    stop: int
    column: int
    columns: int
    path: Path
    offset: int
    width: int


def strip_of(
    box_offsets: tuple[int, ...],
    lengths: tuple[int, ...],
    at: tuple[int, ...],
    shape: tuple[int, ...],
    path: Path,
    tensor_offset: int,
    itemsize: int,
) -> Strip:
    """Return the strip of a box that lies at `at` in a row-major tensor of `shape`, which starts at
    byte `tensor_offset` of a file."""
    if len(shape) > 2 and lengths[1:] != shape[1:]:
        raise ReshardError(f"{path}: a box of some columns of a tensor of {len(shape)} dims has no strip")
    two_dims = len(shape) == 2
    width, columns = prod(shape[1:]), prod(lengths[1:])
    first = at[0] * width + (at[1] if two_dims else 0)
    column = box_offsets[1] if two_dims else 0
    return Strip(
        box_offsets[0],
        box_offsets[0] + lengths[0],
        column,
        columns,
        path,
        tensor_offset + first * itemsize,
        width,
    )


def strips_of_view(
    name: str, tensor_shape: tuple[int, ...], path: Path, tensor_offset: int, itemsize: int
) -> list[Strip]:
    """Return the strips of a canonical tensor that is a stored tensor of this shape, or a view of one that
    takes whole rows. The tensor starts at byte `tensor_offset` of a file."""
    view, row, strips = View.parse(name), 0, list[Strip]()
    columns = prod(tensor_shape[view.row_dim + 1 :])
    for piece in view.pieces(tensor_shape):
        rows, rest = divmod(piece.length, columns)
        if rest:
            raise ReshardError(f"{path}: {name} takes some columns of rows, which has no strips")
        offset = tensor_offset + piece.start * itemsize
        strips.append(Strip(row, row + rows, 0, columns, path, offset, columns))
        row += rows
    return strips


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Shape and dtype of a canonical tensor."""

    shape: tuple[int, ...]
    dtype: Dtype

    @property
    def rows(self) -> int:
        """Length of dim 0."""
        return self.shape[0] if self.shape else 1

    @property
    def columns(self) -> int:
        """Elements in a row."""
        return prod(self.shape[1:])

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return prod(self.shape) * self.dtype.size

    def slabs(self, slab_bytes: int = SLAB_BYTES, multiple: int = 1) -> Iterable[tuple[int, int]]:
        """Yield runs of rows of about `slab_bytes`, each a multiple of `multiple` rows."""
        step = max(1, slab_bytes // max(1, self.columns * self.dtype.size * multiple)) * multiple
        return ((start, min(start + step, self.rows)) for start in range(0, self.rows, step))


class StripReader:
    """Reads canonical tensors that lie in files as strips; those that the files hold `less_one`, plus 1."""

    def __init__(
        self, tensors: Mapping[str, TensorInfo], files: OpenFiles, less_one: Collection[str] = ()
    ) -> None:
        self.tensors, self.files, self.scratch = tensors, files, Scratch()
        self.less_one = less_one

    def read_rows(self, name: str, start: int, stop: int, strips: list[Strip]) -> np.ndarray:
        """Read rows `start` .. `stop` of a tensor: an array ``[rows, columns]`` of its dtype, valid
        until the thread's next call."""
        info = self.tensors[name]
        size = info.dtype.size
        slab = self.scratch.array("slab", stop - start, info.columns * size)
        for strip in strips:
            a, b = max(start, strip.start), min(stop, strip.stop)
            if a >= b:
                continue
            offset = strip.offset + (a - strip.start) * strip.width * size
            if strip.columns == strip.width == info.columns:
                self.files.read_into(strip.path, offset, memoryview(slab[a - start : b - start].reshape(-1)))
            else:
                # Whole source rows are read, also where only some columns are wanted: one large
                # read beats many small ones.
                needed = ((b - a - 1) * strip.width + strip.columns) * size
                rows = self.scratch.array("rows", b - a, strip.width * size)
                self.files.read_into(strip.path, offset, memoryview(rows.reshape(-1)[:needed]))
                columns = slice(strip.column * size, (strip.column + strip.columns) * size)
                slab[a - start : b - start, columns] = rows[:, : strip.columns * size]
        numbers = slab.view(info.dtype.numpy())
        return plus_one(numbers) if name in self.less_one else numbers


class StripWriter:
    """Writes canonical tensors to files as strips; those that the files hold `less_one`, less 1."""

    def __init__(
        self, strips: Mapping[str, list[Strip]], files: OpenFiles, less_one: Collection[str] = ()
    ) -> None:
        self.strips, self.files, self.less_one = strips, files, less_one

    def write_rows(self, name: str, start: int, slab: np.ndarray) -> None:
        """Write an array ``[rows, columns]`` that begins at row `start` of a tensor."""
        if name in self.less_one:
            slab = less_one(slab, name)
        size = slab.itemsize
        raw = slab.view(np.uint8)
        for strip in self.strips.get(name, ()):
            a, b = max(start, strip.start), min(start + len(slab), strip.stop)
            if a >= b:
                continue
            offset = strip.offset + (a - strip.start) * strip.width * size
            rows = raw[a - start : b - start, strip.column * size : (strip.column + strip.columns) * size]
            if strip.columns == strip.width:
                self.files.write(strip.path, offset, memoryview(np.ascontiguousarray(rows).reshape(-1)))
            else:
                for i, row in enumerate(rows):
                    self.files.write(strip.path, offset + i * strip.width * size, memoryview(row))


def grouped_strips(strips: Iterable[tuple[str, Strip]]) -> dict[str, list[Strip]]:
    """Return strips by canonical tensor."""
    groups: dict[str, list[Strip]] = defaultdict(list)
    for name, strip in strips:
        groups[name].append(strip)
    return dict(groups)
