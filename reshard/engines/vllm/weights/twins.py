"""What a layer that vLLM has quantized, or arranged for a kernel, keeps beside its parameters: tensors, which are
handed on with these, and numbers, which have to be the same."""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import torch

from reshard.core.errors import ReshardError
from reshard.engines.placing.blocks import Blocks
from reshard.engines.placing.twins import digest_of
from reshard.engines.vllm.layers import expert_backend, plain_method
from reshard.engines.vllm.quantized.layers import kernel_of, method_of
from reshard.engines.vllm.quantized.processing import HANDLE, processing_objects, scales_in

# Which kernels write while they run: nothing of it is of the weights.
SCRATCH = ("workspace",)
CONFIG = "Config"  # ends the names of classes that hold what vLLM was started with
# End the names of those that say for what one layer's kernel was made.
CONFIGS_OF_KERNELS = ("LayerConfig", "FusedMoEQuantConfig")
PLAIN = bool | int | float | str | torch.dtype | Enum


def beside_parameters(layers: Mapping[str, torch.nn.Module]) -> dict[str, torch.Tensor]:
    """Return the tensors that layers, by name, and what holds their kernels keep beside parameters and buffers.

    Raises ReshardError if a kernel keeps weights where nothing else reads them.
    """
    tensors: dict[str, torch.Tensor] = {}
    for name, module in layers.items():
        for key, tensor in _tensors(name, module).items():
            if tensor.device == _device(module):
                tensors[key] = tensor
    return tensors


def methods_of_layers(layers: Mapping[str, torch.nn.Module]) -> dict[str, str]:
    """Return by which methods and kernels layers, by name, multiply, also those that serve from plain weights: kernels
    read these in an order of their own, which no tensor shows."""
    facts: dict[str, str] = {}
    for name, module in layers.items():
        method = plain_method(getattr(module, "quant_method", None))
        if method is not None:
            kernel = expert_backend(method)
            facts[name] = type(method).__name__ + (f" by {kernel}" if kernel else "")
    return facts


def facts_of_layers(
    layers: Mapping[str, torch.nn.Module],
    blocks: Mapping[str, Blocks],
    inputs: Mapping[str, Mapping[str, torch.Tensor]],
) -> dict[str, str]:
    """Return what has to be the same of layers, by name: their methods and kernels, the numbers and texts that these
    keep, tensors that are no GPU's, the scales of `blocks`, and the scales of inputs, which no trainer has."""
    facts: dict[str, str] = {}
    for name, module in layers.items():
        facts[name] = f"{method_of(module)} by {kernel_of(module)}"
        for owner, key, value in _attributes(name, module):
            if type(value).__name__.endswith(CONFIGS_OF_KERNELS):
                facts |= _facts_of_config(f"{owner}.{key}", value)
            elif _is_plain(value):
                facts[f"{owner}.{key}"] = repr(value)
        for key, tensor in _tensors(name, module).items():
            if tensor.device != _device(module):  # where no GPU reads it
                facts[key] = digest_of({key: tensor})
    for name, of_layer in blocks.items():
        facts[f"the scales of {name}"] = "powers of two" if of_layer.powers_of_two else "any numbers"
    return facts | {
        f"the scales of the input of {name}": digest_of(scales) for name, scales in inputs.items()
    }


def _is_plain(value: Any) -> bool:
    """Tell whether a value is a number, a text or a kind, or a list of such."""
    are_plain = isinstance(value, list | tuple) and all(isinstance(one, PLAIN) for one in value)
    return are_plain or isinstance(value, PLAIN)


def _facts_of_config(name: str, config: Any) -> dict[str, str]:
    """Return the fields of a kernel's config, and of vLLM's records in it, but for tensors."""
    facts: dict[str, str] = {}
    for key in (field.name for field in fields(config)) if is_dataclass(config) else ():
        value = getattr(config, key)
        if _is_plain(value):
            facts[f"{name}.{key}"] = repr(value)
        elif type(value).__module__.startswith("vllm."):
            facts |= _facts_of_config(f"{name}.{key}", value)
    return facts


def _tensors(name: str, module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors beside the parameters and buffers of a layer, by name."""
    tensors: dict[str, torch.Tensor] = {}
    for owner, key, value in _attributes(name, module):
        if key == HANDLE and value is not None:
            raise ReshardError(
                f"{name} keeps its weights in a form that only {kernel_of(module)} reads, so that they are not "
                "handed on: give a trainer"
            )
        if not isinstance(value, torch.Tensor):
            tensors |= {f"{owner}.{key}.{which}": one for which, one in scales_in(value).items()}
        elif not key.endswith(SCRATCH) and not value.is_meta:
            tensors[f"{owner}.{key}"] = value
    return tensors


def _device(module: torch.nn.Module) -> torch.device:
    """Return where a layer's weights are."""
    return next(module.parameters()).device


def _attributes(name: str, module: torch.nn.Module) -> Iterator[tuple[str, str, Any]]:
    """Yield the plain attributes of a layer and of what vLLM's processing of its weights writes to: the owner's name,
    the attribute's, and its value."""
    for place, one in enumerate(processing_objects(module)):
        kind = type(one).__name__
        if not kind.endswith(CONFIG):
            owner = f"{name} ({kind} {place})" if place else name
            # A copy of the attributes, since the engine serves meanwhile.
            yield from ((owner, key, value) for key, value in [*vars(one).items()])
