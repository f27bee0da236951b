"""Transfers between members that cannot read each other's memory: packed into buckets, exchanged, unpacked.

Both ends of a pair know the same list of pieces and cut it alike, so a bucket needs no header. One all-to-all
a round, whatever the backend (NCCL, Gloo); while one bucket travels, the next is packed and the one before is
unpacked.
"""

import atexit
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from reshard.comm.background import in_background
from reshard.comm.group import LOOK_SECONDS, RefitGroup
from reshard.core.errors import ReshardError, first_line, listed
from reshard.refit.addresses import AT_ONCE
from reshard.refit.protocol.checks import check_partners, gathered, most_buckets
from reshard.refit.tables import ALIGNMENT, DST, SRC, TILE_BYTES, bytes_packed
from reshard.refit.transports.base import Incoming, Outgoing, Transport, by_round
from reshard.refit.transports.packing import Round, Side

SLOTS = 2  # buckets of a pair that are under way at once
# Of copies into and out of buckets on a GPU: NCCL's own kernel must find room beside them.
PROGRAMS = 64
_of_nccl: "weakref.WeakSet[Any]" = weakref.WeakSet()  # communicators of ours


def group_of(members: RefitGroup, ranks: Sequence[int], device: torch.device, fresh: bool) -> tuple[Any, Any]:
    """Return a communicator of these members, and the store that it needs as long as it is there: on GPUs torch's own where they
    are its ranks, since another takes memory of its own.

    A `fresh` one is not torch's: after an exchange that broke off, some ranks may have begun a collective
    that others never did. Raises ReshardError as soon as a member is gone, or fails, while it is made.
    """
    if (
        members.process_group is not None
        and device.type == "cuda"
        and len(ranks) == members.size
        and not fresh
    ):
        with suppress(RuntimeError):
            return members.process_group._get_backend(device), None
    store = members.torch_store()
    # Torch's own waits end with their time limit only; so they are not this thread's.
    made = in_background(lambda: _made(members, store, ranks.index(members.rank), len(ranks), device))
    deadline = time.monotonic() + members.timeout
    with members.reporting_alive():
        while not wait([made], LOOK_SECONDS).done:
            members.check()
            if time.monotonic() > deadline:
                break
    try:
        if made.done():
            return made.result(), store
        reason = f"not made within {members.timeout:g} s"
    except RuntimeError as error:
        reason = first_line(error)
    silent = listed(members.names[rank] for rank in members.unresponsive_ranks())
    raise ReshardError(f"there is no communicator for buckets ({reason}); {silent or 'no member'} is silent")


def _made(members: RefitGroup, store: Any, index: int, size: int, device: torch.device) -> Any:
    # Under a name of its own: what a broken communicator has left in the store must not be read again.
    named, timeout = (
        dist.PrefixStore(f"buckets/{members.transaction_number}", store),
        timedelta(seconds=members.timeout),
    )
    if device.type == "cuda":
        torch.cuda.set_device(device)  # of this thread, which is new
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        group = dist.ProcessGroupNCCL(named, index, size, options)
        _of_nccl.add(group)
        return group
    gloo: Any = dist.ProcessGroupGloo
    # Of several networks the one on which the members met; by itself Gloo takes the one that the host's name
    # stands for.
    settings = gloo._Options()
    settings._timeout, settings._devices = timeout, [gloo.create_device(hostname=members.local_address)]
    return gloo(named, index, size, settings)


@atexit.register
def _end_nccl() -> None:
    """NCCL's threads may ask their store, which is Python's, until they end: not while Python itself ends."""
    for group in list(_of_nccl):
        with suppress(RuntimeError):
            group.shutdown()


class Step(NamedTuple):
    """A round of buckets of one member: bytes from and to each member, and the copies before and after."""

    splits_in: list[int]
    splits_out: list[int]
    pack: Round
    unpack: Round


