"""The published configs at full size, with sparse files in place of the weights: everything but the
bytes is real."""

import json
import math
from pathlib import Path

import pytest

from reshard import MegatronLayout, hf_to_mcore, inspect
from reshard.core.dtypes import DTYPES
from reshard.formats import safetensors
from reshard.megatron.arguments import caveats
from reshard.megatron.parameters import expand
from reshard.models.model import Model

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "attention_bias": False,
         "torch_dtype": "bfloat16", "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "vocab_size": 128256,
         "max_position_embeddings": 131072, "pretraining_tp": 1, "tie_word_embeddings": False}  # fmt: skip
LLAMA3_SCALING = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
QWEN = {"hidden_act": "silu", "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "use_sliding_window": False,
        "vocab_size": 151936, "torch_dtype": "bfloat16", "tie_word_embeddings": False, "attention_dropout": 0.0,
        "rope_scaling": None}  # fmt: skip

GLM = {"architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "attention_bias": True,
       "attention_dropout": 0.0, "head_dim": 128, "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 5120,
       "initializer_range": 0.02, "intermediate_size": 12288, "max_position_embeddings": 131072,
       "moe_intermediate_size": 1536, "n_group": 1, "n_routed_experts": 160, "n_shared_experts": 1,
       "norm_topk_prob": True, "num_attention_heads": 96, "num_experts_per_tok": 8, "num_hidden_layers": 92,
       "num_key_value_heads": 8, "num_nextn_predict_layers": 1, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05,
       "rope_scaling": None, "rope_theta": 1000000, "routed_scaling_factor": 2.5, "tie_word_embeddings": False,
       "topk_group": 1, "torch_dtype": "bfloat16", "use_cache": True, "use_qk_norm": True,
       "vocab_size": 151552}  # fmt: skip

