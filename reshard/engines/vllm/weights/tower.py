"""The parts of a larger model beside its language model, where a vLLM serves all of them as they were loaded."""

from functools import partial
from typing import Any

import torch

from reshard.engines.placing.tower import Tower, find_tower
from reshard.engines.vllm.weights.rank import rank_of
from reshard.engines.vllm.weights.stand_ins import trace_model
from reshard.engines.vllm.weights.supported import loading_method
from reshard.models.model import Model


def tower_in(
    module: torch.nn.Module, prefixes: tuple[str, ...], model: Model, hf_config: dict[str, Any], config: Any
) -> Tower | None:
    """Return what a refit may bring of the parts of a vLLM's `model` that begin with these prefixes; None if it has
    none, and where `find_tower` finds none."""
    if not prefixes or not any(name.startswith(prefixes) for name, _ in module.named_parameters()):
        return None
    if any(loading_method(each) for name, each in module.named_modules() if name.startswith(prefixes)):
        return None
    rank, stages = rank_of(module, model, (), config), config.parallel_config.pipeline_parallel_size
    trace = partial(trace_model, module)
    return find_tower("vLLM", module, model, hf_config, config.model_config.dtype, rank, stages, trace)
