"""GLM-4.5, 4.6: half of each head turns; q and k normalized or not; sigmoid routing with a bias for
each expert, shared experts after some dense layers, multi-token prediction.

The entries are explained in `reshard.models.family`, the columns of `layer` in `reshard.models.tables`.
"""

from reshard.models.family import Family


class Glm4Moe(Family):
    name = "glm4_moe"
    architecture = "Glm4MoeForCausalLM"
    symbols = {
        "V": "vocab_size", "H": "hidden_size", "F": "intermediate_size", "E": "n_routed_experts", "FE": "moe_intermediate_size",
        "NS": "n_shared_experts", "NQ": "num_attention_heads", "NKV": "num_key_value_heads", "D": "head_dim",
    }  # fmt: skip

    #    HF config field                            Megatron argument                      relation  default
    config = (
        ("num_hidden_layers",                       "num_layers",                          "=",      "needed"),
        ("hidden_size",                             "hidden_size",                         "=",      "needed"),
        ("intermediate_size",                       "ffn_hidden_size",                     "=",      "needed"),
        ("num_attention_heads",                     "num_attention_heads",                 "=",      "needed"),
        ("num_key_value_heads",                     "num_query_groups",                    "=",      8),
        ("head_dim",                                "kv_channels",                         "=",      "hidden_size/num_attention_heads"),
        ("vocab_size",                              "vocab_size",                          "=",      "needed"),
        ("max_position_embeddings",                 "max_position_embeddings",             "=",      131072),
        ("rms_norm_eps",                            "layernorm_epsilon",                   "=",      1e-05),
        ("tie_word_embeddings",                     "untie_embeddings_and_output_weights", "not",    False),
        ("attention_bias",                          "add_qkv_bias",                        "=",      False),
        ("use_qk_norm",                             "qk_layernorm",                        "=",      False),
        ("n_routed_experts|num_local_experts",      "num_experts",                         "=",      "needed"),
        ("num_experts_per_tok",                     "moe_router_topk",                     "=",      "needed"),
        ("moe_intermediate_size",                   "moe_ffn_hidden_size",                 "=",      "needed"),
        ("n_group",                                 "moe_router_num_groups",               "=",      1),
        ("topk_group",                              "moe_router_group_topk",               "=",      1),
        ("routed_scaling_factor",                   "moe_router_topk_scaling_factor",      "=",      1.0),
        ("num_nextn_predict_layers|num_mtp_layers", "mtp_num_layers",                      "=",      0),
        ("initializer_range",                       "init_method_std",                     "=",      0.02),
        ("attention_dropout",                       "attention_dropout",                   "=",      0.0),
    )  # fmt: skip

    # MiniMax-M2's are the same without shared experts.
    identifies = {
        "num_experts": True, "multi_latent_attention": False, "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True, "moe_shared_expert_intermediate_size": True, "squared_relu": False,
    }  # fmt: skip
    megatron = {
        "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True, "moe_router_load_balancing_type": "seq_aux_loss",
    }  # fmt: skip
    hf = {"norm_topk_prob": True}
    first_dense = "first_k_dense_replace"
    shared_experts = "n_shared_experts"
    partial_rotary = 0.5
    rope_types = ("default", "linear")
    always = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}

    #    HF parameter                             shape      Megatron parameter                             arrangement  split    when
    layer = (
        ("input_layernorm.weight",                "H",       "self_attention.linear_qkv.layer_norm_weight", "plain",     "-",     "always"),
        ("self_attn.q_proj.weight",               "NQ*D H",  "self_attention.linear_qkv.weight",            "q",         "tp 0",  "always"),
        ("self_attn.k_proj.weight",               "NKV*D H", "self_attention.linear_qkv.weight",            "k",         "tp 0",  "always"),
        ("self_attn.v_proj.weight",               "NKV*D H", "self_attention.linear_qkv.weight",            "v",         "tp 0",  "always"),
        ("self_attn.q_proj.bias",                 "NQ*D",    "self_attention.linear_qkv.bias",              "q",         "tp 0",  "attention_bias"),
        ("self_attn.k_proj.bias",                 "NKV*D",   "self_attention.linear_qkv.bias",              "k",         "tp 0",  "attention_bias"),
        ("self_attn.v_proj.bias",                 "NKV*D",   "self_attention.linear_qkv.bias",              "v",         "tp 0",  "attention_bias"),
        ("self_attn.q_norm.weight",               "D",       "self_attention.q_layernorm.weight",           "plain",     "-",     "use_qk_norm"),
        ("self_attn.k_norm.weight",               "D",       "self_attention.k_layernorm.weight",           "plain",     "-",     "use_qk_norm"),
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
    )
