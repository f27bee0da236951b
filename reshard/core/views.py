"""Views: parts of a stored tensor, named by brackets after its name.

A model's tensors and those of a published file are not always the same. A file may hold all experts in one
tensor, or queries and their gates in turn. Its parts are then what the rest of this package calls tensors:

>>> view = View.parse("experts.gate_up_proj[3, 0:512]")
>>> view.tensor
'experts.gate_up_proj'
>>> view.selections[0]
Selection(start=3, length=1, period=0, drops=True)
>>> view.selections[1]
Selection(start=0, length=512, period=0, drops=False)

Per dim, with commas between, and ``:`` for the dims that are left out:

| selection        | what it takes                                                      |
|------------------|--------------------------------------------------------------------|
| ``3``            | index 3; the view lacks the dim                                    |
| ``:``            | all                                                                |
| ``0:512``        | 0 up to 512                                                        |
| ``0:128 in 256`` | 0 up to 128 of every 256                                           |

``.T`` after the brackets swaps the two dims that are left: a file may hold a matrix transposed.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from itertools import combinations, product
from math import prod
from typing import Any, NamedTuple

import numpy as np

from reshard.core.boxes import Box
from reshard.core.errors import ReshardError
from reshard.core.placement import Part

_NAME = re.compile(r"(?P<tensor>[^\[\]]+)\[(?P<selections>[^\[\]]*)\](?P<transposed>\.T)?")
_SELECTION = re.compile(r"(?P<start>\d+)(?::(?P<stop>\d+)(?: in (?P<period>\d+))?)?")


class Selection(NamedTuple):
    """A view's part of one dim: `length` from `start` on, of every `period` where that is not 0;
    all of it where `length` is 0. The view has no such dim where it `drops` it."""

    start: int = 0
    length: int = 0
    period: int = 0
    drops: bool = False

    @staticmethod
    def parse(text: str) -> "Selection":
        """Read an entry of a view's brackets. Raises ValueError for anything else."""
        if text == ":":
            return Selection()
        match = _SELECTION.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} selects nothing: write an index, a:b, or a:b in n")
        start, period = int(match["start"]), int(match["period"] or 0)
        if match["stop"] is None:
            return Selection(start, 1, 0, True)
        length = int(match["stop"]) - start
        if length < 1 or (period and start + length > period):
            raise ValueError(f"{text!r} selects nothing, or more than its period")
        return Selection(start, length, period)

    def least_size(self, selected: int) -> int:
        """Return the smallest size of a dim from which this selects that many elements."""
        if self.length == 0:
            return selected
        return selected // self.length * self.period if self.period else self.start + self.length

    def runs(self, size: int) -> list[tuple[int, int]]:
        """Return (start, length) of each run that it takes of a dim of `size`."""
        if self.length == 0:
            return [(0, size)]
        starts = range(self.start, size, self.period) if self.period else (self.start,)
        return [(start, self.length) for start in starts]

    def parts_in(self, size: int, start: int, length: int) -> "Iterator[DimPart]":
        """Yield what it takes of `length` from `start` on of a dim of `size`: one part, or one for
        each run of which several are taken."""
        if self.period and self.length == 1:
            first = max(0, -((self.start - start) // self.period))
            taken = range(self.start + first * self.period, min(start + length, size), self.period)
            if taken:
                yield DimPart(first, len(taken), taken[0] - start, self.period)
            return
        before = 0
        for run, run_length in self.runs(size):
            low, high = max(run, start), min(run + run_length, start + length)
            if low < high:
                yield DimPart(before + low - run, high - low, low - start, 1)
            before += run_length

    def selected(self, size: int) -> int:
        """Return how many it takes of a dim of `size`."""
        if self.length == 0:
            return size
        return len(range(self.start, size, self.period)) * self.length if self.period else self.length


class DimPart(NamedTuple):
    """Part of one dim of a view: its first index and its length there, and in a box of the stored tensor the
    index of the first, from which on it takes every `step`."""

    first: int
    length: int
    at: int
    step: int


class View(NamedTuple):
    """A part of a stored tensor: what it takes of each of the first dims, and all of the others; then its two
    dims swapped where it is `transposed`."""

    tensor: str
    selections: tuple[Selection, ...]
    transposed: bool = False

    @staticmethod
    def parse(name: str) -> "View":
        """Read a name; one without brackets is the whole tensor. Raises ValueError for brackets
        that say nothing."""
        if "[" not in name:
            return View(name, ())
        match = _NAME.fullmatch(name)
        if match is None:
            raise ValueError(f"{name!r} is neither a name nor a name with brackets at its end")
        return View(match["tensor"], _selections(match["selections"]), match["transposed"] is not None)

    @property
    def row_dim(self) -> int:
        """The first dim of the tensor that the view has too."""
        return next((dim for dim, s in enumerate(self.selections) if not s.drops), len(self.selections))

    def tensor_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the smallest shape of a tensor that has this view with `shape`. Raises ValueError if the two
        do not fit."""
        if self.transposed and len(shape) != 2:
            raise ValueError(
                f"{self.tensor}: a view of shape {list(shape)} is not a matrix that .T could swap"
            )
        sizes, rest = [], list(shape[::-1] if self.transposed else shape)
        for selection in self.selections:
            selected = 1 if selection.drops else (rest.pop(0) if rest else 0)
            size = selection.least_size(selected)
            if selected < 1 or selection.selected(size) != selected:
                raise ValueError(f"{self.tensor}: a view of shape {list(shape)} cannot be {selection}")
            sizes.append(size)
        return (*sizes, *rest)

    def by_dim(self, dims: int) -> tuple[Selection, ...]:
        """Return what it takes of each of so many dims."""
        return (*self.selections, *(Selection(),) * (dims - len(self.selections)))

    def shape_in(self, tensor_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of this view of a tensor of this shape."""
        filled = self.by_dim(len(tensor_shape))
        shape = tuple(s.selected(n) for s, n in zip(filled, tensor_shape, strict=True) if not s.drops)
        return shape[::-1] if self.transposed else shape

    def elements_of(self, tensor: Any) -> Any:
        """Return these elements of a whole array or torch tensor, before the dims are swapped and
        as a view of it; a dim of which some of every few are taken counts as two."""
        shape: list[int] = []
        index: list[int | slice] = []
        for selection, size in zip(self.by_dim(len(tensor.shape)), tensor.shape, strict=True):
            stop = selection.start + selection.length if selection.length else None
            run = slice(selection.start, stop)
            if selection.period:
                shape += [size // selection.period, selection.period]
                index += [slice(None), run]
            else:
                shape.append(size)
                index.append(selection.start if selection.drops else run)
        return tensor.reshape(shape)[tuple(index)]

    def pieces(self, tensor_shape: tuple[int, ...]) -> "list[Piece]":
        """Return where the rows of the view, before its dims are swapped, lie in a row-major tensor of this
        shape, in order: runs of elements without gaps."""
        runs = [s.runs(n) for s, n in zip(self.by_dim(len(tensor_shape)), tensor_shape, strict=True)]
        whole_from = len(runs)
        while whole_from and runs[whole_from - 1] == [(0, tensor_shape[whole_from - 1])]:
            whole_from -= 1
        row = prod(tensor_shape[whole_from:])
        pieces = [Piece(0, row)]
        for dim in reversed(range(whole_from)):
            stride = prod(tensor_shape[dim + 1 :])
            if dim == whole_from - 1:
                pieces = [Piece(start * stride, length * stride) for start, length in runs[dim]]
            else:
                pieces = [
                    Piece(index * stride + piece.start, piece.length)
                    for start, length in runs[dim]
                    for index in range(start, start + length)
                    for piece in pieces
                ]
        return pieces


class Piece(NamedTuple):
    """A run of a tensor's elements, in row-major order: the first, and how many."""

    start: int
    length: int


@cache
def _selections(text: str) -> tuple[Selection, ...]:
    return tuple(Selection.parse(entry.strip()) for entry in text.split(","))


def tensor_of(name: str) -> str:
    """Return the stored tensor that a name is, or is a view of.

    >>> tensor_of("experts.down_proj[3]")
    'experts.down_proj'
    """
    return name.partition("[")[0]


def tensor_shapes(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the stored tensors that views of these `shapes` make up.

    Raises ReshardError, naming it, for a tensor that its views do not cover exactly once.
    """
    views: dict[str, list[tuple[View, tuple[int, ...]]]] = {}
    stored: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        if "[" in name:
            view = View.parse(name)
            views.setdefault(view.tensor, []).append((view, shape))
            stored.setdefault(view.tensor, ())  # in the order of the table
        else:
            stored[name] = shape
    for tensor, parts in views.items():
        try:
            stored[tensor] = _covered(tuple((view._replace(tensor=""), shape) for view, shape in parts))
        except ValueError as error:
            raise ReshardError(f"{tensor}: {error}") from None
    return stored


def views_by_tensor(names: Iterable[str]) -> dict[str, list[str]]:
    """Return, of those of these names that are views, the ones of each stored tensor."""
    views: dict[str, list[str]] = {}
    for name in names:
        if tensor_of(name) != name:
            views.setdefault(tensor_of(name), []).append(name)
    return views


def view_parts(views: Iterable[str], shape: tuple[int, ...], rows: Box) -> Iterator[Part]:
    """Yield the parts of `rows`, a box of a stored tensor of this shape as a matrix ``[first dim,
    all others]`` or of a vector, that are of each of its `views`: the box of the view, of as many dims,
    and where it lies in `rows`.

    Raises ReshardError for a view of parts of rows.
    """
    width, (first, *column), (count, *columns) = prod(shape[1:]), *rows
    for name in views:
        view, view_row = View.parse(name), 0
        if view.transposed:
            raise ReshardError(f"{name} is a transposed view, which a refit does not support")
        for piece in view.pieces(shape):
            if piece.start % width or piece.length % width:
                raise ReshardError(f"{name} is a view of parts of rows, which a refit does not support")
            row, length = piece.start // width, piece.length // width
            start, stop = max(row, first), min(row + length, first + count)
            if start < stop:
                box = Box((view_row + start - row, *column), (stop - start, *columns))
                yield Part(name, box, (start - first, *(0 for _ in column)))
            view_row += length


class StridedPart(NamedTuple):
    """`box` of a view, whose first element lies at element `offset` of something, and whose neighbors along
    each dim lie `strides` elements apart."""

    box: Box
    offset: int
    strides: tuple[int, ...]


def strided_parts(
    name: str, shape: tuple[int, ...], box: Box, strides: tuple[int, ...]
) -> Iterator[StridedPart]:
    """Yield the parts of the view `name` in a box of a stored tensor of this shape, whose elements lie
    `strides` apart from element 0 on.

    >>> list(strided_parts("w[:, 1:2 in 2].T", (2, 4), Box((0, 0), (2, 4)), (4, 1)))
    [StridedPart(box=Box(offsets=(0, 0), lengths=(2, 2)), offset=1, strides=(2, 4))]
    """
    view = View.parse(name)
    selections = view.by_dim(len(shape))
    by_dim = [list(s.parts_in(n, *run)) for s, n, run in zip(selections, shape, zip(*box), strict=True)]
    for parts in product(*by_dim):
        offset = sum(part.at * stride for part, stride in zip(parts, strides, strict=True))
        dims = [
            (part.first, part.length, part.step * stride)
            for part, stride, selection in zip(parts, strides, selections, strict=True)
            if not selection.drops
        ]
        first, lengths, apart = zip(*(reversed(dims) if view.transposed else dims), strict=True)
        yield StridedPart(Box(first, lengths), offset, apart)


@cache
def _covered(parts: tuple[tuple[View, tuple[int, ...]], ...]) -> tuple[int, ...]:
    """Return the shape of a tensor that these views cover. Raises ValueError if one element is
    in none, or in two."""
    shapes = [view.tensor_shape(shape) for view, shape in parts]
    shape = tuple(map(max, zip(*shapes, strict=True)))
    for view, of_view in parts:
        if view.shape_in(shape) != of_view:
            raise ValueError(
                f"a view of shape {list(of_view)} is not {list(view.shape_in(shape))}, as another needs"
            )
    by_index: dict[tuple[int, ...], list[tuple[Selection, ...]]] = {}
    for view, _ in parts:
        full = view.by_dim(len(shape))
        leading = next((i for i, s in enumerate(full) if not s.drops), len(full))
        by_index.setdefault(tuple(s.start for s in full[:leading]), []).append(full[leading:])
    depth = {len(index) for index in by_index}
    if len(depth) != 1 or len(by_index) != prod(shape[: depth.pop()]):
        raise ValueError(f"its views take some indexes of {list(shape)} only")
    for group in {tuple(group) for group in by_index.values()}:
        _check_exact(group, shape[len(shape) - len(group[0]) :])
    return shape


def _check_exact(group: Iterable[tuple[Selection, ...]], shape: tuple[int, ...]) -> None:
    taken = [[_mask(s, size) for s, size in zip(view, shape, strict=True)] for view in group]
    if sum(prod(int(mask.sum()) for mask in masks) for masks in taken) != prod(shape):
        raise ValueError(f"its views do not have every element of {list(shape)} once")
    for one, other in combinations(taken, 2):
        if all((a & b).any() for a, b in zip(one, other, strict=True)):
            raise ValueError(f"two of its views have the same elements of {list(shape)}")


def _mask(selection: Selection, size: int) -> np.ndarray:
    mask = np.zeros(size, bool)
    for start, length in selection.runs(size):
        mask[start : start + length] = True
    return mask
