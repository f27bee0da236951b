"""How fast does NCCL move buckets between two GPUs? Each of its operations alone, and with packing and
unpacking.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.refits.exchange [--json FILE]

Runs the NCCL that torch has loaded; `LD_PRELOAD` of another ``libnccl.so.2`` measures that. Every way moves as
much as a refit of 24 layers of Qwen3-30B-A3B from TP2 EP2 to TP2 brings from the other GPU:

- copies: by the copy engines from memory that is mapped by CUDA IPC, which is the floor;
- sendrecv: a group of one send and one receive, as torch's all-to-all makes of it;
- registered: the same between buffers of ``ncclMemAlloc`` that each rank registers, as torch's memory pools do;
- windows: the same between such buffers in symmetric windows;
- alltoall: ``ncclAlltoAll`` between such windows by the copy engines (``NCCL_CTA_POLICY_ZERO``), which copies
  this rank's own part too;
- put: ``ncclPutSignal`` into the other's window, and a signal back once it is unpacked (NCCL 2.29 and later).

The pieces of `packed` are those of experts: halves of gate and up in one run, of down in rows of 768 bytes with
gaps between them.
"""

import argparse
import ctypes
import os
import statistics
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.processes import conclude, everyone, say
from benchmarks.refits.refit import link_rate

ID_BYTES, UNSET = 128, -(1 << 31)
INT8, SYMMETRIC, ZERO_CTAS = 0, 1, 2
EXPERTS, LAYERS = 64, 24
RUN, ROWS, ROW = 768 * 2048, 2048, 768  # bytes of a half of gate or up, rows of down, bytes of a half of one


class UniqueId(ctypes.Structure):
    """``ncclUniqueId``."""

    _fields_ = (("bytes", ctypes.c_char * ID_BYTES),)


class Config(ctypes.Structure):
    """``ncclConfig_t`` of NCCL 2.28, which later ones take too."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("before", ctypes.c_int * 4),  # blocking, CTAs of a cluster, fewest, most
        ("net", ctypes.c_void_p),
        ("after", ctypes.c_int * 2),
        ("name", ctypes.c_void_p),
        ("collnet", ctypes.c_int),
        ("policy", ctypes.c_int),
        ("last", ctypes.c_int * 4),
    )


class Expected(ctypes.Structure):
    """``ncclWaitSignalDesc_t``."""

    _fields_ = tuple((name, ctypes.c_int) for name in ("count", "peer", "index", "context"))


class Nccl:
    """NCCL's own functions, on a communicator of two ranks with a policy for CTAs."""

    def __init__(self, policy: int) -> None:
        self.library, self.rank = ctypes.CDLL("libnccl.so.2"), dist.get_rank()
        self.peer, own = 1 - self.rank, UniqueId()
        if self.rank == 0:
            self("GetUniqueId", ctypes.byref(own))
        shared = everyone(ctypes.string_at(ctypes.addressof(own), ID_BYTES))[0]
        ctypes.memmove(ctypes.addressof(own), shared, ID_BYTES)
        ints = [UNSET] * 4
        config = Config(
            ctypes.sizeof(Config),
            0xCAFEBEEF,
            22809,
            tuple(ints),
            None,
            (UNSET, UNSET),
            None,
            UNSET,
            policy,
            tuple(ints),
        )
        self.communicator = ctypes.c_void_p()
        self("CommInitRankConfig", ctypes.byref(self.communicator), 2, own, self.rank, ctypes.byref(config))

    def __call__(self, name: str, *arguments) -> None:
        """Call a function. Raises RuntimeError if it fails, AttributeError where there is none."""
        status = getattr(self.library, f"nccl{name}")(*arguments)
        if status:
            self.library.ncclGetErrorString.restype = ctypes.c_char_p
            raise RuntimeError(f"nccl{name}: {self.library.ncclGetErrorString(status).decode()}")

    @property
    def version(self) -> int:
        """The library's version, as one number."""
        number = ctypes.c_int()
        self("GetVersion", ctypes.byref(number))
        return number.value

    def window(self, size: int) -> tuple[int, ctypes.c_void_p]:
        """Return memory of NCCL's in a symmetric window, and the window."""
        address, window = ctypes.c_void_p(), ctypes.c_void_p()
        self("MemAlloc", ctypes.byref(address), ctypes.c_size_t(size))
        self(
            "CommWindowRegister",
            self.communicator,
            address,
            ctypes.c_size_t(size),
            ctypes.byref(window),
            SYMMETRIC,
        )
        if not window.value:
            raise RuntimeError("NCCL makes no window here")
        return int(address.value or 0), window


