"""The interface of a transport."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence, Set
from typing import Any, ClassVar, NamedTuple, TypeVar, cast

import numpy as np
import torch

from reshard.comm.group import RefitGroup
from reshard.refit.copying.addresses import UNSTAGED
from reshard.refit.engine import Engine
from reshard.refit.protocol.memory import TrainerMemory
from reshard.refit.routes import Pair, Peer, why_apart


class Outgoing(NamedTuple):
    """The copies that a trainer's rank sends to one inference rank, a row of each array for each.

    `table` has the source's end filled in, `rounds` the engine's round (`addresses.staged_rounds_of`). For
    blocks of fp8, `destinations` says where each goes (`addresses.Pieces`), and `places` describes the
    local tensors there (`fp8_blocks.packed.places_of_requests`). `host_memory` are the addresses, in order, at
    which the host's memory begins where sources are in it while the rank computes on a GPU; no copy crosses one.
    """

    table: np.ndarray
    rounds: np.ndarray
    destinations: np.ndarray
    places: np.ndarray
    host_memory: np.ndarray = np.empty(0, np.int64)

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
    and `places` where blocks of fp8 are served from (`fp8_blocks.items.places_of`).
    """

    table: np.ndarray
    rounds: np.ndarray
    requests: np.ndarray
    destinations: np.ndarray
    memory: TrainerMemory
    places: np.ndarray

    def of(self, number: int) -> "Incoming":
        """Return the copies of one of its rounds."""
        mask = self.rounds == number
        return self._replace(
            table=self.table[mask],
            rounds=self.rounds[mask],
            requests=self.requests[mask],
            destinations=self.destinations[mask],
        )


class Measured(NamedTuple):
    """The comparison of a trainer's rank's buckets with what it sent: `changed` of so many `words`, which take
    `delta_bytes` in place of `whole_bytes` on their way."""

    changed: int = 0
    words: int = 0
    delta_bytes: int = 0
    whole_bytes: int = 0

    def plus(self, other: "Measured") -> "Measured":
        """Return the sums of both."""
        return Measured(*(one + more for one, more in zip(self, other, strict=True)))


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


class Context(NamedTuple):
    """The surroundings that a transport is made for.

    `backend` is what was chosen for all, `bucket_bytes` bounds its memory, `participants` are the
    ranks that have a side, `peers` all members. `engine` is this member's, None where it has none.
    With `delta` trainers' ranks keep what they send by buckets, for deltas, in pinned host memory with
    `delta_on_host`. With `keep_mapped` what a refit needs may stay until the next one.
    """

    group: RefitGroup
    device: torch.device
    backend: str
    bucket_bytes: int
    participants: Sequence[int]
    peers: Sequence[Peer]
    engine: Engine | None
    delta: bool = False
    delta_on_host: bool = False
    keep_mapped: bool = False


