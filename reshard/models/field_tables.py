"""Names of config fields: those that have no effect on what the weights compute, and those that
decide it somewhere."""

from typing import Any

# Tokens, files, dtypes on disk, names and licenses, what a call returns or how it samples, and what
# only says how to train or in which order to sum.
NO_EFFECT = """
bos_token eos_token pad_token unk_token tokenizer_class tokenizer_model_max_length
tokenizer_padding_side padding_side prefix model_max_length max_sequence_length max_seq_len
max_seq_length seq_length torch_dtype dtype use_bfloat16 is_decoder attention_softmax_in_fp32
auto_map unsloth_fixed task_specific_params finetuning_task transformers.js_config is_llama_config
license license_name license_link name model_name base_model language tags use_cache
output_hidden_states output_attentions output_router_logits output_scores return_dict
return_dict_in_generate id2label label2id num_labels problem_type chunk_size_feed_forward
tf_legacy_loss loss_type torchscript attn_implementation attention_implementation
use_flash_attention_2 use_flash_attn pretraining_dataset pretraining_tp gradient_checkpointing
neftune_noise_alpha initializer_factor hidden_dropout resid_pdrop embd_pdrop residual_dropout
classifier_dropout router_aux_loss_coef aux_loss_alpha seq_aux router_z_loss_coef
router_jitter_noise ep_size max_length min_length do_sample early_stopping num_beams num_beam_groups
diversity_penalty temperature top_k top_p typical_p repetition_penalty length_penalty
cache_implementation max_window_layers no_repeat_ngram_size encoder_no_repeat_ngram_size
bad_words_ids num_return_sequences remove_invalid_values exponential_decay_length_penalty
suppress_tokens begin_suppress_tokens
""".split()
# What says something about rotary embeddings.
ROPE_FIELDS = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor")
# Ends of names without effect: ids of tokens, versions of the program that wrote a config.
NO_EFFECT_ENDS = ("_token_id", "_token_ids", "_version")
# Fields that change nothing of what the weights of any model compute: tokens that begin and end, names, what a call
# returns, what training alone reads, and how weights are stored.
NO_EFFECT_ANYWHERE = """
bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id dtype torch_dtype transformers_version
architectures auto_map use_cache output_hidden_states output_attentions output_router_logits return_dict
attn_implementation attention_implementation gradient_checkpointing initializer_range initializer_factor
quantization_config compression_config id2label label2id num_labels problem_type tokenizer_class task_specific_params
finetuning_task chunk_size_feed_forward torchscript license language tags name_or_path attention_dropout
hidden_dropout hidden_dropout_prob attention_probs_dropout_prob resid_pdrop embd_pdrop attn_pdrop resid_dropout
embedding_dropout residual_dropout classifier_dropout dropout activation_dropout router_aux_loss_coef aux_loss_alpha
router_z_loss_coef
""".split()

