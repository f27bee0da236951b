"""Boxes: axis-aligned regions of a tensor, in elements.

A box is `offsets` and `lengths`, one integer per dim. Rows 2 and 3 of a ``[4, 6]`` tensor:

>>> rows = Box((2, 0), (2, 6))
>>> rows.intersect(Box((0, 4), (4, 2)))
Box(offsets=(2, 4), lengths=(2, 2))
"""

from collections.abc import Iterable, Sequence
from math import prod
from operator import add, ge, le, sub
from typing import NamedTuple


class Box(NamedTuple):
    """A region of a tensor: `offsets[i] .. offsets[i] + lengths[i]` along every dim i, in elements."""

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def volume(self) -> int:
        """Number of elements."""
        return prod(self.lengths)

    @property
    def ends(self) -> tuple[int, ...]:
        """One past the last index, per dim."""
        return tuple(map(add, self.offsets, self.lengths))

    def intersect(self, other: "Box") -> "Box | None":
        """The common region, or None if there is none."""
        starts = tuple(map(max, self.offsets, other.offsets))
        lengths = tuple(map(sub, map(min, self.ends, other.ends), starts))
        return Box(starts, lengths) if min(lengths, default=1) > 0 else None

    def contains(self, other: "Box") -> bool:
        """Return True if `other` lies wholly inside."""
        return all(map(le, self.offsets, other.offsets)) and all(map(ge, self.ends, other.ends))

    def relative_to(self, origin: Sequence[int]) -> tuple[int, ...]:
        """This box's offsets, counted from `origin`."""
        return tuple(map(sub, self.offsets, origin))

    def minus(self, other: "Box") -> "list[Box]":
        """Return what is left of this box without `other`: disjoint boxes, at most two per dim.

        >>> Box((0, 0), (4, 6)).minus(Box((0, 2), (4, 2)))
        [Box(offsets=(0, 0), lengths=(4, 2)), Box(offsets=(0, 4), lengths=(4, 2))]
        """
        common = self.intersect(other)
        if common is None:
            return [self]
        if common == self:
            return []
        rest, offsets, lengths = [], list(self.offsets), list(self.lengths)
        for dim, (start, end) in enumerate(zip(common.offsets, common.ends, strict=True)):
            for a, b in ((offsets[dim], start), (end, offsets[dim] + lengths[dim])):
                if b > a:
                    side_offsets, side_lengths = list(offsets), list(lengths)
                    side_offsets[dim], side_lengths[dim] = a, b - a
                    rest.append(Box(tuple(side_offsets), tuple(side_lengths)))
            offsets[dim], lengths[dim] = start, end - start
        return rest


def whole(shape: Sequence[int]) -> Box:
    """The box of a whole tensor of this shape."""
    return Box((0,) * len(shape), tuple(shape))


def first_overlap(boxes: Iterable[Box]) -> tuple[Box, Box] | None:
    """Two boxes that share an element, or None if all are disjoint (a sweep along dim 0)."""
    active: list[Box] = []
    for box in sorted(boxes, key=lambda b: b.offsets):
        start = box.offsets[0] if box.offsets else 0
        active = [b for b in active if not b.offsets or b.ends[0] > start]
        for other in active:
            if box.intersect(other) is not None:
                return other, box
        active.append(box)
    return None
