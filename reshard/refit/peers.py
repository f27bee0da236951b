"""Another process's GPU memory, mapped into this one (CUDA IPC): what makes a pull from a peer an ordinary read.

One handle for each allocation, not for each tensor. A handle is opened with the opening process's own device current, so that
access between the two GPUs is switched on.
"""

import ctypes
from functools import cache
from typing import Any

import torch

from reshard.errors import ReshardError

HANDLE_BYTES = 64
LAZY_PEER_ACCESS = 1


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * HANDLE_BYTES)]


@cache
def _cuda() -> Any:
    library = ctypes.CDLL("libcuda.so.1")
    library.cuIpcOpenMemHandle_v2.argtypes = [ctypes.POINTER(ctypes.c_uint64), _Handle, ctypes.c_uint]
    library.cuIpcGetMemHandle.argtypes = [ctypes.POINTER(_Handle), ctypes.c_uint64]
    library.cuIpcCloseMemHandle.argtypes = [ctypes.c_uint64]
    library.cuMemGetAddressRange_v2.argtypes = [ctypes.POINTER(ctypes.c_uint64), ctypes.POINTER(ctypes.c_size_t), ctypes.c_uint64]
    return library


def _checked(status: int, what: str) -> None:
    if status:
        text = ctypes.c_char_p()
        _cuda().cuGetErrorString(status, ctypes.byref(text))
        raise ReshardError(f"{what}: {text.value.decode() if text.value else status}")


def allocation_of(address: int) -> tuple[int, int]:
    """First address and bytes of the CUDA allocation that an address lies in."""
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    _checked(_cuda().cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), address), f"no CUDA allocation at {address:#x}")
    return base.value, size.value


def exported(base: int) -> str:
    """The handle, in hex, under which another process of this host maps an allocation.

    Raises ReshardError for memory that has none: expandable segments and the pools of sleep mode.
    """
    handle = _Handle()
    _checked(
        _cuda().cuIpcGetMemHandle(ctypes.byref(handle), base),
        "the trainer's weights lie in memory that cannot be shared with other processes (expandable segments, or a virtual memory pool): "
        "unset PYTORCH_CUDA_ALLOC_CONF=expandable_segments, or use executor='buckets'",
    )
    return ctypes.string_at(ctypes.byref(handle), HANDLE_BYTES).hex()


class Mappings:
    """Peers' allocations that this process has mapped, by handle; closed together."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.addresses = device, dict[str, int]()

    def address(self, handle: str, whose: str) -> int:
        """Where an allocation is mapped here, mapping it at the first call."""
        if handle not in self.addresses:
            with torch.cuda.device(self.device):
                torch.cuda.current_stream().synchronize()  # makes the device's context current in this thread
                found = ctypes.c_uint64()
                status = _cuda().cuIpcOpenMemHandle_v2(
                    ctypes.byref(found), _Handle.from_buffer_copy(bytes.fromhex(handle)), LAZY_PEER_ACCESS
                )
                _checked(status, f"cannot map the memory of {whose}")
            self.addresses[handle] = found.value
        return self.addresses[handle]

    def close(self, but: set[str] | None = None) -> None:
        """Unmap all, or all but those handles."""
        for handle in [h for h in self.addresses if not but or h not in but]:
            _cuda().cuIpcCloseMemHandle(self.addresses.pop(handle))
