"""The tables that hosts and kernels share, as int64 matrices with a row for each record, and their
columns; and tables of copies between addresses, cut into tiles.

This module imports no kernel and nothing that runs one: `reshard.refit.copying.copies` carries out copies,
`reshard.refit.copying.digests` digests; the kernels are in `reshard.refit.copying.kernels`.
"""

from collections.abc import Sequence

import numpy as np

from reshard.refit.codecs import PLAIN, bytes_in_source

# A copy: source address, destination address, rows, bytes in a row of the destination, the bytes
# from one row to the next on either side, and the codec (`reshard.refit.codecs`). A pitch of 0
# repeats the row.
COLUMNS = 7
SRC, DST, ROWS, WIDTH, SRC_PITCH, DST_PITCH, CODEC = range(COLUMNS)
TILE_BYTES = 64 << 10
ALIGNMENT = 16  # bytes, of what lies packed

# A matrix and the place of its transpose: addresses, the source's rows and columns, and elements between rows.
TRANSPOSE = 6
TRANSPOSE_FROM, TRANSPOSE_INTO, TRANSPOSE_ROWS, TRANSPOSE_COLUMNS, FROM_PITCH, INTO_PITCH = range(TRANSPOSE)

# A tile of a digest: its address, the row of the copies' table that it is of, rows, words in a row,
# the pitch in loads, and the index of its first word.
TILE = 6
ADDRESS, PIECE, TILE_ROWS, TILE_WORDS, TILE_PITCH, FIRST_WORD = range(TILE)

# A tile of a bucket, from which changed words are written to where they are served: its first byte in the
# bucket, its bytes there, those of a row, its address, the bytes from one row to the next there, and its codec.
SERVED = 6
SERVED_START, SERVED_BYTES, SERVED_WIDTH, SERVED_ADDRESS, SERVED_PITCH, SERVED_CODEC = range(SERVED)

# The changes of a chunk of a bucket, in a payload (`reshard.refit.changes.buckets`): their first byte, how many
# words changed, of how many, and their form. Ahead of them travel `PRELUDE` numbers, and two for each chunk.
PRELUDE = 3
CHANGES = 4
CHANGES_START, CHANGES_CHANGED, CHANGES_FORM, CHANGES_ELEMENTS = range(CHANGES)

# What a GPU makes of a payload that has arrived: 0, or why nothing of it is written, and the transaction on which it
# says that it builds, and the bucket that it says it is of.
STATUS = 3
STATUS_CODE, STATUS_SINCE, STATUS_BUCKET = range(STATUS)
NOT_DUE, SENSELESS, UNORDERED = 1, 2, 3  # of another bucket or transaction; sizes; positions

# How a digest mixes a word of 64 bits and its position, modulo 2**64, with shifts that bring in
# zeros:
#
#     mixed = (value + 1) * MIX_VALUE + position * MIX_POSITION
#     mixed = (mixed ^ mixed >> MIX_FIRST_SHIFT) * MIX_FINAL
#     mixed ^ mixed >> MIX_SECOND_SHIFT
#
# The factors are the golden ratio's fraction and two odd constants of widely used mixers: xxHash's
# second prime, and SplitMix64's first multiplier.
MIX_VALUE = 0x9E3779B97F4A7C15
MIX_POSITION = 0xC2B2AE3D27D4EB4F
MIX_FINAL = 0xBF58476D1CE4E5B9
MIX_FIRST_SHIFT, MIX_SECOND_SHIFT = 29, 32


def table_of(copies: Sequence[Sequence[int]]) -> np.ndarray:
    """Return a table of plain copies from (source, destination, rows, width, source pitch,
    destination pitch) in bytes."""
    plain = np.array(copies, np.int64).reshape(-1, CODEC)
    return np.insert(plain, CODEC, PLAIN, axis=1)


def empty_table(copies: int = 0) -> np.ndarray:
    """Return a table of zeros for so many plain copies."""
    return np.zeros((copies, COLUMNS), np.int64)


def bytes_of(table: np.ndarray) -> int:
    """Return the bytes that a table writes."""
    return int((table[:, ROWS] * table[:, WIDTH]).sum())


def bytes_read_by(table: np.ndarray) -> int:
    """Return the bytes that a table reads."""
    return int((table[:, ROWS] * bytes_in_source(table[:, WIDTH], table[:, CODEC])).sum())


def packed_width(table: np.ndarray) -> np.ndarray:
    """Return the bytes of a row of each copy while it travels, in the narrower of its two dtypes."""
    return np.minimum(table[:, WIDTH], bytes_in_source(table[:, WIDTH], table[:, CODEC]))


def bytes_packed(table: np.ndarray) -> int:
    """Return the bytes of all copies while they travel."""
    return int((table[:, ROWS] * packed_width(table)).sum())


