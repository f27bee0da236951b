"""Relays: inference ranks that want the same pieces of a trainer's rank, as replicas do, pass them on.

    trainer's rank -> first replica -> second -> third

What travels leaves the trainer's rank once, however many replicas there are, and each of them receives it and passes it
on at the same time, one bucket behind the other: it sends it to the next one, or that one reads it, as the transport
has it. So a refit takes as long as for one replica, and a few buckets more.
Ranks whose requests differ pass on what is the same in them: those of one mixture of experts its attention. What only
overlaps is cut first (`reshard.refit.cuts`). A trainer's rank finds out who wants what alike (`alike_in`), and tells
all; all then find the same lines. Pure.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from math import isqrt
from typing import Any, NamedTuple

import numpy as np

from reshard.core.errors import ReshardError, listed
from reshard.refit.copying.addresses import NO_DESTINATION, as_alike, sharing_blocks

AUTO, ALWAYS, NEVER = "auto", "always", "never"
RELAYS = (AUTO, ALWAYS, NEVER)
# Elements of a small bucket. A line of so many ranks that filling it takes as long as sending its bytes is too long.
STEP_ELEMENTS = 2 << 20
MOST_NUMBER = 1 << 62


def check_relays(value: Any, name: str = "relays") -> str:
    """Return the choice whether there are relays. Raises ReshardError where what was given as `name` is none."""
    if value not in RELAYS:
        raise ReshardError(f"{name} {value!r:.80} is not one of {listed(RELAYS)}")
    return str(value)


class Line(NamedTuple):
    """The inference ranks that get the same pieces of a trainer's rank, in the order in which these come to them."""

    trainer: int
    ranks: tuple[int, ...]

    @property
    def first(self) -> int:
        """The rank that gets them from the trainer's."""
        return self.ranks[0]

    def place(self, rank: int) -> int:
        """Return how many ranks pieces pass before this one."""
        return self.ranks.index(rank)

    def before(self, rank: int) -> int:
        """Return the rank that a rank gets them from, the trainer's for the first."""
        place = self.place(rank)
        return self.ranks[place - 1] if place else self.trainer

    def after(self, rank: int) -> int | None:
        """Return the rank to which a rank passes them on; None for the last."""
        rest = self.ranks[self.place(rank) + 1 :]
        return rest[0] if rest else None


Streams = Mapping[Line, np.ndarray]  # the pieces, by number and in order, that come to a rank in each line


class Alike(NamedTuple):
    """What a rank wants of a trainer's rank as others do: sets of ranks, and the number of the set of each piece."""

    ranks: Sequence[Sequence[int]]
    sets: np.ndarray


