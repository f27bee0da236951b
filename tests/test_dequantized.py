"""Checkpoints by compressed-tensors as a source: each number is the one that this package, and transformers with it, make of codes
and scales."""

import json
import math
import shutil
from contextlib import closing
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from compressed_tensors.compressors import ModelCompressor, PackedQuantizationCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    apply_quantization_config,
)
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.quantization.utils import calculate_qparams
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from reshard import MegatronLayout, check, diff, hf_to_mcore, inspect, mcore_to_hf
from reshard.core.dtypes import dtype_named
from reshard.storage import packed
from reshard.storage.dequantized import dequantize as dequantize_rows
from reshard.storage.sources.huggingface import HuggingFaceSource
from tests.checkpoints import make
from tests.oracle import hf_tensors, megatron_tensors, same, stored_tensors
from tests.test_faults import refused

CODES = {"float": torch.float8_e4m3fn, "int": torch.int8}
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
NAME = "model.layers.1.self_attn.o_proj.weight"


def in_numpy(tensor: torch.Tensor) -> np.ndarray:
    plain = tensor.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.itemsize])
    return plain.numpy().view(dtype_named(str(tensor.dtype)).numpy())


def of_package(codes, scales, strategy, block=None) -> torch.Tensor:
    """What compressed-tensors makes of codes, in the scales' dtype; told of blocks, which it would infer by dividing."""
    if strategy == "block":
        return dequantize(codes, scales, args=QuantizationArgs(strategy="block", block_structure=list(block)))
    return dequantize(codes, scales if strategy == "channel" else scales.reshape(1))


@settings(max_examples=80, deadline=None)
@given(
    kind=st.sampled_from(list(CODES)), strategy=st.sampled_from(["channel", "tensor", "block"]), to=st.sampled_from(DTYPES),
    stored=st.sampled_from(DTYPES), block=st.sampled_from([(128, 128), (1, 32), (3, 5), (40, 8)]), rows=st.integers(1, 300),
    columns=st.integers(1, 300), start=st.integers(0, 299), magnitude=st.integers(-7, 1), seed=st.integers(0, 99),
)  # fmt: skip
def test_every_number_is_that_of_the_package(
    kind, strategy, to, stored, block, rows, columns, start, magnitude, seed
):
    torch.manual_seed(seed)
    codes = torch.randint(0, 256, (rows, columns), dtype=torch.uint8).view(CODES[kind])
    shared = {"channel": (1, columns), "tensor": (rows, columns), "block": block}[strategy]
    grid = [math.ceil(n / b) for n, b in zip((rows, columns), shared, strict=True)]
    scales = (torch.randn(grid) * 10.0**magnitude).to(stored)
    start = min(start, rows - 1)
    first, out = start // shared[0], np.empty((rows - start, columns), dtype_named(str(to)).numpy())
    code = dtype_named(str(CODES[kind]))
    dequantize_rows(
        in_numpy(codes[start:]).view(np.uint8),
        in_numpy(scales[first:]),
        shared,
        start - first * shared[0],
        out,
        code,
    )
    expected = of_package(codes, scales, strategy, block).to(to)[start:]
    assert expected.dtype == to and torch.equal(
        torch.from_numpy(np.isnan(out.astype(np.float32))), expected.isnan()
    )
    same_bits = in_numpy(expected).view(f"u{to.itemsize}") == out.view(f"u{to.itemsize}")
    assert same_bits[~expected.isnan().numpy()].all()


def scheme_of(**weights) -> QuantizationScheme:
    return QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(type="int", **weights))


def packed_by_package(weight: torch.Tensor, **weights) -> dict[str, torch.Tensor]:
    """A matrix as the package packs it, by the ends of its tensors' names."""
    scheme = scheme_of(**weights)
    size = weights.get("group_size") or weight.shape[1]
    groups = weight.unflatten(1, (-1, size))
    scales, zeros = calculate_qparams(groups.amin(2), groups.amax(2), scheme.weights)
    plain = {"weight": weight, "weight_scale": scales, "weight_zero_point": zeros}
    made = PackedQuantizationCompressor.compress(plain, scheme)
    return {name.removeprefix("weight"): tensor.contiguous() for name, tensor in made.items()}


def unpacked_by_package(stored: dict[str, torch.Tensor], **weights) -> torch.Tensor:
    return PackedQuantizationCompressor.decompress(
        {f"weight{end}": tensor for end, tensor in stored.items()}, scheme_of(**weights)
    )["weight"]


