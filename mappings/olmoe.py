"""OLMoE: queries and keys normalized over all heads together, and experts in every layer.

The entries are explained in `reshard.models.family`, the columns of `layer` in `reshard.models.tables`.
"""

from reshard.models.family import Family


class Olmoe(Family):
    name = "olmoe"
    architecture = "OlmoeForCausalLM"
    symbols = {
        "V": "vocab_size", "H": "hidden_size", "E": "num_experts", "FE": "intermediate_size",
        "NQ": "num_attention_heads", "NKV": "num_key_value_heads", "D": "head_dim",
    }  # fmt: skip

    #    HF config field                  Megatron argument                      relation  default
    config = (
        ("num_hidden_layers",             "num_layers",                          "=",      "needed"),
        ("hidden_size",                   "hidden_size",                         "=",      "needed"),
        ("intermediate_size",             "ffn_hidden_size",                     "=",      "needed"),
        ("intermediate_size",             "moe_ffn_hidden_size",                 "=",      "needed"),
        ("num_attention_heads",           "num_attention_heads",                 "=",      "needed"),
        ("num_key_value_heads",           "num_query_groups",                    "=",      "num_attention_heads"),
        ("head_dim",                      "kv_channels",                         "=",      "hidden_size/num_attention_heads"),
        ("vocab_size",                    "vocab_size",                          "=",      "needed"),
        ("max_position_embeddings",       "max_position_embeddings",             "=",      4096),
        ("rms_norm_eps",                  "layernorm_epsilon",                   "=",      1e-05),
        ("num_experts|num_local_experts", "num_experts",                         "=",      64),
        ("num_experts_per_tok",           "moe_router_topk",                     "=",      8),
        ("norm_topk_prob",                "moe_router_pre_softmax",              "not",    False),
        ("tie_word_embeddings",           "untie_embeddings_and_output_weights", "not",    False),
        ("initializer_range",             "init_method_std",                     "=",      0.02),
        ("attention_dropout",             "attention_dropout",                   "=",      0.0),
        ("router_aux_loss_coef",          "moe_aux_loss_coeff",                  "=",      0.01),
    )  # fmt: skip

    # Qwen3-MoE's are the same without the layer that has these norms.
    identifies = {
        "num_experts": True, "multi_latent_attention": False, "qk_layernorm": True, "add_qkv_bias": False,
        "moe_router_score_function": "softmax", "moe_router_enable_expert_bias": False, "experimental_attention_variant": False,
        "spec": ["reshard.megatron.full_width_norm_spec", "layer"],
    }  # fmt: skip
    megatron = {"qk_layernorm": True, "spec": ["reshard.megatron.full_width_norm_spec", "layer"]}
    specs = "reshard.megatron.layers.full_width_norm:specs"
    always = {"use_qk_norm": True}

    #    HF parameter                             shape      Megatron parameter                             arrangement  split    when
    layer = (
        ("input_layernorm.weight",                "H",       "self_attention.linear_qkv.layer_norm_weight", "plain",     "-",     "always"),
        ("self_attn.q_proj.weight",               "NQ*D H",  "self_attention.linear_qkv.weight",            "q",         "tp 0",  "always"),
        ("self_attn.k_proj.weight",               "NKV*D H", "self_attention.linear_qkv.weight",            "k",         "tp 0",  "always"),
        ("self_attn.v_proj.weight",               "NKV*D H", "self_attention.linear_qkv.weight",            "v",         "tp 0",  "always"),
        ("self_attn.q_norm.weight",               "NQ*D",    "self_attention.q_layernorm.weight",           "q",         "-",     "always"),
        ("self_attn.k_norm.weight",               "NKV*D",   "self_attention.k_layernorm.weight",           "k",         "-",     "always"),
        ("self_attn.o_proj.weight",               "H NQ*D",  "self_attention.linear_proj.weight",           "plain",     "tp 1",  "always"),
        ("post_attention_layernorm.weight",       "H",       "pre_mlp_layernorm.weight",                    "plain",     "-",     "always"),
        ("mlp.gate.weight",                       "E H",     "mlp.router.weight",                           "plain",     "-",     "always"),
        ("mlp.experts.{expert}.gate_proj.weight", "FE H",    "mlp.experts.experts.linear_fc1.weight",       "gate",      "etp 0", "always"),
        ("mlp.experts.{expert}.up_proj.weight",   "FE H",    "mlp.experts.experts.linear_fc1.weight",       "up",        "etp 0", "always"),
        ("mlp.experts.{expert}.down_proj.weight", "H FE",    "mlp.experts.experts.linear_fc2.weight",       "plain",     "etp 1", "always"),
    )  # fmt: skip

    refused = (
        ("hidden_act", ("silu",), "Megatron's --swiglu is SiLU"),
        ("attention_bias", (False,), "Megatron's add_bias_linear puts a bias on the MLP too"),
        ("clip_qkv", (None,), "Megatron-Core clips no queries, keys and values"),
        ("sliding_window", (None,), "its layers would attend to a window, which nothing here maps"),
    )
