"""From which of the ranks that hold the same shard an inference rank reads."""

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple


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
    """The index in `ranks` of a nearest one. Inference ranks, `position` in an engine of tensor parallel size `tp`, share equally near
    ones out: those that need the same shard are replicas, `tp` apart, or neighbours within a replica.

    >>> [nearest([0, 4, 8], lambda rank: int(rank == 0), position, tp=2) for position in range(4)]
    [1, 2, 2, 1]
    """
    distances = [distance_to(rank) for rank in ranks]
    least = min(distances)
    near = [index for index, value in enumerate(distances) if value == least]
    return near[(position // tp + position % tp * max(1, len(near) // tp)) % len(near)]
