"""Qwen2 and Qwen2.5, dense: grouped-query attention with biases on q, k and v, SwiGLU, tied embeddings (0.5B to 3B).

The columns are explained in `reshard/tables.py`.
"""

FAMILY = "qwen2"
ARCHITECTURE = "Qwen2ForCausalLM"

SYMBOLS = {
    "V": "vocab_size", "H": "hidden_size", "F": "intermediate_size",
    "NQ": "num_attention_heads", "NKV": "num_key_value_heads", "D": "head_dim",
}  # fmt: skip

#    HF config field            Megatron argument                      relation  default
CONFIG = (
    ("num_hidden_layers",       "num_layers",                          "=",      "needed"),
    ("hidden_size",             "hidden_size",                         "=",      "needed"),
    ("intermediate_size",       "ffn_hidden_size",                     "=",      "needed"),
    ("num_attention_heads",     "num_attention_heads",                 "=",      "needed"),
    ("num_key_value_heads",     "num_query_groups",                    "=",      "num_attention_heads"),
    ("head_dim",                "kv_channels",                         "=",      "hidden_size/num_attention_heads"),
    ("vocab_size",              "vocab_size",                          "=",      "needed"),
    ("max_position_embeddings", "max_position_embeddings",             "=",      2048),
    ("rms_norm_eps",            "layernorm_epsilon",                   "=",      1e-06),
    ("tie_word_embeddings",     "untie_embeddings_and_output_weights", "not",    False),
)  # fmt: skip

MEGATRON = {
    "normalization": "RMSNorm", "swiglu": True, "position_embedding_type": "rope", "group_query_attention": True,
    "add_bias_linear": False, "add_qkv_bias": True, "qk_layernorm": False,
}  # fmt: skip
HF = {"model_type": "qwen2", "hidden_act": "silu"}
ROPE = "default"
LAYER_KINDS = "dense"

#    HF parameter                       shape      Megatron parameter                             local spec vLLM parameter               arrangement split   where
MODEL = (
    ("model.embed_tokens.weight",       "V H",     "embedding.word_embeddings.weight",            "=",       "=",                         "vocab",    "tp 0", "always"),
    ("model.norm.weight",               "H",       "decoder.final_layernorm.weight",              "=",       "=",                         "plain",    "-",    "always"),
    ("lm_head.weight",                  "V H",     "output_layer.weight",                         "=",       "=",                         "vocab",    "tp 0", "untied"),
    ("lm_head.weight",                  "V H",     "embedding.word_embeddings.weight",            "=",       "",                          "copy",     "tp 0", "tied optional"),
)  # fmt: skip

LAYER = (
    ("input_layernorm.weight",          "H",       "self_attention.linear_qkv.layer_norm_weight", "=",       "=",                         "plain",    "-",    "always"),
    ("self_attn.q_proj.weight",         "NQ*D H",  "self_attention.linear_qkv.weight",            "=",       "self_attn.qkv_proj.weight", "q",        "tp 0", "always"),
    ("self_attn.k_proj.weight",         "NKV*D H", "self_attention.linear_qkv.weight",            "=",       "self_attn.qkv_proj.weight", "k",        "tp 0", "always"),
    ("self_attn.v_proj.weight",         "NKV*D H", "self_attention.linear_qkv.weight",            "=",       "self_attn.qkv_proj.weight", "v",        "tp 0", "always"),
    ("self_attn.q_proj.bias",           "NQ*D",    "self_attention.linear_qkv.bias",              "=",       "self_attn.qkv_proj.bias",   "q",        "tp 0", "always"),
    ("self_attn.k_proj.bias",           "NKV*D",   "self_attention.linear_qkv.bias",              "=",       "self_attn.qkv_proj.bias",   "k",        "tp 0", "always"),
    ("self_attn.v_proj.bias",           "NKV*D",   "self_attention.linear_qkv.bias",              "=",       "self_attn.qkv_proj.bias",   "v",        "tp 0", "always"),
    ("self_attn.o_proj.weight",         "H NQ*D",  "self_attention.linear_proj.weight",           "=",       "=",                         "plain",    "tp 1", "always"),
    ("post_attention_layernorm.weight", "H",       "mlp.linear_fc1.layer_norm_weight",            "=",       "=",                         "plain",    "-",    "always"),
    ("mlp.gate_proj.weight",            "F H",     "mlp.linear_fc1.weight",                       "=",       "mlp.gate_up_proj.weight",   "gate",     "tp 0", "always"),
    ("mlp.up_proj.weight",              "F H",     "mlp.linear_fc1.weight",                       "=",       "mlp.gate_up_proj.weight",   "up",       "tp 0", "always"),
    ("mlp.down_proj.weight",            "H F",     "mlp.linear_fc2.weight",                       "=",       "=",                         "plain",    "tp 1", "always"),
)  # fmt: skip

MTP = ()

# Refused by name: what Megatron-Core has no place for.
REFUSED = (
    ("hidden_act", ("silu",), "Megatron's --swiglu is SiLU"),
    ("use_sliding_window", (False,), "Megatron has one window for all layers"),
)
