"""Pieces and shards as addresses: the tables of copies that a plan becomes on one member."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from reshard.live.cuda import Allocation, allocation_of, exported
from reshard.live.engine import Engine
from reshard.live.trainer import Trainer
from reshard.refit.tables import DST, DST_PITCH, ROWS, SRC, SRC_PITCH, WIDTH, table_of
from reshard.refit.transports.mappings import Mappings

# Columns of the pieces that an inference rank asks a trainer's rank for; offsets and lengths in elements.
SHARD, ROW, COLUMN, COUNT, ELEMENTS = range(5)


class Piece(NamedTuple):
    """One copy of a plan into this rank: `lengths` elements from `at` in a trainer's shard to `dst_at` in
    local tensor `dst`."""

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


def destination_table(destination: Engine, pieces: Sequence[Piece]) -> np.ndarray:
    """A table of pieces with the destination's end filled in."""
    rows = []
    for p in pieces:
        region = destination.regions[p.dst]
        size = region.tensor.element_size()
        (row, column), (n, width) = two(p.dst_at, 0), two(p.lengths, 1)
        rows.append(
            (
                0,
                region.address + (row * region.pitch + column) * size,
                n,
                width * size,
                0,
                region.pitch * size,
            )
        )
    return table_of(rows)


def fill_table(destination: Engine, device: torch.device) -> tuple[np.ndarray, torch.Tensor]:
    """A table that copies a row of zeros into every row of padding; and that row, which must live as long."""
    rows, longest = [], 0
    for tensor in destination.placement.tensors.values():
        region = destination.regions[tensor.id]
        size = region.tensor.element_size()
        for fill in tensor.fills:
            (row, column), (n, width) = two(fill.offsets, 0), two(fill.lengths, 1)
            rows.append(
                (
                    0,
                    region.address + (row * region.pitch + column) * size,
                    n,
                    width * size,
                    0,
                    region.pitch * size,
                )
            )
            longest = max(longest, width * size)
    zeros = torch.zeros(longest, dtype=torch.uint8, device=device)
    table = table_of(rows)
    table[:, SRC] = zeros.data_ptr()
    return table, zeros


def source_table(source: Trainer, asked: np.ndarray) -> np.ndarray:
    """A table of pieces that another rank asked for, with the source's end filled in."""
    shards = asked[:, SHARD]
    regions = source.regions
    size = np.array([region.tensor.element_size() for region in regions], np.int64)[shards]
    memory = np.array([(region.address, region.pitch) for region in regions], np.int64).reshape(-1, 2)[shards]
    table = np.zeros((len(asked), 6), np.int64)
    table[:, SRC_PITCH] = memory[:, 1] * size
    table[:, SRC] = memory[:, 0] + asked[:, ROW] * table[:, SRC_PITCH] + asked[:, COLUMN] * size
    table[:, ROWS], table[:, WIDTH] = asked[:, COUNT], asked[:, ELEMENTS] * size
    return table


def from_source(table: np.ndarray, asked: np.ndarray, shards: np.ndarray) -> np.ndarray:
    """Fill in the source's end of a destination's table: `shards` are the (address, pitch in bytes) of a
    rank's shards."""
    table = table.copy()
    itemsize = table[:, WIDTH] // asked[:, ELEMENTS]
    table[:, SRC_PITCH] = shards[asked[:, SHARD], 1]
    table[:, SRC] = (
        shards[asked[:, SHARD], 0] + asked[:, ROW] * table[:, SRC_PITCH] + asked[:, COLUMN] * itemsize
    )
    return table


def as_read(table: np.ndarray) -> np.ndarray:
    """A destination's table, turned so that what lies there is read."""
    turned = table.copy()
    turned[:, SRC], turned[:, SRC_PITCH] = table[:, DST], table[:, DST_PITCH]
    return turned


def allocations_of(source: Trainer, shards: Sequence[int]) -> list[Allocation]:
    """The CUDA allocations that these shards of a trainer's rank lie in."""
    found: list[Allocation] = []
    regions = source.regions
    for address in sorted(regions[shard].address for shard in shards):
        if not found or address >= found[-1].base + found[-1].size:
            found.append(allocation_of(address))
    return found


def memory_of(source: Trainer, allocations: Sequence[Allocation]) -> dict[str, Any]:
    """Where the shards of a trainer's rank lie: (address, pitch in bytes) of each, and the allocations that
    other processes may map, as (first address, bytes, handle)."""
    regions = [(region.address, region.pitch * region.tensor.element_size()) for region in source.regions]
    return {
        "regions": np.array(regions, np.int64).reshape(-1, 2),
        "allocations": [(a.base, a.size, exported(a.base)) for a in allocations],
    }


def shards_here(memory: Mapping[str, Any], mappings: Mappings, whose: str) -> np.ndarray:
    """(address in this process, pitch in bytes) of the shards of another process, mapping its allocations."""
    table = memory["regions"].copy()
    if memory["allocations"]:
        bases, sizes, handles = zip(*memory["allocations"], strict=True)  # in the order of addresses
        first, size = np.array(bases, np.int64), np.array(sizes, np.int64)
        here = np.array([mappings.address(handle, whose) for handle in handles], np.int64)
        around = np.maximum(np.searchsorted(first, table[:, 0], "right") - 1, 0)
        inside = (table[:, 0] >= first[around]) & (table[:, 0] < first[around] + size[around])
        table[:, 0] += np.where(inside, here[around] - first[around], 0)
    return table
