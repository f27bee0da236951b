"""Values of fields that a config lacks: the defaults of transformers' config classes,
without the fields that a mapping table has and those that have no effect.

Written by ``python -m tests.tools.config_defaults``; a test compares it with the installed transformers.
"""

from typing import Any

DEFAULTS: dict[str, dict[str, Any]] = {
    "bailing_moe_v2": {"is_encoder_decoder": False, "moe_router_enable_expert_bias": True},
    "deepseek_v3": {"is_encoder_decoder": False, "rope_interleave": True},
    "deepseek_v32": {"is_encoder_decoder": False},
    "dots1": {"is_encoder_decoder": False},
    "ernie4_5_moe": {"is_encoder_decoder": False},
    "glm4_moe": {"is_encoder_decoder": False},
    "glm4_moe_lite": {"is_encoder_decoder": False, "rope_interleave": True},
    "glm_moe_dsa": {"is_encoder_decoder": False},
    "gpt_oss": {"is_encoder_decoder": False},
    "llama": {"is_encoder_decoder": False},
    "minimax_m2": {"is_encoder_decoder": False},
    "mistral": {"is_encoder_decoder": False},
    "mixtral": {"is_encoder_decoder": False},
    "nemotron_h": {"is_encoder_decoder": False, "sliding_window": None},
    "olmoe": {"is_encoder_decoder": False},
    "phi3": {"is_encoder_decoder": False},
    "qwen2": {"is_encoder_decoder": False},
    "qwen2_5_vl_text": {"is_encoder_decoder": False},
    "qwen2_moe": {"is_encoder_decoder": False},
    "qwen3": {"is_encoder_decoder": False},
    "qwen3_5_moe_text": {"is_encoder_decoder": False},
    "qwen3_5_text": {"is_encoder_decoder": False},
    "qwen3_moe": {"is_encoder_decoder": False},
    "qwen3_next": {"is_encoder_decoder": False},
    "qwen3_vl_moe_text": {"is_encoder_decoder": False},
    "seed_oss": {"is_encoder_decoder": False},
}
