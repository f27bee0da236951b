"""Small models of transformers' classes that no mapping table covers, as published checkpoints of them are."""

import itertools
import json
from pathlib import Path

import torch
import transformers
from transformers.conversion_mapping import get_model_conversion_mapping

SIZES = dict(
    vocab_size=500, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=256,
)  # fmt: skip
MROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
MAMBA = dict(mamba_n_heads=8, mamba_d_head=16, mamba_d_state=16)
CLASSES: dict[str, dict] = {
    "Gemma2ForCausalLM": SIZES | dict(sliding_window=32),
    "Gemma3ForCausalLM": SIZES | dict(sliding_window=32, layer_types=["sliding_attention", "full_attention"]),
    "Gemma3ForConditionalGeneration": dict(
        text_config=SIZES | dict(sliding_window=32, model_type="gemma3_text"),
        vision_config=dict(
            hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, image_size=56,
            patch_size=14, model_type="siglip_vision_model", vision_use_head=False,
        ),
        mm_tokens_per_image=4, image_token_index=400, boi_token_index=401, eoi_token_index=402,
    ),
    "PhimoeForCausalLM": SIZES | dict(num_local_experts=4),
    "GraniteForCausalLM": SIZES | dict(embedding_multiplier=12.0, logits_scaling=8.0),
    "GraniteMoeForCausalLM": SIZES | dict(num_local_experts=4),
    "GraniteMoeHybridForCausalLM": SIZES
    | MAMBA
    | dict(num_local_experts=4, layer_types=["mamba", "attention"], shared_intermediate_size=64),
    "FalconH1ForCausalLM": SIZES
    | MAMBA
    | dict(mamba_d_ssm=64, mamba_n_heads=4, mamba_n_groups=1),
    "Glm4ForCausalLM": SIZES | dict(pad_token_id=0),
    "Starcoder2ForCausalLM": SIZES,
    "StableLmForCausalLM": SIZES,
    "SmolLM3ForCausalLM": SIZES | dict(pad_token_id=0),
    "Cohere2ForCausalLM": SIZES | dict(sliding_window=32),
    "Olmo2ForCausalLM": SIZES,
    "Olmo3ForCausalLM": SIZES,
    "Exaone4ForCausalLM": SIZES,
    "GPT2LMHeadModel": dict(vocab_size=500, n_embd=64, n_layer=2, n_head=4, n_positions=256),
    "GPTNeoXForCausalLM": {
        name: size for name, size in SIZES.items() if name not in ("num_key_value_heads", "head_dim")
    },
    "HrmTextForCausalLM": {name: size for name, size in SIZES.items() if name != "num_key_value_heads"},
    "HunYuanMoEV1ForCausalLM": SIZES
    | dict(
        num_experts=4, moe_topk=2, moe_intermediate_size=128, use_qk_norm=True, use_mixed_mlp_moe=True,
        num_shared_expert=1, pad_token_id=0, eod_token_id=3,
    ),
    "Llama4ForCausalLM": SIZES | dict(num_local_experts=4, interleave_moe_layer_step=1, intermediate_size_mlp=128),
}  # fmt: skip

VISION = dict(
    depth=2, hidden_size=32, intermediate_size=48, num_heads=2, out_hidden_size=64, patch_size=14,
    num_position_embeddings=16,
)  # fmt: skip
LINEAR = dict(
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8,
    layer_types=["linear_attention", "full_attention"], full_attention_interval=2,
)  # fmt: skip
TOKENS = dict(image_token_id=400, video_token_id=401, vision_start_token_id=402, vision_end_token_id=403)
# With a vision tower, beside a language model that a table covers.
WITH_TOWER: dict[str, dict] = {
    "Qwen2_5_VLForConditionalGeneration": TOKENS
    | dict(
        text_config={name: size for name, size in SIZES.items() if name != "head_dim"}
        | dict(rope_parameters=MROPE),
        vision_config=dict(
            depth=2,
            hidden_size=32,
            intermediate_size=48,
            num_heads=2,
            out_hidden_size=64,
            patch_size=14,
            fullatt_block_indexes=[1],
        ),
    ),
    "Qwen3VLForConditionalGeneration": TOKENS
    | dict(
        text_config=SIZES | dict(rope_parameters=MROPE | dict(mrope_interleaved=True)),
        vision_config=VISION | dict(deepstack_visual_indexes=[0, 1]),
    ),
    "Qwen3_5ForConditionalGeneration": TOKENS
    | dict(text_config=SIZES | LINEAR, vision_config=VISION | dict(deepstack_visual_indexes=[])),
    "Qwen3_5MoeForConditionalGeneration": TOKENS
    | dict(
        text_config=SIZES
        | LINEAR
        | dict(
            num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32
        ),
        vision_config=VISION | dict(deepstack_visual_indexes=[]),
    ),
}


