"""Which of vLLM's layers a refit can write to: those that serve from weights as they were loaded,
and those it can process again."""

from typing import Any

import torch

from reshard.core.errors import ReshardError
from reshard.engines.vllm.layers import (
    always_packed,
    exchanges_gate_and_up,
    expert_backend,
    has_cache,
    has_experts,
    is_packed,
    plain_method,
)
from reshard.engines.vllm.quantized.layers import (
    blocks_of,
    is_processed_again,
    kernel_of,
    method_of,
    stores_blocks,
)
from reshard.engines.vllm.weights.served import Served

# Methods that serve from weights as they were loaded.
PLAIN_METHODS = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "UnquantizedFusedMoEMethod")
CACHE_METHOD = "KVCacheMethod"  # ends the names of methods of an attention's cache
PLAIN_MOE_BACKENDS = ("TRITON", "BATCHED_TRITON", "OOT", "CPU")  # "CPU" only if it has not packed them


def check_supported(model: Served, config: Any) -> None:
    """Raise ReshardError if a layer keeps its weights in an order or precision that a refit cannot
    write, or the model computes something of all its weights, given the ``VllmConfig``."""
    for whole in (model.main, model.draft):
        if hasattr(whole, "process_weights_after_loading"):
            raise ReshardError(
                f"{type(whole).__name__} of this vLLM computes something of its weights once all are loaded "
                f"(process_weights_after_loading), which a refit does not have computed again: save the trainer's "
                f"model, and load it with vLLM's reload_weights"
            )
    for name, module in model.named_modules:
        method = plain_method(getattr(module, "quant_method", None))
        if has_cache(module) and _made_up_scales(config) and _has_other_scales(module):
            _check_cache_scales(name, config)
        if method is None:
            continue
        if type(method).__name__.endswith(CACHE_METHOD):
            _check_cache_scales(name, config)
        elif not _is_processed_again(module):
            _check_plain(name, module, method)


def loading_method(module: torch.nn.Module) -> str:
    """Return the name of the method by which vLLM loads a layer that is not plain weights; empty for
    others."""
    kind = type(getattr(module, "quant_method", None)).__name__
    is_plain = kind in ("NoneType", *PLAIN_METHODS) or kind.endswith(CACHE_METHOD)
    return "" if is_plain else kind


def _has_other_scales(attention: Any) -> bool:
    """Tell whether an attention's cache has scales other than 1, which not every class sets after dummy weights."""
    scales = (getattr(attention, f"_{of}_scale", None) for of in "kvq")
    return any(isinstance(scale, torch.Tensor) and not bool((scale == 1).all()) for scale in scales)


def _made_up_scales(config: Any) -> bool:
    """Tell whether scales of a cache may be dummy weights: those of an fp8 one come with a checkpoint, or are 1
    without."""
    is_fp8 = str(config.cache_config.cache_dtype).startswith("fp8")
    return is_fp8 and config.load_config.load_format == "dummy"


def _check_cache_scales(name: str, config: Any) -> None:
    if _made_up_scales(config):
        raise ReshardError(
            f"{name} scales its fp8 keys and values by numbers that load_format='dummy' has made up, and "
            f"that no trainer has: load the checkpoint once, or pass kv_cache_dtype='auto'"
        )


def _is_processed_again(module: torch.nn.Module) -> bool:
    """Tell whether a refit quantizes the weights of this layer itself, or has vLLM process them."""
    return blocks_of(module, module.quant_method) is not None or is_processed_again(module)


def _check_plain(name: str, module: torch.nn.Module, method: Any) -> None:
    if stores_blocks(module):
        option = "moe_backend" if has_experts(module) else "linear_backend"
        raise ReshardError(
            f"{name} serves from fp8 blocks that vLLM has changed for {kernel_of(module)}, which a refit cannot write: "
            f"pass {option}='triton'"
        )
    if type(method).__name__ not in PLAIN_METHODS:
        raise ReshardError(
            f"{name} serves from weights that {method_of(module)} has changed, which a refit cannot write "
            f"in place: serve in bf16, or let vLLM quantize it as it loads (quantization='fp8_per_block' and "
            f"the like)"
        )
    if always_packed(method):
        raise ReshardError(
            f"{name} serves from experts that vLLM's build for the CPU has packed, which a refit cannot "
            f"write, and from 0.28 on it has no other way: use vLLM 0.26 or an older one, or let it quantize "
            f"them as it loads (quantization='int8_per_channel_weight_only')"
        )
    if is_packed(module, method):
        raise ReshardError(
            f"{name} serves from weights that vLLM has packed for the CPU, which a refit "
            f"cannot write: make it inside `with "
            f"reshard.engines.vllm.compat.plain_weights():`, or start it with "
            f"worker_extension_cls='reshard.engines.vllm.worker.RefitExtension'"
        )
    backend = expert_backend(method)
    if backend is not None and backend not in PLAIN_MOE_BACKENDS and not exchanges_gate_and_up(module):
        raise ReshardError(
            f"{name} keeps its experts in the order of {backend}, which a refit cannot "
            f"write: pass moe_backend='triton'"
        )
