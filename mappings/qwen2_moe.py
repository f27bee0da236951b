"""Qwen2-MoE (Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B): biases on q, k and v, routed experts in some or all
layers, and beside them a shared expert with a gate of its own.

The entries are explained in `reshard.models.family`, the columns of `layer` in `reshard.models.tables`.
"""

from reshard.models.family import Family
from reshard.models.layer_kinds import moe_by_step, step_of_pattern


class Qwen2Moe(Family):
    name = "qwen2_moe"
    architecture = "Qwen2MoeForCausalLM"
    symbols = {
        "V": "vocab_size", "H": "hidden_size", "F": "intermediate_size", "E": "num_experts", "FE": "moe_intermediate_size",
        "FS": "shared_expert_intermediate_size", "NQ": "num_attention_heads", "NKV": "num_key_value_heads", "D": "head_dim",
    }  # fmt: skip

    #    HF config field                    Megatron argument                      relation  default
    config = (
        ("num_hidden_layers",               "num_layers",                          "=",      "needed"),
        ("hidden_size",                     "hidden_size",                         "=",      "needed"),
        ("intermediate_size",               "ffn_hidden_size",                     "=",      5632),
        ("num_attention_heads",             "num_attention_heads",                 "=",      "needed"),
        ("num_key_value_heads",             "num_query_groups",                    "=",      16),
        ("head_dim",                        "kv_channels",                         "=",      "hidden_size/num_attention_heads"),
        ("vocab_size",                      "vocab_size",                          "=",      "needed"),
        ("max_position_embeddings",         "max_position_embeddings",             "=",      32768),
        ("rms_norm_eps",                    "layernorm_epsilon",                   "=",      1e-06),
        ("num_experts|num_local_experts",   "num_experts",                         "=",      60),
        ("num_experts_per_tok",             "moe_router_topk",                     "=",      4),
        ("moe_intermediate_size",           "moe_ffn_hidden_size",                 "=",      1408),
        ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "=",      5632),
        ("norm_topk_prob",                  "moe_router_pre_softmax",              "not",    False),
        ("tie_word_embeddings",             "untie_embeddings_and_output_weights", "not",    False),
        ("initializer_range",               "init_method_std",                     "=",      0.02),
        ("attention_dropout",               "attention_dropout",                   "=",      0.0),
        ("router_aux_loss_coef",            "moe_aux_loss_coeff",                  "=",      0.001),
    )  # fmt: skip

    # Without biases and a shared expert a Mixtral's, with attention sinks a gpt-oss's.
    identifies = {
        "num_experts": True, "multi_latent_attention": False, "qk_layernorm": False, "add_qkv_bias": True,
        "moe_router_score_function": "softmax", "moe_router_enable_expert_bias": False, "moe_shared_expert_gate": True,
        "softmax_type": "vanilla",
    }  # fmt: skip
    megatron = {"add_qkv_bias": True, "moe_shared_expert_gate": True}
    window = "everywhere"
    reads = ("decoder_sparse_step", "mlp_only_layers")
    no_effect = ("attention_bias",)  # as in Qwen2
    always = {"use_qkv_bias": True}

    #    HF parameter                             shape      Megatron parameter                             arrangement  split    when
    layer = (
        ("input_layernorm.weight",                "H",       "self_attention.linear_qkv.layer_norm_weight", "plain",     "-",     "always"),
        ("self_attn.q_proj.weight",               "NQ*D H",  "self_attention.linear_qkv.weight",            "q",         "tp 0",  "always"),
        ("self_attn.k_proj.weight",               "NKV*D H", "self_attention.linear_qkv.weight",            "k",         "tp 0",  "always"),
        ("self_attn.v_proj.weight",               "NKV*D H", "self_attention.linear_qkv.weight",            "v",         "tp 0",  "always"),
        ("self_attn.q_proj.bias",                 "NQ*D",    "self_attention.linear_qkv.bias",              "q",         "tp 0",  "always"),
        ("self_attn.k_proj.bias",                 "NKV*D",   "self_attention.linear_qkv.bias",              "k",         "tp 0",  "always"),
        ("self_attn.v_proj.bias",                 "NKV*D",   "self_attention.linear_qkv.bias",              "v",         "tp 0",  "always"),
        ("self_attn.o_proj.weight",               "H NQ*D",  "self_attention.linear_proj.weight",           "plain",     "tp 1",  "always"),
        ("post_attention_layernorm.weight",       "H",       "mlp.linear_fc1.layer_norm_weight",            "plain",     "-",     "dense"),
        ("mlp.gate_proj.weight",                  "F H",     "mlp.linear_fc1.weight",                       "gate",      "tp 0",  "dense"),
        ("mlp.up_proj.weight",                    "F H",     "mlp.linear_fc1.weight",                       "up",        "tp 0",  "dense"),
        ("mlp.down_proj.weight",                  "H F",     "mlp.linear_fc2.weight",                       "plain",     "tp 1",  "dense"),
        ("post_attention_layernorm.weight",       "H",       "pre_mlp_layernorm.weight",                    "plain",     "-",     "moe"),
        ("mlp.gate.weight",                       "E H",     "mlp.router.weight",                           "plain",     "-",     "moe"),
        ("mlp.experts.{expert}.gate_proj.weight", "FE H",    "mlp.experts.experts.linear_fc1.weight",       "gate",      "etp 0", "moe"),
        ("mlp.experts.{expert}.up_proj.weight",   "FE H",    "mlp.experts.experts.linear_fc1.weight",       "up",        "etp 0", "moe"),
        ("mlp.experts.{expert}.down_proj.weight", "H FE",    "mlp.experts.experts.linear_fc2.weight",       "plain",     "etp 1", "moe"),
        ("mlp.shared_expert.gate_proj.weight",    "FS H",    "mlp.shared_experts.linear_fc1.weight",        "gate",      "tp 0",  "moe"),
        ("mlp.shared_expert.up_proj.weight",      "FS H",    "mlp.shared_experts.linear_fc1.weight",        "up",        "tp 0",  "moe"),
        ("mlp.shared_expert.down_proj.weight",    "H FS",    "mlp.shared_experts.linear_fc2.weight",        "plain",     "tp 1",  "moe"),
        ("mlp.shared_expert_gate.weight",         "1 H",     "mlp.shared_experts.gate_weight",              "plain",     "-",     "moe"),
    )  # fmt: skip

    # Refused by name: what Megatron-Core has no place for, and what vLLM's class has in any case.
    refused = (
        ("hidden_act", ("silu",), "Megatron's --swiglu is SiLU"),
        ("qkv_bias", (True,), "its layers have a row for the biases of q, k and v"),
    )

    def layer_kinds(self, config, where):
        """Experts in every `decoder_sparse_step`-th layer, but for those of `mlp_only_layers`."""
        return tuple(moe_by_step(config, where))

    def kinds_as_fields(self, pattern):
        """Every layer in turn, and the dense ones by name."""
        return step_of_pattern(pattern)
