"""SGLang's names for the parameters of a layer, and which of them it fuses, by family."""

from reshard.engines.placing.names import FUSED, EngineFamily, EngineNames

# published name, SGLang's parameter, when (as in `reshard.models.tables`); `*` is the rest of the
# name: weight or bias
NAMES = (
    *FUSED,
    ("mlp.experts.{expert}.gate_proj.weight", "mlp.experts.w13_weight", "always"),
    ("mlp.experts.{expert}.up_proj.weight",   "mlp.experts.w13_weight", "always"),
    ("mlp.experts.{expert}.down_proj.weight", "mlp.experts.w2_weight",  "always"),
)  # fmt: skip
BLOCK_SPARSE_MOE = (
    ("block_sparse_moe.experts.{expert}.w1.weight", "block_sparse_moe.experts.w13_weight", "always"),
    ("block_sparse_moe.experts.{expert}.w3.weight", "block_sparse_moe.experts.w13_weight", "always"),
    ("block_sparse_moe.experts.{expert}.w2.weight", "block_sparse_moe.experts.w2_weight",  "always"),
)  # fmt: skip
LATENT_ATTENTION = (
    ("self_attn.q_proj.*",             "self_attn.q_proj.*",                    "always"),
    ("self_attn.q_a_proj.*",           "self_attn.fused_qkv_a_proj_with_mqa.*", "q_lora_rank"),
    ("self_attn.kv_a_proj_with_mqa.*", "self_attn.fused_qkv_a_proj_with_mqa.*", "q_lora_rank"),
)  # fmt: skip
# As SGLang has it on a GPU, where the rotary embedding takes neighbors for pairs.
INDEXER = (
    ("self_attn.indexer.wk.weight",           "self_attn.indexer.wk_weights_proj.weight", "always"),
    ("self_attn.indexer.weights_proj.weight", "self_attn.indexer.wk_weights_proj.weight", "always"),
)  # fmt: skip
# Attention lies in the layer itself, beside linear attention in others.
ATTENTION_IN_LAYER = (
    ("self_attn.q_proj.*", "qkv_proj.*", "always"),
    ("self_attn.k_proj.*", "qkv_proj.*", "always"),
    ("self_attn.v_proj.*", "qkv_proj.*", "always"),
    ("self_attn.o_proj.*", "o_proj.*",   "always"),
    ("self_attn.q_norm.*", "q_norm.*",   "always"),
    ("self_attn.k_norm.*", "k_norm.*",   "always"),
)  # fmt: skip
GPT_OSS = (
    ("mlp.experts.{expert}.gate_proj.weight", "mlp.experts.w13_weight[0:1 in 2]",      "always"),
    ("mlp.experts.{expert}.up_proj.weight",   "mlp.experts.w13_weight[1:2 in 2]",      "always"),
    ("mlp.experts.{expert}.gate_proj.bias",   "mlp.experts.w13_weight_bias[0:1 in 2]", "always"),
    ("mlp.experts.{expert}.up_proj.bias",     "mlp.experts.w13_weight_bias[1:2 in 2]", "always"),
    ("mlp.experts.{expert}.down_proj.bias",   "mlp.experts.w2_weight_bias",            "always"),
)  # fmt: skip

# The prefixes of a language model in a larger one, and of the other parts.
IN_A_LARGER_ONE = (
    ("model.language_model.", "model."),
    ("model.visual.",         "visual."),
)  # fmt: skip

FAMILIES = {
    "llama": EngineFamily(),
    "mistral": EngineFamily(),
    "qwen2": EngineFamily(),
    "qwen2_5_vl_text": EngineFamily(),
    "qwen2_moe": EngineFamily(on_every_stage=("output",)),
    "qwen3": EngineFamily(),
    "qwen3_moe": EngineFamily(on_every_stage=("output",)),
    "deepseek_v3": EngineFamily(LATENT_ATTENTION),
    "glm4_moe": EngineFamily(on_every_stage=("output",)),
    "phi3": EngineFamily(),
    "bailing_moe_v2": EngineFamily(on_every_stage=("output",)),
    "mixtral": EngineFamily(BLOCK_SPARSE_MOE, on_every_stage=("output",)),
    "minimax_m2": EngineFamily(BLOCK_SPARSE_MOE, on_every_stage=("embedding",)),
    "olmoe": EngineFamily(),
    "gpt_oss": EngineFamily(
        GPT_OSS, on_every_stage=("output",), added_once=("mlp.experts.{expert}.down_proj.bias",)
    ),
    "qwen3_next": EngineFamily(ATTENTION_IN_LAYER),
    "qwen3_5_text": EngineFamily(ATTENTION_IN_LAYER),
    "qwen3_5_moe_text": EngineFamily(ATTENTION_IN_LAYER),
    "glm4_moe_lite": EngineFamily(LATENT_ATTENTION, on_every_stage=("output",)),
    "deepseek_v32": EngineFamily(LATENT_ATTENTION),
    "glm_moe_dsa": EngineFamily((*LATENT_ATTENTION, *INDEXER)),
}
# Families whose classes split attention by TP alone, and cannot have attention that is data parallel.
WITHOUT_DP_ATTENTION = ("llama", "mistral", "qwen2", "mixtral", "olmoe")
# Families whose classes norm all heads together on each rank, and so cannot split them.
WITHOUT_TP = ("olmoe",)
# Families whose loaders, with EP, read a rank's experts in a way that the trace cannot follow.
WITHOUT_EP = ("gpt_oss",)
# Families whose classes have no pipeline stages.
WITHOUT_STAGES = ("olmoe", "qwen3_next")
# Families whose classes compute a parameter while they load, and do not keep what they compute it from.
COMPUTED = {"nemotron_h": "A of Mamba layers, of the published A_log,"}

SGLANG = EngineNames("SGLang", NAMES, FAMILIES, IN_A_LARGER_ONE)
