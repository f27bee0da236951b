"""Uses of vLLM's LoRA that are no part of its interface, for vLLM 0.24 to 0.33: its manager of adapters, the
buffers in which its layers hold them, and its requests."""

from typing import Any, NamedTuple

from reshard.core.errors import ReshardError
from reshard.core.extras import importing
from reshard.engines.vllm.compat import known

with importing("vllm"):
    import torch


class Buffers(NamedTuple):
    """The memory of one slice of a layer's adapters: A ``[slots, experts, rank, in]``, B ``[slots, experts,
    out, rank]``; 1 for the experts of a layer that has none. With ``fully_sharded_loras`` A has this rank's
    share of the largest rank's rows, or B of the output's. `enabled` says by slot whether experts have an
    adapter, None for other layers."""

    a: torch.Tensor
    b: torch.Tensor
    enabled: torch.Tensor | None = None
    whole: bool = False  # every rank has the whole A and B of a layer whose weight is split


def manager_of(model: torch.nn.Module) -> Any:
    """Return vLLM's manager of a model's adapters. Raises ReshardError if it serves none."""
    manager = getattr(model, "lora_manager", None)
    if manager is None:
        raise ReshardError(
            "this vLLM serves no adapters: start it with enable_lora=True, and max_lora_rank no smaller than the rank"
        )
    return manager


def check_config(manager: Any) -> None:
    """Raise ReshardError for a setting of vLLM's LoRA that refits do not know."""
    for field in ("enable_moe_shared_loras", "enable_mixed_moe_lora_format"):
        if getattr(manager.lora_config, field, False):
            raise ReshardError(
                f"vLLM's {field} arranges adapters in a way that is not refitted: start it without"
            )


def buffers_of(layer: str, wrapper: Any) -> dict[str, list[Buffers]]:
    """Return the buffers of a layer that vLLM has wrapped, by slice, for each of its parameters; none of
    an embedding.

    Raises ReshardError for a wrapper that refits do not know.
    """
    with known("keeps adapters elsewhere"):
        if hasattr(wrapper, "w13_lora_a_stacked"):
            if type(wrapper).__name__ not in ("FusedMoEWithLoRA", "FusedMoE3DWithLoRA"):
                raise ReshardError(
                    f"vLLM has adapters of {layer} that are not known ({type(wrapper).__name__})"
                )
            w13 = zip(wrapper.w13_lora_a_stacked, wrapper.w13_lora_b_stacked, strict=True)
            w2 = zip(wrapper.w2_lora_a_stacked, wrapper.w2_lora_b_stacked, strict=True)
            return {
                "w13_weight": [Buffers(a, b, wrapper.adapter_enabled) for a, b in w13],
                "w2_weight": [Buffers(a, b, wrapper.adapter_enabled) for a, b in w2],
            }
        if type(wrapper).__name__ == "LogitsProcessorWithLoRA":
            return {"weight": [Buffers(wrapper.lora_a_stacked, wrapper.lora_b_stacked, whole=True)]}
        if not isinstance(wrapper.lora_a_stacked, tuple):
            return {}
        pairs = zip(wrapper.lora_a_stacked, wrapper.lora_b_stacked, strict=True)
        return {"weight": [Buffers(a, b) for a, b in pairs]}


def rank_of(wrapper: Any) -> int:
    """Return the tensor parallel rank by which a wrapped layer's adapters are split."""
    with known("splits adapters otherwise"):
        return int(wrapper.tp_rank)


def take_slot(manager: Any, identity: int) -> tuple[int, bool]:
    """Return the slot of an adapter id, as of one that was just used, and whether it was given that now: the slot
    of the id that was used longest ago, if none is free, as vLLM gives them."""
    with known("keeps its adapters' slots elsewhere"):
        active, ids = manager._active_adapters, manager.lora_index_to_id
        is_new = identity not in active
        if is_new:
            if None not in ids:
                if len(active.pinned_items) >= len(ids):
                    raise ReshardError(
                        f"all {len(ids)} slots of this vLLM have pinned adapters: give a larger max_loras"
                    )
                active.remove_oldest()
            active[identity] = None
            ids[ids.index(None)] = identity
            manager._last_mapping = None  # some versions look only at this to see that slots have changed
        active.touch(identity)
        return ids.index(identity), is_new


def free(manager: Any, identity: int) -> None:
    """Give the slot of an adapter id back, if it has one, as vLLM does when an adapter is removed."""
    with known("keeps its adapters' slots elsewhere"):
        manager.deactivate_adapter(identity)


def worker_manager_of(worker: Any) -> Any:
    """Return the object that loads adapters for a worker's requests; None if there is no worker."""
    return getattr(getattr(worker, "model_runner", None), "lora_manager", None)


def request_for(name: str, identity: int) -> Any:
    """Return vLLM's request for an adapter that no path has."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(lora_name=name, lora_int_id=identity, lora_path="in memory (reshard)")
