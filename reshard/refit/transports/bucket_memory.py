"""The memory of buckets: torch's, or NCCL's own, which a partner's GPU writes straight into."""

import atexit
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

_registered: "weakref.WeakSet[BucketMemory]" = weakref.WeakSet()
# Communicators, pools and buffers, on which a kernel may wait for ever for a dead partner.
_abandoned: list[tuple[Any, Any, list[torch.Tensor]]] = []


class BucketMemory:
    """The buffers of a communicator of `members` ranks.

    With `kept` they stay from refit to refit, and those of NCCL are registered with it: it then needs no
    copies through memory of its own, for which a GPU's memory is busy half as much again. Else torch takes
    them back after each refit.
    """

    def __init__(self, communicator: Any, members: int, device: torch.device, kept: bool) -> None:
        self.communicator, self.members, self.device = communicator, members, device
        self.registers = kept and hasattr(communicator, "register_mem_pool")
        self.has_met = False  # all members have, for the first time
        self.pool: Any = None
        self.buffers: list[torch.Tensor] = []

    def of(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Return buffers of so many bytes each."""
        if not self.registers:
            return self._new(sizes)
        if [*map(len, self.buffers)] != [*sizes]:
            self.free()
            self._register(sizes)
        return self.buffers

    def _new(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        return [torch.empty(size, dtype=torch.uint8, device=self.device) for size in sizes]

    def _register(self, sizes: Sequence[int]) -> None:
        if not self.has_met:
            # torch makes NCCL's communicator at the first exchange, and registers nothing before.
            words = torch.zeros(self.members, dtype=torch.int64, device=self.device)
            self.communicator.alltoall_base(torch.empty_like(words), words, [], []).wait()
            self.has_met = True
        pool = torch.cuda.MemPool(self.communicator.mem_allocator)
        with torch.cuda.use_mem_pool(pool, self.device):
            self.buffers = self._new(sizes)
        self.communicator.register_mem_pool(pool)
        self.pool = pool
        _registered.add(self)

    def free(self) -> None:
        """Give back what stays from refit to refit."""
        if self.pool is not None:
            with suppress(RuntimeError):  # the communicator may be gone
                self.communicator.deregister_mem_pool(self.pool)
        self.drop()

    def drop(self) -> None:
        """Give back what a communicator had that is aborted: torch crashes where that is asked to."""
        self.buffers, self.pool = [], None

    def abandon(self) -> None:
        """Leave the memory to an exchange that has failed, and may go on."""
        if self.pool is not None:
            _abandoned.append((self.communicator, self.pool, self.buffers))
        self.drop()


@atexit.register
def _free_registered() -> None:
    """Free what is NCCL's while Python, and with it the driver, is still there."""
    for memory in [*_registered]:
        memory.free()
