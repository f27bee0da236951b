"""GLM-5, 5.1, 5.2: latent attention to the tokens that an indexer chooses, which in GLM-5.2 only
some layers have.

The entries are explained in `reshard.models.family`, the columns of `layer` in `reshard.models.tables`.
"""

from reshard.models.family import Family
from reshard.models.index_sharing import indexer_layers, sharing_args, sharing_fields


class GlmMoeDsa(Family):
    name = "glm_moe_dsa"
    architecture = "GlmMoeDsaForCausalLM"
    symbols = {
        "V": "vocab_size", "H": "hidden_size", "F": "intermediate_size", "E": "n_routed_experts", "FE": "moe_intermediate_size",
        "NS": "n_shared_experts", "NQ": "num_attention_heads", "RQ": "q_lora_rank", "RKV": "kv_lora_rank",
        "DN": "qk_nope_head_dim", "DR": "qk_rope_head_dim", "DV": "v_head_dim", "NI": "index_n_heads", "DI": "index_head_dim",
    }  # fmt: skip

    #    HF config field                                    Megatron argument                      relation default
    config = (
        ("num_hidden_layers",                               "num_layers",                          "=",     "needed"),
        ("hidden_size",                                     "hidden_size",                         "=",     "needed"),
        ("intermediate_size",                               "ffn_hidden_size",                     "=",     "needed"),
        ("num_attention_heads",                             "num_attention_heads",                 "=",     "needed"),
        ("num_key_value_heads",                             "num_attention_heads",                 "=",     "num_attention_heads"),
        ("vocab_size",                                      "vocab_size",                          "=",     "needed"),
        ("max_position_embeddings",                         "max_position_embeddings",             "=",     202752),
        ("rms_norm_eps",                                    "layernorm_epsilon",                   "=",     1e-05),
        ("tie_word_embeddings",                             "untie_embeddings_and_output_weights", "not",   False),
        ("q_lora_rank",                                     "q_lora_rank",                         "=",     "needed"),
        ("kv_lora_rank",                                    "kv_lora_rank",                        "=",     "needed"),
        ("qk_nope_head_dim",                                "qk_head_dim",                         "=",     "needed"),
        ("qk_rope_head_dim",                                "qk_pos_emb_head_dim",                 "=",     "needed"),
        ("v_head_dim",                                      "v_head_dim",                          "=",     "needed"),
        ("index_n_heads",                                   "dsa_indexer_n_heads",                 "=",     "needed"),
        ("index_head_dim",                                  "dsa_indexer_head_dim",                "=",     "needed"),
        ("index_topk",                                      "dsa_indexer_topk",                    "=",     "needed"),
        ("n_routed_experts|num_local_experts|num_experts",  "num_experts",                         "=",     "needed"),
        ("num_experts_per_tok",                             "moe_router_topk",                     "=",     "needed"),
        ("moe_intermediate_size",                           "moe_ffn_hidden_size",                 "=",     "needed"),
        ("n_group",                                         "moe_router_num_groups",               "=",     1),
        ("topk_group",                                      "moe_router_group_topk",               "=",     1),
        ("routed_scaling_factor",                           "moe_router_topk_scaling_factor",      "=",     "needed, an amount"),
        ("num_nextn_predict_layers|num_mtp_layers",         "mtp_num_layers",                      "=",     0),
        ("initializer_range",                               "init_method_std",                     "=",     0.02),
        ("attention_dropout",                               "attention_dropout",                   "=",     0.0),
    )  # fmt: skip

    identifies = {
        "num_experts": True, "multi_latent_attention": True, "qk_layernorm": True, "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True, "experimental_attention_variant": "dsa", "dsa_indexer_rope_interleaved": True,
    }  # fmt: skip
    # transformers and vLLM norm the indexer's keys with 1e-06 in every model, and rotate nothing by
    # Hadamard's matrix.
    megatron = {
        "multi_latent_attention": True, "group_query_attention": False, "qk_layernorm": True, "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True, "moe_router_load_balancing_type": "seq_aux_loss", "apply_rope_fusion": False,
        "experimental_attention_variant": "dsa", "dsa_indexer_k_norm_epsilon": 1e-06, "dsa_indexer_rope_interleaved": True,
        "dsa_indexer_rotate_activation": False,
    }  # fmt: skip
    hf = {"norm_topk_prob": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1, "indexer_rope_interleave": True}  # fmt: skip
    first_dense = "first_k_dense_replace"
    mlp_types = "mlp_layer_types"
    shared_experts = "n_shared_experts"
    specs = "reshard.megatron.layers.dsa:specs"
    rotary = "DR"
    rope_types = ("default", "yarn")
    # transformers sets both itself: the rotary width, and the one kind of layer that its cache has.
    no_effect = ("head_dim", "layer_types", "index_share_for_mtp_iteration")
    kind_words = ("dense", "moe", "indexer")
    reads = ("indexer_types", "index_topk_pattern", "index_topk_freq", "index_skip_topk_offset")
    always = {
        "scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1, "rope_interleave": True, "indexer_rope_interleave": True,
        "moe_router_dtype": "float32",
    }  # fmt: skip

    #    HF parameter                             shape              Megatron parameter                                                  arrangement split         when
    layer = (
        ("input_layernorm.weight",                "H",               "input_layernorm.weight",                                           "plain",    "-",          "always"),
        ("self_attn.q_a_proj.weight",             "RQ H",            "self_attention.linear_q_down_proj.weight",                         "plain",    "local tp 0", "always"),
        ("self_attn.q_a_layernorm.weight",        "RQ",              "self_attention.q_layernorm.weight",                                "plain",    "-",          "always"),
        ("self_attn.q_b_proj.weight",             "NQ*DN+NQ*DR RQ",  "self_attention.linear_q_up_proj.weight",                           "plain",    "tp 0",       "always"),
        ("self_attn.kv_a_proj_with_mqa.weight",   "RKV+DR H",        "self_attention.linear_kv_down_proj.weight",                        "plain",    "local tp 0", "always"),
        ("self_attn.kv_a_layernorm.weight",       "RKV",             "self_attention.kv_layernorm.weight",                               "plain",    "-",          "always"),
        ("self_attn.kv_b_proj.weight",            "NQ*DN+NQ*DV RKV", "self_attention.linear_kv_up_proj.weight",                          "plain",    "tp 0",       "always"),
        ("self_attn.o_proj.weight",               "H NQ*DV",         "self_attention.linear_proj.weight",                                "plain",    "tp 1",       "always"),
        ("self_attn.indexer.wq_b.weight",         "NI*DI RQ",        "self_attention.core_attention.indexer.linear_wq_b.weight",         "plain",    "-",          "indexer"),
        ("self_attn.indexer.wk.weight",           "DI H",            "self_attention.core_attention.indexer.linear_wk.weight",           "plain",    "-",          "indexer"),
        ("self_attn.indexer.k_norm.weight",       "DI",              "self_attention.core_attention.indexer.k_norm.weight",              "plain",    "-",          "indexer"),
        ("self_attn.indexer.k_norm.bias",         "DI",              "self_attention.core_attention.indexer.k_norm.bias",                "plain",    "-",          "indexer"),
        ("self_attn.indexer.weights_proj.weight", "NI H",            "self_attention.core_attention.indexer.linear_weights_proj.weight", "plain",    "-",          "indexer", "unquantized"),
        ("self_attn.indexer.wq_b.weight",         "NI*DI RQ",        "",                                                                 "ignored",  "-",          "not indexer", "optional"),
        ("self_attn.indexer.wk.weight",           "DI H",            "",                                                                 "ignored",  "-",          "not indexer", "optional"),
        ("self_attn.indexer.k_norm.weight",       "DI",              "",                                                                 "ignored",  "-",          "not indexer", "optional"),
        ("self_attn.indexer.k_norm.bias",         "DI",              "",                                                                 "ignored",  "-",          "not indexer", "optional"),
        ("self_attn.indexer.weights_proj.weight", "NI H",            "",                                                                 "ignored",  "-",          "not indexer", "optional"),
        ("post_attention_layernorm.weight",       "H",               "mlp.linear_fc1.layer_norm_weight",                                 "plain",    "-",          "dense"),
        ("mlp.gate_proj.weight",                  "F H",             "mlp.linear_fc1.weight",                                            "gate",     "tp 0",       "dense"),
        ("mlp.up_proj.weight",                    "F H",             "mlp.linear_fc1.weight",                                            "up",       "tp 0",       "dense"),
        ("mlp.down_proj.weight",                  "H F",             "mlp.linear_fc2.weight",                                            "plain",    "tp 1",       "dense"),
        ("post_attention_layernorm.weight",       "H",               "pre_mlp_layernorm.weight",                                         "plain",    "-",          "moe"),
        ("mlp.gate.weight",                       "E H",             "mlp.router.weight",                                                "plain",    "-",          "moe"),
        ("mlp.gate.e_score_correction_bias",      "E",               "mlp.router.expert_bias",                                           "plain",    "-",          "moe", "fp32"),
        ("mlp.experts.{expert}.gate_proj.weight", "FE H",            "mlp.experts.experts.linear_fc1.weight",                            "gate",     "etp 0",      "moe"),
        ("mlp.experts.{expert}.up_proj.weight",   "FE H",            "mlp.experts.experts.linear_fc1.weight",                            "up",       "etp 0",      "moe"),
        ("mlp.experts.{expert}.down_proj.weight", "H FE",            "mlp.experts.experts.linear_fc2.weight",                            "plain",    "etp 1",      "moe"),
        ("mlp.shared_experts.gate_proj.weight",   "NS*FE H",         "mlp.shared_experts.linear_fc1.weight",                             "gate",     "tp 0",       "moe, n_shared_experts"),
        ("mlp.shared_experts.up_proj.weight",     "NS*FE H",         "mlp.shared_experts.linear_fc1.weight",                             "up",       "tp 0",       "moe, n_shared_experts"),
        ("mlp.shared_experts.down_proj.weight",   "H NS*FE",         "mlp.shared_experts.linear_fc2.weight",                             "plain",    "tp 1",       "moe, n_shared_experts"),
    )  # fmt: skip

    equal = (
        ("num_attention_heads", "num_key_value_heads", "latent attention has a key for each head"),
        ("qk_head_dim", "qk_nope_head_dim + qk_rope_head_dim", "it is the sum of the two"),
    )
    refused = (
        ("hidden_act", ("silu",), "Megatron's --swiglu is SiLU"),
        ("attention_bias", (False,), "Megatron's add_bias_linear puts a bias on the MLP too"),
        ("mlp_bias", (False,), "Megatron's add_bias_linear puts a bias on attention too"),
        ("norm_topk_prob", (True,), "Megatron's sigmoid router always normalizes the chosen scores"),
    )

    def layer_kinds(self, config, where):
        kinds = super().layer_kinds(config, where)
        return tuple(
            f"{kind} indexer" if full else kind
            for kind, full in zip(kinds, indexer_layers(config, where), strict=True)
        )

    def mtp_kinds(self, kinds):
        """It always has an indexer, in Megatron and in vLLM."""
        return (kinds[-1] if "indexer" in kinds[-1] else f"{kinds[-1]} indexer",)

    def derived_args(self, config):
        return super().derived_args(config) | sharing_args(config)

    def args_as_fields(self, args):
        return sharing_fields(args)
