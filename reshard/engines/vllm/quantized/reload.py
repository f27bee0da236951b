"""Layers whose weights vLLM processes after loading, each kind in its own way.

A refit fills a slab with what vLLM would have loaded, and vLLM's own processing makes of it what
the layer serves from, in the same memory as before. For layers that vLLM loads from a quantized
checkpoint, the slab holds plain weights, and a `LayerQuantizer` makes of them what vLLM would have
loaded.

The slab is one piece of memory for all layers, which take turns: a *round* is one layer, or as many
as fit.
"""

from collections.abc import Mapping
from math import prod
from typing import Any
from weakref import WeakKeyDictionary

import torch

from reshard.core.errors import ReshardError, listed
from reshard.device.memory import aligned, same_bits
from reshard.engines.vllm.compat import tensor_parallel_group
from reshard.engines.vllm.layers import experts_of
from reshard.engines.vllm.quantized.compressed import CompressedQuantizer
from reshard.engines.vllm.quantized.fp8_blocks import Fp8BlockQuantizer
from reshard.engines.vllm.quantized.layers import (
    NVFP4,
    STORED_BLOCK_METHODS,
    Compressed,
    compressed_of,
    inputs_as_loaded,
    instead_of,
    is_processed_again,
    plain_templates,
)
from reshard.engines.vllm.quantized.nvfp4 import Nvfp4Quantizer
from reshard.engines.vllm.quantized.processing import HANDLE, loading_templates, multiplied
from reshard.engines.vllm.quantized.recipes import Held, LayerQuantizer, parameter_like, reduce_max
from reshard.engines.vllm.quantized.reprocessing import Layer, put, reprocessed
from reshard.engines.vllm.weights.served import Served
from reshard.refit.copying.copies import wait_for_device

# The most that a round has, unless one layer alone is larger.
ROUND_BYTES = 128 << 20


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
            if is_processed_again(module)
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
        Raises ReshardError if they cannot."""
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

    def input_scales(self) -> dict[str, Mapping[str, torch.Tensor]]:
        """Return the scales of inputs that no trainer has and refits leave as they were loaded, by layer."""
        quantizers = [layer.quantizer for layers in self.rounds for layer in layers]
        return {one.name: one.input_scales for one in quantizers if one is not None and one.input_scales}

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
            with reprocessed(layer, largest, self.config) as (tensors, handles):
                for key, (served, processed) in tensors.items():
                    put(f"{layer.name}.{key}", served, processed)
            for owner, handle in handles:
                setattr(owner, HANDLE, handle)

    def mismatches(self, number: int, timeout: float) -> list[str]:
        """Return the tensors of a round's layers that differ from what vLLM makes of what lies in
        the slab.

        Ranks work together as in `process_round`.
        """
        differing = []
        for layer, largest in self._largest(number, timeout):
            with reprocessed(layer, largest, self.config) as (tensors, handles):
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
    """Raise ReshardError if weights hold infinities or NaN, which quantized ones would not show, or if other
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
    kinds = dict.fromkeys(STORED_BLOCK_METHODS, Fp8BlockQuantizer)
    kind = Nvfp4Quantizer if how.codes == NVFP4 else kinds.get(how.scheme, CompressedQuantizer)
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

    Raises ReshardError if the kernel needs them.
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
            f"vLLM did not note how {name} is loaded, which it processes after loading: {instead_of(module)}"
        )
    return templates


def _bytes(tensor: torch.Tensor) -> int:
    return prod(tensor.shape) * tensor.element_size()
