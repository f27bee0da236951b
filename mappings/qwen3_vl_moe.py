"""The language model of Qwen3-VL with experts: the layers of Qwen3-MoE, all experts of a layer in one
tensor, transposed. As published it is a part of a larger model, whose vision tower is carried along.

The entries are explained in `reshard.models.family`, the columns of `layer` in `reshard.models.tables`.
"""

from reshard.models.family import Family
from reshard.models.layer_kinds import moe_by_step, step_of_pattern


class Qwen3VLMoe(Family):
    name = "qwen3_vl_moe_text"
    architecture = "Qwen3VLMoeForConditionalGeneration"
    wrapped_in = ("Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe")
    towers = ("model.visual.",)
    tower = "deepstack"
    symbols = {
        "V": "vocab_size", "H": "hidden_size", "F": "intermediate_size",
        "E": "num_experts", "FE": "moe_intermediate_size", "NQ": "num_attention_heads", "NKV": "num_key_value_heads", "D": "head_dim",
    }  # fmt: skip

    #    HF config field                  Megatron argument                      relation  default
    config = (
        ("num_hidden_layers",             "num_layers",                          "=",      "needed"),
        ("hidden_size",                   "hidden_size",                         "=",      "needed"),
        ("intermediate_size",             "ffn_hidden_size",                     "=",      "needed"),
        ("num_attention_heads",           "num_attention_heads",                 "=",      "needed"),
        ("num_key_value_heads",           "num_query_groups",                    "=",      "num_attention_heads"),
        ("head_dim",                      "kv_channels",                         "=",      "hidden_size/num_attention_heads"),
        ("vocab_size",                    "vocab_size",                          "=",      "needed"),
        ("max_position_embeddings",       "max_position_embeddings",             "=",      128000),
        ("rms_norm_eps",                  "layernorm_epsilon",                   "=",      1e-06),
        ("num_experts|num_local_experts", "num_experts",                         "=",      "needed"),
        ("num_experts_per_tok",           "moe_router_topk",                     "=",      "needed"),
        ("moe_intermediate_size",         "moe_ffn_hidden_size",                 "=",      "needed"),
        ("tie_word_embeddings",           "untie_embeddings_and_output_weights", "not",    False),
        ("initializer_range",             "init_method_std",                     "=",      0.02),
        ("attention_dropout",             "attention_dropout",                   "=",      0.0),
        ("router_aux_loss_coef",          "moe_aux_loss_coeff",                  "=",      0.001),
    )  # fmt: skip

    identifies = {}  # those of Qwen3-MoE
    megatron = {"qk_layernorm": True}
    hf = {"norm_topk_prob": True}  # which vLLM reads
    rope_theta = 500000.0
    window = "everywhere"
    reads = ("decoder_sparse_step", "mlp_only_layers")
    always = {
        "qkv_bias": False,
        "use_qk_norm": True,
        "norm_topk_prob": True,
        "shared_expert_intermediate_size": 0,
    }

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
        ("mlp.experts.{expert}.gate_proj.weight", "FE H",    "mlp.experts.experts.linear_fc1.weight",       "gate",      "etp 0", "moe"),
        ("mlp.experts.{expert}.up_proj.weight",   "FE H",    "mlp.experts.experts.linear_fc1.weight",       "up",        "etp 0", "moe"),
        ("mlp.experts.{expert}.down_proj.weight", "H FE",    "mlp.experts.experts.linear_fc2.weight",       "plain",     "etp 1", "moe"),
    )  # fmt: skip
    # As published; transformers 5 saves the same tensors as it has them in memory.
    packed = (
        ("mlp.experts.{expert}.gate_proj.weight", "mlp.experts.gate_up_proj[{expert}, :, 0:FE].T"),
        ("mlp.experts.{expert}.up_proj.weight",   "mlp.experts.gate_up_proj[{expert}, :, FE:2*FE].T"),
        ("mlp.experts.{expert}.down_proj.weight", "mlp.experts.down_proj[{expert}].T"),
    )  # fmt: skip
    packed_otherwise = (
        ("mlp.experts.{expert}.gate_proj.weight", "mlp.experts.gate_up_proj[{expert}, 0:FE]"),
        ("mlp.experts.{expert}.up_proj.weight",   "mlp.experts.gate_up_proj[{expert}, FE:2*FE]"),
        ("mlp.experts.{expert}.down_proj.weight", "mlp.experts.down_proj[{expert}]"),
    )  # fmt: skip

    # Refused by name: what Megatron-Core has no place for.
    refused = (
        ("hidden_act", ("silu",), "Megatron's --swiglu is SiLU"),
        ("attention_bias", (False,), "Megatron's add_bias_linear puts a bias on the MLP too"),
    )

    def layer_kinds(self, config, where):
        """Experts in every `decoder_sparse_step`-th layer, but for those of `mlp_only_layers`."""
        return tuple(moe_by_step(config, where))

    def kinds_as_fields(self, pattern):
        """Every layer in turn, and the dense ones by name."""
        return step_of_pattern(pattern)
