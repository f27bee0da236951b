"""The copies that go out of a trainer's rank, and that come into an inference rank, as transports take them."""

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np

from reshard.refit.copying.addresses import UNSTAGED
from reshard.refit.protocol.memory import TrainerMemory
from reshard.refit.relays import Line


class Placed(NamedTuple):
    """Copies, with the place in a local tensor that each goes to (`addresses.Pieces.destinations`)."""

    table: np.ndarray
    destinations: np.ndarray

    def where(self, mask: np.ndarray) -> "Placed":
        """Return those in a mask."""
        return Placed(self.table[mask], self.destinations[mask])


PADDING = -1  # in place of a trainer's rank, for rows that none has


class OwnedCopies(NamedTuple):
    """Copies with both ends filled in: where each goes (`addresses.Pieces.destinations`), the number of the
    shard that its source is in, and the trainer's rank, or `PADDING`."""

    table: np.ndarray
    destinations: np.ndarray
    owners: np.ndarray
    ranks: np.ndarray

    def where(self, mask: np.ndarray) -> "OwnedCopies":
        """Return those in a mask."""
        return OwnedCopies(*(column[mask] for column in self))


class Outgoing(NamedTuple):
    """The copies that a trainer's rank sends to one inference rank, a row of each array for each.

    `table` has the source's end filled in, `rounds` the engine's round (`addresses.staged_rounds_of`). For
    those that go in blocks, `destinations` says where each goes (`addresses.Pieces`), and `places` describes the
    local tensors there (`codecs.places.places_of_requests`). `host_memory` are the addresses, in order, at
    which the host's memory begins where sources are in it while the rank computes on a GPU; no copy crosses one.
    `line` is that of this inference rank, the first in it.
    """

    table: np.ndarray
    rounds: np.ndarray
    destinations: np.ndarray
    places: np.ndarray
    host_memory: np.ndarray = np.empty(0, np.int64)
    line: Line | None = None

    def of(self, number: int) -> "Outgoing":
        """Return the copies of one of the engine's rounds."""
        mask = self.rounds == number
        return self._replace(
            table=self.table[mask], rounds=self.rounds[mask], destinations=self.destinations[mask]
        )


class Incoming(NamedTuple):
    """The copies that an inference rank gets from one trainer's rank, a row of each array for each.

    `table` has the destination's end filled in, `rounds` this engine's round. `requests` and
    `destinations` are those of `addresses.Pieces`, `memory` says where the trainer's rank has its shards,
    `places` where blocks are served from (`codecs.places.places_of`), and `line` in which line they come here.
    """

    table: np.ndarray
    rounds: np.ndarray
    requests: np.ndarray
    destinations: np.ndarray
    memory: TrainerMemory
    places: np.ndarray
    line: Line | None = None

    def of(self, number: int) -> "Incoming":
        """Return the copies of one of its rounds."""
        mask = self.rounds == number
        return self._replace(
            table=self.table[mask],
            rounds=self.rounds[mask],
            requests=self.requests[mask],
            destinations=self.destinations[mask],
        )


Flow = TypeVar("Flow", bound=Outgoing | Incoming)


def rounds_in(flows: Mapping[int, Any]) -> set[int]:
    """Return the numbers of the engines' rounds in what goes out, or comes in, besides `UNSTAGED`."""
    return {int(number) for flow in flows.values() for number in np.unique(flow.rounds)} - {UNSTAGED}


def by_round(flows: Mapping[int, Flow]) -> dict[int, dict[int, Flow]]:
    """Return what goes out, or comes in, by the engine's round and then as before; `UNSTAGED` comes first."""
    return {
        number: {rank: cast(Flow, flow.of(number)) for rank, flow in flows.items()}
        for number in (UNSTAGED, *sorted(rounds_in(flows)))
    }
