"""The interface of a transport."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Set
from typing import Any, NamedTuple

import numpy as np

from reshard.refit.addresses import AT_ONCE


class Outgoing(NamedTuple):
    """What a trainer's rank sends to one inference rank: the copies with the source's end filled in, and the engine's
    round of each (`addresses.rounds_of`); and for what travels in blocks of fp8 where each goes
    (`addresses.Pieces.into`), and the local tensors there (`parcels.places_of_requests`)."""

    table: np.ndarray
    rounds: np.ndarray
    into: np.ndarray
    places: np.ndarray

    def of(self, number: int) -> "Outgoing":
        """What goes in one of the engine's rounds."""
        here = self.rounds == number
        return self._replace(table=self.table[here], rounds=self.rounds[here], into=self.into[here])


class Incoming(NamedTuple):
    """What an inference rank gets from one trainer's rank: the copies with the destination's end filled in, and this
    engine's round of each (`addresses.rounds_of`, `parts`); the pieces as that rank was asked for them and where they go
    (`addresses.Pieces`), what it has said of its memory (`trainer_side.TrainerSide`), and where blocks of fp8 are served
    from (`blocks.places_of`)."""

    table: np.ndarray
    rounds: np.ndarray
    asked: np.ndarray
    into: np.ndarray
    memory: Mapping[str, Any]
    places: np.ndarray

    def of(self, number: int) -> "Incoming":
        """What comes in one of its rounds."""
        here = self.rounds == number
        return self._replace(
            table=self.table[here], rounds=self.rounds[here], asked=self.asked[here], into=self.into[here]
        )


def rounds_in(some: Mapping[int, Any]) -> set[int]:
    """The numbers of the engines' rounds in what goes out, or comes in, besides `AT_ONCE`."""
    return {int(number) for one in some.values() for number in np.unique(one.rounds)} - {AT_ONCE}


def by_round(some: Mapping[int, Any]) -> dict[int, dict[int, Any]]:
    """What goes out, or comes in, by the number of the engine's round and then as before; `AT_ONCE` comes first."""
    return {
        number: {rank: one.of(number) for rank, one in some.items()}
        for number in (AT_ONCE, *sorted(rounds_in(some)))
    }


class Transport(ABC):
    """One way of bytes. Which pairs it serves is said by `routes.way_between`.

    `prepare` is called whenever one of the ends has moved: `outgoing` is what goes out by inference rank,
    `incoming` what comes by trainer's rank. Both ends of a pair see the same
    pieces in the same order. `run` carries out what belongs to one of the engines' rounds, at most enqueued on the
    current stream when it returns, and raises ReshardError or RuntimeError where a partner dies or is late. It is
    called for `AT_ONCE`, then for each of `numbers` in their order, by all members alike; in a check once more.
    """

    received_bytes = 0  # by this rank, in each refit
    numbers: Set[int] = (
        frozenset()
    )  # the rounds of engines in which there is something to do, besides `AT_ONCE`

    @property
    @abstractmethod
    def launches(self) -> int:
        """Kernels that a refit launches, once `run` has been through it."""

    @abstractmethod
    def prepare(self, outgoing: Mapping[int, Outgoing], incoming: Mapping[int, Incoming]) -> None:
        """Make ready for copies between these places."""

    @abstractmethod
    def run(self, number: int) -> None:
        """Carry out the copies of a round."""

    def release(self) -> None:  # noqa: B027
        """At the end of a refit: unmap others' memory, so that they may free it."""

    def close(self) -> None:  # noqa: B027
        """Give everything back; nobody reads from this member any more."""
