"""Copies between addresses: strided rows of bytes, cut into tiles that one table-driven kernel, or the host, carries out.

A table is an int64 matrix ``[copies, 6]``: source address, destination address, rows, bytes in a row, and the bytes from one row
to the next on either side. A pitch of 0 repeats the row.
"""

import ctypes
from collections.abc import Sequence

import numpy as np
import torch

SRC, DST, ROWS, WIDTH, SRC_PITCH, DST_PITCH = range(6)
TILE_BYTES = 64 << 10


def table_of(copies: Sequence[Sequence[int]]) -> np.ndarray:
    """A table from (source, destination, rows, width, source pitch, destination pitch) in bytes."""
    return np.array(copies, np.int64).reshape(-1, 6)


def bytes_of(table: np.ndarray) -> int:
    """Bytes that a table moves."""
    return int((table[:, ROWS] * table[:, WIDTH]).sum())


def tiles_of(table: np.ndarray, tile_bytes: int = TILE_BYTES) -> tuple[np.ndarray, np.ndarray]:
    """Cut copies into tiles of at most about `tile_bytes`: the tiles' table, and for each the copy it comes from.

    Rows that follow each other on both sides become one; a tile of several rows has whole ones.
    """
    if not len(table):
        return table.reshape(0, 6), np.zeros(0, np.int64)
    t = table.copy()
    solid = (t[:, ROWS] == 1) | ((t[:, SRC_PITCH] == t[:, WIDTH]) & (t[:, DST_PITCH] == t[:, WIDTH]))
    t[solid, WIDTH] *= t[solid, ROWS]
    t[solid, ROWS] = 1
    # Rows longer than a tile become copies of one row each.
    wide = np.flatnonzero((t[:, ROWS] > 1) & (t[:, WIDTH] > tile_bytes))
    origin = np.arange(len(t))
    if len(wide):
        singles, sources = [], []
        for copy in wide:
            rows = np.arange(t[copy, ROWS])
            some = np.repeat(t[copy : copy + 1], len(rows), 0)
            some[:, SRC] += rows * t[copy, SRC_PITCH]
            some[:, DST] += rows * t[copy, DST_PITCH]
            some[:, ROWS] = 1
            singles.append(some)
            sources.append(np.full(len(rows), copy))
        rest = np.ones(len(t), bool)
        rest[wide] = False
        t = np.concatenate([t[rest], *singles])
        origin = np.concatenate([origin[rest], *sources])
    one = t[:, ROWS] == 1
    per_tile = np.where(one, tile_bytes, np.maximum(1, tile_bytes // np.maximum(1, t[:, WIDTH])))
    length = np.where(one, t[:, WIDTH], t[:, ROWS])
    counts = -(-length // per_tile)
    index = np.repeat(np.arange(len(t)), counts)
    within = np.arange(len(index)) - np.repeat(np.cumsum(counts) - counts, counts)
    tiles, start = t[index], within * per_tile[index]
    size = np.minimum(per_tile[index], length[index] - start)
    single = one[index]
    tiles[:, SRC] += start * np.where(single, 1, tiles[:, SRC_PITCH])
    tiles[:, DST] += start * np.where(single, 1, tiles[:, DST_PITCH])
    tiles[:, WIDTH] = np.where(single, size, tiles[:, WIDTH])
    tiles[:, ROWS] = np.where(single, 1, size)
    tiles[single, SRC_PITCH:] = 0  # of a single row, they say nothing, and must not decide about the widest word
    return tiles, origin[index]


def interleaved(groups: np.ndarray) -> np.ndarray:
    """An order in which the groups (one number for each tile) take turns, so that the links to all peers are busy at once."""
    turn = np.zeros(len(groups), np.float64)
    for group in np.unique(groups):
        members = np.flatnonzero(groups == group)
        turn[members] = (np.arange(len(members)) + 0.5) / len(members)
    return np.argsort(turn, kind="stable")


class CopyTable:
    """Tiles ready to run, grouped by the widest word that all their addresses and lengths allow; kept on the GPU."""

    def __init__(self, tiles: np.ndarray, device: torch.device) -> None:
        self.device, self.bytes = device, bytes_of(tiles)
        self.groups: list[tuple[int, torch.Tensor | np.ndarray]] = []
        if device.type == "cpu":
            self.groups = [(1, tiles)] if len(tiles) else []
            return
        from reshard.refit.kernels import compile_copy

        bits = np.bitwise_or.reduce(tiles[:, [SRC, DST, WIDTH, SRC_PITCH, DST_PITCH]], axis=1)
        left = np.ones(len(tiles), bool)
        for unit in (16, 8, 4, 2, 1):
            chosen = left & (bits % unit == 0)
            left &= ~chosen
            if chosen.any():
                some = tiles[chosen].copy()
                some[:, [WIDTH, SRC_PITCH, DST_PITCH]] //= unit
                self.groups.append((unit, torch.from_numpy(some).to(device)))
                compile_copy(unit, device)

    @property
    def launches(self) -> int:
        """Kernels that `run` launches."""
        return len(self.groups)

    def run(self) -> None:
        """Carry the copies out; on a GPU, enqueue them on the current stream."""
        for unit, tiles in self.groups:
            if isinstance(tiles, torch.Tensor):
                from reshard.refit.kernels import copy_tiles

                copy_tiles(tiles, unit)
            else:
                copy_on_host(tiles)


def host_bytes(address: int, rows: int, width: int, pitch: int) -> np.ndarray:
    """The bytes ``[rows, width]`` at an address of this process's memory."""
    if rows == 0 or width == 0:
        return np.zeros((rows, width), np.uint8)
    extent = (rows - 1) * pitch + width
    flat = np.ctypeslib.as_array((ctypes.c_uint8 * extent).from_address(address))
    return np.lib.stride_tricks.as_strided(flat, (rows, width), (pitch, 1))


def copy_on_host(table: np.ndarray) -> None:
    """Carry out a table whose addresses are this process's memory."""
    for src, dst, rows, width, src_pitch, dst_pitch in table.tolist():
        host_bytes(dst, rows, width, dst_pitch)[...] = host_bytes(src, rows, width, src_pitch)
