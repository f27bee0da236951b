"""NIXL: pieces are packed into a registered slab of the trainer's rank, and the engine's rank reads
them from there, one-sided, into one of its own; over RDMA between hosts.

A slot is free for the next round as soon as it is read. While a round is read, the one before is
unpacked.
"""

import time
from collections.abc import Mapping
from typing import Any

from reshard.core.errors import ReshardError
from reshard.refit.copying.tables import ALIGNMENT, DST, TILE_BYTES
from reshard.refit.protocol.buckets import exchange_partner_counts
from reshard.refit.protocol.slab import SlabLocation
from reshard.refit.routes import NIXL, Pair, Reach
from reshard.refit.transports.agent import Agent, AgentHandle, NixlError, RegisteredSlab
from reshard.refit.transports.context import Context
from reshard.refit.transports.slots import SLOTS, SlotRound, SlotTransport

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
    """This member's pairs of this kind. Its agent stays as long as the connection, with two slabs of
    together at most `bucket_bytes`, since memory takes long to be registered."""

    reach = Reach(NIXL, reaches, frozenset({NIXL}), automatic, refusal=refusal)

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.limit = 0  # bytes of a slot; 0 until that is agreed on
        self.agent: Agent | None = None
        self.slab: RegisteredSlab | None = None  # from which others read
        self.landing: RegisteredSlab | None = None  # into which this member reads
        # Others' slabs, and where the slots start in each.
        self.sources: dict[int, tuple[AgentHandle, int]] = {}
        self.landed: list[SlotRound] = []  # that are read, and not unpacked

    def negotiate(self, anew: bool = False) -> None:
        """Agree with all members on the bytes of a slot, and meet this member's partners; `anew` only give up what
        there was, since bytes of the refit that failed may still be on their way."""
        if anew:
            self.close()
            return
        if not any(peer.nixl for peer in self.context.peers):
            return
        own = len(self.outgoing) + len(self.incoming)
        partners = max(exchange_partner_counts(self.group, own, self.reach.name))
        if not partners:
            return
        bucket_bytes = self.context.bucket_bytes
        self.limit = bucket_bytes // (SLOTS * partners) // ALIGNMENT * ALIGNMENT
        if self.limit < TILE_BYTES:
            raise ReshardError(
                f"bucket_bytes {bucket_bytes} is too little for {partners} partners: "
                f"{SLOTS * partners * TILE_BYTES} is the least"
            )
        self.sending, self.receiving = self.open_pairs()

    def slot_bytes(self, readers: int) -> int:
        return self.limit

    def own_slab(self, size: int) -> RegisteredSlab:
        if self.slab is None:
            self.slab = self._registered(size)
        return self.slab

    def _registered(self, size: int) -> RegisteredSlab:
        try:
            if self.agent is None:
                self.agent = Agent(self.device)
            return self.agent.slab(size, in_gpu=self.context.peers[self.group.rank].rdma)
        except NixlError as error:
            raise ReshardError(f"{error}: use backend='nccl'") from error

    def is_handle_of(self, peer: int, handle: str) -> bool:
        return AgentHandle.decode(handle) is not None

    def open_slots(self, peer: int, slab: SlabLocation) -> int:
        """Return where the slots of a trainer's rank are read into, and unpacked from."""
        if self.landing is None:
            self.landing = self._registered(SLOTS * self.limit * len(self.incoming))
        source = AgentHandle.decode(slab.handle)
        assert source is not None and self.agent is not None
        self.agent.meet(source.agent, self.group.names[peer])
        self.sources[peer] = source, dict(slab.starts)[self.group.rank]
        return self.landing.address + self._landing_start(peer)

    def _landing_start(self, peer: int) -> int:
        """Return where what comes from a trainer's rank starts in the landing."""
        return SLOTS * self.limit * [*self.incoming].index(peer)

    def run(self, number: int) -> None:
        super().run(number)
        self._unpack_landed()

    def unpack(self, rounds: Mapping[int, SlotRound]) -> None:
        """Read a round of each trainer's rank as soon as it is packed, and unpack the ones before
        meanwhile."""
        reads = {}
        for peer, one in rounds.items():
            self.wait_for("packed", peer, self.counts[peer, DST] + 1)
            reads[peer] = self._begin_read(peer, one)
        self._unpack_landed()
        for peer, read in reads.items():
            self._end_read(peer, read)
            self.tell("taken", [peer], DST)
        self.landed = [*rounds.values()]

    def _begin_read(self, peer: int, one: SlotRound) -> Any:
        source, start = self.sources[peer]
        assert self.agent is not None and self.landing is not None
        landing_start = self._landing_start(peer) + one.offset
        return self.agent.read(self.landing, landing_start, one.size, source, start + one.offset)

    def _end_read(self, peer: int, read: Any) -> None:
        """Wait until a read has ended. Raises ReshardError or RuntimeError where a member fails, or the
        bytes do not come."""
        assert self.agent is not None
        checked = time.monotonic()
        deadline = checked + self.group.timeout
        while not self.agent.has_ended(read):
            now = time.monotonic()
            if now > deadline:
                who, seconds = self.group.names[peer], self.group.timeout
                raise RuntimeError(f"the bytes of {who} did not come within {seconds:g} s")
            if now - checked > CHECK_SECONDS:
                checked = now
                self.group.attend()
            time.sleep(POLL_SECONDS)

    def _unpack_landed(self) -> None:
        for one in self.landed:
            one.packed.run()
        self.end_copies(self.landed)
        self.landed = []

    def free(self) -> None:
        """Keep the memory, which stays registered until `close`."""

    def close(self, broken: bool = False) -> None:
        self.landed = []
        self.sources.clear()
        self.tables.clear()
        self.sending, self.receiving = {}, {}
        if self.agent is not None:
            self.agent.close()
        self.agent = self.slab = self.landing = None
