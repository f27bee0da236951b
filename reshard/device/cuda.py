"""The CUDA driver's view of memory: which allocation an address lies in, whether other processes can map it,
memory of our own."""

import ctypes
from typing import Any, NamedTuple

import numpy as np
import torch

from reshard.core.errors import ReshardError

HANDLE_BYTES = 64


class Allocation(NamedTuple):
    """A CUDA allocation: first address, bytes, and the driver's id, which no later allocation has again (0:
    it has none)."""

    base: int
    size: int
    generation: int


def driver() -> Any:
    """Return the bindings of the CUDA driver, imported only where there is a GPU."""
    from cuda.bindings import driver as bindings

    return bindings


def checked(answer: tuple, what: str) -> Any:
    """Return the value of a call of the driver. Raises ReshardError if it fails."""
    status, *values = answer
    if status:
        _, text = driver().cuGetErrorString(status)
        raise ReshardError(f"{what}: {text.decode() if isinstance(text, bytes) else status}")
    return values[0] if values else None


def allocation_of(address: int) -> Allocation:
    """Return the CUDA allocation that an address lies in. Raises ReshardError if there is none."""
    status, base, size = driver().cuMemGetAddressRange(address)
    base = checked((status, base), f"no CUDA allocation at {address:#x}")
    return Allocation(int(base), size, generation_of(int(base)))


def _attribute(name: str, address: int) -> Any:
    """Return an attribute of the memory at an address; None if the driver does not say."""
    status, value = driver().cuPointerGetAttribute(
        getattr(driver().CUpointer_attribute, f"CU_POINTER_ATTRIBUTE_{name}"), address
    )
    return None if status else value


def generation_of(base: int) -> int:
    """Return the driver's id of the allocation that is at an address now; 0 if there is none."""
    return int(_attribute("BUFFER_ID", base) or 0)


def frees_of(device: torch.device) -> int | None:
    """Return how often torch has given memory of this device back to the driver; None if it does
    not manage this process's memory."""
    stats = torch.cuda.memory_stats_as_nested_dict(device)  # not the flat one, which is sorted
    return stats["num_device_free"] if stats.get("num_device_alloc") else None


def is_mapped(address: int) -> bool:
    """Return True if there is memory behind a CUDA address; vLLM's sleep mode gives it away."""
    return bool(_attribute("MAPPED", address))


def mapped_bytes(base: int) -> int | None:
    """Return the bytes of the allocation with this first address, also of one that another process
    has made; None if the driver does not say."""
    status, first, size = driver().cuMemGetAddressRange(base)
    return None if status or int(first) != base else int(size)


def is_exportable(base: int) -> bool:
    """Return True if an allocation has a handle for other processes. Expandable segments and the
    pools of sleep mode have none."""
    return bool(_attribute("IS_LEGACY_CUDA_IPC_CAPABLE", base))


def exported(base: int) -> str:
    """Return the handle, in hex, under which another process of this host maps an allocation.
    Raises ReshardError if it has none."""
    handle = checked(
        driver().cuIpcGetMemHandle(base), f"the memory at {base:#x} cannot be shared with other processes"
    )
    return ctypes.string_at(handle.getPtr(), HANDLE_BYTES).hex()


# torch's pools for tables, by device.
_pools: dict[torch.device, Any] = {}


def on_device(table: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copy a table to a device, on a GPU into segments of its own: torch gives a segment back to the driver only
    when nothing lies in it, and would put a table into what is left behind a trainer's parameters, which then
    could not be offloaded."""
    source = torch.from_numpy(table)
    if device.type != "cuda" or not hasattr(torch.cuda, "MemPool"):
        return source.to(device)
    if device not in _pools:
        _pools[device] = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(_pools[device], device):
        return source.to(device)


def cuda_memory(size: int, device: torch.device) -> int:
    """Return the address of `size` bytes straight from the driver, which other processes may map
    whatever torch's allocator is set to."""
    make_current(device)
    with torch.cuda.device(device):
        return int(
            checked(
                driver().cuMemAlloc(size),
                f"no {size:,} bytes of GPU memory for a refit's slab: give less bucket_bytes",
            )
        )


def cuda_free(address: int, device: torch.device) -> None:
    """Give memory of `cuda_memory` back."""
    make_current(device)
    with torch.cuda.device(device):
        checked(driver().cuMemFree(address), "the slab of a refit cannot be freed")


def copy_rows(copies: np.ndarray, device: torch.device) -> None:
    """Enqueue copies on the device's current stream, for its copy engines: rows of (source, destination, rows,
    bytes of a row, and the bytes from one row to the next on either side, which of a single row mean nothing).
    Sources and destinations are in its memory or in pinned memory of the host."""
    bindings = driver()
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream(device).cuda_stream
        for source, destination, rows, width, source_pitch, destination_pitch in copies.tolist():
            if rows == 1:
                answer = bindings.cuMemcpyAsync(destination, source, width, stream)
            else:
                matrix = bindings.CUDA_MEMCPY2D()
                matrix.srcMemoryType = matrix.dstMemoryType = bindings.CUmemorytype.CU_MEMORYTYPE_UNIFIED
                matrix.srcDevice, matrix.dstDevice = source, destination
                matrix.srcPitch, matrix.dstPitch = source_pitch, destination_pitch
                matrix.WidthInBytes, matrix.Height = width, rows
                answer = bindings.cuMemcpy2DAsync(matrix, stream)
            checked(answer, "the copies from host memory cannot be enqueued")


def device_of_process() -> torch.device:
    """Return the device that a process computes on that has no tensor to show it: the current GPU where it uses one."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def make_current(device: torch.device) -> None:
    """Make the device's context the current one of this thread, which the driver's calls mean."""
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()
