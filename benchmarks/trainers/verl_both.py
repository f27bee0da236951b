"""Both ways of a sync under verl, one after the other: imported in the actor
(``model.external_lib``), this refits, and then lets verl's own sync write the same weights once
more, which the extension `benchmarks.trainers.verl_watch.Refit` has overwritten before: after each
step of one training both ways' bits can be compared.
"""

import time
from typing import Any

import torch
import torch.distributed as dist
from verl.workers.engine.megatron import MegatronEngineWithLMHead
from verl.workers.rollout import base as rollouts
from verl.workers.rollout.vllm_rollout import ServerAdapter

from benchmarks.trainers.grpo import write
from reshard.integrations.verl import ReshardMegatronEngine
from reshard.integrations.verl_vllm import ReshardServerAdapter


class Adapter(ReshardServerAdapter):
    """Both ways, one after the other."""

    engine: ReshardMegatronEngine

    async def update_weights(self, weights: Any, global_steps: int | None = None, **kwargs: Any) -> None:
        """A refit from the live shards, then verl's export of the same model through its own adapter."""
        who = f"trainer{dist.get_rank()}"
        began = time.perf_counter()
        await super().update_weights(weights, global_steps=global_steps, **kwargs)
        write(who, "refit", began)
        began = time.perf_counter()
        exported, _ = MegatronEngineWithLMHead.get_per_tensor_param(self.engine, base_sync_done=True)
        await ServerAdapter.update_weights(self, exported, global_steps=global_steps, **kwargs)
        torch.cuda.synchronize()
        write(who, "stock", began)


def remembering(engine: ReshardMegatronEngine, *args: Any, **kwargs: Any) -> tuple[Any, dict | None]:
    """The shards, as ever; the adapter asks the same engine for verl's export too."""
    Adapter.engine = engine
    return shards_of(engine, *args, **kwargs)


shards_of = ReshardMegatronEngine.get_per_tensor_param
ReshardMegatronEngine.get_per_tensor_param = remembering
rollouts._ROLLOUT_REGISTRY["vllm", "async"] = f"{__name__}.{Adapter.__name__}"
