"""A trainer's ranks and an engine with four tensors of a few KB, between which deltas are sent."""

import os

import torch
import torch.distributed as dist

from reshard.core.boxes import Box
from reshard.core.placement import LocalTensor, Part, Placement
from reshard.device.memory import Region
from reshard.refit import RefitGroup, connect
from reshard.refit.changes.buckets import SentBuckets
from reshard.refit.engine import Engine
from reshard.refit.guard import Guard
from reshard.refit.trainer import Trainer
from tests.refit.test_transports import CONFIG
from tests.starting.ranks import caught

# What a trainer's rank holds [64, 96] of each tensor, and what the engine serves.
DTYPES = {
    "plain": (torch.bfloat16, torch.bfloat16),
    "narrowed": (torch.float32, torch.bfloat16),
    "widened": (torch.bfloat16, torch.float32),
    "single": (torch.float32, torch.float32),
}
SHAPE, PITCH = (64, 96), 100


class Shards(Trainer):
    """A trainer's rank with some rows of each tensor."""

    def __init__(self, rank: int) -> None:
        self.rank, self.random = rank, torch.Generator().manual_seed(rank)
        self.tensors = [torch.randn(SHAPE, generator=self.random).to(held) for held, _ in DTYPES.values()]

    @property
    def memory(self):
        return [Region(tensor, 0, SHAPE[1]) for tensor in self.tensors]

    def publish(self, model):
        box = Box((SHAPE[0] * self.rank, 0), SHAPE)
        return [LocalTensor(i, SHAPE, (Part(name, box, (0, 0)),)) for i, name in enumerate(DTYPES)]

    def check_model(self, model):
        pass

    def name_of(self, index):
        return [*DTYPES][index]

    def step(self, share: float) -> list[int]:
        """Flip a bit of the fraction in about this share of the elements; return how many of each tensor."""
        counts = []
        for tensor in self.tensors:
            chosen = torch.rand(SHAPE, generator=self.random) < share
            bits = tensor.view(torch.int16 if tensor.element_size() == 2 else torch.int32)
            bits[chosen] ^= 1 << 3 if tensor.element_size() == 2 else 1 << 19
            counts.append(int(chosen.sum()))
        return counts


class Served(Engine):
    """An engine's rank that serves both ranks' rows, within wider rows."""

    hf_config, tp = CONFIG, 1

    def __init__(self) -> None:
        self.guard, shape = Guard("test", False, "nothing"), (2 * SHAPE[0], SHAPE[1])
        self.wide = {
            name: torch.full((shape[0], PITCH), 7.0).to(served) for name, (_, served) in DTYPES.items()
        }
        self.regions = {name: Region(tensor, 2, PITCH) for name, tensor in self.wide.items()}
        self.placement = Placement(
            dict.fromkeys(DTYPES, shape),
            {name: LocalTensor(name, shape, (Part(name, Box((0, 0), shape), (0, 0)),)) for name in DTYPES},
        )

    def now(self) -> list[torch.Tensor]:
        for tensor in self.wide.values():
            assert tensor[:, :2].eq(7).all() and tensor[:, 2 + SHAPE[1] :].eq(7).all()
        return [tensor[:, 2 : 2 + SHAPE[1]].clone() for tensor in self.wide.values()]


def dying(rank: int, port: int) -> tuple[str, bool, int | None]:
    """Refit twice; in the second the last of two trainer's ranks ends, without a word, when it would find what
    changed. What the others say of that, and of the engine whether it is ready, and its version."""
    dist.init_process_group(
        "gloo", store=dist.HashStore(), rank=0, world_size=1
    )  # of this process, for `ranks`
    group = RefitGroup.join(f"127.0.0.1:{port}", rank, 3, timeout=30)
    side = Shards(rank) if rank < 2 else Served()
    link = connect(group, *((side, None) if rank < 2 else (None, side)), delta=True, bucket_bytes=2 << 20)
    assert not link.refit(version=1).delta.is_delta
    if rank == 1:
        SentBuckets.changes = lambda *_: os._exit(0)
    said = caught(lambda: link.refit(version=2))
    return said, side.ready if rank == 2 else False, side.version if rank == 2 else None
