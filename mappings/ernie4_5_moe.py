"""ERNIE-4.5 with experts: softmax routing with a bias for each expert, dense layers before, between and
after those with experts, shared experts, and pairs of neighboring dims that turn.

The entries are explained in `reshard.models.family`, the columns of `layer` in `reshard.models.tables`.
"""

from reshard.models.family import Family
from reshard.models.layer_kinds import interval_of_pattern, moe_by_interval


class Ernie45Moe(Family):
    name = "ernie4_5_moe"
    architecture = "Ernie4_5_MoeForCausalLM"
    towers = ("model.mtp_",)  # multi-token prediction, whose block Megatron's MTP layers lack
    symbols = {
        "V": "vocab_size", "H": "hidden_size", "F": "intermediate_size", "E": "moe_num_experts", "FE": "moe_intermediate_size",
        "NS": "moe_num_shared_experts", "NQ": "num_attention_heads", "NKV": "num_key_value_heads", "D": "head_dim",
    }  # fmt: skip

    #    HF config field                Megatron argument                      relation  default
    config = (
        ("num_hidden_layers",           "num_layers",                          "=",      "needed"),
        ("hidden_size",                 "hidden_size",                         "=",      "needed"),
        ("intermediate_size",           "ffn_hidden_size",                     "=",      "needed"),
        ("num_attention_heads",         "num_attention_heads",                 "=",      "needed"),
        ("num_key_value_heads",         "num_query_groups",                    "=",      4),
        ("head_dim",                    "kv_channels",                         "=",      "hidden_size/num_attention_heads"),
        ("vocab_size",                  "vocab_size",                          "=",      "needed"),
        ("max_position_embeddings",     "max_position_embeddings",             "=",      131072),
        ("rms_norm_eps",                "layernorm_epsilon",                   "=",      1e-05),
        ("moe_num_experts|num_experts", "num_experts",                         "=",      64),
        ("moe_k|num_experts_per_tok",   "moe_router_topk",                     "=",      6),
        ("moe_intermediate_size",       "moe_ffn_hidden_size",                 "=",      1536),
        ("tie_word_embeddings",         "untie_embeddings_and_output_weights", "not",    True),
        ("initializer_range",           "init_method_std",                     "=",      0.02),
        ("router_aux_loss_coef",        "moe_aux_loss_coeff",                  "=",      0.001),
    )  # fmt: skip

    identifies = {
        "num_experts": True, "multi_latent_attention": False, "qk_layernorm": False, "add_qkv_bias": False,
        "moe_router_score_function": "softmax", "softmax_type": "vanilla", "squared_relu": False,
        "spec": ["reshard.megatron.softmax_bias_spec", "layer"],
    }  # fmt: skip
    megatron = {
        "rotary_interleaved": True,
        "attention_dropout": 0.0,
        "spec": ["reshard.megatron.softmax_bias_spec", "layer"],
    }
    specs = "reshard.megatron.layers.softmax_bias:specs"
    shared_experts = "moe_num_shared_experts"
    rope_theta = 500000.0
    rope_types = ("default", "linear")
    reads = ("moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval")
    no_effect = ("num_nextn_predict_layers", "moe_capacity", "moe_use_aux_free")
    in_memory = (
        ("mlp.moe_statics.e_score_correction_bias[0]", "mlp.gate.moe_statics.e_score_correction_bias[0]"),
    )

    #    HF parameter                                  shape      Megatron parameter                             arrangementsplit    when
    layer = (
        ("input_layernorm.weight",                     "H",       "self_attention.linear_qkv.layer_norm_weight", "plain", "-",     "always"),
        ("self_attn.q_proj.weight",                    "NQ*D H",  "self_attention.linear_qkv.weight",            "q",     "tp 0",  "always"),
        ("self_attn.k_proj.weight",                    "NKV*D H", "self_attention.linear_qkv.weight",            "k",     "tp 0",  "always"),
        ("self_attn.v_proj.weight",                    "NKV*D H", "self_attention.linear_qkv.weight",            "v",     "tp 0",  "always"),
        ("self_attn.o_proj.weight",                    "H NQ*D",  "self_attention.linear_proj.weight",           "plain", "tp 1",  "always"),
        ("post_attention_layernorm.weight",            "H",       "mlp.linear_fc1.layer_norm_weight",            "plain", "-",     "dense"),
        ("mlp.gate_proj.weight",                       "F H",     "mlp.linear_fc1.weight",                       "gate",  "tp 0",  "dense"),
        ("mlp.up_proj.weight",                         "F H",     "mlp.linear_fc1.weight",                       "up",    "tp 0",  "dense"),
        ("mlp.down_proj.weight",                       "H F",     "mlp.linear_fc2.weight",                       "plain", "tp 1",  "dense"),
        ("post_attention_layernorm.weight",            "H",       "pre_mlp_layernorm.weight",                    "plain", "-",     "moe"),
        ("mlp.gate.weight",                            "E H",     "mlp.router.weight",                           "plain", "-",     "moe"),
        ("mlp.moe_statics.e_score_correction_bias[0]", "E",       "mlp.router.expert_bias",                      "plain", "-",     "moe",                         "fp32"),
        ("mlp.experts.{expert}.gate_proj.weight",      "FE H",    "mlp.experts.experts.linear_fc1.weight",       "gate",  "etp 0", "moe"),
        ("mlp.experts.{expert}.up_proj.weight",        "FE H",    "mlp.experts.experts.linear_fc1.weight",       "up",    "etp 0", "moe"),
        ("mlp.experts.{expert}.down_proj.weight",      "H FE",    "mlp.experts.experts.linear_fc2.weight",       "plain", "etp 1", "moe"),
        ("mlp.shared_experts.gate_proj.weight",        "NS*FE H", "mlp.shared_experts.linear_fc1.weight",        "gate",  "tp 0",  "moe, moe_num_shared_experts"),
        ("mlp.shared_experts.up_proj.weight",          "NS*FE H", "mlp.shared_experts.linear_fc1.weight",        "up",    "tp 0",  "moe, moe_num_shared_experts"),
        ("mlp.shared_experts.down_proj.weight",        "H NS*FE", "mlp.shared_experts.linear_fc2.weight",        "plain", "tp 1",  "moe, moe_num_shared_experts"),
    )  # fmt: skip

    refused = (
        ("hidden_act", ("silu",), "Megatron's --swiglu is SiLU"),
        ("use_bias", (False,), "Megatron's add_bias_linear puts a bias on experts too"),
        ("moe_norm_min", (1e-12,), "Megatron normalizes the chosen scores without a bound"),
    )

    def implied_fields(self, config, where):
        """Two shared experts, where a config does not say how many."""
        return {"moe_num_shared_experts": 2}

    def args_as_fields(self, args):
        """Zero of them, which is not what absence means."""
        return {} if args.get("moe_shared_expert_intermediate_size") else {"moe_num_shared_experts": 0}

    def layer_kinds(self, config, where):
        """Experts in every `moe_layer_interval`-th layer, from `moe_layer_start_index` to `moe_layer_end_index`."""
        return tuple(moe_by_interval(config, where))

    def kinds_as_fields(self, pattern):
        """The first and the last layer with experts, and how far they are from one another."""
        return interval_of_pattern(pattern)
