"""The ranks of a trainer, and the parameters that each holds. Arithmetic only: no process group is asked.

Ranks are numbered in Megatron's default order: pipeline stages follow each other; within a stage,
tensor-parallel ranks are neighbors and data parallelism goes around them; for experts, expert tensor
parallelism is innermost, then come expert and expert data parallelism.
"""

from collections.abc import Iterator
from typing import NamedTuple

from reshard.core.boxes import Box, whole
from reshard.core.placement import LocalTensor
from reshard.core.splits import split
from reshard.megatron.layout import MegatronLayout
from reshard.megatron.parameters import Parameter, parts_inside
from reshard.models.model import Model


class Ranks:
    """The ranks of a layout whose pipeline stages have `per_stage` ranks each, by default the fewest that
    they can have."""

    def __init__(self, model: Model, layout: MegatronLayout, per_stage: int | None = None) -> None:
        self.layout = layout
        self.per_stage = layout.ranks_per_stage(model) if per_stage is None else per_stage
        self.local_experts = model.num_experts // layout.ep
        stages = layout.stages(model)
        self.stage_of_layer = {
            layer: rank for rank, virtual in enumerate(stages) for stage in virtual for layer in stage.layers
        }
        stage_with = {
            part: next(
                (rank for rank, virtual in enumerate(stages) for stage in virtual if getattr(stage, part)), 0
            )
            for part in ("embedding", "output", "mtp")
        }
        self.output, self.mtp = stage_with["output"], stage_with["mtp"]
        # Megatron's ``has_final_layernorm_in_this_stage``.
        self.final_norm = self.stage_of_layer[model.num_layers - 1] if model.mtp_layers else self.output
        # A tied output layer and MTP layers have a copy of the embedding with them.
        copies = ([self.output] if model.tied else []) + ([self.mtp] if model.mtp_layers else [])
        self.embedding = list(dict.fromkeys([stage_with["embedding"], *copies]))

    def stages(self, p: Parameter) -> list[int]:
        """Return the pipeline stages that hold a parameter; the one that saves it comes first."""
        if p.mtp:
            return [self.mtp]
        if p.layer is not None:
            return [self.stage_of_layer[p.layer]]
        if p.name.startswith("embedding."):
            return self.embedding
        return [self.output if p.name.startswith("output_layer.") else self.final_norm]

    def within_stage(self, p: Parameter, index: int) -> range:
        """Return the ranks of a stage, counted from its first, that hold cut `index` of a parameter
        (see `cuts`)."""
        if p.expert is None:
            return range(index, self.per_stage, self.layout.tp if p.split else 1)
        etp, ep = self.layout.expert_tp, self.layout.ep
        return range(p.expert // self.local_experts * etp + index, self.per_stage, etp * ep)

    def first(self, p: Parameter, index: int = 0) -> int:
        """Return the rank that saves cut `index` of a parameter."""
        return self.stages(p)[0] * self.per_stage + self.within_stage(p, index).start

    def holders(self, p: Parameter, index: int) -> tuple[int, ...]:
        """Return all ranks that hold cut `index` of a parameter."""
        return tuple(
            stage * self.per_stage + rank for stage in self.stages(p) for rank in self.within_stage(p, index)
        )


class LiveShard(NamedTuple):
    """A shard as a trainer's ranks hold it in memory: the local tensor, and all ranks that have the same
    one."""

    tensor: LocalTensor
    ranks: tuple[int, ...]


def live_shards(ranks: Ranks, p: Parameter) -> list[LiveShard]:
    """Return the shards of a parameter in the memory of a trainer's ranks."""
    return [
        LiveShard(
            LocalTensor((p.prefix, p.name, p.layer, p.expert, box), box.lengths, *parts_inside(p, box)),
            ranks.holders(p, index),
        )
        for index, box in cuts(p, ranks.layout)
    ]


def cuts(p: Parameter, layout: MegatronLayout) -> Iterator[tuple[int, Box]]:
    """Yield (rank along the splitting axis, box of the parameter) for each chunk."""
    axis, dim = p.split or ("tp", 0)
    ranks = 1 if p.split is None else {"tp": layout.tp, "etp": layout.expert_tp}[axis]
    name = p.prefix + p.name
    halves = [
        split(whole(p.shape), dim, p.halves, half, "gate and up, which are", name) for half in range(p.halves)
    ]
    for rank in range(ranks):
        for half in halves:
            yield rank, split(half, dim, ranks, rank, f"--{axis}", name)
