"""The trace of vLLM's loader: its ``load_weights`` run on stand-ins for its parameters
(`reshard.engines.tracing.trace`)."""

from collections.abc import Callable, Collection
from typing import Any

import torch

from reshard.engines.tracing import stand_ins
from reshard.engines.tracing.deduplicated import ExpertLayer
from reshard.engines.tracing.trace import Canonical, Trace, own_loader, trace_load
from reshard.engines.vllm.adapters.wrappers import without_adapters
from reshard.engines.vllm.layers import experts_of
from reshard.engines.vllm.quantized.layers import plain_templates
from reshard.engines.vllm.quantized.processing import bound_to, loading_templates

# Buffers that say which experts are this rank's: Llama 4's loader looks them up.
EXPERT_MAPS = ("expert_map", "_expert_map")


def trace_model(model: torch.nn.Module, canonical: Canonical, computed: Collection[str] = ()) -> Trace:
    """Return what ``model.load_weights`` would copy and fill, given canonical tensors (shape,
    dtype) without bytes; `computed` as for `reshard.engines.tracing.trace.trace_load`.

    Raises ReshardError, naming the parameter, if it computes something instead of copying, and if
    it fails.
    """
    in_place = stand_ins.stand_ins(model, loading_templates, plain_templates, bound_to, EXPERT_MAPS)
    load: Any = getattr(model.load_weights, "unwatched", model.load_weights)  # a trace writes no weights
    with without_adapters(model), in_place as parameters:
        stand_in: Any
        for name, stand_in in model.named_parameters():
            if name in computed:
                stand_in.weight_loader = _marked(stand_in.weight_loader)
        return trace_load("vLLM", load, canonical, parameters, computed)


def _marked(loader: Callable[..., None]) -> Callable[..., None]:
    """Return a parameter's loader as one that a trace knows to be run again of what a refit writes."""

    def load(*args: Any, **kwargs: Any) -> None:
        with own_loader():
            loader(*args, **kwargs)

    return load


def layer_fingerprint(model: torch.nn.Module, layer: ExpertLayer) -> tuple:
    """Return what decides how a layer is loaded; see `reshard.engines.tracing.stand_ins.layer_fingerprint`."""
    return stand_ins.layer_fingerprint(model, layer, experts_of, loading_templates)
