"""The copies that go out of a trainer's rank, and that come into an inference rank, as transports take them."""

from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np

from reshard.refit.copying.addresses import UNSTAGED
from reshard.refit.protocol.memory import TrainerMemory
from reshard.refit.relays import Line, Streams

EMPTY: Streams = {}


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
    `streams` says in which lines they travel, where they may be passed on.
    """

    table: np.ndarray
    rounds: np.ndarray
    destinations: np.ndarray
    places: np.ndarray
    host_memory: np.ndarray = np.empty(0, np.int64)
    streams: Streams = EMPTY

    def of(self, number: int) -> "Outgoing":
        """Return the copies of one of the engine's rounds."""
        return self.at(self.rounds == number)

    def at(self, chosen: np.ndarray) -> "Outgoing":
        """Return those of an index or a mask."""
        return self._replace(
            table=self.table[chosen], rounds=self.rounds[chosen], destinations=self.destinations[chosen]
        )


class Incoming(NamedTuple):
    """The copies that an inference rank gets from one trainer's rank, a row of each array for each.

    `table` has the destination's end filled in, `rounds` this engine's round. `requests` and
    `destinations` are those of `addresses.Pieces`, `memory` says where the trainer's rank has its shards,
    `places` where blocks are served from (`codecs.places.places_of`), and `streams` in which lines they come here.
    """

    table: np.ndarray
    rounds: np.ndarray
    requests: np.ndarray
    destinations: np.ndarray
    memory: TrainerMemory
    places: np.ndarray
    streams: Streams = EMPTY

    def of(self, number: int) -> "Incoming":
        """Return the copies of one of its rounds."""
        return self.at(self.rounds == number)

    def at(self, chosen: np.ndarray) -> "Incoming":
        """Return those of an index or a mask."""
        return self._replace(
            table=self.table[chosen],
            rounds=self.rounds[chosen],
            requests=self.requests[chosen],
            destinations=self.destinations[chosen],
        )


Flow = TypeVar("Flow", bound=Outgoing | Incoming)
Key = TypeVar("Key", bound=Hashable)


def rounds_in(flows: Mapping[Any, Any]) -> set[int]:
    """Return the numbers of the engines' rounds in what goes out, or comes in, besides `UNSTAGED`."""
    return {int(number) for flow in flows.values() for number in np.unique(flow.rounds)} - {UNSTAGED}


def by_line(flows: Mapping[int, Flow]) -> dict[Line, Flow]:
    """Return what goes out, or comes in, by the line in which it travels."""
    return {
        line: cast(Flow, flow.at(pieces)) for flow in flows.values() for line, pieces in flow.streams.items()
    }


def by_round(flows: Mapping[Key, Flow]) -> dict[int, dict[Key, Flow]]:
    """Return what goes out, or comes in, by the engine's round and then as before; `UNSTAGED` comes first."""
    return {
        number: {key: cast(Flow, flow.of(number)) for key, flow in flows.items()}
        for number in (UNSTAGED, *sorted(rounds_in(flows)))
    }
