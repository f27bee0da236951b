"""Stored tensors into live memory: neighbors in a file by one read, through pinned buffers where
there is a GPU."""

from collections.abc import Callable, Iterable

import numpy as np

from reshard.core.dtypes import Dtype
from reshard.core.scratch import Scratch
from reshard.device.live_boxes import LiveBox, Slab, batches, slabs_of
from reshard.device.staging import PINNED_BYTES, ToDevice, slab_bytes
from reshard.storage.io.boxes import BoxReader, Rows, Wanted, place_of
from reshard.storage.io.casts import cast, overflow


class BoxLoader:
    """Reads live boxes from files, and casts them to what the memory holds; several threads may. `multiple`
    returns how many rows of a tensor must be read together."""

    def __init__(
        self, reader: BoxReader, device: ToDevice, multiple: Callable[[str], int] = lambda name: 1
    ) -> None:
        self.reader, self.device, self.multiple, self.scratch = reader, device, multiple, Scratch()

    def batches(self, live_boxes: Iterable[LiveBox]) -> list[list[Slab]]:
        """Return what `load` reads at a time: slabs that are neighbors in a file."""

        def place(live_box: LiveBox) -> tuple[str, int]:
            strips = self.reader.strips(live_box.name) or []
            return place_of(strips, Rows.of(live_box.box), self._stored_dtype(live_box).size)

        return list(batches(s for live_box in sorted(live_boxes, key=place) for s in self._slabs(live_box)))

    def _slabs(self, live_box: LiveBox) -> list[tuple[Slab, int, int]]:
        """Return (slab, its bytes, the most to read at a time). That is less where a CPU casts the
        numbers, so that they stay in its cache."""
        dtype, multiple = self._stored_dtype(live_box), self.multiple(live_box.name)
        read_as_is = dtype == live_box.dtype and self.reader.strips(live_box.name) is not None
        most = PINNED_BYTES if read_as_is else slab_bytes(self.device.device)
        return [(slab, slab.size_bytes, most) for slab in slabs_of(live_box, dtype.size, most, multiple)]

    def _stored_dtype(self, live_box: LiveBox) -> Dtype:
        return self.reader.tensors[live_box.name].dtype

    def load(self, batch: list[Slab]) -> dict[str, int]:
        """Read a batch into memory. Return how many numbers a cast made infinite, by tensor, where any."""
        overflowed: dict[str, int] = {}

        def write(arrays: list[np.ndarray]) -> None:
            wanted = []
            for slab, array in zip(batch, arrays, strict=True):
                name, dtype = slab.live_box.name, self._stored_dtype(slab.live_box)
                if dtype == slab.live_box.dtype:
                    wanted.append(Wanted(name, slab.rows, array))
                elif count := self._read_cast(slab, dtype, array):
                    overflowed[name] = overflowed.get(name, 0) + count
            self.reader.read_all(wanted)

        self.device.fill([slab.bytes for slab in batch], write)
        return overflowed

    def _read_cast(self, slab: Slab, stored_dtype: Dtype, out: np.ndarray) -> int:
        """Read a slab and cast it into `out`, bytes ``[rows, bytes of a row]``; return how many numbers became
        infinite."""
        stored = self.scratch.array("stored", len(out), slab.rows.columns * stored_dtype.size)
        self.reader.read(slab.live_box.name, slab.rows, stored)
        numbers = stored.view(stored_dtype.numpy())
        converted = cast(numbers, stored_dtype, slab.live_box.dtype, slab.live_box.name)
        out[:] = converted.view(np.uint8)
        return overflow(numbers, converted, stored_dtype, slab.live_box.dtype)
