"""Qwen3-MoE: Qwen3 attention, and routed experts in some or all layers (`decoder_sparse_step`, `mlp_only_layers`).

The columns are explained in `reshard/tables.py`.
"""

FAMILY = "qwen3_moe"
ARCHITECTURE = "Qwen3MoeForCausalLM"

SYMBOLS = {
    "V": "vocab_size", "H": "hidden_size", "F": "intermediate_size",
    "E": "num_experts", "FE": "moe_intermediate_size", "NQ": "num_attention_heads", "NKV": "num_key_value_heads", "D": "head_dim",
}  # fmt: skip

#    HF config field                  Megatron argument                      relation  default
CONFIG = (
    ("num_hidden_layers",             "num_layers",                          "=",      "needed"),
    ("hidden_size",                   "hidden_size",                         "=",      "needed"),
    ("intermediate_size",             "ffn_hidden_size",                     "=",      "needed"),
    ("num_attention_heads",           "num_attention_heads",                 "=",      "needed"),
    ("num_key_value_heads",           "num_query_groups",                    "=",      "num_attention_heads"),
    ("head_dim",                      "kv_channels",                         "=",      128),
    ("vocab_size",                    "vocab_size",                          "=",      "needed"),
    ("max_position_embeddings",       "max_position_embeddings",             "=",      2048),
    ("rms_norm_eps",                  "layernorm_epsilon",                   "=",      1e-06),
    ("num_experts|num_local_experts", "num_experts",                         "=",      "needed"),
    ("num_experts_per_tok",           "moe_router_topk",                     "=",      "needed"),
    ("moe_intermediate_size",         "moe_ffn_hidden_size",                 "=",      "needed"),
    ("norm_topk_prob",                "moe_router_pre_softmax",              "not",    False),
    ("tie_word_embeddings",           "untie_embeddings_and_output_weights", "not",    False),
)  # fmt: skip

MEGATRON = {
    "normalization": "RMSNorm", "swiglu": True, "position_embedding_type": "rope", "group_query_attention": True,
    "add_bias_linear": False, "add_qkv_bias": False, "qk_layernorm": True,
    "moe_router_score_function": "softmax", "moe_router_dtype": "fp32", "moe_grouped_gemm": True,
}  # fmt: skip
HF = {"model_type": "qwen3_moe", "hidden_act": "silu"}
ROPE = "default"
LAYER_KINDS = "sparse_step"
VLLM_ENDS = "every stage"

#    HF parameter                             shape      Megatron parameter                             local spec                          vLLM parameter                           arrangement split    where
MODEL = (
    ("model.embed_tokens.weight",             "V H",     "embedding.word_embeddings.weight",            "=",                                "=",                                     "vocab",    "tp 0",  "always"),
    ("model.norm.weight",                     "H",       "decoder.final_layernorm.weight",              "=",                                "=",                                     "plain",    "-",     "always"),
    ("lm_head.weight",                        "V H",     "output_layer.weight",                         "=",                                "=",                                     "vocab",    "tp 0",  "untied"),
    ("lm_head.weight",                        "V H",     "embedding.word_embeddings.weight",            "=",                                "",                                      "copy",     "tp 0",  "tied optional"),
)  # fmt: skip

LAYER = (
    ("input_layernorm.weight",                "H",       "self_attention.linear_qkv.layer_norm_weight", "=",                                "=",                                     "plain",    "-",     "always"),
    ("self_attn.q_proj.weight",               "NQ*D H",  "self_attention.linear_qkv.weight",            "=",                                "self_attn.qkv_proj.weight",             "q",        "tp 0",  "always"),
    ("self_attn.k_proj.weight",               "NKV*D H", "self_attention.linear_qkv.weight",            "=",                                "self_attn.qkv_proj.weight",             "k",        "tp 0",  "always"),
    ("self_attn.v_proj.weight",               "NKV*D H", "self_attention.linear_qkv.weight",            "=",                                "self_attn.qkv_proj.weight",             "v",        "tp 0",  "always"),
    ("self_attn.q_norm.weight",               "D",       "self_attention.q_layernorm.weight",           "=",                                "=",                                     "plain",    "-",     "always"),
    ("self_attn.k_norm.weight",               "D",       "self_attention.k_layernorm.weight",           "=",                                "=",                                     "plain",    "-",     "always"),
    ("self_attn.o_proj.weight",               "H NQ*D",  "self_attention.linear_proj.weight",           "=",                                "=",                                     "plain",    "tp 1",  "always"),
    ("post_attention_layernorm.weight",       "H",       "mlp.linear_fc1.layer_norm_weight",            "=",                                "=",                                     "plain",    "-",     "dense"),
    ("mlp.gate_proj.weight",                  "F H",     "mlp.linear_fc1.weight",                       "=",                                "mlp.gate_up_proj.weight",               "gate",     "tp 0",  "dense"),
    ("mlp.up_proj.weight",                    "F H",     "mlp.linear_fc1.weight",                       "=",                                "mlp.gate_up_proj.weight",               "up",       "tp 0",  "dense"),
    ("mlp.down_proj.weight",                  "H F",     "mlp.linear_fc2.weight",                       "=",                                "=",                                     "plain",    "tp 1",  "dense"),
    ("post_attention_layernorm.weight",       "H",       "pre_mlp_layernorm.weight",                    "mlp.linear_fc1.layer_norm_weight", "=",                                     "plain",    "-",     "moe"),
    ("mlp.gate.weight",                       "E H",     "mlp.router.weight",                           "=",                                "=",                                     "plain",    "-",     "moe"),
    ("mlp.experts.{expert}.gate_proj.weight", "FE H",    "mlp.experts.experts.linear_fc1.weight",       "=",                                "mlp.experts.routed_experts.w13_weight", "gate",     "etp 0", "moe"),
    ("mlp.experts.{expert}.up_proj.weight",   "FE H",    "mlp.experts.experts.linear_fc1.weight",       "=",                                "mlp.experts.routed_experts.w13_weight", "up",       "etp 0", "moe"),
    ("mlp.experts.{expert}.down_proj.weight", "H FE",    "mlp.experts.experts.linear_fc2.weight",       "=",                                "mlp.experts.routed_experts.w2_weight",  "plain",    "etp 1", "moe"),
)  # fmt: skip

MTP = ()

# Refused by name: what Megatron-Core has no place for.
REFUSED = (
    ("hidden_act", ("silu",), "Megatron's --swiglu is SiLU"),
    ("attention_bias", (False,), "Megatron's add_bias_linear puts a bias on the MLP too"),
    ("use_sliding_window", (False,), "Megatron has one window for all layers"),
)
