"""The trace of a model whose layers are alike, by one of them.

vLLM's loader is called for every expert of every layer, which takes most of a trace's time: a model of 48
layers with 128 experts has 18,432 of them. Layers whose modules are alike are loaded alike: of these, one is
traced with all its experts, the others with a few, and with everything else that they have.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from reshard.engines.vllm.layers import experts_of, loading_templates
from reshard.engines.vllm.trace import Canonical, Trace, TracedCopy, trace_load


class ExpertLayer(NamedTuple):
    """A layer with routed experts: what the names of its tensors begin with, and the published names of each
    expert's."""

    prefix: str
    experts: Mapping[int, Sequence[str]]


def trace_alike(
    model: torch.nn.Module, canonical: Canonical, layers: Iterable[ExpertLayer], held: Sequence[int]
) -> Trace:
    """What `trace_load` says of the whole model, `held` being the experts that this rank has.

    Of the experts of a layer that is like an earlier one only the first and the last held one, and the first
    of another rank, are shown to the loader. Their copies must be those of the earlier layer; where they are
    not, all of the model is traced. Raises what `trace_load` raises.
    """
    firsts: dict[tuple, ExpertLayer] = {}
    like: list[tuple[ExpertLayer, ExpertLayer]] = []
    for layer in layers:
        first = firsts.setdefault(_likeness(model, layer), layer)
        if first is not layer:
            like.append((layer, first))
    hidden = {
        name
        for layer, _ in like
        for expert in layer.experts.keys() - _shown(layer, held)
        for name in layer.experts[expert]
    }
    if not hidden:
        return trace_load(model, canonical)
    of_experts = {name for _, first in like for names in first.experts.values() for name in names}
    trace = trace_load(model, {name: what for name, what in canonical.items() if name not in hidden})
    expert_parameters = {copy.parameter for copy in trace.copies if copy.name in of_experts}
    if any(fill.parameter in expert_parameters for fill in trace.fills):
        return trace_load(model, canonical)
    copies: dict[str, list[TracedCopy]] = {}
    for copy in trace.copies:
        copies.setdefault(copy.name, []).append(copy)
    for layer, first in like:
        for expert, names in layer.experts.items():
            for name, other in zip(names, first.experts[expert], strict=True):
                expected = [_moved(copy, first.prefix, layer.prefix) for copy in copies.get(other, ())]
                if name in hidden:
                    trace.copies.extend(expected)
                elif copies.get(name, []) != expected:
                    return trace_load(model, canonical)
    return trace


def _shown(layer: ExpertLayer, held: Sequence[int]) -> set[int]:
    elsewhere = [expert for expert in layer.experts if expert not in held]
    return {*held[:1], *held[-1:], *elsewhere[:1]}


def _moved(copy: TracedCopy, before: str, after: str) -> TracedCopy:
    """The same copy in another layer."""
    parameter = after + copy.parameter.removeprefix(before)
    return copy._replace(parameter=parameter, name=after + copy.name.removeprefix(before))


def _likeness(model: torch.nn.Module, layer: ExpertLayer) -> tuple:
    """What decides how a layer is loaded: its modules, what they say of their experts, and their parameters'
    kinds, shapes, strides and dtypes."""
    shapes = tuple(layer.experts), tuple(map(len, layer.experts.values()))
    try:
        module = model.get_submodule(layer.prefix.removesuffix("."))
    except AttributeError:  # another rank's
        return shapes
    return (*shapes, *map(_kind, *zip(*module.named_modules(), strict=True)))


def _kind(path: str, module: torch.nn.Module) -> tuple:
    templates = loading_templates(module)
    tensors = []
    for name, now in (*module._parameters.items(), *module._buffers.items()):
        if now is not None:
            made = templates.get(name, now)
            tensors.append((name, made.__class__, made.shape, made.stride(), made.dtype))
    return path, module.__class__, experts_of(module), tuple(tensors)
