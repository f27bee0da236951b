"""SGLang's names for the parameters of a layer, and which of them it fuses, by family."""

from reshard.engines.names import EngineFamily, EngineNames

# published name, SGLang's parameter, when (as in `reshard.models.tables`); `*` is the rest of the
# name: weight or bias
NAMES = (
    ("self_attn.q_proj.*",                    "self_attn.qkv_proj.*",              "always"),
    ("self_attn.k_proj.*",                    "self_attn.qkv_proj.*",              "always"),
    ("self_attn.v_proj.*",                    "self_attn.qkv_proj.*",              "always"),
    ("mlp.gate_proj.*",                       "mlp.gate_up_proj.*",                "always"),
    ("mlp.up_proj.*",                         "mlp.gate_up_proj.*",                "always"),
    ("mlp.shared_experts.gate_proj.*",        "mlp.shared_experts.gate_up_proj.*", "always"),
    ("mlp.shared_experts.up_proj.*",          "mlp.shared_experts.gate_up_proj.*", "always"),
    ("mlp.experts.{expert}.gate_proj.weight", "mlp.experts.w13_weight",            "always"),
    ("mlp.experts.{expert}.up_proj.weight",   "mlp.experts.w13_weight",            "always"),
    ("mlp.experts.{expert}.down_proj.weight", "mlp.experts.w2_weight",             "always"),
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

FAMILIES = {
    "llama": EngineFamily(),
    "qwen2": EngineFamily(),
    "qwen3": EngineFamily(),
    "qwen3_moe": EngineFamily(on_every_stage=("output",)),
    "deepseek_v3": EngineFamily(LATENT_ATTENTION),
    "glm4_moe": EngineFamily(on_every_stage=("output",)),
    "mixtral": EngineFamily(BLOCK_SPARSE_MOE, on_every_stage=("output",)),
}
# Families whose classes split attention by TP alone, and cannot have attention that is data parallel.
WITHOUT_DP_ATTENTION = ("llama", "qwen2", "mixtral")

SGLANG = EngineNames("SGLang", NAMES, FAMILIES)
