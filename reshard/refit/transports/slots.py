"""The protocol of slots: what the transports that go through slabs have in common.

A trainer's rank packs pieces into a slab, memory of its own in which every line (`reshard.refit.relays`) that it feeds
has two slots: while one is read, the next is packed. A GPU is given the copies of a round before those of the last one
have ended, so that it is not idle between the two. All of a line cut the same list of pieces alike, as for buckets
(`reshard.refit.copying.packing`), and count: ``packed/READER/NUMBER`` says how many rounds a member has in its slab for
a reader of it, ``taken/OWNER/NUMBER`` how many the reader has read; NUMBER counts the lines between the two.

What several inference ranks want, each takes as it is into slots of its own, from which the next rank of the line reads
it while this one unpacks it. Each rank of a line is one round behind the one before it. So each step waits only for
steps that came earlier, on whatever member, and no two members wait for each other.
"""

import itertools
import logging
from abc import abstractmethod
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import torch

from reshard.core.errors import ReshardError, listed
from reshard.refit.copying.addresses import UNSTAGED
from reshard.refit.copying.copies import event_now, wait_for_device
from reshard.refit.copying.flows import Incoming, Outgoing, by_line, by_round, rounds_in
from reshard.refit.copying.packing import PackedPair, PackedRound
from reshard.refit.copying.tables import ALIGNMENT, DST, SRC, TILE_BYTES, bytes_packed
from reshard.refit.protocol.encoding import readable
from reshard.refit.protocol.slab import LineLoad, SlabLocation, exchange_loads
from reshard.refit.relays import Line
from reshard.refit.routes import RELAY
from reshard.refit.transports.base import Transport, Work
from reshard.refit.transports.context import Context

SLOTS = 2  # of each line
# Each rank of a line gets a round one step behind the one before it: so many rounds for each hide that, unless they
# get smaller than this.
ROUNDS_FOR_A_RELAY, LEAST_ROUND = 32, 16 << 20
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
    """A round of a line: what packs or unpacks it, its slot's offset within those of the line, and its
    bytes there."""

    packed: PackedRound
    offset: int
    size: int


Rounds = dict[int, list[SlotRound]]  # of a line, by the engine's round


class Packing(NamedTuple):
    """A round of some lines that is being packed, and the GPU's event at its end."""

    lines: list[Line]
    event: torch.cuda.Event | None


class Partner(NamedTuple):
    """A member beside this one in a line, and the number of the line among those between the two."""

    rank: int
    number: int


def partners_in(ranks: Mapping[Line, int]) -> dict[Line, Partner]:
    """Return the partners in lines, given their ranks; both ends number the lines between them alike."""
    seen: Counter[int] = Counter()
    partners = {}
    for line in sorted(ranks):
        partners[line] = Partner(ranks[line], seen[ranks[line]])
        seen[ranks[line]] += 1
    return partners


