"""The protocol of slots: what the transports that go through slabs have in common.

A trainer's rank packs pieces into a slab, memory of its own in which every reader has two slots:
while one is read, the next is packed. A GPU is given the copies of a round before those of the last one
have ended, so that it is not idle between the two. Both ends cut the same list of pieces alike, as for
buckets (`reshard.refit.copying.packing`), and count: ``packed/READER`` says how many rounds a trainer's
rank has packed, ``taken/TRAINER`` how many its reader has read.
"""

import itertools
import logging
from abc import abstractmethod
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch

from reshard.core.errors import ReshardError, listed
from reshard.refit.copying.addresses import UNSTAGED
from reshard.refit.copying.copies import event_now, wait_for_device
from reshard.refit.copying.flows import Incoming, Outgoing, by_round, rounds_in
from reshard.refit.copying.packing import PackedPair, PackedRound
from reshard.refit.copying.tables import ALIGNMENT, DST, SRC, bytes_packed
from reshard.refit.protocol.encoding import readable
from reshard.refit.protocol.slab import SlabLocation
from reshard.refit.transports.base import Transport, Work
from reshard.refit.transports.context import Context

SLOTS = 2  # of each pair
slab_numbers = itertools.count()  # tell a slab of this process from a later one with the same handle
log = logging.getLogger("reshard")


class SharedSlab(Protocol):
    """Memory of this process that others read."""

    @property
    def address(self) -> int:
        """The address of its first byte."""

    @property
    def handle(self) -> str:
        """The text by which others find it."""

    @property
    def number(self) -> int:
        """A number that no later slab with the same handle has."""


class SlotRound(NamedTuple):
    """A round of a pair: what packs or unpacks it, its slot's offset within those of the pair, and its
    bytes there."""

    packed: PackedRound
    offset: int
    size: int


Rounds = dict[int, list[SlotRound]]  # of a pair, by the engine's round


class Packing(NamedTuple):
    """A round for some readers that is being packed, and the GPU's event at its end."""

    peers: list[int]
    event: torch.cuda.Event | None


