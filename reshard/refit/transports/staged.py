"""Staging within a host: pieces are packed into memory that others can map, a slab, and unpacked from there.

Expandable segments have no handle for other processes, and NCCL connects no two processes of one
GPU; a slab serves both. A pair has two slots: while one is unpacked, the next is packed. Both ends
cut the same list of pieces alike, as for buckets.
"""

import ctypes
import itertools
import logging
import mmap
import os
import re
from collections import Counter
from collections.abc import Collection, Mapping

import torch

from reshard.core.errors import ReshardError, listed, rewrite_message
from reshard.device.cuda import cuda_free, cuda_memory, exported
from reshard.refit.addresses import UNSTAGED
from reshard.refit.copies import wait_for_device
from reshard.refit.protocol.encoding import readable
from reshard.refit.protocol.memory import is_handle
from reshard.refit.protocol.slab import SlabLocation
from reshard.refit.routes import CUDA_IPC, NCCL, STAGED, Pair
from reshard.refit.tables import ALIGNMENT, DST, SRC, TILE_BYTES, bytes_packed
from reshard.refit.transports.base import Context, Incoming, Outgoing, Transport, by_round, rounds_in
from reshard.refit.transports.mapped import HINT, MappedMemory
from reshard.refit.transports.packing import PackedPair, PackedRound

SLOTS = 2  # of each pair
UNMAPPABLE = ": the trainer's memory cannot be mapped by other processes (expandable segments?)"
NAME = "reshard"  # of the file that a slab of the host's memory is
_numbers = itertools.count()
log = logging.getLogger("reshard")


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
        self.mapped_gpu, self.files = MappedMemory(device), dict[str, mmap.mmap]()
        self.mapped: dict[str, tuple[int, str]] = {}

    def address(self, number: int, handle: str, size: int, whose: str) -> int:
        """Return where a slab of so many bytes is mapped here, in place of an earlier one. Raises
        ReshardError where that cannot be."""
        if self.mapped.get(whose) != (number, handle):
            self._unmap(whose)
        self.mapped[whose] = number, handle
        if not handle.startswith("/proc/"):
            with rewrite_message(HINT):
                return self.mapped_gpu.address(handle, size, whose)
        if handle not in self.files:
            self.files[handle] = _mapped(handle, whose)
        if len(self.files[handle]) != size:
            raise ReshardError(f"the slab of {whose} has {len(self.files[handle]):,} bytes, and not {size:,}")
        return _address(self.files[handle])

    def _unmap(self, whose: str) -> None:
        _, handle = self.mapped.pop(whose, (0, ""))
        self.files.pop(handle, None)
        self.mapped_gpu.close(but={other for _, other in self.mapped.values()})

    def close(self) -> None:
        """Unmap them."""
        self.mapped.clear()
        self.files.clear()
        self.mapped_gpu.close()


def _mapped(handle: str, whose: str) -> mmap.mmap:
    """Map another process's slab of the host's memory; nothing else is opened."""
    try:
        if not os.readlink(handle).startswith(f"/memfd:{NAME} "):
            raise ReshardError(
                f"{handle}, which {whose} names as its slab, is another file: use backend='nccl'"
            )
        with open(handle, "r+b") as file:
            return mmap.mmap(file.fileno(), 0)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ReshardError(f"cannot map the memory of {whose} ({reason}): use backend='nccl'") from error


def is_slab_of(handle: str, pid: int, device: torch.device) -> bool:
    """Return True for a handle that a slab of this process may have."""
    return (
        is_handle(handle)
        if device.type == "cuda"
        else bool(re.fullmatch(rf"/proc/{pid}/fd/[0-9]{{1,9}}", handle))
    )


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