# Config, parameters as published (in billions, without copies of the embedding for MTP), a layout
# that is used for it.
PUBLISHED = {
    "Llama-2-7b": (
        LLAMA
        | {
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "vocab_size": 32000,
            "num_key_value_heads": 32,
            "max_position_embeddings": 4096,
            "rope_theta": 10000.0,
            "rope_scaling": None,
            "torch_dtype": "float16",
        },
        6.74,
        MegatronLayout(tp=8),
    ),
    "Llama-3.1-8B": (
        LLAMA
        | {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "mlp_bias": False,
            "rope_scaling": LLAMA3_SCALING,
        },
        8.03,
        MegatronLayout(tp=4, pp=2),
    ),
    "Llama-3.2-1B": (
        LLAMA
        | {
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_attention_heads": 32,
            "num_hidden_layers": 16,
            "head_dim": 64,
            "num_key_value_heads": 8,
            "mlp_bias": False,
            "rope_scaling": LLAMA3_SCALING | {"factor": 32.0},
            "tie_word_embeddings": True,
        },
        1.24,
        MegatronLayout(tp=2, pp=2),
    ),
    "Llama-3.1-70B": (
        LLAMA
        | {
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_attention_heads": 64,
            "num_hidden_layers": 80,
            "num_key_value_heads": 8,
            "mlp_bias": False,
            "rope_scaling": LLAMA3_SCALING,
        },
        70.6,
        MegatronLayout(tp=8, pp=4, vpp=5),
    ),
    "Qwen2.5-7B": (
        QWEN
        | {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "num_hidden_layers": 28,
            "vocab_size": 152064,
            "max_position_embeddings": 131072,
            "sliding_window": 131072,
            "max_window_layers": 28,
        },
        7.62,
        MegatronLayout(tp=4, pp=2),
    ),
    "Qwen3-32B": (
        QWEN
        | {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "attention_bias": False,
            "head_dim": 128,
            "hidden_size": 5120,
            "intermediate_size": 25600,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "num_hidden_layers": 64,
            "max_position_embeddings": 40960,
            "max_window_layers": 64,
            "sliding_window": None,
        },
        32.8,
        MegatronLayout(tp=8, pp=2),
    ),
    "Qwen3-30B-A3B": (
        QWEN
        | {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "attention_bias": False,
            "head_dim": 128,
            "decoder_sparse_step": 1,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "mlp_only_layers": [],
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "num_attention_heads": 32,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 48,
            "num_key_value_heads": 4,
            "max_position_embeddings": 40960,
            "router_aux_loss_coef": 0.001,
        },
        30.5,
        MegatronLayout(tp=4, pp=2, ep=8, etp=1),
    ),
    "DeepSeek-V3": (
        {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "attention_bias": False,
            "ep_size": 1,
            "first_k_dense_replace": 3,
            "hidden_act": "silu",
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "kv_lora_rank": 512,
            "max_position_embeddings": 163840,
            "moe_intermediate_size": 2048,
            "moe_layer_freq": 1,
            "n_group": 8,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "num_attention_heads": 128,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 61,
            "num_key_value_heads": 128,
            "num_nextn_predict_layers": 1,
            "q_lora_rank": 1536,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "rms_norm_eps": 1e-06,
            "rope_theta": 10000,
            "rope_scaling": {
                "beta_fast": 32,
                "beta_slow": 1,
                "factor": 40,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 4096,
                "type": "yarn",
            },
            "routed_scaling_factor": 2.5,
            "scoring_func": "sigmoid",
            "tie_word_embeddings": False,
            "topk_group": 4,
            "topk_method": "noaux_tc",
            "torch_dtype": "bfloat16",
            "v_head_dim": 128,
            "vocab_size": 129280,
            "quantization_config": {
                "activation_scheme": "dynamic",
                "fmt": "e4m3",
                "quant_method": "fp8",
                "weight_block_size": [128, 128],
            },
        },
        682.6,
        MegatronLayout(tp=8, pp=16, ep=32, etp=1, pipeline_model_parallel_layout="Et*3|(t*4|)*14t*2mL"),
    ),
    "GLM-4.5": (
        GLM,
        356.8,
        MegatronLayout(tp=8, pp=8, ep=16, etp=1, pipeline_model_parallel_layout="Et*11|(t*12|)*6t*9mL"),
    ),
    "GLM-4.5-Air": (
        GLM
        | {
            "first_k_dense_replace": 1,
            "hidden_size": 4096,
            "intermediate_size": 10944,
            "moe_intermediate_size": 1408,
            "n_routed_experts": 128,
            "num_hidden_layers": 46,
            "routed_scaling_factor": 1.0,
            "use_qk_norm": False,
        },
        109.2,
        MegatronLayout(tp=4, pp=2, ep=16, etp=1),
    ),
}
PUBLISHED["Kimi-K2"] = (PUBLISHED["DeepSeek-V3"][0] | {
    "model_type": "kimi_k2", "aux_loss_alpha": 0.001, "first_k_dense_replace": 1, "max_position_embeddings": 131072,
    "n_group": 1, "n_routed_experts": 384, "num_attention_heads": 64, "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0, "pretraining_tp": 1, "rope_theta": 50000.0, "routed_scaling_factor": 2.827,
    "seq_aux": True, "topk_group": 1, "vocab_size": 163840,
    "rope_scaling": {"beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                     "original_max_position_embeddings": 4096, "type": "yarn"}},
    1026.4, MegatronLayout(tp=8, pp=16, ep=32, etp=1, pipeline_model_parallel_layout="Et*3|(t*4|)*14t*2L"))  # fmt: skip
PUBLISHED["Moonlight-16B-A3B"] = (
    {name: value for name, value in PUBLISHED["Kimi-K2"][0].items() if name != "quantization_config"} | {
        "model_type": "deepseek_v3", "hidden_size": 2048, "intermediate_size": 11264, "max_position_embeddings": 8192,
        "n_routed_experts": 64, "moe_intermediate_size": 1408, "n_shared_experts": 2, "num_attention_heads": 16,
        "num_experts_per_tok": 6, "num_hidden_layers": 27, "num_key_value_heads": 16, "q_lora_rank": None,
        "rms_norm_eps": 1e-05, "rope_scaling": None, "routed_scaling_factor": 2.446},
    15.96, MegatronLayout(tp=2, pp=3, ep=8, etp=1))  # fmt: skip
_LINES = (Path(__file__).parent / "published_configs.jsonl").read_text().splitlines()
_CONFIGS = {entry["name"].rpartition("/")[2]: entry["config"] for entry in map(json.loads, _LINES)}
PUBLISHED |= {
    "Mistral-7B-v0.1": (_CONFIGS["Mistral-7B-v0.1"], 7.24, MegatronLayout(tp=4, pp=2)),
    "Mixtral-8x7B-v0.1": (_CONFIGS["Mixtral-8x7B-v0.1"], 46.7, MegatronLayout(tp=2, pp=4, ep=8, etp=1)),
    "Mixtral-8x22B-v0.1": (_CONFIGS["Mixtral-8x22B-v0.1"], 140.6, MegatronLayout(tp=4, pp=4, ep=4, etp=2)),
    "MiniMax-M2.7": (_CONFIGS["MiniMax-M2.7"], 228.7, MegatronLayout(tp=8, pp=2, ep=32, etp=1)),
    "ERNIE-4.5-21B-A3B": (_CONFIGS["ERNIE-4.5-21B-A3B-PT"], 21.8, MegatronLayout(tp=4, pp=2, ep=8, etp=1)),
    "OLMoE-1B-7B-0924": (_CONFIGS["OLMoE-1B-7B-0924"], 6.92, MegatronLayout(tp=2, pp=2, ep=8, etp=1)),
    "Ling-mini-2.0": (_CONFIGS["Ling-mini-2.0"], 16.26, MegatronLayout(tp=2, pp=2, ep=8, etp=1)),
    "Ring-flash-2.0": (_CONFIGS["Ring-flash-2.0"], 103.0, MegatronLayout(tp=4, pp=2, ep=16, etp=1)),
    "phi-4": (_CONFIGS["phi-4"], 14.66, MegatronLayout(tp=2, pp=2)),
    "Phi-3-mini-4k": (_CONFIGS["Phi-3-mini-4k-instruct"], 3.82, MegatronLayout(tp=4, pp=2)),
    "Seed-OSS-36B": (_CONFIGS["Seed-OSS-36B-Instruct"], 36.15, MegatronLayout(tp=8, pp=2)),
    "Qwen1.5-MoE-A2.7B": (_CONFIGS["Qwen1.5-MoE-A2.7B-Chat"], 14.3, MegatronLayout(tp=2, pp=2, ep=4, etp=1)),
    "Qwen2-57B-A14B": (_CONFIGS["Qwen2-57B-A14B-Instruct"], 57.4, MegatronLayout(tp=4, pp=2, ep=8, etp=1)),
    "dots.llm1.inst": (_CONFIGS["dots.llm1.inst"], 142.8, MegatronLayout(tp=4, pp=2, ep=16, etp=1)),
    "DeepSeek-V3.2": (_CONFIGS["DeepSeek-V3.2"], 685.4, MegatronLayout(tp=4, ep=64, etp=1)),
    "GLM-4.7-Flash": (_CONFIGS["GLM-4.7-Flash"], 30.6, MegatronLayout(tp=4, ep=8, etp=1)),
    "GLM-5": (_CONFIGS["GLM-5"], 753.9, MegatronLayout(tp=8, pp=2, ep=32, etp=1)),
    "GLM-5.2-FP8": (_CONFIGS["GLM-5.2-FP8"], 753.3, MegatronLayout(tp=4, ep=32, etp=1)),
    # The language model, without the tower.
    "Qwen2.5-VL-7B-Instruct": (_CONFIGS["Qwen2.5-VL-7B-Instruct"], 7.62, MegatronLayout(tp=4)),
    "Qwen3-VL-30B-A3B-Instruct": (_CONFIGS["Qwen3-VL-30B-A3B-Instruct"], 30.53, MegatronLayout(tp=4, ep=8, etp=1)),
    "Kimi-K2.5": (_CONFIGS["Kimi-K2.5"], 1026.4, PUBLISHED["Kimi-K2"][2]),
    "Nemotron-Nano-9B-v2": (_CONFIGS["NVIDIA-Nemotron-Nano-9B-v2"], 8.89, MegatronLayout(tp=4, pp=2)),
    "Nemotron-3-Nano-30B-A3B": (_CONFIGS["NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"], 31.6,
                                MegatronLayout(tp=2, pp=4, ep=8, etp=1)),
    "gpt-oss-20b": (_CONFIGS["gpt-oss-20b"], 20.9, MegatronLayout(tp=2, ep=8, etp=1)),
    "gpt-oss-120b": (_CONFIGS["gpt-oss-120b"], 116.8, MegatronLayout(tp=8, pp=4, ep=8, etp=1)),
    "gpt-oss-20b in bf16": (
        {name: value
         for name, value in _CONFIGS["gpt-oss-20b"].items() if name != "quantization_config"} | {"dtype": "bfloat16"},
        20.9, MegatronLayout(ep=16, etp=1),
    ),
}  # fmt: skip
# What Megatron-Core 0.19 cannot be told, or computes otherwise.
CAVEATS = {
    "Kimi-K2": ["Megatron-LM has no flag for beta_fast 1.0 of the rotary embedding: set it in the trainer's config"],
    "Kimi-K2.5": ["transformers norms compressed keys with 1e-06, Megatron and vLLM with 1e-05"],
    "Moonlight-16B-A3B": [
        "Megatron-Core 0.19 puts a norm before linear_q_proj without q_lora_rank; load this into layers that lack it",
        "transformers norms compressed keys with 1e-06, Megatron and vLLM with 1e-05",
    ],
    **{
        name: ["transformers norms compressed keys with 1e-06, Megatron and vLLM with 1e-05"]
        for name in ("GLM-4.7-Flash", "GLM-5", "GLM-5.2-FP8")
    },
    **{
        name: ["transformers raises time steps below 0.001 to that, Megatron and vLLM do not"]
        for name in ("Nemotron-Nano-9B-v2", "Nemotron-3-Nano-30B-A3B")
    },
}  # fmt: skip


def sparse_checkpoint(folder: Path, config: dict) -> Path:
    """A directory of the right tensors whose files are all holes; fp8 or mxfp4 with scales where
    the config says so."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    model, tensors = Model.from_hf(config), {}
    mapping = expand(model)
    mxfp4 = config.get("quantization_config", {}).get("quant_method") == "mxfp4"
    apart, config = model.family.experts_apart and not model.wrapped, config.get("text_config", config)
    places = {} if apart else mapping.packed | (mapping.packed_codes if mxfp4 else {})
    for name, shape in mapping.stored_shapes(places).items():
        if name in mapping.optional:
            continue
        if name.endswith("_blocks"):
            groups = (*shape[:-1], shape[-1] // 32)
            tensors[name] = (DTYPES["uint8"], (*groups, 16))
            tensors[name.replace("_blocks", "_scales")] = (DTYPES["uint8"], groups)
            continue
        linear = ("_proj" in name and "eh_proj" not in name) or ".experts." in name or "indexer.w" in name
        fp8 = (
            "quantization_config" in config
            and not mxfp4
            and len(shape) == 2
            and linear
            and "weights_proj" not in name
        )
        usual = "bfloat16" if mxfp4 else config.get("torch_dtype") or config["dtype"]
        dtype = "float8_e4m3fn" if fp8 else "float32" if name in mapping.fp32 else usual
        tensors[name] = (DTYPES[dtype], shape)
        if fp8:
            tensors[name + "_scale_inv"] = (DTYPES["float32"], tuple(-(-n // 128) for n in shape))
    files = safetensors.plan_files(tensors, 5 * 10**9)
    for file in files:
        with open(folder / file.name, "wb") as out:
            out.write(file.head)
            out.truncate(file.size_bytes)
    (folder / safetensors.INDEX).write_text(
        safetensors.index_json(files) or json.dumps({"weight_map": dict.fromkeys(tensors, files[0].name)})
    )
    return folder


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_has_the_published_size_and_the_layout_fits(name):
    config, billions, layout = PUBLISHED[name]
    model = Model.from_hf(config)
    mapping = expand(model)
    counted = sum(
        math.prod(shape) for tensor, shape in mapping.shapes.items() if tensor not in mapping.copies
    )
    assert counted / 1e9 == pytest.approx(billions, rel=0.01)
    layout.check(model)
    assert caveats(model, "transformer_engine") == CAVEATS.get(name, [])


# Those left out take longest, and are like others that are planned.
@pytest.mark.parametrize(
    "name",
    sorted(
        PUBLISHED.keys()
        - {
            "Kimi-K2",
            "Kimi-K2.5",
            "GLM-4.5",
            "DeepSeek-V3.2",
            "GLM-5",
            "GLM-5.2-FP8",
            "MiniMax-M2.7",
            "gpt-oss-120b",
            "Qwen2.5-VL-7B-Instruct",
            "Qwen3-VL-30B-A3B-Instruct",
        }
    ),
)
def test_a_published_model_is_planned_at_full_size(name, tmp_path):
    config, billions, layout = PUBLISHED[name]
    source = sparse_checkpoint(tmp_path / "published", config)
    assert inspect(source).parameters / 1e9 == pytest.approx(billions, rel=0.01)
    report = hf_to_mcore(source, tmp_path / "never", layout, dry_run=True)
    stages = layout.ranks_per_stage(Model.from_hf(config))
    # DeepSeek-V3's first stage has dense layers only: 8 of its 32 ranks save.
    saving = layout.pp * stages - (24 if name == "DeepSeek-V3" else 0)
    assert len(report.bytes_per_rank) == saving <= report.files
    assert report.files >= min(16, report.written_bytes >> 30)
    # A sparse source has no tokenizer and no code, and no disk of the tests holds the largest.
    expected = (
        f"{source} has no tokenizer",
        "config.json names code that does not lie beside it",
        "it will not fit",
    )
    assert [one for one in report.notices if not one.startswith(expected)] == CAVEATS.get(name, [])
    rank_bytes = report.bytes_per_rank.values()
    config = config.get("text_config", config)
    assert sum(rank_bytes) >= report.read_bytes - 4 * config["vocab_size"] * config[
        "hidden_size"
    ] * config.get("num_nextn_predict_layers", 0)
    assert math.isclose(sum(rank_bytes), report.read_bytes, rel_tol=0.03)
    assert report.peak_memory_bytes < 1 << 30
