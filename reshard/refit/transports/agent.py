"""A NIXL agent: one-sided reads between registered memory of two processes, over RDMA where there is
some, else over TCP, or what processes of one host share.

The package is optional. Its agent is made as the bindings have it: the one of its Python API has a
thread that never sleeps, half a core for each agent.
"""

import atexit
import itertools
import os
import re
import secrets
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NamedTuple

import torch

from reshard.core.errors import ReshardError, first_line
from reshard.core.extras import importing
from reshard.device.cuda import cuda_free, cuda_memory, make_current
from reshard.refit.transports.slots import log, slab_numbers

DRAM, VRAM = "DRAM", "VRAM"  # NIXL's words for the host's memory and a GPU's
BACKEND = "UCX"
# Microseconds after which the thread that moves an agent's connections on looks again, if nothing has woken it.
LOOK_MICROSECONDS = 100_000
_HANDLE = re.compile(r"(DRAM|VRAM):([0-9]{1,3}):([0-9]{1,18}):((?:[0-9a-f]{2}){1,32768})")
_agents = itertools.count()
_open: "weakref.WeakSet[Agent]" = weakref.WeakSet()


@cache
def installed_version() -> str:
    """Return the version of the NIXL that this process can use, empty where there is none."""
    if find_spec("nixl") is None:
        return ""
    try:
        package, _, _ = _nixl().nixlAgent.__module__.partition(".")  # nixl_cu13, for one
        return metadata.version(package)
    except (ReshardError, ImportError, OSError, AttributeError) as error:
        log.warning("NIXL is installed, and cannot be used: %s", first_line(error))
        return ""


def _nixl() -> ModuleType:
    with importing("nixl"):
        import nixl
    return nixl


class NixlError(RuntimeError):
    """NIXL could not do what it was asked for, as where a partner is gone."""


@cache
def _error_kinds() -> tuple[type[Exception], ...]:
    """Return the classes of NIXL's errors, which have none in common."""
    exported = vars(_nixl()).values()
    return tuple(kind for kind in exported if isinstance(kind, type) and issubclass(kind, Exception))


@contextmanager
def nixl_errors(what: str) -> Iterator[None]:
    """Raise NixlError, saying `what` failed, for an error of NIXL's inside."""
    try:
        yield
    except _error_kinds() as error:
        raise NixlError(f"{what} failed: {first_line(error)}") from error


class AgentHandle(NamedTuple):
    """A slab as other agents find it: the kind of memory, its device and address, and the metadata of the
    agent that has registered it."""

    memory: str
    device: int
    address: int
    agent: bytes

    def encode(self) -> str:
        """Return it as text."""
        return f"{self.memory}:{self.device}:{self.address}:{self.agent.hex()}"

    @staticmethod
    def decode(text: str) -> "AgentHandle | None":
        """Return what `encode` made a text of; None where it did not."""
        match = _HANDLE.fullmatch(text)
        if match is None:
            return None
        return AgentHandle(match[1], int(match[2]), int(match[3]), bytes.fromhex(match[4]))


class RegisteredSlab(NamedTuple):
    """`size` bytes of this process's memory that an agent has registered, and by which `handle` others
    find them; `number` tells them from later ones."""

    memory: str
    device: int
    address: int
    size: int
    handle: str
    number: int