class Staged(Transport):
    """This member's pairs of this kind.

    `bucket_bytes` bounds the slab of a rank. The tables are made again only where a slab lies
    elsewhere than the last time.
    """

    name = STAGED
    replaces = frozenset({CUDA_IPC, NCCL})

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.outgoing: dict[int, Outgoing] = {}
        self.incoming: dict[int, Incoming] = {}
        self.slab: SharedSlab | None = None
        self.views = Views(self.device)
        # By partner and end: where its slots start, the bytes of one, and the rounds by the engine's round.
        self.tables: dict[tuple[int, int], tuple[int, int, dict[int, list[PackedRound]]]] = {}
        # Of the refit that goes on: the rounds by partner and the engine's round, and how many each
        # pair has had.
        self.sending: dict[int, dict[int, list[PackedRound]]] = {}
        self.receiving: dict[int, dict[int, list[PackedRound]]] = {}
        self.counts: Counter[tuple[int, int]] = Counter()
        self.received_bytes = {STAGED: 0}

    @staticmethod
    def reaches(pair: Pair) -> bool:
        """Within a host, between processes that may map each other's memory."""
        return pair.may_share_memory and pair.mappable

    @staticmethod
    def automatic(pair: Pair) -> bool:
        """On GPUs; between CPUs Gloo does as well."""
        return pair.on_gpus

    @property
    def launches(self) -> int:
        """See `Transport.launches`."""
        pairs = [*self.sending.values(), *self.receiving.values()]
        return sum(packed.launches for pair in pairs for rounds in pair.values() for packed in rounds)

    @property
    def is_sending(self) -> bool:  # type: ignore[override]
        """See `Transport.is_sending`."""
        return bool(self.outgoing)

    def prepare(
        self,
        outgoing: Mapping[int, Outgoing],
        incoming: Mapping[int, Incoming],
        elsewhere: Collection[Incoming] = (),
    ) -> None:
        """Take these tables. The slab is made when it is first used; one of the right size stays,
        since others may have it mapped."""
        self.tables.clear()
        self.outgoing, self.incoming = dict(outgoing), dict(incoming)
        self.numbers = rounds_in(outgoing) | rounds_in(incoming)
        self.received_bytes = {STAGED: sum(bytes_packed(flow.table) for flow in incoming.values())}
        self.limit = self._limit(max(1, len(outgoing)))
        if outgoing and self.limit < TILE_BYTES:
            least = SLOTS * len(outgoing) * TILE_BYTES
            raise ReshardError(
                f"bucket_bytes {self.context.bucket_bytes} is too little for "
                f"{len(outgoing)} readers: {least} is the least"
            )
        if self.slab is not None and self.slab.size != SLOTS * self.limit * len(outgoing):
            self._free_slab()
        if partners := sorted(outgoing.keys() | incoming.keys()):
            names = self.group.names
            log.info(
                "%s: bytes of %s are staged%s",
                names[self.group.rank],
                listed(names[rank] for rank in partners),
                "" if self.context.backend == STAGED else UNMAPPABLE,
            )

    def _limit(self, readers: int) -> int:
        """Return the bytes of a slot of a slab that so many read."""
        return self.context.bucket_bytes // (SLOTS * readers) // ALIGNMENT * ALIGNMENT

    def run(self, number: int) -> None:
        """Pack and unpack what belongs to a round. Returns when this member has all of its own, and
        its readers have all of theirs."""
        if number == UNSTAGED:
            self.sending, self.receiving = self._open()
            self.counts.clear()
        sends = {peer: rounds.get(number, []) for peer, rounds in self.sending.items()}
        receives = {peer: rounds.get(number, []) for peer, rounds in self.receiving.items()}
        most = max((len(rounds) for rounds in (*sends.values(), *receives.values())), default=0)
        for index in range(most):
            # All of a round's packing comes first, so that no two members wait for each other.
            self._copy(index, sends, SRC)
            self._copy(index, receives, DST)
        for peer in sends:
            self._wait("taken", peer, self.counts[peer, SRC])

    def _copy(self, index: int, rounds: Mapping[int, list[PackedRound]], end: int) -> None:
        """Copy a round as soon as the partners have come so far, and tell them."""
        awaited, done, slots = ("taken", "packed", SLOTS) if end == SRC else ("packed", "taken", 0)
        copies = {peer: of_peer[index] for peer, of_peer in rounds.items() if index < len(of_peer)}
        for peer, packed in copies.items():
            # The first slots of a round are free: the last one ended when all was taken.
            if end == DST or index >= SLOTS:
                self._wait(awaited, peer, self.counts[peer, end] + 1 - slots)
            packed.run()
        if copies and not wait_for_device(self.device, self.group.timeout, self.group.report_alive):
            raise ReshardError(f"the copies did not end within {self.group.timeout:g} s")
        for peer in copies:
            self.counts[peer, end] += 1
            self.group.post_count(f"{done}/{peer}", self.counts[peer, end])

    def _wait(self, step: str, peer: int, count: int) -> None:
        with readable(f"'{step}' of {self.group.names[peer]}"):
            self.group.wait_for_count(f"{step}/{self.group.rank}", peer, count)

    def _open(
        self,
    ) -> tuple[dict[int, dict[int, list[PackedRound]]], dict[int, dict[int, list[PackedRound]]]]:
        """Make the slab and map those of others; return what goes out and comes in, by partner and
        the engine's round."""
        sends = {}
        if self.outgoing:
            if self.slab is None:
                self.slab = SharedSlab(SLOTS * self.limit * len(self.outgoing), self.device)
            starts = {peer: SLOTS * self.limit * index for index, peer in enumerate(self.outgoing)}
            location = SlabLocation(self.slab.number, self.slab.handle, self.limit, [*starts.items()])
            self.group.post("slab", location.encode())
            sends = {
                peer: self._rounds(peer, flow, SRC, self.slab.address + starts[peer], self.limit)
                for peer, flow in self.outgoing.items()
            }
        receives = {}
        for peer, flow in self.incoming.items():
            address, limit = self._slots_of(peer)
            receives[peer] = self._rounds(peer, flow, DST, address, limit)
        return sends, receives

    def _slots_of(self, peer: int) -> tuple[int, int]:
        """Return where this member's slots begin in the slab of a trainer's rank, mapped here, and
        the bytes of one."""
        who, rank = self.group.names[peer], self.group.rank
        slab = SlabLocation.decode(
            self.group.read("slab", peer), who, rank=rank, size=self.group.size, slots=SLOTS, limit_of=self._limit,
            may_have=lambda handle: is_slab_of(handle, self.context.processes[peer], self.device),
        )  # fmt: skip
        size = SLOTS * slab.limit * len(slab.starts)
        return self.views.address(slab.number, slab.handle, size, who) + dict(slab.starts)[rank], slab.limit

    def _rounds(
        self, peer: int, flow: Outgoing | Incoming, end: int, start: int, limit: int
    ) -> dict[int, list[PackedRound]]:
        """Return the copies between memory and the slab of a pair, which starts at an address."""
        known = self.tables.get((peer, end))
        if known is not None and known[:2] == (start, limit):
            return known[2]
        rounds = {}
        for number, of_peer in by_round({peer: flow}).items():
            pair = PackedPair(of_peer[peer], end, limit)
            rounds[number] = [
                PackedRound.of([(pair, start + index % SLOTS * limit)], index, self.device)
                for index in range(pair.rounds)
            ]
        self.tables[peer, end] = start, limit, rounds
        return rounds

    def release(self) -> None:
        """Unmap the others' slabs, which they then may free."""
        self.views.close()

    def free(self) -> None:
        """Free this member's slab, which nobody may have mapped any more."""
        self.views.close()
        self._free_slab()

    def _free_slab(self) -> None:
        if self.slab is not None:
            self.slab.close()
            self.slab = None
