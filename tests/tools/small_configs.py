"""Small configs of any of transformers' classes: their defaults, with the sizes that they have made small."""

import re
from collections.abc import Iterator
from typing import Any

import transformers

# By a field's whole name; the first pattern that fits counts.
SIZES: tuple[tuple[str, int], ...] = (
    (r"vocab_size|vocab_size_per_layer_input|padded_vocab_size", 512),
    (
        r"hidden_size|d_model|n_embd|word_embed_proj_dim|embed_dim|dim|mm_hidden_size|hidden_dim|embedding_dim",
        64,
    ),
    (r"out_hidden_size|output_dim|text_hidden_size|projection_dim|projector_hidden_size|proj_dim", 64),
    (r"(?:.*_)?(?:expert|moe)\w*_(?:intermediate|ffn_hidden|ffn)_size|(?:expert|moe)_(?:dim|ffn_dim)", 32),
    (
        r"intermediate_size|intermediate_dim|ffn_dim|n_inner|ffn_hidden_size|encoder_ffn_dim|decoder_ffn_dim",
        128,
    ),
    (
        r"intermediate_size_mlp|shared_intermediate_size|shared_expert_intermediate_size|dense_intermediate_size",
        128,
    ),
    (r"num_hidden_layers|n_layers?|num_layers|depth|encoder_layers|decoder_layers|num_hidden_blocks", 2),
    (r"num_attention_heads|n_heads?|num_heads|encoder_attention_heads|decoder_attention_heads", 4),
    (r"num_key_value_heads|n_kv_heads|num_kv_heads|num_global_key_value_heads", 2),
    (r"head_dim|attention_head_dim|global_head_dim|swa_head_dim|swa_v_head_dim|mamba_d_head", 16),
    (r"(?:moe_)?num_(?:local_)?experts|n_routed_experts|moe_num_experts|num_routed_experts", 4),
    (r"num_experts_per_tok|num_selected_experts|moe_k|moe_topk|moe_top_k|top_k_experts|topk_method_k", 2),
    (r"n_group|topk_group|n_groups|num_expert_group", 1),
    (r"q_lora_rank|kv_lora_rank|hidden_size_per_layer_input|o_lora_rank", 32),
    (r"qk_rope_head_dim|rotary_dim", 16),
    (r"qk_nope_head_dim|v_head_dim", 32),
    (r"qk_head_dim", 48),
    (r"index_n_heads", 2),
    (r"index_head_dim|index_topk", 32),
    (
        r"max_position_embeddings|n_positions|max_seq_len|max_sequence_length|max_target_positions|seq_length",
        256,
    ),
    (r"max_source_positions", 64),
    (r"image_size", 56),
    (r"num_position_embeddings", 16),
    (r"sliding_window|window_size|attention_chunk_size|local_attention_window", 32),
    (
        r"first_k_dense_replace|num_dense_layers|moe_layer_start_index|num_kv_shared_layers|num_nextn_predict_layers",
        0,
    ),
    (r"(?:mamba_|ssm_)?(?:d_state|state_size|ssm_state_size)|conv_state_size", 16),
    (r"mamba_n_heads|mamba_num_heads|n_mamba_heads", 8),
    (r"mamba_head_dim|mamba_headdim", 16),
    (r"mamba_d_ssm", 128),
    (r"mamba_dt_rank|time_step_rank", 8),
    (r"linear_num_key_heads", 2),
    (r"linear_num_value_heads", 4),
    (r"linear_key_head_dim|linear_value_head_dim", 8),
    (r"num_mel_bins", 16),
)
# The end of a token's field; the number goes on from one to the next.
TOKEN = re.compile(r".*(?:_token_id|_token_index|_token_ids)|eos_id|bos_id")
# Of types of configs: what published ones say and the defaults do not. Engines leave the head out, as it is not read.
WITHOUT_HEAD = dict(vision_use_head=False)
OF_TYPE: dict[str, dict] = {"siglip_vision_model": WITHOUT_HEAD, "siglip2_vision_model": WITHOUT_HEAD}
OF_LFM2 = dict(block_dim=64, block_ff_dim=96, block_multiple_of=32, conv_dim=64, conv_dim_out=64)
# Of single classes, where their defaults do not fit the sizes above, or engines read fields that they do not have.
OTHERS: dict[str, dict] = {
    "PhiForCausalLM": dict(num_key_value_heads=4, intermediate_size=256),
    "FalconForCausalLM": dict(ffn_hidden_size=256),
    "DeepseekV2ForCausalLM": dict(
        topk_method="greedy", first_k_dense_replace=1, n_group=1, topk_group=1, num_key_value_heads=4
    ),
    "DeepseekV3ForCausalLM": dict(topk_method="noaux_tc", first_k_dense_replace=1, num_key_value_heads=4),
    "DeepseekV32ForCausalLM": dict(topk_method="noaux_tc", first_k_dense_replace=1, num_key_value_heads=4),
    "GlmMoeDsaForCausalLM": dict(topk_method="noaux_tc", first_k_dense_replace=1, num_key_value_heads=4),
    "Glm4MoeForCausalLM": dict(head_dim=16, first_k_dense_replace=1),
    "Glm4MoeLiteForCausalLM": dict(first_k_dense_replace=1, num_key_value_heads=4),
    "Glm4vForConditionalGeneration": dict(text_config=dict(attention_bias=True)),
    "Glm4vMoeForConditionalGeneration": dict(
        text_config=dict(head_dim=16, attention_bias=True, use_qk_norm=False, first_k_dense_replace=1)
    ),
    "Qwen3VLMoeForConditionalGeneration": dict(text_config=dict(norm_topk_prob=True)),
    "HunYuanDenseV1ForCausalLM": dict(head_dim=16, use_qk_norm=True),
    "HunYuanMoEV1ForCausalLM": dict(
        head_dim=16,
        use_qk_norm=True,
        num_experts=4,
        moe_topk=2,
        moe_intermediate_size=128,
        use_mixed_mlp_moe=True,
        num_shared_expert=1,
    ),
    "KimiLinearForCausalLM": dict(
        num_key_value_heads=4,
        q_lora_rank=None,
        mla_use_nope=True,
        first_k_dense_replace=1,
        linear_attn_config=dict(
            head_dim=32, num_heads=4, short_conv_kernel_size=4, kda_layers=[1], full_attn_layers=[2]
        ),
    ),
    "Lfm2ForCausalLM": OF_LFM2 | dict(layer_types=["conv", "full_attention"]),
    "Lfm2VlForConditionalGeneration": dict(
        text_config=OF_LFM2 | dict(layer_types=["conv", "full_attention"])
    ),
    "Lfm2MoeForCausalLM": dict(layer_types=["conv", "full_attention"], num_dense_layers=1),
    "NemotronHForCausalLM": dict(n_groups=2),
    "Mamba2ForCausalLM": dict(num_heads=8, head_dim=16),
    "MellumForCausalLM": dict(use_sliding_window=True, layer_types=["sliding_attention", "full_attention"]),
    "MiMoV2FlashForCausalLM": dict(hybrid_layer_pattern=[0, 1]),
    "MiniMaxM2ForCausalLM": dict(
        rotary_dim=8,
        scoring_func="sigmoid",
        use_routing_bias=True,
        use_qk_norm=True,
        qk_norm_type="per_layer",
    ),
    "NemotronForCausalLM": dict(num_key_value_heads=2),
    "FalconH1ForCausalLM": dict(mamba_n_heads=4, mamba_d_head=16, mamba_d_ssm=64, mamba_n_groups=1),
}


