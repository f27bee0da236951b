"""Copies between live tensors and numpy arrays: in place on a CPU, through pinned buffers on a GPU."""

import mmap
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress

import numpy as np
import torch

from reshard.core.errors import ReshardError
from reshard.device.memory import Region, aligned
from reshard.storage.io.boxes import Rows
from reshard.storage.io.streams import SLAB_BYTES

# Bytes of a copy from or to a GPU: smaller ones do not fill the link.
PINNED_BYTES = 8 << 20
# Bytes that HostMemory allocates at a time: a power of two, so that torch pins no more.
BLOCK_BYTES = 256 << 20


def slab_bytes(device: torch.device) -> int:
    """Return how many bytes are copied at a time."""
    return PINNED_BYTES if device.type == "cuda" else SLAB_BYTES


def row_view(region: Region, local: Rows, step: int = 1) -> torch.Tensor:
    """View rows and columns of a region's local tensor ``[rows, columns]``, whose columns lie `step` elements apart."""
    tensor, pitch = region.tensor.detach(), region.pitch
    start = tensor.storage_offset() + region.offset + local.start * pitch + local.column * step
    shape = (local.stop - local.start, local.columns)
    return torch.as_strided(tensor, shape, (pitch, step), start)


def byte_view(region: Region, local: Rows) -> torch.Tensor:
    """View the same as bytes ``[rows, bytes of a row]``."""
    return row_view(region, local).view(torch.uint8)


class _ArrayInterface:
    """The array interface of a matrix of bytes on a CPU; it keeps the tensor alive."""

    def __init__(self, target: torch.Tensor) -> None:
        self.target = target
        self.__array_interface__ = {
            "data": (target.data_ptr(), False),
            "shape": tuple(target.shape),
            "strides": target.stride(),
            "typestr": "|u1",
            "version": 3,
        }


def numpy_view(target: torch.Tensor) -> np.ndarray:
    """View bytes on a CPU as a numpy array.

    Not by ``Tensor.numpy``: torch does not resize a storage that it has given to numpy, so it could
    no longer be offloaded.
    """
    return np.asarray(_ArrayInterface(target)) if target.numel() else np.zeros(target.shape, np.uint8)


def check_one_device(models: Iterable[torch.nn.Module]) -> None:
    """Raise ReshardError if a parameter lies on another device than the first."""
    device: torch.device | None = None
    for model in models:
        for name, parameter in model.named_parameters():
            if not parameter.numel():
                continue
            device = device or parameter.device
            if parameter.device != device:
                raise ReshardError(
                    f"the trainer's {name} is on {parameter.device} and others are on {device}: move the whole "
                    f"model to one device"
                )


class ToDevice:
    """Fills live tensors from a function that writes bytes: in place on a CPU; on a GPU through two pinned
    buffers for each thread, while the one before is still being copied."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.local = device, threading.local()
        self.streams: list[torch.cuda.Stream] = []
        # Work that training has queued on the old weights comes first.
        self.before = _record_event(torch.cuda.current_stream(device)) if device.type == "cuda" else None

    def fill(self, targets: Sequence[torch.Tensor], write: Callable[[list[np.ndarray]], None]) -> None:
        """Let `write` fill an array for each target, bytes ``[rows, bytes of a row]``; the bytes
        have arrived after `close`."""
        if self.device.type != "cuda":
            write(list(map(numpy_view, targets)))
            return
        if not hasattr(self.local, "stream"):
            self._start()
        ready, pinned = self.local.buffers[self.local.turn]
        if ready is not None:
            ready.synchronize()
        pinned, parts = _pinned_views(pinned, targets)
        write([part.numpy() for part in parts])
        with torch.cuda.stream(self.local.stream):
            torch._foreach_copy_(list(targets), parts, non_blocking=True)
            ready = _record_event(self.local.stream)
        self.local.buffers[self.local.turn] = (ready, pinned)
        self.local.turn = 1 - self.local.turn

    def _start(self) -> None:
        torch.cuda.set_device(self.device)  # which is each thread's own
        self.local.stream, self.local.turn = torch.cuda.Stream(self.device), 0
        self.local.buffers = [(None, None), (None, None)]
        self.local.stream.wait_event(self.before)
        self.streams.append(self.local.stream)

    def close(self) -> None:
        """Wait until everything has arrived."""
        for stream in self.streams:
            stream.synchronize()


def _record_event(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record(stream)
    return event


class FromDevice:
    """Reads the bytes of live tensors: in place on a CPU; from a GPU through two pinned buffers for
    each thread, one of which is filled while the other is used."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.local = device, threading.local()
        self.before = _record_event(torch.cuda.current_stream(device)) if device.type == "cuda" else None

    def read(self, batches: Sequence[Sequence[torch.Tensor]]) -> Iterator[list[np.ndarray]]:
        """Yield the bytes of each batch's tensors, ``[rows, bytes of a row]``, valid until the next batch."""
        if self.device.type != "cuda":
            for batch in batches:
                yield list(map(numpy_view, batch))
            return
        if not hasattr(self.local, "stream"):
            torch.cuda.set_device(self.device)
            self.local.stream, self.local.pinned = torch.cuda.Stream(self.device), [None, None]
            self.local.stream.wait_event(self.before)
        next_copy = self._start(batches[0], 0) if batches else None
        for number, _ in enumerate(batches):
            assert next_copy is not None
            ready, tensors = next_copy
            if number + 1 < len(batches):
                next_copy = self._start(batches[number + 1], (number + 1) % 2)
            ready.synchronize()
            yield [tensor.numpy() for tensor in tensors]

    def _start(self, batch: Sequence[torch.Tensor], turn: int) -> tuple[torch.cuda.Event, list[torch.Tensor]]:
        self.local.pinned[turn], parts = _pinned_views(self.local.pinned[turn], batch)
        with torch.cuda.stream(self.local.stream):
            torch._foreach_copy_(parts, list(batch), non_blocking=True)
            return _record_event(self.local.stream), parts


