"""Where the rows of a canonical tensor lie, if the stored tensor that it is in was saved as chunks.

A chunk is a box of the stored tensor, row-major in a place of its own. Chunks of FSDP have whole indices of the first
dim, those of tensor parallel layers some columns, those of experts some rows of each.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import product
from math import prod
from pathlib import Path
from typing import NamedTuple

from reshard.core.errors import ReshardError
from reshard.storage.io.streams import Strip, strips_of_view


class Chunk(NamedTuple):
    """A box of a stored tensor, row-major from byte `at` of a file on."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    path: Path
    at: int


class Run(NamedTuple):
    """Elements `start` .. `stop` of a row-major tensor, which are `local` .. of a chunk's own."""

    start: int
    stop: int
    local: int
    chunk: Chunk


class ChunkedTensor:
    """A stored tensor of this shape, in `chunks` that cover it exactly once."""

    def __init__(self, name: str, shape: tuple[int, ...], chunks: Sequence[Chunk], itemsize: int) -> None:
        self.name, self.shape, self.itemsize = name, shape, itemsize
        self.chunks = [chunk for chunk in chunks if prod(chunk.sizes)]
        # The last dim of which a chunk has a part: elements of the dims after it follow one another in every chunk.
        self.dim = max((_last_split(chunk, shape) for chunk in self.chunks), default=0)
        self.inner = prod(shape[self.dim + 1 :])
        self.runs: list[Run] | None = None

    def strips(self, place: str) -> list[Strip]:
        """Return the strips of the canonical tensor that is this tensor, or the view `place` of it. Raises
        ReshardError for a transposed matrix that lies in several chunks."""
        strips: list[Strip] = []
        whole = strips_of_view(place, self.shape, Path(), 0, 1)
        for strip in whole:
            if strip.transposed is not None:
                strips.append(self._transposed(strip))
            elif strip.columns and self.inner % strip.columns:
                strips += self._columns(strip)
            else:
                strips += self._rows(strip)
        if sum(map(_elements, strips)) != sum(map(_elements, whole)):
            raise ReshardError(f"{place} is split in the middle of its rows, which reshard does not read")
        return strips

    def _rows(self, strip: Strip) -> Iterator[Strip]:
        """Cut a strip, in elements of the whole tensor, where one chunk ends and another begins."""
        for run in self._runs(strip.offset, strip.offset + (strip.stop - strip.start) * strip.width):
            first = max(0, -(-(run.start - strip.offset) // strip.width))
            end = min(strip.stop - strip.start, (run.stop - strip.columns - strip.offset) // strip.width + 1)
            if first < end:
                local = run.local + strip.offset + first * strip.width - run.start
                yield strip._replace(
                    start=strip.start + first,
                    stop=strip.start + end,
                    path=run.chunk.path,
                    offset=run.chunk.at + local * self.itemsize,
                )

    def _columns(self, strip: Strip) -> Iterator[Strip]:
        """Cut a strip whose rows lie in several chunks each."""
        width = prod(self.shape[self.dim :])
        row, column = divmod(strip.offset, width)
        step, rows = strip.width // width, strip.stop - strip.start
        if column + strip.columns > width or (rows > 1 and strip.width % width):
            return
        for chunk in self.chunks:
            low = max(column, chunk.offsets[self.dim] * self.inner)
            high = min(column + strip.columns, (chunk.offsets[self.dim] + chunk.sizes[self.dim]) * self.inner)
            if low >= high:
                continue
            own_width = chunk.sizes[self.dim] * self.inner
            for run in _runs_of(chunk, self.shape[: self.dim], self.dim - 1):
                first = max(0, -(-(run.start - row) // max(1, step)))
                end = min(rows, (run.stop - 1 - row) // max(1, step) + 1)
                if first < end:
                    local = (run.local + row + first * step - run.start) * own_width
                    local += low - chunk.offsets[self.dim] * self.inner
                    yield Strip(
                        strip.start + first,
                        strip.start + end,
                        low - column,
                        high - low,
                        chunk.path,
                        chunk.at + local * self.itemsize,
                        own_width * max(1, step),
                    )

    def _transposed(self, strip: Strip) -> Strip:
        end = strip.offset + strip.columns * strip.width
        for run in self._runs(strip.offset, end):
            if run.start <= strip.offset and end <= run.stop:
                at = run.chunk.at + (run.local + strip.offset - run.start) * self.itemsize
                return strip._replace(path=run.chunk.path, offset=at)
        raise ReshardError(
            f"{self.name} has matrices that are transposed and lie in several shards each, which reshard does not "
            "read: save it with the experts along the first dim of each shard, or with save_pretrained"
        )

    def _runs(self, start: int, stop: int) -> Iterator[Run]:
        """Yield the runs of all chunks that have some of these elements, in order."""
        if self.runs is None:
            self.runs = sorted(run for chunk in self.chunks for run in _runs_of(chunk, self.shape, self.dim))
        at = max(0, bisect_right(self.runs, start, key=lambda run: run.start) - 1)
        while at < len(self.runs) and self.runs[at].start < stop:
            yield self.runs[at]
            at += 1


def _elements(strip: Strip) -> int:
    return (strip.stop - strip.start) * strip.columns


def _last_split(chunk: Chunk, shape: tuple[int, ...]) -> int:
    return max((dim for dim, n in enumerate(shape) if chunk.sizes[dim] != n), default=0)


def _runs_of(chunk: Chunk, shape: tuple[int, ...], dim: int) -> Iterator[Run]:
    """Yield the runs of a chunk, in a tensor of the dims of this shape: one for each index of those before `dim`."""
    if not shape:
        yield Run(0, 1, 0, chunk)
        return
    inner = prod(shape[dim + 1 :])
    length, local = chunk.sizes[dim] * inner, 0
    ranges = [range(o, o + n) for o, n in zip(chunk.offsets[:dim], chunk.sizes[:dim], strict=True)]
    for index in product(*ranges):
        row = 0
        for i, n in zip(index, shape, strict=False):
            row = row * n + i
        start = (row * shape[dim] + chunk.offsets[dim]) * inner
        yield Run(start, start + length, local, chunk)
        local += length
