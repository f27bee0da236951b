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
    """A bucket on its way between this member and a partner: the trainer's rank that has packed it, its number among
    those of that rank's line, and its bytes."""

    partner: int
    trainer: int
    bucket: int
    size: int


class Way(NamedTuple):
    """The buckets of a line between this member and a partner, which come so many steps `behind` their packing."""

    partner: int
    trainer: int
    behind: int
    pair: PackedPair

    def leg(self, step: int) -> Leg:
        """Return what goes this way in a step."""
        bucket = step - self.behind
        return Leg(self.partner, self.trainer, bucket, self.pair.bytes_of_round(bucket))


class Legs:
    """What arrives at a member, and what leaves it, in each step; both ends of a pair order that alike.

    `incoming` are the pairs by trainer's rank, with the line in which each comes here; `outgoing` those of this
    trainer's rank, by the first inference rank of the line in which each goes.
    """

    def __init__(
        self,
        rank: int,
        incoming: Mapping[int, PackedPair],
        lines: Mapping[int, Line],
        outgoing: Mapping[int, PackedPair],
        lines_out: Mapping[int, Line],
    ) -> None:
        # By inference rank: the first of its line, which gets from here what all of that get.
        self.heads = {rank: first for first, line in lines_out.items() for rank in line.ranks}
        self.ins, passed = [], []
        for trainer, pair in incoming.items():
            line = lines[trainer]
            behind = LAG * line.place(rank)
            self.ins.append(Way(line.before(rank), trainer, behind, pair))
            if (after := line.after(rank)) is not None:
                passed.append(Way(after, trainer, behind + LAG, pair))
        self.passed = frozenset(way.trainer for way in passed)  # trainers' ranks whose bytes are passed on
        own = [Way(first, rank, 0, pair) for first, pair in outgoing.items()]
        self.ins.sort(key=lambda way: way[:2])
        self.outs = sorted([*own, *passed], key=lambda way: way[:2])

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