def alike_in(requests: Mapping[int, np.ndarray], digests: Mapping[int, bytes]) -> dict[int, Alike]:
    """Return, by inference rank, which other ranks want each of its pieces; `requests` are those of all, a row for each
    piece, and ranks with the same of `digests` have the same.

    >>> rows = {1: np.array([[0, 1], [5, 5]]), 2: np.array([[5, 5], [7, 0]]), 3: np.array([[0, 1], [5, 5]])}
    >>> alike = alike_in(rows, {1: b"a", 2: b"b", 3: b"a"})
    >>> [[alike[rank].ranks[number] for number in alike[rank].sets] for rank in rows]
    [[[1, 3], [1, 2, 3]], [[1, 2, 3], [2]], [[1, 3], [1, 2, 3]]]
    """
    groups: dict[bytes, list[int]] = defaultdict(list)
    for rank in requests:
        groups[digests[rank]].append(rank)
    members = [*groups.values()]
    widest = max((requests[ranks[0]].shape[1] for ranks in members), default=0)
    keys = [_keys(as_alike(requests[ranks[0]]), widest) for ranks in members]
    if not keys:
        return {}
    owners = np.repeat(np.arange(len(keys)), [*map(len, keys)])
    piece = numbered(np.concatenate(keys))
    words = -(-len(keys) // 64)
    wanted = np.zeros((int(piece.max(initial=-1)) + 1, 64 * words), bool)
    wanted[piece, owners] = True
    set_of_piece = numbered(np.packbits(wanted, 1).view(np.int64))
    sets = np.zeros((int(set_of_piece.max(initial=-1)) + 1, 64 * words), bool)
    sets[set_of_piece] = wanted
    set_ranks = [sorted(rank for group in np.flatnonzero(row) for rank in members[group]) for row in sets]
    result: dict[int, Alike] = {}
    for group, ranks in enumerate(members):
        numbers, own = np.unique(set_of_piece[piece[owners == group]], return_inverse=True)
        alike = Alike([set_ranks[number] for number in numbers.tolist()], own.ravel())
        result |= dict.fromkeys(ranks, alike)
    return result


def _keys(rows: np.ndarray, width: int) -> np.ndarray:
    """Return what tells pieces apart: their rows, each with those that it makes blocks with, and with how many equal
    ones came before it."""
    filled = np.full((len(rows), width + 2), NO_DESTINATION, np.int64)
    filled[:, : rows.shape[1]] = rows
    filled[:, width + 1] = _company(rows)
    order = np.lexsort(rows.T[::-1])
    is_new = np.ones(len(rows), bool)
    is_new[1:] = (rows[order][1:] != rows[order][:-1]).any(1)
    first = np.maximum.accumulate(np.where(is_new, np.arange(len(rows)), 0))
    filled[order, width] = np.arange(len(rows)) - first
    return filled


def _company(rows: np.ndarray) -> np.ndarray:
    """Return a number of what each piece may share a block with: the others of its tensor, as in `as_alike`, that have
    parts of blocks. A block is made of all that a line brings of it, so they are alike together or not at all."""
    company = np.zeros(len(rows), np.int64)
    for pieces in sharing_blocks(rows):
        together = rows[pieces]
        together = together[np.lexsort(together.T[::-1])]
        digest = blake2b(np.ascontiguousarray(together).tobytes(), digest_size=8).digest()
        company[pieces] = int.from_bytes(digest, "little") >> 2
    return company


def numbered(rows: np.ndarray) -> np.ndarray:
    """Return numbers of rows, from 0: the same of equal ones, and of others in their order.

    >>> numbered(np.array([[2, 0], [1, 7], [2, 0], [1, 1 << 60]])).tolist()
    [2, 0, 2, 1]
    """
    numbers, count = np.zeros(len(rows), np.int64), 1
    for column in rows.T if len(rows) else ():  # `np.unique` of whole rows takes ten times as long
        least, most = int(column.min()), int(column.max())
        values = column - least
        if most - least >= MOST_NUMBER:
            values = np.unique(column, return_inverse=True)[1]
        many = int(values.max()) + 1
        if count * many > MOST_NUMBER:
            numbers = np.unique(numbers, return_inverse=True)[1]
            count = int(numbers.max()) + 1
        if count * many > MOST_NUMBER:
            values = np.unique(column, return_inverse=True)[1]
            many = int(values.max()) + 1
        numbers, count = numbers * many + values, count * many
    return np.unique(numbers, return_inverse=True)[1].ravel()


def streams_of(
    trainer: int,
    rank: int,
    requests: np.ndarray,
    elements: np.ndarray,
    alike: Alike,
    relays: str,
    may_relay: Callable[[int], bool],
    host_of: Callable[[int], str],
) -> dict[Line, np.ndarray]:
    """Return the lines in which a rank gets its pieces of a trainer's rank, and which: `requests` are those, a row for
    each, with so many `elements`. Of those that `may_relay`, all ranks come to the same."""
    pieces_in: dict[Line, list[np.ndarray]] = defaultdict(list)
    for number, ranks in enumerate(alike.ranks):
        pieces = np.flatnonzero(alike.sets == number)
        line = Line(trainer, (rank,))
        if may_relay(rank) and len(ranks) > 1:
            relaying = in_order([other for other in ranks if may_relay(other)], host_of, host_of(trainer))
            length = length_of(relays, len(relaying), int(elements[pieces].sum()))
            start = relaying.index(rank) // length * length
            line = Line(trainer, tuple(relaying[start : start + length]))
        pieces_in[line].append(pieces)
    streams = {}
    for line, parts in pieces_in.items():
        together = np.sort(np.concatenate(parts))
        if len(line.ranks) > 1:  # others may ask in another order
            together = together[np.lexsort(as_alike(requests[together]).T[::-1])]
        streams[line] = together
    return streams


def length_of(relays: str, ranks: int, elements: int) -> int:
    """Return how many of so many ranks that want the same elements stand in one line, as members have chosen: the more
    there are, the fewer lines a trainer's rank feeds, and the longer it takes until the last one gets anything."""
    if relays == NEVER:
        return 1
    return ranks if relays == ALWAYS else max(1, min(ranks, isqrt(ranks * elements // (2 * STEP_ELEMENTS))))


def in_order(ranks: Sequence[int], host_of: Callable[[int], str], home: str) -> list[int]:
    """Return ranks in the order of a line: it passes through one host after the other, so that nothing crosses the
    network to a host twice, and begins at the trainer's.

    >>> in_order([3, 4, 5, 6], {3: "b", 4: "a", 5: "b", 6: "c"}.__getitem__, "a")
    [4, 3, 5, 6]
    """
    return sorted(ranks, key=lambda rank: (host_of(rank) != home, host_of(rank), rank))
