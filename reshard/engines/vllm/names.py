"""vLLM's names for the parameters of a layer, and which of them it fuses, by family.

Rows of a mapping table that have one vLLM name fill that parameter together, in table order. A name
in no list here is the published one. These names are for families that they were checked with; an
engine that serves another one is asked by the trace of its own loader alone.
"""

from reshard.engines.placing.names import FUSED, OUTER, EngineFamily, EngineNames

# published name, vLLM's parameter, when (as in `reshard.models.tables`); `*` is the rest of the name:
# weight or bias
NAMES = (
    *FUSED,
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

ROUTER_STATICS = (("mlp.moe_statics.e_score_correction_bias", "mlp.gate.e_score_correction_bias", "always"),)

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


SINGLE_LAYERS = (
    ("mixer.q_proj.*",                          "mixer.qkv_proj.*",                        "always"),
    ("mixer.k_proj.*",                          "mixer.qkv_proj.*",                        "always"),
    ("mixer.v_proj.*",                          "mixer.qkv_proj.*",                        "always"),
    ("mixer.A_log",                             "mixer.A",                                 "always"),
    ("mixer.experts.{expert}.up_proj.weight",   "mixer.experts.routed_experts.w13_weight", "always"),
    ("mixer.experts.{expert}.down_proj.weight", "mixer.experts.routed_experts.w2_weight",  "always"),
)  # fmt: skip
# The prefixes of a language model in a larger one, and of the other parts.
IN_A_LARGER_ONE = (
    ("model.language_model.", "language_model.model."),
    ("lm_head.",              "language_model.lm_head."),
    ("model.visual.",         "visual."),
)  # fmt: skip

# Of MTP layers that are published under a name of their own; a drafter has them as its model.
OF_DRAFTER = (("mtp.", "model."),)

FAMILIES = {
    "llama": EngineFamily(),
    "mistral": EngineFamily(),
    "qwen2": EngineFamily(),
    "qwen2_5_vl_text": EngineFamily(prefixes=(("model.", "language_model.model."),)),
    "qwen2_moe": EngineFamily(on_every_stage=OUTER),
    "qwen3": EngineFamily(),
    "qwen3_moe": EngineFamily(on_every_stage=OUTER),
    "qwen3_vl_moe_text": EngineFamily(on_every_stage=OUTER),
    "deepseek_v3": EngineFamily(LATENT_ATTENTION),
    "deepseek_v32": EngineFamily((*LATENT_ATTENTION, *INDEXER)),
    "glm4_moe": EngineFamily(),
    "seed_oss": EngineFamily(),
    "bailing_moe_v2": EngineFamily(),
    "phi3": EngineFamily(),
    "mixtral": EngineFamily(BLOCK_SPARSE_MOE, on_every_stage=OUTER),
    "minimax_m2": EngineFamily(BLOCK_SPARSE_MOE),
    "olmoe": EngineFamily(on_every_stage=OUTER, whole=("self_attn.q_norm.weight", "self_attn.k_norm.weight")),
    "ernie4_5_moe": EngineFamily(ROUTER_STATICS),
    "glm4_moe_lite": EngineFamily(LATENT_ATTENTION),
    "qwen3_next": EngineFamily(prefixes=OF_DRAFTER),
    "qwen3_5_text": EngineFamily(prefixes=OF_DRAFTER),
    "qwen3_5_moe_text": EngineFamily(prefixes=OF_DRAFTER),
    "nemotron_h": EngineFamily(
        SINGLE_LAYERS,
        prefixes=(("backbone.embeddings.", "model.embed_tokens."), ("backbone.", "model.")),
        on_every_stage=OUTER,
    ),
    "glm_moe_dsa": EngineFamily((*LATENT_ATTENTION, *INDEXER)),
    "gpt_oss": EngineFamily(
        GPT_OSS,
        prefixes=(("model.embed_tokens.", "model.embedding."),),
        on_every_stage=OUTER,
        added_once=("mlp.experts.{expert}.down_proj.bias",),
        repeats_keys=False,
    ),
}

VLLM = EngineNames("vLLM", NAMES, FAMILIES, IN_A_LARGER_ONE)
