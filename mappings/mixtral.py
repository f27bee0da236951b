"""Mixtral: grouped-query attention, and routed experts in every layer under names of its own
(`block_sparse_moe`, w1, w3, w2).

The entries are explained in `reshard.models.family`, the columns of `layer` in `reshard.models.tables`.
"""

from reshard.models.family import Family


class Mixtral(Family):
    name = "mixtral"
    architecture = "MixtralForCausalLM"
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
        ("head_dim",                      "kv_channels",                         "=",      "hidden_size/num_attention_heads"),
        ("vocab_size",                    "vocab_size",                          "=",      "needed"),
        ("max_position_embeddings",       "max_position_embeddings",             "=",      131072),
        ("rms_norm_eps",                  "layernorm_epsilon",                   "=",      1e-05),
        ("num_local_experts|num_experts", "num_experts",                         "=",      8),
        ("num_experts_per_tok",           "moe_router_topk",                     "=",      2),
        ("tie_word_embeddings",           "untie_embeddings_and_output_weights", "not",    False),
        ("initializer_range",             "init_method_std",                     "=",      0.02),
        ("attention_dropout",             "attention_dropout",                   "=",      0.0),
        ("router_aux_loss_coef",          "moe_aux_loss_coeff",                  "=",      0.001),
    )  # fmt: skip

    identifies = {
        "num_experts": True, "multi_latent_attention": False, "qk_layernorm": False, "add_qkv_bias": False,
        "moe_router_score_function": "softmax", "moe_router_enable_expert_bias": False, "softmax_type": "vanilla", "squared_relu": False, "spec": False,
    }  # fmt: skip
    rope_theta = 1000000.0

    #    HF parameter                                   shape      Megatron parameter                             arrangement  split    when
    layer = (
        ("input_layernorm.weight",                      "H",       "self_attention.linear_qkv.layer_norm_weight", "plain",     "-",     "always"),
        ("self_attn.q_proj.weight",                     "NQ*D H",  "self_attention.linear_qkv.weight",            "q",         "tp 0",  "always"),
        ("self_attn.k_proj.weight",                     "NKV*D H", "self_attention.linear_qkv.weight",            "k",         "tp 0",  "always"),
        ("self_attn.v_proj.weight",                     "NKV*D H", "self_attention.linear_qkv.weight",            "v",         "tp 0",  "always"),
        ("self_attn.o_proj.weight",                     "H NQ*D",  "self_attention.linear_proj.weight",           "plain",     "tp 1",  "always"),
        ("post_attention_layernorm.weight",             "H",       "pre_mlp_layernorm.weight",                    "plain",     "-",     "always"),
        ("block_sparse_moe.gate.weight",                "E H",     "mlp.router.weight",                           "plain",     "-",     "always"),
        ("block_sparse_moe.experts.{expert}.w1.weight", "FE H",    "mlp.experts.experts.linear_fc1.weight",       "gate",      "etp 0", "always"),
        ("block_sparse_moe.experts.{expert}.w3.weight", "FE H",    "mlp.experts.experts.linear_fc1.weight",       "up",        "etp 0", "always"),
        ("block_sparse_moe.experts.{expert}.w2.weight", "H FE",    "mlp.experts.experts.linear_fc2.weight",       "plain",     "etp 1", "always"),
    )  # fmt: skip

    #    HF parameter                                   in a transformers model
    in_memory = (
        ("block_sparse_moe.gate.weight",                "mlp.gate.weight"),
        ("block_sparse_moe.experts.{expert}.w1.weight", "mlp.experts.{expert}.gate_proj.weight"),
        ("block_sparse_moe.experts.{expert}.w3.weight", "mlp.experts.{expert}.up_proj.weight"),
        ("block_sparse_moe.experts.{expert}.w2.weight", "mlp.experts.{expert}.down_proj.weight"),
    )  # fmt: skip

    refused = (
        ("hidden_act", ("silu",), "Megatron's --swiglu is SiLU"),
        ("sliding_window", (None,), "its layers would attend to a window, which nothing here maps"),
    )
