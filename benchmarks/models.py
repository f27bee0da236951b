"""Real models for benchmarks and examples: Megatron-Core (Transformer Engine layers; local ones without a
GPU), and vLLM in the same processes.

The processes are started by torchrun; weights are random.
"""

import argparse
import copy
import json
import zlib
from pathlib import Path

from benchmarks.processes import device

COMMON = {
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
}
QWEN3 = COMMON | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936, "head_dim": 128,
                  "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "attention_bias": False}  # fmt: skip
LLAMA = COMMON | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256,
                  "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "num_key_value_heads": 8, "attention_bias": False,
                  "mlp_bias": False}  # fmt: skip

QWEN25_VL = {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl",
             "tie_word_embeddings": False, "image_token_id": 151655, "video_token_id": 151656,
             "vision_start_token_id": 151652, "vision_end_token_id": 151653}  # fmt: skip
QWEN25_TOWER = {"model_type": "qwen2_5_vl", "hidden_act": "silu", "in_channels": 3, "patch_size": 14,
                "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 112,
                "tokens_per_second": 2}  # fmt: skip

# Published shapes.
MODELS = {
    "llama-3.1-8b": LLAMA | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
                             "num_attention_heads": 32},
    "llama-3.1-70b": LLAMA | {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
                              "num_attention_heads": 64},
    "qwen2.5-7b": COMMON | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 152064,
                            "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
                            "num_attention_heads": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-6,
                            "rope_theta": 1000000.0},
    # Shards of two ranks end within a block of 128x128. It is published with one matrix for
    # embedding and output.
    "qwen2.5-0.5b": COMMON | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 151936,
                              "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
                              "num_attention_heads": 14, "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
                              "rope_theta": 1000000.0},
    "qwen3-8b": QWEN3 | {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
                         "num_attention_heads": 32, "num_key_value_heads": 8},
    "qwen3-32b": QWEN3 | {"hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64,
                          "num_attention_heads": 64, "num_key_value_heads": 8},
    "qwen3-30b-a3b": QWEN3 | {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048,
                              "intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32,
                              "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8,
                              "moe_intermediate_size": 768, "norm_topk_prob": True, "decoder_sparse_step": 1,
                              "mlp_only_layers": []},
    # Without mapping tables.
    "gemma-3-4b": COMMON | {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "vocab_size": 262208,
                            "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
                            "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
                            "rms_norm_eps": 1e-6, "query_pre_attn_scalar": 256, "sliding_window": 1024,
                            "sliding_window_pattern": 6, "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0,
                            "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True},
    "qwen1.5-moe-a2.7b": COMMON | {"architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe",
                                   "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5632,
                                   "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 16,
                                   "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408,
                                   "shared_expert_intermediate_size": 5632, "decoder_sparse_step": 1,
                                   "mlp_only_layers": [], "norm_topk_prob": False, "rms_norm_eps": 1e-6,
                                   "rope_theta": 1000000.0},
    "deepseek-v3": COMMON | {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3",
                             "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432,
                             "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
                             "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
                             "v_head_dim": 128, "n_routed_experts": 256, "num_experts_per_tok": 8,
                             "moe_intermediate_size": 2048, "n_shared_experts": 1, "n_group": 8, "topk_group": 4,
                             "routed_scaling_factor": 2.5, "first_k_dense_replace": 3, "norm_topk_prob": True,
                             "moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
                             "rms_norm_eps": 1e-6, "attention_bias": False, "num_nextn_predict_layers": 0,
                             "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0,
                                                 "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1,
                                                 "original_max_position_embeddings": 4096}},
    "glm-4.5-air": COMMON | {"architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "vocab_size": 151552,
                             "hidden_size": 4096, "intermediate_size": 10944, "num_hidden_layers": 46,
                             "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128,
                             "n_routed_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1408,
                             "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0,
                             "first_k_dense_replace": 1, "norm_topk_prob": True, "use_qk_norm": False,
                             "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5, "rope_theta": 1000000.0,
                             "attention_bias": True, "num_nextn_predict_layers": 0},
    "qwen3-next-80b-a3b": COMMON | {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next",
                                    "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5120,
                                    "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 2,
                                    "head_dim": 256, "num_experts": 512, "num_experts_per_tok": 10,
                                    "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
                                    "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
                                    "full_attention_interval": 4, "linear_conv_kernel_dim": 4,
                                    "linear_key_head_dim": 128, "linear_value_head_dim": 128,
                                    "linear_num_key_heads": 16, "linear_num_value_heads": 32,
                                    "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-6, "rope_theta": 10000000.0,
                                    "attention_bias": False},
    "gpt-oss-20b": COMMON | {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "vocab_size": 201088,
                             "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24,
                             "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
                             "num_local_experts": 32, "num_experts_per_tok": 4, "rms_norm_eps": 1e-5,
                             "rope_theta": 150000.0, "attention_bias": True, "sliding_window": 128, "swiglu_limit": 7.0,
                             "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0,
                                              "original_max_position_embeddings": 4096, "rope_type": "yarn",
                                              "truncate": False}},
    # All its matrices are transposed in transformers and in its files.
    "gpt2-xl": {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "torch_dtype": "bfloat16",
                "vocab_size": 50257, "n_embd": 1600, "n_head": 25, "n_positions": 2048,
                "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "num_hidden_layers": 48},
    "glm-4.7-flash": COMMON | {"architectures": ["Glm4MoeLiteForCausalLM"], "model_type": "glm4_moe_lite",
                               "vocab_size": 154880, "hidden_size": 2048, "intermediate_size": 10240,
                               "num_hidden_layers": 47, "num_attention_heads": 20, "num_key_value_heads": 20,
                               "q_lora_rank": 768, "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64,
                               "v_head_dim": 256, "n_routed_experts": 64, "num_experts_per_tok": 4,
                               "moe_intermediate_size": 1536, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
                               "routed_scaling_factor": 1.8, "first_k_dense_replace": 1, "norm_topk_prob": True,
                               "topk_method": "noaux_tc", "rms_norm_eps": 1e-5, "rope_theta": 1000000.0,
                               "attention_bias": False, "num_nextn_predict_layers": 0},
    # The language model of a larger one, whose vision tower no trainer has.
    "qwen3.5-35b-a3b": {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe",
        "tie_word_embeddings": False, "image_token_id": 248056, "video_token_id": 248057,
        "vision_start_token_id": 248053, "vision_end_token_id": 248054,
        "text_config": COMMON | {"model_type": "qwen3_5_moe_text", "vocab_size": 248320, "hidden_size": 2048,
                                 "num_hidden_layers": 40, "num_attention_heads": 16, "num_key_value_heads": 2,
                                 "head_dim": 256, "num_experts": 256, "num_experts_per_tok": 8,
                                 "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
                                 "attn_output_gate": True, "full_attention_interval": 4, "linear_conv_kernel_dim": 4,
                                 "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
                                 "linear_num_value_heads": 32, "rms_norm_eps": 1e-6, "attention_bias": False,
                                 "mamba_ssm_dtype": "float32", "mlp_only_layers": [], "mtp_num_hidden_layers": 0,
                                 "mtp_use_dedicated_embeddings": False,
                                 "rope_parameters": {"rope_type": "default", "rope_theta": 10000000,
                                                     "partial_rotary_factor": 0.25, "mrope_interleaved": True,
                                                     "mrope_section": [11, 11, 10]}},
        "vision_config": {"model_type": "qwen3_5_moe", "depth": 27, "hidden_act": "gelu_pytorch_tanh",
                          "hidden_size": 1152, "in_channels": 3, "intermediate_size": 4304, "num_heads": 16,
                          "num_position_embeddings": 2304, "out_hidden_size": 2048, "patch_size": 16,
                          "spatial_merge_size": 2, "temporal_patch_size": 2, "deepstack_visual_indexes": []}},
    # With its vision tower.
    "qwen2.5-vl-7b": QWEN25_VL | {
        "text_config": COMMON | {"model_type": "qwen2_5_vl_text", "vocab_size": 152064, "hidden_size": 3584,
                                 "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
                                 "num_key_value_heads": 4, "rms_norm_eps": 1e-6,
                                 "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0,
                                                     "mrope_section": [16, 24, 24]}},
        "vision_config": QWEN25_TOWER | {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16,
                                         "out_hidden_size": 3584, "fullatt_block_indexes": [7, 15, 23, 31]}},
    # For a machine without a GPU.
    "tiny-qwen2.5-vl": QWEN25_VL | {
        "text_config": COMMON | {"model_type": "qwen2_5_vl_text", "vocab_size": 152064, "hidden_size": 128,
                                 "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
                                 "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
                                 "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0,
                                                     "mrope_section": [4, 6, 6]}},
        "vision_config": QWEN25_TOWER | {"depth": 2, "hidden_size": 64, "intermediate_size": 60, "num_heads": 2,
                                         "out_hidden_size": 128, "fullatt_block_indexes": [1]}},
    "tiny-qwen3": QWEN3 | {"vocab_size": 1000, "hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 4,
                           "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64},
    "tiny-qwen3-moe": QWEN3 | {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 1000,
                               "hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 4,
                               "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "num_experts": 8,
                               "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True,
                               "decoder_sparse_step": 1, "mlp_only_layers": []},
}  # fmt: skip


