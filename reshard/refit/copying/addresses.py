"""Tables of copies: the pieces of a plan on one member, with addresses of its memory filled in.

A *piece* is one box that an engine's rank gets from one trainer's rank. Pieces are rows of integer
arrays, since a rank has tens of thousands of them:

    requests       which box of which shard, and how its elements are encoded    goes to the trainer's rank
    destinations   the local tensor, and the box's first row and column in it    stays on the engine's rank
    parts          its place in the slab where blocks are put together           stays on the engine's rank

A *table* (`reshard.refit.copying.tables`) has both ends of each copy as addresses. Each side fills in its own.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from reshard.core.planner import Transfer
from reshard.device.cuda import Allocation, allocation_of
from reshard.device.memory import Region
from reshard.refit.codecs import (
    BEFORE_BLOCKS,
    DESTINATION_SIZES,
    IN_BLOCKS,
    PLAIN,
    SIDES,
    block_codec,
    bytes_in_source,
)
from reshard.refit.copying.tables import (
    CODEC,
    COLUMNS,
    DST,
    DST_PITCH,
    ROWS,
    SRC,
    SRC_PITCH,
    WIDTH,
    empty_table,
)
from reshard.refit.engine import Engine
from reshard.refit.holder import Holder

# Columns of requests. Offsets and counts are in elements of the shard.
REQUEST_COLUMNS = 6
SHARD, FIRST_ROW, FIRST_COLUMN, ROW_COUNT, COLUMN_COUNT, REQUEST_CODEC = range(REQUEST_COLUMNS)
# Further columns of requests of an engine that serves quantized: the piece's row of `destinations`, that
# tensor's rows and columns, and the staged round of the piece (`staged_rounds_of`), or, of a part of a
# block, the round in which it comes as bf16.
DESTINATION = slice(REQUEST_COLUMNS, REQUEST_COLUMNS + 3)
DESTINATION_SHAPE = slice(REQUEST_COLUMNS + 3, REQUEST_COLUMNS + 5)
STAGED_ROUND = REQUEST_COLUMNS + 5
BLOCK_REQUEST_COLUMNS = REQUEST_COLUMNS + 6
NO_DESTINATION = -1  # in all of these columns, where it says nothing of what travels
UNSTAGED = -1  # the round of what is written where the engine serves it from, without a slab
# Columns of parts: the slot of the slab, its round, the piece's first byte in the slab, and the bytes
# from one of its rows to the next.
PART_COLUMNS = 4
PART_SLOT, PART_ROUND, PART_BYTE, PART_STRIDE = range(PART_COLUMNS)
NO_SLOT = UNSTAGED  # in all four, of pieces that have none


class Pieces(NamedTuple):
    """The copies of a plan from one trainer's rank into this one, a row of each array for each.

    `names` are the canonical tensors', `requests` and `parts` have the columns above. `destinations` has
    the index of the local tensor among the engine's regions, and the first row and column there.
    """

    names: list[str]
    requests: np.ndarray
    destinations: np.ndarray
    parts: np.ndarray

    @staticmethod
    def of(copies: Sequence[tuple[int, int, Transfer]], index: Mapping[Any, int]) -> "Pieces":
        """Make them of (shard, codec, transfer) of each copy, and the index of each local tensor."""
        requests = [
            (shard, *rows_and_columns(t.src_at, 0), *rows_and_columns(t.box.lengths, 1), codec)
            for shard, codec, t in copies
        ]
        destinations = [(index[t.dst], *rows_and_columns(t.dst_at, 0)) for *_, t in copies]
        matrix = (
            np.array(requests, np.int64).reshape(-1, REQUEST_COLUMNS),
            np.array(destinations, np.int64).reshape(-1, 3),
        )
        return Pieces([t.name for *_, t in copies], *matrix, np.full((len(copies), PART_COLUMNS), NO_SLOT))

    @staticmethod
    def joined(several: Sequence["Pieces"]) -> "Pieces":
        """Return all of them, without their names."""
        matrices = zip(
            *((pieces.requests, pieces.destinations, pieces.parts) for pieces in several), strict=True
        )
        return Pieces([], *map(np.concatenate, matrices)) if several else Pieces.none()

    @staticmethod
    def none() -> "Pieces":
        """Return no pieces."""
        return Pieces.of([], {})

    def cut(self, origin: np.ndarray, requests: np.ndarray) -> "Pieces":
        """Return the parts of these, given by the number of each one's piece and its row of requests."""
        destinations = self.destinations[origin]
        first = [FIRST_ROW, FIRST_COLUMN]
        destinations[:, 1:] += requests[:, first] - self.requests[origin][:, first]
        names = [self.names[number] for number in origin.tolist()]
        return Pieces(names, requests[:, :REQUEST_COLUMNS], destinations, self.parts[origin])

    def where(self, chosen: np.ndarray) -> "Pieces":
        """Return those of an index or a mask, without their names."""
        return Pieces([], self.requests[chosen], self.destinations[chosen], self.parts[chosen])


