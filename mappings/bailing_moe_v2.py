"""Ling 2.0 and Ring 2.0 (BailingMoE V2): queries, keys and values in one tensor, normalized for each
head, of which half turns; sigmoid routing over groups with a bias for each expert, shared experts
after some dense layers, multi-token prediction.

The entries are explained in `reshard.models.family`, the columns of `layer` in `reshard.models.tables`.
"""

from reshard.core.errors import ReshardError
from reshard.models.family import Family


class BailingMoeV2(Family):
    name = "bailing_moe_v2"
    architecture = "BailingMoeV2ForCausalLM"
    model_types = ("bailing_moe",)
    symbols = {
        "V": "vocab_size", "H": "hidden_size", "F": "intermediate_size", "E": "num_experts", "FE": "moe_intermediate_size",
        "NS": "num_shared_experts", "NQ": "num_attention_heads", "NKV": "num_key_value_heads", "D": "head_dim",
    }  # fmt: skip
    # Where queries end, keys, and all rows of attention.
    derived = {"Q": "NQ*D", "K": "NQ*D+NKV*D", "A": "NQ*D+2*NKV*D"}

    #    HF config field             Megatron argument                      relation  default
    config = (
        ("num_hidden_layers",        "num_layers",                          "=",      "needed"),
        ("hidden_size",              "hidden_size",                         "=",      "needed"),
        ("intermediate_size",        "ffn_hidden_size",                     "=",      "needed"),
        ("num_attention_heads",      "num_attention_heads",                 "=",      "needed"),
        ("num_key_value_heads",      "num_query_groups",                    "=",      "needed"),
        ("head_dim",                 "kv_channels",                         "=",      "needed"),
        ("vocab_size",               "vocab_size",                          "=",      "needed"),
        ("max_position_embeddings",  "max_position_embeddings",             "=",      32768),
        ("rms_norm_eps",             "layernorm_epsilon",                   "=",      1e-06),
        ("tie_word_embeddings",      "untie_embeddings_and_output_weights", "not",    False),
        ("use_qkv_bias",             "add_qkv_bias",                        "=",      False),
        ("use_qk_norm",              "qk_layernorm",                        "=",      True),
        ("num_experts",              "num_experts",                         "=",      "needed"),
        ("num_experts_per_tok",      "moe_router_topk",                     "=",      "needed"),
        ("moe_intermediate_size",    "moe_ffn_hidden_size",                 "=",      "needed"),
        ("n_group",                  "moe_router_num_groups",               "=",      8),
        ("topk_group",               "moe_router_group_topk",               "=",      4),
        ("routed_scaling_factor",    "moe_router_topk_scaling_factor",      "=",      1.0),
        ("num_nextn_predict_layers", "mtp_num_layers",                      "=",      0),
        ("initializer_range",        "init_method_std",                     "=",      0.02),
        ("attention_dropout",        "attention_dropout",                   "=",      0.0),
    )  # fmt: skip

    # Those of a GLM-4.5.
    identifies = {}
    megatron = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True, "moe_router_load_balancing_type": "seq_aux_loss"}  # fmt: skip
    # What engines read, and the published code takes for granted.
    hf = {"norm_topk_prob": True, "score_function": "sigmoid", "moe_router_enable_expert_bias": True, "router_dtype": "fp32", "use_rmsnorm": True}  # fmt: skip
    first_dense = "first_k_dense_replace"
    shared_experts = "num_shared_experts"
    partial_rotary = 1.0
    rope_theta = 600000.0
    rope_types = ("default", "linear")
    reads = ("rotary_dim", "moe_shared_expert_intermediate_size")
    no_effect = ("embedding_dropout", "output_dropout", "mtp_loss_scaling_factor")
    always = {"norm_topk_prob": True, "score_function": "sigmoid", "router_dtype": "fp32", "use_rmsnorm": True, "norm_head": False}  # fmt: skip

    model = (
        ("model.word_embeddings.weight", "V H", "embedding.word_embeddings.weight", "vocab", "tp 0", "always"),
        ("model.norm.weight",            "H",   "decoder.final_layernorm.weight",   "plain", "-",    "always"),
        ("lm_head.weight",               "V H", "output_layer.weight",              "vocab", "tp 0", "not tie_word_embeddings"),
        ("lm_head.weight",               "V H", "embedding.word_embeddings.weight", "copy",  "tp 0", "tie_word_embeddings", "optional"),
    )  # fmt: skip

    #    HF parameter                             shape      Megatron parameter                             arrangement  split    when
    layer = (
        ("input_layernorm.weight",                "H",       "self_attention.linear_qkv.layer_norm_weight", "plain",     "-",     "always"),
        ("attention.query_key_value.weight[0:Q]", "NQ*D H",  "self_attention.linear_qkv.weight",            "q",         "tp 0",  "always"),
        ("attention.query_key_value.weight[Q:K]", "NKV*D H", "self_attention.linear_qkv.weight",            "k",         "tp 0",  "always"),
        ("attention.query_key_value.weight[K:A]", "NKV*D H", "self_attention.linear_qkv.weight",            "v",         "tp 0",  "always"),
        ("attention.query_key_value.bias[0:Q]",   "NQ*D",    "self_attention.linear_qkv.bias",              "q",         "tp 0",  "use_qkv_bias"),
        ("attention.query_key_value.bias[Q:K]",   "NKV*D",   "self_attention.linear_qkv.bias",              "k",         "tp 0",  "use_qkv_bias"),
        ("attention.query_key_value.bias[K:A]",   "NKV*D",   "self_attention.linear_qkv.bias",              "v",         "tp 0",  "use_qkv_bias"),
        ("attention.query_layernorm.weight",      "D",       "self_attention.q_layernorm.weight",           "plain",     "-",     "use_qk_norm"),
        ("attention.key_layernorm.weight",        "D",       "self_attention.k_layernorm.weight",           "plain",     "-",     "use_qk_norm"),
        ("attention.dense.weight",                "H NQ*D",  "self_attention.linear_proj.weight",           "plain",     "tp 1",  "always"),
        ("post_attention_layernorm.weight",       "H",       "mlp.linear_fc1.layer_norm_weight",            "plain",     "-",     "dense"),
        ("mlp.gate_proj.weight",                  "F H",     "mlp.linear_fc1.weight",                       "gate",      "tp 0",  "dense"),
        ("mlp.up_proj.weight",                    "F H",     "mlp.linear_fc1.weight",                       "up",        "tp 0",  "dense"),
        ("mlp.down_proj.weight",                  "H F",     "mlp.linear_fc2.weight",                       "plain",     "tp 1",  "dense"),
        ("post_attention_layernorm.weight",       "H",       "pre_mlp_layernorm.weight",                    "plain",     "-",     "moe"),
        ("mlp.gate.weight",                       "E H",     "mlp.router.weight",                           "plain",     "-",     "moe"),
        ("mlp.gate.expert_bias",                  "E",       "mlp.router.expert_bias",                      "plain",     "-",     "moe", "fp32"),
        ("mlp.experts.{expert}.gate_proj.weight", "FE H",    "mlp.experts.experts.linear_fc1.weight",       "gate",      "etp 0", "moe"),
        ("mlp.experts.{expert}.up_proj.weight",   "FE H",    "mlp.experts.experts.linear_fc1.weight",       "up",        "etp 0", "moe"),
        ("mlp.experts.{expert}.down_proj.weight", "H FE",    "mlp.experts.experts.linear_fc2.weight",       "plain",     "etp 1", "moe"),
        ("mlp.shared_experts.gate_proj.weight",   "NS*FE H", "mlp.shared_experts.linear_fc1.weight",        "gate",      "tp 0",  "moe, num_shared_experts"),
        ("mlp.shared_experts.up_proj.weight",     "NS*FE H", "mlp.shared_experts.linear_fc1.weight",        "up",        "tp 0",  "moe, num_shared_experts"),
        ("mlp.shared_experts.down_proj.weight",   "H NS*FE", "mlp.shared_experts.linear_fc2.weight",        "plain",     "tp 1",  "moe, num_shared_experts"),
    )  # fmt: skip
    mtp = (
        ("enorm.weight",           "H",     "enorm.weight",           "plain", "-",    "always"),
        ("hnorm.weight",           "H",     "hnorm.weight",           "plain", "-",    "always"),
        ("eh_proj.weight",         "H 2*H", "eh_proj.weight",         "plain", "tp 0", "always"),
        ("final_layernorm.weight", "H",     "final_layernorm.weight", "plain", "-",    "always"),
    )  # fmt: skip
    ends = (
        ("the embedding",    "model.word_embeddings", "embedding"),
        ("the final norm",   "model.norm",            "decoder.final_layernorm"),
        ("the output layer", "lm_head",               "output_layer"),
    )  # fmt: skip
    outputs = (
        ("input norm", "input_layernorm",          "input_layernorm"),
        ("attention",  "attention",                "self_attention"),
        ("MLP norm",   "post_attention_layernorm", "pre_mlp_layernorm"),
        ("MLP",        "mlp",                      "mlp"),
    )  # fmt: skip

    # Refused by name: what Megatron-Core has no place for.
    refused = (
        ("hidden_act", ("silu",), "Megatron's --swiglu is SiLU"),
        ("use_bias", (False,), "Megatron's add_bias_linear puts a bias on experts too"),
    )
    equal = (("moe_shared_expert_intermediate_size", "moe_intermediate_size", "only engines read the first"),)

    def implied_fields(self, config, where):
        """One shared expert, where a config does not say; null is none."""
        return {} if "num_shared_experts" in config else {"num_shared_experts": 1}

    def args_as_fields(self, args):
        """Zero of them, which is not what absence means."""
        return {} if args.get("moe_shared_expert_intermediate_size") else {"num_shared_experts": 0}

    def share_as_fields(self, share, config):
        """Engines read the dims."""
        return super().share_as_fields(share, config) | {"rotary_dim": int(share * config["head_dim"])}

    def rope(self, config, where="config.json"):
        """Refuse dims, which engines read, that are not the share of a head that the published code reads."""
        rope, dims = super().rope(config, where), config.get("rotary_dim")
        if dims is not None and dims != int(config["head_dim"] * rope["partial_rotary_factor"]):
            raise ReshardError(
                f"{where}: rotary_dim is {dims!r:.80}, which is not partial_rotary_factor of head_dim"
            )
        return rope
