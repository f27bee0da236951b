"""Split a dim of a tensor along a mesh axis: into equal slices, one for each rank."""

from reshard.core.boxes import Box
from reshard.core.errors import ReshardError


def split(box: Box, dim: int, parts: int, index: int, what: str, name: str) -> Box:
    """Return slice `index` of a box that is split along a dim into `parts` equal ones.

    Raises ReshardError, saying `what` splits the tensor `name`, where the length does not divide.

    >>> split(Box((8, 0), (4, 6)), dim=0, parts=2, index=1, what="--tp", name="linear_fc1.weight")
    Box(offsets=(10, 0), lengths=(2, 6))
    """
    size, rest = divmod(box.lengths[dim], parts)
    if rest:
        raise ReshardError(f"{what} {parts} does not divide dim {dim} of {name}, which is {box.lengths[dim]}")
    offsets, lengths = list(box.offsets), list(box.lengths)
    offsets[dim], lengths[dim] = offsets[dim] + index * size, size
    return Box(tuple(offsets), tuple(lengths))
