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
from collections.abc import Mapping
from typing import Any

import torch

from reshard.core.errors import ReshardError
from reshard.live.cuda import cuda_free, cuda_memory, exported
from reshard.refit.copies import wait_for_device
from reshard.refit.members import Members
from reshard.refit.tables import DST, SRC, TILE_BYTES, bytes_packed
from reshard.refit.transports.base import Incoming, Outgoing, Transport
from reshard.refit.transports.mappings import Mappings
from reshard.refit.transports.packing import ALIGNMENT, Round, Side
from reshard.refit.wire import pack_json, unpack_json

SLOTS = 2
_numbers = itertools.count()


class Slab:
    """`size` bytes of this process that others of its host may map: `address`, and `handle` for `Views`.

    `number` tells it from a later one of this process, which may get the same handle.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.size, self.device, self.number = size, device, next(_numbers)
        if device.type == "cuda":
            self.address = cuda_memory(size, device)
            self.handle = exported(self.address)
            return
        self.file = os.memfd_create("reshard")
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

    def address(self, number: int, handle: str, whose: str) -> int:
        """Where a slab is mapped here, in place of an earlier one. Raises ReshardError where that cannot
        be."""
        if self.mapped.get(whose) != (number, handle):
            self._unmap(whose)
        self.mapped[whose] = number, handle
        if not handle.startswith("/proc/"):
            return self.mappings.address(handle, whose)
        if handle not in self.files:
            try:
                with open(handle, "r+b") as file:
                    self.files[handle] = mmap.mmap(file.fileno(), 0)
            except OSError as error:
                raise ReshardError(
                    f"cannot map the memory of {whose} ({error.strerror}): use executor='buckets'"
                ) from error
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


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


class Staged(Transport):
    """This member's pairs of this kind.

    `bucket_bytes` bounds the slab of a rank. The tables are made again only where a slab lies elsewhere than
    the last time.
    """

    def __init__(self, members: Members, device: torch.device, bucket_bytes: int) -> None:
        self.members, self.device, self.bucket_bytes = members, device, bucket_bytes
        self.outgoing: dict[int, Outgoing] = {}
        self.incoming: dict[int, Incoming] = {}
        self.slab: Slab | None = None
        self.views = Views(device)
        self.made: dict[tuple[int, int], tuple[int, int, list[Round]]] = {}

    def prepare(self, outgoing: Mapping[int, Outgoing], incoming: Mapping[int, Incoming]) -> None:
        """Take these tables; the slab is made when it is first used. One of the right size stays, since
        others may have it mapped."""
        self.made.clear()
        self.outgoing, self.incoming = dict(outgoing), dict(incoming)
        self.received_bytes = sum(bytes_packed(some.table) for some in self.incoming.values())
        self.limit = self.bucket_bytes // (SLOTS * max(1, len(outgoing))) // ALIGNMENT * ALIGNMENT
        if outgoing and self.limit < TILE_BYTES:
            least = SLOTS * len(outgoing) * TILE_BYTES
            raise ReshardError(
                f"bucket_bytes {self.bucket_bytes} is too little for "
                f"{len(outgoing)} readers: {least} is the least"
            )
        if self.slab is not None and self.slab.size != SLOTS * self.limit * len(outgoing):
            self._free()

    def run(self) -> None:
        """Pack and unpack everything; returns when this member has all of its own, and its readers have all
        of theirs."""
        sends, receives = self._open()
        rounds = max((len(tables) for tables in (*sends.values(), *receives.values())), default=0)
        for index in range(rounds):
            # In every round first all of the packing: so nobody waits for who waits for him.
            self._turn(index, sends, "taken", index - SLOTS, "packed")
            self._turn(index, receives, "packed", index, "taken")
        for peer, tables in sends.items():
            self.members.wait_for_count(f"taken/{self.members.rank}", peer, len(tables))

    def _turn(
        self, index: int, rounds: Mapping[int, list[Round]], awaited: str, up_to: int, tell: str
    ) -> None:
        """Copy a round, where the partners are so far, and tell them."""
        me, tables = (
            self.members.rank,
            {peer: some[index] for peer, some in rounds.items() if index < len(some)},
        )
        for peer, table in tables.items():
            if up_to >= 0:
                self.members.wait_for_count(f"{awaited}/{me}", peer, up_to + 1)
            table.run()
        if tables and not wait_for_device(self.device, self.members.timeout):
            raise ReshardError(f"the copies did not end within {self.members.timeout:g} s")
        for peer in tables:
            self.members.count(f"{tell}/{peer}", index + 1)

    def _open(self) -> tuple[dict[int, list[Round]], dict[int, list[Round]]]:
        """Make the slab, map those of others; the copies of every round by partner."""
        members = self.members
        if self.outgoing:
            if self.slab is None:
                self.slab = Slab(SLOTS * self.limit * len(self.outgoing), self.device)
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
            theirs: dict[str, Any] = unpack_json(members.read("slab", peer))
            start = (
                self.views.address(theirs["number"], theirs["handle"], members.names[peer])
                + dict(theirs["starts"])[members.rank]
            )
            receives[peer] = self._rounds(peer, some, DST, start, theirs["limit"])
        return sends, receives

    def _rounds(self, peer: int, some: Outgoing | Incoming, end: int, start: int, limit: int) -> list[Round]:
        """The copies of every round between memory and the slab of a pair, which starts at an address."""
        before = self.made.get((peer, end))
        if before is None or before[:2] != (start, limit):
            side = Side(some, end, limit)
            rounds = [
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
