"""Copies of stored tensors as copies of their views: an engine's loader takes tensors as files have
them, and what a trainer holds are parts of these (`reshard.core.views`)."""

from collections.abc import Iterator, Mapping
from math import prod

import torch

from reshard.core.boxes import Box
from reshard.core.errors import ReshardError
from reshard.core.placement import as_matrix
from reshard.core.views import tensor_of, tensor_shapes, view_parts, views_by_tensor
from reshard.engines.trace import Canonical, Trace, TracedCopy


class StoredViews:
    """Canonical tensors of these `shapes`, some of which are views of stored ones.

    `matrices` are the shapes of the canonical tensors as a refit moves them: of more than two dims,
    all after the first are one.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.stored = tensor_shapes(shapes)
        self.matrices = {name: as_matrix(shape) for name, shape in shapes.items()}
        self.views = views_by_tensor(shapes)

    def with_dtypes(self, dtypes: Mapping[str, torch.dtype]) -> Canonical:
        """Return shape and dtype of the stored tensors, given the dtypes of the canonical ones."""
        stored_dtypes = {tensor_of(name): dtype for name, dtype in dtypes.items()}
        return {name: (shape, stored_dtypes[name]) for name, shape in self.stored.items()}

    def of_trace(self, trace: Trace) -> Trace:
        """Return a trace of copies of stored tensors as one of canonical tensors."""
        return Trace([part for copy in trace.copies for part in self._parts(copy)], trace.fills)

    def _parts(self, copy: TracedCopy) -> Iterator[TracedCopy]:
        shape = self.stored[copy.name]
        if len(shape) < 3 and copy.name not in self.views:
            yield copy
            return
        rows = _rows(copy, shape)
        pitch = copy.pitch or rows.lengths[1]
        for part in view_parts(self.views.get(copy.name, [copy.name]), shape, rows):
            several = part.box.lengths[0] > 1
            offset = copy.offset + part.at[0] * pitch
            yield copy._replace(offset=offset, pitch=pitch if several else 0, name=part.name, box=part.box)


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
        f"are no rows of it: refit does not support it"
    )
