"""The matrices that vLLM's latent attention (MLA) derives from the weights of ``kv_b_proj`` while
it processes them."""

from typing import Any, NamedTuple

import torch

from reshard.core.errors import ReshardError
from reshard.device.memory import same_bits
from reshard.engines.vllm.weights.served import Served

# What the names of derived matrices begin with.
DERIVED_PREFIX = "W_"


class DerivingAttention(NamedTuple):
    """An attention layer, and the dtype of the matrices that it derives."""

    module: Any
    dtype: torch.dtype


def deriving_attentions(model: Served) -> dict[str, DerivingAttention]:
    """Return, by name, the MLA layers whose derived matrices are copies of ``kv_b_proj``'s weights,
    not views of them."""
    attentions = {}
    for name, module in model.named_modules:
        absorbed, projection = getattr(module, "W_UV", None), getattr(module, "kv_b_proj", None)
        if not isinstance(absorbed, torch.Tensor) or projection is None:
            continue
        weight = getattr(projection, "weight", None)  # none if codes are packed
        viewed = None if weight is None else weight.untyped_storage().data_ptr()
        storages = {tensor.untyped_storage().data_ptr() for tensor in derived_tensors(module).values()}
        if storages != {viewed}:
            attentions[name] = DerivingAttention(module, absorbed.dtype)
    return attentions


def absorbing_attentions(model: Served) -> list[str]:
    """Return the names of the MLA layers that multiply by matrices made of ``kv_b_proj``'s weights,
    views of them or not."""
    return [
        name
        for name, module in model.named_modules
        if getattr(module, "kv_b_proj", None) is not None and derived_tensors(module)
    ]


def derive_in_place(attention: DerivingAttention) -> None:
    """Let vLLM derive the matrices again, and keep them where they are: CUDA graphs hold their
    addresses, and vLLM 0.24 and 0.25 put new ones in their places.

    Raises ReshardError if it makes one of another shape or dtype.
    """
    module, dtype = attention
    before = {key: (tensor, tensor.data) for key, tensor in derived_tensors(module).items()}
    with torch.no_grad():
        module.process_weights_after_loading(dtype)
    after = derived_tensors(module)
    for key, (tensor, data) in before.items():
        new = after.get(key)
        if new is None or (new.shape, new.dtype) != (data.shape, data.dtype):
            raise ReshardError(
                f"vLLM makes {key} of an attention layer of another shape or dtype when it processes it "
                f"once more: connect again"
            )
        if new.data_ptr() != data.data_ptr():
            data.copy_(new)
        tensor.data = data
        setattr(module, key, tensor)


def stale_matrices(attention: DerivingAttention) -> list[str]:
    """Derive the matrices again, and return the names of those that were different before."""
    before = {key: tensor.clone() for key, tensor in derived_tensors(attention.module).items()}
    derive_in_place(attention)
    after = derived_tensors(attention.module)
    return [key for key, tensor in before.items() if not same_bits(tensor, after[key])]


def derived_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the derived matrices by name, whether they are parameters, buffers or plain
    attributes."""
    attributes = {**vars(module), **module._parameters, **module._buffers}
    return {
        key: value
        for key, value in attributes.items()
        if key.startswith(DERIVED_PREFIX) and isinstance(value, torch.Tensor)
    }
