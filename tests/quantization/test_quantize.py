"""Checkpoints that ``mcore-to-hf --quantize`` writes in the format of compressed-tensors are those
that the package makes."""

import json
from pathlib import Path

import pytest
from compressed_tensors.quantization import QuantizationConfig
from safetensors.torch import load_file

from reshard import ReshardError, check, inspect, mcore_to_hf
from reshard.storage import quantized as quantized_slabs
from tests.tools.by_compressed_tensors import (
    arguments,
    compressed,
    is_packed,
)
from tests.tools.oracle import hf_tensors, same

WRITTEN = [
    ("qwen3-moe", "float", "channel", "fp8_per_channel"),
    ("served-int8", "int4", "group 32", "int4_per_group_32"),
]


@pytest.mark.parametrize("variant, kind, strategy, way", WRITTEN)
def test_a_conversion_writes_what_the_package_makes(
    variant, kind, strategy, way, converted, tmp_path, monkeypatch
):
    hf, mcore = converted(variant)[0]
    monkeypatch.setattr(quantized_slabs, "SLAB_BYTES", 2048)  # a few rows at a time
    mcore_to_hf(mcore, tmp_path / "out", quantize=way, max_shard_size="100KB", workers=2)
    wanted = load_file(Path(compressed(hf, tmp_path / "package", kind, strategy)) / "model.safetensors")
    assert same(hf_tensors(tmp_path / "out"), wanted) == []
    assert sum(name.endswith("_scale") for name in wanted) > 20 and check(tmp_path / "out").ok
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    read = QuantizationConfig.model_validate(config)
    [scheme] = read.config_groups.values()
    assert scheme.weights == arguments(kind, strategy) and scheme.targets == ["Linear"]
    if is_packed(kind):
        assert scheme.input_activations is None and read.format == "pack-quantized"
    else:
        assert scheme.input_activations.strategy == "token" and scheme.input_activations.dynamic is True
    assert read.ignore == ["lm_head", *(f"model.layers.{layer}.mlp.gate" for layer in range(4))]
    assert inspect(tmp_path / "out").details["quantized"]["weights"] == sum(
        name.endswith("_scale") for name in wanted
    )
    file = next((tmp_path / "out").glob("*00002-of*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + bytes([file.read_bytes()[-1] ^ 1]))
    assert not check(tmp_path / "out").ok
    with pytest.raises(ReshardError, match="add --dtype bf16"):
        mcore_to_hf(mcore, tmp_path / "fp32", quantize=way, dtype="fp32")


def test_a_conversion_refuses_what_it_cannot_quantize(converted, tmp_path):
    mcore = converted("qwen3-moe")[0][1]
    with pytest.raises(
        ReshardError,
        match="--quantize int2 is not one of fp8, fp8_per_channel, int4_per_group, int4_per_group_32, nvfp4$",
    ):
        mcore_to_hf(mcore, tmp_path / "out", quantize="int2")
    for removed in ("int8_per_channel", "fp8_per_tensor", "fp8_per_block", "int4_per_channel"):
        message = (
            f"--quantize {removed} is no longer written: take fp8, .*, or quantize .* with llm-compressor$"
        )
        with pytest.raises(ReshardError, match=message):
            mcore_to_hf(mcore, tmp_path / "out", quantize=removed)
    for way, name in (
        (
            "int4_per_group_32",
            r"experts.0.down_proj.weight has 48 columns, which groups of 32 do not divide \(32 such",
        ),
        ("int4_per_group", r"has 48 columns, which groups of 128 do not divide \(108 such weights"),
    ):
        with pytest.raises(ReshardError, match=name):
            mcore_to_hf(mcore, tmp_path / "out", quantize=way)
    assert not (tmp_path / "out").exists()