class Agent:
    """An agent of this process on a device, with the slabs that it has registered and the partners that
    it has met."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.nixl = device, _nixl()
        self.kinds = {DRAM: self.nixl.DRAM_SEG, VRAM: self.nixl.VRAM_SEG}
        self.partners: dict[bytes, Any] = {}  # the names under which it knows them, by their metadata
        self.reads: set[Any] = set()  # that have begun, and are not known to have ended
        self.on_host: list[torch.Tensor] = []
        self.on_gpu: list[int] = []
        config = self.nixl.nixlAgentConfig()
        config.useProgThread, config.pthrDelay = True, LOOK_MICROSECONDS
        config.useListenThread, config.syncMode = False, self.nixl.NIXL_THREAD_SYNC_NONE
        name = f"reshard {os.getpid()} {next(_agents)} {secrets.token_hex(8)}"
        with nixl_errors("making a NIXL agent"), self._current():
            self.agent = self.nixl.nixlAgent(name, config)
            self.backend = self.agent.createBackend(BACKEND, {})
        _open.add(self)

    def slab(self, size: int, in_gpu: bool) -> RegisteredSlab:
        """Return so many bytes of new memory, registered: of the GPU where there is one and the network
        reads `in_gpu`, else of the host, which a GPU reads and writes, too."""
        memory, device = DRAM, 0
        if in_gpu and self.device.type == "cuda":
            memory, device, address = VRAM, self.device.index or 0, cuda_memory(size, self.device)
            self.on_gpu.append(address)
        else:
            # Zeros, so that its pages are there before the first refit.
            self.on_host.append(torch.zeros(size, dtype=torch.uint8, pin_memory=self.device.type == "cuda"))
            address = self.on_host[-1].data_ptr()
        registered = self.nixl.nixlRegDList(self.kinds[memory], [(address, size, device, "")])
        with nixl_errors(f"registering {size:,} bytes with NIXL"), self._current():
            self.agent.registerMem(registered, [self.backend])
            handle = AgentHandle(memory, device, address, bytes(self.agent.getLocalMD())).encode()
        return RegisteredSlab(memory, device, address, size, handle, next(slab_numbers))

    def meet(self, partner: bytes, who: str) -> None:
        """Get to know another agent by its metadata, once. Raises ReshardError where that is no agent's, or
        no network leads there."""
        if partner in self.partners:
            return
        try:
            with nixl_errors("meeting its agent"):
                self.partners[partner] = self.agent.loadRemoteMD(partner)
        except NixlError as error:
            raise ReshardError(f"NIXL cannot reach {who} ({error}): use backend='nccl'") from error

    def read(
        self, slab: RegisteredSlab, start: int, size: int, source: AgentHandle, source_start: int
    ) -> Any:
        """Begin to read so many bytes of a partner's slab into one of this agent's, and return the read.
        Raises NixlError where they are not there, or the partner is not."""
        parts = (
            self.nixl.nixlXferDList(self.kinds[memory], [(address, size, device)])
            for memory, address, device in (
                (slab.memory, slab.address + start, slab.device),
                (source.memory, source.address + source_start, source.device),
            )
        )
        with nixl_errors("a read with NIXL"):
            read = self.agent.createXferReq(
                self.nixl.NIXL_READ, *parts, self.partners[source.agent], b"", [self.backend]
            )
            self.reads.add(read)
            self.agent.postXferReq(read, b"")
        return read

    def has_ended(self, read: Any) -> bool:
        """Return True once the bytes of a read are there. Raises NixlError where they will not come."""
        with nixl_errors("a read with NIXL"):
            status = self.agent.getXferStatus(read)
            if status == self.nixl.NIXL_IN_PROG:
                return False
            if status != self.nixl.NIXL_SUCCESS:
                raise NixlError(f"a read with NIXL failed: {status}")
            self.agent.releaseXferReq(read)
        self.reads.discard(read)
        return True

    def close(self) -> None:
        """End all reads, leave all partners, and give the memory back."""
        for read in self.reads:
            with suppress(NixlError), nixl_errors("ending a read"):
                self.agent.releaseXferReq(read)
        for name in self.partners.values():
            with suppress(NixlError), nixl_errors("leaving a partner"):
                self.agent.invalidateRemoteMD(name)
        self.reads.clear()
        self.partners.clear()
        self.agent = None  # ends it: until then it may read memory for a partner, which must be there
        for address in self.on_gpu:
            cuda_free(address, self.device)
        self.on_host.clear()
        self.on_gpu.clear()

    def __del__(self) -> None:
        if getattr(self, "agent", None) is not None:
            self.close()

    def _current(self) -> Any:
        """Return a context in which this agent's GPU is the current one, and has a context of its own."""
        if self.device.type != "cuda":
            return nullcontext()
        make_current(self.device)
        return torch.cuda.device(self.device)


@atexit.register
def _close_agents() -> None:
    """Close while Python is still there. The driver takes back a GPU's memory by itself, and would be waited for here
    if a kernel never ends."""
    for agent in [*_open]:
        agent.on_gpu.clear()
        agent.close()
