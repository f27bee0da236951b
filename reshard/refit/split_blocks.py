"""Blocks of fp8 of which several of the trainer's ranks hold parts, where not all of these can be read in place: the parts
come as bf16 into a slab of the inference rank, which makes the blocks from there.

Which blocks these are is known when a refit is planned; by which ways their parts come is known later, and may change. So the
plan cuts pieces where such blocks begin and end, and gives each run of such blocks beside each other a *slot*: a place in the
slab, and the round in which it is that slot's. Slots of which some part is sent are used; blocks of all others are made from
where their parts lie.
"""

from collections.abc import Collection, Mapping
from typing import NamedTuple

import numpy as np
import torch

from reshard.engines.base import Engine
from reshard.refit.addresses import (
    APART,
    AT,
    COLUMN,
    COUNT,
    ELEMENTS,
    ENCODED,
    IN_ROUND,
    NO_SLOT,
    PARTS,
    ROW,
    SLOT,
    Pieces,
)
from reshard.refit.blocks import BF16, ENCODING, BlockTable, Strips, places_of, strips_of
from reshard.refit.codecs import BEFORE_BLOCKS, BLOCK, BLOCKWISE, by_rounding
from reshard.refit.packed_blocks import digests_as_made, digests_as_served, parcels_of
from reshard.refit.tables import (
    CODEC,
    DST,
    DST_PITCH,
    ROWS,
    SRC,
    SRC_PITCH,
    WIDTH,
    empty_table,
)
from reshard.refit.transports import packing

SLAB_BYTES = 128 << 20  # unless one run of blocks alone is larger: 256 bytes for each column of a matrix
ROW_BYTES = BLOCK * BF16.size  # of a block in the slab
BLOCK_BYTES = BLOCK * ROW_BYTES


def divided(pieces: Mapping[int, Pieces], shapes: np.ndarray, first_round: int) -> dict[int, Pieces]:
    """Pieces, by trainer's rank, cut where blocks begin and end of which several ranks have parts, and the slots of these
    filled in, from `first_round` on.

    `shapes` are the rows and columns ``[local tensors, 2]`` of those in blocks. Each block is then one rank's, or of
    pieces with one slot.
    """
    names = [name for some in pieces.values() for name in some.names]
    asked = np.concatenate([some.asked for some in pieces.values()])
    into = np.concatenate([some.into for some in pieces.values()])
    ranks = np.repeat(list(pieces), [len(some.into) for some in pieces.values()])
    begins, ends = into[:, 1:], into[:, 1:] + asked[:, [COUNT, ELEMENTS]]

    blockwise = np.flatnonzero(BLOCKWISE[asked[:, ENCODED]])
    inner = _whole_blocks(begins, ends, shapes[into[:, 0]])
    piece, row, column = _cut_blocks(begins[blockwise], ends[blockwise], inner[:, blockwise]).T
    piece = blockwise[piece]
    # One number for each block, in the order of tensor, row and column.
    blocks, which = np.unique((into[piece, 0] << 40) | (row << 20) | column, return_inverse=True)
    least, most = np.full(len(blocks), ranks.max(initial=0)), np.full(len(blocks), ranks.min(initial=0))
    np.minimum.at(least, which, ranks[piece])
    np.maximum.at(most, which, ranks[piece])
    shared = least != most
    if not shared.any():
        return dict(pieces)

    slot_of = np.full(len(blocks), NO_SLOT)
    slot_of[shared], slots = _slots(blocks[shared], first_round)
    these = np.flatnonzero(np.isin(piece, piece[slot_of[which] != NO_SLOT]))
    runs = _runs(piece[these], row[these], column[these], slot_of[which[these]])
    run_begins = np.maximum(begins[runs.piece], runs.corner)
    run_ends = np.minimum(ends[runs.piece], runs.far)
    of_runs = _placed(slots, runs.slot, run_begins)

    cut = np.unique(runs.piece)
    kept = np.setdiff1d(np.arange(len(into)), cut)
    rest = cut[(inner[1, cut] > inner[0, cut]).all(1)]  # what lies between
    origin = np.concatenate([kept, rest, runs.piece])
    new_begins = np.concatenate([begins[kept], inner[0, rest], run_begins])
    new_ends = np.concatenate([ends[kept], inner[1, rest], run_ends])
    parts = np.concatenate([np.full((len(kept) + len(rest), PARTS), NO_SLOT), of_runs])
    order = np.argsort(origin, kind="stable")
    origin, new_begins, new_ends, parts = (some[order] for some in (origin, new_begins, new_ends, parts))
    new_asked = asked[origin]
    new_asked[:, [ROW, COLUMN]] += new_begins - begins[origin]
    new_asked[:, [COUNT, ELEMENTS]] = new_ends - new_begins
    new_into = np.concatenate([into[origin, :1], new_begins], 1)
    found = {}
    for rank in pieces:
        of_rank = np.flatnonzero(ranks[origin] == rank)
        of_names = [names[index] for index in origin[of_rank].tolist()]
        found[rank] = Pieces(of_names, new_asked[of_rank], new_into[of_rank], parts[of_rank])
    return found


