"""NCCL, or Gloo on a CPU: pieces are packed into buckets, exchanged, and unpacked.

Both ends of a pair know the same list of pieces and cut it alike, so a bucket needs no header. One all-to-all
a round, whatever the backend (NCCL, Gloo); while one bucket travels, the next is packed and the one before is
unpacked.

What several inference ranks want alike they pass on to each other, a bucket a round (`reshard.refit.relays`).

A trainer's rank may keep the buckets that it sent (`Context.keep_sent`), and send what changed in them
instead (`reshard.refit.changes.buckets`), behind an all-to-all of the sizes. What an engine quantizes itself
passes through memory that keeps nothing, and always goes whole.
"""

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, TypeVar

import torch

from reshard.core.errors import ReshardError
from reshard.refit.changes.buckets import SentBuckets, ServedBucket
from reshard.refit.changes.exchange import ChangesExchange
from reshard.refit.copying.addresses import UNSTAGED
from reshard.refit.copying.copies import CopyTable, wait_for_exchange
from reshard.refit.copying.flows import Incoming, Outgoing, by_line, by_round
from reshard.refit.copying.legs import LAG, Legs, splits, starts
from reshard.refit.copying.packing import PackedPair, PackedRound
from reshard.refit.copying.tables import ALIGNMENT, DST, SRC, TILE_BYTES, bytes_packed, table_of, tiles_of
from reshard.refit.protocol.buckets import exchange_bucket_counts, exchange_partner_counts, exchange_relays
from reshard.refit.relays import Line
from reshard.refit.routes import NCCL, RELAY, Pair, Reach, always
from reshard.refit.transports.base import Transport, Work
from reshard.refit.transports.bucket_memory import BucketMemory
from reshard.refit.transports.communicator import abort, communicator_of, drop_communicator
from reshard.refit.transports.context import Context

SLOTS = LAG  # buckets of a pair that are under way at once
# Relays of a line cost a few steps each: so many times as many buckets hide them, unless these get smaller than this.
STEPS_FOR_A_RELAY, LEAST_BUCKET = 32, 4 << 20
PROGRAMS = 64  # of copies into and out of buckets on a GPU: NCCL's own kernel must find room beside them
ALL_PROGRAMS = 1024  # of those beside which little travels


Exchange = TypeVar("Exchange", bound=ChangesExchange)


class BucketStep(NamedTuple):
    """A round of buckets of one member: bytes from and to each member, and the copies before and after; those of
    what it passes on; where in the buffer that leaves the bytes lie that it sends itself, and whether copies fill
    these."""

    splits_in: list[int]
    splits_out: list[int]
    pack: PackedRound
    unpack: PackedRound
    pass_on: CopyTable
    own: list[tuple[Line, int, int]]  # (line, first byte, bytes)
    is_dense: bool


def reaches(pair: Pair) -> bool:
    """Everywhere, but NCCL connects no two processes of one GPU."""
    return not (pair.same_gpu and pair.may_share_memory and pair.mappable)


