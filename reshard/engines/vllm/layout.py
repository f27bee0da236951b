"""The placement of a model on each vLLM rank, by arithmetic alone.

vLLM splits experts over TP times DP, or, with expert parallelism, distributes them whole.
"""

from collections import defaultdict
from dataclasses import dataclass

from reshard.core.errors import ReshardError
from reshard.core.placement import Placement
from reshard.engines.layout import (
    WITHOUT_PARAMETER,
    EngineLayout,
    EngineRank,
    Expansion,
    Split,
    check_redundant,
    experts_of_rank,
    layers_of_stage,
    outer_of_stage,
)
from reshard.engines.vllm.names import VLLM
from reshard.megatron.stages import divisors, numbers
from reshard.models.model import Model
from reshard.models.tables import Row

# Where MoE layers split tokens over TP, every rank has all of the shared experts.
WHOLE_SHARED_EXPERTS = {"shared_experts": Split(1, 0)}


@dataclass(frozen=True)
class VllmLayout(EngineLayout):
    """vLLM's parallel sizes: its ``tensor_parallel_size``, ``pipeline_parallel_size``,
    ``data_parallel_size``, ``enable_expert_parallel`` and, with `round_robin`,
    ``expert_placement_strategy="round_robin"`` (with DP vLLM 0.26 heeds that only on the DeepEP
    low-latency and NIXL backends). `redundant_experts` are ``num_redundant_experts`` of its ``eplb_config``, where
    vLLM loads them."""

    names = VLLM
    share_holds_all = True  # ``gpu_memory_utilization``

    dp: int = 1
    expert_parallel: bool = False
    round_robin: bool = False
    redundant_experts: int = 0

    @property
    def world_size(self) -> int:
        """Return how many ranks there are: DP times PP times TP."""
        return self.dp * self.pp * self.tp

    def __str__(self) -> str:
        experts = " EP" + " round-robin" * self.round_robin if self.expert_parallel else ""
        experts += f" +{self.redundant_experts}" if self.redundant_experts else ""
        sizes = " ".join(
            f"{name}{n}" for name, n in (("TP", self.tp), ("PP", self.pp), ("DP", self.dp)) if n > 1
        )
        return (sizes or "TP1") + experts

    def check(self, model: Model) -> None:
        """Raise ReshardError if vLLM would not start at these sizes."""
        heads = model.symbols["NQ"]
        groups = model.symbols.get("NG", heads)  # of Mamba layers
        keys = heads if VLLM.family(model).repeats_keys else model.symbols.get("NKV", heads)
        groups_name = model.family.symbols.get("NG", "")
        for size, what in ((heads, f"{heads} attention heads"), (groups, f"{groups_name} {groups}")):
            if size % self.tp:
                fitting = numbers([n for n in divisors(heads) if groups % n == 0 and n <= keys])
                raise ReshardError(f"vLLM's tp {self.tp} does not divide {what}; sizes that do: {fitting}")
        if self.tp > keys:
            raise ReshardError(
                f"vLLM's tp {self.tp} is above the {keys} key heads of a {model.family.architecture}, which "
                f"vLLM does not repeat for it: use tp {keys} or less"
            )
        if self.pp > model.num_layers:
            raise ReshardError(f"vLLM's pp {self.pp} is more than the model's {model.num_layers} layers")
        if self.expert_parallel and not model.num_experts:
            raise ReshardError(
                f"expert parallelism needs experts, which a {model.family.name} model "
                f"without them does not have"
            )
        check_redundant(
            "vLLM", model, self.redundant_experts, self.tp * self.dp if self.expert_parallel else 1
        )
        if self.expert_parallel and self.tp * self.dp > model.num_experts:
            raise ReshardError(
                f"vLLM's tp {self.tp} x dp {self.dp} are more ranks than the model's "
                f"{model.num_experts} experts"
            )
        if self.round_robin and self.redundant_experts:
            raise ReshardError("vLLM places experts round-robin only without redundant ones")
        if self.round_robin and model.expert_groups[0] < 2:
            raise ReshardError(
                "vLLM places experts round-robin only where the model has expert groups; it "
                "would place them linearly"
            )

    def rank(self, model: Model, rank: int) -> EngineRank:
        """Return one rank; TP is the innermost axis, then PP, then DP. Raises ReshardError if a
        size does not divide."""
        tp_rank, pp_rank, dp_rank = rank % self.tp, rank // self.tp % self.pp, rank // (self.tp * self.pp)
        base, remainder = divmod(model.num_layers, self.pp)
        # The remainder goes to the stages before the last one.
        counts = [base + (self.pp - 1 - remainder <= stage < self.pp - 1) for stage in range(self.pp)]
        moe_tp, moe_tp_rank = self.tp * self.dp, dp_rank * self.tp + tp_rank
        experts = tuple(range(model.num_experts))
        if self.expert_parallel:
            experts = self._local_experts(model.num_experts, moe_tp, moe_tp_rank)
            moe_tp, moe_tp_rank = 1, 0
        outer = outer_of_stage(VLLM, model, pp_rank == 0, pp_rank == self.pp - 1)
        splits = WHOLE_SHARED_EXPERTS if self.expert_parallel and self.tp > 1 and self.dp > 1 else {}
        layers = layers_of_stage(counts, pp_rank)
        return EngineRank(self.tp, tp_rank, moe_tp, moe_tp_rank, experts, layers, outer, splits)

    def _local_experts(self, experts: int, ranks: int, rank: int) -> tuple[int, ...]:
        """Return the experts of one of the ranks that they are distributed over."""
        if self.round_robin:
            return tuple(range(rank, experts, ranks))
        return experts_of_rank(experts, ranks, rank, self.redundant_experts)


# vLLM keeps an MTP layer's transformer layer in a module of its own, unless its published names tell the two apart.
MTP_BLOCK = "mtp_block."


def drafter_placement(model: Model, rank: EngineRank, prefix: str) -> Placement:
    """Return the parameters of the transformer layers of a drafter made of MTP layers, as
    `reshard.engines.layout.place` does for the main model; their names begin with `prefix`. What is around these
    layers, each of vLLM's models holds in its own way."""
    expansion = Expansion(VLLM, model, rank)
    own, inside = model.mtp_prefixes(0)
    module = MTP_BLOCK if own == inside else ""
    for block in model.blocks():
        if not block.mtp or not block.megatron.endswith("transformer_layer."):
            continue
        groups: dict[str, list[Row]] = defaultdict(list)
        for row in block.rows:
            if row.arrangement not in WITHOUT_PARAMETER:
                groups[module + VLLM.parameter(model, row)].append(row)
        for name, rows in groups.items():
            expansion.add(block.published, name, rows, prefix)
    return Placement.of(expansion.shapes, expansion.tensors)