class SlotTransport(Transport):
    """This member's lines that go through slots. The tables follow slots that lie elsewhere than the last
    time."""

    takes_all: ClassVar[bool]  # a member has slots of its own also for what it does not pass on
    fetch_launches: ClassVar[int] = 0  # kernels of ours that `begin_fetch` launches

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.outgoing: dict[Line, Outgoing] = {}
        self.incoming: dict[Line, Incoming] = {}
        # By line: who reads here, and from whom this member reads.
        self.readers: dict[Line, Partner] = {}
        self.owners: dict[Line, Partner] = {}
        # By line: where its slots start, the bytes of one, and its rounds.
        self.tables: dict[Line, tuple[int, int, Rounds]] = {}
        # Of the refit that goes on: the rounds by line, how many of each were packed here, or passed on, and taken, and
        # how many were begun to be packed; and those that were taken, and are not unpacked.
        self.sending: dict[Line, Rounds] = {}
        self.receiving: dict[Line, Rounds] = {}
        self.counts: Counter[tuple[Line, int]] = Counter()
        self.begun: Counter[Line] = Counter()
        self.landed: dict[Line, SlotRound] = {}

    @abstractmethod
    def own_slab(self, size: int) -> SharedSlab:
        """Return this member's slab of so many bytes, made now where there is none."""

    @abstractmethod
    def is_handle_of(self, peer: int, handle: str) -> bool:
        """Return True for a handle that the slab of another member may have."""

    @abstractmethod
    def open_slots(self, line: Line, slab: SlabLocation, start: int, own: int | None) -> int:
        """Return the address in this process from which the slots of a line are unpacked that start at a byte of its
        owner's slab: `own`, where this member takes them into slots there."""

    @abstractmethod
    def begin_fetch(self, line: Line, one: SlotRound) -> Any:
        """Begin to take a round into this member's own slot, and return what `end_fetch` waits for."""

    @abstractmethod
    def end_fetch(self, line: Line, fetch: Any) -> None:
        """Wait until a round is in this member's own slot. Raises ReshardError or RuntimeError where a member fails,
        or the bytes do not come."""

    @property
    def passed(self) -> set[Line]:
        """The lines in which this member passes on what it gets."""
        return self.readers.keys() & self.incoming.keys()

    @property
    def own_lines(self) -> list[Line]:
        """The lines that have slots in this member's slab; those that others read there come first."""
        others = sorted(self.incoming.keys() - self.readers.keys()) if self.takes_all else []
        return [*sorted(self.readers), *others]

    def prepare(
        self,
        outgoing: Mapping[int, Outgoing],
        incoming: Mapping[int, Incoming],
        elsewhere: Collection[Incoming] = (),
    ) -> None:
        """Take these tables. Slabs are made when they are first used."""
        self.tables.clear()
        rank = self.group.rank
        self.outgoing, self.incoming = by_line(outgoing), by_line(incoming)
        after = {line: next_rank for line in self.incoming if (next_rank := line.after(rank)) is not None}
        self.readers = partners_in({line: line.first for line in self.outgoing} | after)
        self.owners = partners_in({line: line.before(rank) for line in self.incoming})
        numbers = rounds_in(outgoing) | rounds_in(incoming)
        self.work = Work(self._received(), numbers, is_sending=bool(outgoing))
        if partners := sorted({one.rank for one in (*self.readers.values(), *self.owners.values())}):
            names = self.group.names
            log.info(
                "%s: bytes of %s go by %s%s",
                names[rank],
                listed(names[partner] for partner in partners),
                self.reach.name,
                self.why(),
            )

    def _received(self) -> dict[str, int]:
        """Return the bytes that a refit brings here, by route."""
        received = {self.reach.name: 0}
        for line, flow in self.incoming.items():
            route = RELAY if line.place(self.group.rank) else self.reach.name
            received[route] = received.get(route, 0) + bytes_packed(flow.table)
        return received

    def why(self) -> str:
        """Return why its lines go this way, to follow a sentence in the log; empty where nothing is to be
        said."""
        return ""

    def limits(self) -> dict[Line, int]:
        """Agree with the other members of each line on the bytes of a slot. All slots of a member together have at most
        `bucket_bytes`. Raises ReshardError where that is too little."""
        lines = [*self.outgoing, *self.incoming]
        if not lines:
            return {}
        relayed = [bytes_packed(flow.table) for line, flow in self.incoming.items() if len(line.ranks) > 1]
        own = LineLoad(len(self.own_lines), max(relayed, default=0))
        members = sorted({rank for line in lines for rank in (line.trainer, *line.ranks)})
        loads = exchange_loads(self.group, self.reach.name, own, members)
        return {line: self._limit(line, loads) for line in lines}

    def _limit(self, line: Line, loads: Mapping[int, LineLoad]) -> int:
        """Return the bytes of a slot of a line, from what its members have to do with lines."""
        bucket_bytes = self.context.bucket_bytes
        most = max(1, *(loads[rank].slots for rank in (line.trainer, *line.ranks)))
        limit = bucket_bytes // (SLOTS * most) // ALIGNMENT * ALIGNMENT
        if limit < TILE_BYTES:
            raise ReshardError(
                f"bucket_bytes {bucket_bytes} is too little for slots for {most} partners: "
                f"{SLOTS * most * TILE_BYTES} is the least"
            )
        if relays := len(line.ranks) - 1:
            size = max(loads[rank].relayed for rank in line.ranks)
            limit = min(
                limit, max(LEAST_ROUND, size // (ROUNDS_FOR_A_RELAY * relays) // ALIGNMENT * ALIGNMENT)
            )
        return limit

    def negotiate(self, anew: bool = False) -> None:
        """At connect, find out whether `bucket_bytes` is enough."""
        if not anew:
            self.limits()

    def run(self, number: int) -> None:
        """Pack, pass on and unpack what belongs to a round. Returns when this member has all of its own, and
        its readers have read all of theirs."""
        if number == UNSTAGED:
            self.sending, self.receiving = self.open_lines()
            lines = [*self.sending.values(), *self.receiving.values()]
            self.work.launches = sum(
                one.packed.launches for of_line in lines for rounds in of_line.values() for one in rounds
            ) + self.fetch_launches * sum(
                len(rounds) for line in self.passed for rounds in self.receiving[line].values()
            )
            self.counts.clear()
            self.begun.clear()
            self.landed.clear()
        sends = {line: rounds.get(number, []) for line, rounds in self.sending.items()}
        receives = {line: rounds.get(number, []) for line, rounds in self.receiving.items()}
        behind = {line: line.place(self.group.rank) for line in receives}
        steps = [len(rounds) for rounds in sends.values()]
        steps += [len(rounds) + behind[line] for line, rounds in receives.items() if rounds]
        packing = self.begin_packing(sends, 0)
        for step in range(max(steps, default=0)):
            # All of a step's packing comes first, so that no two members wait for each other.
            next_packing = self.begin_packing(sends, step + 1)
            self.end_packing(packing)
            self.take({line: step - behind[line] for line in receives}, receives)
            packing = next_packing
        self.unpack_landed()
        self.end_copies(receives)
        for line in self.readers:
            if self.counts[line, SRC]:  # an adapter's refit has nothing before its first round
                self.wait_for("taken", line, self.counts[line, SRC])

    def begin_packing(self, sends: Mapping[Line, Sequence[SlotRound]], index: int) -> Packing:
        """Pack a round for each line as soon as its slot is free, at most enqueued on a GPU."""
        rounds = {line: rounds[index] for line, rounds in sends.items() if index < len(rounds)}
        for line, one in rounds.items():
            # The first slots of a round are free: the last one ended when all was taken.
            if index >= SLOTS:
                self.wait_for("taken", line, self.begun[line] + 1 - SLOTS)
            one.packed.run()
            self.begun[line] += 1
        return Packing([*rounds], event_now(self.device) if rounds else None)

    def end_packing(self, packing: Packing) -> None:
        """Wait until the device has packed a round, and tell its readers."""
        self.end_copies(packing.lines, packing.event)
        self.tell("packed", packing.lines)

    def take(self, indices: Mapping[Line, int], receives: Mapping[Line, Sequence[SlotRound]]) -> None:
        """Take the round with this index of each line that has one, as soon as its owner has it, and tell the owner.
        What is taken into slots of this member's own is passed on, and unpacked while the next round is taken."""
        rounds = {
            line: receives[line][index] for line, index in indices.items() if 0 <= index < len(receives[line])
        }
        fetches = {}
        for line, one in rounds.items():
            self.wait_for("packed", line, self.counts[line, DST] + 1)
            if not self.takes_all and line not in self.readers:
                one.packed.run()
                continue
            if line in self.readers and indices[line] >= SLOTS:
                self.wait_for("taken", line, self.counts[line, SRC] + 1 - SLOTS)
            fetches[line] = self.begin_fetch(line, one)
        self.unpack_landed()
        for line, fetch in fetches.items():
            self.end_fetch(line, fetch)
            self.landed[line] = rounds[line]
            self.tell("taken", [line])
            if line in self.readers:
                self.tell("packed", [line])
        unpacked = rounds.keys() - fetches.keys()
        self.end_copies(unpacked)
        self.tell("taken", unpacked)

    def unpack_landed(self) -> None:
        """Unpack what was taken into slots of this member's own, at most enqueued on a GPU."""
        for one in self.landed.values():
            one.packed.run()
        self.landed.clear()

    def end_copies(self, lines: Collection, event: torch.cuda.Event | None = None) -> None:
        """Wait until the device has carried out the copies of these lines, after which an `event` may come."""
        if lines and not wait_for_device(self.device, self.group.timeout, self.group.attend, event):
            raise ReshardError(f"the copies did not end within {self.group.timeout:g} s")

    def tell(self, step: str, lines: Iterable[Line]) -> None:
        """Tell partners that one more round of these lines is ``packed``, or ``taken``."""
        partners, end = (self.readers, SRC) if step == "packed" else (self.owners, DST)
        for line in lines:
            self.counts[line, end] += 1
            self.group.post_count(
                f"{step}/{partners[line].rank}/{partners[line].number}", self.counts[line, end]
            )

    def wait_for(self, step: str, line: Line, count: int) -> None:
        """Wait until the partner in a line has ``packed``, or ``taken``, so many rounds."""
        partner = (self.owners if step == "packed" else self.readers)[line]
        with readable(f"'{step}' of {self.group.names[partner.rank]}"):
            self.group.wait_for_count(f"{step}/{self.group.rank}/{partner.number}", partner.rank, count)

    def open_lines(self) -> tuple[dict[Line, Rounds], dict[Line, Rounds]]:
        """Say where this member's slab is, and find those of others; return what goes out and comes
        in, by line."""
        rank, key = self.group.rank, f"slab/{self.reach.name}"
        limits, starts, size = self.limits(), dict[Line, int](), 0
        for line in self.own_lines:
            starts[line] = size
            size += SLOTS * limits[line]
        if size:
            slab = self.own_slab(size)
            starts = {line: slab.address + start for line, start in starts.items()}
            read = [(self.readers[line].rank, limits[line]) for line in sorted(self.readers)]
            if read:
                self.group.post(key, SlabLocation(slab.number, slab.handle, read).encode())
        sends = {
            line: self.rounds_of(line, flow, SRC, starts[line], limits[line])
            for line, flow in self.outgoing.items()
        }
        receives = {}
        for owner in sorted({partner.rank for partner in self.owners.values()}):
            lines = [line for line, partner in sorted(self.owners.items()) if partner.rank == owner]
            location = SlabLocation.decode(
                self.group.read(key, owner),
                self.group.names[owner],
                rank=rank,
                size=self.group.size,
                limits=[limits[line] for line in lines],
                may_have=lambda handle, owner=owner: self.is_handle_of(owner, handle),
            )
            for line, start in zip(lines, location.starts(rank, SLOTS), strict=True):
                address = self.open_slots(line, location, start, starts.get(line))
                receives[line] = self.rounds_of(line, self.incoming[line], DST, address, limits[line])
        return sends, receives

    def rounds_of(self, line: Line, flow: Outgoing | Incoming, end: int, start: int, limit: int) -> Rounds:
        """Return the copies between memory and the slots of a line, which start at an address."""
        known_start, known_limit, rounds = self.tables.get(line, (0, 0, {}))
        distance = start - known_start
        if known_limit == limit and distance % ALIGNMENT == 0:
            for one in itertools.chain.from_iterable(rounds.values() if distance else ()):
                one.packed.move(DST if end == SRC else SRC, distance)
            self.tables[line] = start, limit, rounds
            return rounds
        rounds = {}
        for number, of_line in by_round({line: flow}).items():
            pair = PackedPair(of_line[line], end, limit)
            rounds[number] = []
            for index in range(pair.rounds):
                offset = index % SLOTS * limit
                packed = PackedRound.of([(pair, index, start + offset)], self.device)
                rounds[number].append(SlotRound(packed, offset, pair.bytes_of_round(index)))
        self.tables[line] = start, limit, rounds
        return rounds
