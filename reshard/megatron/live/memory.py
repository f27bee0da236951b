"""The bytes of a live model's tensors: as they are on a CPU, through pinned buffers on a GPU."""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch

from reshard.core.errors import ReshardError
from reshard.device.memory import Region
from reshard.storage.io.boxes import Rows
from reshard.storage.io.streams import SLAB_BYTES

# Of a GPU's copies: smaller ones do not fill the link.
PINNED_BYTES = 8 << 20
# Of what lies in a pinned buffer.
ALIGNMENT = 256
# Of host memory that is kept: a power of two, so that torch pins no more.
PIECE_BYTES = 256 << 20


def slab_bytes(device: torch.device) -> int:
    """How much is copied at a time."""
    return PINNED_BYTES if device.type == "cuda" else SLAB_BYTES


def bytes_of(region: Region, local: Rows) -> torch.Tensor:
    """Rows and columns of a region's local tensor as bytes ``[rows, bytes of a row]``, where they lie now."""
    tensor, pitch = region.tensor.detach(), region.pitch
    start = tensor.storage_offset() + region.offset + local.start * pitch + local.column
    shape = (local.stop - local.start, local.columns)
    return torch.as_strided(tensor, shape, (pitch, 1), start).view(torch.uint8)


class _Memory:
    """What numpy asks of a matrix of bytes on a CPU, which is kept."""

    def __init__(self, target: torch.Tensor) -> None:
        self.target = target
        self.__array_interface__ = {
            "data": (target.data_ptr(), False), "shape": tuple(target.shape), "strides": target.stride(), "typestr": "|u1",
            "version": 3,
        }  # fmt: skip


def array_of(target: torch.Tensor) -> np.ndarray:
    """Bytes on a CPU as numpy sees them, where they lie. A storage that torch itself has given to numpy could not be
    offloaded any more: torch no longer resizes it."""
    return np.asarray(_Memory(target)) if target.numel() else np.zeros(target.shape, np.uint8)


def check_one_device(models: Iterable[torch.nn.Module]) -> None:
    """Raise ReshardError where a parameter lies on another device than the first."""
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
        # What training has yet to compute with the old weights comes first.
        self.before = _recorded(torch.cuda.current_stream(device)) if device.type == "cuda" else None

    def fill(self, targets: Sequence[torch.Tensor], write: Callable[[list[np.ndarray]], None]) -> None:
        """Let `write` fill an array of the shape of each target, bytes ``[rows, bytes of a row]``, and have it
        there by the time of `close`."""
        if self.device.type != "cuda":
            write(list(map(array_of, targets)))
            return
        if not hasattr(self.local, "stream"):
            self._start()
        ready, pinned = self.local.buffers[self.local.turn]
        if ready is not None:
            ready.synchronize()
        pinned, parts = _parts(pinned, targets)
        write([part.numpy() for part in parts])
        with torch.cuda.stream(self.local.stream):
            torch._foreach_copy_(list(targets), parts, non_blocking=True)
            ready = _recorded(self.local.stream)
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


def _recorded(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record(stream)
    return event


class FromDevice:
    """Gives the bytes of live tensors: where they are on a CPU; of a GPU through two pinned buffers for each
    thread, one of which is filled while the other is used."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.local = device, threading.local()
        self.before = _recorded(torch.cuda.current_stream(device)) if device.type == "cuda" else None

    def read(self, bundles: Sequence[Sequence[torch.Tensor]]) -> Iterator[list[np.ndarray]]:
        """The bytes of each bundle's tensors, ``[rows, bytes of a row]``, valid until the next bundle is asked
        for."""
        if self.device.type != "cuda":
            for bundle in bundles:
                yield list(map(array_of, bundle))
            return
        if not hasattr(self.local, "stream"):
            torch.cuda.set_device(self.device)
            self.local.stream, self.local.pinned = torch.cuda.Stream(self.device), [None, None]
            self.local.stream.wait_event(self.before)
        coming = self._start(bundles[0], 0) if bundles else None
        for number, _ in enumerate(bundles):
            assert coming is not None
            ready, found = coming
            if number + 1 < len(bundles):
                coming = self._start(bundles[number + 1], (number + 1) % 2)
            ready.synchronize()
            yield [part.numpy() for part in found]

    def _start(
        self, bundle: Sequence[torch.Tensor], turn: int
    ) -> tuple[torch.cuda.Event, list[torch.Tensor]]:
        self.local.pinned[turn], parts = _parts(self.local.pinned[turn], bundle)
        with torch.cuda.stream(self.local.stream):
            torch._foreach_copy_(parts, list(bundle), non_blocking=True)
            return _recorded(self.local.stream), parts


def _parts(
    pinned: torch.Tensor | None, targets: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A pinned buffer, this one where it is large enough, and parts of it in the shapes of these bytes."""
    sizes = [-(-target.numel() // ALIGNMENT) * ALIGNMENT for target in targets]
    if pinned is None or pinned.numel() < sum(sizes):
        size = max(PINNED_BYTES, sum(sizes))
        pinned = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
    pieces = pinned[: sum(sizes)].split(sizes)
    return pinned, [p[: t.numel()].view(t.shape) for p, t in zip(pieces, targets, strict=True)]


class HostMemory:
    """Host memory for copies, in pieces of `PIECE_BYTES`, pinned where a GPU copies to it; `spare` are pieces of an
    earlier time, which are used first.

    torch rounds what it pins up to a power of two, each tensor by itself: 70 GB in one would lock 128.
    """

    def __init__(self, pinned: bool, spare: list[torch.Tensor]) -> None:
        self.pinned, self.spare = pinned, spare
        self.pieces: list[torch.Tensor] = []
        self.rest = torch.empty(0, dtype=torch.uint8)  # of the last piece

    def whole(self, size: int) -> torch.Tensor:
        """Memory of this many bytes, in one. Raises RuntimeError or MemoryError where there is none."""
        if size > self.rest.numel():
            self.rest = self._piece(size)
            self.pieces.append(self.rest)
        found, self.rest = self.rest[:size], self.rest[size:]
        return found

    def _piece(self, size: int) -> torch.Tensor:
        if self.spare and size <= PIECE_BYTES:
            return self.spare.pop()
        rounded = max(PIECE_BYTES, 1 << (size - 1).bit_length())
        return torch.empty(rounded, dtype=torch.uint8, pin_memory=self.pinned)

    def parts(self, size: int) -> list[torch.Tensor]:
        """Memory of this many bytes, one part after the other. Raises as `whole`."""
        found = []
        while size:
            found.append(self.whole(min(size, self.rest.numel() or PIECE_BYTES)))
            size -= found[-1].numel()
        return found

    def give_back(self) -> None:
        """Nobody needs what is in it any more."""
        self.spare += self.pieces
        self.pieces, self.rest = [], self.rest[:0]


def on_host(targets: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Copies of live bytes in host memory, pinned where they come from a GPU; they are all there when this
    returns. Raises ReshardError where there is not enough memory."""
    try:
        memory = HostMemory(device.type == "cuda", [])
        copies = [memory.whole(t.numel()).view(t.shape) for t in targets]
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
