"""Checkpoints that ``mcore-to-hf --quantize`` writes in the format of compressed-tensors are those
that the package makes."""

import json
import re
from pathlib import Path

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig
from safetensors.torch import load_file

from reshard import ReshardError, check, hf_to_mcore, inspect, mcore_to_hf
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


@pytest.mark.parametrize("variant", ["phi3", "ling", "qwen3.5", "qwen3-moe"])
def test_a_conversion_names_the_linear_weights_that_it_leaves_in_full(variant, converted, tmp_path):
    hf, mcore = converted(variant)[0]

    def left(folder: Path, way: str) -> set[str]:
        """Return the kinds of the matrices in the files that have no codes, but for routers and embeddings, each as
        often as a notice counts them."""
        notices = [n for n in mcore_to_hf(mcore, folder, quantize=way).notices if n.startswith("--quantize")]
        in_full = [
            name
            for name, tensor in hf_tensors(folder).items()
            if tensor.dim() == 2 and tensor.dtype == torch.bfloat16 and ".layers." in name
            and not name.endswith(("mlp.gate.weight", "_scale")) and ".visual." not in name
        ]  # fmt: skip
        kinds = {re.sub(r"\.\d+\.", ".*.", name) for name in in_full}
        said = (
            f"--quantize {way} leaves {len(in_full)} linear weights in bfloat16: {', '.join(sorted(kinds))}"
        )
        assert notices == ([said] if in_full else [])
        return {kind.rpartition("*.")[2] for kind in kinds}

    of_phi = {"self_attn.qkv_proj.weight", "mlp.gate_up_proj.weight"}
    linear = {f"linear_attn.{name}.weight" for name in ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")}
    wanted = {"phi3": of_phi, "qwen3.5": linear | {"linear_attn.out_proj.weight", "self_attn.q_proj.weight"}}
    wanted["ling"] = {"attention.query_key_value.weight"}
    assert left(tmp_path / "out", "fp8_per_channel") == wanted.get(variant, set())
    if variant == "phi3":  # and of those that were quantized before
        mcore = tmp_path / "mcore"
        hf_to_mcore(compressed(hf, tmp_path / "coded", "float", "channel"), mcore, transformer_impl="local")
        assert left(tmp_path / "again", "fp8_per_channel") == of_phi
