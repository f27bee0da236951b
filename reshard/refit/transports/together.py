"""The transports of a connection as one, for who need not know which there are."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import ExitStack

import numpy as np

from reshard.refit.copying.flows import Incoming, Outgoing
from reshard.refit.protocol.memory import TrainerMemory
from reshard.refit.routes import LOCAL
from reshard.refit.transports import TRANSPORTS
from reshard.refit.transports.base import Transport, Work
from reshard.refit.transports.context import Context

# Returns the memory, by trainer's rank, of those whose bytes come by some routes.
MemoryOf = Callable[[Set[str]], Mapping[int, TrainerMemory]]


class Transports:
    """All transports of a connection, in the order in which they are preferred and run. What it does each of them does
    (`reshard.refit.transports.base.Transport`)."""

    def __init__(self, context: Context) -> None:
        self.transports: list[Transport] = [transport(context) for transport in TRANSPORTS]

    def __iter__(self) -> Iterator[Transport]:
        return iter(self.transports)

    @property
    def work(self) -> Work:
        """The work of all."""
        works = [transport.work for transport in self]
        received: Counter[str] = Counter()  # of relays by any of them
        shards: dict[int, np.ndarray] = {}
        for work in works:
            received.update(work.received_bytes)
            shards |= work.shards or {}
        return Work(
            dict(received),
            frozenset().union(*(work.numbers for work in works)),
            any(work.is_sending for work in works),
            any(work.is_blocking for work in works),
            shards,
            sum(work.launches for work in works),
        )

    def unmappable(self, memory_of: MemoryOf) -> list[tuple[int, str]]:
        """Return which trainers' ranks have memory that this process cannot map, and why."""
        return [
            pair for one in self for pair in one.unmappable(memory_of(one.reach.routes - {LOCAL}))
        ]  # within a process nothing is mapped

    def prepare(
        self, outgoing: Mapping[str, Mapping[int, Outgoing]], incoming: Mapping[str, Mapping[int, Incoming]]
    ) -> None:
        """Hand each what goes out and what comes in by its routes."""
        for one in self:
            brought: dict[int, Incoming] = {}
            elsewhere: list[Incoming] = []
            for route, flows in incoming.items():
                if route in one.reach.routes:
                    brought |= flows
                else:
                    elsewhere.extend(flows.values())
            one.prepare(outgoing.get(one.reach.name, {}), brought, elsewhere)

    def negotiate(self, anew: bool = False) -> None:
        """Let each agree with all members; at connect those that can then run beside one that is blocking."""
        for one in self:
            one.negotiate(anew)
        if not anew and self.work.is_blocking:
            for one in self:
                one.share_gpu()

    def update_addresses(self, memory_of: MemoryOf) -> bool:
        """Have each take the addresses that shards have now. Returns False where `prepare` is needed."""
        return all(one.update_addresses(memory_of(one.reach.routes)) for one in self)

    def run(self, number: int) -> None:
        """Carry out the copies of a round."""
        try:
            for one in self:
                one.run(number)
        finally:
            for one in self:
                one.join()

    def release(self, but: Mapping[int, TrainerMemory] | None = None) -> None:
        """Unmap others' memory; all `but` this."""
        for one in self:
            one.release(but)

    def free(self) -> None:
        """Give back memory of their own."""
        for one in self:
            one.free()

    def abort(self) -> None:
        """End at once what would keep this member's GPU waiting."""
        for one in self:
            one.abort()

    def close(self, broken: bool = False) -> None:
        """Give everything back, of each also if another fails."""
        with ExitStack() as closing:
            for one in reversed(self.transports):
                closing.callback(one.close, broken)