@settings(max_examples=80, deadline=None)
@given(
    bits=st.sampled_from([4, 8]), symmetric=st.booleans(), size=st.sampled_from([None, 2, 32, 128]), groups=st.integers(1, 5),
    columns=st.integers(1, 300), rows=st.integers(1, 70), start=st.integers(0, 69), stored=st.sampled_from(DTYPES), to=st.sampled_from(DTYPES),
    magnitude=st.integers(-7, 1), seed=st.integers(0, 99),
)  # fmt: skip
def test_every_number_of_packed_codes_is_that_of_the_package(
    bits, symmetric, size, groups, columns, rows, start, stored, to, magnitude, seed
):
    torch.manual_seed(seed)
    how = dict(num_bits=bits, symmetric=symmetric, strategy="group" if size else "channel", group_size=size)
    weight = torch.randn(rows, size * groups if size else columns).to(stored)
    whole = packed_by_package(weight, **how)
    whole["_scale"] = (torch.randn(whole["_scale"].shape) * 10.0**magnitude).to(stored)
    start, together = min(start, rows - 1), 32 // bits
    zeros = None if symmetric else in_numpy(whole["_zero_point"][start // together :])
    out = np.empty((rows - start, weight.shape[1]), dtype_named(str(to)).numpy())
    words, scales = in_numpy(whole["_packed"][start:]), in_numpy(whole["_scale"][start:])
    packed.dequantize(words, scales, bits, out, zeros, start % together)
    expected = in_numpy(unpacked_by_package(whole, **how).to(to)[start:])
    assert (expected.view(f"u{to.itemsize}") == out.view(f"u{to.itemsize}")).all()


def test_a_product_that_is_not_rounded_to_the_scales_dtype_is_another():
    """The control: in fp32 the same codes and scales are other numbers."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.int8)[None]
    scales = torch.tensor([[0.0123]], dtype=torch.bfloat16)
    assert not torch.equal(of_package(codes, scales, "channel").float(), codes.float() * scales.float())


def write(
    hf: Path, folder: Path, kind: str, strategy: str, static: bool = False, structure=None, **weight_only
) -> Path:
    """A checkpoint that the package compresses and transformers saves, as llm-compressor has them do it; with static scales of
    activations, and of the key-value cache; with activations as they are where there are options for `weight_only`."""
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
            found.reshape(module.weight_scale.shape) for found in (values.amin(dims), values.amax(dims))
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
    end, codes = ("_packed", torch.int32) if weight_only else ("", CODES[kind])
    assert len(names) == 3 * 7 + 3 and hf_tensors(source)[names[0] + end].dtype == codes
    loaded = AutoModelForCausalLM.from_pretrained(
        source, dtype="auto", quantization_config=CompressedTensorsConfig(dequantize=True)
    )
    wanted = {name: tensor for name, tensor in loaded.state_dict().items() if tensor.is_floating_point()}
    assert {tensor.dtype for tensor in wanted.values()} == {dtype}
    plain = plain_twin(source, tmp_path / "plain", wanted)
    with closing(HuggingFaceSource(source)) as opened:
        some = opened.read_rows(NAME, 3, 21)
        assert some.tobytes() == in_numpy(wanted[NAME][3:21]).tobytes()

    report = hf_to_mcore(source, tmp_path / "mcore", MegatronLayout(tp=2, pp=2))
    said = [notice for notice in report.notices if "left behind, since only weights are converted" in notice]
    assert len(said) == static and all("k_scale" in one or "input_scale" in one for one in said)
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
    assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())

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


@pytest.mark.parametrize("way", ["fp8_per_channel", "int8_per_channel", "fp8_per_tensor", "int4_per_channel"])
def test_what_a_conversion_writes_is_a_source(way, checkpoint, tmp_path):
    hf_to_mcore(
        checkpoint("deepseek-v3", dtype=torch.bfloat16, mtp=True),
        tmp_path / "mcore",
        MegatronLayout(ep=2, etp=1),
    )
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
            wanted[name] = of_package(stored[""], stored["_scale"], way.rpartition("_")[2])
        else:
            wanted[name] = unpacked_by_package(stored, num_bits=4, strategy="channel")
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
    for way in ("fp8", "fp8_per_channel", "int8_per_channel", "fp8_per_tensor", "int4_per_channel"):
        refused(
            lambda way=way: mcore_to_hf(tmp_path / "mcore", tmp_path / "out", quantize=way),
            f"{NAME} holds infinities or NaN, .*drop --quantize",
        )
    assert {path.name for path in tmp_path.iterdir()} == {"source", "mcore"}


@pytest.mark.parametrize("integers", [torch.int64, torch.int32])
def test_a_model_whose_routed_experts_alone_are_packed_is_read(integers, tmp_path):
    """As Kimi-K2-Thinking is published."""
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
        "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
    }  # fmt: skip
    (source / "config.json").write_text(json.dumps(config))
    twin = plain_twin(source, tmp_path / "twin", expected)
    assert inspect(source).details["quantized"]["weights"] == 24 * 3 * 3
    assert diff(source, twin).equal and not diff(source, tmp_path / "plain").equal
    hf_to_mcore(source, tmp_path / "mcore", MegatronLayout(tp=2, pp=2, ep=4, etp=1), workers=2)
    mcore_to_hf(tmp_path / "mcore", tmp_path / "back")
    assert same(hf_tensors(tmp_path / "back"), expected) == []


@pytest.fixture(scope="module")
def published(checkpoint, tmp_path_factory):
    """Compressed checkpoints that nobody spoils: of fp8 by channel, and of int4 by group with zero points."""
    hf, folder = checkpoint("qwen3", dtype=torch.bfloat16), tmp_path_factory.mktemp("published")
    return {
        "fp8": write(hf, folder / "fp8", "float", "channel"),
        "int4": write(hf, folder / "int4", "int", "group", **INT4, symmetric=False),
    }


def test_one_checkpoint_may_have_weights_of_several_formats(published, tmp_path):
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


def of_group(**weights):
    return lambda config, tensors: config["config_groups"]["group_0"]["weights"].update(weights)


def of_config(**fields):
    return lambda config, tensors: config.update(fields)


def of_blocks(config, tensors):
    """Two groups of blocks, of other sizes."""
    of_group(strategy="block", block_structure=[32, 32])(config, tensors)
    group = config["config_groups"]["group_0"]
    config["config_groups"]["group_1"] = group | {"weights": group["weights"] | {"block_structure": [16, 32]}}


def of_scale(change, name=f"{NAME}_scale"):
    return lambda config, tensors: tensors.update({name: change(tensors[name])})


INSTEAD = "of compressed-tensors reshard reads fp8 and int8 weights with symmetric scales by channel, tensor or block, and packed int4"
FAULTS = {
    "no scale": (lambda config, tensors: tensors.pop(f"{NAME}_scale"), f"{NAME} is float8_e4m3fn without {NAME}_scale"),
    "no codes": (lambda config, tensors: tensors.update({NAME: tensors[NAME].bfloat16()}),
                 f"{NAME}_scale does not belong to a matrix of codes in float8_e4m3fn"),
    "codes of another type": (lambda config, tensors: tensors.update({NAME: tensors[NAME].view(torch.int8)}), "does not belong to a matrix"),
    "a scale of nothing": (lambda config, tensors: tensors.update({"model.layers.0.x.weight_scale": torch.ones(64, 1)}), "x.weight_scale does not belong"),
    "a scale of a norm": (lambda config, tensors: tensors.update({"model.norm.weight_scale": torch.ones(64, 1)}), "norm.weight_scale does not belong"),
    "a scale for some rows": (of_scale(lambda scale: scale[1:].clone()), r"o_proj.weight_scale has shape \(63, 1\), expected \(64, 1\) by channel"),
    "a scale for each column": (of_scale(lambda scale: scale.new_ones(1, 256)), r"has shape \(1, 256\), expected \(64, 1\) by channel"),
    "one scale": (of_scale(lambda scale: scale[:1, 0].clone()), r"has shape \(1,\), expected \(64, 1\) by channel"),
    "other blocks": (of_group(strategy="block", block_structure=[32, 32]), r"has shape \(\d+, 1\), expected .* by block"),
    "a scale of whole numbers": (of_scale(lambda scale: scale.to(torch.int32)), "weight_scale has dtype int32, which is none of bfloat16, float16, float32"),
    "a scale of 64 bits": (of_scale(lambda scale: scale.double()), "weight_scale has dtype float64"),
    "a scale that is no number": (of_scale(lambda scale: scale * math.nan), f"{NAME}_scale holds infinities or NaN, which are no scales"),
    "zero points": (lambda config, tensors: tensors.update({f"{NAME}_zero_point": torch.zeros(64, 1, dtype=torch.int8)}),
                    f"holds {NAME}_zero_point, which none of its config_groups has packed"),
    "packed codes": (lambda config, tensors: tensors.update({f"{NAME}_packed": torch.zeros(64, 32, dtype=torch.int32)}),
                     f"holds {NAME}_packed, which none of its config_groups has packed"),
    "an order of columns": (lambda config, tensors: tensors.update({f"{NAME}_g_idx": torch.zeros(256, dtype=torch.int32)}), f"holds {NAME}_g_idx, and {INSTEAD}"),
    "int4": (of_group(num_bits=4, type="int", strategy="group", group_size=32), f"group_0 quantizes weights as .*'num_bits': 4.*, and {INSTEAD}"),
    "asymmetric": (of_group(symmetric=False), f"group_0 quantizes weights as .*'symmetric': False.*, and {INSTEAD}"),
    "by group": (of_group(strategy="group", group_size=32), "'strategy': 'group'"),
    "a type that is a list": (of_group(type=["float"]), r"'type': \['float'\]"),
    "blocks of nothing": (of_group(strategy="block", block_structure=[0, 32]), r"block_structure of group_0 is \[0, 32\], not two positive"),
    "blocks of several sizes": (of_blocks, f"its groups have blocks of several sizes, and {INSTEAD}"),
    "mxfp4": (lambda config, tensors: config["config_groups"]["group_0"].update(format="mxfp4-pack-quantized"), "group_0 format is 'mxfp4-pack-quantized'"),
    "a format that is a list": (of_config(format=[[]]), r"its format is \[\[\]\]"),
    "sparse": (of_config(sparsity_config={"format": "sparse-24-bitmask"}), "weights are stored as sparse ones, .*sparse-24-bitmask"),
    "transformed": (of_config(transform_config={"config_groups": {"R4": {}}}), "weights are transformed, by transform_config"),
    "groups that are a list": (of_config(config_groups=[1]), r"config_groups is \[1\], not an object with groups"),
    "a group that is text": (of_config(config_groups={"group_0": "FP8"}), "not an object with groups"),
    "no groups": (of_config(config_groups={}), "its config_groups quantize no weights, and it holds .*weight_scale"),
    "another tensor": (lambda config, tensors: tensors.update({"model.layers.0.self_attn.x.weight": torch.ones(2)}), "holds 1 that qwen3 does not have"),
}  # fmt: skip


PACKED_FAULTS = {
    "no packed scale": (lambda config, tensors: tensors.pop(f"{NAME}_scale"), f"holds {NAME}_packed without {NAME}_scale"),
    "no shape": (lambda config, tensors: tensors.pop(f"{NAME}_shape"), f"holds {NAME}_packed without {NAME}_shape"),
    "no packed codes": (lambda config, tensors: tensors.pop(f"{NAME}_packed"), f"{NAME}_shape does not belong to codes, {NAME}_packed"),
    "a plain weight": (lambda config, tensors: [tensors.pop(NAME + end) for end in ("_packed", "_shape", "_zero_point")] + [tensors.update({NAME: torch.ones(64, 256)})],
                       f"{NAME}_scale does not belong to codes, {NAME}_packed"),
    "plain beside packed": (lambda config, tensors: tensors.update({NAME: torch.ones(64, 256)}), f"holds both {NAME} and {NAME}_packed: remove one of them"),
    "zero points alone": (lambda config, tensors: tensors.update({"model.x.weight_zero_point": torch.ones(2)}),
                          "model.x.weight_zero_point does not belong to codes, model.x.weight_packed"),
    "columns by another order": (of_group(actorder="group"), f"group_0 quantizes weights as .*, and {INSTEAD}"),
    "neither symmetric nor not": (of_group(symmetric="no"), "'symmetric': 'no'"),
    "no zero points": (lambda config, tensors: tensors.pop(f"{NAME}_zero_point"),
                       rf"{NAME}_packed is int32 \[64, 32\] without zero points, which is no weight of \[64, 256\] in int4 by groups of 32, asymmetric"),
    "fewer zero points": (of_scale(lambda zeros: zeros[1:].clone(), f"{NAME}_zero_point"), r"zero_point is int32 \[7, 8\], expected int32 \[8, 8\]"),
    "symmetric": (of_group(symmetric=True), r"_packed is int32 .* with zero points, which is no weight of .* in int4 by groups of 32"),
    "another shape": (of_scale(lambda shape: shape + 8, f"{NAME}_shape"), r"which is no weight of \[72, 264\] in int4"),
    "a turned shape": (of_scale(lambda shape: shape.flip(0).contiguous(), f"{NAME}_shape"), r"which is no weight of \[256, 64\]"),
    "a shape of fractions": (of_scale(lambda shape: shape.float(), f"{NAME}_shape"), r"_shape is float32 \[2\], not two whole numbers"),
    "a shape of three": (of_scale(lambda shape: torch.ones(3, dtype=torch.int64), f"{NAME}_shape"), r"_shape is int64 \[3\], not two"),
    "half the words": (of_scale(lambda codes: codes[:, ::2].contiguous(), f"{NAME}_packed"), r"_packed is int32 \[64, 16\] with zero points, which is no weight"),
    "words of 8 bits": (of_scale(lambda codes: codes.to(torch.int8), f"{NAME}_packed"), r"_packed is int8 \[64, 32\]"),
    "8 bits": (of_group(num_bits=8), "which is no weight of .* in int8 by groups of 32"),
    "3 bits": (of_group(num_bits=3), f"group_0 quantizes weights as .*'num_bits': 3.*, and {INSTEAD}"),
    "bits that are a fraction": (of_group(num_bits=4.0), "'num_bits': 4.0"),
    "floats": (of_group(type="float"), f"'type': 'float'.*, and {INSTEAD}"),
    "packed blocks": (of_group(strategy="block", block_structure=[32, 32]), "'strategy': 'block'"),
    "groups of another size": (of_group(group_size=16), r"weight_scale has shape \(\d+, \d+\), expected .* by group"),
    "groups that do not divide": (of_group(group_size=40), "which is no weight of .* in int4 by groups of 40"),
    "groups of nothing": (of_group(group_size=0), "group_size of group_0 is 0, not a positive whole number"),
    "groups of text": (of_group(group_size="32"), "group_size of group_0 is '32'"),
    "groups of no size": (of_group(group_size=None), "group_size of group_0 is None"),
    "a packed scale for each column": (of_scale(lambda scale: scale.T.contiguous()), r"has shape \(8, 64\), expected \(64, 8\) by group"),
    "a packed scale that is no number": (of_scale(lambda scale: scale * math.inf), f"{NAME}_scale holds infinities or NaN"),
    "another weight": (lambda config, tensors: tensors.update({f"model.layers.0.x.weight{end}": tensors[NAME + end].clone() for end in ("_packed", "_scale", "_shape", "_zero_point")}),
                       "holds 1 that qwen3 does not have: model.layers.0.x.weight"),
    "in no format": (lambda config, tensors: [config.pop("format"), config["config_groups"]["group_0"].pop("format")],
                     f"group_0 quantizes weights as .*, and {INSTEAD}"),
}  # fmt: skip
READ_LATER = ("a scale that is no number", "a packed scale that is no number")  # what `inspect` does not read


@pytest.mark.parametrize(
    "way, what", [*(("fp8", what) for what in FAULTS), *(("int4", what) for what in PACKED_FAULTS)]
)
def test_what_does_not_add_up_is_refused_in_one_sentence(way, what, published, tmp_path):
    change, message = (FAULTS | PACKED_FAULTS)[what]
    source = Path(shutil.copytree(published[way], tmp_path / "source"))
    config, tensors = (
        json.loads((source / "config.json").read_text()),
        load_file(source / "model.safetensors"),
    )
    change(config["quantization_config"], tensors)
    (source / "config.json").write_text(json.dumps(config))
    save_file(tensors, source / "model.safetensors")
    refused(lambda: hf_to_mcore(source, tmp_path / "out"), message)
    if what not in READ_LATER:
        refused(lambda: inspect(source), message)
    refused(lambda: diff(published[way], source), message)
    assert not [one.path for one in psutil.Process().open_files() if one.path.startswith(str(source))]
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_numbers_that_fp16_does_not_hold_are_refused(checkpoint, tmp_path):
    source = write(checkpoint("qwen3", dtype=torch.float16), tmp_path / "source", "float", "channel")
    tensors = load_file(source / "model.safetensors")
    tensors[f"{NAME}_scale"][3] = 200.0
    tensors[NAME].view(torch.uint8)[3, 5] = 0x7E  # 448
    save_file(tensors, source / "model.safetensors")
    refused(
        lambda: hf_to_mcore(source, tmp_path / "out"), f"{NAME} has numbers that are too large for float16"
    )
    wide = {name: tensor.float() if name.endswith("_scale") else tensor for name, tensor in tensors.items()}
    save_file(wide, source / "model.safetensors")
    refused(
        lambda: hf_to_mcore(source, tmp_path / "out"), f"{NAME} has numbers that are too large for float16"
    )
    refused(
        lambda: hf_to_mcore(source, tmp_path / "out", dtype="fp16"),
        rf"\d+ numbers of {NAME} are too large for float16",
    )
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    hf_to_mcore(source, tmp_path / "out", dtype="bf16")