class Slots:
    """So many send and receive buffers of a size, and a communicator for them."""

    policy = UNSET
    own_part = 0  # 1: buffers have a part for this rank itself, too

    def __init__(self, size: int, slots: int) -> None:
        self.nccl, self.size = Nccl(self.policy), size
        self.far = size * self.nccl.peer * self.own_part  # where the other's part begins
        self.memory = [self.allocate(size * (1 + self.own_part)) for _ in range(2 * slots)]
        self.send, self.receive = self.memory[:slots], self.memory[slots:]

    def allocate(self, size: int) -> int:
        """Return memory for a buffer."""
        self.tensors = [*getattr(self, "tensors", []), torch.empty(size, dtype=torch.uint8, device="cuda")]
        return int(self.tensors[-1].data_ptr())

    def exchange(self, slot: int, first: bool) -> None:
        """Enqueue on the current stream that a slot's buffer is sent, and the other's received; `first` where
        none has been in it before."""
        where, stream = ctypes.c_size_t(self.size), ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        self.nccl("GroupStart")
        for name, address in (("Send", self.send[slot]), ("Recv", self.receive[slot])):
            self.nccl(
                name, ctypes.c_void_p(address), where, INT8, self.nccl.peer, self.nccl.communicator, stream
            )
        self.nccl("GroupEnd")


class Registered(Slots):
    """Between registered buffers."""

    def allocate(self, size: int) -> int:
        """Return memory of NCCL's for a buffer, registered."""
        address, handle = ctypes.c_void_p(), ctypes.c_void_p()
        self.nccl("MemAlloc", ctypes.byref(address), ctypes.c_size_t(size))
        self.nccl(
            "CommRegister", self.nccl.communicator, address, ctypes.c_size_t(size), ctypes.byref(handle)
        )
        return int(address.value or 0)


class Windows(Slots):
    """Between windows."""

    def allocate(self, size: int) -> int:
        """Return memory for a buffer, in a window of its own."""
        address, window = self.nccl.window(size)
        self.windows = {**getattr(self, "windows", {}), address: window}
        return address


class AllToAll(Windows):
    """By the copy engines."""

    policy, own_part = ZERO_CTAS, 1

    def exchange(self, slot: int, first: bool) -> None:
        send, receive = (ctypes.c_void_p(memory[slot]) for memory in (self.send, self.receive))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        self.nccl("AlltoAll", send, receive, ctypes.c_size_t(self.size), INT8, self.nccl.communicator, stream)


class Put(Windows):
    """One-sided, once the other has said that the buffer is free."""

    def exchange(self, slot: int, first: bool) -> None:
        nccl, stream = self.nccl, ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        expected = Expected(1, nccl.peer, 0, 0)
        if not first:
            nccl("Signal", nccl.peer, 0, 0, 0, nccl.communicator, stream)
            nccl("WaitSignal", 1, ctypes.byref(expected), nccl.communicator, stream)
        window = self.windows[self.receive[slot]]
        source, size = ctypes.c_void_p(self.send[slot]), ctypes.c_size_t(self.size)
        nccl(
            "PutSignal",
            source,
            size,
            INT8,
            nccl.peer,
            window,
            ctypes.c_size_t(0),
            0,
            0,
            0,
            nccl.communicator,
            stream,
        )
        nccl("WaitSignal", 1, ctypes.byref(expected), nccl.communicator, stream)


WAYS = {"sendrecv": Slots, "registered": Registered, "windows": Windows, "alltoall": AllToAll, "put": Put}


def timed(run: Callable[[], None], rounds: int = 5) -> float:
    """Median milliseconds of the slowest rank, after a first time."""
    times = []
    for _ in range(rounds + 1):
        torch.cuda.synchronize()
        dist.barrier()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(max(everyone(time.perf_counter() - start)))
    return 1e3 * statistics.median(times[1:])


