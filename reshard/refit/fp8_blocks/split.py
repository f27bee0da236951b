"""Blocks of fp8 of which several of the trainer's ranks hold parts, where not all of these parts
can be read in place: the parts come as bf16 into a slab of the inference rank, which makes the
blocks from there.

Which blocks these are is known when a refit is planned. By which transports their parts come is
known later, and may change. So the plan cuts pieces where such blocks begin and end, and gives each
run of such blocks beside each other a *slot*: a place in the slab, and the round in which the place
is its own. A slot is used if some part of its blocks is sent; other blocks are made from where
their parts lie.
"""

from collections.abc import Collection, Mapping
from typing import NamedTuple

import numpy as np
import torch

from reshard.quantization.fp8_blocks import BLOCK
from reshard.refit.codecs import BEFORE_BLOCKS, IN_BLOCKS
from reshard.refit.codecs.places import ENCODING, places_of
from reshard.refit.copying.addresses import (
    COLUMN_COUNT,
    FIRST_COLUMN,
    FIRST_ROW,
    NO_SLOT,
    PART_BYTE,
    PART_COLUMNS,
    PART_ROUND,
    PART_SLOT,
    PART_STRIDE,
    REQUEST_CODEC,
    ROW_COUNT,
    Pieces,
)
from reshard.refit.copying.tables import (
    CODEC,
    DST,
    DST_PITCH,
    ROWS,
    SRC,
    SRC_PITCH,
    WIDTH,
    empty_table,
    pack_into_rounds,
)
from reshard.refit.engine import Engine
from reshard.refit.fp8_blocks.items import BF16, BlockTable, items_of

SLAB_BYTES = 128 << 20  # unless one run of blocks alone is larger: 256 bytes for each column of a matrix
ROW_BYTES = BLOCK * BF16.size  # of a block in the slab
BLOCK_BYTES = BLOCK * ROW_BYTES


def split_pieces(pieces: Mapping[int, Pieces], shapes: np.ndarray, first_round: int) -> dict[int, Pieces]:
    """Cut pieces, by trainer's rank, at the borders of blocks of which several ranks have parts,
    and fill in the slots of these, from round `first_round` on.

    `shapes` are the rows and columns ``[local tensors, 2]`` of what is served in blocks. Afterward
    each block belongs to one rank, or to pieces with one slot.
    """
    names = [name for of_rank in pieces.values() for name in of_rank.names]
    requests = np.concatenate([of_rank.requests for of_rank in pieces.values()])
    destinations = np.concatenate([of_rank.destinations for of_rank in pieces.values()])
    ranks = np.repeat(list(pieces), [len(of_rank.destinations) for of_rank in pieces.values()])
    begins, ends = destinations[:, 1:], destinations[:, 1:] + requests[:, [ROW_COUNT, COLUMN_COUNT]]

    in_blocks = np.flatnonzero(IN_BLOCKS[requests[:, REQUEST_CODEC]])
    inner = _whole_blocks(begins, ends, shapes[destinations[:, 0]])
    piece, row, column = _cut_blocks(begins[in_blocks], ends[in_blocks], inner[:, in_blocks]).T
    piece = in_blocks[piece]
    # One number for each block, in the order of tensor, row and column.
    blocks, which = np.unique((destinations[piece, 0] << 40) | (row << 20) | column, return_inverse=True)
    least, most = np.full(len(blocks), ranks.max(initial=0)), np.full(len(blocks), ranks.min(initial=0))
    np.minimum.at(least, which, ranks[piece])
    np.maximum.at(most, which, ranks[piece])
    shared = least != most
    if not shared.any():
        return dict(pieces)

    slot_of = np.full(len(blocks), NO_SLOT)
    slot_of[shared], slots = _slots(blocks[shared], first_round)
    with_slots = np.flatnonzero(np.isin(piece, piece[slot_of[which] != NO_SLOT]))
    runs = _runs(piece[with_slots], row[with_slots], column[with_slots], slot_of[which[with_slots]])
    run_begins = np.maximum(begins[runs.piece], runs.corner)
    run_ends = np.minimum(ends[runs.piece], runs.far)
    of_runs = _placed(slots, runs.slot, run_begins)

    cut = np.unique(runs.piece)
    kept = np.setdiff1d(np.arange(len(destinations)), cut)
    rest = cut[(inner[1, cut] > inner[0, cut]).all(1)]  # what lies between
    origin = np.concatenate([kept, rest, runs.piece])
    new_begins = np.concatenate([begins[kept], inner[0, rest], run_begins])
    new_ends = np.concatenate([ends[kept], inner[1, rest], run_ends])
    parts = np.concatenate([np.full((len(kept) + len(rest), PART_COLUMNS), NO_SLOT), of_runs])
    order = np.argsort(origin, kind="stable")
    origin, new_begins, new_ends, parts = (column[order] for column in (origin, new_begins, new_ends, parts))
    new_asked = requests[origin]
    new_asked[:, [FIRST_ROW, FIRST_COLUMN]] += new_begins - begins[origin]
    new_asked[:, [ROW_COUNT, COLUMN_COUNT]] = new_ends - new_begins
    new_into = np.concatenate([destinations[origin, :1], new_begins], 1)
    cut_pieces = {}
    for rank in pieces:
        chosen = np.flatnonzero(ranks[origin] == rank)
        rank_names = [names[index] for index in origin[chosen].tolist()]
        cut_pieces[rank] = Pieces(rank_names, new_asked[chosen], new_into[chosen], parts[chosen])
    return cut_pieces


