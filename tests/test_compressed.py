"""Checkpoints in the format of compressed-tensors, by channel or by tensor: codes and scales are made as that package makes them."""

import json
import zlib
from pathlib import Path

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig
from compressed_tensors.quantization.lifecycle.forward import quantize
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file

from reshard import ReshardError, check, hf_to_mcore, inspect, mcore_to_hf
from reshard.core.dtypes import dtype_named
from reshard.disk import channels
from tests.oracle import hf_tensors, same
from tests.test_refit import converted

__all__ = ["converted"]
DTYPES = {"float": torch.float8_e4m3fn, "int": torch.int8}
# Those that published configs name, and routers, whose plain weights vLLM's own class of a router serves.
IGNORED = ["lm_head", "re:.*mlp.gate$"]


def arguments(kind: str, strategy: str) -> QuantizationArgs:
    return QuantizationArgs(num_bits=8, type=kind, strategy=strategy, symmetric=True, dynamic=False)


def quantised(weight: torch.Tensor, kind: str, strategy: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of a matrix, by the package's own functions."""
    how = arguments(kind, strategy)
    if strategy == "channel":
        least, most = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    else:
        least, most = torch.aminmax(weight)
    scales, zeros = calculate_qparams(least, most, how)
    return quantize(weight, scales, zeros, how, dtype=DTYPES[kind]), scales


def hard(dtype: torch.dtype) -> torch.Tensor:
    """Rows of zeros, of -0, of the smallest numbers, whose scales come to 0, of negative numbers only, with one large number, with what lies between
    two codes, and of every magnitude."""
    random = torch.Generator().manual_seed(0)
    values = torch.randn(64, 96, generator=random) * 0.02
    values[0], values[1, ::2] = 0, -0.0
    values[2] *= torch.finfo(dtype).tiny
    values[3] = -values[3].abs()
    values[4] = -values[4].abs() - 3
    values[5, 7] = 300.0
    values[6] = torch.arange(96) * 0.5 - 24
    values[6, 0] = 127.5
    values[7] = torch.arange(96) * 0.5 - 24
    values[7, 0] = -448
    reach = 12 if dtype == torch.float16 else 30
    values[8:40] *= torch.exp2(torch.randint(-reach, reach, (32, 96), generator=random).float())
    values[40:44] *= torch.exp2(torch.randint(-reach, reach, (4, 1), generator=random).float())
    return values.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("strategy", ["channel", "tensor"])
@pytest.mark.parametrize("kind", DTYPES)
def test_codes_and_scales_are_those_of_the_package(kind, strategy, dtype):
    values = hard(dtype)
    cases = [values, values[44:], values[8:16] * 1e-3, values[:1], values[3:4], values[:, :1], 0 * values]
    for number, weight in enumerate(cases):
        codes, scales = quantised(weight, kind, strategy)
        # As a conversion makes them, in numpy.
        plain = weight.contiguous().view(torch.int32 if dtype == torch.float32 else torch.int16)
        scheme = channels.Scheme(dtype_named(str(DTYPES[kind])), strategy)
        written = channels.quantize(plain.numpy().view(dtype_named(str(dtype)).numpy()), scheme)
        for ours_too, theirs in zip(written, (codes, scales), strict=True):
            assert ours_too.shape == tuple(theirs.shape)
            assert ours_too.tobytes() == theirs.contiguous().view(torch.uint8).numpy().tobytes(), number


def config_of(kind: str, strategy: str, static: bool = False, **more) -> dict:
    """The ``quantization_config`` of a checkpoint, as those are published."""
    weights = {"num_bits": 8, "type": kind, "strategy": strategy, "symmetric": True, "dynamic": False}
    tensorwise = static or (kind == "float" and strategy == "tensor")
    inputs = weights | {"strategy": "tensor" if tensorwise else "token", "dynamic": not static}
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": inputs,
        "output_activations": None,
    }
    form = f"{kind}-quantized"
    return {"quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed", "ignore": IGNORED,
            "config_groups": {"group_0": group}} | more  # fmt: skip


def compressed(
    directory: str, folder: Path, kind: str, strategy: str, static: bool = False, seed: int = 0
) -> str:
    """A checkpoint as llm-compressor writes it, quantised by the package's own functions."""
    folder.mkdir(parents=True)
    for file in Path(directory).iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    tensors = {}
    for name, tensor in load_file(Path(directory) / "model.safetensors").items():
        tensors[name] = tensor
        if "_proj" in name and name.endswith(".weight") and tensor.ndim == 2:
            layer = name.removesuffix(".weight")
            tensors[name], tensors[f"{layer}.weight_scale"] = quantised(tensor, kind, strategy)
            if static:
                fused = f"{seed} {layer}".replace("up_proj", "gate_proj")  # vLLM wants both to be the same
                tensors[f"{layer}.input_scale"] = torch.tensor([zlib.crc32(fused.encode()) / 2**32 + 0.01])
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((Path(directory) / "config.json").read_text())
    config["quantization_config"] = config_of(kind, strategy, static)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return str(folder)


@pytest.mark.parametrize("variant, kind", [("qwen3-moe", "float"), ("deepseek-v3", "int")])
def test_a_conversion_writes_what_the_package_makes(variant, kind, converted, tmp_path):
    hf, mcore = converted(variant)[0]
    way = {"float": "fp8_per_channel", "int": "int8_per_channel"}[kind]
    mcore_to_hf(mcore, tmp_path / "out", quantize=way, max_shard_size="100KB", workers=2)
    wanted = load_file(Path(compressed(hf, tmp_path / "package", kind, "channel")) / "model.safetensors")
    assert same(hf_tensors(tmp_path / "out"), wanted) == []
    assert sum(name.endswith("_scale") for name in wanted) > 20 and check(tmp_path / "out").ok
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    read = QuantizationConfig.model_validate(config)
    [scheme] = read.config_groups.values()
    assert scheme.weights == arguments(kind, "channel") and scheme.targets == ["Linear"]
    assert scheme.input_activations.strategy == "token" and scheme.input_activations.dynamic is True
    layers = range(4) if variant == "qwen3-moe" else range(1, 4)
    assert read.ignore == ["lm_head", *(f"model.layers.{layer}.mlp.gate" for layer in layers)]
    assert inspect(tmp_path / "out").details["compressed"] == sum(name.endswith("_scale") for name in wanted)
    with pytest.raises(
        ReshardError, match="'compressed-tensors' are not supported, only fp8 with block scales"
    ):
        hf_to_mcore(tmp_path / "out", tmp_path / "back")
    file = next((tmp_path / "out").glob("*00002-of*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + bytes([file.read_bytes()[-1] ^ 1]))
    assert not check(tmp_path / "out").ok
    with pytest.raises(ReshardError, match="add --dtype bf16"):
        mcore_to_hf(mcore, tmp_path / "fp32", quantize=way, dtype="fp32")
    with pytest.raises(
        ReshardError, match="--quantize int4 is none of fp8, fp8_per_channel, int8_per_channel"
    ):
        mcore_to_hf(mcore, tmp_path / "int4", quantize="int4")
