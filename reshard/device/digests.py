"""What boxes of canonical tensors add to a digest, computed where they lie: on a GPU by a kernel, at the speed of its
memory, else by `reshard.digests.numbers`."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from reshard.core.dtypes import DTYPES
from reshard.device.live_boxes import LiveBox, batches, slabs_of
from reshard.device.memory import Region
from reshard.device.staging import numpy_view
from reshard.device.stored import published as published_numbers
from reshard.digests.numbers import MASK, rounded, sum_rows
from reshard.storage.io.boxes import Rows
from reshard.storage.io.casts import cast

_HOST_BYTES = 4 << 20  # that are cast at a time
_COPY_BYTES = 64 << 20  # of boxes that lie apart, which are put together on a GPU at a time


def sums_of(boxes: Sequence[LiveBox], seeds: Sequence[int]) -> list[int]:
    """Return what each box adds to the number of its tensor, which has the seed, rounded to the box's dtype."""
    return Sums(boxes, seeds).take()


class Sums:
    """Sums of boxes, for who takes them again while the boxes lie where they do: the tiles stay on the GPU, since to
    make them takes longer than to read the memory."""

    def __init__(self, boxes: Sequence[LiveBox], seeds: Sequence[int]) -> None:
        self.boxes, self.seeds = boxes, seeds
        # By device and first box.
        self._tiles: dict[tuple[torch.device, int], dict[tuple[str, str, int], torch.Tensor]] = {}

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
        for device, of_device in on_gpu.items():
            for indices in self._groups(of_device):
                for index, value in zip(indices, self._on_gpu(device, indices), strict=True):
                    sums[index] = value
        return sums

    def _groups(self, indices: list[int]) -> Iterator[list[int]]:
        """Yield boxes whose sums are taken at a time: those whose rows lie in one piece, then as many of the others as
        are copied at a time."""
        if whole := [index for index in indices if self.boxes[index].step == 1]:
            yield whole
        yield from batches(
            (
                index,
                self.boxes[index].box.volume * self.boxes[index].region.tensor.element_size(),
                _COPY_BYTES,
            )
            for index in indices
            if self.boxes[index].step != 1
        )

    def _on_gpu(self, device: torch.device, indices: list[int]) -> list[int]:
        from reshard.device.digest_kernels import sums_of_tiles, tiles_on_gpu

        tiles = self._tiles.get((device, indices[0]))
        if tiles is None:
            boxes = [published(self.boxes[index]) for index in indices]
            tiles = tiles_on_gpu(boxes, [self.seeds[index] for index in indices], device)
            if all(box is self.boxes[index] for box, index in zip(boxes, indices, strict=True)):
                self._tiles[device, indices[0]] = tiles  # else some are of copies, which are made anew
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
    """Return a box whose memory has the published numbers in rows: this one, or one with a copy of those held less 1,
    or whose rows lie apart."""
    if box.dtype == box.dtype.published and box.step == 1:
        return box
    numbers = published_numbers(box.matrix().contiguous(), box.dtype)
    rows, columns = numbers.shape
    region, local = Region(numbers, 0, columns), Rows(0, rows, 0, columns)
    return box._replace(region=region, local=local, dtype=box.dtype.published, step=1)