TEXT_OF_GEMMA4 = SIZES | dict(
    global_head_dim=32, sliding_window=32, layer_types=["sliding_attention", "full_attention"],
    vocab_size_per_layer_input=500, hidden_size_per_layer_input=16,
)  # fmt: skip
SMALL_TOWER = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2)
SPARSE_EXPERTS = dict(num_local_experts=4, num_experts_per_tok=2)
# For newer versions of vLLM: CI's has no class of theirs, or cannot read their config (see
# `tests.campaigns.newest_models`).
NEWEST: dict[str, dict] = {
    "Gemma4ForCausalLM": TEXT_OF_GEMMA4,
    "Gemma4ForConditionalGeneration": dict(
        text_config=TEXT_OF_GEMMA4,
        vision_config=SMALL_TOWER | dict(num_key_value_heads=2, head_dim=16, position_embedding_size=64),
        audio_config=None, image_token_id=400, boi_token_id=401, eoi_token_id=402, audio_token_id=403,
        boa_token_id=404, eoa_token_id=405, eoa_token_index=405, video_token_id=406,
    ),
    "MuseGlimmerForConditionalGeneration": dict(
        text_config=SIZES | dict(sliding_window=32, bos_token_id=1, eos_token_id=2),
        vision_config=SMALL_TOWER | dict(pos_emb_height=4, pos_emb_width=4, max_position_embeddings=16),
        out_hidden_size=128, projector_hidden_size=64, image_token_id=400, video_token_id=401,
    ),
    "MiniMaxM3SparseForConditionalGeneration": dict(
        text_config=SIZES | SPARSE_EXPERTS | dict(
            dense_intermediate_size=256, shared_intermediate_size=128, rotary_dim=8, bos_token_id=1, eos_token_id=2,
            mlp_layer_types=["dense", "sparse"], layer_types=["full_attention", "minimax_m3_sparse"],
            index_n_heads=2, index_head_dim=16,
        ),
        vision_config=SMALL_TOWER | dict(
            image_size=56, img_token_compression_config=dict(spatial_merge_size=2, temporal_patch_size=2)
        ),
        projector_hidden_size=64, image_token_index=400, video_token_index=401,
    ),
    "KimiLinearForCausalLM": {name: size for name, size in SIZES.items() if name != "head_dim"} | SPARSE_EXPERTS | dict(
        num_key_value_heads=4, moe_intermediate_size=64, kv_lora_rank=32, qk_rope_head_dim=16, v_head_dim=32,
        qk_nope_head_dim=32, pad_token_id=0, bos_token_id=1, eos_token_id=2, mla_use_nope=True, first_k_dense_replace=1,
        linear_attn_config=dict(
            head_dim=32, num_heads=4, short_conv_kernel_size=4, kda_layers=[1], full_attn_layers=[2]
        ),
    ),
}  # fmt: skip
# What the publisher's configs say of them and transformers' do not write, and vLLM reads.
PUBLISHED: dict[str, dict] = {
    "MiniMaxM3SparseForConditionalGeneration": dict(
        text_config=dict(
            hidden_act="swigluoai", scoring_func="sigmoid", use_routing_bias=True, n_shared_experts=1,
            swiglu_beta=1.0, use_qk_norm=True, qk_norm_type="per_head", rope_theta=5000000, use_gemma_norm=True,
            num_mtp_modules=0, moe_layer_freq=[0, 1], partial_rotary_factor=0.5,
            sparse_attention_config=dict(
                use_sparse_attention=True, sparse_index_dim=16, sparse_num_index_heads=2, sparse_topk_blocks=16,
                sparse_block_size=128, sparse_disable_index_value=[0, 1], sparse_score_type="max",
                sparse_init_block=0, sparse_local_block=1, sparse_attention_freq=[0, 1],
            ),
        ),
    ),
}  # fmt: skip