class SlotTransport(Transport):
    """This member's pairs that go through slots. The tables follow slots that lie elsewhere than the last
    time."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.outgoing: dict[int, Outgoing] = {}
        self.incoming: dict[int, Incoming] = {}
        # By partner and end: where its slots start, the bytes of one, and its rounds.
        self.tables: dict[tuple[int, int], tuple[int, int, Rounds]] = {}
        # Of the refit that goes on: the rounds by partner, how many each pair has had, and how many of those to
        # each reader were begun.
        self.sending: dict[int, Rounds] = {}
        self.receiving: dict[int, Rounds] = {}
        self.counts: Counter[tuple[int, int]] = Counter()
        self.begun: Counter[int] = Counter()

    @abstractmethod
    def slot_bytes(self, readers: int) -> int:
        """Return the bytes of a slot of a slab with so many readers; the same on both ends."""

    @abstractmethod
    def own_slab(self, size: int) -> SharedSlab:
        """Return this member's slab of so many bytes, made now where there is none."""

    @abstractmethod
    def is_handle_of(self, peer: int, handle: str) -> bool:
        """Return True for a handle that the slab of a trainer's rank may have."""

    @abstractmethod
    def open_slots(self, peer: int, slab: SlabLocation) -> int:
        """Return the address in this process from which the slots of a trainer's rank are unpacked."""

    def prepare(
        self,
        outgoing: Mapping[int, Outgoing],
        incoming: Mapping[int, Incoming],
        elsewhere: Collection[Incoming] = (),
    ) -> None:
        """Take these tables. Slabs are made when they are first used."""
        self.tables.clear()
        self.outgoing, self.incoming = dict(outgoing), dict(incoming)
        received = sum(bytes_packed(flow.table) for flow in incoming.values())
        numbers = rounds_in(outgoing) | rounds_in(incoming)
        self.work = Work({self.reach.name: received}, numbers, is_sending=bool(outgoing))
        if partners := sorted(outgoing.keys() | incoming.keys()):
            names = self.group.names
            log.info(
                "%s: bytes of %s go by %s%s",
                names[self.group.rank],
                listed(names[rank] for rank in partners),
                self.reach.name,
                self.why(),
            )

    def why(self) -> str:
        """Return why its pairs go this way, to follow a sentence in the log; empty where nothing is to be
        said."""
        return ""

    def run(self, number: int) -> None:
        """Pack and unpack what belongs to a round. Returns when this member has all of its own, and
        its readers have read all of theirs."""
        if number == UNSTAGED:
            self.sending, self.receiving = self.open_pairs()
            pairs = [*self.sending.values(), *self.receiving.values()]
            self.work.launches = sum(
                one.packed.launches for pair in pairs for rounds in pair.values() for one in rounds
            )
            self.counts.clear()
            self.begun.clear()
        sends = {peer: rounds.get(number, []) for peer, rounds in self.sending.items()}
        receives = {peer: rounds.get(number, []) for peer, rounds in self.receiving.items()}
        most = max((len(rounds) for rounds in (*sends.values(), *receives.values())), default=0)
        packing = self.begin_packing(sends, 0)
        for index in range(most):
            # All of a round's packing comes first, so that no two members wait for each other.
            next_packing = self.begin_packing(sends, index + 1)
            self.end_packing(packing)
            self.unpack({peer: rounds[index] for peer, rounds in receives.items() if index < len(rounds)})
            packing = next_packing
        for peer in sends:
            if self.counts[peer, SRC]:  # an adapter's refit has nothing before its first round
                self.wait_for("taken", peer, self.counts[peer, SRC])

    def begin_packing(self, sends: Mapping[int, Sequence[SlotRound]], index: int) -> Packing:
        """Pack a round for each reader as soon as its slot is free, at most enqueued on a GPU."""
        rounds = {peer: rounds[index] for peer, rounds in sends.items() if index < len(rounds)}
        for peer, one in rounds.items():
            # The first slots of a round are free: the last one ended when all was taken.
            if index >= SLOTS:
                self.wait_for("taken", peer, self.begun[peer] + 1 - SLOTS)
            one.packed.run()
            self.begun[peer] += 1
        return Packing([*rounds], event_now(self.device) if rounds else None)

    def end_packing(self, packing: Packing) -> None:
        """Wait until the device has packed a round, and tell its readers."""
        self.end_copies(packing.peers, packing.event)
        self.tell("packed", packing.peers, SRC)

    def unpack(self, rounds: Mapping[int, SlotRound]) -> None:
        """Unpack a round of each trainer's rank as soon as it is packed, and tell them."""
        for peer, one in rounds.items():
            self.wait_for("packed", peer, self.counts[peer, DST] + 1)
            one.packed.run()
        self.end_copies(rounds)
        self.tell("taken", rounds, DST)

    def end_copies(self, rounds: Collection, event: torch.cuda.Event | None = None) -> None:
        """Wait until the device has carried out the copies of these rounds, after which an `event` may come."""
        if rounds and not wait_for_device(self.device, self.group.timeout, self.group.attend, event):
            raise ReshardError(f"the copies did not end within {self.group.timeout:g} s")

    def tell(self, step: str, peers: Collection[int], end: int) -> None:
        """Tell partners that one more of their rounds is ``packed``, or ``taken``."""
        for peer in peers:
            self.counts[peer, end] += 1
            self.group.post_count(f"{step}/{peer}", self.counts[peer, end])

    def wait_for(self, step: str, peer: int, count: int) -> None:
        """Wait until a partner has ``packed``, or ``taken``, so many rounds."""
        with readable(f"'{step}' of {self.group.names[peer]}"):
            self.group.wait_for_count(f"{step}/{self.group.rank}", peer, count)

    def open_pairs(self) -> tuple[dict[int, Rounds], dict[int, Rounds]]:
        """Say where this member's slab is, and find those of others; return what goes out and comes
        in, by partner."""
        sends, receives, key = {}, {}, f"slab/{self.reach.name}"
        if self.outgoing:
            limit = self.slot_bytes(len(self.outgoing))
            slab = self.own_slab(SLOTS * limit * len(self.outgoing))
            starts = {peer: SLOTS * limit * index for index, peer in enumerate(self.outgoing)}
            self.group.post(key, SlabLocation(slab.number, slab.handle, limit, [*starts.items()]).encode())
            sends = {
                peer: self.rounds_of(peer, flow, SRC, slab.address + starts[peer], limit)
                for peer, flow in self.outgoing.items()
            }
        for peer, flow in self.incoming.items():
            location = SlabLocation.decode(
                self.group.read(key, peer),
                self.group.names[peer],
                rank=self.group.rank,
                size=self.group.size,
                slots=SLOTS,
                limit_of=self.slot_bytes,
                may_have=lambda handle, peer=peer: self.is_handle_of(peer, handle),
            )
            receives[peer] = self.rounds_of(peer, flow, DST, self.open_slots(peer, location), location.limit)
        return sends, receives

    def rounds_of(self, peer: int, flow: Outgoing | Incoming, end: int, start: int, limit: int) -> Rounds:
        """Return the copies between memory and the slots of a pair, which start at an address."""
        known_start, known_limit, rounds = self.tables.get((peer, end), (0, 0, {}))
        distance = start - known_start
        if known_limit == limit and distance % ALIGNMENT == 0:
            for one in itertools.chain.from_iterable(rounds.values() if distance else ()):
                one.packed.move(DST if end == SRC else SRC, distance)
            self.tables[peer, end] = start, limit, rounds
            return rounds
        rounds = {}
        for number, of_peer in by_round({peer: flow}).items():
            pair = PackedPair(of_peer[peer], end, limit)
            rounds[number] = []
            for index in range(pair.rounds):
                offset = index % SLOTS * limit
                packed = PackedRound.of([(pair, index, start + offset)], self.device)
                rounds[number].append(SlotRound(packed, offset, pair.bytes_of_round(index)))
        self.tables[peer, end] = start, limit, rounds
        return rounds
