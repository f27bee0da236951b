"""What a live vLLM model says of its rank."""

from collections.abc import Collection
from typing import Any

import torch

from reshard.core.errors import ReshardError
from reshard.engines.layout import EngineRank
from reshard.engines.placing.places import layers_of, outer_of
from reshard.engines.vllm.compat import tensor_parallel
from reshard.engines.vllm.layers import experts_of
from reshard.engines.vllm.layout import WHOLE_SHARED_EXPERTS
from reshard.engines.vllm.names import VLLM
from reshard.models.model import Model


def rank_of(module: torch.nn.Module, model: Model, tensors: Collection[str], config: Any) -> EngineRank:
    """Return what a live model says of its rank, given the names of its `tensors` and its
    ``VllmConfig``; its experts are those that vLLM's loader gives it, also where they have moved since
    (`reshard.engines.vllm.weights.moved_experts`).

    Raises ReshardError if it has another number of experts than the model.
    """
    tp, tp_rank = tensor_parallel()
    moe_tp, moe_tp_rank, local_experts = tp, tp_rank, tuple(range(model.num_experts))
    for name, layer in module.named_modules():
        experts = experts_of(layer)
        if experts is None:
            continue
        if model.num_experts and experts.total != model.num_experts and not experts.balanced:
            raise ReshardError(
                f"{name} has {experts.total} experts, and the model {model.num_experts}: a refit knows of copies only "
                f"where vLLM makes them (enable_eplb=True)"
            )
        moe_tp, moe_tp_rank = experts.tp, experts.tp_rank
        if experts.placed is not None:
            placed = (expert for expert in experts.placed if expert < experts.total)
            local_experts = tuple(expert % (model.num_experts or experts.total) for expert in placed)
        break  # all layers have the same
    # Some of vLLM's models have the output layer on every pipeline stage.
    layers, outer = layers_of(VLLM, model, tensors), outer_of(VLLM, model, tensors)
    splits = WHOLE_SHARED_EXPERTS if config.parallel_config.use_sequence_parallel_moe else {}
    return EngineRank(tp, tp_rank, moe_tp, moe_tp_rank, local_experts, layers, outer, splits)
