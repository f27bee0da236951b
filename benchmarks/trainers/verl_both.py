"""Both ways of a sync under verl, one after the other: imported in the actor
(``model.external_lib``), this refits, and then lets verl's own sync write the same weights once
more, which the extension `benchmarks.trainers.verl_watch.Refit` has overwritten before: after each
step of one training both ways' bits can be compared.
"""

import functools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from verl.workers.engine.megatron import MegatronEngineWithLMHead
from verl.workers.rollout import base as rollouts
from verl.workers.rollout.vllm_rollout import ServerAdapter

from benchmarks.trainers.grpo import write
from reshard.integrations.verl.plugin import ReshardMegatronEngine
from reshard.integrations.verl.vllm import ReshardServerAdapter


class Adapter(ReshardServerAdapter):
    """Both ways, one after the other."""

    engine: ReshardMegatronEngine

    async def update_weights(self, weights: Any, global_steps: int | None = None, **kwargs: Any) -> None:
        """A refit from the live shards, in host memory but for the first; once more, with tables that hold, and
        three times without digests; what verl loads for its own sync; its export of the same model through its own
        adapter; and what it offloads afterward. Each with the bytes that this rank's torch took of its GPU
        meanwhile. Last the floor, of which a refit's bytes are a part."""
        refit = functools.partial(super().update_weights, weights, global_steps=global_steps, **kwargs)
        with phase("refit"):
            await refit()
        with phase("again"):
            await refit()
        for _ in range(3):
            with phase("alone"):
                await refit()
        with phase("load"):
            exported, _ = MegatronEngineWithLMHead.get_per_tensor_param(self.engine, base_sync_done=True)
        with phase("stock"):
            await ServerAdapter.update_weights(self, exported, global_steps=global_steps, **kwargs)
        with phase("offload"):
            self.engine.to("cpu", model=True, optimizer=False, grad=False)
        copy_from_host()


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Note the seconds of a part of a sync on this rank of the trainer, and what it took of its GPU."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, began = torch.cuda.memory_allocated(), time.perf_counter()
    yield
    torch.cuda.synchronize()
    took = torch.cuda.max_memory_allocated() - before
    write(f"trainer{dist.get_rank()}", name, began, took=took)


def copy_from_host() -> None:
    """Note the seconds of a copy of 1 GiB of pinned memory to this rank's GPU, three times, all ranks at once."""
    host = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(host, device="cuda")
    for _ in range(3):
        dist.barrier()
        with phase("GiB"):
            there.copy_(host)


def remembering(engine: ReshardMegatronEngine, *args: Any, **kwargs: Any) -> tuple[Any, dict | None]:
    """The shards, as ever; the adapter asks the same engine for verl's export too."""
    Adapter.engine = engine
    return shards_of(engine, *args, **kwargs)


shards_of = ReshardMegatronEngine.get_per_tensor_param
ReshardMegatronEngine.get_per_tensor_param = remembering
rollouts._ROLLOUT_REGISTRY["vllm", "async"] = f"{__name__}.{Adapter.__name__}"
