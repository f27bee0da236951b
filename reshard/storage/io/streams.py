"""Where canonical tensors lie in files, and what writes them there, a slab of rows at a time.

A canonical tensor is a matrix of rows (dim 0). A *strip* says where a run of rows, or some columns
of them, lies in a file. A conversion reads a slab through the source's strips (`reshard.storage.io.boxes`), casts
and hashes it, and writes it through the destination's: memory stays at a slab for each worker, whatever
the size of the model.
"""

import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np

from reshard.core.dtypes import Dtype
from reshard.core.errors import ReshardError
from reshard.core.scratch import Scratch
from reshard.core.views import View, tensor_of
from reshard.formats.safetensors import Tensor
from reshard.storage.io.files import OpenFiles

# Small enough that a slab is still in the core's cache when it is hashed and written, large enough
# that calls cost little.
SLAB_BYTES = 512 << 10
TILE = 128  # rows and columns that are transposed at once


class Transposed(NamedTuple):
    """The columns of a file's matrix that a strip's rows are: `first`, and every `step`-th after it."""

    first: int
    step: int


class Strip(NamedTuple):
    """Rows `start` .. `stop` and columns `column` .. `column + columns` of a canonical tensor lie
    in a file.

    The first element is at byte `offset`; rows follow each other every `width` elements. Where it
    is `transposed`, the strip has whole rows, and the file has a matrix ``[columns, width]`` at
    `offset`, some of whose columns these are.
    """

    start: int
    stop: int
    column: int
    columns: int
    path: Path
    offset: int
    width: int
    transposed: Transposed | None = None


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
    takes whole rows, or whole columns of a transposed matrix. The tensor starts at byte `tensor_offset` of
    a file."""
    view, row, strips = View.parse(name), 0, list[Strip]()
    if view.transposed:
        return _transposed_strips(view, tensor_shape, path, tensor_offset, itemsize)
    columns = prod(tensor_shape[view.row_dim + 1 :])
    pieces = view.pieces(tensor_shape)
    if any(piece.length % columns for piece in pieces):
        raise ReshardError(f"{path}: {name} takes some columns of rows, which has no strips")
    pitch = pieces[1].start - pieces[0].start if len(pieces) > 1 else 0
    if pitch and all(piece == (pieces[0].start + i * pitch, columns) for i, piece in enumerate(pieces)):
        offset = tensor_offset + pieces[0].start * itemsize  # one row of every few
        return [Strip(0, len(pieces), 0, columns, path, offset, pitch)]
    for piece in pieces:
        rows = piece.length // columns
        offset = tensor_offset + piece.start * itemsize
        strips.append(Strip(row, row + rows, 0, columns, path, offset, columns))
        row += rows
    return strips


def _transposed_strips(
    view: View, tensor_shape: tuple[int, ...], path: Path, tensor_offset: int, itemsize: int
) -> list[Strip]:
    """Return the strips of a transposed view ``[indexes, rows, columns].T``: one where it takes all
    columns, a run of them or one of every few, else one for each run."""
    selections = view.by_dim(len(tensor_shape))
    indexes, rows, columns = selections[:-2], selections[-2], selections[-1]
    height, width = tensor_shape[-2:]
    if (
        any(not index.drops for index in indexes)
        or rows.drops
        or columns.drops
        or len(rows.runs(height)) != 1
    ):
        raise ReshardError(f"{path}: {view.tensor} is transposed in a way that has no strips")
    matrix = 0
    for index, size in zip(indexes, tensor_shape[:-2], strict=True):
        matrix = matrix * size + index.start
    [(first_row, stored_rows)] = rows.runs(height)
    offset = tensor_offset + (matrix * height + first_row) * width * itemsize
    if columns.period and columns.length == 1:
        every = Transposed(columns.start, columns.period)
        return [Strip(0, columns.selected(width), 0, stored_rows, path, offset, width, every)]
    strips, row = [], 0
    for first, length in columns.runs(width):
        strips.append(Strip(row, row + length, 0, stored_rows, path, offset, width, Transposed(first, 1)))
        row += length
    return strips


def largest_matrix(places: Iterable[str], tensors: Mapping[str, Tensor]) -> int:
    """Return the bytes of the largest matrix among these stored tensors of which a view at one of
    these places is transposed; 0 without any."""
    transposed = {tensor_of(place) for place in places if place.endswith(".T")}
    matrices = [tensors[name] for name in transposed if name in tensors]
    return max((prod(matrix.shape[-2:]) * matrix.dtype.size for matrix in matrices), default=0)


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


class StripWriter:
    """Writes canonical tensors to files as strips, as the files hold them.

    Of transposed matrices each tensor has some columns: tensors that share one are written one after the
    other by one thread, inside `whole_matrices`, and their bytes when all are there.
    """

    def __init__(self, strips: Mapping[str, list[Strip]], files: OpenFiles) -> None:
        self.strips, self.files, self.matrix_columns = strips, files, MatrixColumns()

    def write_rows(self, name: str, start: int, slab: np.ndarray) -> None:
        """Write an array ``[rows, columns]`` that begins at row `start` of a tensor."""
        size = slab.itemsize
        raw = slab.view(np.uint8)
        for strip in self.strips.get(name, ()):
            a, b = max(start, strip.start), min(start + len(slab), strip.stop)
            if a >= b:
                continue
            offset = strip.offset + (a - strip.start) * strip.width * size
            rows = raw[a - start : b - start, strip.column * size : (strip.column + strip.columns) * size]
            if strip.transposed is not None:
                matrix_columns = self.matrix_columns.filled(strip, size, (b - a) * strip.columns)
                chosen_columns(matrix_columns, strip, a, b)[:] = rows.view(f"u{size}")
                self.matrix_columns.write_if_full(size, self.files)
            elif strip.columns == strip.width:
                self.files.write(strip.path, offset, memoryview(np.ascontiguousarray(rows).reshape(-1)))
            else:
                for i, row in enumerate(rows):
                    self.files.write(strip.path, offset + i * strip.width * size, memoryview(row))

    def takes(self, name: str, start: int, stop: int) -> bool:
        """Return True if some of rows `start` .. `stop` of a tensor are written."""
        return any(strip.start < stop and strip.stop > start for strip in self.strips.get(name, ()))

    @contextmanager
    def whole_matrices(self) -> Iterator[None]:
        """Hold a transposed matrix in memory until all of its columns are there. Raises
        AssertionError where some are not at the end."""
        try:
            yield
            assert self.matrix_columns.place is None, (
                f"{self.matrix_columns.place}: numbers of a matrix are missing"
            )
        finally:
            self.matrix_columns.place = None


class MatrixColumns(threading.local):
    """The columns of the transposed matrix that a thread works on, as rows ``[width, columns]``:
    where it lies, and how many numbers are missing."""

    def __init__(self) -> None:
        self.scratch = Scratch()
        self.place: tuple[Path, int, int, int] | None = None
        self.missing = 0

    def read(self, strip: Strip, size: int, files: OpenFiles) -> np.ndarray:
        """Return the columns of a strip's matrix, of numbers of `size` bytes. It is read from the
        file, unless it is the one that was read last: rows of a tensor are asked for a slab at a
        time."""
        place = (strip.path, strip.offset, strip.width, strip.columns)
        columns = self._array("columns", strip.width, strip.columns, size)
        if place != self.place:
            self.place = None
            matrix = self._array("matrix", strip.columns, strip.width, size)
            files.read_into(strip.path, strip.offset, memoryview(matrix.view(np.uint8).reshape(-1)))
            transpose(matrix, columns)
            self.place = place
        return columns

    def filled(self, strip: Strip, size: int, count: int) -> np.ndarray:
        """Return the columns of a strip's matrix, `count` of whose numbers the caller fills in."""
        place = (strip.path, strip.offset, strip.width, strip.columns)
        if place != self.place:
            assert self.place is None, f"{self.place}: numbers of a matrix are missing"
            self.place, self.missing = place, strip.columns * strip.width
        self.missing -= count
        return self._array("columns", strip.width, strip.columns, size)

    def write_if_full(self, size: int, files: OpenFiles) -> None:
        """Write the matrix that is put together once no number of it is missing."""
        if self.place is not None and self.missing == 0:
            path, offset, width, columns = self.place
            matrix = self._array("matrix", columns, width, size)
            transpose(self._array("columns", width, columns, size), matrix)
            files.write(path, offset, memoryview(matrix.view(np.uint8).reshape(-1)))
            self.place = None

    def _array(self, use: str, rows: int, columns: int, size: int) -> np.ndarray:
        return self.scratch.array(use, rows, columns * size).view(f"u{size}")


def transpose(matrix: np.ndarray, out: np.ndarray) -> None:
    """Write ``matrix.T`` to `out`, a tile at a time, which stays in the core's cache."""
    rows, columns = matrix.shape
    for row in range(0, rows, TILE):
        for column in range(0, columns, TILE):
            tile = matrix[row : row + TILE, column : column + TILE]
            out[column : column + TILE, row : row + TILE] = tile.T


def chosen_columns(columns: np.ndarray, strip: Strip, start: int, stop: int) -> np.ndarray:
    """Return a matrix's columns, of all of them, that are rows `start` .. `stop` of a tensor: a view."""
    assert strip.transposed is not None
    first, step = strip.transposed
    chosen = range(first, strip.width, step)[start - strip.start : stop - strip.start]
    return columns[chosen.start : chosen.stop : step]


def grouped_strips(strips: Iterable[tuple[str, Strip]]) -> dict[str, list[Strip]]:
    """Return strips by canonical tensor."""
    groups: dict[str, list[Strip]] = defaultdict(list)
    for name, strip in strips:
        groups[name].append(strip)
    return dict(groups)
