"""Tensors that SGLang makes of weights and keeps beside them: the matrices that latent attention (MLA)
splits ``kv_b_proj`` into, copies of a router's weights in fp32, and a norm's weights with 1 added."""

from collections.abc import Iterator

import torch

from reshard.core.errors import ReshardError
from reshard.device.memory import same_bits
from reshard.engines.sglang import compat
from reshard.engines.sglang.compat import OF_ATTENTION, OF_NORM, OF_ROUTER


def derived_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the derived tensors by name, as far as the model has made them."""
    return {name: tensor for name, tensor in _of_modules(model) if isinstance(tensor, torch.Tensor)}


def _of_modules(model: torch.nn.Module) -> Iterator[tuple[str, object]]:
    for path, module in model.named_modules():
        keys = OF_ATTENTION if hasattr(module, "kv_b_proj") else (OF_ROUTER, OF_NORM)
        for key in keys:
            yield f"{path}.{key}", getattr(module, key, None)


def derive_in_place(model: torch.nn.Module) -> None:
    """Make the derived tensors anew, where they are: CUDA graphs hold their addresses.

    Raises ReshardError if SGLang puts one elsewhere.
    """
    before = derived_tensors(model)
    compat.derive(model)
    with torch.no_grad():
        for module in model.modules():
            copy = getattr(module, OF_ROUTER, None)
            if isinstance(copy, torch.Tensor):
                copy.copy_(module.weight)  # type: ignore[arg-type]
            plus_one = getattr(module, OF_NORM, None)
            if isinstance(plus_one, torch.Tensor):
                torch.add(module.weight, 1.0, out=plus_one)  # type: ignore[arg-type]
    after = derived_tensors(model)
    moved = [name for name, tensor in before.items() if after[name].data_ptr() != tensor.data_ptr()]
    if moved:
        raise ReshardError(f"SGLang puts {moved[0]} elsewhere when it derives it once more: connect again")


def stale_tensors(model: torch.nn.Module) -> list[str]:
    """Derive the tensors again, and return the names of those that were different before."""
    before = {name: tensor.clone() for name, tensor in derived_tensors(model).items()}
    derive_in_place(model)
    after = derived_tensors(model)
    return [name for name, tensor in before.items() if not same_bits(tensor, after[name])]
