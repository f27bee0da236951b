"""Routes between trainers' and inference ranks: who may share memory, who is near, and the names of
backends. Pure."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from reshard.core.errors import ReshardError, listed

# Names of the routes between two ranks: within a process, of the transports, and of what other inference ranks pass on.
LOCAL, CUDA_IPC, STAGED, NIXL, NCCL, RELAY = "local", "cuda_ipc", "staged", "nixl", "nccl", "relay"
BACKENDS = ("auto", CUDA_IPC, STAGED, NIXL, NCCL)


def check_backend(value: Any, name: str = "backend") -> str:
    """Return the backend. Raises ReshardError where what was given as `name` is no backend."""
    if value not in BACKENDS:
        raise ReshardError(f"{name} {value!r:.80} is not one of {listed(BACKENDS)}")
    return str(value)


class Peer(NamedTuple):
    """A member as others see it: its name, process and device; `gpu` is the GPU's UUID, empty on a CPU.

    `nixl` is the version of NIXL there, empty where it has none or no member needs it, and `rdma` says
    whether its host has RDMA that NIXL uses.
    """

    name: str
    host: str
    namespaces: str
    user: int
    pid: int
    device: str
    gpu: str
    nixl: str = ""
    rdma: bool = False


class Pair(NamedTuple):
    """A trainer's rank and an inference rank that reads from it.

    `exported`: other processes can map the trainer's memory. `mappable` is False where this
    inference rank has tried to, and could not. `shared`: several ranks want the same, and had better pass it on.
    """

    trainer: Peer
    engine: Peer
    same_process: bool
    exported: bool
    mappable: bool = True
    shared: bool = False

    @property
    def on_gpus(self) -> bool:
        """True where both compute on GPUs."""
        return self.trainer.device == self.engine.device == "cuda"

    @property
    def may_share_memory(self) -> bool:
        """True where both run on one host, and nothing keeps them from mapping each other's memory."""
        return self.trainer.host == self.engine.host and not why_apart(self.trainer, self.engine)

    @property
    def same_gpu(self) -> bool:
        """True where both use one GPU."""
        return self.on_gpus and self.trainer.gpu == self.engine.gpu


def why_apart(peer: Peer, other: Peer) -> str:
    """Return why two members of one host cannot map each other's memory; empty where they may, or
    where they are on two hosts."""
    if peer.host != other.host:
        return ""
    if peer.user != other.user:
        return "they run as two users"
    if peer.namespaces != other.namespaces:
        return (
            "they run in pid and ipc namespaces of their own, as containers do unless told to share them "
            "(--pid, --ipc)"
        )
    return ""


def unreadable(pair: Pair) -> str:
    """Return why no transport by memory carries the bytes of a pair, and what to do, for who has named one."""
    apart = why_apart(pair.trainer, pair.engine)
    why = f", since {apart}" if apart else ""
    return (
        f"{pair.trainer.name} and {pair.engine.name} cannot read each other's memory{why}: "
        f"use backend='auto', or 'nccl'"
    )


def always(_: Pair) -> bool:
    """Return True."""
    return True


@dataclass(frozen=True)
class Reach:
    """The pairs of ranks whose bytes a transport carries: those that it `reaches`.

    `name` is the one by which a user may choose it, `routes` are those that it carries, as reports name them.
    It may be chosen without being named for pairs that are `automatic`, by default all that it reaches, and
    stands in on GPUs for the transports that it `replaces` where they reach nothing. `sends` is False if the
    trainer's rank is only read. `relays`: of which pairs inference ranks pass on what several of them want
    (`reshard.refit.relays`), if no member says ``relays="always"``, which is of all; None: of none. `refusal` says why
    it does not carry a pair, and what to do, for who has named it.
    """

    name: str
    reaches: Callable[[Pair], bool]
    routes: frozenset[str]
    automatic: Callable[[Pair], bool] = always
    sends: bool = True
    replaces: frozenset[str] = frozenset()
    relays: Callable[[Pair], bool] | None = None
    refusal: Callable[[Pair], str] = unreadable


class Seat(NamedTuple):
    """The place where a member runs: its process, GPU (None on a CPU) and host."""

    process: Hashable
    gpu: Hashable
    host: Hashable


def distance(a: Seat, b: Seat) -> int:
    """Return 0 within a process, 1 on the same GPU, 2 on the same host, 3 between hosts."""
    if a.process == b.process:
        return 0
    if a.host != b.host:
        return 3
    return 1 if a.gpu is not None and a.gpu == b.gpu else 2


def nearest(ranks: Sequence[int], distance_to: Callable[[int], int], position: int, tp: int) -> int:
    """Return the index in `ranks` of a nearest one. Inference ranks, `position` in an engine of
    tensor parallel size `tp`, spread over equally near ones: those that need the same shard are
    replicas, `tp` apart, or neighbors within a replica.

    >>> [nearest([0, 4, 8], lambda rank: int(rank == 0), position, tp=2) for position in range(4)]
    [1, 2, 2, 1]
    """
    distances = [distance_to(rank) for rank in ranks]
    least = min(distances)
    near = [index for index, value in enumerate(distances) if value == least]
    return near[(position // tp + position % tp * max(1, len(near) // tp)) % len(near)]
