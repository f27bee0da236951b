"""Staging within a host: pieces are packed into memory that others can map, a slab, and unpacked from there.

Expandable segments have no handle for other processes, and NCCL connects no two processes of one
GPU; a slab serves both (`reshard.refit.transports.slots`).
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
from reshard.refit.copying.flows import Incoming, Outgoing
from reshard.refit.copying.tables import ALIGNMENT, TILE_BYTES
from reshard.refit.protocol.memory import TrainerMemory, is_handle
from reshard.refit.protocol.slab import SlabLocation
from reshard.refit.routes import CUDA_IPC, NCCL, STAGED, Pair, Reach
from reshard.refit.transports.context import Context
from reshard.refit.transports.mapped import HINT, MappedMemory
from reshard.refit.transports.slots import SLOTS, SlotTransport, slab_numbers

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


class Staged(SlotTransport):
    """This member's pairs of this kind. `bucket_bytes` bounds the slab of a rank."""

    reach = Reach(STAGED, reaches, frozenset({STAGED}), automatic, replaces=frozenset({CUDA_IPC, NCCL}))

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.slab: SharedSlab | None = None
        self.views = Views(self.device)

    def prepare(
        self,
        outgoing: Mapping[int, Outgoing],
        incoming: Mapping[int, Incoming],
        elsewhere: Collection[Incoming] = (),
    ) -> None:
        """Take these tables. A slab of the right size stays, since others may have it mapped."""
        super().prepare(outgoing, incoming, elsewhere)
        limit = self.slot_bytes(max(1, len(outgoing)))
        if outgoing and limit < TILE_BYTES:
            least = SLOTS * len(outgoing) * TILE_BYTES
            raise ReshardError(
                f"bucket_bytes {self.context.bucket_bytes} is too little for "
                f"{len(outgoing)} readers: {least} is the least"
            )
        if self.slab is not None and self.slab.size != SLOTS * limit * len(outgoing):
            self._free_slab()

    def why(self) -> str:
        return "" if self.context.backend == STAGED else UNMAPPABLE

    def slot_bytes(self, readers: int) -> int:
        return self.context.bucket_bytes // (SLOTS * readers) // ALIGNMENT * ALIGNMENT

    def own_slab(self, size: int) -> SharedSlab:
        if self.slab is None:
            self.slab = SharedSlab(size, self.device)
        return self.slab

    def is_handle_of(self, peer: int, handle: str) -> bool:
        return is_slab_of(handle, self.context.peers[peer].pid, self.device)

    def open_slots(self, peer: int, slab: SlabLocation) -> int:
        """Return where the slots of a trainer's rank are mapped, and unpacked from."""
        size, who = SLOTS * slab.limit * len(slab.starts), self.group.names[peer]
        return self.views.address(slab.number, slab.handle, size, who) + dict(slab.starts)[self.group.rank]

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
