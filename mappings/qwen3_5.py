"""Qwen3.5 to 3.8, dense: linear attention (gated delta nets) in three layers of four, gated
attention in the fourth, multi-token prediction. As published it is the language model of a larger
one, whose vision tower is carried along.

The entries are explained in `reshard.models.family`, the columns of `layer` in `reshard.models.tables`.
"""

from reshard.models.family import Family
from reshard.models.layer_kinds import attention_by_layer_types, linear_args, linear_fields


class Qwen35(Family):
    name = "qwen3_5_text"
    architecture = "Qwen3_5ForCausalLM"
    wrapped_in = ("Qwen3_5ForConditionalGeneration", "qwen3_5")
    towers = ("model.visual.",)
    tower = "visual"
    symbols = {
        "V": "vocab_size", "H": "hidden_size", "F": "intermediate_size",
        "NQ": "num_attention_heads", "NKV": "num_key_value_heads", "D": "head_dim",
        "NK": "linear_num_key_heads", "DK": "linear_key_head_dim", "NV": "linear_num_value_heads", "DV": "linear_value_head_dim", "W": "linear_conv_kernel_dim",
    }  # fmt: skip
    derived = {"C": "2*NK*DK+NV*DV"}
    kind_words = ("dense", "moe", "linear", "full")

    #    HF config field                    Megatron argument                      relation  default
    config = (
        ("num_hidden_layers",               "num_layers",                          "=",      "needed"),
        ("hidden_size",                     "hidden_size",                         "=",      "needed"),
        ("intermediate_size",               "ffn_hidden_size",                     "=",      "needed"),
        ("num_attention_heads",             "num_attention_heads",                 "=",      "needed"),
        ("num_key_value_heads",             "num_query_groups",                    "=",      4),
        ("head_dim",                        "kv_channels",                         "=",      256),
        ("vocab_size",                      "vocab_size",                          "=",      "needed"),
        ("max_position_embeddings",         "max_position_embeddings",             "=",      32768),
        ("rms_norm_eps",                    "layernorm_epsilon",                   "=",      1e-06),
        ("linear_num_key_heads",            "linear_num_key_heads",                "=",      16),
        ("linear_key_head_dim",             "linear_key_head_dim",                 "=",      128),
        ("linear_num_value_heads",          "linear_num_value_heads",              "=",      32),
        ("linear_value_head_dim",           "linear_value_head_dim",               "=",      128),
        ("linear_conv_kernel_dim",          "linear_conv_kernel_dim",              "=",      4),
        ("mtp_num_hidden_layers",           "mtp_num_layers",                      "=",      0),
        ("tie_word_embeddings",             "untie_embeddings_and_output_weights", "not",    False),
        ("initializer_range",               "init_method_std",                     "=",      0.02),
        ("attention_dropout",               "attention_dropout",                   "=",      0.0),
    )  # fmt: skip

    identifies = {"num_experts": False, "qk_layernorm": True, "multi_latent_attention": False, "experimental_attention_variant": "gated_delta_net"}  # fmt: skip
    megatron = {
        "qk_layernorm": True, "attention_output_gate": True, "apply_layernorm_1p": True, "layernorm_zero_centered_gamma": True,
        "experimental_attention_variant": "gated_delta_net",
    }  # fmt: skip
    specs = "reshard.megatron.layers.gated_delta:layer_specs"
    partial_rotary = 0.25
    reads = ("layer_types", "full_attention_interval")
    always = {"mlp_only_layers": [], "attn_output_gate": True, "use_qk_norm": True, "mtp_use_dedicated_embeddings": False}  # fmt: skip
    no_effect = ("mamba_ssm_dtype",)

    #    HF parameter                                     shape        Megatron parameter                             arrangement  split   when
    layer = (
        ("input_layernorm.weight",                        "H",         "self_attention.in_proj.layer_norm_weight",    "plain",     "-",    "linear"),
        ("linear_attn.in_proj_qkv.weight[0:NK*DK]",       "NK*DK H",   "self_attention.in_proj.weight.query",         "plain",     "tp 0", "linear"),
        ("linear_attn.in_proj_qkv.weight[NK*DK:2*NK*DK]", "NK*DK H",   "self_attention.in_proj.weight.key",           "plain",     "tp 0", "linear"),
        ("linear_attn.in_proj_qkv.weight[2*NK*DK:C]",     "NV*DV H",   "self_attention.in_proj.weight.value",         "plain",     "tp 0", "linear"),
        ("linear_attn.in_proj_z.weight",                  "NV*DV H",   "self_attention.in_proj.weight.z",             "plain",     "tp 0", "linear"),
        ("linear_attn.in_proj_b.weight",                  "NV H",      "self_attention.in_proj.weight.beta",          "plain",     "tp 0", "linear"),
        ("linear_attn.in_proj_a.weight",                  "NV H",      "self_attention.in_proj.weight.alpha",         "plain",     "tp 0", "linear"),
        ("linear_attn.conv1d.weight[0:NK*DK]",            "NK*DK 1 W", "self_attention.conv1d.weight.query",          "plain",     "tp 0", "linear"),
        ("linear_attn.conv1d.weight[NK*DK:2*NK*DK]",      "NK*DK 1 W", "self_attention.conv1d.weight.key",            "plain",     "tp 0", "linear"),
        ("linear_attn.conv1d.weight[2*NK*DK:C]",          "NV*DV 1 W", "self_attention.conv1d.weight.value",          "plain",     "tp 0", "linear"),
        ("linear_attn.A_log",                             "NV",        "self_attention.A_log",                        "plain",     "tp 0", "linear"),
        ("linear_attn.dt_bias",                           "NV",        "self_attention.dt_bias",                      "plain",     "tp 0", "linear"),
        ("linear_attn.norm.weight",                       "DV",        "self_attention.out_norm.weight",              "plain",     "-",    "linear", "less 1"),
        ("linear_attn.out_proj.weight",                   "H NV*DV",   "self_attention.out_proj.weight",              "plain",     "tp 1", "linear"),
        ("input_layernorm.weight",                        "H",         "self_attention.linear_qkv.layer_norm_weight", "plain",     "-",    "full"),
        ("self_attn.q_proj.weight[0:D in 2*D]",           "NQ*D H",    "self_attention.linear_qkv.weight",            "q",         "tp 0", "full"),
        ("self_attn.q_proj.weight[D:2*D in 2*D]",         "NQ*D H",    "self_attention.linear_qkv.weight",            "q",         "tp 0", "full"),
        ("self_attn.k_proj.weight",                       "NKV*D H",   "self_attention.linear_qkv.weight",            "k",         "tp 0", "full"),
        ("self_attn.v_proj.weight",                       "NKV*D H",   "self_attention.linear_qkv.weight",            "v",         "tp 0", "full"),
        ("self_attn.q_norm.weight",                       "D",         "self_attention.q_layernorm.weight",           "plain",     "-",    "full"),
        ("self_attn.k_norm.weight",                       "D",         "self_attention.k_layernorm.weight",           "plain",     "-",    "full"),
        ("self_attn.o_proj.weight",                       "H NQ*D",    "self_attention.linear_proj.weight",           "plain",     "tp 1", "full"),
        ("post_attention_layernorm.weight",               "H",         "mlp.linear_fc1.layer_norm_weight",            "plain",     "-",    "always"),
        ("mlp.gate_proj.weight",                          "F H",       "mlp.linear_fc1.weight",                       "gate",      "tp 0", "always"),
        ("mlp.up_proj.weight",                            "F H",       "mlp.linear_fc1.weight",                       "up",        "tp 0", "always"),
        ("mlp.down_proj.weight",                          "H F",       "mlp.linear_fc2.weight",                       "plain",     "tp 1", "always"),
    )  # fmt: skip
    mtp = (
        ("pre_fc_norm_embedding.weight", "H", "enorm.weight", "plain", "-", "always"),
        ("pre_fc_norm_hidden.weight", "H", "hnorm.weight", "plain", "-", "always"),
        ("fc.weight", "H 2*H", "eh_proj.weight", "plain", "tp 0", "always"),
        ("norm.weight", "H", "final_layernorm.weight", "plain", "-", "always"),
    )
    mtp_prefixes = ("mtp.", "mtp.layers.{index}.")

    refused = (
        ("hidden_act", ("silu",), "Megatron's --swiglu is SiLU"),
        ("attention_bias", (False,), "Megatron's add_bias_linear puts a bias on the MLP too"),
    )

    def layer_kinds(self, config, where):
        """Linear or full attention."""
        return tuple(f"dense {attention}" for attention in attention_by_layer_types(config, where))

    def derived_args(self, config):
        return super().derived_args(config) | linear_args(config)

    def args_as_fields(self, args):
        return super().args_as_fields(args) | linear_fields(args)
