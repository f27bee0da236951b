"""Tables of copies: what a plan's pieces become on one member, with addresses of its memory filled in."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from reshard.core.planner import Transfer
from reshard.device.cuda import Allocation, allocation_of
from reshard.device.memory import Region
from reshard.engines.base import Engine
from reshard.refit.codecs import (
    BEFORE_BLOCKS,
    BLOCKWISE,
    DESTINATION_SIZES,
    PLAIN,
    block_codec,
    bytes_in_source,
)
from reshard.refit.tables import CODEC, COLUMNS, DST, DST_PITCH, ROWS, SRC, SRC_PITCH, WIDTH, empty_table
from reshard.trainers.base import Trainer

# Columns of a piece that an inference rank asks a trainer's rank for; offsets and lengths in elements.
ASKED = 6
SHARD, ROW, COLUMN, COUNT, ELEMENTS, ENCODED = range(ASKED)
# Of an engine that serves quantized also where a piece goes: the local tensor's index, the first row and column
# there; that tensor's rows and columns; and the round in which it passes through its region (`staged_rounds_of`), or, of what
# is made into blocks, in which it comes as bf16 where it is sent (`parts`).
WHERE, EXTENT, ROUND = slice(ASKED, ASKED + 3), slice(ASKED + 3, ASKED + 5), ASKED + 5
ASKED_OF_BLOCKS = ASKED + 6
AT_ONCE = -1  # in the place of a round's number
# Columns of where pieces lie while blocks are put together of them (`parts`): the slot, its round, the piece's first byte
# in the slab, and the bytes from one row to the next.
PARTS = 4
SLOT, IN_ROUND, AT, APART = range(PARTS)
NO_SLOT = AT_ONCE  # in all four, of pieces that have none


class Pieces(NamedTuple):
    """The copies of a plan from one trainer's rank into this one; `names` are the canonical tensors'.

    `asked` has the shard, first row, first column, rows, columns and codec of each, `into` the index of the local tensor among the
    engine's regions, and the first row and column there, `parts` where each is put together with others'
    (`reshard.refit.fp8_blocks.split`).
    """

    names: list[str]
    asked: np.ndarray
    into: np.ndarray
    parts: np.ndarray

    @staticmethod
    def of(copies: Sequence[tuple[int, int, Transfer]], index: Mapping[Any, int]) -> "Pieces":
        """Make them of (shard, codec, transfer) of each copy, and the index of each local tensor."""
        asked = [(shard, *two(t.src_at, 0), *two(t.box.lengths, 1), codec) for shard, codec, t in copies]
        into = [(index[t.dst], *two(t.dst_at, 0)) for *_, t in copies]
        matrix = np.array(asked, np.int64).reshape(-1, ASKED), np.array(into, np.int64).reshape(-1, 3)
        return Pieces([t.name for *_, t in copies], *matrix, np.full((len(copies), PARTS), NO_SLOT))

    @staticmethod
    def joined(several: Sequence["Pieces"]) -> "Pieces":
        """Return all of them, without their names."""
        matrices = zip(*((pieces.asked, pieces.into, pieces.parts) for pieces in several), strict=True)
        return Pieces([], *map(np.concatenate, matrices)) if several else Pieces.none()

    @staticmethod
    def none() -> "Pieces":
        """Return no pieces."""
        return Pieces.of([], {})

    def where(self, chosen: np.ndarray) -> "Pieces":
        """Return those of an index or a mask, without their names."""
        return Pieces([], self.asked[chosen], self.into[chosen], self.parts[chosen])


def two(values: tuple[int, ...], fill: int) -> tuple[int, int]:
    """Return rows and columns of offsets or lengths: a vector is one row."""
    if len(values) == 2:
        return values[0], values[1]
    return fill, values[0] if values else 1


def destination_table(memory: np.ndarray, pieces: Pieces) -> np.ndarray:
    """Return a table of pieces with the destination's end filled in; `memory` is `located` of the engine's regions."""
    address, pitch, size = memory[pieces.into[:, 0]].T
    table = empty_table(len(pieces.into))
    table[:, DST_PITCH] = pitch * size
    table[:, DST] = address + pieces.into[:, 1] * table[:, DST_PITCH] + pieces.into[:, 2] * size
    table[:, ROWS], table[:, WIDTH] = pieces.asked[:, COUNT], pieces.asked[:, ELEMENTS] * size
    table[:, CODEC] = pieces.asked[:, ENCODED]
    return table


def located(regions: Iterable[Region]) -> np.ndarray:
    """Return the address, the pitch in elements and the bytes of an element of each region, as they are now."""
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
    """Return the round in which each of the engine's local tensors passes through its region, in the order of regions; `AT_ONCE`
    for one that stays there."""
    if not engine.staged_rounds:
        return np.full(len(engine.regions), AT_ONCE, np.int64)
    return np.array([engine.staged_rounds.get(identity, AT_ONCE) for identity in engine.regions], np.int64)


class Fills(NamedTuple):
    """Copies of a row of zeros into every row of padding, where each goes (`Pieces.into`), and that row, which has to live as
    long."""

    table: np.ndarray
    into: np.ndarray
    zeros: torch.Tensor


def fills_of(destination: Engine, device: torch.device) -> Fills:
    """Return the copies that fill an engine's padding. In blocks it is quantized like anything else, as if from fp32: zeros are
    zeros in whatever is narrower, too."""
    rows, into, longest = [], [], 0
    for index, (identity, region) in enumerate(destination.regions.items()):
        size, scales = region.tensor.element_size(), destination.scales.get(identity)
        codec = PLAIN if scales is None else block_codec(scales.rounding, "float32")
        for fill in destination.placement.tensors[identity].fills:
            (row, column), (n, width) = two(fill.offsets, 0), two(fill.lengths, 1)
            address = region.address + (row * region.pitch + column) * size
            rows.append((0, address, n, width * size, 0, region.pitch * size, codec))
            into.append((index, row, column))
            longest = max(longest, bytes_in_source(width * size, codec))
    zeros = torch.zeros(longest, dtype=torch.uint8, device=device)
    table = np.array(rows, np.int64).reshape(-1, COLUMNS)
    table[:, SRC] = zeros.data_ptr()
    return Fills(table, np.array(into, np.int64).reshape(-1, 3), zeros)


def source_table(memory: np.ndarray, asked: np.ndarray) -> np.ndarray:
    """Return a table of pieces that another rank asked for, with the source's end filled in; `memory` is `located` of
    the trainer's regions."""
    address, pitch, size = memory[asked[:, SHARD]].T
    table = empty_table(len(asked))
    table[:, SRC_PITCH] = pitch * size
    table[:, SRC] = address + asked[:, ROW] * table[:, SRC_PITCH] + asked[:, COLUMN] * size
    codec = table[:, CODEC] = asked[:, ENCODED]
    encoded = np.where(codec == PLAIN, size, DESTINATION_SIZES[codec])
    table[:, ROWS], table[:, WIDTH] = asked[:, COUNT], asked[:, ELEMENTS] * encoded
    return table


