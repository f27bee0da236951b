"""DeepSeek-V3, Kimi-K2, K2.5, Moonlight: latent attention, routed and shared experts after some
dense layers, multi-token prediction.

The entries are explained in `reshard.models.family`, the columns of `layer` in `reshard.models.tables`.
"""

from typing import Any

from reshard.models.family import Family


class DeepseekV3(Family):
    name = "deepseek_v3"
    architecture = "DeepseekV3ForCausalLM"
    model_types = ("kimi_k2",)
    wrapped_in = ("KimiK25ForConditionalGeneration", "kimi_k25")
    wrapped_class = "Kimi_K25ForConditionalGeneration"
    wrapped_names = ("", "language_model.")
    towers = ("vision_tower.", "mm_projector.", "model.vision_tower.", "model.mm_projector.")
    tower = "moonvit"
    symbols = {
        "V": "vocab_size", "H": "hidden_size", "F": "intermediate_size", "E": "n_routed_experts", "FE": "moe_intermediate_size",
        "NS": "n_shared_experts", "NQ": "num_attention_heads", "RQ": "q_lora_rank", "RKV": "kv_lora_rank",
        "DN": "qk_nope_head_dim", "DR": "qk_rope_head_dim", "DV": "v_head_dim",
    }  # fmt: skip

    #    HF config field                            Megatron argument                      relation  default
    config = (
        ("num_hidden_layers",                       "num_layers",                          "=",      "needed"),
        ("hidden_size",                             "hidden_size",                         "=",      "needed"),
        ("intermediate_size",                       "ffn_hidden_size",                     "=",      "needed"),
        ("num_attention_heads",                     "num_attention_heads",                 "=",      "needed"),
        ("num_key_value_heads",                     "num_attention_heads",                 "=",      "num_attention_heads"),
        ("vocab_size",                              "vocab_size",                          "=",      "needed"),
        ("max_position_embeddings",                 "max_position_embeddings",             "=",      4096),
        ("rms_norm_eps",                            "layernorm_epsilon",                   "=",      1e-06),
        ("tie_word_embeddings",                     "untie_embeddings_and_output_weights", "not",    False),
        ("q_lora_rank",                             "q_lora_rank",                         "=",      None),
        ("kv_lora_rank",                            "kv_lora_rank",                        "=",      "needed"),
        ("qk_nope_head_dim",                        "qk_head_dim",                         "=",      "needed"),
        ("qk_rope_head_dim",                        "qk_pos_emb_head_dim",                 "=",      "needed"),
        ("v_head_dim",                              "v_head_dim",                          "=",      "needed"),
        ("n_routed_experts|num_local_experts",      "num_experts",                         "=",      "needed"),
        ("num_experts_per_tok",                     "moe_router_topk",                     "=",      "needed"),
        ("moe_intermediate_size",                   "moe_ffn_hidden_size",                 "=",      "needed"),
        ("n_group",                                 "moe_router_num_groups",               "=",      "needed"),
        ("topk_group",                              "moe_router_group_topk",               "=",      "needed"),
        ("routed_scaling_factor",                   "moe_router_topk_scaling_factor",      "=",      "needed, an amount"),
        ("num_nextn_predict_layers|num_mtp_layers", "mtp_num_layers",                      "=",      0),
        ("initializer_range",                       "init_method_std",                     "=",      0.02),
        ("attention_dropout",                       "attention_dropout",                   "=",      0.0),
        ("aux_loss_alpha",                          "moe_aux_loss_coeff",                  "=",      0.0),
    )  # fmt: skip

    identifies = {
        "num_experts": True, "multi_latent_attention": True, "qk_layernorm": True, "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True, "experimental_attention_variant": False,
    }  # fmt: skip
    megatron = {
        "multi_latent_attention": True, "group_query_attention": False, "qk_layernorm": True, "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True, "moe_router_load_balancing_type": "seq_aux_loss",
    }  # fmt: skip
    hf = {"norm_topk_prob": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
    # of Kimi-K2.5's images
    no_effect = (
        "ignore_index", "use_unified_vision_chunk", "video_placeholder", "projection_hidden_size", "projection_layer_norm_eps",
    )  # fmt: skip
    first_dense = "first_k_dense_replace"
    shared_experts = "n_shared_experts"
    specs = "reshard.megatron.layers.mla:specs"
    rotary = "DR"
    rope_types = ("default", "yarn")

    #    HF parameter                             shape              Megatron parameter                                    arrangement  split         when
    layer = (
        ("input_layernorm.weight",                "H",               "input_layernorm.weight",                             "plain",     "-",          "always"),
        ("self_attn.q_proj.weight",               "NQ*DN+NQ*DR H",   "self_attention.linear_q_proj.weight",                "plain",     "tp 0",       "not q_lora_rank"),
        ("self_attn.q_a_proj.weight",             "RQ H",            "self_attention.linear_q_down_proj.weight",           "plain",     "local tp 0", "q_lora_rank"),
        ("self_attn.q_a_layernorm.weight",        "RQ",              "self_attention.linear_q_up_proj.layer_norm_weight",  "plain",     "-",          "q_lora_rank"),
        ("self_attn.q_b_proj.weight",             "NQ*DN+NQ*DR RQ",  "self_attention.linear_q_up_proj.weight",             "plain",     "tp 0",       "q_lora_rank"),
        ("self_attn.kv_a_proj_with_mqa.weight",   "RKV+DR H",        "self_attention.linear_kv_down_proj.weight",          "plain",     "local tp 0", "always"),
        ("self_attn.kv_a_layernorm.weight",       "RKV",             "self_attention.linear_kv_up_proj.layer_norm_weight", "plain",     "-",          "always"),
        ("self_attn.kv_b_proj.weight",            "NQ*DN+NQ*DV RKV", "self_attention.linear_kv_up_proj.weight",            "plain",     "tp 0",       "always"),
        ("self_attn.o_proj.weight",               "H NQ*DV",         "self_attention.linear_proj.weight",                  "plain",     "tp 1",       "always"),
        ("post_attention_layernorm.weight",       "H",               "mlp.linear_fc1.layer_norm_weight",                   "plain",     "-",          "dense"),
        ("mlp.gate_proj.weight",                  "F H",             "mlp.linear_fc1.weight",                              "gate",      "tp 0",       "dense"),
        ("mlp.up_proj.weight",                    "F H",             "mlp.linear_fc1.weight",                              "up",        "tp 0",       "dense"),
        ("mlp.down_proj.weight",                  "H F",             "mlp.linear_fc2.weight",                              "plain",     "tp 1",       "dense"),
        ("post_attention_layernorm.weight",       "H",               "pre_mlp_layernorm.weight",                           "plain",     "-",          "moe"),
        ("mlp.gate.weight",                       "E H",             "mlp.router.weight",                                  "plain",     "-",          "moe"),
        ("mlp.gate.e_score_correction_bias",      "E",               "mlp.router.expert_bias",                             "plain",     "-",          "moe", "fp32"),
        ("mlp.experts.{expert}.gate_proj.weight", "FE H",            "mlp.experts.experts.linear_fc1.weight",              "gate",      "etp 0",      "moe"),
        ("mlp.experts.{expert}.up_proj.weight",   "FE H",            "mlp.experts.experts.linear_fc1.weight",              "up",        "etp 0",      "moe"),
        ("mlp.experts.{expert}.down_proj.weight", "H FE",            "mlp.experts.experts.linear_fc2.weight",              "plain",     "etp 1",      "moe"),
        ("mlp.shared_experts.gate_proj.weight",   "NS*FE H",         "mlp.shared_experts.linear_fc1.weight",               "gate",      "tp 0",       "moe, n_shared_experts"),
        ("mlp.shared_experts.up_proj.weight",     "NS*FE H",         "mlp.shared_experts.linear_fc1.weight",               "up",        "tp 0",       "moe, n_shared_experts"),
        ("mlp.shared_experts.down_proj.weight",   "H NS*FE",         "mlp.shared_experts.linear_fc2.weight",               "plain",     "tp 1",       "moe, n_shared_experts"),
    )  # fmt: skip

    equal = (
        ("num_attention_heads", "num_key_value_heads", "latent attention has a key for each head"),
        ("head_dim", "qk_rope_head_dim", "transformers takes it as the rotary embedding's width"),
        ("qk_head_dim", "qk_nope_head_dim + qk_rope_head_dim", "it is the sum of the two"),
    )
    refused = (
        ("hidden_act", ("silu",), "Megatron's --swiglu is SiLU"),
        ("attention_bias", (False,), "Megatron's add_bias_linear puts a bias on the MLP too"),
        ("scoring_func", ("sigmoid",), "only DeepSeek-V3's sigmoid router is mapped"),
        ("topk_method", ("noaux_tc",), "only DeepSeek-V3's router with a bias for each expert is mapped"),
        ("norm_topk_prob", (True,), "Megatron's sigmoid router always normalizes the chosen scores"),
        ("moe_layer_freq", (1,), "DeepSeek-V3 has experts in every layer after the first dense ones"),
    )

    def name_in_memory(self, published: str) -> str:
        """Give the language model of Kimi-K2.5 the names that it has in transformers' class, which has its output layer
        beside it."""
        inner = "language_model.model."
        if published.startswith(inner):
            return "model.language_model." + published.removeprefix(inner)
        return published.removeprefix("language_model.")

    def as_published(self, config: dict[str, Any]) -> dict[str, Any]:
        """Leave out, too, the hidden size of Kimi-K2.5's language model where vLLM's config has it in the place of the
        tower's, which vLLM's projector takes."""
        config = super().as_published(config)
        vision, text = config.get("vision_config") or {}, config.get("text_config") or {}
        if "mm_hidden_size" not in vision or vision["mm_hidden_size"] != text.get("hidden_size"):
            return config
        own = {name: value for name, value in vision.items() if name != "mm_hidden_size"}
        return config | {"vision_config": own}
