"""Stored tensors into live memory: neighbors in a file by one read, through pinned buffers where a GPU has them."""

from collections.abc import Callable, Iterable, Mapping

import numpy as np

from reshard.core.dtypes import Dtype
from reshard.megatron.live.memory import PINNED_BYTES, ToDevice, slab_bytes
from reshard.megatron.live.pieces import Part, Piece, bundles, parts_of
from reshard.storage.io.boxes import BoxReader, Rows, Wanted, place_of
from reshard.storage.io.casts import cast, overflow
from reshard.storage.io.streams import Scratch, TensorInfo


class Filler:
    """Reads pieces into live memory; several threads may. `tensors` are what is stored, `multiple` of how many rows
    each can be read."""

    def __init__(
        self,
        tensors: Mapping[str, TensorInfo],
        reader: BoxReader,
        device: ToDevice,
        multiple: Callable[[str], int] = lambda name: 1,
    ) -> None:
        self.tensors, self.reader, self.device, self.multiple = tensors, reader, device, multiple
        self.scratch = Scratch()

    def groups(self, pieces: Iterable[Piece]) -> list[list[Part]]:
        """What is read at a time: neighbors in a file."""

        def place(piece: Piece) -> tuple[str, int]:
            strips = self.reader.strips(piece.name) or []
            return place_of(strips, Rows.of(piece.box), self._dtype(piece).size)

        return list(bundles(part for piece in sorted(pieces, key=place) for part in self._parts(piece)))

    def _parts(self, piece: Piece) -> list[tuple[Part, int, int]]:
        """The parts of a piece, with their bytes and how much is read at a time: less where a CPU computes the
        numbers, so that they stay in its cache."""
        there, multiple = self._dtype(piece), self.multiple(piece.name)
        stored = there == piece.dtype and self.reader.strips(piece.name) is not None
        most = PINNED_BYTES if stored else slab_bytes(self.device.device)
        return [(part, part.size_bytes, most) for part in parts_of(piece, there.size, most, multiple)]

    def _dtype(self, piece: Piece) -> Dtype:
        return self.tensors[piece.name].dtype

    def fill(self, group: list[Part]) -> dict[str, int]:
        """Fill some parts; how many numbers became infinite, by tensor, where any did."""
        overflowed: dict[str, int] = {}

        def write(outs: list[np.ndarray]) -> None:
            plain = []
            for part, out in zip(group, outs, strict=True):
                name, there = part.piece.name, self._dtype(part.piece)
                if there == part.piece.dtype:
                    plain.append(Wanted(name, part.rows, out))
                elif count := self._cast(part, there, out):
                    overflowed[name] = overflowed.get(name, 0) + count
            self.reader.read_all(plain)

        self.device.fill([part.bytes for part in group], write)
        return overflowed

    def _cast(self, part: Part, there: Dtype, out: np.ndarray) -> int:
        stored = self.scratch.array("stored", len(out), part.rows.columns * there.size)
        self.reader.read(part.piece.name, part.rows, stored)
        numbers = stored.view(there.numpy())
        found = cast(numbers, there, part.piece.dtype)
        out[:] = found.view(np.uint8)
        return overflow(numbers, found, there, part.piece.dtype)