class Transport(ABC):
    """One way of bytes between ranks.

    In the order in which the link calls them, on every member:

    - at connect: `reaches` decides which pairs it gets; `prepare`, then `negotiate` once;
    - at a refit: `update_addresses` if memory has moved, and `prepare` again where that is not enough;
      `run(UNSTAGED)`, then `run` for each of `numbers` in order, with `join` after each; `release`, `free`;
    - with ``verify=True``: `run` for each of `numbers` once more;
    - after a failure: `abort` and `close`, and `renew` at the next refit; or `abandon` and `close`, where there is
      none.

    Both ends of a pair see the same pieces in the same order.
    """

    name: ClassVar[str]
    sends: ClassVar[bool] = True  # the trainer's rank takes part; else it is only read
    # Transports for which it stands in on GPUs where they reach nothing.
    replaces: ClassVar[Set[str]] = frozenset()

    received_bytes: Mapping[str, int] = {}  # that a refit brings to this rank, by route
    # The engines' rounds in which there is something to do, besides `UNSTAGED`.
    numbers: Set[int] = frozenset()
    is_sending = False  # prepared copies read this trainer's rank's memory
    is_blocking = False  # a GPU may wait for a partner in `run`, however long that takes
    # (address here, pitch in bytes) of shards that are read in place, by trainer's rank.
    shards: Mapping[int, np.ndarray] = {}

    # Of deltas, where a transport makes them.
    carries_changes = False  # it sends changes between some members of this connection; the same on all
    keeps_sent = True  # what this trainer's rank last sent is kept, as far as it has to be
    kept_bytes = 0  # of memory for that, in a connection with deltas
    measured = Measured()  # what changed since, as found in the last refit

    def __init__(self, context: Context) -> None:
        self.context = context
        self.group, self.device = context.group, context.device

    @staticmethod
    @abstractmethod
    def reaches(pair: Pair) -> bool:
        """Return True where it can carry the bytes of a pair."""

    @staticmethod
    def automatic(pair: Pair) -> bool:
        """Return True where it may be chosen for a pair that it reaches without being named."""
        return True

    @staticmethod
    def refusal(pair: Pair) -> str:
        """Return why it does not carry the bytes of a pair, and what to do, for who has named it."""
        apart = why_apart(pair.trainer, pair.engine)
        why = f", since {apart}" if apart else ""
        return f"{pair.trainer.name} and {pair.engine.name} cannot read each other's memory{why}: use backend='auto', or 'nccl'"

    def carries(self, route: str) -> bool:
        """Return True for a route (`reshard.refit.routes`) whose bytes this transport carries."""
        return route == self.name

    @property
    @abstractmethod
    def launches(self) -> int:
        """Kernels that a refit launches, once `run` has been through it."""

    @abstractmethod
    def prepare(
        self,
        outgoing: Mapping[int, Outgoing],
        incoming: Mapping[int, Incoming],
        elsewhere: Collection[Incoming] = (),
    ) -> None:
        """Make the tables of copies: what goes out by inference rank, what comes in by trainer's
        rank. `elsewhere` is what other transports bring to this rank."""

    @abstractmethod
    def run(self, number: int) -> None:
        """Carry out the copies of a round, at most enqueued on a GPU when this returns.

        Raises ReshardError or RuntimeError where a partner dies or is late.
        """

    def negotiate(self) -> None:  # noqa: B027
        """Agree with all members, once at connect, after the first `prepare`; called by all alike."""

    def share_gpu(self) -> None:  # noqa: B027
        """From now on run beside a transport that `is_blocking`, whose kernels need multiprocessors too."""

    def unmappable(self, memory: Mapping[int, TrainerMemory]) -> list[tuple[int, str]]:
        """Return which of these trainers' ranks have memory that this process cannot map, and why."""
        return []

    def update_addresses(self, memory: Mapping[int, TrainerMemory]) -> bool:
        """Take the addresses that the trainers' shards have now. Returns False where `prepare` is
        needed for that."""
        return True

    def unmap_except(self, memory: Mapping[int, TrainerMemory]) -> None:  # noqa: B027
        """Unmap all of the trainers' memory but this, which they still have."""

    def renew(self) -> None:  # noqa: B027
        """Start anew after a refit that failed, with new communicators, say; called by all members alike."""

    def send_changes(self, since: int | None) -> None:  # noqa: B027
        """In the refit that begins send what changed since transaction `since`, all where it is None; called in
        connections with deltas only."""

    def join(self) -> None:  # noqa: B027
        """Let the current stream wait for what `run` has enqueued on others."""

    def release(self) -> None:  # noqa: B027
        """Unmap others' memory, so that they may free it."""

    def free(self) -> None:  # noqa: B027
        """Give back memory of its own, which nobody has mapped any more; the next refit makes it anew."""

    def abort(self) -> None:  # noqa: B027
        """End at once, after a failure, what would keep this member's GPU waiting for a partner that is lost."""

    def abandon(self) -> None:  # noqa: B027
        """Leave its own memory to a transfer that has failed, and may go on: `close` then does not wait for that."""

    def close(self) -> None:
        """Give everything back; nobody reads from this member any more. After a failure the next refit makes it
        anew (`renew`); after the close of a link there is none."""
        self.release()
        self.free()
