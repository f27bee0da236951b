"""The interface of a transport."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from reshard.refit.copying.flows import Incoming, Outgoing
from reshard.refit.protocol.memory import TrainerMemory
from reshard.refit.routes import Reach
from reshard.refit.transports.context import Context


@dataclass
class Work:
    """The work of a transport in a refit, as it was prepared.

    `received_bytes` are what that brings to this rank, by route, and `numbers` the engines' rounds in which there is
    something to do, besides `UNSTAGED`. `is_sending`: copies read this trainer's rank's memory. `is_blocking`: a
    GPU may wait for a partner in `run`, however long that takes. `shards` are (address here, pitch in bytes) of
    shards that are read in place, by trainer's rank. `launches` are the kernels of ours that a refit launches, known
    at the latest when `run` has been through it.
    """

    received_bytes: Mapping[str, int]
    numbers: Set[int] = frozenset()
    is_sending: bool = False
    is_blocking: bool = False
    shards: Mapping[int, np.ndarray] | None = None
    launches: int = 0


class Transport(ABC):
    """One way of bytes between ranks.

    In the order in which the link calls them, on every member:

    - at connect: `reach` decides which pairs it gets, `unmappable` which of these it cannot have; `prepare`, then
      `negotiate` once, `share_gpu` where that is so, and `release`;
    - at a refit: `update_addresses` if memory has moved, and `prepare` again where that is not enough;
      `run(UNSTAGED)`, then `run` for each of `work.numbers` in order, with `join` after each; `release`, `free`;
    - with ``verify=True``: `run` for each of these numbers once more;
    - after a failure: `abort`, and `close` unless the GPU may still wait; `negotiate` anew at the next refit.

    Both ends of a pair see the same pieces in the same order.
    """

    reach: ClassVar[Reach]

    def __init__(self, context: Context) -> None:
        self.context, self.group, self.device = context, context.group, context.device
        self.work = Work(dict.fromkeys(self.reach.routes, 0))

    @abstractmethod
    def prepare(
        self,
        outgoing: Mapping[int, Outgoing],
        incoming: Mapping[int, Incoming],
        elsewhere: Collection[Incoming] = (),
    ) -> None:
        """Make the tables of copies, and `work`: what goes out by inference rank, what comes in by trainer's
        rank. `elsewhere` is what other transports bring to this rank."""

    @abstractmethod
    def run(self, number: int) -> None:
        """Carry out the copies of a round, at most enqueued on a GPU when this returns.

        Raises ReshardError or RuntimeError where a partner dies or is late.
        """

    def join(self) -> None:  # noqa: B027
        """Let the current stream wait for what `run` has enqueued on others."""

    def negotiate(self, anew: bool = False) -> None:  # noqa: B027
        """Agree with all members, after the first `prepare`, and `anew` after a refit that failed, with new
        communicators, say; called by all alike."""

    def share_gpu(self) -> None:  # noqa: B027
        """From now on run beside a transport that is blocking, whose kernels need multiprocessors too."""

    def unmappable(self, memory: Mapping[int, TrainerMemory]) -> list[tuple[int, str]]:
        """Return which of these trainers' ranks have memory that this process cannot map, and why."""
        return []

    def update_addresses(self, memory: Mapping[int, TrainerMemory]) -> bool:
        """Take the addresses that the trainers' shards have now. Returns False where `prepare` is
        needed for that."""
        return True

    def release(self, but: Mapping[int, TrainerMemory] | None = None) -> None:  # noqa: B027
        """Unmap others' memory, so that they may free it; all `but` this, which they still have."""

    def free(self) -> None:  # noqa: B027
        """Give back memory of its own, which nobody has mapped any more; the next refit makes it anew."""

    def abort(self) -> None:  # noqa: B027
        """End at once, after a failure, what would keep this member's GPU waiting for a partner that is lost."""

    def close(self, broken: bool = False) -> None:
        """Give everything back; nobody reads from this member any more. After a refit that failed the next one makes
        it anew; where the link is closed there is none, and `broken` says that a transfer into memory of its own
        may still go on, which is not waited for."""
        self.release()
        self.free()
