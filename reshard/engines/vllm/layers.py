"""Properties of vLLM's layers that are no part of its interface: which experts a layer holds, and
whether it serves from them as they were loaded; for vLLM 0.24 to 0.33, as is
`reshard.engines.vllm.compat`. Those of quantized layers are in `reshard.engines.vllm.quantized.layers`.
"""

from typing import Any, NamedTuple

from reshard.core.extras import importing
from reshard.engines.vllm.compat import known

with importing("vllm"):
    import torch


class Experts(NamedTuple):
    """The experts of a layer.

    `tp` and `tp_rank` split each expert. `balanced` tells whether vLLM copies experts, and moves them by their load
    (EPLB), `total` how many experts there are, each copy counted, `placed` which of these are this rank's, in their
    order (None: all, in order), `even` whether all ranks have equally many.
    """

    tp: int
    tp_rank: int
    balanced: bool
    total: int
    placed: tuple[int, ...] | None
    even: bool


def experts_of(module: Any) -> Experts | None:
    """Return where a layer's experts lie, or None if it has none."""
    if not has_experts(module):
        return None
    with known("does not say where a layer's experts are as it did"):
        config = module.moe_config
        sizes, table = config.moe_parallel_config, module.expert_map_manager.expert_map
        placed = None
        if table is not None:
            by_place = sorted((local, expert) for expert, local in enumerate(table.tolist()) if local >= 0)
            placed = tuple(expert for _, expert in by_place)
        even = config.num_experts % sizes.ep_size == 0
        return Experts(
            sizes.tp_size, sizes.tp_rank, bool(sizes.enable_eplb), config.num_experts, placed, even
        )


def has_experts(module: Any) -> bool:
    """Tell whether a module holds routed experts."""
    return getattr(module, "moe_config", None) is not None and hasattr(module, "expert_map_manager")


def copies_of_experts(module: Any) -> Any:
    """Return the table of a layer whose experts vLLM copies and moves by their load (EPLB), from which the layer
    routes: the places of each expert's copies among those of all ranks ``[experts, most copies]``, -1 where there are
    fewer. None for other modules, and before vLLM has made one, when experts are where its loader has put them."""
    if not hasattr(module, "routed_experts"):
        return None
    with known("does not say where a layer's experts have moved as it did"):
        state = module.eplb_state
        return None if state is None else state.logical_to_physical_map


def has_cache(module: Any) -> bool:
    """Tell whether a module is an attention with a cache of keys and values."""
    return hasattr(module, "kv_cache_dtype")


def decays_of(module: Any) -> Any:
    """Return the parameter ``A`` of a Mamba layer, which vLLM's loader computes; None for other modules."""
    is_mamba = type(module).__name__ in ("MambaMixer", "MambaMixer2")
    return module.A if is_mamba and hasattr(module.A, "weight_loader") else None


def plain_method(method: Any) -> Any:
    """Return the method that a layer's weights were loaded for. Another one may run them, for
    adapters, or to exchange tokens among experts' ranks."""
    while hasattr(method, "old_quant_method"):
        method = method.old_quant_method
    return method


def expert_backend(method: Any) -> str | None:
    """Return the kernels that a layer's method has chosen for unquantized experts, which decides
    their order; None for others."""
    return getattr(getattr(method, "unquantized_backend", None), "name", None)


# Kernels for which vLLM rearranges unquantized experts once they are loaded, by its own operations on
# tensors: gate and up exchanged, or rows shuffled and columns in blocks.
REARRANGING_BACKENDS = ("FLASHINFER_CUTLASS", "FLASHINFER_TRTLLM")


def is_rearranged(module: Any) -> bool:
    """Tell whether a layer serves from unquantized experts in another order than they are loaded in, which vLLM's
    processing of the layer makes again of new weights."""
    method = getattr(module, "quant_method", None)
    return (
        type(method).__name__ == "UnquantizedFusedMoEMethod"
        and expert_backend(method) in REARRANGING_BACKENDS
    )


def exchanges_gate_and_up(module: Any) -> bool:
    """Tell whether a layer serves from the unquantized experts that are loaded, but with gate and up exchanged: vLLM's
    own function does that to numbers, and nothing else."""
    if not is_rearranged(module) or module.quant_method.unquantized_backend.name != "FLASHINFER_CUTLASS":
        return False
    experts, rows, columns = module.w13_weight.shape
    if rows % 2 or tuple(module.w2_weight.shape) != (experts, columns, rows // 2):
        return False
    numbers = torch.arange(rows * 2).view(1, rows, 2), torch.arange(rows).view(1, 2, rows // 2)
    try:
        from vllm.model_executor.layers.fused_moe.oracle import unquantized

        backend = module.quant_method.unquantized_backend
        made = unquantized.convert_to_unquantized_kernel_format(backend, module.moe_config, *numbers)
    except (ImportError, AttributeError, TypeError):
        return False  # a vLLM that does it elsewhere: its processing shows what it does
    exchanged = numbers[0].roll(rows // 2, 1), numbers[1]
    return len(made) == 2 and all(map(torch.equal, made, exchanged))


def copy_of_sinks(module: Any) -> tuple[Any, torch.Tensor, torch.Tensor | None] | None:
    """Return what runs a layer's attention, the sinks that it reads, and those that vLLM has noted as their source;
    None for layers without sinks."""
    run = getattr(module, "impl", None)
    sinks = getattr(run, "sinks", None)
    return (run, sinks, getattr(run, "_sinks_source", None)) if isinstance(sinks, torch.Tensor) else None


def always_packed(method: Any) -> bool:
    """Tell whether the method's experts are always packed, as in vLLM's build for the CPU from 0.28
    on."""
    return expert_backend(method) == "CPU" and not hasattr(method, "cpu_fused_moe")


def is_packed(module: Any, method: Any) -> bool:
    """Tell whether a layer serves from weights that the build for the CPU has packed."""
    experts = (
        expert_backend(method) == "CPU"
        and getattr(getattr(method, "cpu_fused_moe", None), "isa", None) != "none"
    )
    return experts or (hasattr(module, "cpu_linear") and not module.weight.numel())