class Buckets(Transport):
    """This member's part of the exchange among the members `ranks`; a member that is none of them only
    agrees.

    Rows are cut into tiles the same way on both ends, which only depends on rows and widths. All buffers of a
    rank together have at most `bucket_bytes`.
    """

    def __init__(
        self, members: RefitGroup, ranks: Sequence[int], device: torch.device, bucket_bytes: int
    ) -> None:
        self.members, self.ranks, self.device, self.bucket_bytes = members, ranks, device, bucket_bytes
        self.group: Any = None
        self.store: Any = None  # of the group, which does not keep it itself
        self.limit = 0  # bytes of one pair in one round; 0 where no pair of members goes through buckets
        # By the engines' rounds: how many rounds of buckets all members have agreed on, this member's sides by partner,
        # and its work in each.
        self.rounds: dict[int, int] = {}
        self.sends: dict[int, dict[int, Side]] = {}
        self.receives: dict[int, dict[int, Side]] = {}
        self.steps: dict[int, list[Step]] = {}
        self.addresses: list[tuple[int, int]] = []
        self.lanes = (torch.cuda.Stream(device), torch.cuda.Stream(device)) if device.type == "cuda" else None

    @property
    def launches(self) -> int:
        """Kernels that a refit launches, once `run` has been through it."""
        steps = [step for some in self.steps.values() for step in some]
        return sum(step.pack.launches + step.unpack.launches for step in steps)

    def agree(self, outgoing: Mapping[int, Outgoing], incoming: Mapping[int, Incoming]) -> None:
        """Agree with all members on the size of the buckets and the number of rounds, and meet those that
        take part.

        Where any pair of members goes through buckets, all that have a side take part in every round.
        """
        partners = gathered(self.members, "partners", max(len(incoming), len(outgoing)))
        check_partners(partners, self.members.names)
        most = max(partners)
        if not most:
            return
        self.limit = self.bucket_bytes // (2 * SLOTS * most) // ALIGNMENT * ALIGNMENT
        if self.limit < TILE_BYTES:
            raise ReshardError(
                f"bucket_bytes {self.bucket_bytes} is too little for {most} partners: "
                f"{2 * SLOTS * most * TILE_BYTES} is the least"
            )
        self._meet(fresh=False)
        self.prepare(outgoing, incoming)
        mine: dict[int, int] = {}
        for number, side in self._sides():
            mine[number] = max(mine.get(number, 0), side.rounds)
        self.rounds = most_buckets(gathered(self.members, "rounds", [*mine.items()]), self.members.names)
        self.numbers = self.rounds.keys() - {AT_ONCE}  # of all engines: all that have a side take part
        if self.device.type == "cuda":
            from reshard.refit.kernels import compile_copy

            # the tables are made at the first exchange, nearly all of this word
            compile_copy(ALIGNMENT, self.device, 1)

    def _sides(self) -> Iterator[tuple[int, Side]]:
        for sides in (self.sends, self.receives):
            for number, some in sides.items():
                yield from ((number, side) for side in some.values())

    def renew(self) -> None:
        """Meet over a new communicator: one that lost a partner is not used again."""
        self._meet(fresh=True)

    def _meet(self, fresh: bool) -> None:
        if self.limit and self.members.rank in self.ranks:
            self.group, self.store = group_of(self.members, self.ranks, self.device, fresh)

    def prepare(self, outgoing: Mapping[int, Outgoing], incoming: Mapping[int, Incoming]) -> None:
        """Cut these tables into rounds."""
        if not self.limit:
            return
        self.sends = {number: {peer: Side(one, SRC, self.limit) for peer, one in some.items()}
                      for number, some in by_round(outgoing).items()}  # fmt: skip
        self.receives = {number: {peer: Side(one, DST, self.limit) for peer, one in some.items()}
                         for number, some in by_round(incoming).items()}  # fmt: skip
        self.received_bytes = sum(bytes_packed(some.table) for some in incoming.values())
        self.addresses, self.steps = [], {}

    def run(self, number: int) -> None:
        """Exchange what belongs to a round of engines', in as many rounds of buckets as all members have agreed on."""
        if self.group is None or not self.rounds.get(number):
            return
        slots = [
            (self._buffer(self.sends), self._buffer(self.receives))
            for _ in range(min(SLOTS, max(self.rounds.values())))
        ]
        addresses = [(send.data_ptr(), receive.data_ptr()) for send, receive in slots]
        if addresses != self.addresses:
            # The caching allocator usually gives the same memory again, so that this happens once.
            self.steps, self.addresses = {}, addresses
        if number not in self.steps:
            self.steps[number] = [
                self._step(number, index, *addresses[index % SLOTS]) for index in range(self.rounds[number])
            ]
        if self.lanes is None:
            self._exchange(self.steps[number], slots, None, None)
            return
        packing, unpacking = self.lanes
        here = torch.cuda.current_stream(self.device)
        packing.wait_stream(here)
        unpacking.wait_stream(here)
        try:
            self._exchange(self.steps[number], slots, packing, unpacking)
        finally:
            here.wait_stream(packing)
            here.wait_stream(unpacking)

    def _exchange(
        self, steps: list[Step], slots: list[tuple[torch.Tensor, torch.Tensor]], packing: Any, unpacking: Any
    ) -> None:
        """Pack a round, send it off, unpack the one before: each kind in a stream of its own on a GPU, where
        only what waits for a slot waits."""
        works: list[Any] = []
        unpacked: list[Any] = []
        for index in range(len(steps) + 1):
            if index < len(steps):
                splits_in, splits_out, pack, _ = steps[index]
                send, receive = slots[index % SLOTS]
                with within(packing):
                    if index >= SLOTS:
                        works[index - SLOTS].wait()
                    pack.run(PROGRAMS)
                    if index >= SLOTS and packing is not None:
                        packing.wait_event(unpacked[index - SLOTS])
                    arriving, leaving = receive[: sum(splits_in)], send[: sum(splits_out)]
                    works.append(self.group.alltoall_base(arriving, leaving, splits_in, splits_out))
            if index:
                with within(unpacking):
                    works[index - 1].wait()
                    steps[index - 1].unpack.run(PROGRAMS)
                    if unpacking is not None:
                        unpacked.append(unpacking.record_event())

    def _buffer(self, sides: Mapping[int, Mapping[int, Side]]) -> torch.Tensor:
        partners = len(sides[AT_ONCE])
        return torch.empty(self.limit * partners, dtype=torch.uint8, device=self.device)

    def _step(self, number: int, index: int, send: int, receive: int) -> Step:
        """A round with its buffers at these addresses."""
        splits_out, pack = self._layout(self.sends.get(number, {}), index, send)
        splits_in, unpack = self._layout(self.receives.get(number, {}), index, receive)
        return Step(splits_in, splits_out, pack, unpack)

    def _layout(self, sides: Mapping[int, Side], index: int, start: int) -> tuple[list[int], Round]:
        """Bytes by member, and the copies with their ends in the buffer filled in."""
        splits, places = [0] * len(self.ranks), []
        for peer in sorted(sides):
            size = sides[peer].bytes_of_round(index)
            places.append((sides[peer], start))
            splits[self.ranks.index(peer)] = size
            start += size
        return splits, Round.of(places, index, self.device, aside=True)


def within(stream: Any) -> AbstractContextManager:
    """Enqueue on this stream; where there is none, as ever."""
    return nullcontext() if stream is None else torch.cuda.stream(stream)
