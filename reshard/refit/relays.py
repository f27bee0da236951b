"""Relays: inference ranks that ask a trainer's rank for the same pieces, as replicas do, pass them on.

    trainer's rank -> first replica -> second -> third

What travels leaves the trainer's rank once, however many replicas there are, and each of them receives and sends it
at the same time, one bucket behind the other. So a refit takes as long as for one replica, and a few buckets more.
All members find the same lines by themselves, from the digests of what was asked for (`protocol.requests`). Pure.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, NamedTuple

from reshard.core.errors import ReshardError, listed

AUTO, ALWAYS, NEVER = "auto", "always", "never"
RELAYS = (AUTO, ALWAYS, NEVER)
# Elements below which a line saves less than its further steps cost, each of which is as slow as a message.
LEAST_ELEMENTS = 16 << 20


def check_relays(value: Any, name: str = "relays") -> str:
    """Return the choice whether there are relays. Raises ReshardError where what was given as `name` is none."""
    if value not in RELAYS:
        raise ReshardError(f"{name} {value!r:.80} is not one of {listed(RELAYS)}")
    return str(value)


def saves(relays: str, elements: int) -> bool:
    """Return True where pieces of so many elements are passed on, as members have chosen."""
    return relays == ALWAYS or (relays == AUTO and elements >= LEAST_ELEMENTS)


class Line(NamedTuple):
    """The inference ranks that get the same pieces of a trainer's rank, in the order in which these come to them."""

    trainer: int
    ranks: tuple[int, ...]

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


def lines_of(
    trainer: int,
    wanted: Mapping[int, Hashable],
    may_relay: Callable[[int], bool],
    host_of: Callable[[int], str],
) -> list[Line]:
    """Return the lines in which the pieces of a trainer's rank go to inference ranks, from what each has `wanted`.

    Ranks that `may_relay` stand in line where they want the same; each other one by itself. A line passes through
    one host after the other, so that nothing crosses the network to a host twice.

    >>> hosts = {0: "a", 3: "b", 4: "a", 5: "b", 6: "b"}
    >>> [line.ranks for line in lines_of(0, {3: "w", 4: "w", 5: "w", 6: "v"}, lambda rank: True, hosts.get)]
    [(4, 3, 5), (6,)]
    """
    alike: dict[Hashable, list[int]] = defaultdict(list)
    for rank, pieces in wanted.items():
        alike[pieces if may_relay(rank) else (rank, "alone")].append(rank)
    home = host_of(trainer)
    return [
        Line(trainer, tuple(sorted(ranks, key=lambda rank: (host_of(rank) != home, host_of(rank), rank))))
        for ranks in alike.values()
    ]


def by_rank(lines: Iterable[Line]) -> dict[int, Line]:
    """Return the line of each inference rank."""
    return {rank: line for line in lines for rank in line.ranks}
