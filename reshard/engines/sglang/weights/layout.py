"""The placement of a model on each SGLang rank, by arithmetic alone.

SGLang distributes experts over EP ranks within TP, and splits each over the rest of TP. Data parallel
attention (``enable_dp_attention``) is within TP too: attention and embedding are split over TP / DP
ranks, everything else over TP.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from reshard.core.errors import OptionError, ReshardError
from reshard.engines.layout import (
    EngineLayout,
    EngineRank,
    Split,
    check_redundant,
    experts_of_rank,
    layers_of_stage,
    outer_of_stage,
)
from reshard.engines.sglang.weights.names import (
    COMPUTED,
    SGLANG,
    WITHOUT_DP_ATTENTION,
    WITHOUT_EP,
    WITHOUT_STAGES,
    WITHOUT_TP,
)
from reshard.megatron.stages import divisors, numbers
from reshard.models.model import Model


@dataclass(frozen=True)
class SglangLayout(EngineLayout):
    """SGLang's parallel sizes: its ``tp_size``, ``pp_size``, ``ep_size``, and, with
    ``enable_dp_attention``, its ``dp_size``. `redundant_experts` are its ``ep_num_redundant_experts``, where
    SGLang loads them."""

    names = SGLANG
    share_holds_all = False  # ``mem_fraction_static``

    dp: int = 1
    ep: int = 1
    redundant_experts: int = 0

    @property
    def world_size(self) -> int:
        """Return how many ranks there are: PP times TP."""
        return self.pp * self.tp

    def __str__(self) -> str:
        sizes = (("TP", self.tp), ("PP", self.pp), ("DP-attention", self.dp), ("EP", self.ep))
        redundant = f" +{self.redundant_experts}" if self.redundant_experts else ""
        return (" ".join(f"{name}{n}" for name, n in sizes if n > 1) or "TP1") + redundant

    def check(self, model: Model) -> None:
        """Raise ReshardError if SGLang would not start at these sizes, or cannot be refitted with the model."""
        check_family(model)
        if self.tp % self.dp:
            raise OptionError(f"SGLang's dp {self.dp} does not divide its tp {self.tp}")
        if self.tp % self.ep:
            raise OptionError(f"SGLang's ep {self.ep} does not divide its tp {self.tp}")
        if self.dp > 1 and model.family.name in WITHOUT_DP_ATTENTION:
            raise ReshardError(
                f"SGLang's class of {model.family.architecture} has no data parallel attention: use dp=1"
            )
        if self.pp > 1 and model.family.name in WITHOUT_STAGES:
            raise ReshardError(
                f"SGLang's class of {model.family.architecture} has no pipeline stages: use pp=1"
            )
        if self.ep > 1 and model.family.name in WITHOUT_EP:
            raise ReshardError(
                f"SGLang's class of {model.family.architecture} cannot be refitted with expert parallelism: "
                f"use ep=1"
            )
        if self.tp > 1 and model.family.name in WITHOUT_TP:
            raise ReshardError(
                f"SGLang's class of {model.family.architecture} norms all heads together on each rank: use tp=1"
            )
        heads = model.symbols["NQ"]
        if heads % (self.tp // self.dp):
            raise ReshardError(
                f"SGLang's tp / dp {self.tp // self.dp} does not divide {heads} attention heads; sizes that "
                f"do: {numbers(divisors(heads))}"
            )
        if self.pp > model.num_layers:
            raise ReshardError(f"SGLang's pp {self.pp} is more than the model's {model.num_layers} layers")
        check_redundant("SGLang", model, self.redundant_experts, self.ep)
        if self.ep > 1 and (not model.num_experts or (model.num_experts + self.redundant_experts) % self.ep):
            raise ReshardError(
                f"SGLang's ep {self.ep} does not divide the model's {model.num_experts} experts"
            )

    def rank(self, model: Model, rank: int) -> EngineRank:
        """Return one rank; TP is the innermost axis, then PP."""
        tp_rank, pp_rank = rank % self.tp, rank // self.tp
        base, remainder = divmod(model.num_layers, self.pp)
        # The remainder goes to the last stages.
        counts = [base + (stage >= self.pp - remainder) for stage in range(self.pp)]
        moe_tp = self.tp // self.ep
        return EngineRank(
            self.tp,
            tp_rank,
            moe_tp,
            tp_rank % moe_tp,
            experts_of_rank(model.num_experts, self.ep, tp_rank // moe_tp, self.redundant_experts),
            layers_of_stage(counts, pp_rank),
            outer_of_stage(SGLANG, model, pp_rank == 0, pp_rank == self.pp - 1),
            attention_splits(Split(self.tp // self.dp, tp_rank % (self.tp // self.dp))),
        )


def check_family(model: Model) -> None:
    """Raise ReshardError for a family for which SGLang's class computes a parameter, since a refit only
    copies."""
    computed = COMPUTED.get(model.family.name)
    if computed:
        raise ReshardError(
            f"SGLang's class of {model.family.architecture} computes {computed} while it loads, and a refit "
            f"copies: refit a vLLM, or let SGLang load the checkpoint"
        )


def attention_splits(attention: Split) -> Mapping[str, Split]:
    """Return how parameters of some kinds are split, given how attention is."""
    return {"attention": attention, "embedding": attention}
