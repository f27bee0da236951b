"""Nemotron-H, Nemotron Nano 2 and Nemotron 3: Mamba-2, attention without positions, MLPs and
experts without a gate, each in a layer of its own, as Megatron-Core's HybridModel has them.

The entries are explained in `reshard.models.family`, the columns of `layer` in `reshard.models.tables`.
"""

from reshard.models.family import Family


class NemotronH(Family):
    name = "nemotron_h"
    architecture = "NemotronHForCausalLM"
    symbols = {
        "V": "vocab_size", "H": "hidden_size", "F": "intermediate_size", "NQ": "num_attention_heads", "NKV": "num_key_value_heads",
        "D": "head_dim", "E": "n_routed_experts", "FE": "moe_intermediate_size", "FS": "moe_shared_expert_intermediate_size",
        "L": "moe_latent_size", "NM": "mamba_num_heads", "DM": "mamba_head_dim", "NG": "n_groups", "S": "ssm_state_size",
    }  # fmt: skip
    # Rows of z and of x, of B and of C; where C and dt begin in in_proj, where C begins and ends in conv1d.
    derived = {"I": "NM*DM", "G": "NG*S", "AC": "2*I+G", "AT": "2*I+2*G", "CC": "I+G", "C": "I+2*G"}
    layer_letters = {"mamba": "M", "full": "*", "dense": "-", "moe": "E"}

    #    HF config field                        Megatron argument                      relation default
    config = (
        ("num_hidden_layers",                   "num_layers",                          "=",     "needed"),
        ("hidden_size",                         "hidden_size",                         "=",     "needed"),
        ("intermediate_size",                   "ffn_hidden_size",                     "=",     21504),
        ("num_attention_heads",                 "num_attention_heads",                 "=",     "needed"),
        ("num_key_value_heads",                 "num_query_groups",                    "=",     8),
        ("head_dim|attention_head_dim",         "kv_channels",                         "=",     128),
        ("vocab_size",                          "vocab_size",                          "=",     "needed"),
        ("max_position_embeddings",             "max_position_embeddings",             "=",     4096),
        ("layer_norm_epsilon",                  "layernorm_epsilon",                   "=",     1e-05),
        ("mamba_num_heads",                     "mamba_num_heads",                     "=",     128),
        ("mamba_head_dim",                      "mamba_head_dim",                      "=",     64),
        ("n_groups|mamba_n_groups",             "mamba_num_groups",                    "=",     8),
        ("ssm_state_size",                      "mamba_state_dim",                     "=",     128),
        ("n_routed_experts|num_local_experts",  "num_experts",                         "=",     8),
        ("num_experts_per_tok",                 "moe_router_topk",                     "=",     2),
        ("moe_intermediate_size",               "moe_ffn_hidden_size",                 "=",     7688),
        ("moe_shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "=",     7688),
        ("moe_latent_size",                     "moe_latent_size",                     "=",     None),
        ("n_group",                             "moe_router_num_groups",               "=",     1),
        ("topk_group",                          "moe_router_group_topk",               "=",     1),
        ("routed_scaling_factor",               "moe_router_topk_scaling_factor",      "=",     1.0),
        ("num_nextn_predict_layers",            "mtp_num_layers",                      "=",     0),
        ("tie_word_embeddings",                 "untie_embeddings_and_output_weights", "not",   False),
        ("initializer_range",                   "init_method_std",                     "=",     0.02),
        ("attention_dropout",                   "attention_dropout",                   "=",     0.0),
    )  # fmt: skip
    identifies = {"hybrid_layer_pattern": True, "multi_latent_attention": False, "qk_layernorm": False, "add_qkv_bias": False, "add_bias_linear": False, "squared_relu": True}  # fmt: skip
    megatron = {
        "swiglu": False, "squared_relu": True, "position_embedding_type": "none", "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True, "moe_router_load_balancing_type": "seq_aux_loss",
    }  # fmt: skip
    hf = {"mlp_hidden_act": "relu2", "mamba_hidden_act": "silu", "norm_topk_prob": True, "n_shared_experts": 1}  # fmt: skip
    no_effect = (
        "chunk_size", "expand", "mamba_ssm_cache_dtype", "mamba_proj_bias", "moe_shared_expert_overlap", "mtp_layers_block_type", "norm_eps",
        "mtp_hybrid_override_pattern", "num_logits_to_keep", "rescale_prenorm_residual", "rms_norm_eps", "time_step_floor", "time_step_max",
        "time_step_min", "time_step_rank", "use_mamba_kernels",
    )  # fmt: skip
    in_memory_prefix = ("backbone.", "model.")
    layers = "backbone.layers."
    ends = (("the embedding", "backbone.embeddings", "embedding"), ("the final norm", "backbone.norm_f", "decoder.final_layernorm"), ("the output layer", "lm_head", "output_layer"))  # fmt: skip
    outputs = (("norm", "norm", "norm|input_layernorm|pre_mlp_layernorm"), ("mixer", "mixer", "mixer|self_attention|mlp"))  # fmt: skip
    model = (
        ("backbone.embeddings.weight", "V H", "embedding.word_embeddings.weight", "vocab", "tp 0", "always"),
        ("backbone.norm_f.weight",     "H",   "decoder.final_layernorm.weight",   "plain", "-",    "always"),
        ("lm_head.weight",             "V H", "output_layer.weight",              "vocab", "tp 0", "not tie_word_embeddings"),
        ("lm_head.weight",             "V H", "embedding.word_embeddings.weight", "copy",  "tp 0", "tie_word_embeddings", "optional"),
    )  # fmt: skip
    #    HF parameter                             shape    Megatron parameter                             arrangement split   when
    layer = (
        ("norm.weight",                           "H",     "mixer.in_proj.layer_norm_weight",             "plain", "-",     "mamba"),
        ("mixer.in_proj.weight[0:I]",             "I H",   "mixer.in_proj.weight.z",                      "plain", "tp 0",  "mamba"),
        ("mixer.in_proj.weight[I:2*I]",           "I H",   "mixer.in_proj.weight.x",                      "plain", "tp 0",  "mamba"),
        ("mixer.in_proj.weight[2*I:AC]",          "G H",   "mixer.in_proj.weight.B",                      "plain", "tp 0",  "mamba"),
        ("mixer.in_proj.weight[AC:AT]",           "G H",   "mixer.in_proj.weight.C",                      "plain", "tp 0",  "mamba"),
        ("mixer.in_proj.weight[AT:AT+NM]",        "NM H",  "mixer.in_proj.weight.dt",                     "plain", "tp 0",  "mamba"),
        ("mixer.conv1d.weight[0:I]",              "I 1 4", "mixer.conv1d.weight.x",                       "plain", "tp 0",  "mamba"),
        ("mixer.conv1d.weight[I:CC]",             "G 1 4", "mixer.conv1d.weight.B",                       "plain", "tp 0",  "mamba"),
        ("mixer.conv1d.weight[CC:C]",             "G 1 4", "mixer.conv1d.weight.C",                       "plain", "tp 0",  "mamba"),
        ("mixer.conv1d.bias[0:I]",                "I",     "mixer.conv1d.bias.x",                         "plain", "tp 0",  "mamba"),
        ("mixer.conv1d.bias[I:CC]",               "G",     "mixer.conv1d.bias.B",                         "plain", "tp 0",  "mamba"),
        ("mixer.conv1d.bias[CC:C]",               "G",     "mixer.conv1d.bias.C",                         "plain", "tp 0",  "mamba"),
        ("mixer.A_log",                           "NM",    "mixer.A_log",                                 "plain", "tp 0",  "mamba"),
        ("mixer.D",                               "NM",    "mixer.D",                                     "plain", "tp 0",  "mamba"),
        ("mixer.dt_bias",                         "NM",    "mixer.dt_bias",                               "plain", "tp 0",  "mamba"),
        ("mixer.norm.weight",                     "I",     "mixer.norm.weight",                           "plain", "tp 0",  "mamba"),
        ("mixer.out_proj.weight",                 "H I",   "mixer.out_proj.weight",                       "plain", "tp 1",  "mamba"),
        ("norm.weight",                           "H",     "self_attention.linear_qkv.layer_norm_weight", "plain", "-",     "full"),
        ("mixer.q_proj.weight",                   "NQ*D H",  "self_attention.linear_qkv.weight",          "q",     "tp 0",  "full"),
        ("mixer.k_proj.weight",                   "NKV*D H", "self_attention.linear_qkv.weight",          "k",     "tp 0",  "full"),
        ("mixer.v_proj.weight",                   "NKV*D H", "self_attention.linear_qkv.weight",          "v",     "tp 0",  "full"),
        ("mixer.o_proj.weight",                   "H NQ*D",  "self_attention.linear_proj.weight",         "plain", "tp 1",  "full"),
        ("norm.weight",                           "H",     "mlp.linear_fc1.layer_norm_weight",            "plain", "-",     "dense"),
        ("mixer.up_proj.weight",                  "F H",   "mlp.linear_fc1.weight",                       "plain", "tp 0",  "dense"),
        ("mixer.down_proj.weight",                "H F",   "mlp.linear_fc2.weight",                       "plain", "tp 1",  "dense"),
        ("norm.weight",                           "H",     "pre_mlp_layernorm.weight",                    "plain", "-",     "moe"),
        ("mixer.gate.weight",                     "E H",   "mlp.router.weight",                           "plain", "-",     "moe"),
        ("mixer.gate.e_score_correction_bias",    "E",     "mlp.router.expert_bias",                      "plain", "-",     "moe", "fp32"),
        ("mixer.fc1_latent_proj.weight",          "L H",   "mlp.fc1_latent_proj.weight",                  "plain", "-",     "moe, moe_latent_size"),
        ("mixer.fc2_latent_proj.weight",          "H L",   "mlp.fc2_latent_proj.weight",                  "plain", "-",     "moe, moe_latent_size"),
        ("mixer.experts.{expert}.up_proj.weight", "FE H",  "mlp.experts.experts.linear_fc1.weight",       "plain", "etp 0", "moe, not moe_latent_size"),
        ("mixer.experts.{expert}.down_proj.weight", "H FE", "mlp.experts.experts.linear_fc2.weight",      "plain", "etp 1", "moe, not moe_latent_size"),
        ("mixer.experts.{expert}.up_proj.weight", "FE L",  "mlp.experts.experts.linear_fc1.weight",       "plain", "etp 0", "moe, moe_latent_size"),
        ("mixer.experts.{expert}.down_proj.weight", "L FE", "mlp.experts.experts.linear_fc2.weight",      "plain", "etp 1", "moe, moe_latent_size"),
        ("mixer.shared_experts.up_proj.weight",   "FS H",  "mlp.shared_experts.linear_fc1.weight",        "plain", "tp 0",  "moe"),
        ("mixer.shared_experts.down_proj.weight", "H FS",  "mlp.shared_experts.linear_fc2.weight",        "plain", "tp 1",  "moe"),
    )  # fmt: skip
    mtp = (
        ("layers.0.enorm.weight",           "H",     "enorm.weight",           "plain", "-",    "always"),
        ("layers.0.hnorm.weight",           "H",     "hnorm.weight",           "plain", "-",    "always"),
        ("layers.0.eh_proj.weight",         "H 2*H", "eh_proj.weight",         "plain", "tp 0", "always"),
        ("layers.1.final_layernorm.weight", "H",     "final_layernorm.weight", "plain", "-",    "always"),
    )  # fmt: skip
    mtp_prefixes = ("mtp.", "mtp.layers.{part}.")

    refused = (
        ("num_nextn_predict_layers", (0, 1), "its published names have room for one MTP layer"),
        ("mlp_hidden_act", ("relu2",), "its --squared-relu is that"),
        ("mamba_hidden_act", ("silu",), "Megatron's Mamba layers have SiLU built in"),
        ("conv_kernel", (4,), "Megatron's Mamba layers convolve over 4 tokens"),
        ("layer_norm_epsilon", (1e-05,), "Megatron's Mamba layers have 1e-05 built into their norms"),
        ("use_conv_bias", (True,), "Megatron's Mamba layers have a bias in the convolution"),
        ("time_step_limit", ([0.0, 1e999], [0.0, 1e308], [0.0, {"__float__": "Infinity"}]), "Megatron limits no time step"),
        ("n_shared_experts", (1,), "transformers has one shared expert, whatever this says"),
        ("norm_topk_prob", (True,), "Megatron's sigmoid router always normalizes the chosen scores"),
        ("use_bias", (False,), "its Mamba layers have none"),
        ("mlp_bias", (False,), "Megatron's add_bias_linear puts a bias on attention too"),
        ("attention_bias", (False,), "Megatron's add_bias_linear puts a bias on the MLP too"),
        ("residual_in_fp32", (False,), "Megatron's --fp32-residual-connection is an option of the trainer's"),
    )  # fmt: skip

    def mtp_kinds(self, kinds):
        return ("full", "moe")

    def caveats(self, config, transformer_impl):
        return [
            f"transformers raises time steps below {config.get('time_step_min', 0.001)} to that, Megatron and vLLM do not"
        ]
