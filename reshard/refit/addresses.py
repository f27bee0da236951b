"""Pieces and shards as addresses: the tables of copies that a plan becomes on one member."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from reshard.live.megatron import MegatronModel
from reshard.live.vllm import VllmModel
from reshard.refit.copies import DST, DST_PITCH, ROWS, SRC, SRC_PITCH, WIDTH, table_of
from reshard.refit.peers import Mappings, allocation_of, exported

# Columns of the pieces that an inference rank asks a trainer's rank for; offsets and lengths in elements.
SHARD, ROW, COLUMN, COUNT, ELEMENTS = range(5)


class Piece(NamedTuple):
    """One copy of a plan into this rank: `lengths` elements from `at` in a trainer's shard to `dst_at` in local tensor `dst`."""

    name: str
    rank: int
    shard: int
    at: tuple[int, ...]
    lengths: tuple[int, ...]
    dst: Any
    dst_at: tuple[int, ...]


def asked_for(pieces: Sequence[Piece]) -> np.ndarray:
    """Pieces as a matrix for the rank that has them: shard, first row, first column, rows, columns."""
    return np.array([(p.shard, *two(p.at, 0), *two(p.lengths, 1)) for p in pieces], np.int64).reshape(-1, 5)


def two(values: tuple[int, ...], fill: int) -> tuple[int, int]:
    """Rows and columns of offsets or lengths: a vector is one row."""
    if len(values) == 2:
        return values[0], values[1]
    return fill, values[0] if values else 1


def destination_table(destination: VllmModel, pieces: Sequence[Piece]) -> np.ndarray:
    """A table of pieces with the destination's end filled in."""
    rows = []
    for p in pieces:
        region = destination.regions[p.dst]
        size = region.tensor.element_size()
        (row, column), (n, width) = two(p.dst_at, 0), two(p.lengths, 1)
        rows.append((0, region.address + (row * region.pitch + column) * size, n, width * size, 0, region.pitch * size))
    return table_of(rows)


def fill_table(destination: VllmModel, device: torch.device) -> tuple[np.ndarray, torch.Tensor]:
    """A table that copies a row of zeros into every row of padding; and that row, which must live as long."""
    rows, longest = [], 0
    for tensor in destination.placement.tensors.values():
        region = destination.regions[tensor.id]
        size = region.tensor.element_size()
        for fill in tensor.fills:
            (row, column), (n, width) = two(fill.offsets, 0), two(fill.lengths, 1)
            rows.append((0, region.address + (row * region.pitch + column) * size, n, width * size, 0, region.pitch * size))
            longest = max(longest, width * size)
    zeros = torch.zeros(longest, dtype=torch.uint8, device=device)
    table = table_of(rows)
    table[:, SRC] = zeros.data_ptr()
    return table, zeros


def source_table(source: MegatronModel, asked: np.ndarray) -> np.ndarray:
    """A table of pieces that another rank asked for, with the source's end filled in."""
    shards = asked[:, SHARD]
    size = np.array([region.tensor.element_size() for region in source.regions], np.int64)[shards]
    memory = np.array([(region.address, region.pitch) for region in source.regions], np.int64).reshape(-1, 2)[shards]
    table = np.zeros((len(asked), 6), np.int64)
    table[:, SRC_PITCH] = memory[:, 1] * size
    table[:, SRC] = memory[:, 0] + asked[:, ROW] * table[:, SRC_PITCH] + asked[:, COLUMN] * size
    table[:, ROWS], table[:, WIDTH] = asked[:, COUNT], asked[:, ELEMENTS] * size
    return table


def from_source(table: np.ndarray, asked: np.ndarray, shards: np.ndarray) -> np.ndarray:
    """Fill in the source's end of a destination's table: `shards` are the (address, pitch in bytes) of a rank's shards."""
    table = table.copy()
    itemsize = table[:, WIDTH] // asked[:, ELEMENTS]
    table[:, SRC_PITCH] = shards[asked[:, SHARD], 1]
    table[:, SRC] = shards[asked[:, SHARD], 0] + asked[:, ROW] * table[:, SRC_PITCH] + asked[:, COLUMN] * itemsize
    return table


def as_read(table: np.ndarray) -> np.ndarray:
    """A destination's table, turned so that what lies there is read."""
    turned = table.copy()
    turned[:, SRC], turned[:, SRC_PITCH] = table[:, DST], table[:, DST_PITCH]
    return turned


def memory_of(source: MegatronModel, shared: Sequence[int]) -> dict[str, Any]:
    """Where the shards of a trainer's rank lie: (address, pitch in bytes) of each, and the allocations around those that other processes
    read, `shared`, as (first address, bytes, handle)."""
    regions = [(region.address, region.pitch * region.tensor.element_size()) for region in source.regions]
    allocations: dict[int, tuple[int, str]] = {}
    for address in sorted(regions[shard][0] for shard in shared):
        last = max(allocations, default=None)
        if last is None or address >= last + allocations[last][0]:
            base, size = allocation_of(address)
            allocations[base] = (size, exported(base))
    return {"regions": regions, "allocations": [(base, *rest) for base, rest in allocations.items()]}


def shards_here(memory: dict[str, Any], mappings: Mappings, whose: str) -> np.ndarray:
    """(address in this process, pitch in bytes) of the shards of another process, mapping its allocations."""
    table = np.array(memory["regions"], np.int64).reshape(-1, 2)
    moved = table.copy()
    for base, size, handle in memory["allocations"]:
        inside = (table[:, 0] >= base) & (table[:, 0] < base + size)
        moved[inside, 0] += mappings.address(handle, whose) - base
    return moved