def rows_and_columns(values: tuple[int, ...], fill: int) -> tuple[int, int]:
    """Return rows and columns of offsets or lengths: a vector is one column."""
    rows, columns = (*values, fill, fill)[:2]
    return rows, columns


def destination_table(memory: np.ndarray, pieces: Pieces) -> np.ndarray:
    """Return a table of pieces with the destination's end filled in; `memory` is `region_addresses` of the
    engine's regions."""
    address, pitch, size = memory[pieces.destinations[:, 0]].T
    table = empty_table(len(pieces.destinations))
    table[:, DST_PITCH] = pitch * size
    table[:, DST] = (
        address + pieces.destinations[:, 1] * table[:, DST_PITCH] + pieces.destinations[:, 2] * size
    )
    table[:, ROWS], table[:, WIDTH] = pieces.requests[:, ROW_COUNT], pieces.requests[:, COLUMN_COUNT] * size
    table[:, CODEC] = pieces.requests[:, REQUEST_CODEC]
    return table


def region_addresses(regions: Iterable[Region]) -> np.ndarray:
    """Return, a row for each region, its address now, its pitch in elements, and the bytes of an element."""
    tensors: dict[int, tuple[int, int]] = {}
    rows = []
    for tensor, offset, pitch in regions:
        known = tensors.get(id(tensor))
        if known is None:
            known = tensors[id(tensor)] = tensor.data_ptr(), tensor.element_size()
        start, size = known
        rows.append((start + offset * size, pitch, size))
    return np.array(rows, np.int64).reshape(-1, 3)


def staged_rounds_of(engine: Engine) -> np.ndarray:
    """Return the round in which each of the engine's local tensors passes through its region, in
    the order of regions; `UNSTAGED` for one that stays there."""
    if not engine.staged_rounds:
        return np.full(len(engine.regions), UNSTAGED, np.int64)
    return np.array([engine.staged_rounds.get(identity, UNSTAGED) for identity in engine.regions], np.int64)


class Fills(NamedTuple):
    """Copies of a row of zeros into every row of padding, where each goes (`Pieces.destinations`),
    and that row, which has to live as long."""

    table: np.ndarray
    destinations: np.ndarray
    zeros: torch.Tensor


def fills_of(destination: Engine, device: torch.device) -> Fills:
    """Return the copies that fill an engine's padding. In blocks it is quantized like anything
    else, as if from fp32: zeros are zeros in whatever is narrower, too."""
    rows, destinations, longest = [], [], 0
    for index, (identity, region) in enumerate(destination.regions.items()):
        size, scales = region.tensor.element_size(), destination.scales.get(identity)
        codec = PLAIN if scales is None else block_codec(scales.rounding, "float32")
        for fill in destination.placement.tensors[identity].fills:
            (row, column), (n, width) = rows_and_columns(fill.offsets, 0), rows_and_columns(fill.lengths, 1)
            address = region.address + (row * region.pitch + column) * size
            rows.append((0, address, n, width * size, 0, region.pitch * size, codec))
            destinations.append((index, row, column))
            longest = max(longest, bytes_in_source(width * size, codec))
    zeros = torch.zeros(longest, dtype=torch.uint8, device=device)
    table = np.array(rows, np.int64).reshape(-1, COLUMNS)
    table[:, SRC] = zeros.data_ptr()
    return Fills(table, np.array(destinations, np.int64).reshape(-1, 3), zeros)


def source_table(memory: np.ndarray, requests: np.ndarray) -> np.ndarray:
    """Return a table of another rank's requests with the source's end filled in; `memory` is
    `region_addresses` of the trainer's regions."""
    address, pitch, size = memory[requests[:, SHARD]].T
    table = empty_table(len(requests))
    table[:, SRC_PITCH] = pitch * size
    table[:, SRC] = address + requests[:, FIRST_ROW] * table[:, SRC_PITCH] + requests[:, FIRST_COLUMN] * size
    codec = table[:, CODEC] = requests[:, REQUEST_CODEC]
    encoded = np.where(codec == PLAIN, size, DESTINATION_SIZES[codec])
    table[:, ROWS], table[:, WIDTH] = requests[:, ROW_COUNT], requests[:, COLUMN_COUNT] * encoded
    return table


