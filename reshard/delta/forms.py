"""The forms in which changes of a box of elements are encoded, and their sizes.

    form      sections                                                            smallest where
    NOTHING   none                                                                nothing changed
    OFFSETS   values, int32 changes in each block of 65,536 elements, uint16      up to 6 % of 2-byte elements changed
              offset of each change within its block
    BITMAP    values, a bit for each element, lowest bit first                    up to 94 % of these
    PLAIN     all elements                                                        otherwise

Sections begin at multiples of 8 bytes, which zeros fill up to, and are little-endian. Whoever knows the form,
the number of elements, their size and how many changed knows the size of the whole before it is there.
"""

from enum import IntEnum
from typing import Any, NamedTuple

BLOCK = 1 << 16  # elements that a uint16 offset reaches
SECTION = 8  # bytes at which sections begin


class Form(IntEnum):
    """The encoding of changes; see the table of this module."""

    NOTHING = 0
    OFFSETS = 1
    BITMAP = 2
    PLAIN = 3


class BoxSize(NamedTuple):
    """The size of a box that is compared: `elements` of `itemsize` bytes each, and how many of them
    `changed`.

    `elements` and `changed` may be arrays, of many boxes, and so are the sizes then.
    """

    elements: Any
    itemsize: int
    changed: Any

    def sections(self, form: Form) -> list[Any]:
        """Return the bytes of each section of a form."""
        values = self.changed * self.itemsize
        if form is Form.NOTHING:
            return []
        if form is Form.OFFSETS:
            return [values, 4 * -(-self.elements // BLOCK), 2 * self.changed]
        if form is Form.BITMAP:
            return [values, -(-self.elements // 8)]
        return [self.elements * self.itemsize]

    def size(self, form: Form) -> Any:
        """Return the bytes of a form, padding included.

        >>> [BoxSize(1 << 20, 2, 1000).size(form) for form in Form]
        [0, 4064, 133072, 2097152]
        """
        return sum(map(padded, self.sections(form)))

    @property
    def form(self) -> Form:
        """The smallest form.

        >>> [BoxSize(1 << 20, 2, changed).form.name for changed in (0, 5, 100_000, 1_000_000)]
        ['NOTHING', 'OFFSETS', 'BITMAP', 'PLAIN']
        """
        if not self.changed:
            return Form.NOTHING
        return min((form for form in Form if form is not Form.NOTHING), key=self.size)


def padded(size: Any) -> Any:
    """Return a size, or an array of them, up to where the next section may begin."""
    return size + -size % SECTION


def delta_share(changed: float, itemsize: int = 2) -> float:
    """Return the bytes that changes take for each byte of the weights, where this share of the elements changed,
    here and there.

    >>> [round(delta_share(changed), 4) for changed in (0.0, 0.01, 0.2, 1.0)]
    [0.0, 0.02, 0.2625, 1.0]
    """
    elements = 1 << 19  # of a box
    box = BoxSize(elements, itemsize, round(changed * elements))
    return float(box.size(box.form) / (elements * itemsize))
