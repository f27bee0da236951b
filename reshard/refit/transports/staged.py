"""Transfers within a host whose source cannot be mapped: packed into memory that can, a slab, and unpacked
from there.

Expandable segments have no handle for other processes, and NCCL connects no two processes of one GPU; a slab
of its own serves both. A pair has two slots: while one is unpacked, the next is packed. Both ends cut the
same list of pieces alike, as for buckets.
"""

import ctypes
import itertools
import mmap
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from reshard.comm.group import RefitGroup
from reshard.core.errors import ReshardError, rewrite_message
from reshard.device.cuda import cuda_free, cuda_memory, exported
from reshard.refit.addresses import AT_ONCE
from reshard.refit.copies import wait_for_device
from reshard.refit.protocol.checks import check_slab, is_handle
from reshard.refit.protocol.encoding import pack_json, readable, unpack_json
from reshard.refit.tables import ALIGNMENT, DST, SRC, TILE_BYTES, bytes_packed
from reshard.refit.transports.base import Incoming, Outgoing, Transport, by_round, rounds_in
from reshard.refit.transports.mapped import HINT, Mappings
from reshard.refit.transports.packing import Round, Side

SLOTS = 2
NAME = "reshard"  # of the file that a slab of the host's memory is
_numbers = itertools.count()


class SharedSlab:
    """`size` bytes of this process that others of its host may map: `address`, and `handle` for `Views`.

    `number` tells it from a later one of this process, which may get the same handle.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.size, self.device, self.number = size, device, next(_numbers)
        if device.type == "cuda":
            self.address = cuda_memory(size, device)
            self.handle = exported(self.address)
            return
        self.file = os.memfd_create(NAME)
        os.ftruncate(self.file, size)
        self.memory = mmap.mmap(self.file, size)
        self.address = _address(self.memory)
        self.handle = f"/proc/{os.getpid()}/fd/{self.file}"

    def close(self) -> None:
        """Give the memory back, which nobody may have mapped any more."""
        if self.device.type == "cuda":
            cuda_free(self.address, self.device)
        else:
            self.memory.close()
            os.close(self.file)


class Views:
    """Other processes' slabs, mapped here, one of each; closed together."""

    def __init__(self, device: torch.device) -> None:
        self.mappings, self.files = Mappings(device), dict[str, mmap.mmap]()
        self.mapped: dict[str, tuple[int, str]] = {}

    def address(self, number: int, handle: str, size: int, whose: str) -> int:
        """Where a slab of so many bytes is mapped here, in place of an earlier one. Raises ReshardError where that cannot
        be."""
        if self.mapped.get(whose) != (number, handle):
            self._unmap(whose)
        self.mapped[whose] = number, handle
        if not handle.startswith("/proc/"):
            with rewrite_message(HINT):
                return self.mappings.address(handle, size, whose)
        if handle not in self.files:
            self.files[handle] = _mapped(handle, whose)
        if len(self.files[handle]) != size:
            raise ReshardError(f"the slab of {whose} has {len(self.files[handle]):,} bytes, and not {size:,}")
        return _address(self.files[handle])

    def _unmap(self, whose: str) -> None:
        _, handle = self.mapped.pop(whose, (0, ""))
        self.files.pop(handle, None)
        self.mappings.close(but={other for _, other in self.mapped.values()})

    def close(self) -> None:
        """Unmap them."""
        self.mapped.clear()
        self.files.clear()
        self.mappings.close()


def _mapped(handle: str, whose: str) -> mmap.mmap:
    """Another process's slab of the host's memory; nothing else is opened."""
    try:
        if not os.readlink(handle).startswith(f"/memfd:{NAME} "):
            raise ReshardError(
                f"{handle}, which {whose} names as its slab, is another file: use backend='nccl'"
            )
        with open(handle, "r+b") as file:
            return mmap.mmap(file.fileno(), 0)
    except (OSError, ValueError) as error:
        said = getattr(error, "strerror", None) or error
        raise ReshardError(f"cannot map the memory of {whose} ({said}): use backend='nccl'") from error


def is_slab_of(handle: str, pid: int, device: torch.device) -> bool:
    """Whether a slab of this process may have this handle."""
    return (
        is_handle(handle)
        if device.type == "cuda"
        else bool(re.fullmatch(rf"/proc/{pid}/fd/[0-9]{{1,9}}", handle))
    )


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