def as_fragments(requests: np.ndarray) -> np.ndarray:
    """Return requests for the bf16 that blocks would be made of: a fragment of a block has no codes."""
    fragments = requests.copy()
    fragments[:, REQUEST_CODEC] = BEFORE_BLOCKS[requests[:, REQUEST_CODEC]]
    return fragments


def of_whole_blocks(requests: np.ndarray) -> np.ndarray:
    """Return a mask of the requests with a destination that begin and end there where blocks do, and come in no round:
    what is made of such a piece is the same wherever it goes."""
    begins, shapes = requests[:, DESTINATION][:, 1:], requests[:, DESTINATION_SHAPE]
    ends, side = begins + requests[:, [ROW_COUNT, COLUMN_COUNT]], SIDES[requests[:, REQUEST_CODEC]][:, None]
    whole = (begins % side == 0) & ((ends % side == 0) | (ends == shapes))
    mask: np.ndarray = whole.all(1) & (requests[:, STAGED_ROUND] == UNSTAGED)
    return mask


def as_alike(requests: np.ndarray) -> np.ndarray:
    """Return requests, of which two are equal where the same bytes travel for them: without the destinations of those
    `of_whole_blocks`."""
    if requests.shape[1] != BLOCK_REQUEST_COLUMNS:
        return requests
    rows = requests.copy()
    rows[of_whole_blocks(requests), REQUEST_COLUMNS:] = NO_DESTINATION
    return rows


def sharing_blocks(rows: np.ndarray) -> list[np.ndarray]:
    """Return, for each local tensor, the numbers of the requests, as `as_alike` returns them, that have parts of blocks
    of it and come in no round: a block may be made of several."""
    if rows.shape[1] != BLOCK_REQUEST_COLUMNS:
        return []
    in_parts = IN_BLOCKS[rows[:, REQUEST_CODEC]] & (rows[:, STAGED_ROUND] == UNSTAGED)
    pieces = np.flatnonzero(in_parts & (rows[:, DESTINATION.start] != NO_DESTINATION))
    pieces = pieces[np.argsort(rows[pieces, DESTINATION.start], kind="stable")]
    borders = np.flatnonzero(np.diff(rows[pieces, DESTINATION.start])) + 1
    return np.split(pieces, borders) if len(pieces) else []


def as_sent(requests: np.ndarray) -> np.ndarray:
    """Return requests as they are answered: in blocks, or as bf16 where other ranks have parts of the
    blocks."""
    if requests.shape[1] == REQUEST_COLUMNS:
        return requests
    sent = requests.copy()
    parts = IN_BLOCKS[requests[:, REQUEST_CODEC]] & (requests[:, STAGED_ROUND] != UNSTAGED)
    sent[parts, REQUEST_CODEC] = BEFORE_BLOCKS[requests[parts, REQUEST_CODEC]]
    return sent


def with_sources(table: np.ndarray, requests: np.ndarray, shards: np.ndarray) -> np.ndarray:
    """Fill in the source's end of a destination's table; `shards` are the (address, pitch in bytes) of a
    rank's shards."""
    table = table.copy()
    itemsize = bytes_in_source(table[:, WIDTH], table[:, CODEC]) // requests[:, COLUMN_COUNT]
    table[:, SRC_PITCH] = shards[requests[:, SHARD], 1]
    table[:, SRC] = (
        shards[requests[:, SHARD], 0]
        + requests[:, FIRST_ROW] * table[:, SRC_PITCH]
        + requests[:, FIRST_COLUMN] * itemsize
    )
    return table


def reading_destination(table: np.ndarray) -> np.ndarray:
    """Return a table that reads what another has written, without a codec."""
    reading = table.copy()
    reading[:, CODEC] = PLAIN
    reading[:, SRC], reading[:, SRC_PITCH] = table[:, DST], table[:, DST_PITCH]
    return reading


def allocations_of(source: Holder, shards: Sequence[int]) -> list[Allocation]:
    """Return the CUDA allocations that these shards of a trainer's rank lie in, in the order of addresses."""
    allocations: list[Allocation] = []
    regions = source.memory
    for address in sorted(regions[shard].address for shard in shards):
        if not allocations or address >= allocations[-1].base + allocations[-1].size:
            allocations.append(allocation_of(address))
    return allocations
