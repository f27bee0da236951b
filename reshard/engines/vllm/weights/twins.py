"""What a layer that vLLM has quantized, or arranged for a kernel, keeps beside its parameters: tensors, which are
handed on with these, and numbers, which have to be the same."""

from collections.abc import Iterator
from enum import Enum
from typing import Any

import torch

from reshard.core.errors import ReshardError
from reshard.engines.vllm.quantized.layers import kernel_of, method_of
from reshard.engines.vllm.quantized.processing import HANDLE, processing_objects, scales_in

# Which kernels write while they run: nothing of it is of the weights.
SCRATCH = ("workspace",)
CONFIG = "Config"  # ends the names of classes that hold what vLLM was started with
PLAIN = bool | int | float | str | torch.dtype | Enum


def beside_parameters(name: str, module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors that a layer of this name, and what holds its kernels, keep beside parameters and buffers.

    Raises ReshardError if a kernel keeps weights where nothing else reads them.
    """
    tensors: dict[str, torch.Tensor] = {}
    for owner, key, value in _attributes(name, module):
        if key == HANDLE and value is not None:
            raise ReshardError(
                f"{name} keeps its weights in a form that only {kernel_of(module)} reads, so that they are not handed "
                "on: give a trainer"
            )
        if isinstance(value, torch.Tensor):
            if not key.endswith(SCRATCH) and not value.is_meta:
                tensors[f"{owner}.{key}"] = value
        else:
            tensors |= {f"{owner}.{key}.{which}": one for which, one in scales_in(value).items()}
    return tensors


def facts_of_layer(name: str, module: torch.nn.Module) -> dict[str, str]:
    """Return what has to be the same of a layer of this name: its method and its kernel, and the numbers and texts
    that they keep."""
    facts = {name: f"{method_of(module)} by {kernel_of(module)}"}
    for owner, key, value in _attributes(name, module):
        listed = isinstance(value, list | tuple) and all(isinstance(one, PLAIN) for one in value)
        if listed or isinstance(value, PLAIN):
            facts[f"{owner}.{key}"] = repr(value)
    return facts


def _attributes(name: str, module: torch.nn.Module) -> Iterator[tuple[str, str, Any]]:
    """Yield the plain attributes of a layer and of what vLLM's processing of its weights writes to: the owner's name,
    the attribute's, and its value."""
    for place, one in enumerate(processing_objects(module)):
        kind = type(one).__name__
        if not kind.endswith(CONFIG):
            owner = f"{name} ({kind} {place})" if place else name
            # A copy of the attributes, since the engine serves meanwhile.
            yield from ((owner, key, value) for key, value in [*vars(one).items()])
