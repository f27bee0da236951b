"""dots.llm1: queries and keys normalized for each head; sigmoid routing with a bias for each expert,
shared experts after some dense layers.

The entries are explained in `reshard.models.family`, the columns of `layer` in `reshard.models.tables`.
"""

from reshard.models.family import Family


class Dots1(Family):
    name = "dots1"
    architecture = "Dots1ForCausalLM"
    symbols = {
        "V": "vocab_size", "H": "hidden_size", "F": "intermediate_size", "E": "n_routed_experts", "FE": "moe_intermediate_size",
        "NS": "n_shared_experts", "NQ": "num_attention_heads", "NKV": "num_key_value_heads", "D": "head_dim",
    }  # fmt: skip

    #    HF config field                       Megatron argument                      relation  default
    config = (
        ("num_hidden_layers",                  "num_layers",                          "=",      "needed"),
        ("hidden_size",                        "hidden_size",                         "=",      "needed"),
        ("intermediate_size",                  "ffn_hidden_size",                     "=",      "needed"),
        ("num_attention_heads",                "num_attention_heads",                 "=",      "needed"),
        ("num_key_value_heads",                "num_query_groups",                    "=",      32),
        ("head_dim",                           "kv_channels",                         "=",      "hidden_size/num_attention_heads"),
        ("vocab_size",                         "vocab_size",                          "=",      "needed"),
        ("max_position_embeddings",            "max_position_embeddings",             "=",      2048),
        ("rms_norm_eps",                       "layernorm_epsilon",                   "=",      1e-06),
        ("tie_word_embeddings",                "untie_embeddings_and_output_weights", "not",    False),
        ("n_routed_experts|num_local_experts", "num_experts",                         "=",      "needed"),
        ("num_experts_per_tok",                "moe_router_topk",                     "=",      "needed"),
        ("moe_intermediate_size",              "moe_ffn_hidden_size",                 "=",      "needed"),
        ("n_group",                            "moe_router_num_groups",               "=",      1),
        ("topk_group",                         "moe_router_group_topk",               "=",      1),
        ("routed_scaling_factor",              "moe_router_topk_scaling_factor",      "=",      1.0),
        ("initializer_range",                  "init_method_std",                     "=",      0.02),
        ("attention_dropout",                  "attention_dropout",                   "=",      0.0),
    )  # fmt: skip

    # Those of a GLM-4.5 of which all dims of a head turn, without biases.
    identifies = {}
    megatron = {
        "qk_layernorm": True, "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True,
        "moe_router_load_balancing_type": "seq_aux_loss",
    }  # fmt: skip
    hf = {"norm_topk_prob": True, "sliding_window": None}
    first_dense = "first_k_dense_replace"
    shared_experts = "n_shared_experts"
    window = "from max_window_layers"
    always = {"topk_method": "noaux_tc", "moe_layer_freq": 1, "use_qk_norm": True}

    #    HF parameter                             shape      Megatron parameter                             arrangement  split    when
    layer = (
        ("input_layernorm.weight",                "H",       "self_attention.linear_qkv.layer_norm_weight", "plain",     "-",     "always"),
        ("self_attn.q_proj.weight",               "NQ*D H",  "self_attention.linear_qkv.weight",            "q",         "tp 0",  "always"),
        ("self_attn.k_proj.weight",               "NKV*D H", "self_attention.linear_qkv.weight",            "k",         "tp 0",  "always"),
        ("self_attn.v_proj.weight",               "NKV*D H", "self_attention.linear_qkv.weight",            "v",         "tp 0",  "always"),
        ("self_attn.q_norm.weight",               "D",       "self_attention.q_layernorm.weight",           "plain",     "-",     "always"),
        ("self_attn.k_norm.weight",               "D",       "self_attention.k_layernorm.weight",           "plain",     "-",     "always"),
        ("self_attn.o_proj.weight",               "H NQ*D",  "self_attention.linear_proj.weight",           "plain",     "tp 1",  "always"),
        ("post_attention_layernorm.weight",       "H",       "mlp.linear_fc1.layer_norm_weight",            "plain",     "-",     "dense"),
        ("mlp.gate_proj.weight",                  "F H",     "mlp.linear_fc1.weight",                       "gate",      "tp 0",  "dense"),
        ("mlp.up_proj.weight",                    "F H",     "mlp.linear_fc1.weight",                       "up",        "tp 0",  "dense"),
        ("mlp.down_proj.weight",                  "H F",     "mlp.linear_fc2.weight",                       "plain",     "tp 1",  "dense"),
        ("post_attention_layernorm.weight",       "H",       "pre_mlp_layernorm.weight",                    "plain",     "-",     "moe"),
        ("mlp.gate.weight",                       "E H",     "mlp.router.weight",                           "plain",     "-",     "moe"),
        ("mlp.gate.e_score_correction_bias",      "E",       "mlp.router.expert_bias",                      "plain",     "-",     "moe", "fp32"),
        ("mlp.experts.{expert}.gate_proj.weight", "FE H",    "mlp.experts.experts.linear_fc1.weight",       "gate",      "etp 0", "moe"),
        ("mlp.experts.{expert}.up_proj.weight",   "FE H",    "mlp.experts.experts.linear_fc1.weight",       "up",        "etp 0", "moe"),
        ("mlp.experts.{expert}.down_proj.weight", "H FE",    "mlp.experts.experts.linear_fc2.weight",       "plain",     "etp 1", "moe"),
        ("mlp.shared_experts.gate_proj.weight",   "NS*FE H", "mlp.shared_experts.linear_fc1.weight",        "gate",      "tp 0",  "moe, n_shared_experts"),
        ("mlp.shared_experts.up_proj.weight",     "NS*FE H", "mlp.shared_experts.linear_fc1.weight",        "up",        "tp 0",  "moe, n_shared_experts"),
        ("mlp.shared_experts.down_proj.weight",   "H NS*FE", "mlp.shared_experts.linear_fc2.weight",        "plain",     "tp 1",  "moe, n_shared_experts"),
    )  # fmt: skip

    # Refused by name: what Megatron-Core has no place for.
    refused = (
        ("hidden_act", ("silu",), "Megatron's --swiglu is SiLU"),
        ("norm_topk_prob", (True,), "Megatron's sigmoid router always normalizes the chosen scores"),
        ("scoring_func", ("noaux_tc", "sigmoid"), "its scores here are those of sigmoid routing"),
        ("attention_bias", (False,), "the biases of the output projection have no row"),
    )

    def implied_fields(self, config, where):
        """Scores that are not normalized, where a config does not say."""
        return {"norm_topk_prob": False}

    def window_of(self, config):
        """Without Qwen's switch: a window of 4096 tokens from layer 62 on, where a config says nothing."""
        return super().window_of({"max_window_layers": 62} | config | {"use_sliding_window": True})
