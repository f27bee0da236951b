"""Which canonical boxes a vLLM rank holds, and where they lie: by the rules of
`reshard.engines.vllm.layout`, checked against the trace of vLLM's own loader."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from reshard.core.errors import ReshardError, listed
from reshard.core.placement import Placement
from reshard.core.views import tensor_of
from reshard.engines.rules import PlacedTensors, place_by_rules, place_by_trace
from reshard.engines.trace import Trace
from reshard.engines.views import StoredViews
from reshard.engines.vllm.compat import tensor_parallel
from reshard.engines.vllm.layers import experts_of
from reshard.engines.vllm.layout import (
    VllmRank,
    drafter_placement,
    outer_rows,
    padded,
    vllm_placement,
)
from reshard.engines.vllm.names import in_vllm, is_known
from reshard.engines.vllm.weights.canonical import canonical_tensors, stored_views
from reshard.engines.vllm.weights.served import DRAFT
from reshard.models.model import Model


def rank_of(module: torch.nn.Module, model: Model, tensors: Collection[str], config: Any) -> VllmRank:
    """Return what a live model says of its rank, given the names of its `tensors` and its
    ``VllmConfig``.

    Raises ReshardError if it has redundant experts.
    """
    tp, tp_rank = tensor_parallel()
    moe_tp, moe_tp_rank, local_experts = tp, tp_rank, tuple(range(model.num_experts))
    for name, layer in module.named_modules():
        experts = experts_of(layer)
        if experts is None:
            continue
        if experts.redundant or experts.total != model.num_experts:
            raise ReshardError(
                f"{name} has redundant experts (EPLB), which a refit does not support: set enable_eplb=False"
            )
        moe_tp, moe_tp_rank = experts.tp, experts.tp_rank
        if experts.placed is not None:
            local_experts = tuple(expert for expert in experts.placed if expert < model.num_experts)
        break  # all layers have the same
    prefix = in_vllm(model, model.published_name(model.family.layers))
    layers = {int(name.removeprefix(prefix).split(".")[0]) for name in tensors if name.startswith(prefix)}
    # Some of vLLM's models have the output layer on every pipeline stage.
    outer = frozenset(row.hf for row in outer_rows(model) if in_vllm(model, row.hf) in tensors)
    sequence_parallel = config.parallel_config.use_sequence_parallel_moe
    return VllmRank(
        tp, tp_rank, moe_tp, moe_tp_rank, local_experts, tuple(sorted(layers)), outer, sequence_parallel
    )


@dataclass(frozen=True)
class Placer:
    """Places the canonical tensors of a `rank`.

    `tensors` are those that vLLM's loader writes into, by name; of those in `padded_layers` experts
    may be rounded up to whole fp8 blocks. `dtype` is the model's.
    """

    model: Model
    rank: VllmRank
    tensors: Mapping[str, torch.Tensor]
    padded_layers: Collection[str]
    dtype: torch.dtype

    def main(self, trace: Trace) -> PlacedTensors:
        """Return the tensors of the main model, given its loader's trace.

        The trace alone decides for a family whose names are not known, and where vLLM builds other
        modules than the rules know: DeepSeek's attention with ``VLLM_MLA_DISABLE=1``.
        """
        stray = sorted({copy.parameter for copy in trace.copies if copy.parameter not in self.tensors})
        if stray:
            raise ReshardError(
                f"vLLM's loader writes to {listed(stray, 3)}, which the running model no longer has"
            )
        if not is_known(self.model):
            return self._by_trace(trace)
        placement = vllm_placement(self.model, self.rank)
        if any(tensor_of(name) not in self.tensors for name, _ in placement.tensors):
            return self._by_trace(trace)
        return self._by_rules(placement, trace)

    def drafter(self, trace: Trace) -> PlacedTensors:
        """Return the tensors of a drafter of MTP layers, given its loader's trace; for what is
        around its transformer layers, the trace alone decides."""
        placement = drafter_placement(self.model, self.rank, DRAFT)
        by_rules = {name for name, _ in placement.tensors}
        if not is_known(self.model) or not by_rules <= self.tensors.keys():
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
        return place_by_rules("vLLM", placement, trace, self.tensors, len(self.rank.experts))

    def _by_trace(self, trace: Trace) -> PlacedTensors:
        views = self._views
        return place_by_trace("vLLM", views.of_trace(trace), views.matrices, self.tensors)

    @cached_property
    def _views(self) -> StoredViews:
        """The canonical tensors as views of those that vLLM's loader takes."""
        canonical = canonical_tensors(self.model, self.dtype, mtp=True)
        return stored_views(self.model, canonical)

    def _with_padding(self, placement: Placement) -> Placement:
        """Return the placement with the zeros by which vLLM rounds experts up to whole fp8
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
