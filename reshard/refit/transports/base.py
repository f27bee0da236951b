"""The interface of a transport."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence, Set
from typing import Any, ClassVar, NamedTuple, TypeVar, cast

import numpy as np
import torch

from reshard.comm.group import RefitGroup
from reshard.engines.base import Engine
from reshard.refit.addresses import AT_ONCE
from reshard.refit.protocol.memory import TrainerMemory
from reshard.refit.routes import Pair


class Outgoing(NamedTuple):
    """The copies that a trainer's rank sends to one inference rank.

    `table` are the copies with the source's end filled in, `rounds` the engine's round of each (`addresses.staged_rounds_of`). For what
    travels in blocks of fp8, `into` says where each goes (`addresses.Pieces.into`), and `places` describes the local tensors there
    (`fp8_blocks.packed.places_of_requests`).
    """

    table: np.ndarray
    rounds: np.ndarray
    into: np.ndarray
    places: np.ndarray

    def of(self, number: int) -> "Outgoing":
        """Return what goes in one of the engine's rounds."""
        mask = self.rounds == number
        return self._replace(table=self.table[mask], rounds=self.rounds[mask], into=self.into[mask])


class Incoming(NamedTuple):
    """The copies that an inference rank gets from one trainer's rank.

    `table` are the copies with the destination's end filled in, `rounds` this engine's round of each. `asked` and `into` are the
    pieces' (`addresses.Pieces`), `memory` is the trainer's rank's, and `places` say where blocks of fp8 are served from
    (`fp8_blocks.items.places_of`).
    """

    table: np.ndarray
    rounds: np.ndarray
    asked: np.ndarray
    into: np.ndarray
    memory: TrainerMemory
    places: np.ndarray

    def of(self, number: int) -> "Incoming":
        """Return what comes in one of its rounds."""
        mask = self.rounds == number
        return self._replace(
            table=self.table[mask], rounds=self.rounds[mask], asked=self.asked[mask], into=self.into[mask]
        )


Flow = TypeVar("Flow", bound=Outgoing | Incoming)


def rounds_in(flows: Mapping[int, Any]) -> set[int]:
    """Return the numbers of the engines' rounds in what goes out, or comes in, besides `AT_ONCE`."""
    return {int(number) for flow in flows.values() for number in np.unique(flow.rounds)} - {AT_ONCE}


def by_round(flows: Mapping[int, Flow]) -> dict[int, dict[int, Flow]]:
    """Return what goes out, or comes in, by the engine's round and then as before; `AT_ONCE` comes first."""
    return {
        number: {rank: cast(Flow, flow.of(number)) for rank, flow in flows.items()}
        for number in (AT_ONCE, *sorted(rounds_in(flows)))
    }


class Context(NamedTuple):
    """The surroundings that a transport is made for.

    `backend` is what was chosen for all, `bucket_bytes` bounds its memory, `participants` are the ranks that have a side, `processes`
    the process ids of all members. `engine` is this member's, None where it has none.
    """

    members: RefitGroup
    device: torch.device
    backend: str
    bucket_bytes: int
    participants: Sequence[int]
    processes: Sequence[int]
    engine: Engine | None


class Transport(ABC):
    """One way of bytes between ranks.

    `prepare` is called whenever one of the ends has moved. Both ends of a pair see the same pieces in the same order. `run` is called
    by all members alike for `AT_ONCE`, then for each of `numbers` in order; in a verification once more.
    """

    name: ClassVar[str]
    sends: ClassVar[bool] = True  # the trainer's rank takes part; else it is only read
    replaces: ClassVar[Set[str]] = (
        frozenset()
    )  # transports for which it stands in on GPUs where they reach nothing

    received_bytes: Mapping[str, int] = {}  # that a refit brings to this rank, by route
    numbers: Set[int] = (
        frozenset()
    )  # the engines' rounds in which there is something to do, besides `AT_ONCE`
    is_sending = False  # prepared copies read this trainer's rank's memory
    is_blocking = False  # a GPU may wait for a partner in `run`, however long that takes
    shards: Mapping[
        int, np.ndarray
    ] = {}  # (address here, pitch in bytes) of shards that are read in place, by trainer's rank

    def __init__(self, context: Context) -> None:
        self.context = context
        self.members, self.device = context.members, context.device

    @staticmethod
    @abstractmethod
    def reaches(pair: Pair) -> bool:
        """Return True where it can carry the bytes of a pair."""

    @staticmethod
    def automatic(pair: Pair) -> bool:
        """Return True where it may be chosen for a pair that it reaches without being named."""
        return True

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
        """Make the tables of copies: what goes out by inference rank, what comes in by trainer's rank. `elsewhere` is what other
        transports bring to this rank."""

    @abstractmethod
    def run(self, number: int) -> None:
        """Carry out the copies of a round, at most enqueued on a GPU when this returns.

        Raises ReshardError or RuntimeError where a partner dies or is late.
        """

    def negotiate(self) -> None:  # noqa: B027
        """Agree with all members, once at connect, after the first `prepare`; called by all alike."""

    def leave_room(self) -> None:  # noqa: B027
        """From now on leave room on the GPU for a transport that `is_blocking`."""

    def unmappable(self, memory: Mapping[int, TrainerMemory]) -> list[tuple[int, str]]:
        """Return which of these trainers' ranks have memory that this process cannot map, and why."""
        return []

    def follow(self, memory: Mapping[int, TrainerMemory]) -> bool:
        """Take the memory of the trainers' ranks that it reads, as it is now. Returns False where `prepare` is needed for that."""
        return True

    def keep_only(self, memory: Mapping[int, TrainerMemory]) -> None:  # noqa: B027
        """Unmap whatever of the trainers' ranks is not in their memory any more."""

    def renew(self) -> None:  # noqa: B027
        """Start anew after a refit that failed; called by all members alike."""

    def join(self) -> None:  # noqa: B027
        """Let the current stream wait for what `run` has enqueued on others."""

    def release(self) -> None:  # noqa: B027
        """Unmap others' memory, so that they may free it."""

    def free(self) -> None:  # noqa: B027
        """Give back memory of its own, which nobody has mapped any more; the next refit makes it anew."""

    def close(self) -> None:
        """Give everything back; nobody reads from this member any more."""
        self.release()
        self.free()
