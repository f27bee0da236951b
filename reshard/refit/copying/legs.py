"""The buckets of a step of an exchange, when inference ranks pass buckets on (`reshard.refit.relays`).

A rank passes a bucket on `LAG` steps after it has arrived, from where it lies: until then the slots of the buckets
between the two are in use, so that nothing waits for it. Each further rank of a line gets it so much later.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from reshard.refit.copying.packing import PackedPair
from reshard.refit.relays import Line

LAG = 2  # as many as a pair has buckets under way at once


class Leg(NamedTuple):
    """A bucket on its way between this member and a partner: the line in which it travels, its number there, and its
    bytes."""

    partner: int
    line: Line
    bucket: int
    size: int


class Way(NamedTuple):
    """The buckets of a line between this member and a partner, which come so many steps `behind` their packing."""

    partner: int
    line: Line
    behind: int
    pair: PackedPair

    def leg(self, step: int) -> Leg:
        """Return what goes this way in a step."""
        bucket = step - self.behind
        return Leg(self.partner, self.line, bucket, self.pair.bytes_of_round(bucket))


class Legs:
    """The buckets that arrive at a member, and that leave it, in each step; both ends of a pair order them alike.

    `incoming` and `outgoing` are the pairs by line: those in which this member is an inference rank, and those of which
    it is the trainer's rank.
    """

    def __init__(
        self, rank: int, incoming: Mapping[Line, PackedPair], outgoing: Mapping[Line, PackedPair]
    ) -> None:
        ins = [Way(line.before(rank), line, LAG * line.place(rank), pair) for line, pair in incoming.items()]
        passed = [
            Way(after, line, LAG * (line.place(rank) + 1), pair)
            for line, pair in incoming.items()
            if (after := line.after(rank)) is not None
        ]
        own = [Way(line.first, line, 0, pair) for line, pair in outgoing.items()]
        self.ins = sorted(ins, key=lambda way: way[:2])
        self.outs = sorted([*own, *passed], key=lambda way: way[:2])
        self.passed = frozenset(way.line for way in passed)  # lines in which this member passes something on
        self.own = sorted(outgoing)

    @property
    def steps(self) -> int:
        """The steps until all has arrived here, and left."""
        return max(
            (way.pair.rounds + way.behind for way in (*self.ins, *self.outs) if way.pair.rounds), default=0
        )

    def arriving(self, step: int) -> list[Leg]:
        """Return what arrives in a step."""
        return [way.leg(step) for way in self.ins]

    def leaving(self, step: int) -> list[Leg]:
        """Return what leaves in a step."""
        return [way.leg(step) for way in self.outs]


def splits(legs: Sequence[Leg], ranks: Sequence[int]) -> list[int]:
    """Return the bytes of legs by their partner's place among `ranks`."""
    sizes = dict.fromkeys(ranks, 0)
    for leg in legs:
        sizes[leg.partner] += leg.size
    return [*sizes.values()]


def starts(legs: Sequence[Leg], first: int = 0) -> list[int]:
    """Return where each leg starts in a buffer that starts at `first`."""
    return [*accumulate((leg.size for leg in legs), initial=first)][:-1]