def model_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say which model, with how many layers, and how the trainer is laid out."""
    parser.add_argument("--model", required=True)
    parser.add_argument("--layers", type=int)
    for name in ("tp", "pp", "ep"):
        parser.add_argument(f"--{name}", type=int, default=1)
    parser.add_argument("--etp", type=int)


def text_of(config: dict) -> dict:
    """The fields of a config's language model."""
    return config.get("text_config", config)


def config_of(name: str, layers: int | None = None, fields: dict | None = None) -> dict:
    """A published config, with fewer layers and other `fields` of its language model where asked."""
    config = copy.deepcopy(MODELS[name])
    text = text_of(config)
    if layers:
        text["num_hidden_layers"] = layers
        if "first_k_dense_replace" in text:
            text["first_k_dense_replace"] = 1
    text |= fields or {}
    return config


def megatron_models(config: dict, layout) -> list:
    """The chunks of this rank, in bf16 and wrapped as a trainer wraps them, with Megatron's random
    weights."""
    import megatron.core.parallel_state as mpu
    import torch
    from megatron.core.transformer.enums import AttnBackend
    from megatron.core.transformer.module import Float16Module

    from reshard.megatron.build import build_megatron, initialize_parallel, without_gpu
    from reshard.models.model import Model

    mpu.destroy_model_parallel()
    with without_gpu():
        initialize_parallel(layout, seed=1 + torch.distributed.get_rank())
        torch.manual_seed(1 + torch.distributed.get_rank())
        options: dict = (
            {"attention_backend": AttnBackend.unfused}
            if device() == "cuda"
            else {"transformer_impl": "local"}
        )
        chunks = build_megatron(Model.from_hf(config), layout, **options)
        return [Float16Module(chunk.config, chunk.to(device())).eval() for chunk in chunks]


