"""From which of the ranks that hold the same shard an inference rank reads, and how."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from reshard.core.deprecated import warn_renamed
from reshard.core.errors import ReshardError, listed

# The ways of a pair. What cannot be mapped is staged through memory that can, on the same host.
LOCAL, CUDA_IPC, STAGED, NCCL = "same process", "cuda_ipc", "staged", "nccl"
SENT = (STAGED, NCCL)  # the trainer's rank takes part; in the others it is only read
BACKENDS = ("auto", CUDA_IPC, STAGED, NCCL)
RENAMED_BACKENDS = {"peer": CUDA_IPC, "buckets": NCCL}


def check_backend(value: Any, name: str = "backend") -> str:
    """Return the backend's present name. Raises ReshardError where what was given as `name` is no backend."""
    if isinstance(value, str) and value in RENAMED_BACKENDS:
        warn_renamed(f"{name} {value!r}", repr(RENAMED_BACKENDS[value]))
        return RENAMED_BACKENDS[value]
    if value not in BACKENDS:
        raise ReshardError(f"{name} {value!r:.80} is not one of {listed(BACKENDS)}")
    return str(value)


def why_apart(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Why two members of one host cannot map each other's memory, by what they have said of themselves; empty where they may."""
    if one["host"] != other["host"]:
        return ""
    if one["user"] != other["user"]:
        return "they run as two users"
    if one["namespaces"] != other["namespaces"]:
        return "they run in pid and ipc namespaces of their own, as containers do unless told to share them (--pid, --ipc)"
    return ""


def way_between(
    trainer: Mapping[str, Any],
    engine: Mapping[str, Any],
    same_process: bool,
    backend: str,
    exported: bool,
    mappable: bool = True,
) -> str:
    """How bytes get from a trainer's rank to an inference rank, by what both have said of themselves
    (`agreement.hello`); `exported` says whether other processes can map the trainer's memory, and `mappable` is false where this one
    has tried to, and could not. Raises ReshardError where the backend that was asked for cannot."""
    if same_process:
        return LOCAL
    apart = why_apart(trainer, engine)
    shares = trainer["host"] == engine["host"] and not apart
    gpus = trainer["device"] == engine["device"] == "cuda"
    if backend == NCCL:
        # NCCL connects no two processes of one GPU.
        return STAGED if gpus and shares and trainer["gpu"] == engine["gpu"] else NCCL
    if backend in (CUDA_IPC, STAGED) and not (shares and (gpus or backend == STAGED)):
        why = f", since {apart}" if apart else ""
        raise ReshardError(
            f"{trainer['name']} and {engine['name']} cannot read each other's memory{why}: use backend='auto', or 'nccl'"
        )
    if backend == STAGED:
        return STAGED
    if not gpus or not shares or not mappable:
        return NCCL
    return CUDA_IPC if exported else STAGED


class Seat(NamedTuple):
    """Where a member runs: its process, GPU (None on a CPU) and host."""

    process: Hashable
    gpu: Hashable
    host: Hashable


def distance(a: Seat, b: Seat) -> int:
    """0 within a process, 1 on the same GPU, 2 on the same host, 3 between hosts."""
    if a.process == b.process:
        return 0
    if a.host != b.host:
        return 3
    return 1 if a.gpu is not None and a.gpu == b.gpu else 2


def nearest(ranks: Sequence[int], distance_to: Callable[[int], int], position: int, tp: int) -> int:
    """The index in `ranks` of a nearest one. Inference ranks, `position` in an engine of tensor parallel size
    `tp`, share equally near ones out: those that need the same shard are replicas, `tp` apart, or neighbors
    within a replica.

    >>> [nearest([0, 4, 8], lambda rank: int(rank == 0), position, tp=2) for position in range(4)]
    [1, 2, 2, 1]
    """
    distances = [distance_to(rank) for rank in ranks]
    least = min(distances)
    near = [index for index, value in enumerate(distances) if value == least]
    return near[(position // tp + position % tp * max(1, len(near) // tp)) % len(near)]
