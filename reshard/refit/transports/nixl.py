"""NIXL: pieces are packed into a registered slab of the trainer's rank, and the engine's rank reads
them from there, one-sided, into one of its own; over RDMA between hosts. Where others want the same, the next rank
reads them from that.

A slot is free for the next round as soon as it is read. While a round is read, the one before is
unpacked.
"""

import time
from typing import Any

from reshard.core.errors import ReshardError
from reshard.refit.protocol.slab import SlabLocation
from reshard.refit.relays import Line
from reshard.refit.routes import NIXL, RELAY, Pair, Reach, always
from reshard.refit.transports.agent import Agent, AgentHandle, NixlError, RegisteredSlab
from reshard.refit.transports.context import Context
from reshard.refit.transports.slots import SlotRound, SlotTransport

POLL_SECONDS = 50e-6  # between two looks at a read
CHECK_SECONDS = 0.05  # between two looks at whether another member has failed


def reaches(pair: Pair) -> bool:
    """Between processes with the same version of NIXL."""
    return not pair.same_process and bool(pair.trainer.nixl) and pair.trainer.nixl == pair.engine.nixl


def automatic(pair: Pair) -> bool:
    """Between hosts; between their GPUs only with RDMA, and not where others want the same, which NCCL sends once."""
    has_link = not pair.on_gpus or (pair.trainer.rdma and pair.engine.rdma)
    return pair.trainer.host != pair.engine.host and has_link and not pair.shared


def refusal(pair: Pair) -> str:
    """Return which of the two has which NIXL, and what to install."""
    has = [f"{peer.name} has {f'NIXL {peer.nixl}' if peer.nixl else 'no NIXL'}" for peer in pair[:2]]
    return (
        f"{', '.join(has)}: pip install 'reshard[nixl]' in the same version for both, or use backend='auto'"
    )


class Nixl(SlotTransport):
    """This member's lines of this kind. Its agent stays as long as the connection, with a slab of at most
    `bucket_bytes`, since memory takes long to be registered."""

    reach = Reach(NIXL, reaches, frozenset({NIXL, RELAY}), automatic, relays=always, refusal=refusal)
    takes_all = True

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.agent: Agent | None = None
        self.slab: RegisteredSlab | None = None
        # By line: the slab of its owner, and where the slots start there and in this member's.
        self.sources: dict[Line, tuple[AgentHandle, int, int]] = {}

    def negotiate(self, anew: bool = False) -> None:
        """At connect, register this member's slab and meet its partners; `anew` only give up what there was, since
        bytes of the refit that failed may still be on their way."""
        if anew:
            self.close()
        else:
            self.open_lines()

    def own_slab(self, size: int) -> RegisteredSlab:
        if self.slab is None:
            try:
                if self.agent is None:
                    self.agent = Agent(self.device)
                self.slab = self.agent.slab(size, in_gpu=self.context.peers[self.group.rank].rdma)
            except NixlError as error:
                raise ReshardError(f"{error}: use backend='nccl'") from error
        assert self.slab.size == size, "who reads what stays as long as the connection"
        return self.slab

    def is_handle_of(self, peer: int, handle: str) -> bool:
        return AgentHandle.decode(handle) is not None

    def open_slots(self, line: Line, slab: SlabLocation, start: int, own: int | None) -> int:
        source = AgentHandle.decode(slab.handle)
        assert source is not None and own is not None and self.agent is not None and self.slab is not None
        self.agent.meet(source.agent, self.group.names[self.owners[line].rank])
        self.sources[line] = source, start, own - self.slab.address
        return own

    def begin_fetch(self, line: Line, one: SlotRound) -> Any:
        source, start, own_start = self.sources[line]
        assert self.agent is not None and self.slab is not None
        return self.agent.read(self.slab, own_start + one.offset, one.size, source, start + one.offset)

    def end_fetch(self, line: Line, fetch: Any) -> None:
        assert self.agent is not None
        checked = time.monotonic()
        deadline = checked + self.group.timeout
        while not self.agent.has_ended(fetch):
            now = time.monotonic()
            if now > deadline:
                who, seconds = self.group.names[self.owners[line].rank], self.group.timeout
                raise RuntimeError(f"the bytes of {who} did not come within {seconds:g} s")
            if now - checked > CHECK_SECONDS:
                checked = now
                self.group.attend()
            time.sleep(POLL_SECONDS)

    def unpack_landed(self) -> None:
        """Unpack what was read, and wait for that: the network writes there next."""
        lines = [*self.landed]
        super().unpack_landed()
        self.end_copies(lines)

    def free(self) -> None:
        """Keep the memory, which stays registered until `close`."""

    def close(self, broken: bool = False) -> None:
        self.landed.clear()
        self.sources.clear()
        self.tables.clear()
        self.sending, self.receiving = {}, {}
        if self.agent is not None:
            self.agent.close()
        self.agent = self.slab = None
