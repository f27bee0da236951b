"""Layers whose weights vLLM processes after loading, each kind in its own way.

A refit fills a slab with what vLLM would have loaded, and vLLM's own processing makes of it what
the layer serves from, in the same memory as before. For layers that vLLM loads from a quantized
checkpoint, the slab holds plain weights, and a `LayerQuantizer` makes of them what vLLM would have
loaded.

The slab is one piece of memory for all layers, which take turns: a *round* is one layer, or as many
as fit.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from reshard.core.errors import ReshardError, first_line, listed
from reshard.device.memory import aligned, same_bits
from reshard.engines.vllm.compat import tensor_parallel_group
from reshard.engines.vllm.layers import experts_of
from reshard.engines.vllm.quantized.compressed import CompressedQuantizer
from reshard.engines.vllm.quantized.layers import (
    NVFP4,
    Compressed,
    compressed_of,
    inputs_as_loaded,
    made_online,
    plain_templates,
)
from reshard.engines.vllm.quantized.nvfp4 import Nvfp4Quantizer
from reshard.engines.vllm.quantized.processing import (
    HANDLE,
    loaded_aside,
    loading_templates,
    multiplied,
    process,
    processing_objects,
    scales_in,
)
from reshard.engines.vllm.quantized.recipes import Held, LayerQuantizer, parameter_like, reduce_max
from reshard.engines.vllm.weights.served import Served
from reshard.refit.copies import wait_for_device

# The most that a round has, unless one layer alone is larger.
ROUND_BYTES = 128 << 20


class Layer(NamedTuple):
    """A layer's name and module, the parameters in the slab that a refit fills, by name, and what
    makes of these the parameters that vLLM loads; None where they are the same."""

    name: str
    module: torch.nn.Module
    loaded: dict[str, torch.Tensor]
    quantizer: LayerQuantizer | None


class Reloads:
    """The layers of a model that are processed anew at each refit, in rounds.

    `whole` says that the model holds weights now, which vLLM has loaded or a refit has brought.
    """

    def __init__(self, model: Served, config: Any, whole: bool) -> None:
        self.config = config
        self.rounds: list[list[Layer]] = []
        self.round_of: dict[str, int] = {}  # by the layer's name
        self.loaded: dict[str, torch.Tensor] = {}  # by the parameter's
        self.group: Any = None  # the ranks that find scales together
        self.even = all(experts.even for experts in map(experts_of, model.modules()) if experts is not None)
        plans = [
            (name, module, *_plan(name, module, config.model_config.dtype, whole))
            for name, module in model.named_modules
            if made_online(module) or compressed_of(module) is not None
        ]
        if not plans:
            return
        sizes = [
            sum(aligned(_bytes(template)) for template in templates.values()) for *_, templates, _ in plans
        ]
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
        for (name, module, templates, quantizer), start in zip(plans, starts, strict=True):
            layer = Layer(name, module, self._views(templates, start), quantizer)
            self.rounds[self.round_of[name]].append(layer)
            self.loaded |= {f"{name}.{key}": tensor for key, tensor in layer.loaded.items()}

    def share(self, held: Mapping[str, list[Held]]) -> None:
        """Find which scales ranks have to find together, from the parts that each layer holds.
        Raises ReshardError where they cannot."""
        quantizers = [
            layer.quantizer for layers in self.rounds for layer in layers if layer.quantizer is not None
        ]
        for quantizer in quantizers:
            quantizer.find_split(held.get(quantizer.name, []))
        if any(quantizer.split_matrices for quantizer in quantizers):
            self.group = tensor_parallel_group()
        if not self.even and any(quantizer.split_matrices for quantizer in quantizers):
            raise ReshardError(
                "not all of vLLM's ranks have as many experts, so that they cannot find scales together "
                "that are for parts on several of them: serve in bf16"
            )

    def keep_inputs(self) -> None:
        """Keep the scales of inputs that the layers have now, which came with a checkpoint that
        vLLM has loaded since."""
        for layer in (layer for layers in self.rounds for layer in layers):
            if layer.quantizer is not None:
                layer.quantizer.input_scales = _inputs(layer.name, layer.module, layer.quantizer.how, True)

    def _views(self, templates: Mapping[str, torch.Tensor], start: int) -> dict[str, torch.Tensor]:
        """Return parameters like these templates, in the slab from byte `start` on."""
        views = {}
        for name, template in templates.items():
            flat = self.slab[start : start + _bytes(template)].view(template.dtype)
            tensor = flat.as_strided(template.shape, template.stride(), flat.storage_offset())
            tensor.__class__ = template.__class__
            tensor.__dict__ = dict(template.__dict__)
            views[name] = tensor
            start += aligned(_bytes(template))
        return views

    def process_round(self, number: int, timeout: float) -> None:
        """Process what lies in the slab into the tensors that the layers of a round serve from, in
        place.

        Ranks that hold parts of what shares a scale do this together, and wait for each other no
        longer than `timeout` seconds.
        """
        for layer, largest in self._largest(number, timeout):
            with _processed(layer, largest, self.config) as (tensors, handles):
                for key, (served, processed) in tensors.items():
                    _put(f"{layer.name}.{key}", served, processed)
            for owner, handle in handles:
                setattr(owner, HANDLE, handle)

    def mismatches(self, number: int, timeout: float) -> list[str]:
        """Return the tensors of a round's layers that differ from what vLLM makes of what lies in
        the slab.

        Ranks work together as in `process_round`.
        """
        differing = []
        for layer, largest in self._largest(number, timeout):
            with _processed(layer, largest, self.config) as (tensors, handles):
                differing += [
                    f"{layer.name}.{key}"
                    for key, (served, processed) in tensors.items()
                    if not same_bits(served, processed)
                ]
                dtype = self.config.model_config.dtype
                differing += [
                    f"{layer.name}.{HANDLE}"
                    for owner, handle in handles
                    if not same_bits(multiplied(getattr(owner, HANDLE), dtype), multiplied(handle, dtype))
                ]
        return differing

    def _largest(self, number: int, timeout: float) -> list[tuple[Layer, dict[str, torch.Tensor]]]:
        """Return the layers of a round, each with the magnitudes that its scales are made of, by
        matrix, over all ranks."""
        layers = [
            (layer, {} if layer.quantizer is None else layer.quantizer.largest_magnitudes(layer.loaded))
            for layer in self.rounds[number]
        ]
        for _, largest in layers:
            for magnitudes in largest.values():
                # All ranks then find a NaN that one rank has.
                magnitudes.nan_to_num_(torch.inf, torch.inf, torch.inf)
        shared = [
            largest[key]
            for layer, largest in layers
            if layer.quantizer is not None
            for key in sorted(layer.quantizer.split_matrices)
        ]
        reduce_max(shared, self.group, timeout)
        _check_finite(layers, timeout)
        return layers


def _check_finite(layers: list[tuple[Layer, dict[str, torch.Tensor]]], timeout: float) -> None:
    """Raise ReshardError where weights hold infinities or NaN, which quantized ones would not show, or where other
    ranks' magnitudes are not there within `timeout` seconds."""
    named = [
        (f"{layer.name}.{key}", magnitudes)
        for layer, largest in layers
        for key, magnitudes in largest.items()
    ]
    if not named:
        return
    finite = torch.stack([magnitudes.isfinite().all() for _, magnitudes in named])
    if not wait_for_device(finite.device, timeout):
        raise ReshardError(f"other ranks of the engine sent no scales within {timeout:g} s")
    wrong = [name for (name, _), good in zip(named, finite.tolist(), strict=True) if not good]
    if wrong:
        raise ReshardError(
            f"the trainer's weights for {listed(wrong, 3)} hold infinities or NaN, and quantizing would "
            "spread or hide them"
        )


