"""Mistral: Llama's layers without biases, which may all attend to a window (7B v0.1).

The entries are explained in `reshard.models.family`, the columns of `layer` in `reshard.models.tables`.
"""

from reshard.models.family import Family
from reshard.models.layer_kinds import (
    args_of_window,
    check_layer_windows,
    window_of_all,
    window_of_args,
)


class Mistral(Family):
    name = "mistral"
    architecture = "MistralForCausalLM"
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
        ("num_key_value_heads",     "num_query_groups",                    "=",      8),
        ("head_dim",                "kv_channels",                         "=",      "hidden_size/num_attention_heads"),
        ("vocab_size",              "vocab_size",                          "=",      "needed"),
        ("max_position_embeddings", "max_position_embeddings",             "=",      131072),
        ("rms_norm_eps",            "layernorm_epsilon",                   "=",      1e-06),
        ("tie_word_embeddings",     "untie_embeddings_and_output_weights", "not",    False),
        ("initializer_range",       "init_method_std",                     "=",      0.02),
        ("attention_dropout",       "attention_dropout",                   "=",      0.0),
    )  # fmt: skip

    # None: without a window the same arguments are a Llama's.
    identifies = {}
    reads = ("sliding_window", "layer_types")

    #    HF parameter                       shape      Megatron parameter                             arrangement  split   when
    layer = (
        ("input_layernorm.weight",          "H",       "self_attention.linear_qkv.layer_norm_weight", "plain",     "-",    "always"),
        ("self_attn.q_proj.weight",         "NQ*D H",  "self_attention.linear_qkv.weight",            "q",         "tp 0", "always"),
        ("self_attn.k_proj.weight",         "NKV*D H", "self_attention.linear_qkv.weight",            "k",         "tp 0", "always"),
        ("self_attn.v_proj.weight",         "NKV*D H", "self_attention.linear_qkv.weight",            "v",         "tp 0", "always"),
        ("self_attn.o_proj.weight",         "H NQ*D",  "self_attention.linear_proj.weight",           "plain",     "tp 1", "always"),
        ("post_attention_layernorm.weight", "H",       "mlp.linear_fc1.layer_norm_weight",            "plain",     "-",    "always"),
        ("mlp.gate_proj.weight",            "F H",     "mlp.linear_fc1.weight",                       "gate",      "tp 0", "always"),
        ("mlp.up_proj.weight",              "F H",     "mlp.linear_fc1.weight",                       "up",        "tp 0", "always"),
        ("mlp.down_proj.weight",            "H F",     "mlp.linear_fc2.weight",                       "plain",     "tp 1", "always"),
    )  # fmt: skip

    # Refused by name: what Megatron-Core has no place for.
    refused = (("hidden_act", ("silu",), "Megatron's --swiglu is SiLU"),)

    def layer_kinds(self, config, where):
        """Refuse other `layer_types`, which engines add, than those that `sliding_window` makes."""
        check_layer_windows(config, window_of_all(config, where, 4096), where)
        return super().layer_kinds(config, where)

    def derived_args(self, config):
        """Add the window of all layers, which counts a token itself; null is none, and absence 4096."""
        return super().derived_args(config) | args_of_window(window_of_all(config, "config.json", 4096))

    def args_as_fields(self, args):
        return super().args_as_fields(args) | window_of_args(args)
