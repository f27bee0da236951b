"""The rank of a live SGLang model."""

from collections.abc import Collection

import torch

from reshard.engines.layout import EngineRank, Split, experts_of_rank, outer_of_stage
from reshard.engines.placing.places import layers_of
from reshard.engines.sglang import compat
from reshard.engines.sglang.weights.names import SGLANG
from reshard.models.model import Model

# The kinds of parameters that may be split otherwise than by TP, by the ends of the names of modules
# that have one.
SPLIT_APART = (
    ("embedding", ("embed_tokens", "word_embeddings")),
    ("output", ("lm_head",)),
    ("attention", (".o_proj", "linear_attn.out_proj", "attention.dense")),
    ("shared_experts", ("mlp.shared_experts.down_proj", "mlp.shared_expert.down_proj")),
    ("mlp", ("mlp.down_proj",)),
)


def rank_of(module: torch.nn.Module, model: Model, tensors: Collection[str], places: int) -> EngineRank:
    """Return what a live model says of its rank, given the names of its `tensors`; its experts are those that would be
    in its places if they came in turn in the `places` of all ranks (`compat.experts_in_turn`).
    """
    groups = compat.parallel()
    splits: dict[str, Split] = {}
    for name, child in module.named_modules():
        for kind, ends in SPLIT_APART:
            split = compat.split_of(child) if name.endswith(ends) else None
            if split is not None and kind not in splits:
                splits[kind] = split
    outer = outer_of_stage(SGLANG, model, groups.pp.rank == 0, groups.pp.rank == groups.pp.ranks - 1)
    experts = experts_of_rank(model.num_experts, *groups.ep, places - model.num_experts)
    layers = layers_of(SGLANG, model, tensors)
    return EngineRank(*groups.tp, *groups.moe_tp, experts, layers, outer, splits)