def _plan(
    name: str, module: torch.nn.Module, dtype: torch.dtype, whole: bool
) -> tuple[dict[str, torch.Tensor], LayerQuantizer | None]:
    """Return the parameters that a refit fills, and what makes of these the ones that vLLM loads."""
    how = compressed_of(module)
    templates = _templates(name, module, how)
    if how is None:
        return templates, None
    kind = Nvfp4Quantizer if how.codes == NVFP4 else CompressedQuantizer
    quantizer = kind(name, module, how, templates, _inputs(name, module, how, whole))
    plain = {key: templates[key] for key in quantizer.plain_names} | plain_templates(module)
    for key in how.weights if how.packed is None else ():
        plain[key] = parameter_like(
            torch.empty(templates[key].shape, dtype=dtype, device="meta"), templates[key]
        )
    return plain, quantizer


# The scales of a layer's input, as they were when it held weights that vLLM had loaded.
_known_inputs: WeakKeyDictionary[torch.nn.Module, dict[str, torch.Tensor]] = WeakKeyDictionary()


def _inputs(name: str, module: torch.nn.Module, how: Compressed, whole: bool) -> dict[str, torch.Tensor]:
    """Return the scales of a layer's input that came with a checkpoint; 1 where there are none and
    its kernel reads none.

    Raises ReshardError where the kernel needs them.
    """
    if not how.inputs:
        return {}
    if whole:
        _known_inputs[module] = inputs_as_loaded(module, how)
    known = _known_inputs.get(module, {})
    if how.reads_inputs and len(known) < len(how.inputs):
        raise ReshardError(
            f"{name} quantizes its input by a scale that comes with a checkpoint and that no trainer has, "
            "and this vLLM holds none that it has loaded: load the checkpoint once, or serve one whose "
            "activations are quantized dynamically"
        )
    one = torch.ones((), dtype=torch.float32, device=next(module.parameters()).device)
    return {key: known.get(key, one) for key in how.inputs}


