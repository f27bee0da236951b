"""DeepSeek-V3: multi-head latent attention, routed and shared experts after some dense layers, multi-token prediction.

The columns are explained in `reshard/tables.py`.
"""

FAMILY = "deepseek_v3"
ARCHITECTURE = "DeepseekV3ForCausalLM"

SYMBOLS = {
    "V": "vocab_size", "H": "hidden_size", "F": "intermediate_size", "E": "n_routed_experts", "FE": "moe_intermediate_size",
    "NS": "n_shared_experts", "NQ": "num_attention_heads", "RQ": "q_lora_rank", "RKV": "kv_lora_rank",
    "DN": "qk_nope_head_dim", "DR": "qk_rope_head_dim", "DV": "v_head_dim",
}  # fmt: skip

#    HF config field                       Megatron argument                      relation  default
CONFIG = (
    ("num_hidden_layers",                  "num_layers",                          "=",      "needed"),
    ("hidden_size",                        "hidden_size",                         "=",      "needed"),
    ("intermediate_size",                  "ffn_hidden_size",                     "=",      "needed"),
    ("num_attention_heads",                "num_attention_heads",                 "=",      "needed"),
    ("num_key_value_heads",                "num_attention_heads",                 "=",      "num_attention_heads"),
    ("vocab_size",                         "vocab_size",                          "=",      "needed"),
    ("max_position_embeddings",            "max_position_embeddings",             "=",      4096),
    ("rms_norm_eps",                       "layernorm_epsilon",                   "=",      1e-06),
    ("tie_word_embeddings",                "untie_embeddings_and_output_weights", "not",    False),
    ("q_lora_rank",                        "q_lora_rank",                         "=",      None),
    ("kv_lora_rank",                       "kv_lora_rank",                        "=",      "needed"),
    ("qk_nope_head_dim",                   "qk_head_dim",                         "=",      "needed"),
    ("qk_rope_head_dim",                   "qk_pos_emb_head_dim",                 "=",      "needed"),
    ("v_head_dim",                         "v_head_dim",                          "=",      "needed"),
    ("n_routed_experts|num_local_experts", "num_experts",                         "=",      "needed"),
    ("num_experts_per_tok",                "moe_router_topk",                     "=",      "needed"),
    ("moe_intermediate_size",              "moe_ffn_hidden_size",                 "=",      "needed"),
    ("n_group",                            "moe_router_num_groups",               "=",      None),
    ("topk_group",                         "moe_router_group_topk",               "=",      None),
    ("routed_scaling_factor",              "moe_router_topk_scaling_factor",      "=",      1.0),
    ("num_nextn_predict_layers",           "mtp_num_layers",                      "=",      0),
)  # fmt: skip

MEGATRON = {
    "normalization": "RMSNorm", "swiglu": True, "position_embedding_type": "rope", "multi_latent_attention": True,
    "add_bias_linear": False, "add_qkv_bias": False, "qk_layernorm": True, "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True, "moe_router_dtype": "fp32", "moe_grouped_gemm": True,
}  # fmt: skip
HF = {
    "model_type": "deepseek_v3", "hidden_act": "silu", "norm_topk_prob": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
}  # fmt: skip
ROPE = "yarn"
LAYER_KINDS = "first_dense"

#    HF parameter                             shape              Megatron parameter                                    local spec                            vLLM parameter                            arrangement split         where
MODEL = (
    ("model.embed_tokens.weight",             "V H",             "embedding.word_embeddings.weight",                   "=",                                  "=",                                      "vocab",    "tp 0",       "always"),
    ("model.norm.weight",                     "H",               "decoder.final_layernorm.weight",                     "=",                                  "=",                                      "plain",    "-",          "always"),
    ("lm_head.weight",                        "V H",             "output_layer.weight",                                "=",                                  "=",                                      "vocab",    "tp 0",       "untied"),
    ("lm_head.weight",                        "V H",             "embedding.word_embeddings.weight",                   "=",                                  "",                                       "copy",     "tp 0",       "tied optional"),
)  # fmt: skip

