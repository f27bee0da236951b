"""The fp32 sinks that vLLM's attention by FlashInfer, its default on Blackwell, reads: copies of a model's
bf16 sinks, made once these are loaded."""

from collections.abc import Mapping
from typing import Any

import torch

from reshard.core.errors import ReshardError
from reshard.device.memory import same_bits
from reshard.engines.vllm.weights.served import Served


def widened_sinks(model: Served, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return, by the layer's name, what runs the attention of the layers that read a copy of their sinks, and not these
    themselves, which are among a model's `tensors`.

    Raises ReshardError if vLLM has not noted what a copy is of.
    """
    live = {tensor.data_ptr() for tensor in tensors.values()}
    widened = {}
    for name, module in model.named_modules:
        run = getattr(module, "impl", None)
        sinks = getattr(run, "sinks", None)
        if not isinstance(sinks, torch.Tensor) or sinks.data_ptr() in live:
            continue
        source = getattr(run, "_sinks_source", None)
        if source is None or source.data_ptr() not in live:
            raise ReshardError(
                f"{name} reads a copy of its sinks that this vLLM does not make again of new weights: use vLLM 0.26 or "
                "a newer one, or pass attention_backend='TRITON_ATTN'"
            )
        widened[name] = run
    return widened


def widen_in_place(run: Any) -> None:
    """Let vLLM make the copy again, and keep it where it is: CUDA graphs hold its address."""
    before = run.sinks
    with torch.no_grad():
        run.process_weights_after_loading(run._sinks_source.dtype)
    if run.sinks is not before:
        before.copy_(run.sinks)
        run.sinks = before


def are_stale(run: Any) -> bool:
    """Tell whether the copy is not of the sinks that the layer has now."""
    return not same_bits(run.sinks, run._sinks_source.detach().to(run.sinks.dtype))
