"""The ranks of a trainer, and the parameters that each holds. Arithmetic only: no process group is asked.

Ranks are numbered in Megatron's default order: pipeline stages follow each other; within a stage,
tensor-parallel ranks are neighbors and data parallelism goes around them; for experts, expert tensor
parallelism is innermost, then come expert and expert data parallelism. GTP comes right before data parallelism.
"""

from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple

from reshard.core.boxes import Box, whole
from reshard.core.placement import LocalTensor
from reshard.core.splits import split
from reshard.megatron.gtp import ShardedRows, local_tensor_of_rows, padded_rows, ranks_of_weight
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

    def within_stage(self, p: Parameter, index: int, shard: int = 0) -> Sequence[int]:
        """Return the ranks of a stage, counted from its first, that hold cut `index` of a parameter, or that `shard`
        of GTP's of it (see `cuts`)."""
        shards = ranks_of_weight(p, self.layout.gtp_sizes)
        if p.expert is None:
            tp = self.layout.tp
            if not p.split and shards > 1:
                blocks = range(shard * tp, self.per_stage, shards * tp)
                return [rank for first in blocks for rank in range(first, first + tp)]
            return range(index + shard * tp, self.per_stage, (tp if p.split else 1) * shards)
        etp, ep = self.layout.expert_tp, self.layout.ep
        first = p.expert // self.local_experts * etp + index
        return range(first + shard * etp * ep, self.per_stage, etp * ep * shards)

    def first(self, p: Parameter, index: int = 0, shard: int = 0) -> int:
        """Return the rank that saves cut `index` of a parameter."""
        return self.stages(p)[0] * self.per_stage + self.within_stage(p, index, shard)[0]

    def holders(self, p: Parameter, index: int, shard: int = 0) -> tuple[int, ...]:
        """Return all ranks that hold cut `index` of a parameter."""
        within = self.within_stage(p, index, shard)
        return tuple(stage * self.per_stage + rank for stage in self.stages(p) for rank in within)


class Cut(NamedTuple):
    """A chunk of a parameter: the ranks along the splitting axis and of GTP, and the box of the key, whose own dims
    are `shape`. `rows` says which rows of the parameter these are, under GTP."""

    at_axis: int
    shard: int
    shape: tuple[int, ...]
    box: Box
    rows: ShardedRows | None = None

    def tensor(self, p: Parameter, id: Any, holder: Hashable = 0) -> LocalTensor:
        """Return the chunk of a parameter as a local tensor."""
        if self.rows is None:
            return LocalTensor(id, self.box.lengths, *parts_inside(p, self.box), holder=holder)
        return local_tensor_of_rows(p, id, self.rows, *self.box)._replace(holder=holder)


class LiveShard(NamedTuple):
    """A shard as a trainer's ranks hold it in memory: the local tensor, and all ranks that have the same
    one."""

    tensor: LocalTensor
    ranks: tuple[int, ...]


def live_shards(ranks: Ranks, p: Parameter) -> list[LiveShard]:
    """Return the shards of a parameter in the memory of a trainer's ranks."""
    return [
        LiveShard(
            cut.tensor(p, (p.prefix, p.name, p.layer, p.expert, cut.box)),
            ranks.holders(p, cut.at_axis, cut.shard),
        )
        for cut in cuts(p, ranks.layout)
    ]


def cuts(p: Parameter, layout: MegatronLayout) -> Iterator[Cut]:
    """Yield each chunk of a parameter."""
    axis, dim = p.split or ("tp", 0)
    ranks = 1 if p.split is None else {"tp": layout.tp, "etp": layout.expert_tp}[axis]
    name, shards = p.prefix + p.name, ranks_of_weight(p, layout.gtp_sizes)
    halves = [
        split(whole(p.shape), dim, p.halves, half, "gate and up, which are", name) for half in range(p.halves)
    ]
    for rank in range(ranks):
        boxes = [split(half, dim, ranks, rank, f"--{axis}", name) for half in halves]
        if shards == 1:
            yield from (Cut(rank, 0, p.shape, box) for box in boxes)
            continue
        rows = padded_rows(p, 1 if dim else ranks, shards)
        for shard in range(shards):
            for half, box in enumerate(boxes):
                start = (rows.offset(0 if dim else rank, shard, half), *box.offsets[1:])
                lengths = (rows.chunk_rows, *box.lengths[1:])
                yield Cut(rank, shard, (rows.key_rows, *p.shape[1:]), Box(start, lengths), rows)
