"""Boxes of canonical tensors, read from where a source's files have them and written to where a destination's
will.

A conversion streams whole rows. A rank of a live model holds some rows, and some columns of them: it touches
no others, as far as that is faster.
"""

from itertools import pairwise
from math import prod
from typing import NamedTuple

import numpy as np

from reshard.core.boxes import Box
from reshard.disk.files import OpenFiles
from reshard.disk.sources import Source
from reshard.disk.streams import SLAB_BYTES, Scratch, Strip

# Columns that lie this far apart are read one row at a time: less is on the same pages of the disk anyhow, and
# costs less to read than another call.
GAP_BYTES, AROUND_BYTES = 16 << 10, 1 << 20


class Rows(NamedTuple):
    """A box of a canonical tensor as rows and columns; a tensor of one dim has one column."""

    start: int
    stop: int
    column: int
    columns: int

    @staticmethod
    def of(box: Box) -> "Rows":
        """The rows and columns of a box of at most two dims."""
        column, columns = (box.offsets[1], box.lengths[1]) if len(box.offsets) == 2 else (0, 1)
        return Rows(box.offsets[0], box.offsets[0] + box.lengths[0], column, columns)

    def slabs(self, itemsize: int, multiple: int = 1, slab_bytes: int = SLAB_BYTES) -> "list[Rows]":
        """Runs of these rows of about `slab_bytes` each. Where one ends before the last row, that row is a
        multiple of `multiple`."""
        step = max(1, slab_bytes // max(1, self.columns * itemsize * multiple)) * multiple
        cuts = [self.start, *range((self.start // step + 1) * step, self.stop, step), self.stop]
        return [self._replace(start=a, stop=b) for a, b in pairwise(cuts)]


class BoxReader:
    """Reads boxes of a source's canonical tensors; several threads may."""

    def __init__(self, source: Source) -> None:
        self.source, self.scratch = source, Scratch()
        self.strips: dict[str, list[Strip] | None] = {}

    def read(self, name: str, rows: Rows, out: np.ndarray) -> None:
        """Fill `out`, bytes ``[rows, bytes of a row]`` in the source's dtype, whose rows may lie apart."""
        if name not in self.strips:
            self.strips[name] = self.source.strips(name)
        strips = self.strips[name]
        if strips is None:
            found = self.source.read_rows(name, rows.start, rows.stop)
            out[:] = found[:, rows.column : rows.column + rows.columns].view(np.uint8)
            return
        read_box(self.source.files, strips, rows, out, self.scratch)


def read_box(files: OpenFiles, strips: list[Strip], rows: Rows, out: np.ndarray, scratch: Scratch) -> int:
    """Read these rows and columns, bytes ``[rows, bytes of a row]``, from the strips that have some of them; how
    many bytes were read for that. Raises ReshardError where a file cannot be read."""
    size, read = out.shape[1] // max(1, rows.columns), 0
    for strip in strips:
        piece = _common(rows, strip)
        if piece is not None:
            read += _read_piece(files, strip, piece, size, _inside(out, rows, piece, size), scratch)
    return read


def _read_piece(
    files: OpenFiles, strip: Strip, piece: Rows, size: int, out: np.ndarray, scratch: Scratch
) -> int:
    offset, pitch, width, read = _offset(strip, piece, size), strip.width * size, piece.columns * size, 0
    if out.flags.c_contiguous and (width == pitch or len(out) == 1):
        files.read_into(strip.path, offset, memoryview(out.reshape(-1)))
        return out.size
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


def write_box(files: OpenFiles, strips: list[Strip], rows: Rows, data: np.ndarray) -> None:
    """Write bytes ``[rows, bytes of a row]`` of a canonical tensor to the strips that have some of them."""
    size = data.shape[1] // rows.columns
    for strip in strips:
        piece = _common(rows, strip)
        if piece is None:
            continue
        found, offset = _inside(data, rows, piece, size), _offset(strip, piece, size)
        if piece.columns == strip.width or len(found) == 1:
            files.write(strip.path, offset, memoryview(np.ascontiguousarray(found).reshape(-1)))
        else:
            for i, row in enumerate(found):
                files.write(strip.path, offset + i * strip.width * size, memoryview(row))


def _common(rows: Rows, strip: Strip) -> Rows | None:
    """What a strip has of these rows and columns."""
    a, b = max(rows.start, strip.start), min(rows.stop, strip.stop)
    c, d = max(rows.column, strip.column), min(rows.column + rows.columns, strip.column + strip.columns)
    return Rows(a, b, c, d - c) if a < b and c < d else None


def _inside(array: np.ndarray, rows: Rows, piece: Rows, size: int) -> np.ndarray:
    """The bytes of a piece in an array that holds `rows`."""
    first = (piece.column - rows.column) * size
    return array[piece.start - rows.start : piece.stop - rows.start, first : first + piece.columns * size]


def _offset(strip: Strip, piece: Rows, size: int) -> int:
    return strip.offset + ((piece.start - strip.start) * strip.width + piece.column - strip.column) * size


def box_bytes(box: Box, itemsize: int) -> int:
    """Bytes of a box."""
    return prod(box.lengths) * itemsize
