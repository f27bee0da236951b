"""Tables of copies between addresses: strided rows of bytes, cut into tiles. Pure; `reshard.refit.copies`
carries them out.

A table is an int64 matrix ``[copies, 6]``: source address, destination address, rows, bytes in a row, and the
bytes from one row to the next on either side. A pitch of 0 repeats the row.
"""

from collections.abc import Sequence

import numpy as np

SRC, DST, ROWS, WIDTH, SRC_PITCH, DST_PITCH = range(6)
TILE_BYTES = 64 << 10


def table_of(copies: Sequence[Sequence[int]]) -> np.ndarray:
    """A table from (source, destination, rows, width, source pitch, destination pitch) in bytes."""
    return np.array(copies, np.int64).reshape(-1, 6)


def bytes_of(table: np.ndarray) -> int:
    """Bytes that a table moves."""
    return int((table[:, ROWS] * table[:, WIDTH]).sum())


def tiles_of(table: np.ndarray, tile_bytes: int = TILE_BYTES) -> tuple[np.ndarray, np.ndarray]:
    """Cut copies into tiles of at most about `tile_bytes`: the tiles' table, and for each the copy it comes
    from.

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
    # of a single row, they say nothing, and must not decide about the widest word
    tiles[single, SRC_PITCH:] = 0
    return tiles, origin[index]


def interleaved(groups: np.ndarray) -> np.ndarray:
    """An order in which the groups (one number for each tile) take turns, so that the links to all peers are
    busy at once."""
    turn = np.zeros(len(groups), np.float64)
    for group in np.unique(groups):
        members = np.flatnonzero(groups == group)
        turn[members] = (np.arange(len(members)) + 0.5) / len(members)
    return np.argsort(turn, kind="stable")
