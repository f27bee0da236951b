"""MiniMax-M2, M2.5, M2.7: queries and keys normalized over all heads together, half of each head
turns, sigmoid routing with a bias for each expert, and experts under Mixtral's names.

The entries are explained in `reshard.models.family`, the columns of `layer` in `reshard.models.tables`.
"""

from reshard.models.family import Family


class MiniMaxM2(Family):
    name = "minimax_m2"
    architecture = "MiniMaxM2ForCausalLM"
    symbols = {
        "V": "vocab_size", "H": "hidden_size", "E": "num_local_experts", "FE": "intermediate_size",
        "NQ": "num_attention_heads", "NKV": "num_key_value_heads", "D": "head_dim",
    }  # fmt: skip

    #    HF config field                  Megatron argument                      relation  default
    config = (
        ("num_hidden_layers",             "num_layers",                          "=",      "needed"),
        ("hidden_size",                   "hidden_size",                         "=",      "needed"),
        ("intermediate_size",             "ffn_hidden_size",                     "=",      "needed"),
        ("intermediate_size",             "moe_ffn_hidden_size",                 "=",      "needed"),
        ("num_attention_heads",           "num_attention_heads",                 "=",      "needed"),
        ("num_key_value_heads",           "num_query_groups",                    "=",      8),
        ("head_dim",                      "kv_channels",                         "=",      128),
        ("vocab_size",                    "vocab_size",                          "=",      "needed"),
        ("max_position_embeddings",       "max_position_embeddings",             "=",      196608),
        ("rms_norm_eps",                  "layernorm_epsilon",                   "=",      1e-06),
        ("num_local_experts|num_experts", "num_experts",                         "=",      256),
        ("num_experts_per_tok",           "moe_router_topk",                     "=",      8),
        ("tie_word_embeddings",           "untie_embeddings_and_output_weights", "not",    False),
        ("initializer_range",             "init_method_std",                     "=",      0.02),
        ("attention_dropout",             "attention_dropout",                   "=",      0.0),
        ("router_aux_loss_coef",          "moe_aux_loss_coeff",                  "=",      0.001),
    )  # fmt: skip

    # GLM-4.5's are the same with shared experts.
    identifies = {
        "num_experts": True, "multi_latent_attention": False, "qk_layernorm": True, "add_qkv_bias": False,
        "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True, "moe_shared_expert_intermediate_size": False,
    }  # fmt: skip
    megatron = {
        "qk_layernorm": True, "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True,
        "spec": ["reshard.megatron.full_width_norm_spec", "layer"],
    }  # fmt: skip
    hf = {
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
    }
    specs = "reshard.megatron.layers.full_width_norm:specs"
    partial_rotary = 1.0
    rope_theta = 5000000.0
    reads = ("rotary_dim",)
    # Published checkpoints have no multi-token prediction, whatever these say, and no other MLP
    # than the experts.
    no_effect = ("use_mtp", "num_mtp_modules", "mtp_transformer_layers", "mlp_intermediate_size")
    always = {
        "scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True, "qk_norm_type": "per_layer", "shared_intermediate_size": 0,
        "layernorm_full_attention_beta": 1.0, "layernorm_mlp_beta": 1.0,
    }  # fmt: skip

    #    HF parameter                                   shape      Megatron parameter                             arrangement  split    when
    layer = (
        ("input_layernorm.weight",                      "H",       "self_attention.linear_qkv.layer_norm_weight", "plain",     "-",     "always"),
        ("self_attn.q_proj.weight",                     "NQ*D H",  "self_attention.linear_qkv.weight",            "q",         "tp 0",  "always"),
        ("self_attn.k_proj.weight",                     "NKV*D H", "self_attention.linear_qkv.weight",            "k",         "tp 0",  "always"),
        ("self_attn.v_proj.weight",                     "NKV*D H", "self_attention.linear_qkv.weight",            "v",         "tp 0",  "always"),
        ("self_attn.q_norm.weight",                     "NQ*D",    "self_attention.q_layernorm.weight",           "q",         "-",     "always"),
        ("self_attn.k_norm.weight",                     "NKV*D",   "self_attention.k_layernorm.weight",           "k",         "-",     "always"),
        ("self_attn.o_proj.weight",                     "H NQ*D",  "self_attention.linear_proj.weight",           "plain",     "tp 1",  "always"),
        ("post_attention_layernorm.weight",             "H",       "pre_mlp_layernorm.weight",                    "plain",     "-",     "always"),
        ("block_sparse_moe.gate.weight",                "E H",     "mlp.router.weight",                           "plain",     "-",     "always"),
        ("block_sparse_moe.e_score_correction_bias",    "E",       "mlp.router.expert_bias",                      "plain",     "-",     "always", "fp32"),
        ("block_sparse_moe.experts.{expert}.w1.weight", "FE H",    "mlp.experts.experts.linear_fc1.weight",       "gate",      "etp 0", "always"),
        ("block_sparse_moe.experts.{expert}.w3.weight", "FE H",    "mlp.experts.experts.linear_fc1.weight",       "up",        "etp 0", "always"),
        ("block_sparse_moe.experts.{expert}.w2.weight", "H FE",    "mlp.experts.experts.linear_fc2.weight",       "plain",     "etp 1", "always"),
    )  # fmt: skip

    #    HF parameter                                   in a transformers model
    in_memory = (
        ("block_sparse_moe.gate.weight",                "mlp.gate.weight"),
        ("block_sparse_moe.e_score_correction_bias",    "mlp.e_score_correction_bias"),
        ("block_sparse_moe.experts.{expert}.w1.weight", "mlp.experts.{expert}.gate_proj.weight"),
        ("block_sparse_moe.experts.{expert}.w3.weight", "mlp.experts.{expert}.up_proj.weight"),
        ("block_sparse_moe.experts.{expert}.w2.weight", "mlp.experts.{expert}.down_proj.weight"),
    )  # fmt: skip

    refused = (("hidden_act", ("silu",), "Megatron's --swiglu is SiLU"),)

    def rope(self, config, where="config.json"):
        """Published configs have the dims that turn in place of their share."""
        dims, share = config.get("rotary_dim"), {}
        if dims is not None and config.get("partial_rotary_factor") is None:
            share = {"partial_rotary_factor": dims / config["head_dim"]}
        return super().rope(config | share, where)

    def share_as_fields(self, share, config):
        """vLLM reads only the dims."""
        return {"rotary_dim": round(share * config["head_dim"])}
