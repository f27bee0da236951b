"""Qwen3, dense, also in Qwen3-VL: normalized queries and keys, head_dim apart from hidden_size /
heads, tied embeddings (0.6B to 4B).

The entries are explained in `reshard.models.family`, the columns of `layer` in `reshard.models.tables`.
"""

from reshard.models.family import Family


class Qwen3(Family):
    name = "qwen3"
    architecture = "Qwen3ForCausalLM"
    wrapped_in = ("Qwen3VLForConditionalGeneration", "qwen3_vl")
    towers = ("model.visual.",)
    tower = "deepstack"
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
        ("head_dim",                "kv_channels",                         "=",      128),
        ("vocab_size",              "vocab_size",                          "=",      "needed"),
        ("max_position_embeddings", "max_position_embeddings",             "=",      32768),
        ("rms_norm_eps",            "layernorm_epsilon",                   "=",      1e-06),
        ("tie_word_embeddings",     "untie_embeddings_and_output_weights", "not",    False),
        ("initializer_range",       "init_method_std",                     "=",      0.02),
        ("attention_dropout",       "attention_dropout",                   "=",      0.0),
    )  # fmt: skip

    identifies = {
        "num_experts": False, "multi_latent_attention": False, "qk_layernorm": True, "add_qkv_bias": False,
        "experimental_attention_variant": False,
    }  # fmt: skip
    megatron = {"qk_layernorm": True}
    window = "from max_window_layers"
    always = {"qkv_bias": False, "use_qk_norm": True, "qk_norm": True, "qk_layernorm": True}

    #    HF parameter                       shape      Megatron parameter                             arrangement  split   when
    layer = (
        ("input_layernorm.weight",          "H",       "self_attention.linear_qkv.layer_norm_weight", "plain",     "-",    "always"),
        ("self_attn.q_proj.weight",         "NQ*D H",  "self_attention.linear_qkv.weight",            "q",         "tp 0", "always"),
        ("self_attn.k_proj.weight",         "NKV*D H", "self_attention.linear_qkv.weight",            "k",         "tp 0", "always"),
        ("self_attn.v_proj.weight",         "NKV*D H", "self_attention.linear_qkv.weight",            "v",         "tp 0", "always"),
        ("self_attn.q_norm.weight",         "D",       "self_attention.q_layernorm.weight",           "plain",     "-",    "always"),
        ("self_attn.k_norm.weight",         "D",       "self_attention.k_layernorm.weight",           "plain",     "-",    "always"),
        ("self_attn.o_proj.weight",         "H NQ*D",  "self_attention.linear_proj.weight",           "plain",     "tp 1", "always"),
        ("post_attention_layernorm.weight", "H",       "mlp.linear_fc1.layer_norm_weight",            "plain",     "-",    "always"),
        ("mlp.gate_proj.weight",            "F H",     "mlp.linear_fc1.weight",                       "gate",      "tp 0", "always"),
        ("mlp.up_proj.weight",              "F H",     "mlp.linear_fc1.weight",                       "up",        "tp 0", "always"),
        ("mlp.down_proj.weight",            "H F",     "mlp.linear_fc2.weight",                       "plain",     "tp 1", "always"),
    )  # fmt: skip

    # Refused by name: what Megatron-Core has no place for.
    refused = (
        ("hidden_act", ("silu",), "Megatron's --swiglu is SiLU"),
        ("attention_bias", (False,), "Megatron's add_bias_linear puts a bias on the MLP too"),
    )
