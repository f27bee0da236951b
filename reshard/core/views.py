"""Views: parts of a stored tensor, named by brackets after its name.

A model's tensors and those of a published file are not always the same. A file may hold all experts in one
tensor, or queries and their gates in turn. Its parts are then what the rest of this package calls tensors:

>>> view = View.parse("experts.gate_up_proj[3, 0:512]")
>>> view.tensor, view.selections
('experts.gate_up_proj', (Selection(start=3, length=1, period=0, drops=True), Selection(start=0, length=512, period=0, drops=False)))

Per dim, with commas between, and ``:`` for the dims that are left out:

| selection        | what it takes                                                      |
|------------------|--------------------------------------------------------------------|
| ``3``            | index 3; the view lacks the dim                                    |
| ``:``            | all                                                                |
| ``0:512``        | 0 up to 512                                                        |
| ``0:128 in 256`` | 0 up to 128 of every 256                                           |
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from itertools import combinations
from math import prod
from typing import NamedTuple

import numpy as np

from reshard.core.boxes import Box
from reshard.core.errors import ReshardError
from reshard.core.placement import Part

_NAME = re.compile(r"(?P<tensor>[^\[\]]+)\[(?P<selections>[^\[\]]*)\]")
_SELECTION = re.compile(r"(?P<start>\d+)(?::(?P<stop>\d+)(?: in (?P<period>\d+))?)?")


class Selection(NamedTuple):
    """A view's part of one dim: `length` from `start` on, of every `period` where that is not 0; all of it where
    `length` is 0. The view has no such dim where it `drops` it."""

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
        """Return the least size of a dim of which this selects so many."""
        if self.length == 0:
            return selected
        return selected // self.length * self.period if self.period else self.start + self.length

    def runs(self, size: int) -> list[tuple[int, int]]:
        """Return (start, length) of each run that it takes of a dim of `size`."""
        if self.length == 0:
            return [(0, size)]
        starts = range(self.start, size, self.period) if self.period else (self.start,)
        return [(start, self.length) for start in starts]

    def selected(self, size: int) -> int:
        """Return how many it takes of a dim of `size`."""
        return sum(length for _, length in self.runs(size))


class View(NamedTuple):
    """A part of a stored tensor: what it takes of each of the first dims, and all of the others."""

    tensor: str
    selections: tuple[Selection, ...]

    @staticmethod
    def parse(name: str) -> "View":
        """Read a name; one without brackets is the whole tensor. Raises ValueError for brackets that say nothing."""
        if "[" not in name:
            return View(name, ())
        match = _NAME.fullmatch(name)
        if match is None:
            raise ValueError(f"{name!r} is neither a name nor a name with brackets at its end")
        return View(match["tensor"], _selections(match["selections"]))

    @property
    def row_dim(self) -> int:
        """The dim of the tensor that is the view's first."""
        return next((dim for dim, s in enumerate(self.selections) if not s.drops), len(self.selections))

    def tensor_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the least shape of a tensor of which this is a view of `shape`. Raises ValueError where the two
        do not fit."""
        sizes, rest = [], list(shape)
        for selection in self.selections:
            selected = 1 if selection.drops else (rest.pop(0) if rest else 0)
            size = selection.least_size(selected)
            if selected < 1 or selection.selected(size) != selected:
                raise ValueError(f"{self.tensor}: a view of shape {list(shape)} cannot be {selection}")
            sizes.append(size)
        return (*sizes, *rest)

    def pieces(self, tensor_shape: tuple[int, ...]) -> "list[Piece]":
        """Return where the rows of the view lie in a row-major tensor of this shape, in order: runs of elements
        without gaps."""
        filled = (*self.selections, *(Selection(),) * (len(tensor_shape) - len(self.selections)))
        runs = [s.runs(size) for s, size in zip(filled, tensor_shape, strict=True)]
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
            stored[tensor] = _covered(tuple((view.selections, shape) for view, shape in parts))
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
    """Yield the parts of `rows`, a box of a stored tensor of this shape as a matrix ``[first dim, all others]``, that are of
    each of its `views`: the box of the view, as a matrix too, and where it lies in `rows`.

    Raises ReshardError for a view of parts of rows.
    """
    width, (first, column), (count, columns) = prod(shape[1:]), *rows
    for name in views:
        view_row = 0
        for piece in View.parse(name).pieces(shape):
            if piece.start % width or piece.length % width:
                raise ReshardError(f"{name} is a view of parts of rows, which a refit does not support")
            row, length = piece.start // width, piece.length // width
            start, stop = max(row, first), min(row + length, first + count)
            if start < stop:
                box = Box((view_row + start - row, column), (stop - start, columns))
                yield Part(name, box, (start - first, 0))
            view_row += length


@cache
def _covered(parts: tuple[tuple[tuple[Selection, ...], tuple[int, ...]], ...]) -> tuple[int, ...]:
    """Return the shape of a tensor that these views cover. Raises ValueError where one element is in none, or in
    two."""
    shapes = [View("", selections).tensor_shape(shape) for selections, shape in parts]
    shape = tuple(map(max, zip(*shapes, strict=True)))
    by_index: dict[tuple[int, ...], list[tuple[Selection, ...]]] = {}
    for selections, _ in parts:
        full = (*selections, *(Selection(),) * (len(shape) - len(selections)))
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