class Nccl(Transport):
    """This member's part of the exchange among all that have a side; a member that has none only agrees.

    Rows are cut into tiles the same way on both ends, which only depends on rows and widths. All
    buffers of a rank together have at most `bucket_bytes`. Where any pair goes this way, all that
    have a side take part in every round.
    """

    reach = Reach(NCCL, reaches, frozenset({NCCL, RELAY}), relays=always)

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.ranks = context.participants
        self.communicator: Any = None
        self.store: Any = None  # of the communicator, which does not keep it itself
        self.memory: BucketMemory | None = None
        self.limit = 0  # bytes of one pair in one bucket; 0 where no pair of members goes this way
        # What was prepared before the size of buckets was agreed on.
        self.outgoing: Mapping[int, Outgoing] = {}
        self.incoming: Mapping[int, Incoming] = {}
        # By the engines' rounds: how many buckets all members have agreed on, this member's pairs
        # by line, and its work in each.
        self.buckets: dict[int, int] = {}
        self.sends_by_round: dict[int, dict[Line, PackedPair]] = {}
        self.receives_by_round: dict[int, dict[Line, PackedPair]] = {}
        self.legs: dict[int, Legs] = {}
        self.steps: dict[int, list[BucketStep]] = {}
        self.addresses: list[tuple[int, int]] = []
        self.changes: SentBuckets | None = (
            SentBuckets(self.device, context.keep_on_host) if context.keep_sent else None
        )
        self.served: dict[tuple[Line, int], ServedBucket] = {}  # by line and bucket
        self.lanes = (
            (torch.cuda.Stream(self.device), torch.cuda.Stream(self.device))
            if self.device.type == "cuda"
            else None
        )
        self.whole_bytes = 0  # that a whole refit brings here
        self.relayed_bytes = 0  # of these, those that other inference ranks pass on
        self.unstaged_bytes = 0  # of these, those in whose place changes may come

    def negotiate(self, anew: bool = False) -> None:
        """Agree with all members on the size of the buckets and their number, and make a
        communicator of those that have a side; `anew` only that: one that lost a partner is not used again."""
        if anew:
            self._meet(fresh=True)
            return
        arriving, leaving = self._lines()
        passed = [line for line in arriving if line.after(self.group.rank) is not None]
        own = len(arriving) + len(leaving) + len(passed)
        lines = max(exchange_partner_counts(self.group, own, self.reach.name))
        if not lines:
            return
        bucket_bytes = self.context.bucket_bytes
        self.limit = bucket_bytes // (SLOTS * lines) // ALIGNMENT * ALIGNMENT
        if self.limit < TILE_BYTES:
            raise ReshardError(
                f"bucket_bytes {bucket_bytes} is too little for buckets from and to {lines} partners: "
                f"{SLOTS * lines * TILE_BYTES} is the least"
            )
        self._shorten_for_relays(arriving)
        self._meet(fresh=False)
        self.prepare(self.outgoing, self.incoming)
        self.buckets = exchange_bucket_counts(
            self.group, {number: legs.steps for number, legs in self.legs.items()}
        )
        self.work.numbers = self._numbers()
        if self.changes is not None:
            self.changes.carries = True
        if self.device.type == "cuda":
            from reshard.refit.changes.kernels import compile_finding, compile_writing
            from reshard.refit.copying.kernels import compile_copy

            # The tables are made at the first exchange, nearly all of words of this size.
            compile_copy(ALIGNMENT, self.device, 1)
            if self.changes is not None and self.sends_by_round.get(UNSTAGED):
                compile_finding(self.device, self.changes.keeps_by_comparing)
            if self.changes is not None and self.receives_by_round.get(UNSTAGED):
                compile_writing(self.device)

    def _lines(self) -> tuple[dict[Line, Incoming], dict[Line, Outgoing]]:
        """Return what comes in, and what goes out, by line."""
        return by_line(self.incoming), by_line(self.outgoing)

    def _shorten_for_relays(self, arriving: Mapping[Line, Incoming]) -> None:
        """Agree with all members on smaller buckets where many ranks pass them on: until one has come to the last of a
        line, its trainer's rank is idle."""
        ways = [
            (bytes_packed(flow.table), line.place(self.group.rank))
            for line, flow in arriving.items()
            if len(line.ranks) > 1
        ]
        said = exchange_relays(self.group, *max(ways, default=(0, 0)))
        largest = max(size for size, _ in said)
        relays = max(place for size, place in said if 2 * size >= largest)
        if relays:
            wanted = largest // (STEPS_FOR_A_RELAY * relays) // ALIGNMENT * ALIGNMENT
            self.limit = min(self.limit, max(LEAST_BUCKET, wanted))

    def _numbers(self) -> set[int]:
        """Return the rounds of all engines: all that have a side take part."""
        return self.buckets.keys() - {UNSTAGED}

    def _meet(self, fresh: bool) -> None:
        if self.limit and self.group.rank in self.ranks:
            self._abandon()
            self.communicator, self.store = communicator_of(self.group, self.ranks, self.device, fresh)
            kept = self.context.keep_mapped
            self.memory = BucketMemory(self.communicator, len(self.ranks), self.device, kept)
            self.work.is_blocking = True

    def prepare(
        self,
        outgoing: Mapping[int, Outgoing],
        incoming: Mapping[int, Incoming],
        elsewhere: Collection[Incoming] = (),
    ) -> None:
        """Cut these tables into buckets; `negotiate` has to say first how large they are."""
        self.outgoing, self.incoming = outgoing, incoming
        if not self.limit:
            return
        arriving, leaving = self._lines()
        self.outgoing, self.incoming = {}, {}
        self.sends_by_round = {
            number: {line: PackedPair(flow, SRC, self.limit) for line, flow in flows.items()}
            for number, flows in by_round(leaving).items()
        }
        self.receives_by_round = {
            number: {line: PackedPair(flow, DST, self.limit) for line, flow in flows.items()}
            for number, flows in by_round(arriving).items()
        }
        self.legs = {
            number: Legs(
                self.group.rank,
                self.receives_by_round.get(number, {}),
                self.sends_by_round.get(number, {}),
            )
            for number in self.sends_by_round.keys() | self.receives_by_round.keys()
        }
        self.whole_bytes = sum(bytes_packed(flow.table) for flow in incoming.values())
        self.unstaged_bytes = sum(bytes_packed(flow.of(UNSTAGED).table) for flow in incoming.values())
        # NCCL's first exchange returns when all have met, one over Gloo when it has ended.
        is_blocking = self.communicator is not None
        is_sending = any(self.sends_by_round.values())
        self.relayed_bytes = sum(
            bytes_packed(flow.table) for line, flow in arriving.items() if line.place(self.group.rank)
        )
        self.work = Work(self._received(self.whole_bytes), self._numbers(), is_sending, is_blocking)
        self.addresses, self.steps, self.served = [], {}, {}
        if self.changes is not None:
            self.changes.arrange(self.sends_by_round.get(UNSTAGED, {}))

    def _received(self, size: int) -> dict[str, int]:
        """Return so many bytes by route; of changes as many are passed on as of all."""
        relayed = size * self.relayed_bytes // max(1, self.whole_bytes)
        return {NCCL: size - relayed, RELAY: relayed} if relayed else {NCCL: size}

    def run(self, number: int) -> None:
        """Exchange what belongs to a round of the engines', in as many buckets as all members have agreed
        on."""
        if self.communicator is None or self.memory is None or not self.buckets.get(number):
            return
        slots = self._slots(number)
        steps = [step for of_round in self.steps.values() for step in of_round]
        self.work.launches = sum(
            step.pack.launches + step.unpack.launches + step.pass_on.launches for step in steps
        )
        if number == UNSTAGED and self.changes is not None:
            self.work.received_bytes = self._received(self.whole_bytes)
            if self.changes.since is not None:
                received = self._exchange_of_changes(ChangesExchange, self.changes.since, slots).run()
                self.work.received_bytes = self._received(self.whole_bytes - self.unstaged_bytes + received)
                self.changes.end()
                return
        kept = self.changes if number == UNSTAGED else None
        self._run_whole(self.steps[number], slots, kept)
        if kept is not None:
            kept.end()

    def _slots(self, number: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the memory of the buckets that are under way at once, each as what is sent and what arrives, with the
        steps of a round made for it."""
        assert self.memory is not None
        sizes = [self.limit * len(ways) for ways in (self.legs[UNSTAGED].outs, self.legs[UNSTAGED].ins)]
        buffers = self.memory.of(sizes * min(SLOTS, max(self.buckets.values())))
        slots = [*zip(buffers[::2], buffers[1::2], strict=True)]
        addresses = [(send.data_ptr(), receive.data_ptr()) for send, receive in slots]
        if addresses != self.addresses:
            # The caching allocator usually gives the same memory again, so that this happens once.
            self.steps, self.addresses = {}, addresses
        if number not in self.steps:
            self.steps[number] = [
                self._step(number, index, *addresses[index % SLOTS]) for index in range(self.buckets[number])
            ]
        return slots

    def _run_whole(
        self,
        steps: list[BucketStep],
        slots: list[tuple[torch.Tensor, torch.Tensor]],
        kept: SentBuckets | None,
    ) -> None:
        """Exchange whole buckets, which `kept` keeps, in streams of their own on a GPU."""
        if self.lanes is None:
            self._exchange(steps, slots, None, None, kept)
            return
        packing, unpacking = self.lanes
        current = torch.cuda.current_stream(self.device)
        packing.wait_stream(current)
        unpacking.wait_stream(current)
        try:
            self._exchange(steps, slots, packing, unpacking, kept)
        finally:
            current.wait_stream(packing)
            current.wait_stream(unpacking)

    def _exchange(
        self,
        steps: list[BucketStep],
        slots: list[tuple[torch.Tensor, torch.Tensor]],
        packing: Any,
        unpacking: Any,
        kept: SentBuckets | None,
    ) -> None:
        """Pack a bucket, send it off, unpack the one before: each kind in a stream of its own on a
        GPU, where only what waits for a slot waits."""
        works: list[Any] = []
        unpacked: list[Any] = []
        for index in range(len(steps) + 1):
            if index < len(steps):
                splits_in, splits_out, pack, *_ = steps[index]
                send, receive = slots[index % SLOTS]
                with in_stream(packing):
                    if index >= SLOTS:
                        wait_for_exchange(works[index - SLOTS], self.device, self.group)
                    if kept is not None:
                        kept.wait_until_stored(index - SLOTS)
                        kept.keep(index, self._packed(steps[index], send, PROGRAMS))
                    else:
                        pack.run(PROGRAMS)
                    steps[index].pass_on.run(PROGRAMS)
                    if index >= SLOTS and packing is not None:
                        packing.wait_event(unpacked[index - SLOTS])
                    arriving, leaving = receive[: sum(splits_in)], send[: sum(splits_out)]
                    works.append(self._all_to_all(arriving, leaving, splits_in, splits_out))
            if index:
                with in_stream(unpacking):
                    wait_for_exchange(works[index - 1], self.device, self.group)
                    steps[index - 1].unpack.run(PROGRAMS)
                    if unpacking is not None:
                        unpacked.append(unpacking.record_event())

    def _all_to_all(
        self, arriving: torch.Tensor, leaving: torch.Tensor, splits_in: list[int], splits_out: list[int]
    ) -> Any:
        return self.communicator.alltoall_base(arriving, leaving, splits_in, splits_out)

    def _packed(self, step: BucketStep, send: torch.Tensor, programs: int) -> dict[Line, torch.Tensor]:
        """Pack a bucket, with zeros between what is packed; return what goes into each line of this rank's."""
        if not step.is_dense:
            send[: sum(step.splits_out)].zero_()
        step.pack.run(programs)
        return {line: send[start : start + size] for line, start, size in step.own}

    def exchange_of_changes(self, kind: type[Exchange], since: int) -> Exchange | None:
        """Return an exchange of what changed in each bucket since a transaction; None where nothing goes this way, or
        by a communicator that others may use meanwhile."""
        if self.communicator is None or self.store is None or not self.buckets.get(UNSTAGED):
            return None
        return self._exchange_of_changes(kind, since, [])

    def _exchange_of_changes(
        self, kind: type[Exchange], since: int, slots: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> Exchange:
        """Return an exchange, in these slots, or in those that are made when it packs."""
        sent, steps, legs = self.changes, self.buckets[UNSTAGED], self.legs[UNSTAGED]
        assert sent is not None

        def pack(index: int) -> dict[Line, torch.Tensor]:
            if not slots:
                slots.extend(self._slots(UNSTAGED))
            sent.wait_until_stored(index - SLOTS)
            return self._packed(self.steps[UNSTAGED][index], slots[index % SLOTS][0], ALL_PROGRAMS)

        return kind(self.group, self._all_to_all, self.ranks, sent, since, pack, steps, legs, self._served)

    def _served(self, line: Line, index: int) -> ServedBucket:
        """Return the places of a bucket that comes in a line."""
        if (line, index) not in self.served:
            table = self.receives_by_round[UNSTAGED][line].copies(index, 0)
            self.served[line, index] = ServedBucket(table, self.device)
        return self.served[line, index]

    def abort(self) -> None:
        """End the communicator that this connection made; torch's own is not for it to end."""
        if self.communicator is None or self.store is None:
            return
        memory, held = self.memory, [self.communicator, self.store]
        if not abort(self.communicator, self.group.timeout):
            self._abandon()
        elif memory is not None:
            memory.drop()
        self.memory = self.communicator = self.store = memory = None
        self.work.is_blocking = False
        drop_communicator(held)

    def _abandon(self) -> None:
        """Leave the memory of buckets to a transfer that has failed, and may go on."""
        if self.memory is not None:
            self.memory.abandon()

    def close(self, broken: bool = False) -> None:
        """Give everything back, and end the communicator: one that nobody ends keeps its memory and its threads, and
        torch warns of it. Gloo's ends with its last reference."""
        if broken:
            self._abandon()
        super().close()
        self.abort()
        self.steps, self.served, self.addresses = {}, {}, []
        if self.changes is not None:
            self.changes.drop()

    def free(self) -> None:
        """Give back the memory of buckets, where it stays from refit to refit."""
        if self.memory is not None:
            self.memory.free()

    def _step(self, number: int, index: int, send: int, receive: int) -> BucketStep:
        """Return the work on one bucket of a round, with its buffers at these addresses."""
        legs = self.legs.get(number) or Legs(self.group.rank, {}, {})
        sends, receives = self.sends_by_round.get(number, {}), self.receives_by_round.get(number, {})
        arriving, leaving = legs.arriving(index), legs.leaving(index)
        # What is passed on lies where it has arrived, in the same slot, which it will leave in this step.
        before = legs.arriving(index - LAG)
        lies = {leg.line: start for leg, start in zip(before, starts(before, receive), strict=True)}
        packed, passed_on, own = [], [], []
        for leg, start in zip(leaving, starts(leaving, send), strict=True):
            if not leg.size:
                continue
            if leg.line.trainer != self.group.rank:
                passed_on.append((lies[leg.line], start, 1, leg.size, 0, 0))
            else:
                packed.append((sends[leg.line], leg.bucket, start))
                own.append((leg.line, start - send, leg.size))
        unpacked = [
            (receives[leg.line], leg.bucket, start)
            for leg, start in zip(arriving, starts(arriving, receive), strict=True)
        ]
        return BucketStep(
            splits(arriving, self.ranks),
            splits(leaving, self.ranks),
            PackedRound.of(packed, self.device, True),
            PackedRound.of(unpacked, self.device, True),
            CopyTable(tiles_of(table_of(passed_on))[0], self.device, aside=True),
            own,
            all(pair.is_dense[bucket] for pair, bucket, _ in packed),
        )


def in_stream(stream: Any) -> AbstractContextManager:
    """Return a context in which work is enqueued on this stream, or, for None, as ever."""
    return nullcontext() if stream is None else torch.cuda.stream(stream)
