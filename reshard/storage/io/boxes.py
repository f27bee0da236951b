"""Boxes of canonical tensors, read from a source's files and written to a destination's.

A conversion streams whole rows. A rank of a live model holds some rows, and some columns of them:
it touches no others, as far as that is faster.
"""

import threading
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np

from reshard.core.boxes import Box
from reshard.core.scratch import Scratch
from reshard.storage.io.casts import cast
from reshard.storage.io.files import OpenFiles
from reshard.storage.io.streams import SLAB_BYTES, MatrixColumns, Strip, TensorInfo, chosen_columns

# Columns that lie this far apart are read one row at a time: less is on the same pages of the disk
# anyhow, and costs less to read than another call.
GAP_BYTES, AROUND_BYTES = 16 << 10, 1 << 20
# Of a call that reads neighbors: what is read between two of them, such as a container's head, and
# how many buffers the system takes.
MOST_BETWEEN_BYTES, MOST_BUFFERS = 4 << 10, 1000


class Rows(NamedTuple):
    """A box of a canonical tensor as rows and columns; a tensor of one dim has one column."""

    start: int
    stop: int
    column: int
    columns: int

    @staticmethod
    def of(box: Box) -> "Rows":
        """Return the rows and columns of a box; of more than two dims all but the first are whole. A tensor
        without dims has one of each."""
        if not box.offsets:
            return Rows(0, 1, 0, 1)
        column = box.offsets[1] if len(box.offsets) == 2 else 0
        columns = prod(box.lengths[1:])
        return Rows(box.offsets[0], box.offsets[0] + box.lengths[0], column, columns)

    def intersect(self, other: "Rows | Strip") -> "Rows | None":
        """Return the rows and columns that both have; None if they have none in common."""
        start, stop = max(self.start, other.start), min(self.stop, other.stop)
        column = max(self.column, other.column)
        columns = min(self.column + self.columns, other.column + other.columns) - column
        return Rows(start, stop, column, columns) if start < stop and columns > 0 else None

    def slabs(self, itemsize: int, multiple: int = 1, slab_bytes: int = SLAB_BYTES) -> "list[Rows]":
        """Split these rows into runs of about `slab_bytes` each. A run that ends before the last
        row ends at a multiple of `multiple`."""
        step = max(1, slab_bytes // max(1, self.columns * itemsize * multiple)) * multiple
        cuts = [self.start, *range((self.start // step + 1) * step, self.stop, step), self.stop]
        return [self._replace(start=a, stop=b) for a, b in pairwise(cuts)]


class Wanted(NamedTuple):
    """A box of a canonical tensor, and the bytes ``[rows, bytes of a row]`` that it fills. The rows
    of `out` may lie apart."""

    name: str
    rows: Rows
    out: np.ndarray


class BoxReader:
    """Reads rows and boxes of the `tensors` in files, in the dtypes in which these hold them; several threads may use
    one.

    `strips` gives the strips of a tensor, or None for one whose whole rows `compute` makes.
    `read_bytes` counts the bytes read from files so far.
    """

    def __init__(
        self,
        tensors: Mapping[str, TensorInfo],
        files: OpenFiles,
        strips: Callable[[str], list[Strip] | None],
        compute: Callable[[str, int, int], np.ndarray] | None = None,
    ) -> None:
        self.tensors, self.files, self.compute = tensors, files, compute
        self.strips, self.scratch, self.matrix_columns = cache(strips), Scratch(), MatrixColumns()
        self.read_bytes, self._lock = 0, threading.Lock()

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Read whole rows of a tensor, ``[rows, columns]`` of its dtype; valid until the thread's next call."""
        if self.strips(name) is None:
            assert self.compute is not None
            return self.compute(name, start, stop)
        info = self.tensors[name]
        rows = self.scratch.array("rows", stop - start, info.columns * info.dtype.size)
        self.read(name, Rows(start, stop, 0, info.columns), rows)
        return rows.view(info.dtype.numpy())

    def published(self, name: str, start: int, stop: int) -> np.ndarray:
        """Read whole rows as `rows` does, as they are published."""
        dtype = self.tensors[name].dtype
        return cast(self.rows(name, start, stop), dtype, dtype.published)

    def read(self, name: str, rows: Rows, out: np.ndarray) -> None:
        """Fill `out`, bytes ``[rows, bytes of a row]``, whose rows may lie apart."""
        self.read_all([Wanted(name, rows, out)])

    def read_all(self, wanted: Iterable[Wanted]) -> None:
        """Fill several, neighbors in a file by one call. Raises ReshardError if a file cannot be read."""
        read, run = 0, _Run(self.files, self.scratch)
        for name, rows, out in wanted:
            strips = self.strips(name)
            if strips is None:
                assert self.compute is not None
                computed = self.compute(name, rows.start, rows.stop)
                out[:] = computed[:, rows.column : rows.column + rows.columns].view(np.uint8)
                continue
            size = out.shape[1] // max(1, rows.columns)
            for strip in strips:
                piece = rows.intersect(strip)
                if piece is None:
                    continue
                part = _inside(out, rows, piece, size)
                if strip.transposed is not None:
                    matrix = self.matrix_columns.read(strip, size, self.files)
                    columns = slice(piece.column, piece.column + piece.columns)
                    part.view(f"u{size}")[:] = chosen_columns(matrix, strip, piece.start, piece.stop)[
                        :, columns
                    ]
                    read += part.size
                elif part.flags.c_contiguous and (piece.columns == strip.width or len(part) == 1):
                    read += run.add(strip.path, _offset(strip, piece, size), memoryview(part.reshape(-1)))
                else:
                    offset = _offset(strip, piece, size)
                    read += _read_apart(self.files, strip, offset, part, size, self.scratch)
        read += run.end()
        with self._lock:
            self.read_bytes += read


class _Run:
    """Bytes of a file that follow one another, but for small gaps, and that one call reads."""

    def __init__(self, files: OpenFiles, scratch: Scratch) -> None:
        self.files, self.scratch = files, scratch
        self.path: Path | None = None
        self.start = self.stop = 0
        self.buffers: list[memoryview] = []

    def add(self, path: Path, offset: int, buffer: memoryview) -> int:
        """Add bytes at an offset. Return how many bytes were read, where that ended the run before."""
        gap, more = offset - self.stop, 0
        if path != self.path or not 0 <= gap <= MOST_BETWEEN_BYTES or len(self.buffers) >= MOST_BUFFERS:
            more = self.end()
            self.path, self.start = path, offset
        elif gap:
            self.buffers.append(memoryview(self.scratch.array("between", 1, gap)[0]))
        self.buffers.append(buffer)
        self.stop = offset + len(buffer)
        return more

    def end(self) -> int:
        """Read what was added; return how many bytes that were."""
        if self.path is None:
            return 0
        self.files.read_into(self.path, self.start, *self.buffers)
        self.path, self.buffers = None, []
        return self.stop - self.start


def _read_apart(
    files: OpenFiles, strip: Strip, offset: int, out: np.ndarray, size: int, scratch: Scratch
) -> int:
    """Read rows that lie apart, in the file or where they go."""
    pitch, width, read = strip.width * size, out.shape[1], 0
    if pitch - width >= GAP_BYTES:
        for i, row in enumerate(out):
            files.read_into(strip.path, offset + i * pitch, memoryview(row))
        return out.size
    step = max(1, AROUND_BYTES // pitch)
    for first in range(0, len(out), step):
        rows = out[first : first + step]
        around = scratch.array("around", len(rows), pitch)
        span = memoryview(around.reshape(-1)[: (len(rows) - 1) * pitch + width])
        files.read_into(strip.path, offset + first * pitch, span)
        rows[:] = around[:, :width]
        read += len(span)
    return read


def place_of(strips: Iterable[Strip], rows: Rows, size: int) -> tuple[str, int]:
    """Return the file and the byte at which a box of numbers of `size` bytes begins. Sorted by
    these, neighbors follow one another."""
    for strip in strips:
        if strip.transposed is not None:
            return str(strip.path), strip.offset
        piece = _common(rows, strip)
        if piece is not None:
            return str(strip.path), _offset(strip, piece, size)
    return "", 0


def write_boxes(files: OpenFiles, boxes: Iterable[tuple[list[Strip], Rows, np.ndarray]]) -> None:
    """Write rows and columns, bytes ``[rows, bytes of a row]``, to the strips that have some of
    them, neighbors in a file by one call. Raises ReshardError if a file cannot be written."""
    path, start, stop, waiting = Path(), 0, 0, list[np.ndarray]()

    def write() -> None:
        if waiting:
            files.write(path, start, *(memoryview(array) for array in waiting))
            waiting.clear()

    for strips, rows, data in boxes:
        size = data.shape[1] // rows.columns
        for strip in strips:
            piece = _common(rows, strip)
            if piece is None:
                continue
            part, offset = _inside(data, rows, piece, size), _offset(strip, piece, size)
            if piece.columns != strip.width and len(part) > 1:
                for i, row in enumerate(part):
                    files.write(strip.path, offset + i * strip.width * size, memoryview(row))
                continue
            if strip.path != path or offset != stop or len(waiting) >= MOST_BUFFERS:
                write()
                path, start = strip.path, offset
            waiting.append(np.ascontiguousarray(part).reshape(-1))
            stop = offset + waiting[-1].size
    write()


def _common(rows: Rows, strip: Strip) -> Rows | None:
    """Return the part of these rows and columns that a strip has; None if it has none."""
    assert strip.transposed is None, f"{strip.path}: boxes are not those of a transposed matrix"
    return rows.intersect(strip)


def _inside(array: np.ndarray, rows: Rows, piece: Rows, size: int) -> np.ndarray:
    """Return the bytes of a piece in an array that holds `rows`."""
    first = (piece.column - rows.column) * size
    return array[piece.start - rows.start : piece.stop - rows.start, first : first + piece.columns * size]


def _offset(strip: Strip, piece: Rows, size: int) -> int:
    return strip.offset + ((piece.start - strip.start) * strip.width + piece.column - strip.column) * size


def box_bytes(box: Box, itemsize: int) -> int:
    """Return the bytes of a box."""
    return prod(box.lengths) * itemsize
