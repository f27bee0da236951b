"""Phi-3 and Phi-4: queries, keys and values in one published matrix, gates and ups in another; a window in
all layers (Phi-3) or in none (Phi-4).

The entries are explained in `reshard.models.family`, the columns of `layer` in `reshard.models.tables`.
"""

from reshard.models.family import Family
from reshard.models.layer_kinds import (
    args_of_window,
    check_layer_windows,
    window_of_all,
    window_of_args,
)


class Phi3(Family):
    name = "phi3"
    architecture = "Phi3ForCausalLM"
    symbols = {
        "V": "vocab_size", "H": "hidden_size", "F": "intermediate_size",
        "NQ": "num_attention_heads", "NKV": "num_key_value_heads", "D": "head_dim",
    }  # fmt: skip
    # Where queries end, keys, and all rows of attention.
    derived = {"Q": "NQ*D", "K": "NQ*D+NKV*D", "A": "NQ*D+2*NKV*D"}

    #    HF config field            Megatron argument                      relation  default
    config = (
        ("num_hidden_layers",       "num_layers",                          "=",      "needed"),
        ("hidden_size",             "hidden_size",                         "=",      "needed"),
        ("intermediate_size",       "ffn_hidden_size",                     "=",      "needed"),
        ("num_attention_heads",     "num_attention_heads",                 "=",      "needed"),
        ("num_key_value_heads",     "num_query_groups",                    "=",      "num_attention_heads"),
        ("head_dim",                "kv_channels",                         "=",      "hidden_size/num_attention_heads"),
        ("vocab_size",              "vocab_size",                          "=",      "needed"),
        ("max_position_embeddings", "max_position_embeddings",             "=",      4096),
        ("rms_norm_eps",            "layernorm_epsilon",                   "=",      1e-05),
        ("tie_word_embeddings",     "untie_embeddings_and_output_weights", "not",    False),
        ("initializer_range",       "init_method_std",                     "=",      0.02),
        ("attention_dropout",       "attention_dropout",                   "=",      0.0),
    )  # fmt: skip

    # None: a Llama's or a Mistral's.
    identifies = {}
    rope_types = ("default",)  # to its class even YaRN is a longrope, which Megatron-Core lacks
    reads = ("sliding_window", "layer_types")
    no_effect = ("original_max_position_embeddings",)  # longrope's

    #    HF parameter                          shape      Megatron parameter                             arrangement  split   when
    layer = (
        ("input_layernorm.weight",             "H",       "self_attention.linear_qkv.layer_norm_weight", "plain",     "-",    "always"),
        ("self_attn.qkv_proj.weight[0:Q]",     "NQ*D H",  "self_attention.linear_qkv.weight",            "q",         "tp 0", "always"),
        ("self_attn.qkv_proj.weight[Q:K]",     "NKV*D H", "self_attention.linear_qkv.weight",            "k",         "tp 0", "always"),
        ("self_attn.qkv_proj.weight[K:A]",     "NKV*D H", "self_attention.linear_qkv.weight",            "v",         "tp 0", "always"),
        ("self_attn.o_proj.weight",            "H NQ*D",  "self_attention.linear_proj.weight",           "plain",     "tp 1", "always"),
        ("post_attention_layernorm.weight",    "H",       "mlp.linear_fc1.layer_norm_weight",            "plain",     "-",    "always"),
        ("mlp.gate_up_proj.weight[0:F]",       "F H",     "mlp.linear_fc1.weight",                       "gate",      "tp 0", "always"),
        ("mlp.gate_up_proj.weight[F:2*F]",     "F H",     "mlp.linear_fc1.weight",                       "up",        "tp 0", "always"),
        ("mlp.down_proj.weight",               "H F",     "mlp.linear_fc2.weight",                       "plain",     "tp 1", "always"),
    )  # fmt: skip

    # Refused by name: what Megatron-Core has no place for.
    refused = (("hidden_act", ("silu",), "Megatron's --swiglu is SiLU"),)

    def layer_kinds(self, config, where):
        """Refuse other `layer_types`, which engines add, than those that `sliding_window` makes."""
        check_layer_windows(config, window_of_all(config, where), where)
        return super().layer_kinds(config, where)

    def derived_args(self, config):
        """Add the window of all layers, which counts a token itself; null and absence are none."""
        return super().derived_args(config) | args_of_window(window_of_all(config, "config.json"))

    def args_as_fields(self, args):
        return super().args_as_fields(args) | window_of_args(args)
