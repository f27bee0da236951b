"""Boxes of canonical tensors that lie in live memory, and how they are moved: neighbors in a file at a time."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeVar

import torch

from reshard.core.boxes import Box
from reshard.core.dtypes import Dtype
from reshard.device.memory import Region
from reshard.megatron.live.memory import ALIGNMENT, bytes_of
from reshard.storage.io.boxes import Rows

T = TypeVar("T")


class Piece(NamedTuple):
    """A box of canonical tensor `name`, which lies in a region of this rank's memory at `local`."""

    name: str
    box: Box
    region: Region
    local: Rows
    dtype: Dtype


class Part(NamedTuple):
    """Some rows of a piece, `rows` in its canonical tensor, and their bytes on disk."""

    piece: Piece
    rows: Rows
    size_bytes: int

    @property
    def bytes(self) -> torch.Tensor:
        """Where they are in memory, ``[rows, bytes of a row]``."""
        local, shift = self.piece.local, self.piece.local.start - self.piece.box.offsets[0]
        local = local._replace(start=self.rows.start + shift, stop=self.rows.stop + shift)
        return bytes_of(self.piece.region, local)


def parts_of(piece: Piece, itemsize: int, slab_bytes: int, multiple: int = 1) -> list[Part]:
    """A piece cut into slabs of about `slab_bytes`, of numbers of `itemsize` bytes on disk or in memory, whichever
    are larger; rows in multiples of `multiple`."""
    slabs = Rows.of(piece.box).slabs(max(itemsize, piece.dtype.size), multiple, slab_bytes)
    return [Part(piece, slab, (slab.stop - slab.start) * slab.columns * itemsize) for slab in slabs]


def bundles(items: Iterable[tuple[T, int, int]]) -> Iterator[list[T]]:
    """Items in their order, each given with its bytes and the most that goes with it, in bundles of as many bytes
    as the first of each allows, or of one larger item."""
    bundle: list[T] = []
    room = 0
    for item, size, most in items:
        if size > room:
            if bundle:
                yield bundle
            bundle, room = [], most
        bundle.append(item)
        room -= size + ALIGNMENT
    if bundle:
        yield bundle