def _pinned_views(
    pinned: torch.Tensor | None, targets: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return a pinned buffer, the given one where it is large enough, and views of it in the shapes of these
    bytes."""
    sizes = [aligned(target.numel()) for target in targets]
    if pinned is None or pinned.numel() < sum(sizes):
        size = max(PINNED_BYTES, sum(sizes))
        pinned = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
    pieces = pinned[: sum(sizes)].split(sizes)
    return pinned, [p[: t.numel()].view(t.shape) for p, t in zip(pieces, targets, strict=True)]


class HostMemory:
    """Host memory for copies, in blocks of `BLOCK_BYTES`, pinned where a GPU copies to it; blocks
    of `spare` are used first.

    torch rounds what it pins up to a power of two, each tensor by itself: 70 GB in one would lock 128.
    """

    def __init__(self, pinned: bool, spare: list[torch.Tensor]) -> None:
        self.pinned, self.spare = pinned, spare
        self.blocks: list[torch.Tensor] = []
        self.reserved: torch.Tensor | None = None
        self.rest = torch.empty(0, dtype=torch.uint8)  # of the last block

    def reserve(self, sizes: Iterable[int]) -> None:
        """Allocate the next requests of these sizes in one piece, which stays with this object. Does nothing
        if it holds other bytes already. Raises RuntimeError or MemoryError if there is no memory."""
        size = sum(map(aligned, sizes))
        if self.blocks or self.rest.numel() or not size:
            return
        if self.reserved is None or self.reserved.numel() < size:
            self.reserved = None  # before there is another
            self.reserved = pinned_exactly(size) if self.pinned else torch.empty(size, dtype=torch.uint8)
        self.rest = self.reserved

    def allocate(self, size: int) -> torch.Tensor:
        """Return memory of this many bytes. Raises RuntimeError or MemoryError if there is not enough."""
        if size > self.rest.numel():
            self.rest = self._block(size)
            self.blocks.append(self.rest)
        memory, self.rest = self.rest[:size], self.rest[aligned(size) :]
        return memory

    def _block(self, size: int) -> torch.Tensor:
        if self.spare and size <= BLOCK_BYTES:
            return self.spare.pop()
        rounded = max(BLOCK_BYTES, 1 << (size - 1).bit_length())
        return torch.empty(rounded, dtype=torch.uint8, pin_memory=self.pinned)

    def allocate_parts(self, size: int) -> list[torch.Tensor]:
        """Return memory of this many bytes in parts, one after the other. Raises what `allocate` does."""
        parts = []
        while size:
            parts.append(self.allocate(min(size, self.rest.numel() or BLOCK_BYTES)))
            size -= parts[-1].numel()
        return parts

    def release(self) -> None:
        """Make its blocks spare ones: nobody needs their bytes any more."""
        self.spare += self.blocks
        self.blocks, self.rest = [], self.rest[:0]


def anonymous_memory(size: int) -> mmap.mmap:
    """Return memory of this many bytes that processes forked from this one do not have."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Large pages are pinned and found sooner; without them, in a container say, small ones do. Of pages that are
    # pinned Linux would give a forked process copies at once: as much memory again, while the fork waits.
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        if hasattr(mmap, advice):
            with suppress(OSError):
                memory.madvise(getattr(mmap, advice))
    return memory


_pinned: "weakref.WeakSet[_Pinned]" = weakref.WeakSet()
# Of a forked process, the parent's: other memory may lie in its place there, so it must not be unmapped.
_parents: list["_Pinned"] = []
os.register_at_fork(after_in_child=lambda: _parents.extend(_pinned))


class _Pinned:
    """Anonymous memory that is pinned for as long as it lives."""

    def __init__(self, size: int) -> None:
        self.size, self.memory = size, anonymous_memory(size)
        _pinned.add(self)
        self.address = torch.frombuffer(self.memory, dtype=torch.uint8).data_ptr()
        self.__array_interface__ = {
            "data": (self.address, False),
            "shape": (size,),
            "typestr": "|u1",
            "version": 3,
        }
        self.cudart = torch.cuda.cudart()
        if int(self.cudart.cudaHostRegister(self.address, size, 0)):
            self.size = 0
            raise RuntimeError(f"{size:,} bytes of host memory cannot be pinned")

    def __del__(self) -> None:
        if self.size:
            self.cudart.cudaHostUnregister(self.address)


def pinned_exactly(size: int) -> torch.Tensor:
    """Return pinned bytes in one piece, no more than these. Raises RuntimeError or OSError where there are
    none."""
    return torch.from_numpy(np.asarray(_Pinned(size)))


def copy_to_host(targets: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Copy live bytes to host memory, pinned where they come from a GPU, and wait for them. Raises
    ReshardError where there is not enough memory."""
    try:
        memory = HostMemory(device.type == "cuda", [])
        copies = [memory.allocate(t.numel()).view(t.shape) for t in targets]
    except (RuntimeError, MemoryError) as error:
        size = sum(t.numel() for t in targets)
        raise ReshardError(
            f"no {size:,} bytes of host memory for a copy of this rank's share: save without background"
        ) from error
    for copy, target in zip(copies, targets, strict=True):
        copy.copy_(target, non_blocking=True)
    if memory.pinned:
        torch.cuda.current_stream(device).synchronize()
    return copies
