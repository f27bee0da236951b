"""The boxes that each rank reads for itself, where vLLM's own loader only copies."""

from reshard.core.extras import importing

with importing("vllm"):
    import torch
    from vllm.config import ModelConfig


from reshard.core.errors import ReshardError, listed
from reshard.engines.loading.stored_boxes import Reading, check_boxes
from reshard.engines.tracing.trace import Trace
from reshard.engines.vllm.load_format.opened import OpenedWeights
from reshard.engines.vllm.weights.stand_ins import trace_model
from reshard.engines.vllm.weights.supported import loading_method
from reshard.models.family import families


def plan_reading(
    model: torch.nn.Module, model_config: ModelConfig, opened: OpenedWeights, whole_tensors: bool
) -> Reading:
    """Return how to read the weights; `whole_tensors` if the user asks for them."""
    if whole_tensors:
        return Reading(None, "model_loader_extra_config asks for it")
    try:
        return Reading(_trace_boxes(model, model_config, opened))
    except ReshardError as error:
        return Reading(None, str(error))


def _trace_boxes(model: torch.nn.Module, model_config: ModelConfig, opened: OpenedWeights) -> Trace:
    """Return what vLLM's loader would copy where. Raises ReshardError if it would do anything
    else."""
    architectures = set(getattr(model_config.hf_config, "architectures", None) or ())
    known = {name for family in families().values() for name in (family.architecture, family.wrapped_in[0])}
    if not architectures <= known:
        raise ReshardError(f"{listed(sorted(architectures - known))} has no table")
    for name, module in model.named_modules():
        if method := loading_method(module):
            raise ReshardError(f"{name} is loaded by {method}")
    if opened.quantized:
        raise ReshardError("the config wants fp8 blocks")
    views = opened.views()
    trace = views.of_trace(trace_model(model, opened.stored(views)))
    check_boxes(model, trace, views)
    return trace
