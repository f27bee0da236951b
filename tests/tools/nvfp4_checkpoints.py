"""Codes, scales and checkpoints in nvfp4 as compressed-tensors makes them, by its own functions,
and as ModelOpt stores them."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from compressed_tensors.compressors import NVFP4PackedCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import preset_name_to_scheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import save_file
from transformers import DeepseekV3Config

from tests.tools import checkpoints
from tests.tools.by_compressed_tensors import in_numpy
from tests.tools.oracle import hf_tensors

SCHEME = preset_name_to_scheme("NVFP4A16", ["Linear"])
ENDS = ("_packed", "_scale", "_global_scale")
NAME = "model.layers.1.self_attn.o_proj.weight"
# What is one matrix while a model is served, by hand.
TOGETHER = {
    "q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up",
    "q_a_proj": "latent", "kv_a_proj_with_mqa": "latent",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _plain_torch():
    """The package compiles a function of a few lines, for each shape anew."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.fixture(scope="module", autouse=True)
def _wide_queries():
    """DeepSeek-V3 as the other variant, but that 16 divides all columns."""
    changed = checkpoints.MLA | dict(q_lora_rank=32)
    config = DeepseekV3Config(**changed, tie_word_embeddings=False, **checkpoints.rope(checkpoints.YARN))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(checkpoints.VARIANTS, "deepseek-v3-even", config)
        yield


def by_package(weight: torch.Tensor, *siblings: torch.Tensor) -> dict[str, torch.Tensor]:
    """A matrix as the package stores it, by the ends of its tensors' names, with a global scale
    that is its siblings' too."""
    least, most = zip(*(torch.aminmax(one) for one in (weight, *siblings)), strict=True)
    number = generate_gparam(min(least), max(most))
    groups = weight.unflatten(1, (-1, 16))
    scales, _ = calculate_qparams(groups.amin(2), groups.amax(2), SCHEME.weights, number)
    plain = {"weight": weight, "weight_scale": scales, "weight_global_scale": number}
    made = NVFP4PackedCompressor.compress(plain, SCHEME)
    assert made.keys() == {f"weight{end}" for end in ENDS}
    return {end: made[f"weight{end}"].contiguous() for end in ENDS}


def of_package(stored: dict[str, torch.Tensor], dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Return what the package makes of codes: in bf16 by its compressor, which knows no other dtype, else
    as that does it."""
    if dtype == torch.bfloat16:
        plain = {f"weight{end}": tensor for end, tensor in stored.items()}
        return NVFP4PackedCompressor.decompress(plain, SCHEME)["weight"].to(
            dtype
        )  # fp32 where a row has one scale
    rows, width = stored["_packed"].shape
    codes = unpack_fp4_from_uint8(stored["_packed"], rows, width * 2, torch.float32)
    scales, number = stored["_scale"].float(), stored["_global_scale"]
    return dequantize(codes, scales, args=SCHEME.weights, global_scale=number, dtype=torch.float32).to(dtype)


def same_bits(ours, theirs) -> bool:
    as_bytes = [one if isinstance(one, np.ndarray) else in_numpy(one) for one in (ours, theirs)]
    return as_bytes[0].shape == as_bytes[1].shape and as_bytes[0].tobytes() == as_bytes[1].tobytes()


def stored_by_package(plain: dict[str, torch.Tensor], only=lambda name: True) -> dict[str, torch.Tensor]:
    """The tensors of a model as the package stores them: linear weights by name, fused ones with
    one global scale."""
    names = [name for name in plain if re.search(r"_(proj|mqa)\.weight$", name) and only(name)]
    names = [name for name in names if not name.endswith("eh_proj.weight")]

    def matrix(name: str) -> tuple[str, str]:
        before, last = name.removesuffix(".weight").rsplit(".", 1)
        return before, TOGETHER.get(last, last)

    stored = {name: tensor for name, tensor in plain.items() if name not in names}
    for name in names:
        siblings = [plain[other] for other in names if other != name and matrix(other) == matrix(name)]
        stored |= {name + end: tensor for end, tensor in by_package(plain[name], *siblings).items()}
    return stored


def read_by_package(
    stored: dict[str, torch.Tensor], dtype: torch.dtype = torch.bfloat16
) -> dict[str, torch.Tensor]:
    """The tensors that stored ones stand for."""
    names = [name.removesuffix("_packed") for name in stored if name.endswith("_packed")]
    plain = {
        name: tensor for name, tensor in stored.items() if not name.removesuffix(".weight").endswith(ENDS)
    }
    return plain | {name: of_package({end: stored[name + end] for end in ENDS}, dtype) for name in names}


def config_of(**inputs) -> dict:
    """The ``quantization_config`` that llm-compressor writes."""
    weights = SCHEME.weights.model_dump(mode="json") | {"actorder": None}
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": inputs or None,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "quantization_status": "compressed",
        "config_groups": {"group_0": group | {"format": "nvfp4-pack-quantized"}},
    }


INPUTS = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "dynamic": "local",
          "symmetric": True}  # fmt: skip


def directory(like: Path, folder: Path, tensors: dict[str, torch.Tensor], quantization: dict | None) -> Path:
    """A directory with these tensors, and the config of another one."""
    folder.mkdir()
    config = json.loads((like / "config.json").read_text())
    config |= {"quantization_config": quantization} if quantization else {}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    return folder


def of_part(end, change):
    return lambda config, tensors: tensors.update({NAME + end: change(tensors[NAME + end])})


def extra(name, tensor):
    return lambda config, tensors: tensors.update({name: tensor})


def without(end):
    return lambda config, tensors: tensors.pop(NAME + end)


def by_modelopt(stored: dict[str, torch.Tensor], scalar: bool) -> dict[str, torch.Tensor]:
    """The same as NVIDIA publishes it: with what scales are multiplied by, and scales of
    activations and of keys and values."""
    made = {}
    for name, tensor in stored.items():
        if name.endswith("_global_scale"):
            factor = 1 / tensor * 1.0123
            layer = name.removesuffix(".weight_global_scale")
            made |= {
                f"{layer}.weight_scale_2": factor.reshape(()) if scalar else factor,
                f"{layer}.input_scale": torch.tensor(0.02),
            }
            made |= {f"{layer}.k_scale": torch.tensor(1.0)} if layer.endswith("k_proj") else {}
        else:
            made[name.replace("_packed", "")] = tensor
    return made


IGNORE = {"ignore": ["lm_head", "model.layers.*.mlp.gate"]}
NESTED = {
    "quant_algo": "NVFP4",
    "kv_cache_quant_algo": "FP8",
    "group_size": 16,
    "exclude_modules": ["lm_head"],
}
FORMS = {
    "flat": {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
        **IGNORE,
        "config_groups": {
            "group_0": {
                "weights": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16},
                "targets": ["Linear"],
            }
        },
    },
    "weights only": {"quant_method": "modelopt", "quant_algo": "w4a16_nvfp4", "group_size": 16, **IGNORE},
    "nested": {"quant_method": "modelopt", "quantization": NESTED},
    "in a file": None,
}


def published_by_nvidia(hf: Path, folder: Path, form: str) -> tuple[Path, dict[str, torch.Tensor]]:
    tensors = by_modelopt(stored_by_package(hf_tensors(hf)), form != "nested")
    source = directory(hf, folder, tensors, FORMS[form])
    if form == "in a file":
        config = {"producer": {"name": "modelopt", "version": "0.29.0"}, "quantization": NESTED}
        (source / "hf_quant_config.json").write_text(json.dumps(config))
    return source, tensors
