"""Which canonical boxes a rank of a live engine holds, and where they lie: by the rules of
`reshard.engines.layout`, checked against the trace of the engine's own loader."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from reshard.core.errors import ReshardError, listed
from reshard.core.placement import Placement
from reshard.core.views import tensor_of
from reshard.engines.layout import EngineRank, outer_rows, padded, place
from reshard.engines.placing.names import EngineNames
from reshard.engines.placing.rules import PlacedTensors, place_by_rules, place_by_trace
from reshard.engines.tracing.canonical import canonical_tensors, stored_views
from reshard.engines.tracing.trace import Trace
from reshard.engines.tracing.views import StoredViews
from reshard.models.model import Model


def layers_of(names: EngineNames, model: Model, tensors: Collection[str]) -> tuple[int, ...]:
    """Return the layers that a live model has, given the names of its `tensors`."""
    prefix = names.prefixed(model, model.published_name(model.family.layers))
    layers = {int(name.removeprefix(prefix).split(".")[0]) for name in tensors if name.startswith(prefix)}
    return tuple(sorted(layers))


def outer_of(names: EngineNames, model: Model, tensors: Collection[str]) -> frozenset[str]:
    """Return the published names of the tensors outside the layers that a live model has, given the
    names of its `tensors`."""
    return frozenset(row.hf for row in outer_rows(model) if names.prefixed(model, row.hf) in tensors)


@dataclass(frozen=True)
class Placer:
    """Places the canonical tensors of a `rank` of an engine that has these `names`.

    `tensors` are those that the engine's loader writes into, by name; of those in `padded_layers`
    experts may be rounded up to whole fp8 blocks. `dtype` is the model's.
    """

    names: EngineNames
    model: Model
    rank: EngineRank
    tensors: Mapping[str, torch.Tensor]
    padded_layers: Collection[str]
    dtype: torch.dtype

    def main(self, trace: Trace) -> PlacedTensors:
        """Return the tensors of the main model, given its loader's trace.

        The trace alone decides for a family whose names are not known, and where an engine builds
        other modules than the rules know: DeepSeek's attention with ``VLLM_MLA_DISABLE=1``.
        """
        stray = sorted({copy.parameter for copy in trace.copies if copy.parameter not in self.tensors})
        if stray:
            raise ReshardError(
                f"{self.names.engine}'s loader writes to {listed(stray, 3)}, which the running model no longer has"
            )
        if not self.names.is_known(self.model):
            return self._by_trace(trace)
        placement = place(self.names, self.model, self.rank)
        if any(tensor_of(name) not in self.tensors for name, _ in placement.tensors):
            return self._by_trace(trace)
        return self._by_rules(placement, trace)

    def partly(self, placement: Placement, trace: Trace) -> PlacedTensors:
        """Return the tensors of a model that rules know in part. The loader's trace alone decides for the
        rest of the model, or for all of it if the model lacks something of the known part."""
        by_rules = {name for name, _ in placement.tensors}
        if not self.names.is_known(self.model) or not by_rules <= self.tensors.keys():
            return self._by_trace(trace)
        inner, outer = (
            Trace(
                [copy for copy in trace.copies if (copy.parameter in by_rules) is ruled],
                [fill for fill in trace.fills if (fill.parameter in by_rules) is ruled],
            )
            for ruled in (True, False)
        )
        return self._by_rules(placement, inner).joined(self._by_trace(outer))

    def _by_rules(self, placement: Placement, trace: Trace) -> PlacedTensors:
        placement, trace = self._with_padding(placement), self._views.of_trace(trace)
        return place_by_rules(self.names.engine, placement, trace, self.tensors, len(self.rank.experts))

    def _by_trace(self, trace: Trace) -> PlacedTensors:
        views = self._views
        return place_by_trace(
            self.names.engine, views.of_trace(trace, turned_too=True), views.matrices, self.tensors
        )

    @cached_property
    def _views(self) -> StoredViews:
        """The canonical tensors as views of those that the engine's loader takes."""
        canonical = canonical_tensors(self.model, self.dtype, mtp=True)
        return stored_views(self.model, canonical)

    def _with_padding(self, placement: Placement) -> Placement:
        """Return the placement with the zeros by which an engine rounds experts up to whole fp8
        blocks."""
        local_tensors = []
        for local in placement.tensors.values():
            name, expert = local.id
            if expert is not None and name.rpartition(".")[0] in self.padded_layers:
                shape = tuple(self.tensors[name].shape[1:])
                if shape != local.shape:
                    local = padded(local, shape, 2 if name.endswith("w13_weight") else 1)
            local_tensors.append(local)
        return Placement.of(placement.shapes, local_tensors)