def vllm_engine(folder: Path, config: dict, **options):
    """vLLM with dummy weights in this process (``external_launcher``); `folder` gets the config."""
    from vllm import LLM

    from reshard.engines.vllm.compat import plain_weights

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if config["model_type"] == "qwen2_5_vl":
        write_processor(folder, config)
        images = {"limit_mm_per_prompt": {"image": 1, "video": 0}, "skip_mm_profiling": True}
        options = images | {"skip_tokenizer_init": False} | options
    elif text_of(config) is not config:  # else vLLM wants an image processor
        options = {"language_model_only": True} | options
    options = {"load_format": "dummy", "enforce_eager": True, "max_model_len": 2048, "gpu_memory_utilization": 0.9,
               "seed": 0, "kv_cache_memory_bytes": 1 << (30 if device() == "cuda" else 27), "skip_tokenizer_init": True,
               "disable_log_stats": True} | options  # fmt: skip
    with plain_weights():
        return LLM(
            model=str(folder), distributed_executor_backend="external_launcher", dtype="bfloat16", **options
        )


def write_processor(folder: Path, config: dict) -> None:
    """Write what vLLM reads beside a Qwen2.5-VL to make pixels of images, and tokens of words that are numbers."""
    import transformers
    from tokenizers import Tokenizer, models

    marks = {
        config[f"{name}_token_id"]: f"<|{text}|>"
        for name, text in (
            ("image", "image_pad"),
            ("video", "video_pad"),
            ("vision_start", "vision_start"),
            ("vision_end", "vision_end"),
        )
    }
    words = {marks.get(number, f"w{number}"): number for number in range(text_of(config)["vocab_size"])}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")),
        unk_token="w0", eos_token="w1", pad_token="w2", additional_special_tokens=[*marks.values()],
    )  # fmt: skip
    transformers.Qwen2_5_VLProcessor(
        image_processor=transformers.Qwen2VLImageProcessor(),
        tokenizer=tokenizer,
        video_processor=transformers.Qwen2VLVideoProcessor(),
    ).save_pretrained(folder)


def change(source, step: int) -> None:
    """An optimizer step: other weights, the same on every rank that holds a shard."""
    import torch

    for shard, region in zip(source.shards, source.memory, strict=True):
        strides = (region.pitch, 1) if len([n for n in shard.sizes if n > 1]) > 1 else (1,)
        lengths = [n for n in shard.sizes if n > 1] or [1]
        view = region.tensor.detach().as_strided(
            lengths, strides, region.tensor.storage_offset() + region.offset
        )
        torch.manual_seed(zlib.crc32(repr((shard.key, shard.offsets, step)).encode()))
        std = 0.02 if view.ndim == 2 else 0.1
        values = torch.randn(lengths, dtype=torch.float32, device=view.device) * std
        view.copy_(values + (1.0 if "norm" in shard.key else 0.0))
