"""Another process's GPU memory, mapped into this one (CUDA IPC): what makes a pull from a peer an ordinary
read.

One handle for each allocation, not for each tensor. A handle is opened with the opening process's own device
current, so that access between the two GPUs is switched on. Memory that is mapped somewhere is not given back
to the driver when its owner frees it, and memory that was freed and allocated again may have the same
address: so mappings are closed as soon as nobody reads, and an allocation is told from a later one at the
same place by the driver's id.
"""

import ctypes

import torch

from reshard.core.errors import ReshardError
from reshard.device.cuda import HANDLE_BYTES, checked, driver, make_current, mapped_bytes

# What is said beside why memory cannot be mapped (`rewrite_message`).
HINT = r"\Z", "; containers have to share pid and ipc namespaces for that, or use backend='nccl'"


class MappedMemory:
    """Peers' allocations that this process has mapped, by handle; closed together."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.addresses = device, dict[str, int]()

    def address(self, handle: str, size: int, whose: str) -> int:
        """Return where an allocation of at least `size` bytes is mapped here, mapping it at the
        first call. Raises ReshardError where that cannot be, or the allocation is smaller."""
        if handle not in self.addresses:
            wanted = driver().CUipcMemHandle()
            ctypes.memmove(wanted.getPtr(), bytes.fromhex(handle), HANDLE_BYTES)
            lazily = driver().CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
            make_current(self.device)
            with torch.cuda.device(self.device):
                answer = driver().cuIpcOpenMemHandle(wanted, lazily.value)
            self.addresses[handle] = int(checked(answer, f"cannot map the memory of {whose}"))
        mapped = mapped_bytes(self.addresses[handle])
        if mapped is not None and mapped < size:
            raise ReshardError(
                f"{whose} says that it shares {size:,} bytes of memory, of which {mapped:,} can be mapped"
            )
        return self.addresses[handle]

    def close(self, but: set[str] | None = None) -> None:
        """Unmap all, or all but those handles. Raises ReshardError, after the others are closed, where one
        cannot be."""
        closing = [handle for handle in self.addresses if not but or handle not in but]
        if not closing:
            return
        make_current(self.device)
        with torch.cuda.device(self.device):
            answers = [driver().cuIpcCloseMemHandle(self.addresses.pop(handle)) for handle in closing]
        for answer in answers:
            checked(answer, "a peer's memory cannot be unmapped")