def size_of(name: str) -> int | None:
    """Return the small size of a field; None if it has none."""
    return next((size for pattern, size in SIZES if re.fullmatch(pattern, name)), None)


def small_fields(config: transformers.PreTrainedConfig, numbers: Iterator[int]) -> dict[str, Any]:
    """Return the fields that make a config of the same class small."""
    changes: dict[str, Any] = {}
    names = {**vars(config), **dict.fromkeys(getattr(config, "attribute_map", {}).values())}
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, transformers.PreTrainedConfig):
            continue
        if TOKEN.fullmatch(name) and isinstance(value, int):
            changes[name] = next(numbers)
        elif (
            isinstance(value, int)
            and not isinstance(value, bool)
            and value
            and (size := size_of(name)) is not None
        ):
            changes[name] = min(size, value)
    return changes


def small_config(kind: type, numbers: Iterator[int], name: str = "") -> transformers.PreTrainedConfig:
    """Return a small config of a config class; `numbers` are those of tokens."""
    parts: dict[str, Any] = {}
    default = kind()
    for part, of in getattr(kind, "sub_configs", {}).items():
        sub = getattr(default, part, None)
        actual = type(sub) if isinstance(sub, transformers.PreTrainedConfig) else of
        if actual is transformers.AutoConfig or sub is None:
            continue
        parts[part] = small_config(actual, numbers).to_dict()
    of_type = OF_TYPE.get(getattr(kind, "model_type", ""), {})
    return kind(**merged(small_fields(default, numbers) | parts | of_type, OTHERS.get(name, {})))


def merged(fields: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return fields with others in their places, those of a part among the part's."""
    inner = {
        name: merged(fields[name], value)
        for name, value in changes.items()
        if isinstance(value, dict) and isinstance(fields.get(name), dict)
    }
    return fields | changes | inner