# Columns of slots: the round, the first byte in the slab, the bytes from one row to the next, and the first column of blocks.
SLOT_ROUND, SLOT_BEGIN, SLOT_PITCH, FIRST_BLOCK = range(4)


def _slots(blocks: np.ndarray, first_round: int) -> tuple[np.ndarray, np.ndarray]:
    """The slots of these blocks, which have one number each in the order of tensor, row and column; and by its number
    what each slot is: a run of blocks beside each other."""
    begins = np.diff(blocks, prepend=-2) != 1  # a row has fewer than 2**20 blocks
    starts = np.flatnonzero(begins)
    lengths = np.diff(np.append(starts, len(blocks)))
    rounds, offsets = packing.pack_in_order(lengths * BLOCK_BYTES, SLAB_BYTES)
    slots = np.empty((len(starts), 4), np.int64)
    slots[:, SLOT_ROUND], slots[:, SLOT_BEGIN] = first_round + rounds, offsets
    slots[:, SLOT_PITCH], slots[:, FIRST_BLOCK] = lengths * ROW_BYTES, blocks[starts] & 0xFFFFF
    return np.cumsum(begins) - 1, slots


class Runs(NamedTuple):
    """Runs of blocks beside each other that a piece reaches, all of one slot or of none: the piece, the slot, and where the
    first block begins and the last one ends."""

    piece: np.ndarray
    slot: np.ndarray
    corner: np.ndarray
    far: np.ndarray


def _runs(piece: np.ndarray, row: np.ndarray, column: np.ndarray, slot: np.ndarray) -> Runs:
    """From the piece, row of blocks, column of blocks and slot of each block that a piece reaches."""
    order = np.lexsort((column, row, piece))
    piece, row, column, slot = (some[order] for some in (piece, row, column, slot))
    new_piece, new_row, new_slot = (np.diff(some, prepend=-2) != 0 for some in (piece, row, slot))
    apart = np.diff(column, prepend=-2) != 1
    first = np.flatnonzero(new_piece | new_row | new_slot | apart)
    last = np.append(first[1:], len(piece)) - 1
    corner = np.stack([row[first], column[first]], 1)
    far = np.stack([row[first], column[last]], 1) + 1
    return Runs(piece[first], slot[first], corner * BLOCK, far * BLOCK)


def _placed(slots: np.ndarray, slot: np.ndarray, begins: np.ndarray) -> np.ndarray:
    """`Pieces.parts` of pieces that begin at a row and column of a local tensor, within these slots."""
    found = np.full((len(slot), PARTS), NO_SLOT)
    held = np.flatnonzero(slot != NO_SLOT)
    some = slots[slot[held]]
    row, column = begins[held, 0] % BLOCK, begins[held, 1] - some[:, FIRST_BLOCK] * BLOCK
    found[held, SLOT], found[held, IN_ROUND], found[held, APART] = (
        slot[held],
        some[:, SLOT_ROUND],
        some[:, SLOT_PITCH],
    )
    found[held, AT] = some[:, SLOT_BEGIN] + row * some[:, SLOT_PITCH] + column * BF16.size
    return found