def as_held(asked: np.ndarray) -> np.ndarray:
    """Return pieces as the bf16 that blocks would be made of: a fragment of a block says nothing of its codes."""
    held = asked.copy()
    held[:, ENCODED] = BEFORE_BLOCKS[asked[:, ENCODED]]
    return held


def as_sent(asked: np.ndarray) -> np.ndarray:
    """Return pieces as they are sent to the rank that asked for them: in blocks, or as bf16 where other ranks have parts of these."""
    if asked.shape[1] == ASKED:
        return asked
    sent = asked.copy()
    parts = BLOCKWISE[asked[:, ENCODED]] & (asked[:, ROUND] != AT_ONCE)
    sent[parts, ENCODED] = BEFORE_BLOCKS[asked[parts, ENCODED]]
    return sent


def from_source(table: np.ndarray, asked: np.ndarray, shards: np.ndarray) -> np.ndarray:
    """Fill in the source's end of a destination's table; `shards` are the (address, pitch in bytes) of a
    rank's shards."""
    table = table.copy()
    itemsize = bytes_in_source(table[:, WIDTH], table[:, CODEC]) // asked[:, ELEMENTS]
    table[:, SRC_PITCH] = shards[asked[:, SHARD], 1]
    table[:, SRC] = (
        shards[asked[:, SHARD], 0] + asked[:, ROW] * table[:, SRC_PITCH] + asked[:, COLUMN] * itemsize
    )
    return table


def as_read(table: np.ndarray) -> np.ndarray:
    """Return a table that reads the destination of another as it is."""
    turned = table.copy()
    turned[:, CODEC] = PLAIN
    turned[:, SRC], turned[:, SRC_PITCH] = table[:, DST], table[:, DST_PITCH]
    return turned


def allocations_of(source: Trainer, shards: Sequence[int]) -> list[Allocation]:
    """Return the CUDA allocations that these shards of a trainer's rank lie in, in the order of addresses."""
    allocations: list[Allocation] = []
    regions = source.regions
    for address in sorted(regions[shard].address for shard in shards):
        if not allocations or address >= allocations[-1].base + allocations[-1].size:
            allocations.append(allocation_of(address))
    return allocations
