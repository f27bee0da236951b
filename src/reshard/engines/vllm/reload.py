"""Layers that vLLM quantises itself after loading, each in a way of its own: a refit fills a slab with what vLLM would
have loaded, and vLLM's own processing makes of it what the layer serves from, where that has always been.

The slab is one piece of memory for all layers. They take turns: a *round* is one layer, or as many as fit.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from typing import Any, NamedTuple

import torch

from reshard.core.errors import ReshardError, first_line
from reshard.engines.vllm.compat import (
    loaded_aside,
    loading_templates,
    made_online,
    process,
    processing_objects,
)

# Of a round, unless one layer alone is larger.
ROUND_BYTES = 128 << 20
ALIGNMENT = 256


class Layer(NamedTuple):
    """A layer's name and module, and by their names the parameters that it is loaded into, which lie in the slab."""

    name: str
    module: torch.nn.Module
    loaded: dict[str, torch.Tensor]


class Reloads:
    """The layers of a model that are processed anew at each refit, in rounds."""

    def __init__(self, model: torch.nn.Module, config: Any) -> None:
        self.config = config
        self.rounds: list[list[Layer]] = []
        self.round_of: dict[str, int] = {}  # by the layer's name
        self.loaded: dict[str, torch.Tensor] = {}  # by the parameter's
        plans = [
            (name, module, _templates(name, module))
            for name, module in model.named_modules()
            if made_online(module)
        ]
        if not plans:
            return
        sizes = [sum(_aligned(_bytes(one)) for one in templates.values()) for *_, templates in plans]
        limit = max(ROUND_BYTES, *sizes)
        starts, end = [], limit  # so that the first one begins a round
        for (name, *_), size in zip(plans, sizes, strict=True):
            if end + size > limit:
                self.rounds.append([])
                end = 0
            self.round_of[name] = len(self.rounds) - 1
            starts.append(end)
            end += size
        device = next(model.parameters()).device
        whole = max(start + size for start, size in zip(starts, sizes, strict=True))
        self.slab = torch.zeros(whole, dtype=torch.uint8, device=device)
        for (name, module, templates), start in zip(plans, starts, strict=True):
            layer = Layer(name, module, self._views(templates, start))
            self.rounds[self.round_of[name]].append(layer)
            self.loaded |= {f"{name}.{key}": tensor for key, tensor in layer.loaded.items()}

    def _views(self, templates: Mapping[str, torch.Tensor], start: int) -> dict[str, torch.Tensor]:
        """Parameters as these, in the slab from this byte on."""
        found = {}
        for name, template in templates.items():
            flat = self.slab[start : start + _bytes(template)].view(template.dtype)
            tensor = flat.as_strided(template.shape, template.stride(), flat.storage_offset())
            tensor.__class__ = template.__class__
            tensor.__dict__ = dict(template.__dict__)
            found[name] = tensor
            start += _aligned(_bytes(template))
        return found

    def take(self, number: int) -> None:
        """Make what the layers of a round serve from of what now lies in the slab, in place."""
        for layer in self.rounds[number]:
            with _processed(layer, self.config) as made:
                for now, wanted in made.values():
                    now.copy_(wanted)

    def unlike(self, number: int) -> list[str]:
        """The parameters of a round's layers that hold something else than vLLM makes of what now lies in the slab."""
        found = []
        for layer in self.rounds[number]:
            with _processed(layer, self.config) as made:
                found += [
                    f"{layer.name}.{key}" for key, (now, wanted) in made.items() if not _equal(now, wanted)
                ]
        return found


def _templates(name: str, module: torch.nn.Module) -> dict[str, torch.Tensor]:
    templates = loading_templates(module)
    found = {key: templates[key] for key, tensor in module._parameters.items() if key in templates}
    if not found or any(not one.is_contiguous() for one in found.values()):
        raise ReshardError(
            f"vLLM did not note how {name} is loaded, which is quantised after loading: serve in bf16"
        )
    return found


def _bytes(tensor: torch.Tensor) -> int:
    return prod(tensor.shape) * tensor.element_size()


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit."""
    return torch.equal(*(tensor.contiguous().view(-1).view(torch.uint8) for tensor in (one, other)))


@contextmanager
def _processed(layer: Layer, config: Any) -> Iterator[dict[str, tuple[torch.Tensor, torch.Tensor]]]:
    """By name the tensors that a layer serves from, and those that vLLM's own processing makes of what now lies in the
    slab. The layer itself is what it was when this ends: its tensors, and its kernels, whose workspaces CUDA graphs
    know by their addresses.

    Raises ReshardError where the processing fails, and where it leaves something other than tensors that differs.
    """
    module = layer.module
    parameters, before = dict(module._parameters), [(one, _kept(one)) for one in processing_objects(module)]
    aside = loaded_aside()
    serving = {key: one for key, one in parameters.items() if one is not None and key not in aside}
    try:
        for key in serving:
            del module._parameters[key]
        for key, tensor in layer.loaded.items():
            module._parameters[key] = tensor  # type: ignore[assignment]
        try:
            process(module, config)
        except Exception as error:
            raise ReshardError(
                f"vLLM fails to process {layer.name} once more ({type(error).__name__}: {first_line(error)}): serve in bf16"
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
                f"vLLM makes {layer.name}.{unfit[0]} of another shape or dtype when it processes it once more: serve in bf16"
            )
    finally:
        module._parameters.clear()
        module._parameters.update(parameters)
        for one, attributes in before:
            now = vars(one)
            for key in [key for key in now if key not in attributes and key not in _PARTS]:
                del now[key]
            now.update(attributes)
    yield {key: (now.data, new.data) for key, (now, new) in made.items() if new is not None}


_PARTS = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")


def _kept(one: Any) -> dict[str, Any]:
    """What an object has as attributes; of a module, besides its tensors and modules."""
    return {key: value for key, value in vars(one).items() if key not in _PARTS}


def _changed(
    name: str, before: list[tuple[Any, dict[str, Any]]]
) -> dict[str, tuple[torch.Tensor, torch.Tensor | None]]:
    """Tensors that are plain attributes, as they were and as they are made. Raises ReshardError for a number or a text
    that has another value now."""
    found: dict[str, tuple[torch.Tensor, torch.Tensor | None]] = {}
    for one, attributes in before:
        for key, value in attributes.items():
            now = vars(one).get(key, value)
            if now is value or value is None:
                continue
            if isinstance(value, torch.Tensor):
                found[key] = value, now if isinstance(now, torch.Tensor) else None
            elif isinstance(value, int | float | str) and now != value:
                raise ReshardError(
                    f"vLLM keeps {key} beside the weights of {name}, {value!r} before and {now!r} when it processes them "
                    f"once more, which a refit cannot change: serve in bf16"
                )
    return found
