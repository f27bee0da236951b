"""Layers that vLLM quantizes itself after loading, each in a way of its own: a refit fills a slab with what vLLM would
have loaded, and vLLM's own processing makes of it what the layer serves from, where that has always been. Of layers that
it loads from a compressed checkpoint the slab holds plain weights, and `reshard.engines.vllm.compressed` makes of them
what it would have loaded.

The slab is one piece of memory for all layers. They take turns: a *round* is one layer, or as many as fit.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from reshard.core.errors import ReshardError, first_line, listed
from reshard.engines.vllm.compat import tensor_parallel_group
from reshard.engines.vllm.compressed import CompressedRecipe
from reshard.engines.vllm.layers import (
    NVFP4,
    Compressed,
    compressed_of,
    experts_of,
    inputs_as_loaded,
    made_online,
    plain_templates,
)
from reshard.engines.vllm.nvfp4 import Nvfp4Recipe
from reshard.engines.vllm.processing import (
    HANDLE,
    loaded_aside,
    loading_templates,
    multiplied,
    process,
    processing_objects,
    scales_in,
)
from reshard.engines.vllm.recipes import Held, Recipe, alike, find_together
from reshard.engines.vllm.weights.served import Served

# Of a round, unless one layer alone is larger.
ROUND_BYTES = 128 << 20
ALIGNMENT = 256


class Layer(NamedTuple):
    """A layer's name and module, by their names the parameters that it is filled with, which lie in the slab, and how those
    that it is loaded into are made of them; None where they are these."""

    name: str
    module: torch.nn.Module
    loaded: dict[str, torch.Tensor]
    recipe: Recipe | None


class Reloads:
    """The layers of a model that are processed anew at each refit, in rounds; `whole` says whether it holds the weights
    that vLLM has loaded, or a refit brought."""

    def __init__(self, model: Served, config: Any, whole: bool) -> None:
        self.config = config
        self.rounds: list[list[Layer]] = []
        self.round_of: dict[str, int] = {}  # by the layer's name
        self.loaded: dict[str, torch.Tensor] = {}  # by the parameter's
        self.group: Any = None  # the ranks that find scales together
        self.even = all(found.even for found in map(experts_of, model.modules()) if found is not None)
        plans = [
            (name, module, *_plan(name, module, config.model_config.dtype, whole))
            for name, module in model.named_modules
            if made_online(module) or compressed_of(module) is not None
        ]
        if not plans:
            return
        sizes = [sum(_aligned(_bytes(one)) for one in templates.values()) for *_, templates, _ in plans]
        limit = max(ROUND_BYTES, *sizes)
        starts, end = [], limit  # so that the first one begins a round
        for (name, *_), size in zip(plans, sizes, strict=True):
            if end + size > limit:
                self.rounds.append([])
                end = 0
            self.round_of[name] = len(self.rounds) - 1
            starts.append(end)
            end += size
        _, first = next(model.named_tensors())
        device = first.device
        slab = max(start + size for start, size in zip(starts, sizes, strict=True))
        self.slab = torch.zeros(slab, dtype=torch.uint8, device=device)
        for (name, module, templates, recipe), start in zip(plans, starts, strict=True):
            layer = Layer(name, module, self._views(templates, start), recipe)
            self.rounds[self.round_of[name]].append(layer)
            self.loaded |= {f"{name}.{key}": tensor for key, tensor in layer.loaded.items()}

    def share(self, held: Mapping[str, list[Held]]) -> None:
        """Find out, of the parts that each layer holds by its name, which scales ranks have to find together. Raises
        ReshardError where they cannot."""
        recipes = [layer.recipe for layers in self.rounds for layer in layers if layer.recipe is not None]
        for recipe in recipes:
            recipe.share(held.get(recipe.name, []))
        if any(recipe.split for recipe in recipes):
            self.group = tensor_parallel_group()
        if not self.even and any(recipe.split for recipe in recipes):
            raise ReshardError(
                "not all of vLLM's ranks have as many experts, so that they cannot find scales together that are for parts on "
                "several of them: serve in bf16"
            )

    def keep_inputs(self) -> None:
        """Keep the scales of inputs that the layers have now, as a checkpoint has brought them that vLLM has loaded since."""
        for layer in (layer for layers in self.rounds for layer in layers):
            if layer.recipe is not None:
                layer.recipe.kept = _inputs(layer.name, layer.module, layer.recipe.how, True)

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

    def process_round(self, number: int, timeout: float) -> None:
        """Make what the layers of a round serve from of what now lies in the slab, in place. Ranks that hold parts of what
        has one scale do this together, and wait for each other no longer than `timeout` seconds."""
        for layer, largest in self._largest(number, timeout):
            with _processed(layer, largest, self.config) as (made, handles):
                for key, (now, wanted) in made.items():
                    _put(f"{layer.name}.{key}", now, wanted)
            for owner, handle in handles:
                setattr(owner, HANDLE, handle)

    def mismatches(self, number: int, timeout: float) -> list[str]:
        """The parameters of a round's layers that hold something else than vLLM makes of what now lies in the slab; ranks
        as with `process_round`."""
        found = []
        for layer, largest in self._largest(number, timeout):
            with _processed(layer, largest, self.config) as (made, handles):
                found += [
                    f"{layer.name}.{key}" for key, (now, wanted) in made.items() if not same_bits(now, wanted)
                ]
                dtype = self.config.model_config.dtype
                found += [
                    f"{layer.name}.{HANDLE}"
                    for owner, handle in handles
                    if not same_bits(multiplied(getattr(owner, HANDLE), dtype), multiplied(handle, dtype))
                ]
        return found

    def _largest(self, number: int, timeout: float) -> list[tuple[Layer, dict[str, torch.Tensor]]]:
        """The layers of a round, each with the magnitudes that its scales are made of, by matrix, as all ranks have found
        them."""
        found = [
            (layer, {} if layer.recipe is None else layer.recipe.largest(layer.loaded))
            for layer in self.rounds[number]
        ]
        for _, largest in found:
            for magnitudes in largest.values():
                # What one rank has, all then find.
                magnitudes.nan_to_num_(torch.inf, torch.inf, torch.inf)
        together = [
            largest[key]
            for layer, largest in found
            if layer.recipe is not None
            for key in sorted(layer.recipe.split)
        ]
        find_together(together, self.group, timeout)
        _check_finite(found)
        return found


def _check_finite(found: list[tuple[Layer, dict[str, torch.Tensor]]]) -> None:
    """Raise ReshardError where weights have infinities or NaN, of which quantized ones would not tell."""
    named = [(f"{layer.name}.{key}", one) for layer, largest in found for key, one in largest.items()]
    if not named:
        return
    finite = torch.stack([one.isfinite().all() for _, one in named]).tolist()
    wrong = [name for (name, _), good in zip(named, finite, strict=True) if not good]
    if wrong:
        raise ReshardError(
            f"the trainer's weights for {listed(wrong, 3)} hold infinities or NaN, and quantizing would spread or hide them"
        )


def _plan(
    name: str, module: torch.nn.Module, dtype: torch.dtype, whole: bool
) -> tuple[dict[str, torch.Tensor], Recipe | None]:
    """The parameters that a layer is filled with, and how those that it is loaded into are made of them."""
    how = compressed_of(module)
    templates = _templates(name, module, how)
    if how is None:
        return templates, None
    kind = Nvfp4Recipe if how.codes == NVFP4 else CompressedRecipe
    recipe = kind(name, module, how, templates, _inputs(name, module, how, whole))
    plain = {key: templates[key] for key in recipe.plain} | plain_templates(module)
    for key in how.weights if how.packed is None else ():
        plain[key] = alike(torch.empty(templates[key].shape, dtype=dtype, device="meta"), templates[key])
    return plain, recipe


# The scales of a layer's input, as they were when it held weights that had been loaded.
_known_inputs: WeakKeyDictionary[torch.nn.Module, dict[str, torch.Tensor]] = WeakKeyDictionary()


def _inputs(name: str, module: torch.nn.Module, how: Compressed, whole: bool) -> dict[str, torch.Tensor]:
    """The scales of a layer's input that a checkpoint has brought; 1 where none has and its kernel reads none. Raises
    ReshardError where it needs them."""
    if not how.inputs:
        return {}
    if whole:
        _known_inputs[module] = inputs_as_loaded(module, how)
    known = _known_inputs.get(module, {})
    if how.reads_inputs and len(known) < len(how.inputs):
        raise ReshardError(
            f"{name} quantizes its input by a scale that comes with a checkpoint and that no trainer has, and this vLLM holds "
            f"none that it has loaded: load the checkpoint once, or serve one whose activations are quantized dynamically"
        )
    one = torch.ones((), dtype=torch.float32, device=next(module.parameters()).device)
    return {key: known.get(key, one) for key in how.inputs}


def _templates(name: str, module: torch.nn.Module, how: Compressed | None) -> dict[str, torch.Tensor]:
    templates = loading_templates(module)
    # Packed codes may be called otherwise once they are processed.
    held = {*module._parameters, *(() if how is None else how.inputs)}
    if how is not None and how.packed is not None:
        held |= {name for name in templates if name.startswith(how.weights)}
    found = {key: templates[key] for key in templates if key in held}
    if not found or any(not one.is_contiguous() for one in found.values()):
        raise ReshardError(
            f"vLLM did not note how {name} is loaded, which is quantized after loading: serve in bf16"
        )
    return found


def _bytes(tensor: torch.Tensor) -> int:
    return prod(tensor.shape) * tensor.element_size()


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _put(name: str, now: torch.Tensor, wanted: torch.Tensor) -> None:
    """Write what vLLM has made where it is served from, once where one number stands for many. Raises ReshardError where those
    are several now."""
    for dim, stride in enumerate(now.stride()):
        if stride == 0 and now.shape[dim] > 1:
            first = wanted.narrow(dim, 0, 1)
            if not same_bits(wanted, first.expand_as(wanted)):
                raise ReshardError(
                    f"vLLM keeps {name} as one number for many, and makes several when it processes it once more: serve in bf16"
                )
            now, wanted = now.narrow(dim, 0, 1), first
    now.copy_(wanted)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Tell whether two tensors are equal bit for bit."""
    return torch.equal(*(tensor.contiguous().view(-1).view(torch.uint8) for tensor in (one, other)))