def _templates(name: str, module: torch.nn.Module, how: Compressed | None) -> dict[str, torch.Tensor]:
    templates = loading_templates(module)
    # Packed codes may have another name once they are processed.
    held = {*module._parameters, *(() if how is None else how.inputs)}
    if how is not None and how.packed is not None:
        held |= {name for name in templates if name.startswith(how.weights)}
    templates = {key: template for key, template in templates.items() if key in held}
    if not templates or any(not template.is_contiguous() for template in templates.values()):
        raise ReshardError(
            f"vLLM did not note how {name} is loaded, which is quantized after loading: serve in bf16"
        )
    return templates


def _bytes(tensor: torch.Tensor) -> int:
    return prod(tensor.shape) * tensor.element_size()


def _put(name: str, served: torch.Tensor, processed: torch.Tensor) -> None:
    """Copy what vLLM has made to where it is served from, once where one number stands for many.

    Raises ReshardError where vLLM has made several different numbers of these.
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


class Processed(NamedTuple):
    """The tensors that a layer serves from, each with the one that vLLM's own processing makes, by
    name; and the handles in which kernels keep weights: the owner of each, and the handle that the
    processing makes."""

    tensors: dict[str, tuple[torch.Tensor, torch.Tensor]]
    handles: list[tuple[Any, Any]]


@contextmanager
def _processed(layer: Layer, largest: Mapping[str, torch.Tensor], config: Any) -> Iterator[Processed]:
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
            # A parameter of its own, which vLLM may move: ours stays in the slab.
            module._parameters[key] = parameter_like(tensor.data, tensor)  # type: ignore[assignment]
        try:
            process(module, config)
        except Exception as error:
            raise ReshardError(
                f"vLLM fails to process {layer.name} once more ({type(error).__name__}: "
                f"{first_line(error)}): serve in bf16"
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
                "more: serve in bf16"
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


_PARTS = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")


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
