"""The trace of a model with many layers that are loaded alike, from a full trace of one of them.

An engine's loader is called for every expert of every layer, which takes most of a trace's time: a
model of 48 layers with 128 experts has 18,432 of them. Layers with the same fingerprint are loaded
alike: of these, one is traced with all its experts, the others with a few, and with everything else
that they have.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

from reshard.engines.tracing.trace import Canonical, Trace, TracedCopy


class ExpertLayer(NamedTuple):
    """A layer with routed experts: what its published names begin with, what the engine's begin
    with, and the published names of each expert's tensors, by expert."""

    published: str
    prefix: str
    experts: Mapping[int, Sequence[str]]


def trace_deduplicated(
    trace: Callable[[Canonical], Trace],
    canonical: Canonical,
    layers: Iterable[ExpertLayer],
    fingerprint: Callable[[ExpertLayer], Hashable],
    local_experts: Sequence[int],
) -> Trace:
    """Return what `trace` gives for all canonical tensors, while showing it fewer of them.

    Of a layer with the fingerprint of an earlier one, only the first and the last of this rank's
    `local_experts`, and the first of another rank, are shown to the loader. Their copies must be
    those of the earlier layer; if they are not, the whole model is traced. Raises what `trace`
    raises.
    """
    first_of: dict[Hashable, ExpertLayer] = {}
    repeated: list[tuple[ExpertLayer, ExpertLayer]] = []
    for layer in layers:
        first = first_of.setdefault(fingerprint(layer), layer)
        if first is not layer:
            repeated.append((layer, first))
    hidden = {
        name
        for layer, _ in repeated
        for expert in layer.experts.keys() - _shown_experts(layer, local_experts)
        for name in layer.experts[expert]
    }
    if not hidden:
        return trace(canonical)
    expert_tensors = {name for _, first in repeated for names in first.experts.values() for name in names}
    shown = trace({name: info for name, info in canonical.items() if name not in hidden})
    expert_parameters = {copy.parameter for copy in shown.copies if copy.name in expert_tensors}
    if any(fill.parameter in expert_parameters for fill in shown.fills):
        return trace(canonical)
    copies: dict[str, list[TracedCopy]] = {}
    for copy in shown.copies:
        copies.setdefault(copy.name, []).append(copy)
    for layer, first in repeated:
        for expert, names in layer.experts.items():
            for name, first_name in zip(names, first.experts[expert], strict=True):
                expected = [_in_layer(copy, first, layer) for copy in copies.get(first_name, ())]
                if name in hidden:
                    shown.copies.extend(expected)
                elif copies.get(name, []) != expected:
                    return trace(canonical)
    return shown


def _shown_experts(layer: ExpertLayer, local_experts: Sequence[int]) -> set[int]:
    remote = [expert for expert in layer.experts if expert not in local_experts]
    return {*local_experts[:1], *local_experts[-1:], *remote[:1]}


def _in_layer(copy: TracedCopy, before: ExpertLayer, after: ExpertLayer) -> TracedCopy:
    """Return the copy of one layer as it is in another."""
    parameter = after.prefix + copy.parameter.removeprefix(before.prefix)
    return copy._replace(parameter=parameter, name=after.published + copy.name.removeprefix(before.published))