# Columns of a slot: its round, its first byte in the slab, the bytes from one row to the next, and
# its first column of blocks.
SLOT_ROUND, SLOT_BEGIN, SLOT_PITCH, FIRST_BLOCK = range(4)


def _slots(blocks: np.ndarray, first_round: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the slot number of each block, and the slots: runs of blocks beside each other.

    `blocks` has one number for each block, in the order of tensor, row and column.
    """
    begins = np.diff(blocks, prepend=-2) != 1  # a row has fewer than 2**20 blocks
    starts = np.flatnonzero(begins)
    lengths = np.diff(np.append(starts, len(blocks)))
    rounds, offsets = pack_into_rounds(lengths * BLOCK_BYTES, SLAB_BYTES)
    slots = np.empty((len(starts), 4), np.int64)
    slots[:, SLOT_ROUND], slots[:, SLOT_BEGIN] = first_round + rounds, offsets
    slots[:, SLOT_PITCH], slots[:, FIRST_BLOCK] = lengths * ROW_BYTES, blocks[starts] & 0xFFFFF
    return np.cumsum(begins) - 1, slots


class Runs(NamedTuple):
    """Runs of blocks beside each other that a piece reaches, all of one slot or of none: the piece,
    the slot, and the element at which the first block begins and the last one ends."""

    piece: np.ndarray
    slot: np.ndarray
    corner: np.ndarray
    far: np.ndarray


def _runs(piece: np.ndarray, row: np.ndarray, column: np.ndarray, slot: np.ndarray) -> Runs:
    """Return the runs, from the piece, row of blocks, column of blocks and slot of each block that
    a piece reaches."""
    order = np.lexsort((column, row, piece))
    piece, row, column, slot = (values[order] for values in (piece, row, column, slot))
    new_piece, new_row, new_slot = (np.diff(values, prepend=-2) != 0 for values in (piece, row, slot))
    apart = np.diff(column, prepend=-2) != 1
    first = np.flatnonzero(new_piece | new_row | new_slot | apart)
    last = np.append(first[1:], len(piece)) - 1
    corner = np.stack([row[first], column[first]], 1)
    far = np.stack([row[first], column[last]], 1) + 1
    return Runs(piece[first], slot[first], corner * BLOCK, far * BLOCK)


def _placed(slots: np.ndarray, slot: np.ndarray, begins: np.ndarray) -> np.ndarray:
    """Return `Pieces.parts` of pieces that begin at a row and column of a local tensor, within
    these slots."""
    parts = np.full((len(slot), PART_COLUMNS), NO_SLOT)
    placed = np.flatnonzero(slot != NO_SLOT)
    own = slots[slot[placed]]
    row, column = begins[placed, 0] % BLOCK, begins[placed, 1] - own[:, FIRST_BLOCK] * BLOCK
    parts[placed, PART_SLOT], parts[placed, PART_ROUND] = slot[placed], own[:, SLOT_ROUND]
    parts[placed, PART_STRIDE] = own[:, SLOT_PITCH]
    parts[placed, PART_BYTE] = own[:, SLOT_BEGIN] + row * own[:, SLOT_PITCH] + column * BF16.size
    return parts


def _whole_blocks(begins: np.ndarray, ends: np.ndarray, extents: np.ndarray) -> np.ndarray:
    """Return where the blocks begin and end that pieces cover from border to border: ``[2, pieces,
    2]``, empty at the piece's end where it covers none."""
    first = -(-begins // BLOCK) * BLOCK
    last = np.where(ends == extents, ends, ends // BLOCK * BLOCK)
    none = first > last
    return np.stack([np.where(none, ends, first), np.where(none, ends, last)])


def _cut_blocks(begins: np.ndarray, ends: np.ndarray, inner: np.ndarray) -> np.ndarray:
    """Return the blocks that pieces cover in part, each as (piece, row of blocks, column of
    blocks)."""
    borders = np.stack([begins, inner[0], inner[1], ends])
    cut_blocks = [np.zeros((0, 3), np.int64)]
    for i, j in ((i, j) for i in range(3) for j in range(3) if (i, j) != (1, 1)):
        begin = np.stack([borders[i, :, 0], borders[j, :, 1]], 1)
        end = np.stack([borders[i + 1, :, 0], borders[j + 1, :, 1]], 1)
        pieces = np.flatnonzero((end > begin).all(1))
        first, last = begin[pieces] // BLOCK, (end[pieces] - 1) // BLOCK
        down, across = (last - first + 1).T
        index = np.repeat(np.arange(len(pieces)), down * across)
        within = np.arange(len(index)) - np.repeat(np.cumsum(down * across) - down * across, down * across)
        row, column = first[index, 0] + within // across[index], first[index, 1] + within % across[index]
        cut_blocks.append(np.stack([pieces[index], row, column], 1))
    return np.concatenate(cut_blocks)


class SplitBlocksSlab:
    """The slab of an inference rank in which the parts of blocks meet, and the making of the
    blocks, a round at a time.

    It has no memory where no part is sent. `through` masks the pieces that come through it, by
    trainer's rank; `numbers` are the rounds in which they do.
    """

    def __init__(self, engine: Engine, device: torch.device) -> None:
        self.engine, self.device = engine, device
        self.memory: torch.Tensor | None = None
        self.through: dict[int, np.ndarray] = {}
        self.numbers: set[int] = set()
        self.made: dict[int, BlockTable] = {}
        self.pieces = Pieces.none()

    def arrange(self, pieces: Mapping[int, Pieces], sent: Collection[int]) -> None:
        """Make ready for these pieces, of which the trainer's ranks in `sent` send theirs. Called
        again when what is served has moved."""
        slots = np.concatenate([np.zeros(0, np.int64), *(pieces[rank].parts[:, PART_SLOT] for rank in sent)])
        used = slots[slots != NO_SLOT]
        self.through = {rank: np.isin(of_rank.parts[:, PART_SLOT], used) for rank, of_rank in pieces.items()}
        self.pieces = Pieces.joined([of_rank.where(self.through[rank]) for rank, of_rank in pieces.items()])
        _, requests, _, parts = self.pieces
        ends = (
            parts[:, PART_BYTE]
            + (requests[:, ROW_COUNT] - 1) * parts[:, PART_STRIDE]
            + requests[:, COLUMN_COUNT] * BF16.size
        )
        size = int(ends.max(initial=0))
        if self.memory is None or len(self.memory) != size:
            self.memory = torch.zeros(size, dtype=torch.uint8, device=self.device) if size else None
        self.numbers = set(parts[:, PART_ROUND].tolist())
        self.made = {number: self._table(number) for number in self.numbers}

    @property
    def launches(self) -> int:
        """Return how many kernels make the blocks of all rounds."""
        return len(self.made)

    def described(self) -> dict[str, int]:
        """Return, for logs, the bytes that come through it, in how many rounds, and its own bytes."""
        moved = int(self.pieces.requests[:, [ROW_COUNT, COLUMN_COUNT]].prod(1).sum()) * BF16.size
        size = 0 if self.memory is None else len(self.memory)
        return {"bytes": moved, "rounds": len(self.numbers), "slab_bytes": size}

    def placed(self, rank: int, table: np.ndarray, pieces: Pieces) -> np.ndarray:
        """Return `table`, of a rank's pieces with the destination's end filled in
        (`addresses.destination_table`), with those that come through the slab going there, as bf16.
        """
        through = self.through[rank]
        if self.memory is None or not through.any():
            return table
        table, (_, requests, _, parts) = table.copy(), pieces.where(through)
        table[through, DST] = self.memory.data_ptr() + parts[:, PART_BYTE]
        table[through, DST_PITCH], table[through, WIDTH] = (
            parts[:, PART_STRIDE],
            requests[:, COLUMN_COUNT] * BF16.size,
        )
        table[through, CODEC] = BEFORE_BLOCKS[requests[:, REQUEST_CODEC]]
        return table

    def make(self, number: int) -> None:
        """Make the blocks of a round, whose parts are in the slab; on a GPU, enqueue it on the
        current stream."""
        self.made[number].run()

    def mismatches(self, number: int) -> list[int]:
        """Return the indices of the local tensors whose blocks are not what the parts in the slab
        make."""
        return self._table(number).mismatches()

    def _table(self, number: int) -> BlockTable:
        places = places_of(self.engine)
        table, destinations = self._sources(number, places)
        blocks = items_of(table, destinations, np.zeros(len(table), np.int64), places)
        return BlockTable(blocks, self.device, np.arange(len(blocks.items)))

    def _sources(self, number: int, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the table of a round's pieces with the source's end, the slab, filled in, and
        where the pieces go."""
        assert self.memory is not None
        _, requests, destinations, parts = self.pieces.where(self.pieces.parts[:, PART_ROUND] == number)
        table = empty_table(len(destinations))
        table[:, SRC], table[:, SRC_PITCH] = (
            self.memory.data_ptr() + parts[:, PART_BYTE],
            parts[:, PART_STRIDE],
        )
        table[:, ROWS], table[:, WIDTH] = requests[:, ROW_COUNT], requests[:, COLUMN_COUNT]
        table[:, CODEC] = places[destinations[:, 0], ENCODING]
        return table, destinations
