"""The modules that vLLM wraps around layers that adapters are added to, taken away for a moment."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def without_adapters(model: torch.nn.Module) -> Iterator[dict[str, torch.nn.Module]]:
    """Put the layers themselves in the places of vLLM's wrappers for LoRA adapters, under the names
    that vLLM's loader knows.

    Yields the wrappers, by these names. The wrappers return at the end.
    """
    prefixed = [module for module in model.modules() if getattr(module, "lora_base_layer_prefix", "")]
    wrapped = [
        (module, key, child)
        for module in list(model.modules())
        for key, child in module._modules.items()
        if child is not None and _has_adapters(child)
    ]
    try:
        for module, key, wrapper in wrapped:
            module._modules[key] = wrapper._modules["base_layer"]
        for module in prefixed:
            module.lora_base_layer_prefix = ""  # type: ignore[assignment]
        names = {module: name for name, module in model.named_modules()}
        yield {names[wrapper.base_layer]: wrapper for _, _, wrapper in wrapped}  # type: ignore[index]
    finally:
        for module, key, wrapper in wrapped:
            module._modules[key] = wrapper
        for module in prefixed:
            module.lora_base_layer_prefix = "base_layer."  # type: ignore[assignment]


def _has_adapters(module: torch.nn.Module) -> bool:
    """Tell whether a module is vLLM's wrapper of a layer that LoRA adapters are added to."""
    return type(module).__module__.startswith("vllm.lora.") and "base_layer" in module._modules
