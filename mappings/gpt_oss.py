"""gpt-oss: attention with sinks and, in every second layer, a window; experts with biases and a
clamped, gated activation.

The entries are explained in `reshard.models.family`, the columns of `layer` in `reshard.models.tables`.
"""

from reshard.models.family import Family
from reshard.models.layer_kinds import window_args, window_fields, windows_by_layer_types


class GptOss(Family):
    name = "gpt_oss"
    architecture = "GptOssForCausalLM"
    symbols = {
        "V": "vocab_size", "H": "hidden_size", "E": "num_local_experts", "FE": "intermediate_size",
        "NQ": "num_attention_heads", "NKV": "num_key_value_heads", "D": "head_dim",
    }  # fmt: skip

    #    HF config field                          Megatron argument                      relation default
    config = (
        ("num_hidden_layers",                     "num_layers",                          "=",     36),
        ("hidden_size",                           "hidden_size",                         "=",     2880),
        ("intermediate_size",                     "ffn_hidden_size",                     "=",     2880),
        ("intermediate_size",                     "moe_ffn_hidden_size",                 "=",     2880),
        ("num_attention_heads",                   "num_attention_heads",                 "=",     64),
        ("num_key_value_heads",                   "num_query_groups",                    "=",     8),
        ("head_dim",                              "kv_channels",                         "=",     64),
        ("vocab_size",                            "vocab_size",                          "=",     201088),
        ("max_position_embeddings",               "max_position_embeddings",             "=",     131072),
        ("rms_norm_eps",                          "layernorm_epsilon",                   "=",     1e-05),
        ("num_local_experts|num_experts",         "num_experts",                         "=",     128),
        ("num_experts_per_tok|experts_per_token", "moe_router_topk",                     "=",     4),
        ("sliding_window",                        "window_size",                         "=",     128),
        ("swiglu_limit",                          "activation_func_clamp_value",         "=",     7.0),
        ("tie_word_embeddings",                   "untie_embeddings_and_output_weights", "not",   False),
        ("initializer_range",                     "init_method_std",                     "=",     0.02),
        ("attention_dropout",                     "attention_dropout",                   "=",     0.0),
        ("router_aux_loss_coef",                  "moe_aux_loss_coeff",                  "=",     0.001),
    )  # fmt: skip

    identifies = {
        "num_experts": True, "multi_latent_attention": False, "qk_layernorm": False, "add_bias_linear": True,
        "softmax_type": "learnable", "moe_router_score_function": "softmax", "moe_router_enable_expert_bias": False,
    }  # fmt: skip
    megatron = {
        "swiglu": False, "quick_geglu": True, "glu_linear_offset": 1.0, "softmax_type": "learnable", "add_bias_linear": True,
        "bias_dropout_fusion": False,
    }  # fmt: skip
    rope_theta = 150000.0
    reads = ("layer_types",)
    no_effect = ("initial_context_length",)

    #    HF parameter                             shape      Megatron parameter                              arrangement split    when
    layer = (
        ("input_layernorm.weight",                "H",       "self_attention.linear_qkv.layer_norm_weight",  "plain",    "-",     "always"),
        ("self_attn.q_proj.weight",               "NQ*D H",  "self_attention.linear_qkv.weight",             "q",        "tp 0",  "always"),
        ("self_attn.k_proj.weight",               "NKV*D H", "self_attention.linear_qkv.weight",             "k",        "tp 0",  "always"),
        ("self_attn.v_proj.weight",               "NKV*D H", "self_attention.linear_qkv.weight",             "v",        "tp 0",  "always"),
        ("self_attn.q_proj.bias",                 "NQ*D",    "self_attention.linear_qkv.bias",               "q",        "tp 0",  "always"),
        ("self_attn.k_proj.bias",                 "NKV*D",   "self_attention.linear_qkv.bias",               "k",        "tp 0",  "always"),
        ("self_attn.v_proj.bias",                 "NKV*D",   "self_attention.linear_qkv.bias",               "v",        "tp 0",  "always"),
        ("self_attn.o_proj.weight",               "H NQ*D",  "self_attention.linear_proj.weight",            "plain",    "tp 1",  "always"),
        ("self_attn.o_proj.bias",                 "H",       "self_attention.linear_proj.bias",              "plain",    "-",     "always"),
        ("self_attn.sinks",                       "NQ",      "self_attention.core_attention.softmax_offset", "plain",    "tp 0",  "always"),
        ("post_attention_layernorm.weight",       "H",       "pre_mlp_layernorm.weight",                     "plain",    "-",     "always"),
        ("mlp.router.weight",                     "E H",     "mlp.router.weight",                            "plain",    "-",     "always"),
        ("mlp.router.bias",                       "E",       "mlp.router.bias",                              "plain",    "-",     "always"),
        ("mlp.experts.{expert}.gate_proj.weight", "FE H",    "mlp.experts.experts.linear_fc1.weight",        "gate",     "etp 0", "always"),
        ("mlp.experts.{expert}.up_proj.weight",   "FE H",    "mlp.experts.experts.linear_fc1.weight",        "up",       "etp 0", "always"),
        ("mlp.experts.{expert}.gate_proj.bias",   "FE",      "mlp.experts.experts.linear_fc1.bias",          "gate",     "etp 0", "always"),
        ("mlp.experts.{expert}.up_proj.bias",     "FE",      "mlp.experts.experts.linear_fc1.bias",          "up",       "etp 0", "always"),
        ("mlp.experts.{expert}.down_proj.weight", "H FE",    "mlp.experts.experts.linear_fc2.weight",        "plain",    "etp 1", "always"),
        ("mlp.experts.{expert}.down_proj.bias",   "H",       "mlp.experts.experts.linear_fc2.bias",          "plain",    "-",     "always"),
    )  # fmt: skip

    # A row of gate and one of up in turn, of both of which save_pretrained writes the transposed matrix.
    experts_apart = False
    packed = (
        ("mlp.experts.{expert}.gate_proj.weight", "mlp.experts.gate_up_proj[{expert}, :, 0:1 in 2].T"),
        ("mlp.experts.{expert}.up_proj.weight",   "mlp.experts.gate_up_proj[{expert}, :, 1:2 in 2].T"),
        ("mlp.experts.{expert}.gate_proj.bias",   "mlp.experts.gate_up_proj_bias[{expert}, 0:1 in 2]"),
        ("mlp.experts.{expert}.up_proj.bias",     "mlp.experts.gate_up_proj_bias[{expert}, 1:2 in 2]"),
        ("mlp.experts.{expert}.down_proj.weight", "mlp.experts.down_proj[{expert}].T"),
        ("mlp.experts.{expert}.down_proj.bias",   "mlp.experts.down_proj_bias[{expert}]"),
    )  # fmt: skip
    packed_codes = (
        ("mlp.experts.{expert}.gate_proj.weight", "mlp.experts.gate_up_proj_blocks[{expert}, 0:1 in 2]"),
        ("mlp.experts.{expert}.up_proj.weight",   "mlp.experts.gate_up_proj_blocks[{expert}, 1:2 in 2]"),
        ("mlp.experts.{expert}.down_proj.weight", "mlp.experts.down_proj_blocks[{expert}]"),
    )  # fmt: skip

    refused = (
        ("hidden_act", ("silu",), "its experts' activation is a gated SiLU"),
        ("swiglu_alpha", (1.702,), "Megatron's --quick-geglu has 1.702 built in"),
        (
            "attention_bias",
            (True,),
            "Megatron's add_bias_linear puts a bias on attention and experts at once",
        ),
    )

    def layer_kinds(self, config, where):
        """Refuse layers of other kinds than those with a window and those without."""
        windows_by_layer_types(config, where)
        return super().layer_kinds(config, where)

    def rope(self, config, where="config.json"):
        """Fill in transformers' YaRN where a config says nothing."""
        if config.get("rope_parameters") or config.get("rope_scaling"):
            return super().rope(config, where)
        yarn = {
            "rope_type": "yarn",
            "factor": 32.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        }
        return super().rope(config | {"rope_scaling": yarn}, where)

    def derived_args(self, config):
        return super().derived_args(config) | window_args(config)

    def args_as_fields(self, args):
        return super().args_as_fields(args) | window_fields(args)
