"""The language model of Qwen2.5-VL: the layers of Qwen2.5. As published it is a part of a larger model, whose vision
tower is carried along.

The entries are explained in `reshard.models.family`, the columns of `layer` in `reshard.models.tables`.
"""

from reshard.models.family import Family


class Qwen25VL(Family):
    name = "qwen2_5_vl_text"
    architecture = "Qwen2_5_VLForConditionalGeneration"
    wrapped_in = ("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl")
    wrapped_names = ("model.", "model.")
    in_memory_prefix = ("model.", "model.language_model.")
    towers = ("visual.",)
    tower = "windowed"
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
        ("num_key_value_heads",     "num_query_groups",                    "=",      "needed"),
        ("head_dim",                "kv_channels",                         "=",      "hidden_size/num_attention_heads"),
        ("vocab_size",              "vocab_size",                          "=",      "needed"),
        ("max_position_embeddings", "max_position_embeddings",             "=",      32768),
        ("rms_norm_eps",            "layernorm_epsilon",                   "=",      1e-05),
        ("tie_word_embeddings",     "untie_embeddings_and_output_weights", "not",    False),
        ("initializer_range",       "init_method_std",                     "=",      0.02),
        ("attention_dropout",       "attention_dropout",                   "=",      0.0),
    )  # fmt: skip

    identifies = {}  # those of Qwen2
    megatron = {"add_qkv_bias": True}
    rope_theta = 1000000.0
    window = "from max_window_layers"
    # Neither transformers nor vLLM reads it: q, k and v always have biases, o never has one.
    no_effect = ("attention_bias",)
    always = {"qkv_bias": True, "use_qkv_bias": True}

    #    HF parameter                       shape      Megatron parameter                             arrangement  split   when
    layer = (
        ("input_layernorm.weight",          "H",       "self_attention.linear_qkv.layer_norm_weight", "plain",     "-",    "always"),
        ("self_attn.q_proj.weight",         "NQ*D H",  "self_attention.linear_qkv.weight",            "q",         "tp 0", "always"),
        ("self_attn.k_proj.weight",         "NKV*D H", "self_attention.linear_qkv.weight",            "k",         "tp 0", "always"),
        ("self_attn.v_proj.weight",         "NKV*D H", "self_attention.linear_qkv.weight",            "v",         "tp 0", "always"),
        ("self_attn.q_proj.bias",           "NQ*D",    "self_attention.linear_qkv.bias",              "q",         "tp 0", "always"),
        ("self_attn.k_proj.bias",           "NKV*D",   "self_attention.linear_qkv.bias",              "k",         "tp 0", "always"),
        ("self_attn.v_proj.bias",           "NKV*D",   "self_attention.linear_qkv.bias",              "v",         "tp 0", "always"),
        ("self_attn.o_proj.weight",         "H NQ*D",  "self_attention.linear_proj.weight",           "plain",     "tp 1", "always"),
        ("post_attention_layernorm.weight", "H",       "mlp.linear_fc1.layer_norm_weight",            "plain",     "-",    "always"),
        ("mlp.gate_proj.weight",            "F H",     "mlp.linear_fc1.weight",                       "gate",      "tp 0", "always"),
        ("mlp.up_proj.weight",              "F H",     "mlp.linear_fc1.weight",                       "up",        "tp 0", "always"),
        ("mlp.down_proj.weight",            "H F",     "mlp.linear_fc2.weight",                       "plain",     "tp 1", "always"),
    )  # fmt: skip

    # Refused by name: what Megatron-Core has no place for.
    refused = (("hidden_act", ("silu",), "Megatron's --swiglu is SiLU"),)
