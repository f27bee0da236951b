"""Llama 2, 3.x: grouped-query attention, SwiGLU, tied embeddings (3.2), biases on every linear
layer or on none.

The entries are explained in `reshard.models.family`, the columns of `layer` in `reshard.models.tables`.
"""

from reshard.models.family import Family


class Llama(Family):
    name = "llama"
    architecture = "LlamaForCausalLM"
    symbols = {
        "V": "vocab_size", "H": "hidden_size", "F": "intermediate_size",
        "NQ": "num_attention_heads", "NKV": "num_key_value_heads", "D": "head_dim",
    }  # fmt: skip

    #    HF config field            Megatron argument                      relation  default
    config = (
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
        ("attention_bias",          "add_bias_linear",                     "=",      False),
        ("mlp_bias",                "add_bias_linear",                     "=",      False),
        ("initializer_range",       "init_method_std",                     "=",      0.02),
        ("attention_dropout",       "attention_dropout",                   "=",      0.0),
    )  # fmt: skip

    identifies = {
        "num_experts": False,
        "multi_latent_attention": False,
        "qk_layernorm": False,
        "add_qkv_bias": False,
        "squared_relu": False,
    }

    #    HF parameter                       shape      Megatron parameter                             arrangement  split   when
    layer = (
        ("input_layernorm.weight",          "H",       "self_attention.linear_qkv.layer_norm_weight", "plain",     "-",    "always"),
        ("self_attn.q_proj.weight",         "NQ*D H",  "self_attention.linear_qkv.weight",            "q",         "tp 0", "always"),
        ("self_attn.k_proj.weight",         "NKV*D H", "self_attention.linear_qkv.weight",            "k",         "tp 0", "always"),
        ("self_attn.v_proj.weight",         "NKV*D H", "self_attention.linear_qkv.weight",            "v",         "tp 0", "always"),
        ("self_attn.q_proj.bias",           "NQ*D",    "self_attention.linear_qkv.bias",              "q",         "tp 0", "attention_bias"),
        ("self_attn.k_proj.bias",           "NKV*D",   "self_attention.linear_qkv.bias",              "k",         "tp 0", "attention_bias"),
        ("self_attn.v_proj.bias",           "NKV*D",   "self_attention.linear_qkv.bias",              "v",         "tp 0", "attention_bias"),
        ("self_attn.o_proj.weight",         "H NQ*D",  "self_attention.linear_proj.weight",           "plain",     "tp 1", "always"),
        ("self_attn.o_proj.bias",           "H",       "self_attention.linear_proj.bias",             "plain",     "-",    "attention_bias"),
        ("post_attention_layernorm.weight", "H",       "mlp.linear_fc1.layer_norm_weight",            "plain",     "-",    "always"),
        ("mlp.gate_proj.weight",            "F H",     "mlp.linear_fc1.weight",                       "gate",      "tp 0", "always"),
        ("mlp.up_proj.weight",              "F H",     "mlp.linear_fc1.weight",                       "up",        "tp 0", "always"),
        ("mlp.gate_proj.bias",              "F",       "mlp.linear_fc1.bias",                         "gate",      "tp 0", "mlp_bias"),
        ("mlp.up_proj.bias",                "F",       "mlp.linear_fc1.bias",                         "up",        "tp 0", "mlp_bias"),
        ("mlp.down_proj.weight",            "H F",     "mlp.linear_fc2.weight",                       "plain",     "tp 1", "always"),
        ("mlp.down_proj.bias",              "H",       "mlp.linear_fc2.bias",                         "plain",     "-",    "mlp_bias"),
    )  # fmt: skip

    # Refused by name: what Megatron-Core has no place for.
    refused = (("hidden_act", ("silu",), "Megatron's --swiglu is SiLU"),)
    equal = (("attention_bias", "mlp_bias", "Megatron's add_bias_linear puts a bias on both or on neither"),)
