"""Which SGLang a refit can write to: one that serves from weights as they were loaded."""

from typing import Any

import torch

from reshard.core.errors import ReshardError
from reshard.engines.sglang import compat

# By these tokens are drafted by a model of its own, which a refit brings or leaves alone.
SEPARATE_DRAFTERS = ("EAGLE3",)
# Methods that serve from weights as they were loaded.
PLAIN_METHODS = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "UnquantizedFusedMoEMethod")


def check_supported(module: torch.nn.Module, arguments: Any) -> None:
    """Raise ReshardError if SGLang keeps weights in an order, a precision or a place that a refit
    cannot write, given its ``ServerArgs``."""
    if getattr(arguments, "weight_cache_mode", None) not in (None, "", "off", "none"):
        raise ReshardError(
            "this SGLang's weights belong to another process (--weight-cache-mode), which a refit cannot "
            "write: start it without that option"
        )
    drafts_by = getattr(arguments, "speculative_algorithm", None)
    if drafts_by is not None:
        _check_drafting(str(drafts_by), arguments)
    if getattr(arguments, "enable_lora", None):
        raise ReshardError(
            "this SGLang serves LoRA adapters (--enable-lora), which a refit does not support: start it "
            "without that option"
        )
    if compat.moves_experts(arguments) and getattr(arguments, "elastic_ep_backend", None) not in (
        None,
        "none",
    ):
        raise ReshardError(
            "this SGLang moves experts by their load, and changes how many ranks have them (--elastic-ep-backend), "
            "which a refit does not support: start it without that option, or without --enable-eplb"
        )
    if compat.interleaves_gate_and_up():
        raise ReshardError(
            "this SGLang interleaves the gate and up rows of experts (SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED), "
            "which a refit does not support: unset that variable"
        )
    for name, child in module.named_modules():
        reason = compat.frozen_copies(child)
        if reason is not None:
            raise ReshardError(
                f"{name or 'the model'} keeps copies of weights that SGLang does not make anew, and a refit does "
                f"not bring: {reason}"
            )
        if getattr(child, "quant_method", None) is not None:
            _check_method(name, child, arguments)
        experts = compat.experts_of(child)
        if experts is not None:
            _check_experts(name, child, experts)


def _check_drafting(algorithm: str, arguments: Any) -> None:
    if algorithm not in SEPARATE_DRAFTERS:
        raise ReshardError(
            f"this SGLang drafts tokens by another model (--speculative-algorithm), which a refit does not bring "
            f"for {algorithm}: start it without that option, or with EAGLE3"
        )
    if compat.has_dp_attention(arguments) or getattr(arguments, "enable_multi_layer_eagle", False):
        raise ReshardError(
            "this SGLang drafts tokens with data parallel attention or by several layers (--enable-dp-attention, "
            "--enable-multi-layer-eagle), which a refit does not support: start it without that option"
        )
    keeps = arguments.enable_weights_cpu_backup or arguments.enable_draft_weights_cpu_backup
    if arguments.enable_memory_saver and not keeps:
        raise ReshardError(
            "this SGLang would lose what its drafter does not get from a refit when it releases memory: start it "
            "with --enable-draft-weights-cpu-backup"
        )


def _check_method(name: str, module: torch.nn.Module, arguments: Any) -> None:
    method = type(module.quant_method).__name__
    if compat.is_cache(module):
        # Dummy weights make scales up.
        if str(arguments.kv_cache_dtype).startswith("fp8") and arguments.load_format == "dummy":
            raise ReshardError(
                f"{name} scales its fp8 keys and values by numbers that load_format='dummy' has made up, and "
                f"that no trainer has: load the checkpoint once, or start SGLang with --kv-cache-dtype auto"
            )
        return
    if method not in PLAIN_METHODS and compat.block_kernel(module) is None:
        raise ReshardError(
            f"{name} serves from weights that SGLang's {method} has changed, which a refit cannot write: serve "
            f"in bf16, or from fp8 blocks of 128x128"
        )
    if compat.packs_scales(module):
        raise ReshardError(
            f"{name} serves from scales that SGLang has packed for DeepGEMM, which a refit cannot write: start "
            f"it with --fp8-gemm-backend triton and --moe-runner-backend triton"
        )
    if getattr(module, "use_intel_amx_backend", False):
        raise ReshardError(f"{name} serves from weights that SGLang has packed for the CPU: use a GPU")


def _check_experts(name: str, module: torch.nn.Module, experts: compat.Experts) -> None:
    runner = compat.expert_runner(module)
    if runner != "triton":
        raise ReshardError(
            f"{name} is run by {runner}, which may keep experts in another order than loaded: start SGLang "
            f"with --moe-runner-backend triton"
        )
    if experts.fused_shared:
        raise ReshardError(
            f"{name} has shared experts among the routed ones, which a refit does not support: start SGLang "
            f"with --disable-shared-experts-fusion"
        )