# Fields that not all of transformers' classes for the families here have, and that decide what is
# computed in another family, in vLLM or in Megatron, with the values at which they decide nothing.
# Null is always one of them, and a list is harmless where all its entries are. Fields that a family
# fixes are in its mapping file (`Family.always`).
DECIDES_ELSEWHERE: dict[str, tuple[Any, ...]] = {
    # what kind of model it is
    "is_encoder_decoder": (False,), "add_cross_attention": (False,),
    "cross_attention_hidden_size": (), "tie_encoder_decoder": (False,), "pruned_heads": ({},),
    "is_causal": (True,), "use_bidirectional_attention": (False,), "block_configs": (),
    "text_config": (), "vision_config": (), "audio_config": (), "per_layer_config": (), "language_model_only": (False,),
    "quantization": (),
    # positions
    "rope_interleaved": (False,), "rope_interleave": (False,), "rope_traditional": (False,),
    "use_rope": (True,), "use_dynamic_ntk": (False,), "use_logn_attn": (False,),
    "use_mrope": (False,), "mrope_section": (), "mrope_interleaved": (False,), "xdrope_section": (),
    "rotary_dim": (), "rotary_pct": (1,), "rotary_percent": (1,), "no_rope_layers": (1,),
    "no_rope_layer_interval": (), "nope_layer_interval": (), "rope_local_base_freq": (),
    "local_rope_theta": (), "global_rope_theta": (), "alibi": (False,), "use_alibi": (False,),
    "position_embedding_type": ("rope", "rotary"), "learned_pos_emb": (False,),
    "llama_4_scaling": (), "dual_chunk_attention_config": (),
    # attention
    "attention_bias": (False,), "qkv_bias": (False,), "use_qkv_bias": (False,),
    "attention_out_bias": (False,), "o_bias": (False,), "bias": (False,), "use_bias": (False,),
    "no_bias": (True,), "mlp_bias": (False,), "lm_head_bias": (False,), "use_qk_norm": (False,),
    "qk_norm": (False,), "qk_layernorm": (False,), "use_qk_layernorm": (False,),
    "query_key_norm": (False,), "attention_multiplier": (), "attn_scale": (), "softmax_scale": (),
    "query_pre_attn_scalar": (), "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,), "attn_temperature_tuning": (False,),
    "floor_scale": (), "attn_logit_softcapping": (), "final_logit_softcapping": (), "clip_qkv": (),
    "qkv_clip": (), "attn_config": (), "attention_sinks": (False,), "use_attention_sinks": (False,),
    "attention_sink_bias": (False,), "add_swa_attention_sink_bias": (False,),
    "add_full_attention_sink_bias": (False,), "attention_output_gate": (False,),
    "attn_output_gate": (False,), "output_gate_type": ("swish", "silu"), "attention_gate_func": (),
    "sliding_window": (), "ada_rms_norm_t_cond": (False,), "ada_rms_norm_t_cond_dim": (),
    "use_sliding_window": (False,), "sliding_window_pattern": (), "sliding_window_size": (),
    "attention_chunk_size": (), "window_size": (), "rswa_window": (),
    "layer_types": ("full_attention",), "attn_type_list": (1,), "hybrid_layer_pattern": (0,),
    "full_attention_interval": (1,), "global_attn_every_n_layers": (1,), "linear_attn_config": (),
    "index_topk": (), "index_n_heads": (), "index_head_dim": (), "multi_query": (False,),
    "kv_lora_rank": (), "q_lora_rank": (), "num_kv_shared_layers": (0,),
    # norms, residuals, logits, activation
    "norm_type": ("rmsnorm", "rms_norm", "RMSNorm"), "layernorm_zero_centered_gamma": (False,),
    "use_post_norm": (False,), "post_norm": (False,), "parallel_attn": (False,),
    "parallel_residual": (False,), "use_parallel_residual": (False,),
    "apply_residual_connection_post_layernorm": (False,), "embedding_multiplier": (1,),
    "residual_multiplier": (1,), "logits_scaling": (1,), "logit_scale": (1,), "scale_emb": (1,),
    "scale_depth": (), "dim_model_base": (), "embedding_scale": (1,), "scale_embeddings": (False,),
    "lm_head_multiplier": (1,), "output_multiplier_scale": (1,), "mup_enabled": (False,),
    "use_mup": (False,), "mup_scale": (1,), "hidden_act": ("silu",), "hidden_activation": ("silu",),
    "activation_function": ("silu",), "mlp_activation": ("silu",), "use_swiglu": (True,),
    "swiglu_limit": (), "swiglu_alpha": (), "layer_scale": (False,),
    # experts
    "num_experts": (0,), "num_local_experts": (0,), "n_routed_experts": (0,),
    "moe_num_experts": (0,), "is_moe": (False,), "use_moe": (False,),
    "shared_expert_intermediate_size": (0,), "shared_intermediate_size": (0,),
    "moe_shared_expert_intermediate_size": (0,), "n_shared_experts": (0,),
    "num_shared_experts": (0,), "moe_num_shared_experts": (0,), "zero_expert_num": (0,),
    "first_k_dense_replace": (0,), "num_dense_layers": (0,), "mlp_layer_types": (),
    "moe_layer_freq": (1,), "moe_layers": (), "interleave_moe_layer_step": (1,),
    "moe_layer_interval": (1,), "decoder_sparse_step": (1,),
    "mlp_only_layers": (), "n_group": (1,), "topk_group": (1,), "num_expert_group": (1,),
    "routed_scaling_factor": (1,), "router_scaling_factor": (1,), "route_scale": (1,),
    "moe_routed_scaling_factor": (1,), "use_expert_bias": (False,),
    "moe_router_enable_expert_bias": (False,), "moe_gate_bias": (False,), "router_bias": (False,),
    "moe_apply_router_weight_on_input": (False,), "moe_router_logit_softcapping": (0,),
    "router_logit_softcapping": (0,), "scoring_func": ("softmax",), "score_function": ("softmax",),
    "router_score_func": ("softmax",), "topk_method": ("greedy",),
}  # fmt: skip
