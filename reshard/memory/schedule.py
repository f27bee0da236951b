"""The microbatches that are alive at each moment of Megatron-Core's pipeline schedules.

`forward_backward_pipelining_with[out]_interleaving` and `get_schedule_table` of Megatron-Core 0.19:
a rank runs its warm-up forwards, then a forward and a backward in turn, then the backwards that are
left. Between its forward and the end of its backward a microbatch keeps the activations of its
chunk.
"""

from functools import lru_cache
from typing import NamedTuple


class Moment(NamedTuple):
    """The forward or the backward of a chunk, with the microbatches that are alive in each chunk of
    the rank, its own included."""

    forward: bool
    chunk: int
    alive: tuple[int, ...]


def warmup(pp: int, rank: int, chunks: int, microbatches: int, group: int, extra: int = 0) -> int:
    """Return the number of forwards before the first backward (`get_pp_rank_microbatches`)."""
    if pp == 1:
        return 0
    n = pp - rank - 1 if chunks == 1 else 2 * (pp - rank - 1) + (chunks - 1) * group + extra
    return min(n, microbatches * chunks)


@lru_cache(maxsize=65536)
def moments(
    pp: int, rank: int, chunks: int, microbatches: int, group: int, extra: int = 0
) -> tuple[Moment, ...]:
    """Return the moments among which the fullest is, whatever the sizes of the chunks.

    Of moments of the same chunk and direction, those that another one exceeds in every chunk are left out.
    """
    # after two whole rounds of all chunks nothing new comes
    enough = 2 * group * (chunks + 1) + 2 * pp
    if microbatches > enough:
        microbatches = enough + (microbatches - enough) % group
    order = []
    for start in range(0, microbatches, group):
        n = min(group, microbatches - start)
        order += [chunk for chunk in range(chunks) for _ in range(n)]
    before = warmup(pp, rank, chunks, microbatches, group, extra)
    alive = [0] * chunks
    seen: set[Moment] = set()

    def forward(index: int) -> None:
        alive[order[index]] += 1
        seen.add(Moment(True, order[index], tuple(alive)))

    def backward(index: int) -> None:
        chunk = chunks - 1 - order[index]
        seen.add(Moment(False, chunk, tuple(alive)))
        alive[chunk] -= 1

    for index in range(before):
        forward(index)
    for index in range(before, len(order)):
        forward(index)
        backward(index - before)
    for index in range(len(order) - before, len(order)):
        backward(index)
    assert not any(alive)
    return tuple(
        m
        for m in sorted(seen)
        if not any(
            other != m
            and other.forward == m.forward
            and other.chunk == m.chunk
            and all(a >= b for a, b in zip(other.alive, m.alive, strict=True))
            for other in seen
        )
    )
