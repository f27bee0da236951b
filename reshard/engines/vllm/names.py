"""vLLM's names for the parameters of a layer, and which of them it fuses, by family.

Rows of a mapping table that have one vLLM name fill that parameter together, in table order. A name
in no list here is the published one. These names are for families that they were checked with; an
engine that serves another one is asked by the trace of its own loader alone.
"""

from functools import cache
from typing import NamedTuple

from reshard.core.views import tensor_of
from reshard.models.model import Model
from reshard.models.tables import Row, words_of

# published name, vLLM's parameter, when (as in `reshard.models.tables`); `*` is the rest of the name:
# weight or bias
NAMES = (
    ("self_attn.q_proj.*",                    "self_attn.qkv_proj.*",                  "always"),
    ("self_attn.k_proj.*",                    "self_attn.qkv_proj.*",                  "always"),
    ("self_attn.v_proj.*",                    "self_attn.qkv_proj.*",                  "always"),
    ("mlp.gate_proj.*",                       "mlp.gate_up_proj.*",                    "always"),
    ("mlp.up_proj.*",                         "mlp.gate_up_proj.*",                    "always"),
    ("mlp.shared_experts.gate_proj.*",        "mlp.shared_experts.gate_up_proj.*",     "always"),
    ("mlp.shared_experts.up_proj.*",          "mlp.shared_experts.gate_up_proj.*",     "always"),
    ("mlp.shared_expert.gate_proj.*",         "mlp.shared_expert.gate_up_proj.*",      "always"),
    ("mlp.shared_expert.up_proj.*",           "mlp.shared_expert.gate_up_proj.*",      "always"),
    ("linear_attn.in_proj_qkv.*",             "linear_attn.in_proj_qkvz.*",            "always"),
    ("linear_attn.in_proj_z.*",               "linear_attn.in_proj_qkvz.*",            "always"),
    ("linear_attn.in_proj_b.*",               "linear_attn.in_proj_ba.*",              "always"),
    ("linear_attn.in_proj_a.*",               "linear_attn.in_proj_ba.*",              "always"),
    ("mlp.experts.{expert}.gate_proj.weight", "mlp.experts.routed_experts.w13_weight", "always"),
    ("mlp.experts.{expert}.up_proj.weight",   "mlp.experts.routed_experts.w13_weight", "always"),
    ("mlp.experts.{expert}.down_proj.weight", "mlp.experts.routed_experts.w2_weight",  "always"),
)  # fmt: skip
BLOCK_SPARSE_MOE = (
    ("block_sparse_moe.experts.{expert}.w1.weight", "block_sparse_moe.experts.routed_experts.w13_weight", "always"),
    ("block_sparse_moe.experts.{expert}.w3.weight", "block_sparse_moe.experts.routed_experts.w13_weight", "always"),
    ("block_sparse_moe.experts.{expert}.w2.weight", "block_sparse_moe.experts.routed_experts.w2_weight",  "always"),
)  # fmt: skip
LATENT_ATTENTION = (
    ("self_attn.q_proj.*",             "self_attn.q_proj.*",           "always"),
    ("self_attn.q_a_proj.*",           "self_attn.fused_qkv_a_proj.*", "q_lora_rank"),
    ("self_attn.kv_a_proj_with_mqa.*", "self_attn.fused_qkv_a_proj.*", "q_lora_rank"),
)  # fmt: skip

INDEXER = (
    ("self_attn.indexer.wk.*",           "self_attn.indexer.wk_weights_proj.*", "always"),
    ("self_attn.indexer.weights_proj.*", "self_attn.indexer.wk_weights_proj.*", "always"),
)  # fmt: skip


GPT_OSS = (
    ("self_attn.q_proj.*",                    "attn.qkv_proj.*",                                  "always"),
    ("self_attn.k_proj.*",                    "attn.qkv_proj.*",                                  "always"),
    ("self_attn.v_proj.*",                    "attn.qkv_proj.*",                                  "always"),
    ("self_attn.o_proj.*",                    "attn.o_proj.*",                                    "always"),
    ("self_attn.sinks",                       "attn.sinks",                                       "always"),
    ("mlp.experts.{expert}.gate_proj.weight", "mlp.experts.routed_experts.w13_weight[0:1 in 2]",  "always"),
    ("mlp.experts.{expert}.up_proj.weight",   "mlp.experts.routed_experts.w13_weight[1:2 in 2]",  "always"),
    ("mlp.experts.{expert}.gate_proj.bias",   "mlp.experts.routed_experts.w13_bias[0:1 in 2]",    "always"),
    ("mlp.experts.{expert}.up_proj.bias",     "mlp.experts.routed_experts.w13_bias[1:2 in 2]",    "always"),
    ("mlp.experts.{expert}.down_proj.bias",   "mlp.experts.routed_experts.w2_bias",               "always"),
)  # fmt: skip


