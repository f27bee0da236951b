"""Cuts: where pieces are cut so that replicas at other layouts want some of them alike, and pass them on.

    one wants rows 0 to 8 of a shard, others rows 0 to 4 and 4 to 8:    a cut at row 4

Each piece is cut where others begin and end in the same shard: by rows first, and each strip of rows that this makes by
the columns of those that reach it. So parts that overlap are equal, and `reshard.refit.relays` has them passed on. What
goes in blocks is cut where none of those that want it would have a block in two parts, and what goes in an engine's
rounds is left as it is: its requests say when it comes there. Pure.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from reshard.refit.codecs import SIDES
from reshard.refit.copying.addresses import (
    BLOCK_REQUEST_COLUMNS,
    COLUMN_COUNT,
    DESTINATION,
    FIRST_COLUMN,
    FIRST_ROW,
    REQUEST_CODEC,
    REQUEST_COLUMNS,
    ROW_COUNT,
    SHARD,
    STAGED_ROUND,
    UNSTAGED,
    as_alike,
)
from reshard.refit.copying.tables import TILE_BYTES
from reshard.refit.relays import Alike, length_of, numbered

# A cut: the shard and codec of the pieces that it cuts, the first row of the strip that it cuts by columns, or
# `OF_ROWS` for all of the shard by rows, and the row or column at which the second part begins.
CUT_COLUMNS = 4
CUT_SHARD, CUT_CODEC, CUT_STRIP, CUT_AT = range(CUT_COLUMNS)
OF_ROWS = -1
# Copies are cut into tiles of so many bytes anyway: parts of that size, on average, at most double their tables.
LEAST_PART_BYTES = TILE_BYTES
# Of each line a member has two buckets. Where more lines have smaller ones these are slow, and no transport has smaller
# ones than a tile.
BUCKETS_OF_A_LINE = 2
LEAST_BUCKET_BYTES = 4 * TILE_BYTES
_SHARD = [SHARD, REQUEST_CODEC]
_STRIP = [SHARD, REQUEST_CODEC, FIRST_ROW]


class Parts(NamedTuple):
    """The parts of pieces, in their order: for each the number of its piece, and its row of requests."""

    origin: np.ndarray
    requests: np.ndarray


def elements_of(requests: np.ndarray) -> np.ndarray:
    """Return how many elements each piece has."""
    elements: np.ndarray = requests[:, [ROW_COUNT, COLUMN_COUNT]].prod(1)
    return elements


def no_cuts() -> np.ndarray:
    """Return no cuts."""
    return np.zeros((0, CUT_COLUMNS), np.int64)


def parts_of(requests: np.ndarray, cuts: np.ndarray) -> Parts:
    """Cut the pieces of requests; each element is in one part of its piece. Pieces of which a block would be in two
    parts stay whole.

    >>> whole = np.array([[0, 0, 0, 8, 6, 0]])
    >>> parts_of(whole, np.array([[0, 0, OF_ROWS, 4], [0, 0, 4, 2], [1, 0, OF_ROWS, 3]])).requests.tolist()
    [[0, 0, 0, 4, 6, 0], [0, 4, 0, 4, 2, 0], [0, 4, 2, 4, 4, 0]]
    """
    can_be_cut = _can_be_cut(requests)
    parts = _parts_of(requests, can_be_cut, cuts)
    in_two = parts.origin[_within_blocks(requests[parts.origin], parts.requests)]
    if len(in_two):
        can_be_cut[in_two] = False
        parts = _parts_of(requests, can_be_cut, cuts)
    return parts


def _parts_of(requests: np.ndarray, can_be_cut: np.ndarray, cuts: np.ndarray) -> Parts:
    """Cut those of requests that are in a mask."""
    if not len(cuts) or not can_be_cut.any():
        return Parts(np.arange(len(requests)), requests)
    pieces, rest = np.flatnonzero(can_be_cut), np.flatnonzero(~can_be_cut)
    by_rows = cuts[:, CUT_STRIP] == OF_ROWS
    strips = _cut_by_rows(requests[pieces], cuts[by_rows][:, [CUT_SHARD, CUT_CODEC, CUT_AT]])
    parts = _cut_by_columns(strips.requests, cuts[~by_rows])
    origin = np.concatenate([pieces[strips.origin[parts.origin]], rest])
    order = np.argsort(origin, kind="stable")
    return Parts(origin[order], np.concatenate([parts.requests, requests[rest]])[order])


def cuts_among(requests: Sequence[np.ndarray], itemsizes: np.ndarray, least_bytes: int) -> np.ndarray:
    """Return the cuts ``[cuts, 4]`` by which these requests, each other than the others, want more alike.

    A shard with elements of so many bytes is left whole if nothing more is alike then, or if parts would have less than
    `least_bytes` on average.

    >>> whole, half, other = (np.array([[0, row, 0, rows, 6, 0]]) for row, rows in ((0, 8), (0, 4), (4, 4)))
    >>> cuts_among([whole, half, other], np.array([2]), 1).tolist()
    [[0, 0, -1, 4]]
    >>> len(cuts_among([whole, half, other], np.array([2]), 49)), len(cuts_among([half, other], np.array([2]), 1))
    (0, 0)
    """
    wanted = [pieces[_can_be_cut(pieces)] for pieces in requests]
    wanted = [pieces for pieces in wanted if len(pieces)]
    if len(wanted) < 2:
        return no_cuts()
    if len({pieces.shape[1] for pieces in wanted}) > 1:
        wanted = [_with_destinations(pieces) for pieces in wanted]
    pieces = np.concatenate(wanted)
    who = np.repeat(np.arange(len(wanted)), [*map(len, wanted)])
    contended = _contended(pieces)
    if not contended.any():
        return no_cuts()
    pieces, who = pieces[contended], who[contended]

    strips = _cut_by_rows(pieces, _borders(pieces, _SHARD, FIRST_ROW, ROW_COUNT))
    cells = _cut_by_columns(strips.requests, _borders(strips.requests, _STRIP, FIRST_COLUMN, COLUMN_COUNT))
    origin = strips.origin[cells.origin]

    shard = numbered(pieces[:, _SHARD])
    count, of_cell = int(shard.max()) + 1, shard[origin]
    itemsize = np.zeros(count, np.int64)
    itemsize[shard] = itemsizes[pieces[:, SHARD]]
    gain = _spared(cells.requests, who[origin], of_cell, count) - _spared(pieces, who, shard, count)
    size = np.bincount(shard, elements_of(pieces), count) * itemsize
    chosen = (gain > 0) & (size >= least_bytes * np.bincount(of_cell, minlength=count))
    chosen[of_cell[_within_blocks(pieces[origin], cells.requests)]] = False

    # Of the borders those that cut something: where a part begins, and its piece does not.
    is_inner = np.diff(strips.origin, prepend=-1) == 0
    rows = strips.requests[is_inner & chosen[shard[strips.origin]]]
    is_inner = np.diff(cells.origin, prepend=-1) == 0
    columns = cells.requests[is_inner & chosen[of_cell]]
    by_rows = rows[:, [*_SHARD, FIRST_ROW, FIRST_ROW]]
    by_rows[:, CUT_STRIP] = OF_ROWS
    return _distinct(np.concatenate([by_rows, columns[:, [*_STRIP, FIRST_COLUMN]]]))


def most_lines(
    requests: Mapping[int, np.ndarray], alike: Mapping[int, Alike], trainers: int, relays: str
) -> int:
    """Return about how many lines one member has at most where ranks want these `alike` of so many trainer's ranks,
    each: it gets what comes in one and passes it on, and a trainer's rank feeds all of its own."""
    fed: dict[tuple[int, ...], int] = {}
    for rank, of_rank in alike.items():
        elements = np.bincount(of_rank.sets, elements_of(requests[rank]), len(of_rank.ranks))
        for ranks, wanted in zip(of_rank.ranks, elements.tolist(), strict=True):
            if tuple(ranks) not in fed:
                fed[tuple(ranks)] = -(-len(ranks) // length_of(relays, len(ranks), int(wanted)))
    return max(sum(fed.values()), *(2 * trainers * len(of_rank.ranks) for of_rank in alike.values()))


def _can_be_cut(requests: np.ndarray) -> np.ndarray:
    """Return a mask of the pieces that come in none of the engine's rounds."""
    if requests.shape[1] == REQUEST_COLUMNS:
        return np.ones(len(requests), bool)
    mask: np.ndarray = requests[:, STAGED_ROUND] == UNSTAGED
    return mask


def _with_destinations(requests: np.ndarray) -> np.ndarray:
    """Return requests of which all say where they go; those that did not go anywhere."""
    if requests.shape[1] == BLOCK_REQUEST_COLUMNS:
        return requests
    added = np.zeros((len(requests), BLOCK_REQUEST_COLUMNS - REQUEST_COLUMNS), np.int64)
    added[:, -1] = UNSTAGED
    return np.concatenate([requests, added], 1)


def _within_blocks(pieces: np.ndarray, parts: np.ndarray) -> np.ndarray:
    """Return a mask of the parts that begin within a block of their pieces, which are given for each."""
    if pieces.shape[1] == REQUEST_COLUMNS:
        return np.zeros(len(pieces), bool)
    begins, side = parts[:, DESTINATION][:, 1:], SIDES[parts[:, REQUEST_CODEC]][:, None]
    is_inner = begins != pieces[:, DESTINATION][:, 1:]
    mask: np.ndarray = (is_inner & (begins % side != 0)).any(1)
    return mask


def _distinct(rows: np.ndarray) -> np.ndarray:
    """Return each row once, in order."""
    numbers = numbered(rows)
    distinct = np.empty((int(numbers.max(initial=-1)) + 1, rows.shape[1]), np.int64)
    distinct[numbers] = rows
    return distinct


def _contended(pieces: np.ndarray) -> np.ndarray:
    """Return a mask of the pieces in whose shard some overlap and are not equal; in some these only share rows."""
    shard = numbered(pieces[:, _SHARD])
    boxes = pieces[:, [SHARD, FIRST_ROW, ROW_COUNT, FIRST_COLUMN, COLUMN_COUNT]]
    boxes[:, 0] = shard
    boxes = _distinct(boxes)
    rows = _distinct(boxes[:, :3])
    contended = np.zeros(int(shard.max()) + 1, bool)
    contended[rows[_overlapping(rows[:, 0], rows[:, 1], rows[:, 2]), 0]] = True
    contended[boxes[_overlapping(numbered(boxes[:, :3]), boxes[:, 3], boxes[:, 4]), 0]] = True
    mask: np.ndarray = contended[shard]
    return mask


def _overlapping(key: np.ndarray, begin: np.ndarray, length: np.ndarray) -> np.ndarray:
    """Return a mask of the intervals that begin before one of their key ends that is before them. They are in the order
    of keys and begins."""
    begins, ends = np.split(numbered(np.concatenate([begin, begin + length])[:, None]), 2)
    many = int(ends.max()) + 1
    furthest = np.maximum.accumulate(key * many + ends)  # of later keys all are further
    overlapping = np.zeros(len(key), bool)
    overlapping[1:] = furthest[:-1] > (key * many + begins)[1:]
    return overlapping


def _spared(pieces: np.ndarray, who: np.ndarray, shard: np.ndarray, shards: int) -> np.ndarray:
    """Return how many elements of each shard are not sent again, since several want the same piece."""
    piece = numbered(as_alike(pieces))
    pairs = _distinct(np.stack([piece, who], 1))
    again = np.bincount(pairs[:, 0]) - 1
    elements, of_shard = np.zeros(len(again), np.int64), np.zeros(len(again), np.int64)
    elements[piece], of_shard[piece] = elements_of(pieces), shard
    return np.bincount(of_shard, elements * again, shards)


def _borders(pieces: np.ndarray, keys: list[int], first: int, count: int) -> np.ndarray:
    """Return where pieces begin and end, behind their columns `keys`."""
    begins = pieces[:, [*keys, first]]
    ends = begins.copy()
    ends[:, -1] += pieces[:, count]
    return _distinct(np.concatenate([begins, ends]))


def _cut_by_rows(pieces: np.ndarray, cuts: np.ndarray) -> Parts:
    return _cut(pieces, _SHARD, FIRST_ROW, ROW_COUNT, cuts)


def _cut_by_columns(strips: np.ndarray, cuts: np.ndarray) -> Parts:
    return _cut(strips, _STRIP, FIRST_COLUMN, COLUMN_COUNT, cuts)


def _cut(pieces: np.ndarray, keys: list[int], first: int, count: int, cuts: np.ndarray) -> Parts:
    """Cut pieces along one side, given by the columns of its begin and length, at what stands behind `keys` in the cuts
    of their own keys."""
    n = len(pieces)
    if not len(cuts) or not n:
        return Parts(np.arange(n), pieces)
    begins, ends = pieces[:, first], pieces[:, first] + pieces[:, count]
    values, place = np.unique(np.concatenate([begins, ends, cuts[:, -1]]), return_inverse=True)
    key = numbered(np.concatenate([pieces[:, keys], cuts[:, :-1]])) * len(values)
    at = np.unique(key[n:] + place[2 * n :])
    low = np.searchsorted(at, key[:n] + place[:n], "right")
    inside = np.searchsorted(at, key[:n] + place[n : 2 * n], "left") - low
    origin = np.repeat(np.arange(n), inside + 1)
    within = np.arange(len(origin)) - np.repeat(np.cumsum(inside + 1) - inside - 1, inside + 1)
    positions, index = values[at % len(values)], low[origin] + within
    parts = pieces[origin]
    parts[:, first] = np.where(within == 0, begins[origin], positions[index - 1])
    last = within == inside[origin]
    parts[:, count] = (
        np.where(last, ends[origin], positions[np.minimum(index, len(at) - 1)]) - parts[:, first]
    )
    if parts.shape[1] == BLOCK_REQUEST_COLUMNS:
        goes_to = DESTINATION.start + (1 if first == FIRST_ROW else 2)
        parts[:, goes_to] += parts[:, first] - begins[origin]
    return Parts(origin, parts)