def _weights(size: int, seed: int) -> torch.Tensor:
    """Return random bytes, the same on every rank."""
    generator = torch.Generator("cuda").manual_seed(seed)
    words = torch.empty(size // 8, dtype=torch.int64, device="cuda").random_(generator=generator)
    return words.view(torch.uint8)


class Pieces:
    """The boxes that a rank sends, those that it gets, and those that stay, in `buckets` of `size` bytes."""

    def __init__(self, size: int) -> None:
        self.experts_in_bucket = size // (3 * RUN)
        count = LAYERS * EXPERTS
        self.buckets = -(-count // self.experts_in_bucket)
        bytes_of_all = count * (2 * RUN + ROWS * 2 * ROW)
        self.source = _weights(bytes_of_all, dist.get_rank())
        self.served, self.local = (
            torch.zeros(bytes_of_all, dtype=torch.uint8, device="cuda") for _ in range(2)
        )

    def check(self) -> None:
        """Raise RuntimeError if what was served is not what the other rank has, or anything else was
        written."""
        expected = _weights(len(self.served), 1 - dist.get_rank())
        expected.view(-1, 2 * RUN + ROWS * 2 * ROW)[:, 2 * RUN :].unflatten(1, (ROWS, 2 * ROW))[..., ROW:] = 0
        if not torch.equal(self.served, expected):
            raise RuntimeError("other bytes than the other rank's have arrived")

    def copies(self, index: int, packed: int, memory: int, packs: bool) -> np.ndarray:
        """Return the copies of a bucket between memory and the packed bytes."""
        from reshard.refit.copying.tables import table_of

        rows = []
        first = index * self.experts_in_bucket
        for number in range(first, min(first + self.experts_in_bucket, LAYERS * EXPERTS)):
            live, dense = memory + number * (2 * RUN + ROWS * 2 * ROW), packed + (number - first) * 3 * RUN
            for live_at, dense_at, n, width, pitch in (
                (live, dense, 1, 2 * RUN, 0),
                (live + 2 * RUN, dense + 2 * RUN, ROWS, ROW, 2 * ROW),
            ):
                ends = (
                    (live_at, dense_at, n, width, pitch, width)
                    if packs
                    else (dense_at, live_at, n, width, width, pitch)
                )
                rows.append(ends)
        return table_of(rows)


def packed(slots: Slots, pieces: Pieces, programs: int, beside: bool) -> Callable[[], None]:
    """Return a refit by buckets: packed, exchanged and unpacked, each in a stream of its own; `beside` it as
    many bytes are copied within this GPU."""
    from reshard.refit.copying.copies import CopyTable
    from reshard.refit.copying.tables import tiles_of

    device = torch.device("cuda", torch.cuda.current_device())
    count = len(slots.send)

    def table(copies: np.ndarray) -> CopyTable:
        return CopyTable(tiles_of(copies)[0], device, aside=True)

    packs, unpacked_by = [], []
    for index in range(pieces.buckets):
        send, receive = (memory[index % count] + slots.far for memory in (slots.send, slots.receive))
        packs.append(table(pieces.copies(index, send, pieces.source.data_ptr(), True)))
        unpacked_by.append(table(pieces.copies(index, receive, pieces.served.data_ptr(), False)))
    bucket_bytes = pieces.experts_in_bucket * 3 * RUN
    kept = [
        pieces.copies(index, pieces.local.data_ptr() + index * bucket_bytes, pieces.source.data_ptr(), True)
        for index in range(pieces.buckets)
    ]
    staying = table(np.concatenate(kept))
    streams = [torch.cuda.Stream() for _ in range(4)]

    def run() -> None:
        packing, sending, unpacking, copying = streams
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())
        if beside:
            with torch.cuda.stream(copying):
                staying.run(32)
        sent: list = []
        free: list = []
        for index in range(pieces.buckets):
            with torch.cuda.stream(packing):
                if index >= count:
                    packing.wait_event(sent[index - count])
                packs[index].run(programs)
                full = packing.record_event()
            with torch.cuda.stream(sending):
                sending.wait_event(full)
                if index >= count:
                    sending.wait_event(free[index - count])
                slots.exchange(index % count, index < count)
                sent.append(sending.record_event())
            with torch.cuda.stream(unpacking):
                unpacking.wait_event(sent[index])
                unpacked_by[index].run(programs)
                free.append(unpacking.record_event())
        for stream in streams:
            torch.cuda.current_stream().wait_stream(stream)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ways", nargs="+", default=[*WAYS], choices=[*WAYS])
    parser.add_argument("--mib", type=int, nargs="+", default=[126, 252], help="bytes of a bucket")
    parser.add_argument("--slots", type=int, nargs="+", default=[2])
    parser.add_argument("--programs", type=int, nargs="+", default=[64])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo")
    total = LAYERS * EXPERTS * 3 * RUN
    floor = 1e3 * total / min(everyone(link_rate()))
    result: dict = {"gpu": torch.cuda.get_device_name(), "bytes": total, "floor_ms": floor, "ways": {}}
    say(f"floor {floor:.1f} ms of {total / 1e9:.2f} GB")
    for way in options.ways:
        for mib in options.mib:
            for count in options.slots:
                try:
                    measure(result, way, mib << 20, count, options.programs)
                except Exception:
                    result["ways"][f"{way} {mib} {count}"] = traceback.format_exc()[-600:]
                    say(way, mib, traceback.format_exc()[-600:])
                torch.cuda.empty_cache()
    conclude(result, options.json)


def measure(result: dict, way: str, size: int, count: int, programs: list[int]) -> None:
    """Measure a way with buckets of so many bytes."""
    slots, floor = WAYS[way](size, count), result["floor_ms"]
    result["nccl"] = slots.nccl.version
    buckets = -(-result["bytes"] // size)

    def alone() -> None:
        for index in range(buckets):
            slots.exchange(index % count, index < count)

    times = {"alone": timed(alone) * result["bytes"] / (buckets * size)}
    pieces = Pieces(size)
    for number in programs:
        times[f"packed, {number} programs"] = timed(packed(slots, pieces, number, False))
        times[f"and local copies, {number} programs"] = timed(packed(slots, pieces, number, True))
    pieces.check()
    result["ways"][f"{way} {size >> 20} {count}"] = times
    say(
        way,
        f"{size >> 20} MiB, {count} slots:",
        {name: f"{ms:.1f} ({ms / floor:.2f})" for name, ms in times.items()},
    )


if __name__ == "__main__":
    main()