class Staged(Transport):
    """This member's pairs of this kind.

    `bucket_bytes` bounds the slab of a rank. The tables are made again only where a slab lies elsewhere than
    the last time.
    """

    def __init__(
        self, members: RefitGroup, device: torch.device, bucket_bytes: int, processes: Sequence[int]
    ) -> None:
        self.members, self.device, self.bucket_bytes = members, device, bucket_bytes
        self.processes = processes  # of all members, by rank
        self.outgoing: dict[int, Outgoing] = {}
        self.incoming: dict[int, Incoming] = {}
        self.slab: SharedSlab | None = None
        self.views = Views(device)
        self.made: dict[tuple[int, int], tuple[int, int, dict[int, list[Round]]]] = {}
        # Of the refit that goes on: the rounds by the engine's round and partner, and how many each pair has had.
        self.sends: dict[int, dict[int, list[Round]]] = {}
        self.receives: dict[int, dict[int, list[Round]]] = {}
        self.done: Counter[tuple[int, int]] = Counter()

    @property
    def launches(self) -> int:
        """Kernels that a refit launches, once `run` has been through it."""
        pairs = [*self.sends.values(), *self.receives.values()]
        return sum(one.launches for pair in pairs for rounds in pair.values() for one in rounds)

    def prepare(self, outgoing: Mapping[int, Outgoing], incoming: Mapping[int, Incoming]) -> None:
        """Take these tables; the slab is made when it is first used. One of the right size stays, since
        others may have it mapped."""
        self.made.clear()
        self.outgoing, self.incoming = dict(outgoing), dict(incoming)
        self.numbers = rounds_in(outgoing) | rounds_in(incoming)
        self.received_bytes = sum(bytes_packed(some.table) for some in self.incoming.values())
        self.limit = self._limit(max(1, len(outgoing)))
        if outgoing and self.limit < TILE_BYTES:
            least = SLOTS * len(outgoing) * TILE_BYTES
            raise ReshardError(
                f"bucket_bytes {self.bucket_bytes} is too little for "
                f"{len(outgoing)} readers: {least} is the least"
            )
        if self.slab is not None and self.slab.size != SLOTS * self.limit * len(outgoing):
            self._free()

    def _limit(self, readers: int) -> int:
        """Bytes of a slot of a slab that so many read."""
        return self.bucket_bytes // (SLOTS * readers) // ALIGNMENT * ALIGNMENT

    def run(self, number: int) -> None:
        """Pack and unpack what belongs to a round; returns when this member has all of its own, and its readers have
        all of theirs."""
        if number == AT_ONCE:
            self.sends, self.receives = self._open()
            self.done.clear()
        sends = {peer: some.get(number, []) for peer, some in self.sends.items()}
        receives = {peer: some.get(number, []) for peer, some in self.receives.items()}
        for index in range(max((len(some) for some in (*sends.values(), *receives.values())), default=0)):
            # In every round first all of the packing: so nobody waits for who waits for him.
            self._turn(index, sends, SRC)
            self._turn(index, receives, DST)
        for peer in sends:
            self._wait("taken", peer, self.done[peer, SRC])

    def _turn(self, index: int, rounds: Mapping[int, list[Round]], end: int) -> None:
        """Copy a round, where the partners are so far, and tell them."""
        awaited, tell, ahead = ("taken", "packed", SLOTS) if end == SRC else ("packed", "taken", 0)
        here = {peer: some[index] for peer, some in rounds.items() if index < len(some)}
        for peer, copies in here.items():
            # The first slots of a round are free: the last one ended when all was taken.
            up_to = self.done[peer, end] + 1 - ahead
            if end == DST or index >= SLOTS:
                self._wait(awaited, peer, up_to)
            copies.run()
        if here and not wait_for_device(self.device, self.members.timeout, self.members.report_alive):
            raise ReshardError(f"the copies did not end within {self.members.timeout:g} s")
        for peer in here:
            self.done[peer, end] += 1
            self.members.post_count(f"{tell}/{peer}", self.done[peer, end])

    def _wait(self, step: str, peer: int, up_to: int) -> None:
        with readable(f"'{step}' of {self.members.names[peer]}"):
            self.members.wait_for_count(f"{step}/{self.members.rank}", peer, up_to)

    def _open(self) -> tuple[dict[int, dict[int, list[Round]]], dict[int, dict[int, list[Round]]]]:
        """Make the slab, map those of others; by partner and the engine's round the copies."""
        members = self.members
        if self.outgoing:
            if self.slab is None:
                self.slab = SharedSlab(SLOTS * self.limit * len(self.outgoing), self.device)
            starts = {peer: SLOTS * self.limit * i for i, peer in enumerate(self.outgoing)}
            slab = {
                "number": self.slab.number,
                "handle": self.slab.handle,
                "limit": self.limit,
                "starts": [*starts.items()],
            }
            members.post("slab", pack_json(slab))
        sends = {peer: self._rounds(peer, some, SRC, self.slab.address + starts[peer], self.limit)
                 for peer, some in self.outgoing.items() if self.slab is not None}  # fmt: skip
        receives = {}
        for peer, some in self.incoming.items():
            address, limit = self._slots_of(peer)
            receives[peer] = self._rounds(peer, some, DST, address, limit)
        return sends, receives

    def _slots_of(self, peer: int) -> tuple[int, int]:
        """Where this member's slots begin in the slab of a trainer's rank, mapped here, and the bytes of one."""
        who = self.members.names[peer]
        slab = unpack_json(self.members.read("slab", peer), f"what {who} says of its slab")
        start = check_slab(
            slab, self.members.rank, self.members.size, SLOTS, self._limit,
            lambda handle: is_slab_of(handle, self.processes[peer], self.device), who,
        )  # fmt: skip
        size = SLOTS * slab["limit"] * len(slab["starts"])
        return self.views.address(slab["number"], slab["handle"], size, who) + start, slab["limit"]

    def _rounds(
        self, peer: int, some: Outgoing | Incoming, end: int, start: int, limit: int
    ) -> dict[int, list[Round]]:
        """The copies between memory and the slab of a pair, which starts at an address."""
        before = self.made.get((peer, end))
        if before is None or before[:2] != (start, limit):
            rounds = {}
            for number, one in by_round({peer: some}).items():
                side = Side(one[peer], end, limit)
                rounds[number] = [
                    Round.of([(side, start + i % SLOTS * limit)], i, self.device) for i in range(side.rounds)
                ]
            before = self.made[peer, end] = start, limit, rounds
        return before[2]

    def release(self) -> None:
        """Unmap the others' slabs, which they then may free."""
        self.views.close()

    def close(self) -> None:
        """Free this member's slab, which nobody may have mapped any more."""
        self.views.close()
        self._free()

    def _free(self) -> None:
        if self.slab is not None:
            self.slab.close()
            self.slab = None
