"""The fp32 sinks that vLLM's attention by FlashInfer, its default on Blackwell, reads: copies of a model's
bf16 sinks, made once these are loaded."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from reshard.core.errors import ReshardError
from reshard.device.memory import same_bits
from reshard.engines.vllm.layers import copy_of_sinks
from reshard.engines.vllm.weights.served import Served


class WidenedSinks(NamedTuple):
    """The sinks of a layer: the object that runs its attention, the fp32 copy that this reads, and the model's own."""

    run: Any
    widened: torch.Tensor
    source: torch.Tensor


def widened_sinks(model: Served, tensors: Mapping[str, torch.Tensor]) -> dict[str, WidenedSinks]:
    """Return the sinks of layers that read a copy of them, and not the model's own, which are among its `tensors`, by
    the layer's name.

    Raises ReshardError if vLLM has not noted what a copy is of.
    """
    live = {tensor.data_ptr() for tensor in tensors.values()}
    widened = {}
    for name, module in model.named_modules:
        of_layer = copy_of_sinks(module)
        if of_layer is None or of_layer[1].data_ptr() in live:
            continue
        run, sinks, source = of_layer
        if source is None or source.data_ptr() not in live:
            raise ReshardError(
                f"{name} reads a copy of its sinks that this vLLM does not make again of new weights: use vLLM 0.26 or "
                "a newer one, or pass attention_backend='TRITON_ATTN'"
            )
        widened[name] = WidenedSinks(run, sinks, source)
    return widened


def widen_in_place(sinks: WidenedSinks) -> None:
    """Let vLLM make the copy again, and keep it where it is: CUDA graphs hold its address."""
    run, widened, source = sinks
    with torch.no_grad():
        run.process_weights_after_loading(source.dtype)
    if run.sinks is not widened:
        widened.copy_(run.sinks)
        run.sinks = widened


def are_stale(sinks: WidenedSinks) -> bool:
    """Tell whether the copy is not of the sinks that the layer has now."""
    return not same_bits(sinks.widened, sinks.source.detach().to(sinks.widened.dtype))