LAYER = (
    ("input_layernorm.weight",                "H",               "input_layernorm.weight",                             "=",                                  "=",                                      "plain",    "-",          "always"),
    ("self_attn.q_proj.weight",               "NQ*DN+NQ*DR H",   "self_attention.linear_q_proj.weight",                "=",                                  "=",                                      "plain",    "tp 0",       "no_q_lora"),
    ("self_attn.q_a_proj.weight",             "RQ H",            "self_attention.linear_q_down_proj.weight",           "=",                                  "self_attn.fused_qkv_a_proj.weight",      "plain",    "local tp 0", "q_lora"),
    ("self_attn.q_a_layernorm.weight",        "RQ",              "self_attention.linear_q_up_proj.layer_norm_weight",  "self_attention.q_layernorm.weight",  "=",                                      "plain",    "-",          "q_lora"),
    ("self_attn.q_b_proj.weight",             "NQ*DN+NQ*DR RQ",  "self_attention.linear_q_up_proj.weight",             "=",                                  "=",                                      "plain",    "tp 0",       "q_lora"),
    ("self_attn.kv_a_proj_with_mqa.weight",   "RKV+DR H",        "self_attention.linear_kv_down_proj.weight",          "=",                                  "self_attn.fused_qkv_a_proj.weight",      "plain",    "local tp 0", "q_lora"),
    ("self_attn.kv_a_proj_with_mqa.weight",   "RKV+DR H",        "self_attention.linear_kv_down_proj.weight",          "=",                                  "=",                                      "plain",    "local tp 0", "no_q_lora"),
    ("self_attn.kv_a_layernorm.weight",       "RKV",             "self_attention.linear_kv_up_proj.layer_norm_weight", "self_attention.kv_layernorm.weight", "=",                                      "plain",    "-",          "always"),
    ("self_attn.kv_b_proj.weight",            "NQ*DN+NQ*DV RKV", "self_attention.linear_kv_up_proj.weight",            "=",                                  "=",                                      "plain",    "tp 0",       "always"),
    ("self_attn.o_proj.weight",               "H NQ*DV",         "self_attention.linear_proj.weight",                  "=",                                  "=",                                      "plain",    "tp 1",       "always"),
    ("self_attn.rotary_emb.inv_freq",         "DR/2",            "",                                                   "",                                   "",                                       "ignored",  "-",          "optional"),
    ("post_attention_layernorm.weight",       "H",               "mlp.linear_fc1.layer_norm_weight",                   "pre_mlp_layernorm.weight",           "=",                                      "plain",    "-",          "dense"),
    ("mlp.gate_proj.weight",                  "F H",             "mlp.linear_fc1.weight",                              "=",                                  "mlp.gate_up_proj.weight",                "gate",     "tp 0",       "dense"),
    ("mlp.up_proj.weight",                    "F H",             "mlp.linear_fc1.weight",                              "=",                                  "mlp.gate_up_proj.weight",                "up",       "tp 0",       "dense"),
    ("mlp.down_proj.weight",                  "H F",             "mlp.linear_fc2.weight",                              "=",                                  "=",                                      "plain",    "tp 1",       "dense"),
    ("post_attention_layernorm.weight",       "H",               "pre_mlp_layernorm.weight",                           "=",                                  "=",                                      "plain",    "-",          "moe"),
    ("mlp.gate.weight",                       "E H",             "mlp.router.weight",                                  "=",                                  "=",                                      "plain",    "-",          "moe"),
    ("mlp.gate.e_score_correction_bias",      "E",               "mlp.router.expert_bias",                             "=",                                  "=",                                      "plain",    "-",          "moe fp32"),
    ("mlp.experts.{expert}.gate_proj.weight", "FE H",            "mlp.experts.experts.linear_fc1.weight",              "=",                                  "mlp.experts.routed_experts.w13_weight",  "gate",     "etp 0",      "moe"),
    ("mlp.experts.{expert}.up_proj.weight",   "FE H",            "mlp.experts.experts.linear_fc1.weight",              "=",                                  "mlp.experts.routed_experts.w13_weight",  "up",       "etp 0",      "moe"),
    ("mlp.experts.{expert}.down_proj.weight", "H FE",            "mlp.experts.experts.linear_fc2.weight",              "=",                                  "mlp.experts.routed_experts.w2_weight",   "plain",    "etp 1",      "moe"),
    ("mlp.shared_experts.gate_proj.weight",   "NS*FE H",         "mlp.shared_experts.linear_fc1.weight",               "=",                                  "mlp.shared_experts.gate_up_proj.weight", "gate",     "tp 0",       "moe shared"),
    ("mlp.shared_experts.up_proj.weight",     "NS*FE H",         "mlp.shared_experts.linear_fc1.weight",               "=",                                  "mlp.shared_experts.gate_up_proj.weight", "up",       "tp 0",       "moe shared"),
    ("mlp.shared_experts.down_proj.weight",   "H NS*FE",         "mlp.shared_experts.linear_fc2.weight",               "=",                                  "=",                                      "plain",    "tp 1",       "moe shared"),
)  # fmt: skip

MTP = (
    ("enorm.weight",                          "H",               "enorm.weight",                                       "=",                                  "",                                       "plain",    "-",          "always"),
    ("hnorm.weight",                          "H",               "hnorm.weight",                                       "=",                                  "",                                       "plain",    "-",          "always"),
    ("eh_proj.weight",                        "H 2*H",           "eh_proj.weight",                                     "=",                                  "",                                       "plain",    "tp 0",       "always"),
    ("shared_head.norm.weight",               "H",               "final_layernorm.weight",                             "=",                                  "",                                       "plain",    "-",          "always"),
    ("embed_tokens.weight",                   "V H",             "embedding.word_embeddings.weight",                   "=",                                  "",                                       "copy",     "tp 0",       "always"),
    ("shared_head.head.weight",               "V H",             "output_layer.weight",                                "=",                                  "",                                       "copy",     "tp 0",       "untied"),
    ("shared_head.head.weight",               "V H",             "embedding.word_embeddings.weight",                   "=",                                  "",                                       "copy",     "tp 0",       "tied optional"),
)  # fmt: skip

# Refused by name: what Megatron-Core has no place for.
REFUSED = (
    ("hidden_act", ("silu",), "Megatron's --swiglu is SiLU"),
    ("num_attention_heads != num_key_value_heads", (False,), "multi-latent attention has one key and value for each head"),
    ("attention_bias", (False,), "Megatron's add_bias_linear puts a bias on the MLP too"),
    ("scoring_func", ("sigmoid",), "only DeepSeek-V3's sigmoid router is mapped"),
    ("topk_method", ("noaux_tc",), "only DeepSeek-V3's router with a bias for each expert is mapped"),
    ("norm_topk_prob", (True,), "Megatron's sigmoid router always normalises the chosen scores"),
    ("moe_layer_freq", (1,), "DeepSeek-V3 has experts in every layer after the first dense ones"),
)