def tiles_of(table: np.ndarray, tile_bytes: int = TILE_BYTES) -> tuple[np.ndarray, np.ndarray]:
    """Cut copies into tiles of at most about `tile_bytes`; return the tiles' table, and the copy
    that each tile comes from.

    Rows that follow each other on both sides become one. A tile of several rows has whole rows.
    """
    if not len(table):
        return empty_table(), np.zeros(0, np.int64)
    t = table.copy()
    read = bytes_in_source(t[:, WIDTH], t[:, CODEC])
    contiguous = (t[:, ROWS] == 1) | ((t[:, SRC_PITCH] == read) & (t[:, DST_PITCH] == t[:, WIDTH]))
    t[contiguous, WIDTH] *= t[contiguous, ROWS]
    t[contiguous, ROWS] = 1
    # Rows longer than a tile become copies of one row each.
    wide = np.flatnonzero((t[:, ROWS] > 1) & (t[:, WIDTH] > tile_bytes))
    origin = np.arange(len(t))
    if len(wide):
        singles, sources = [], []
        for copy in wide:
            rows = np.arange(t[copy, ROWS])
            single_rows = np.repeat(t[copy : copy + 1], len(rows), 0)
            single_rows[:, SRC] += rows * t[copy, SRC_PITCH]
            single_rows[:, DST] += rows * t[copy, DST_PITCH]
            single_rows[:, ROWS] = 1
            singles.append(single_rows)
            sources.append(np.full(len(rows), copy))
        rest = np.ones(len(t), bool)
        rest[wide] = False
        t = np.concatenate([t[rest], *singles])
        origin = np.concatenate([origin[rest], *sources])
    is_row = t[:, ROWS] == 1  # which is cut by bytes, others by rows
    per_tile = np.where(is_row, tile_bytes, np.maximum(1, tile_bytes // np.maximum(1, t[:, WIDTH])))
    length = np.where(is_row, t[:, WIDTH], t[:, ROWS])
    counts = -(-length // per_tile)
    index = np.repeat(np.arange(len(t)), counts)
    within = np.arange(len(index)) - np.repeat(np.cumsum(counts) - counts, counts)
    tiles, start = t[index], within * per_tile[index]
    size = np.minimum(per_tile[index], length[index] - start)
    single = is_row[index]
    tiles[:, SRC] += np.where(single, bytes_in_source(start, tiles[:, CODEC]), start * tiles[:, SRC_PITCH])
    tiles[:, DST] += start * np.where(single, 1, tiles[:, DST_PITCH])
    tiles[:, WIDTH] = np.where(single, size, tiles[:, WIDTH])
    tiles[:, ROWS] = np.where(single, 1, size)
    # The pitches of a single row mean nothing, and must not decide about the widest word.
    tiles[single, SRC_PITCH : DST_PITCH + 1] = 0
    return tiles, origin[index]


def joined(tiles: np.ndarray, memory: np.ndarray) -> np.ndarray:
    """Join tiles that follow each other on both sides: plain ones of single rows, or of equal rows. `memory` are
    the addresses, in order, at which allocations of the sources begin: CUDA copies from no two of them at once."""
    if len(tiles) < 2:
        return tiles
    before, after = tiles[:-1], tiles[1:]
    single = tiles[:, ROWS] == 1
    pitches = np.where(single[:, None], tiles[:, [WIDTH, WIDTH]], tiles[:, [SRC_PITCH, DST_PITCH]])
    ends = tiles[:, [SRC, DST]] + tiles[:, ROWS, None] * pitches
    follows = (
        (ends[:-1] == after[:, [SRC, DST]]).all(1) & (before[:, CODEC] == PLAIN) & (after[:, CODEC] == PLAIN)
    )
    alike = (before[:, [WIDTH, SRC_PITCH, DST_PITCH]] == after[:, [WIDTH, SRC_PITCH, DST_PITCH]]).all(1)
    follows &= (single[:-1] & single[1:]) | (~single[:-1] & ~single[1:] & alike)
    allocation = np.searchsorted(memory, tiles[:, SRC], "right")
    follows &= allocation[:-1] == allocation[1:]
    first = np.concatenate([[0], 1 + np.flatnonzero(~follows)])
    result = tiles[first].copy()
    of_rows = single[first]
    result[of_rows, WIDTH] = np.add.reduceat(tiles[:, WIDTH], first)[of_rows]
    result[~of_rows, ROWS] = np.add.reduceat(tiles[:, ROWS], first)[~of_rows]
    return result


def tile_count(table: np.ndarray) -> int:
    """Return how many tiles `tiles_of` cuts these copies into."""
    rows, width = table[:, ROWS], table[:, WIDTH]
    read = bytes_in_source(width, table[:, CODEC])
    contiguous = (rows == 1) | ((table[:, SRC_PITCH] == read) & (table[:, DST_PITCH] == width))
    in_one_row = -(-rows * width // TILE_BYTES)
    row_by_row = rows * -(-width // TILE_BYTES)
    whole_rows = -(-rows // np.maximum(1, TILE_BYTES // np.maximum(1, width)))
    return int(np.where(contiguous, in_one_row, np.where(width > TILE_BYTES, row_by_row, whole_rows)).sum())


def interleaved(groups: np.ndarray) -> np.ndarray:
    """Return an order in which groups, one number for each tile, take turns, so that the links to
    all peers are busy at once."""
    turn = np.zeros(len(groups), np.float64)
    for group in np.unique(groups):
        members = np.flatnonzero(groups == group)
        turn[members] = (np.arange(len(members)) + 0.5) / len(members)
    return np.argsort(turn, kind="stable")


def pack_into_rounds(sizes: np.ndarray, limit: int) -> tuple[np.ndarray, np.ndarray]:
    """Pack pieces of these sizes, in order, into rounds of at most `limit` bytes; return each one's
    round, and its offset in it.

    >>> [column.tolist() for column in pack_into_rounds(np.array([20, 10, 40]), 64)]
    [[0, 0, 1], [0, 32, 0]]
    """
    padded = sizes + -sizes % ALIGNMENT
    rounds, offsets = np.zeros(len(sizes), np.int64), np.zeros(len(sizes), np.int64)
    current = used = 0
    for i, size in enumerate(padded.tolist()):
        if used + size > limit and used:
            current, used = current + 1, 0
        rounds[i], offsets[i] = current, used
        used += size
    return rounds, offsets
