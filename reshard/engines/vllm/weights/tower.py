"""The parts of a larger model beside its language model, where a vLLM serves all of them as they were loaded."""

from functools import partial
from typing import Any

import torch

from reshard.engines.placing.tower import Tower, find_tower
from reshard.engines.vllm.compat import driver_worker, in_config
from reshard.engines.vllm.names import VLLM
from reshard.engines.vllm.weights.rank import rank_of
from reshard.engines.vllm.weights.stand_ins import trace_model
from reshard.engines.vllm.weights.supported import loading_method
from reshard.models.model import Model
from reshard.models.published import published
from reshard.models.without_table import any_model


def tower_in(
    module: torch.nn.Module, prefixes: tuple[str, ...], model: Model, hf_config: dict[str, Any], config: Any
) -> Tower | None:
    """Return what a refit may bring of the parts of a vLLM's `model` that begin with these prefixes; None if it has
    none, and where `find_tower` finds none. That of a pipeline stage may be another's."""
    stages = config.parallel_config.pipeline_parallel_size
    has_tower = any(name.startswith(prefixes) for name, _ in module.named_parameters())
    if not prefixes or not (has_tower or stages > 1):
        return None
    if any(loading_method(each) for name, each in module.named_modules() if name.startswith(prefixes)):
        return None
    rank = rank_of(module, model, (), config)
    trace = partial(trace_model, module)
    return find_tower("vLLM", module, model, hf_config, config.model_config.dtype, rank, stages, trace)


def serves_tower(llm: Any) -> bool:
    """Return whether a refit may bring the parts beside the language model of an ``LLM``, or of an ``LLMEngine``, whose
    worker runs in this process; nothing is changed."""
    worker = driver_worker(llm)
    config = worker.vllm_config
    hf_config = published(config.model_config.hf_config.to_dict(), "vLLM's config")
    with in_config(config):
        model = any_model(hf_config, f"vLLM's config of {config.model_config.model}")
        prefixes = VLLM.tower_prefixes(model)
        return tower_in(worker.get_model(), prefixes, model, hf_config, config) is not None
