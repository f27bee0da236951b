"""Staging within a host: pieces are packed into memory that others can map, a slab, and unpacked from there.

Expandable segments have no handle for other processes, and NCCL connects no two processes of one
GPU; a slab serves both (`reshard.refit.transports.slots`). What an engine's rank passes on it copies into a slab of its
own.
"""

import ctypes
import mmap
import os
import re
from collections.abc import Collection, Mapping

import torch

from reshard.comm.client import PeerMemoryError
from reshard.core.errors import ReshardError, rewrite_message
from reshard.device.cuda import cuda_free, cuda_memory, exported
from reshard.refit.copying.copies import CopyTable, event_now
from reshard.refit.copying.flows import Incoming, Outgoing
from reshard.refit.copying.tables import table_of, tiles_of
from reshard.refit.protocol.memory import TrainerMemory, is_handle
from reshard.refit.protocol.slab import SlabLocation
from reshard.refit.relays import Line
from reshard.refit.routes import CUDA_IPC, NCCL, RELAY, STAGED, Pair, Reach
from reshard.refit.transports.context import Context
from reshard.refit.transports.mapped import HINT, MappedMemory
from reshard.refit.transports.slots import SLOTS, SlotRound, SlotTransport, slab_numbers

UNMAPPABLE = ": the trainer's memory cannot be mapped by other processes (expandable segments?)"
NAME = "reshard"  # of the file that a slab of the host's memory is


class SharedSlab:
    """`size` bytes of this process that others of its host may map: `address`, and `handle` for `Views`.

    `number` tells it from a later one of this process, which may get the same handle.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.size, self.device, self.number = size, device, next(slab_numbers)
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
    """Other processes' slabs, mapped here, one of each member; closed together."""

    def __init__(self, device: torch.device) -> None:
        self.mapped_gpu, self.files = MappedMemory(device), dict[str, mmap.mmap]()
        self.mapped: dict[int, tuple[int, str]] = {}  # by rank

    def address(self, rank: int, number: int, handle: str, size: int, whose: str) -> int:
        """Return where a rank's slab of so many bytes is mapped here, in place of an earlier one. Raises
        ReshardError where that cannot be, with `whose` it is: names of members need not differ."""
        if self.mapped.get(rank) != (number, handle):
            self._unmap(rank)
        self.mapped[rank] = number, handle
        if not handle.startswith("/proc/"):
            try:
                with rewrite_message(HINT):
                    return self.mapped_gpu.address(handle, size, whose)
            except ReshardError as error:
                raise PeerMemoryError(str(error)) from error
        if handle not in self.files:
            self.files[handle] = _mapped(handle, whose)
        if len(self.files[handle]) != size:
            raise ReshardError(f"the slab of {whose} has {len(self.files[handle]):,} bytes, and not {size:,}")
        return _address(self.files[handle])

    def _unmap(self, rank: int) -> None:
        _, handle = self.mapped.pop(rank, (0, ""))
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
            raise PeerMemoryError(
                f"{handle}, which {whose} names as its slab, is another file: use backend='nccl'"
            )
        with open(handle, "r+b") as file:
            return mmap.mmap(file.fileno(), 0)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise PeerMemoryError(f"cannot map the memory of {whose} ({reason}): use backend='nccl'") from error


def is_slab_of(handle: str, pid: int, device: torch.device) -> bool:
    """Return True for a handle that a slab of this process may have."""
    return (
        is_handle(handle)
        if device.type == "cuda"
        else bool(re.fullmatch(rf"/proc/{pid}/fd/[0-9]{{1,9}}", handle))
    )


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def reaches(pair: Pair) -> bool:
    """Within a host, between processes that may map each other's memory."""
    return pair.may_share_memory and pair.mappable


def automatic(pair: Pair) -> bool:
    """On GPUs where no others want the same; between CPUs Gloo does as well."""
    return pair.on_gpus and not pair.shared


def gains(pair: Pair) -> bool:
    """Where each has a GPU of its own, and there are many to fill: within one memory a copy more is only slower."""
    return pair.shared


class Staged(SlotTransport):
    """This member's lines of this kind. `bucket_bytes` bounds the slab of a rank."""

    reach = Reach(
        STAGED,
        reaches,
        frozenset({STAGED, RELAY}),
        automatic,
        replaces=frozenset({CUDA_IPC, NCCL}),
        relays=gains,
    )
    takes_all, fetch_launches = False, 1

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.slab: SharedSlab | None = None
        self.views = Views(self.device)
        # Of lines that are passed on: where the slots of the owner are mapped, and those of this member, and the copies
        # from there by a slot's offset and bytes.
        self.passing: dict[Line, tuple[int, int, dict[tuple[int, int], CopyTable]]] = {}

    def prepare(
        self,
        outgoing: Mapping[int, Outgoing],
        incoming: Mapping[int, Incoming],
        elsewhere: Collection[Incoming] = (),
    ) -> None:
        """Take these tables. A slab of the right size stays, since others may have it mapped."""
        super().prepare(outgoing, incoming, elsewhere)
        self.passing.clear()

    def why(self) -> str:
        return "" if self.context.backend == STAGED else UNMAPPABLE

    def own_slab(self, size: int) -> SharedSlab:
        if self.slab is not None and self.slab.size != size:
            self._free_slab()
        if self.slab is None:
            self.slab = SharedSlab(size, self.device)
        return self.slab

    def is_handle_of(self, peer: int, handle: str) -> bool:
        return is_slab_of(handle, self.context.peers[peer].pid, self.device)

    def open_slots(self, line: Line, slab: SlabLocation, start: int, own: int | None) -> int:
        owner = self.owners[line].rank
        who = self.group.names[owner]
        address = self.views.address(owner, slab.number, slab.handle, slab.size(SLOTS), who) + start
        if own is None:
            return address
        if self.passing.get(line, ())[:2] != (address, own):
            self.passing[line] = address, own, {}
        return own

    def begin_fetch(self, line: Line, one: SlotRound) -> torch.cuda.Event | None:
        source, own, copies = self.passing[line]
        if (one.offset, one.size) not in copies:
            copy = table_of([(source + one.offset, own + one.offset, 1, one.size, 0, 0)])
            copies[one.offset, one.size] = CopyTable(tiles_of(copy)[0], self.device)
        copies[one.offset, one.size].run()
        return event_now(self.device)

    def end_fetch(self, line: Line, fetch: torch.cuda.Event | None) -> None:
        self.end_copies([line], fetch)

    def release(self, but: Mapping[int, TrainerMemory] | None = None) -> None:
        """Unmap the others' slabs, which they then may free."""
        if but is None:
            self.views.close()

    def free(self) -> None:
        """Free this member's slab, which nobody may have mapped any more."""
        self.views.close()
        self._free_slab()

    def _free_slab(self) -> None:
        if self.slab is not None:
            self.slab.close()
            self.slab = None