class Processed(NamedTuple):
    """By name the tensors that a layer serves from, and those that vLLM's own processing makes; and what its kernels keep
    in handles of their own: whose they are, and those that the processing makes."""

    tensors: dict[str, tuple[torch.Tensor, torch.Tensor]]
    handles: list[tuple[Any, Any]]


@contextmanager
def _processed(layer: Layer, largest: Mapping[str, torch.Tensor], config: Any) -> Iterator[Processed]:
    """What a layer serves from, and what vLLM's own processing makes of what now lies in the slab, where `largest` are the
    magnitudes that scales are made of. The layer itself is what it was when this ends: its tensors, and its kernels, whose
    workspaces CUDA graphs know by their addresses.

    Raises ReshardError where the processing fails, and where it leaves something other than tensors that differs.
    """
    module, loaded = layer.module, layer.loaded
    if layer.recipe is not None:
        try:
            loaded = layer.recipe.made(loaded, largest)
        except (ReshardError, RuntimeError) as error:
            raise ReshardError(f"{layer.name} cannot be quantized ({first_line(error)})") from error
    parameters, before = dict(module._parameters), [(one, _kept(one)) for one in processing_objects(module)]
    aside = loaded_aside()
    serving = {key: one for key, one in parameters.items() if one is not None and key not in aside}
    try:
        for key in serving:
            del module._parameters[key]
        for key, tensor in loaded.items():
            # One of its own, which vLLM may let lie elsewhere: ours stays in the slab.
            module._parameters[key] = alike(tensor.data, tensor)  # type: ignore[assignment]
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
    """Handles that the processing has made, and whose they are."""
    found = []
    for one, attributes in before:
        handle = vars(one).get(HANDLE)
        if handle is not None and handle is not attributes.get(HANDLE):
            # It reads the scales where they were when it was made.
            handle.reads = [*layer.module._parameters.values()]
            found.append((one, handle))
    return found


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
            elif scales := scales_in(value):
                made = scales_in(now)
                found |= {f"{key}.{which}": (one, made.get(which)) for which, one in scales.items()}
            elif isinstance(value, int | float | str) and now != value:
                raise ReshardError(
                    f"vLLM keeps {key} beside the weights of {name}, {value!r} before and {now!r} when it processes them "
                    f"once more, which a refit cannot change: serve in bf16"
                )
    return found