class VllmFamily(NamedTuple):
    """The names that vLLM has for a family.

    `names` come before `NAMES`; brackets at the end say which rows of an expert's matrix in the
    parameter a row is. `prefixes` are what published names begin with, and what vLLM's begin with
    instead, as in its ``WeightsMapper``; the first that fits counts. With `on_every_stage`,
    embedding and output are not only at a pipeline's ends. `added_once` are the published names of
    what experts add to their outputs: of the ranks that split an expert the first has it, and the
    others zeros. Of those in `whole` every rank has all, where others of such rows are split.
    """

    names: tuple[tuple[str, str, str], ...] = ()
    prefixes: tuple[tuple[str, str], ...] = ()
    on_every_stage: bool = False
    added_once: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()


# The prefixes of a language model in a larger one, and of the other parts.
IN_A_LARGER_ONE = (
    ("model.language_model.", "language_model.model."),
    ("lm_head.",              "language_model.lm_head."),
    ("model.visual.",         "visual."),
)  # fmt: skip

FAMILIES = {
    "llama": VllmFamily(),
    "qwen2": VllmFamily(),
    "qwen3": VllmFamily(),
    "qwen3_moe": VllmFamily(on_every_stage=True),
    "deepseek_v3": VllmFamily(LATENT_ATTENTION),
    "deepseek_v32": VllmFamily((*LATENT_ATTENTION, *INDEXER)),
    "glm4_moe": VllmFamily(),
    "mixtral": VllmFamily(BLOCK_SPARSE_MOE, on_every_stage=True),
    "minimax_m2": VllmFamily(BLOCK_SPARSE_MOE),
    "olmoe": VllmFamily(on_every_stage=True, whole=("self_attn.q_norm.weight", "self_attn.k_norm.weight")),
    "glm4_moe_lite": VllmFamily(LATENT_ATTENTION),
    "qwen3_next": VllmFamily(),
    "qwen3_5_text": VllmFamily(),
    "qwen3_5_moe_text": VllmFamily(),
    "glm_moe_dsa": VllmFamily((*LATENT_ATTENTION, *INDEXER)),
    "gpt_oss": VllmFamily(
        GPT_OSS,
        prefixes=(("model.embed_tokens.", "model.embedding."),),
        on_every_stage=True,
        added_once=("mlp.experts.{expert}.down_proj.bias",),
    ),
}


def is_known(model: Model) -> bool:
    """Tell whether the names here were checked with the model's family."""
    return model.family.name in FAMILIES


def on_every_stage(model: Model) -> bool:
    """Tell whether vLLM has embedding and output on every stage of a pipeline."""
    return _family(model.family.name).on_every_stage


def added_once(model: Model, row: Row) -> bool:
    """Tell whether only the first of the ranks that split an expert has a row's tensor, and the
    others zeros."""
    return row.hf in _family(model.family.name).added_once


def is_whole(model: Model, row: Row) -> bool:
    """Tell whether every rank has all of a row's tensor, though it belongs to heads that are split."""
    return row.hf in _family(model.family.name).whole


def in_vllm(model: Model, published: str) -> str:
    """Return a published name, or what several begin with, under the prefix that it has in
    vLLM."""
    for prefix, vllm_prefix in (
        *_family(model.family.name).prefixes,
        *(IN_A_LARGER_ONE if model.wrapped else ()),
    ):
        if published.startswith(prefix):
            return vllm_prefix + published.removeprefix(prefix)
    return published


def tower_prefixes(model: Model) -> tuple[str, ...]:
    """Return what vLLM's names of the tensors begin with that belong to other parts of the model in
    which this language model is."""
    return tuple(in_vllm(model, tower) for tower in model.family.towers) if model.wrapped else ()


def vllm_name(model: Model, row: Row) -> str:
    """Return the vLLM parameter that a row is part of, without the layer's prefix. Brackets at its
    end say which rows of an expert's matrix it is, where these take turns with others."""
    tensor = tensor_of(row.hf)
    for when, name in _names(model.family.name, tensor):
        if model.holds(words_of(when)):
            return name
    return tensor


def _family(name: str) -> VllmFamily:
    return FAMILIES.get(name, VllmFamily())


@cache
def _names(family: str, hf: str) -> list[tuple[str, str]]:
    """Return (when, vLLM's parameter) of each entry that a published name matches."""
    matches = []
    for pattern, parameter, when in (*_family(family).names, *NAMES):
        module, star, _ = pattern.partition("*")
        if hf == pattern or (star and hf.startswith(module) and "." not in hf.removeprefix(module)):
            name = parameter.replace("*", hf.removeprefix(module)) if star else parameter
            matches.append((when, name))
    return matches