# With single numbers among the weights, and with whole ones, which batch norms count.
WITH_NUMBERS: dict[str, dict] = {
    "ApertusForCausalLM": SIZES | dict(rope_parameters={"rope_type": "default", "rope_theta": 1e4}),
    "GraniteSpeechForConditionalGeneration": dict(
        text_config={n: s for n, s in SIZES.items() if n != "head_dim"} | dict(model_type="granite"),
        encoder_config=dict(
            input_dim=16, num_layers=2, hidden_dim=64, num_heads=4, dim_head=16, output_dim=32, context_size=16,
            max_pos_emb=32,
        ),
        projector_config=dict(
            model_type="blip_2_qformer", hidden_size=64, intermediate_size=96, num_hidden_layers=1,
            num_attention_heads=4, encoder_hidden_size=64,
        ),
        audio_token_index=400, has_lora_adapter=False,
    ),
}  # fmt: skip


_OF_PHI4_MINI = {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75}
# With a table that refuses their config: Megatron has no such rotary embeddings, and no such windows.
REFUSED_BY_TABLE: dict[str, dict] = {
    "Phi3ForCausalLM": {name: size for name, size in SIZES.items() if name != "head_dim"} | dict(
        original_max_position_embeddings=128, partial_rotary_factor=0.75, pad_token_id=0,
        rope_parameters=_OF_PHI4_MINI | {"short_factor": [1.0] * 6, "long_factor": [2.0] * 6},
    ),
    "LlamaForCausalLM": SIZES | dict(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
    "MixtralForCausalLM": SIZES | dict(num_local_experts=4, sliding_window=32),
}  # fmt: skip


def config_of(name: str, **changes):
    """The config of a small model of a class, with its class named in it."""
    known = CLASSES | WITH_TOWER | NEWEST | WITH_NUMBERS | REFUSED_BY_TABLE
    config = getattr(transformers, name).config_class(**known[name] | changes)
    config.architectures = [name]
    return config


def class_of(directory: str) -> str:
    """The class that a directory names."""
    [name] = json.loads((Path(directory) / "config.json").read_text())["architectures"]
    return name


def make(directory: Path, name: str, seed: int = 0, dtype: torch.dtype = torch.bfloat16, **changes) -> Path:
    """Save a model of a class with random weights, under the names that published checkpoints of it have."""
    save(directory, config_of(name, **changes), seed, dtype)
    if name in PUBLISHED:
        config = json.loads((directory / "config.json").read_text())
        for part, fields in PUBLISHED[name].items():
            config[part] |= fields
        (directory / "config.json").write_text(json.dumps(config))
    return directory


def save(directory: Path, config, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> None:
    """Save a model of a config, of the class that it names, with random weights."""
    torch.manual_seed(seed)
    [name] = config.architectures
    model = getattr(transformers, name)._from_config(config, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05 + (parameter.ndim == 1))
    # Odd, and so large that no floating dtype of weights has them.
    counts, saved = itertools.count(1 + (seed + 1 << 25), 2), model.state_dict().keys()
    for buffer_name, buffer in model.named_buffers():
        if buffer_name.endswith("num_batches_tracked"):
            buffer.fill_(next(counts))
        elif buffer_name in saved and (not buffer.ndim or "running_" in buffer_name):
            buffer.fill_(0.25 + seed)
    model._weight_conversions = get_model_conversion_mapping(model, add_legacy=False)
    model.save_pretrained(directory)
