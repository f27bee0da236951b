"""Placements: what each holder has of the canonical tensors, box by box.

A *canonical tensor* is a tensor under its published Hugging Face name and shape. A *local tensor* is what a
file or a rank really holds: a fused, split or padded arrangement of canonical pieces. A placement is the list
of local tensors, each with the parts that say where its elements come from.
"""

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

from reshard.core.boxes import Box


class Part(NamedTuple):
    """`box` of canonical tensor `name` lies in a local tensor with its first element at `at` (same dims, same
    lengths)."""

    name: str
    box: Box
    at: tuple[int, ...]

    @property
    def local_box(self) -> Box:
        """The same elements in the local tensor's coordinates."""
        return Box(self.at, self.box.lengths)


class LocalTensor(NamedTuple):
    """One tensor that a holder has.

    `id` (anything hashable) names it within its placement, `shape` is in elements, `fills` are regions that
    hold zeros and come from no canonical tensor (vocabulary padding), `holder` is the rank or file that has
    it.
    """

    id: Any
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    fills: tuple[Box, ...] = ()
    holder: Hashable = 0


def as_matrix(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape of more than two dims as rows of all dims after the first."""
    return shape if len(shape) <= 2 else (shape[0], prod(shape[1:]))


def local_matrix(tensor: LocalTensor) -> LocalTensor:
    """Return a local tensor of more than two dims as a matrix, as `as_matrix` has its shape; others
    as they are.

    Raises ValueError if a part has not all of the dims after the first.
    """
    if len(tensor.shape) <= 2:
        return tensor
    row, parts = tensor.shape[1:], []
    for part in tensor.parts:
        if part.box.lengths[1:] != row or any((*part.box.offsets[1:], *part.at[1:])):
            raise ValueError(f"{part.name} is split along other dims than the first")
        box = Box((part.box.offsets[0], 0), as_matrix(part.box.lengths))
        parts.append(Part(part.name, box, (part.at[0], 0)))
    return tensor._replace(shape=as_matrix(tensor.shape), parts=tuple(parts))


@dataclass(frozen=True)
class Placement:
    """Local tensors, and the canonical shapes that they are made of."""

    shapes: Mapping[str, tuple[int, ...]]
    tensors: Mapping[Any, LocalTensor] = field(default_factory=dict)

    @staticmethod
    def of(shapes: Mapping[str, tuple[int, ...]], tensors: Iterable[LocalTensor]) -> "Placement":
        """Make a placement of a list of local tensors."""
        return Placement(shapes, {tensor.id: tensor for tensor in tensors})

    @staticmethod
    def canonical(shapes: Mapping[str, tuple[int, ...]]) -> "Placement":
        """Place every canonical tensor whole, under its own name, as a Hugging Face directory does."""
        zero = {name: (0,) * len(shape) for name, shape in shapes.items()}
        return Placement.of(
            shapes, (LocalTensor(n, s, (Part(n, Box(zero[n], s), zero[n]),)) for n, s in shapes.items())
        )
