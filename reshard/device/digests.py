"""What boxes of canonical tensors add to a digest, computed where they lie: on a GPU by a kernel, at the speed of its
memory, else by `reshard.digests.numbers`."""

from collections.abc import Sequence

import numpy as np
import torch

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
    return Sums(boxes, seeds).take()


class Sums:
    """Sums of boxes, for who takes them again while the boxes lie where they do: the tiles stay on the GPU, since to
    make them takes longer than to read the memory."""

    def __init__(self, boxes: Sequence[LiveBox], seeds: Sequence[int]) -> None:
        self.boxes, self.seeds = boxes, seeds
        self._tiles: dict[torch.device, dict[tuple[str, str, int], torch.Tensor]] = {}

    def take(self) -> list[int]:
        """Return what each box adds now."""
        sums = [0] * len(self.boxes)
        on_gpu: dict[torch.device, list[int]] = {}
        for index, (box, seed) in enumerate(zip(self.boxes, self.seeds, strict=True)):
            device = box.region.tensor.device
            if device.type == "cuda":
                on_gpu.setdefault(device, []).append(index)
            else:
                sums[index] = _sum_on_host(box, seed)
        for device, indices in on_gpu.items():
            for index, value in zip(indices, self._on_gpu(device, indices), strict=True):
                sums[index] = value
        return sums

    def _on_gpu(self, device: torch.device, indices: list[int]) -> list[int]:
        from reshard.device.digest_kernels import sums_of_tiles, tiles_on_gpu

        tiles = self._tiles.get(device)
        if tiles is None:
            boxes = [published(self.boxes[index]) for index in indices]
            tiles = tiles_on_gpu(boxes, [self.seeds[index] for index in indices], device)
            if all(box is self.boxes[index] for box, index in zip(boxes, indices, strict=True)):
                self._tiles[device] = tiles  # else some are of copies, which are made anew
        return sums_of_tiles(tiles, len(indices), device)


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
