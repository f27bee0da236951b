"""A layer that vLLM processes once more: what that makes, beside what the layer serves from, and the layer put
back as it was."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from reshard.core.errors import ReshardError, first_line
from reshard.device.memory import same_bits
from reshard.engines.vllm.layers import is_rearranged
from reshard.engines.vllm.quantized.layers import instead_of
from reshard.engines.vllm.quantized.processing import (
    HANDLE,
    loaded_aside,
    process,
    processing_objects,
    scales_in,
)
from reshard.engines.vllm.quantized.recipes import LayerQuantizer, parameter_like

# Attributes of a module that hold its tensors and modules.
_PARTS = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")


class Layer(NamedTuple):
    """A layer's name and module, the parameters in the slab that a refit fills, by name, and what
    makes of these the parameters that vLLM loads; None if they are the same."""

    name: str
    module: torch.nn.Module
    loaded: dict[str, torch.Tensor]
    quantizer: LayerQuantizer | None


class Processed(NamedTuple):
    """The tensors that a layer serves from, each with the one that vLLM's own processing makes, by
    name; and the handles in which kernels keep weights: the owner of each, and the handle that the
    processing makes."""

    tensors: dict[str, tuple[torch.Tensor, torch.Tensor]]
    handles: list[tuple[Any, Any]]


@contextmanager
def reprocessed(layer: Layer, largest: Mapping[str, torch.Tensor], config: Any) -> Iterator[Processed]:
    """Let vLLM process what lies in the slab, and yield the result alongside what the layer serves
    from.

    `largest` are the magnitudes that scales are made of. When this ends, the layer has its own
    tensors again, and its kernels, whose workspaces CUDA graphs know by their addresses. Raises
    ReshardError where the processing fails, or changes an attribute that is no tensor.
    """
    module, loaded = layer.module, layer.loaded
    if layer.quantizer is not None:
        try:
            loaded = layer.quantizer.parameters(loaded, largest)
        except (ReshardError, RuntimeError) as error:
            raise ReshardError(f"{layer.name} cannot be quantized ({first_line(error)})") from error
    parameters, before = dict(module._parameters), [(one, _kept(one)) for one in processing_objects(module)]
    aside = loaded_aside()
    serving = {key: one for key, one in parameters.items() if one is not None and key not in aside}
    try:
        for key in serving:
            del module._parameters[key]
        for key, tensor in loaded.items():
            # A parameter of its own, which vLLM may move: ours stays in the slab. Where vLLM rearranges experts of
            # the shape that they are served in, it writes into what they were loaded into.
            written = is_rearranged(module) and key in serving and serving[key].shape == tensor.shape
            values = tensor.data.clone() if written else tensor.data
            module._parameters[key] = parameter_like(values, tensor)  # type: ignore[assignment]
        try:
            process(module, config)
        except Exception as error:
            raise ReshardError(
                f"vLLM fails to process {layer.name} once more ({type(error).__name__}: "
                f"{first_line(error)}): {instead_of(module)}"
            ) from error
        made: dict[str, tuple[torch.Tensor, torch.Tensor | None]] = {
            key: (now, module._parameters.get(key)) for key, now in serving.items()
        }
        made |= _changed(layer.name, before)
        unfit = [
            key for key, (now, new) in made.items()
            if new is None or (new.shape, new.dtype) != (now.shape, now.dtype)
        ]  # fmt: skip
        if unfit:
            raise ReshardError(
                f"vLLM makes {layer.name}.{unfit[0]} of another shape or dtype when it processes it once "
                f"more: {instead_of(module)}"
            )
        handles = _handles(layer, before)
    finally:
        module._parameters.clear()
        module._parameters.update(parameters)
        for one, attributes in before:
            now = vars(one)
            for key in [key for key in now if key not in attributes and key not in _PARTS]:
                del now[key]
            now.update(attributes)
    yield Processed(
        {key: (now.data, new.data) for key, (now, new) in made.items() if new is not None}, handles
    )


def _handles(layer: Layer, before: list[tuple[Any, dict[str, Any]]]) -> list[tuple[Any, Any]]:
    """Return the handles that the processing has made, with their owners."""
    handles = []
    for one, attributes in before:
        handle = vars(one).get(HANDLE)
        if handle is not None and handle is not attributes.get(HANDLE):
            # It reads the scales where they were when it was made.
            handle.reads = [*layer.module._parameters.values()]
            handles.append((one, handle))
    return handles


def _kept(one: Any) -> dict[str, Any]:
    """Return the attributes of an object; for a module, without its tensors and modules."""
    return {key: value for key, value in vars(one).items() if key not in _PARTS}


def _changed(
    name: str, before: list[tuple[Any, dict[str, Any]]]
) -> dict[str, tuple[torch.Tensor, torch.Tensor | None]]:
    """Return the tensors among plain attributes, as they were and as the processing makes them.

    Raises ReshardError for a number or a text that has another value now.
    """
    changed: dict[str, tuple[torch.Tensor, torch.Tensor | None]] = {}
    for one, attributes in before:
        for key, value in attributes.items():
            now = vars(one).get(key, value)
            if now is value or value is None:
                continue
            if isinstance(value, torch.Tensor):
                changed[key] = value, now if isinstance(now, torch.Tensor) else None
            elif scales := scales_in(value):
                made = scales_in(now)
                changed |= {f"{key}.{which}": (one, made.get(which)) for which, one in scales.items()}
            elif isinstance(value, int | float | str) and now != value:
                raise ReshardError(
                    f"vLLM keeps {key} beside the weights of {name}, {value!r} before and {now!r} when it "
                    "processes them once more, which a refit cannot change: serve in bf16"
                )
    return changed


def put(name: str, served: torch.Tensor, processed: torch.Tensor) -> None:
    """Copy what vLLM has made to where it is served from, once where one number stands for many.

    Raises ReshardError if vLLM has made several different numbers of these.
    """
    for dim, stride in enumerate(served.stride()):
        if stride == 0 and served.shape[dim] > 1:
            first = processed.narrow(dim, 0, 1)
            if not same_bits(processed, first.expand_as(processed)):
                raise ReshardError(
                    f"vLLM keeps {name} as one number for many, and makes several when it processes it once "
                    "more: serve in bf16"
                )
            served, processed = served.narrow(dim, 0, 1), first
    served.copy_(processed)
