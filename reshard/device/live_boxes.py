"""Boxes of canonical tensors that lie in this process's memory, cut into what is read or written at a
time."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeVar

import torch

from reshard.core.boxes import Box
from reshard.core.dtypes import Dtype
from reshard.device.memory import ALIGNMENT, Region
from reshard.device.staging import row_view
from reshard.storage.io.boxes import Rows

T = TypeVar("T")


class LiveBox(NamedTuple):
    """`box` of canonical tensor `name`, which lies in a region of memory at `local`, where it is held in `dtype`.

    Neighbors in a row lie `step` elements apart: of a matrix that is held transposed the rows do, and the region's
    pitch is 1. Such a box is only read.
    """

    name: str
    box: Box
    region: Region
    local: Rows
    dtype: Dtype
    step: int = 1

    def matrix(self, local: Rows | None = None) -> torch.Tensor:
        """View the box, or these rows and columns of its region, as ``[rows, columns]``."""
        return row_view(self.region, local or self.local, self.step)


class Slab(NamedTuple):
    """Some rows of a live box: `rows` in its canonical tensor, and how many bytes they have on disk."""

    live_box: LiveBox
    rows: Rows
    size_bytes: int

    @property
    def bytes(self) -> torch.Tensor:
        """The rows where they lie in memory, as bytes ``[rows, bytes of a row]``; a copy of what lies apart there."""
        local, shift = self.live_box.local, self.live_box.local.start - self.live_box.box.offsets[0]
        local = local._replace(start=self.rows.start + shift, stop=self.rows.stop + shift)
        rows = self.live_box.matrix(local)
        return (rows if self.live_box.step == 1 else rows.contiguous()).view(torch.uint8)


def slabs_of(live_box: LiveBox, itemsize: int, slab_bytes: int, multiple: int = 1) -> list[Slab]:
    """Cut a live box into slabs of about `slab_bytes`.

    `itemsize` is the bytes of an element on disk; the larger of that and the element in memory
    counts. Slabs have a number of rows that `multiple` divides.
    """
    slabs = Rows.of(live_box.box).slabs(max(itemsize, live_box.dtype.size), multiple, slab_bytes)
    return [Slab(live_box, slab, (slab.stop - slab.start) * slab.columns * itemsize) for slab in slabs]


def batches(items: Iterable[tuple[T, int, int]]) -> Iterator[list[T]]:
    """Yield items in batches, in their order.

    Each comes as (item, its bytes, the most bytes of a batch that it opens). A larger item is a
    batch by itself.
    """
    batch: list[T] = []
    room = 0
    for item, size, most in items:
        if size > room:
            if batch:
                yield batch
            batch, room = [], most
        batch.append(item)
        room -= size + ALIGNMENT
    if batch:
        yield batch
