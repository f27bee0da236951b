"""What boxes of canonical tensors add to a digest, computed where they lie: on a GPU by a kernel, at the speed of its
memory, else by `reshard.digests.numbers`."""

from collections.abc import Sequence

import numpy as np

from reshard.core.dtypes import DTYPES
from reshard.device.live_boxes import LiveBox, slabs_of
from reshard.device.memory import Region
from reshard.device.staging import numpy_view, row_view
from reshard.device.stored import published as published_numbers
from reshard.digests.numbers import MASK, rounded, sum_rows
from reshard.storage.io.boxes import Rows
from reshard.storage.io.casts import cast

_HOST_BYTES = 4 << 20  # that are cast at a time


def sums_of(boxes: Sequence[LiveBox], seeds: Sequence[int]) -> list[int]:
    """Return what each box adds to the number of its tensor, which has the seed, rounded to the box's dtype."""
    sums = [0] * len(boxes)
    on_gpu = []
    for index, (box, seed) in enumerate(zip(boxes, seeds, strict=True)):
        if box.region.tensor.device.type == "cuda":
            on_gpu.append(index)
        else:
            sums[index] = _sum_on_host(box, seed)
    for device in {boxes[index].region.tensor.device for index in on_gpu}:
        from reshard.device.digest_kernels import sums_on_gpu

        indices = [index for index in on_gpu if boxes[index].region.tensor.device == device]
        results = sums_on_gpu([published(boxes[i]) for i in indices], [seeds[i] for i in indices], device)
        for index, value in zip(indices, results, strict=True):
            sums[index] = value
    return sums


def _sum_on_host(box: LiveBox, seed: int) -> int:
    total, held = 0, str(box.region.tensor.dtype).removeprefix("torch.")
    dtype = DTYPES[held].held_like(box.dtype)
    for slab in slabs_of(box, box.region.tensor.element_size(), _HOST_BYTES):
        numbers = cast(
            np.ascontiguousarray(numpy_view(slab.bytes)).view(dtype.numpy()), dtype, dtype.published
        )
        total += sum_rows(seed, rounded(numbers, box.dtype.published), slab.rows.start, slab.rows.column)
    return total & MASK


def published(box: LiveBox) -> LiveBox:
    """Return a box whose memory has the published numbers: this one, or one with a copy of those held less 1."""
    if box.dtype == box.dtype.published:
        return box
    numbers = published_numbers(row_view(box.region, box.local).contiguous(), box.dtype)
    rows, columns = numbers.shape
    region, local = Region(numbers, 0, columns), Rows(0, rows, 0, columns)
    return box._replace(region=region, local=local, dtype=box.dtype.published)
