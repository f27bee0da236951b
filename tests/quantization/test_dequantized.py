"""Checkpoints by compressed-tensors as a source: each number is the one that this package, and
transformers with it, make of codes and scales."""

import json
import math
import shutil
from contextlib import closing
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationConfig,
    apply_quantization_config,
)
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from reshard import MegatronLayout, check, diff, hf_to_mcore, inspect, mcore_to_hf
from reshard.storage.sources.huggingface import HuggingFaceSource
from tests.storage.test_faults import refused
from tests.tools.by_compressed_tensors import (
    in_numpy,
    of_package,
    packed_by_package,
    unpacked_by_package,
)
from tests.tools.checkpoints import make
from tests.tools.oracle import hf_tensors, megatron_tensors, same, stored_tensors

DTYPES_OF_KINDS = {"float": torch.float8_e4m3fn, "int": torch.int8}
FLOATS = [torch.bfloat16, torch.float16, torch.float32]
NAME = "model.layers.1.self_attn.o_proj.weight"


def write(
    hf: Path, folder: Path, kind: str, strategy: str, static: bool = False, structure=None, **weight_only
) -> Path:
    """A checkpoint that the package compresses and transformers saves, as llm-compressor has them
    do it; with static scales of activations, and of the key-value cache; with activations as they
    are where there are options for `weight_only`."""
    model = AutoModelForCausalLM.from_pretrained(hf, dtype="auto")
    how = dict(num_bits=8, type=kind, symmetric=True)
    weights = how | dict(strategy=strategy, dynamic=False, block_structure=structure) | weight_only
    inputs = how | dict(strategy="tensor" if static else "token", dynamic=not static)
    cache = how | dict(type="float", strategy="tensor", dynamic=False)
    group = dict(targets=["Linear"], weights=weights, input_activations=None if weight_only else inputs)
    ignore = ["lm_head", "re:.*layers.2.self_attn.*", "re:.*mlp.gate$"]
    apply_quantization_config(
        model,
        QuantizationConfig(
            config_groups={"group_0": group}, ignore=ignore, kv_cache_scheme=cache if static else None
        ),
    )
    for module in model.modules():
        if not hasattr(module, "weight_scale"):
            continue
        values = module.weight.data
        if strategy == "block":
            (rows, columns), (h, w) = values.shape, structure
            padded = torch.nn.functional.pad(values, (0, -columns % w, 0, -rows % h))
            values, dims = padded.view(-(-rows // h), h, -(-columns // w), w), (1, 3)
        elif strategy == "group":
            values, dims = values.unflatten(1, (-1, weights["group_size"])), (2,)
        else:
            dims = (1,) if strategy == "channel" else (0, 1)
        least, most = (
            extreme.reshape(module.weight_scale.shape) for extreme in (values.amin(dims), values.amax(dims))
        )
        scales, zeros = calculate_qparams(least, most, module.quantization_scheme.weights)
        module.weight_scale.data, module.weight_zero_point.data = scales, zeros
        if static:
            module.input_scale.data.fill_(0.03)
            module.input_zero_point.data.zero_()
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)
    return folder


def plain_twin(source: Path, folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """The directory of the numbers that a quantized one stands for."""
    folder.mkdir()
    config = json.loads((source / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


INT4 = {"num_bits": 4, "group_size": 32}
WRITTEN = [
    ("float", "channel", False, None, torch.bfloat16, {}),
    ("int", "channel", False, None, torch.float16, {}),
    ("float", "tensor", True, None, torch.bfloat16, {}),
    ("int", "tensor", True, None, torch.float32, {}),
    ("float", "block", False, [32, 16], torch.bfloat16, {}),
    ("int", "group", False, None, torch.bfloat16, INT4),
    ("int", "group", False, None, torch.bfloat16, INT4 | {"symmetric": False}),
    ("int", "channel", False, None, torch.float16, {"num_bits": 8}),
]


@pytest.mark.parametrize("kind, strategy, static, structure, dtype, weight_only", WRITTEN)
def test_what_the_package_writes_is_read_as_transformers_reads_it(
    kind, strategy, static, structure, dtype, weight_only, checkpoint, tmp_path
):
    hf = checkpoint("qwen3", dtype=dtype)
    source = write(hf, tmp_path / "source", kind, strategy, static, structure, **weight_only)
    names = [name.removesuffix("_scale") for name in hf_tensors(source) if name.endswith("weight_scale")]
    end, codes = ("_packed", torch.int32) if weight_only else ("", DTYPES_OF_KINDS[kind])
    assert len(names) == 3 * 7 + 3 and hf_tensors(source)[names[0] + end].dtype == codes
    loaded = AutoModelForCausalLM.from_pretrained(
        source, dtype="auto", quantization_config=CompressedTensorsConfig(dequantize=True)
    )
    wanted = {name: tensor for name, tensor in loaded.state_dict().items() if tensor.is_floating_point()}
    assert {tensor.dtype for tensor in wanted.values()} == {dtype}
    plain = plain_twin(source, tmp_path / "plain", wanted)
    if static:  # as older versions of the package name it
        text = (source / "config.json").read_text().replace('"quantization_config"', '"compression_config"')
        (source / "config.json").write_text(text)
    with closing(HuggingFaceSource(source)) as opened:
        rows = opened.read_rows(NAME, 3, 21)
        assert rows.tobytes() == in_numpy(wanted[NAME][3:21]).tobytes()

    report = hf_to_mcore(source, tmp_path / "mcore", MegatronLayout(tp=2, pp=2))
    notices = [
        notice for notice in report.notices if "left behind, since only weights are converted" in notice
    ]
    assert len(notices) == static and all(
        "k_scale" in notice or "input_scale" in notice for notice in notices
    )
    rows = len(wanted["model.embed_tokens.weight"])
    padded = -(-rows // 256) * 256
    assert same(stored_tensors(tmp_path / "mcore" / "release"), megatron_tensors(plain, padded)) == []
    assert diff(source, plain).equal and diff(tmp_path / "mcore", source).equal
    seen = inspect(source)
    assert seen.details["quantized"]["weights"] == len(names) and list(seen.dtypes) == [
        str(dtype).split(".")[1]
    ]
    mcore_to_hf(tmp_path / "mcore", tmp_path / "back")
    assert same(hf_tensors(tmp_path / "back"), hf_tensors(plain)) == []
    back = json.loads((tmp_path / "back" / "config.json").read_text())
    assert not back.keys() & {"quantization_config", "compression_config"}

    # The control: the next scale, or another code.
    asymmetric = [f"{NAME}_zero_point"] if weight_only.get("symmetric") is False else []
    for name in (NAME + end, f"{NAME}_scale", *asymmetric):
        tensors = load_file(source / "model.safetensors")
        tensors[name].view(torch.uint8).view(-1)[0] ^= 1
        spoiled = tmp_path / f"spoiled {name}"
        shutil.copytree(source, spoiled)
        save_file(tensors, spoiled / "model.safetensors", {"format": "pt"})
        assert [d.name for d in diff(spoiled, plain).differences] == [NAME]


def test_other_shapes_and_dtypes_of_scales_mean_the_same(checkpoint, tmp_path):
    hf = checkpoint("qwen3", dtype=torch.bfloat16)
    for strategy, shape in (("channel", (-1,)), ("tensor", ()), ("tensor", (1, 1))):
        source = write(hf, tmp_path / f"{strategy} {len(shape)}", "float", strategy)
        tensors = load_file(source / "model.safetensors")
        expected = {
            name.removesuffix("_scale"): of_package(tensors[name.removesuffix("_scale")], scale, strategy)
            for name, scale in tensors.items()
            if name.endswith("_scale")
        }
        kept = {name: tensor for name, tensor in tensors.items() if not name.endswith("_scale")}
        plain = plain_twin(source, tmp_path / f"plain {strategy} {len(shape)}", kept | expected)
        for name in expected:
            scale = tensors[f"{name}_scale"]
            tensors[f"{name}_scale"] = scale.reshape(shape)
        save_file(tensors, source / "model.safetensors")
        assert diff(source, plain).equal
        # In fp32 a product is rounded once, to bf16: what that of bf16 scales is too.
        wide = {
            name: tensor.float() if name.endswith("_scale") else tensor for name, tensor in tensors.items()
        }
        save_file(wide, source / "model.safetensors")
        assert diff(source, plain).equal
        hf_to_mcore(source, tmp_path / "mcore", dtype="fp32", overwrite=True)
        mcore_to_hf(tmp_path / "mcore", tmp_path / "back", overwrite=True)
        ours, name = hf_tensors(tmp_path / "back"), "model.layers.0.mlp.up_proj.weight"
        exact = tensors[name].float() * tensors[f"{name}_scale"].float().reshape(
            (-1, 1) if strategy == "channel" else ()
        )
        assert torch.equal(ours[name], exact) and not torch.equal(exact, exact.bfloat16().float())


@pytest.mark.parametrize(
    "variant, way", [("deepseek-v3", "fp8_per_channel"), ("served-int8", "int4_per_group_32")]
)
def test_what_a_conversion_writes_is_a_source(variant, way, checkpoint, tmp_path):
    source = checkpoint(variant, dtype=torch.bfloat16, mtp=variant == "deepseek-v3")
    hf_to_mcore(source, tmp_path / "mcore", MegatronLayout(ep=2, etp=1))
    mcore_to_hf(tmp_path / "mcore", tmp_path / "source", quantize=way, max_shard_size="200KB")
    tensors, wanted = hf_tensors(tmp_path / "source"), {}
    scales = [name for name in tensors if name.endswith("_scale")]
    for name in (name.removesuffix("_scale") for name in scales):
        stored = {
            end: tensors.pop(name + end)
            for end in ("", "_packed", "_scale", "_shape")
            if name + end in tensors
        }
        if "" in stored:
            wanted[name] = of_package(stored[""], stored["_scale"], "channel")
        else:
            wanted[name] = unpacked_by_package(stored, num_bits=4, strategy="group", group_size=32)
    wanted |= tensors
    plain = plain_twin(tmp_path / "source", tmp_path / "plain", wanted)
    assert check(tmp_path / "source").ok and diff(tmp_path / "source", plain).equal
    hf_to_mcore(tmp_path / "source", tmp_path / "again", MegatronLayout(tp=2, pp=2, ep=2, etp=1))
    mcore_to_hf(tmp_path / "again", tmp_path / "back")
    assert same(hf_tensors(tmp_path / "back"), wanted) == []
    # What was quantized is so again, and nothing else.
    mcore_to_hf(tmp_path / "again", tmp_path / "quantized", quantize="fp8_per_channel")
    assert {name for name in hf_tensors(tmp_path / "quantized") if name.endswith("_scale")} == set(scales)


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_what_no_scale_can_hold_is_not_quantized(number, checkpoint, tmp_path):
    source = Path(shutil.copytree(checkpoint("qwen3", dtype=torch.bfloat16), tmp_path / "source"))
    tensors = load_file(source / "model.safetensors")
    tensors[NAME][-1, 3] = number
    save_file(tensors, source / "model.safetensors")
    hf_to_mcore(source, tmp_path / "mcore")
    for way in ("fp8", "fp8_per_channel", "int4_per_group_32"):
        refused(
            lambda way=way: mcore_to_hf(tmp_path / "mcore", tmp_path / "out", quantize=way),
            f"{NAME} holds infinities or NaN, .*drop --quantize",
        )
    assert {path.name for path in tmp_path.iterdir()} == {"source", "mcore"}


@pytest.mark.parametrize("integers", [torch.int64, torch.int32])
def test_a_model_whose_routed_experts_alone_are_packed_is_read(integers, tmp_path):
    """Read a model as Kimi-K2-Thinking is published."""
    make(tmp_path / "plain", "kimi-k2", torch.bfloat16)
    how = INT4 | {"strategy": "group", "symmetric": True}
    source, tensors, expected = tmp_path / "source", {}, {}
    for name, tensor in hf_tensors(tmp_path / "plain").items():
        if ".experts." not in name:
            tensors[name] = expected[name] = tensor
            continue
        stored = packed_by_package(tensor, **how)
        expected[name] = unpacked_by_package(stored, **how)
        stored["_shape"] = stored["_shape"].to(integers)
        tensors |= {name + end: one for end, one in stored.items()}
    source.mkdir()
    save_file(tensors, source / "model.safetensors")
    weights = how | {"type": "int", "dynamic": False, "actorder": None}
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
    }
    (source / "config.json").write_text(json.dumps(config))
    twin = plain_twin(source, tmp_path / "twin", expected)
    assert inspect(source).details["quantized"]["weights"] == 24 * 3 * 3
    assert diff(source, twin).equal and not diff(source, tmp_path / "plain").equal
    hf_to_mcore(source, tmp_path / "mcore", MegatronLayout(tp=2, pp=2, ep=4, etp=1), workers=2)
    mcore_to_hf(tmp_path / "mcore", tmp_path / "back")
    assert same(hf_tensors(tmp_path / "back"), expected) == []


def test_one_checkpoint_may_have_weights_of_several_formats(checkpoint, tmp_path):
    hf = checkpoint("qwen3", dtype=torch.bfloat16)
    published = {
        "fp8": write(hf, tmp_path / "fp8", "float", "channel"),
        "int4": write(hf, tmp_path / "int4", "int", "group", **INT4, symmetric=False),
    }
    tensors, others = (load_file(published[way] / "model.safetensors") for way in ("int4", "fp8"))
    for end in ("_packed", "_scale", "_shape", "_zero_point"):
        tensors.pop(NAME + end)
    tensors |= {name: others[name] for name in (NAME, f"{NAME}_scale")}
    config, other = (json.loads((published[way] / "config.json").read_text()) for way in ("int4", "fp8"))
    quantization, other = config["quantization_config"], other["quantization_config"]
    quantization["config_groups"]["group_1"] = other["config_groups"]["group_0"] | {
        "format": "float-quantized"
    }
    quantization["format"] = "mixed-precision"
    (tmp_path / "mixed").mkdir()
    (tmp_path / "mixed" / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "mixed" / "model.safetensors")
    wanted = {name: one for name, one in tensors.items() if ".weight_" not in name}
    wanted[NAME] = of_package(tensors[NAME], tensors[f"{NAME}_scale"], "channel")
    for name in (name.removesuffix("_packed") for name in tensors if name.endswith("_packed")):
        stored = {end: tensors[name + end] for end in ("_packed", "_scale", "_shape", "_zero_point")}
        wanted[name] = unpacked_by_package(stored, **INT4, strategy="group", symmetric=False)
    twin = plain_twin(tmp_path / "mixed", tmp_path / "twin", wanted)
    assert diff(tmp_path / "mixed", twin).equal and not diff(published["int4"], twin).equal
