"""Copies of stored tensors as copies of their views: an engine's loader takes tensors as files have
them, and what a trainer holds are parts of these (`reshard.core.views`)."""

from collections.abc import Iterator, Mapping
from math import prod
from types import MappingProxyType

import torch

from reshard.core.boxes import Box
from reshard.core.errors import ReshardError
from reshard.core.placement import as_matrix
from reshard.core.views import StridedPart, View, strided_parts, tensor_of, tensor_shapes, views_by_tensor
from reshard.engines.tracing.trace import Canonical, Trace, TracedCopy, turned

_NONE: Mapping[str, str] = MappingProxyType({})


class StoredViews:
    """Canonical tensors of these `shapes`, some of which are views of stored ones; `packed` has the
    views that some are which have other names.

    `matrices` are the shapes of the canonical tensors as a refit moves them: of more than two dims,
    all after the first are one.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], packed: Mapping[str, str] = _NONE) -> None:
        self.places = {name: packed.get(name, name) for name in shapes}
        self.names = {place: name for name, place in self.places.items()}
        self.stored = tensor_shapes({self.places[name]: shape for name, shape in shapes.items()})
        self.matrices = {name: as_matrix(shape) for name, shape in shapes.items()}
        self.views = views_by_tensor(self.names)

    def with_dtypes(self, dtypes: Mapping[str, torch.dtype]) -> Canonical:
        """Return shape and dtype of the stored tensors, given the dtypes of the canonical ones."""
        stored_dtypes = {tensor_of(self.places[name]): dtype for name, dtype in dtypes.items()}
        return {name: (shape, stored_dtypes[name]) for name, shape in self.stored.items()}

    def of_trace(self, trace: Trace, turned_too: bool = False) -> Trace:
        """Return a trace of copies of stored tensors as one of canonical tensors. Raises
        ReshardError for a copy that is not made of rows of these; with `turned_too` one of which columns become
        rows has the `strides` ``(1, pitch)``."""
        return Trace([part for copy in trace.copies for part in self._parts(copy, turned_too)], trace.fills)

    def _parts(self, copy: TracedCopy, turned_too: bool) -> Iterator[TracedCopy]:
        shape = self.stored[copy.name]
        if len(shape) < 3 and copy.name not in self.views and not copy.strides:
            yield copy
            return
        box, strides = _with_all_dims(copy, shape)
        for view in self.views.get(copy.name, [copy.name]):
            name = self.names[view]
            for part in strided_parts(view, shape, box, strides):
                yield _in_rows(copy, name, part, View.parse(view).shape_in(shape), turned_too)


def _with_all_dims(copy: TracedCopy, shape: tuple[int, ...]) -> tuple[Box, tuple[int, ...]]:
    """Return the box of a copy of a stored tensor of this shape in all of its dims, and its strides in the
    parameter, in elements. Raises ReshardError if it is not a box."""
    if copy.strides:
        return copy.box, copy.strides
    if len(copy.box.lengths) == len(shape):
        pitch = copy.pitch or copy.box.lengths[-1]
        return copy.box, (pitch, 1)[-len(shape) :]
    within = _within_one(copy, shape)
    if within is not None:
        return within, (0, copy.pitch or within.lengths[2], 1)
    rows, row = _rows(copy, shape), shape[1:]
    inner = tuple(prod(row[dim + 1 :]) for dim in range(len(row)))
    if rows.lengths[1] == prod(row):
        box = Box((rows.offsets[0], *(0,) * len(row)), (rows.lengths[0], *row))
    else:  # of the dims after the first only the last is longer than one
        ones = (1,) * (len(row) - 1)
        box = Box(
            (rows.offsets[0], *(0 for _ in ones), rows.offsets[1]), (rows.lengths[0], *ones, rows.lengths[1])
        )
    return box, (copy.pitch or rows.lengths[1], *inner)


def _within_one(copy: TracedCopy, shape: tuple[int, ...]) -> Box | None:
    """Return the box of a copy that was traced as rows of a stored tensor's last dim, within one index of the first of
    its three; None for another copy."""
    if len(shape) != 3 or len(copy.box.lengths) != 2:
        return None
    (row, column), (rows, columns) = copy.box
    index, first = divmod(row, shape[1])
    inside = first + rows <= shape[1] and column + columns <= shape[2]
    return Box((index, first, column), (1, rows, columns)) if inside else None


def _rows(copy: TracedCopy, shape: tuple[int, ...]) -> Box:
    """Return the box of a copy of a stored tensor of this shape, as a box of its matrix; one of
    whole rows may have been traced as a run of elements. Raises ReshardError for other parts of a
    tensor of more than two dims."""
    width = prod(shape[1:])
    if len(copy.box.lengths) == 2 and width == shape[-1]:
        return copy.box
    if len(copy.box.lengths) == 1:
        [start], [length] = copy.box
        if start % width == 0 and length % width == 0:
            return Box((start // width, 0), (length // width, width))
    raise ReshardError(
        f"the engine's loader copies {list(copy.box.lengths)} of {copy.name} from {list(copy.box.offsets)} on, which "
        f"are not rows of it: refit does not support it"
    )


def _in_rows(
    copy: TracedCopy, name: str, part: StridedPart, shape: tuple[int, ...], turned_too: bool
) -> TracedCopy:
    """Return a part of a copy as rows of a canonical tensor of this shape, or elements of a vector; with `turned_too`
    also as columns of one, each of which lies in one piece. Raises ReshardError if it is neither."""
    box, apart = part.box, part.strides
    if len(box.lengths) > 2:
        inner = tuple(prod(box.lengths[dim + 1 :]) for dim in range(1, len(box.lengths)))
        # Of a row as a matrix has it, a run: of its first dim some, or of its last dim alone.
        is_run = (not box.offsets[-1] and box.lengths[2:] == shape[2:]) or prod(box.lengths[1:-1]) == 1
        if apart[1:] != inner or not is_run or any(box.offsets[1:-1]):
            raise turned("the engine", copy.name, copy.parameter)
        box, apart = Box((box.offsets[0], box.offsets[-1]), as_matrix(box.lengths)), (apart[0], 1)
    if len(box.lengths) == 2 and apart[1] != 1 and box.lengths[1] > 1:
        if turned_too and (apart[0] == 1 or box.lengths[0] == 1):
            return TracedCopy(copy.parameter, copy.offset + part.offset, 0, name, box, (1, apart[1]))
        raise turned("the engine", copy.name, copy.parameter)
    contiguous = len(box.lengths) == 1 and apart == (1,)
    pitch = 0 if contiguous or box.lengths[0] == 1 else apart[0]
    return TracedCopy(copy.parameter, copy.offset + part.offset, pitch, name, box)