def _whole_blocks(begins: np.ndarray, ends: np.ndarray, extents: np.ndarray) -> np.ndarray:
    """Where the blocks begin and end, ``[2, pieces, 2]``, that pieces cover from border to border; empty at its end where a
    piece has none."""
    first = -(-begins // BLOCK) * BLOCK
    last = np.where(ends == extents, ends, ends // BLOCK * BLOCK)
    none = first > last
    return np.stack([np.where(none, ends, first), np.where(none, ends, last)])


def _cut_blocks(begins: np.ndarray, ends: np.ndarray, inner: np.ndarray) -> np.ndarray:
    """The blocks around what pieces cover whole, each as (piece, row of blocks, column of blocks)."""
    borders = np.stack([begins, inner[0], inner[1], ends])
    found = [np.zeros((0, 3), np.int64)]
    for i, j in ((i, j) for i in range(3) for j in range(3) if (i, j) != (1, 1)):
        begin = np.stack([borders[i, :, 0], borders[j, :, 1]], 1)
        end = np.stack([borders[i + 1, :, 0], borders[j + 1, :, 1]], 1)
        pieces = np.flatnonzero((end > begin).all(1))
        first, last = begin[pieces] // BLOCK, (end[pieces] - 1) // BLOCK
        down, across = (last - first + 1).T
        index = np.repeat(np.arange(len(pieces)), down * across)
        within = np.arange(len(index)) - np.repeat(np.cumsum(down * across) - down * across, down * across)
        row, column = first[index, 0] + within // across[index], first[index, 1] + within % across[index]
        found.append(np.stack([pieces[index], row, column], 1))
    return np.concatenate(found)


class PartsSlab:
    """The slab of an inference rank, in which parts of blocks wait for each other, and what is made of them: a round at a
    time. It has no memory where no part is sent.

    `through` says by trainer's rank which pieces come through it, `numbers` in which rounds.
    """

    def __init__(self, engine: Engine, device: torch.device) -> None:
        self.engine, self.device = engine, device
        self.memory: torch.Tensor | None = None
        self.through: dict[int, np.ndarray] = {}
        self.numbers: set[int] = set()
        self.made: dict[int, list[BlockTable]] = {}
        self.pieces = Pieces.none()

    def arrange(self, pieces: Mapping[int, Pieces], sent: Collection[int]) -> None:
        """Make ready for these pieces, of which those of the trainer's ranks in `sent` are sent; where they are served
        may have moved."""
        slots = np.concatenate([np.zeros(0, np.int64), *(pieces[rank].parts[:, SLOT] for rank in sent)])
        used = slots[slots != NO_SLOT]
        self.through = {rank: np.isin(some.parts[:, SLOT], used) for rank, some in pieces.items()}
        self.pieces = Pieces.joined([some.where(self.through[rank]) for rank, some in pieces.items()])
        _, asked, _, parts = self.pieces
        ends = parts[:, AT] + (asked[:, COUNT] - 1) * parts[:, APART] + asked[:, ELEMENTS] * BF16.size
        size = int(ends.max(initial=0))
        if self.memory is None or len(self.memory) != size:
            self.memory = torch.zeros(size, dtype=torch.uint8, device=self.device) if size else None
        self.numbers = set(parts[:, IN_ROUND].tolist())
        self.made = {number: self._tables(number) for number in self.numbers}

    @property
    def launches(self) -> int:
        """Kernels that make the blocks of all rounds."""
        return sum(len(tables) for tables in self.made.values())

    def described(self) -> dict[str, int]:
        """For logs: the bytes of parts that come through it, in how many rounds, and its own."""
        moved = int(self.pieces.asked[:, [COUNT, ELEMENTS]].prod(1).sum()) * BF16.size
        size = 0 if self.memory is None else len(self.memory)
        return {"bytes": moved, "rounds": len(self.numbers), "slab_bytes": size}

    def placed(self, rank: int, table: np.ndarray, pieces: Pieces) -> np.ndarray:
        """A table of a rank's pieces with the destination's end filled in (`addresses.destination_table`), where those
        that come through the slab go there, as bf16."""
        through = self.through[rank]
        if self.memory is None or not through.any():
            return table
        table, (_, asked, _, parts) = table.copy(), pieces.where(through)
        table[through, DST] = self.memory.data_ptr() + parts[:, AT]
        table[through, DST_PITCH], table[through, WIDTH] = parts[:, APART], asked[:, ELEMENTS] * BF16.size
        table[through, CODEC] = BEFORE_BLOCKS[asked[:, ENCODED]]
        return table

    def make(self, number: int) -> None:
        """Make the blocks of a round, whose parts are in the slab now; on a GPU, enqueue it on the current stream."""
        for table in self.made[number]:
            table.run()

    def mismatches(self, number: int) -> list[int]:
        """The indices of the local tensors that serve other blocks than come of what is in the slab now."""
        places = places_of(self.engine)
        table, into = self._sources(number, places)
        parcels = parcels_of(table, into, places)
        wrong = digests_as_made(parcels, places, self.device) != digests_as_served(parcels, self.device)
        return [int(index) for index in np.unique(parcels.tensors[wrong])]

    def _tables(self, number: int) -> list[BlockTable]:
        places = places_of(self.engine)
        table, into = self._sources(number, places)
        found = []
        for rounding, these in by_rounding(table[:, CODEC]):
            strips: Strips = strips_of(table[these], into[these], np.zeros(these.sum(), np.int64), places)
            found.append(BlockTable(strips, rounding, self.device, np.arange(len(strips.items))))
        return found

    def _sources(self, number: int, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of a round's pieces the table with the source's end filled in, which is the slab; and where they go."""
        assert self.memory is not None
        _, asked, into, parts = self.pieces.where(self.pieces.parts[:, IN_ROUND] == number)
        table = empty_table(len(into))
        table[:, SRC], table[:, SRC_PITCH] = self.memory.data_ptr() + parts[:, AT], parts[:, APART]
        table[:, ROWS], table[:, WIDTH] = asked[:, COUNT], asked[:, ELEMENTS]
        table[:, CODEC] = places[into[:, 0], ENCODING]
        return table, into
