"""The parts of a larger model beside its language model, as a vLLM serves them and a transformers trainer has them."""

import logging
from typing import Any, NamedTuple

import torch

from reshard.core.errors import ReshardError
from reshard.engines.placing.taken import check_all_taken
from reshard.engines.tracing.canonical import canonical_tensors, stored_tensors
from reshard.engines.tracing.trace import Trace
from reshard.engines.vllm.weights.rank import rank_of
from reshard.engines.vllm.weights.stand_ins import trace_model
from reshard.engines.vllm.weights.supported import loading_method
from reshard.models.model import Model
from reshard.models.without_table import tower_of

log = logging.getLogger("reshard")


class Tower(NamedTuple):
    """The tensors beside the language model, as a `model` of their own: their published `names`, and the `trace` of
    vLLM's loader for them."""

    model: Model
    names: frozenset[str]
    trace: Trace


def find_tower(
    module: torch.nn.Module, prefixes: tuple[str, ...], model: Model, hf_config: dict[str, Any], config: Any
) -> Tower | None:
    """Return what a refit may bring of the parts of a vLLM's `model` that begin with these prefixes; None if it has
    none, if transformers has no class that says what they are, and if vLLM does not serve all of them as its loader
    copies them."""
    if not prefixes or not any(name.startswith(prefixes) for name, _ in module.named_parameters()):
        return None
    if any(loading_method(each) for name, each in module.named_modules() if name.startswith(prefixes)):
        return None
    try:
        tower = tower_of(model, hf_config)
        if tower is None:
            return None
        dtype = config.model_config.dtype
        trace = trace_model(module, stored_tensors(tower, dtype))
        rank = rank_of(module, model, (), config)
        stages = config.parallel_config.pipeline_parallel_size
        check_all_taken("vLLM", module, tower, rank, trace, stages)
    except ReshardError as error:
        log.info("no refit brings the parts of this vLLM beside the language model: %s", error)
        return None
    return Tower(tower, frozenset(canonical_tensors(tower, dtype)), trace)
