"""Packing for buckets and slabs: both ends of a pair cut its pieces into the same rounds, and copy
a round into or out of memory that travels, or that both have.

A *piece* is a box of a shard that goes into one local tensor (`addresses.Pieces`), a *tile* a part
of it of at most 64 KiB, a *block* what a codec makes of parts of pieces together
(`reshard.refit.codecs.blocks`); a *round* is what fits into a bucket. An engine's rounds are
something else: the order in which its layers pass through one memory (`Engine.staged_rounds`).
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from reshard.refit.codecs import IN_BLOCKS, PLAIN, WIDENS, bytes_in_destination, bytes_in_source
from reshard.refit.codecs.blocks import BlocksToMake
from reshard.refit.codecs.makers import maker_of
from reshard.refit.copying.copies import CopyTable
from reshard.refit.copying.flows import Incoming, Outgoing, Placed
from reshard.refit.copying.tables import (
    ALIGNMENT,
    CODEC,
    DST,
    DST_PITCH,
    ROWS,
    SRC,
    SRC_PITCH,
    WIDTH,
    empty_table,
    pack_into_rounds,
    packed_width,
    tiles_of,
)


class PackedPair:
    """One direction of one pair: its tiles and blocks, and the round and offset of each. `is_dense` says of each
    round whether tiles fill its buffer, with no padding between them.

    `end`, SRC or DST, is what the table has filled in. What a codec makes narrower is encoded when
    it is packed, what it widens when it is unpacked; blocks are made when they are packed.
    """

    def __init__(self, flow: Outgoing | Incoming, end: int, limit: int) -> None:
        self.end, self.places = end, flow.places
        self.host_memory = flow.host_memory if isinstance(flow, Outgoing) else np.empty(0, np.int64)
        self.far, self.far_pitch = (DST, DST_PITCH) if end == SRC else (SRC, SRC_PITCH)
        codecs = flow.table[:, CODEC]
        in_blocks = IN_BLOCKS[codecs]
        self.tiles, self.packed_width = _tiles(flow.table[~in_blocks], end)
        pieces = Placed(flow.table, flow.destinations).where(in_blocks)
        self.packed_blocks = maker_of(codecs).pack(pieces, flow.places)
        self.sizes = np.concatenate([self.tiles[:, ROWS] * self.packed_width, self.packed_blocks.sizes])
        self.round_of, self.offset = pack_into_rounds(self.sizes, limit)
        self.rounds = int(self.round_of.max()) + 1 if len(self.sizes) else 0
        self.bytes_by_round = np.zeros(self.rounds, np.int64)
        np.maximum.at(self.bytes_by_round, self.round_of, self.offset + self.sizes + -self.sizes % ALIGNMENT)
        tiles = np.bincount(self.round_of[: len(self.tiles)], self.sizes[: len(self.tiles)], self.rounds)
        self.is_dense = tiles == self.bytes_by_round

    def copies(self, index: int, start: int) -> np.ndarray:
        """Return the copies of a round between memory and a dense buffer at address `start`."""
        n = len(self.tiles)
        chosen = self.round_of[:n] == index
        table = self.tiles[chosen].copy()
        table[:, self.far] = start + self.offset[:n][chosen]
        table[:, self.far_pitch] = self.packed_width[chosen]
        if self.end == SRC:
            return table
        first, last = self._blocks_of_round(index)
        begins = start + self.offset[n + first : n + last]
        return np.concatenate([table, self.packed_blocks.copies(first, last, begins)])

    def blocks(self, index: int, start: int, device: torch.device) -> list[BlocksToMake]:
        """Return what makes the blocks of a round, if it has any, in a buffer at address `start`."""
        n, (first, last) = len(self.tiles), self._blocks_of_round(index)
        if self.end == DST or first == last:
            return []
        begins = start + self.offset[n + first : n + last]
        return [self.packed_blocks.making(first, last, begins, device)]

    def _blocks_of_round(self, index: int) -> tuple[int, int]:
        """Return the first of a round's blocks, which follow each other, and the one after the last."""
        first, last = np.searchsorted(self.round_of[len(self.tiles) :], [index, index + 1])
        return int(first), int(last)

    def bytes_of_round(self, index: int) -> int:
        """Return the bytes of a round in the buffer, padding included."""
        return int(self.bytes_by_round[index]) if 0 <= index < self.rounds else 0


def _tiles(table: np.ndarray, end: int) -> tuple[np.ndarray, np.ndarray]:
    """Cut copies into tiles at both ends alike; return them, and the bytes of each tile's rows
    while they travel."""
    pitch = SRC_PITCH if end == SRC else DST_PITCH
    # Pitches are only known here, so they must not decide.
    plain = table.copy()
    plain[:, [SRC, DST]], plain[:, CODEC] = 0, PLAIN
    plain[:, WIDTH] = packed_width(table)
    plain[:, SRC_PITCH] = plain[:, DST_PITCH] = plain[:, WIDTH] + 1
    tiles, origin = tiles_of(plain)
    row, byte = np.divmod(tiles[:, SRC], plain[origin, SRC_PITCH])
    packed, codec = tiles[:, WIDTH].copy(), table[origin, CODEC]
    converts = WIDENS[codec] if end == DST else ~WIDENS[codec]
    tiles[:, CODEC] = np.where(converts, codec, PLAIN)
    if end == SRC:
        byte = bytes_in_source(byte, tiles[:, CODEC])
    else:
        byte = bytes_in_destination(byte, tiles[:, CODEC])
        tiles[:, WIDTH] = bytes_in_destination(tiles[:, WIDTH], tiles[:, CODEC])
    tiles[:, end] = table[origin, end] + row * table[origin, pitch] + byte
    tiles[:, pitch] = table[origin, pitch]
    return tiles, packed


class PackedRound(NamedTuple):
    """The work of one end in one round, ready to run."""

    copies: CopyTable
    blocks: list[BlocksToMake]

    @staticmethod
    def of(
        pairs: Sequence[tuple[PackedPair, int, int]], device: torch.device, aside: bool = False
    ) -> "PackedRound":
        """Return that of rounds of pairs, given by number, in buffers at these addresses."""
        tables = [empty_table(), *(pair.copies(index, start) for pair, index, start in pairs)]
        blocks = [table for pair, index, start in pairs for table in pair.blocks(index, start, device)]
        host_memory = np.unique(
            np.concatenate([*(pair.host_memory for pair, *_ in pairs), np.empty(0, np.int64)])
        )
        copies = CopyTable(np.concatenate(tables), device, aside=aside, host_memory=host_memory)
        return PackedRound(copies, blocks)

    def move(self, far: int, distance: int) -> None:
        """Follow a buffer that lies `distance` bytes, a multiple of 16, further on; `far` is its end of the copies:
        DST where it is packed, SRC where it is unpacked."""
        self.copies.move(far, distance)
        for blocks in self.blocks:
            blocks.move(distance)

    @property
    def launches(self) -> int:
        """Kernels that `run` launches."""
        return self.copies.launches + len(self.blocks)

    def run(self, programs: int | None = None) -> None:
        """Carry it out; on a GPU, enqueue it on the current stream (`CopyTable.run`)."""
        self.copies.run(programs)
        for blocks in self.blocks:
            blocks.run()
