"""Checkpoints in nvfp4, read and written."""

import json
import math
from contextlib import closing

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig
from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from reshard import MegatronLayout, check, diff, hf_to_mcore, inspect, mcore_to_hf
from reshard.quantization import int_groups, nvfp4
from reshard.storage import quantized
from reshard.storage.run import conversion as run
from reshard.storage.sources.huggingface import HuggingFaceSource
from tests.storage.test_faults import refused
from tests.tools.nvfp4_checkpoints import (  # noqa: F401  fixtures that every test uses
    ENDS,
    FORMS,
    INPUTS,
    NAME,
    SCHEME,
    _plain_torch,
    _wide_queries,
    by_package,
    config_of,
    directory,
    in_numpy,
    published_by_nvidia,
    read_by_package,
    same_bits,
    stored_by_package,
)
from tests.tools.oracle import hf_tensors, megatron_tensors, same, stored_tensors

READ = [
    ("qwen3-moe", torch.bfloat16, False, {}), ("deepseek-v3-even", torch.bfloat16, True, {"mtp": True}),
    ("qwen3", torch.float16, False, {}), ("qwen3", torch.float32, True, {}),
]  # fmt: skip


@pytest.mark.parametrize("variant, dtype, activations, options", READ)
def test_what_the_package_stores_is_read_as_it_dequantizes(
    variant, dtype, activations, options, checkpoint, tmp_path, monkeypatch
):
    hf = checkpoint(variant, dtype=dtype, **options)
    stored = stored_by_package(hf_tensors(hf))
    wanted = read_by_package(stored, dtype)
    names = [name.removesuffix("_packed") for name in stored if name.endswith("_packed")]
    beside = {f"{name.removesuffix('.weight')}.input_global_scale": torch.tensor([31.0]) for name in names}
    if activations:
        stored |= beside
    source = directory(hf, tmp_path / "source", stored, config_of(**(INPUTS if activations else {})))
    plain = directory(hf, tmp_path / "plain", wanted, None)
    monkeypatch.setattr(run, "SLAB_BYTES", 1024)  # a few rows at a time
    report = hf_to_mcore(source, tmp_path / "mcore", MegatronLayout(tp=2, pp=2), workers=2)
    notices = [
        notice for notice in report.notices if "left behind, since only weights are converted" in notice
    ]
    assert len(notices) == activations and all("input_global_scale" in notice for notice in notices)
    hf_to_mcore(plain, tmp_path / "of plain", MegatronLayout(tp=2, pp=2))
    held = [stored_tensors(tmp_path / one / "release") for one in ("mcore", "of plain")]
    assert same(*held) == []
    if variant == "qwen3":
        rows = len(wanted["model.embed_tokens.weight"])
        assert same(held[0], megatron_tensors(plain, -(-rows // 256) * 256)) == []
    assert diff(source, plain).equal and diff(tmp_path / "mcore", source).equal
    assert inspect(source).details["quantized"]["weights"] == len(names)
    with closing(HuggingFaceSource(source)) as opened:
        rows = opened.read_rows(names[0], 3, 21)
        assert same_bits(rows, wanted[names[0]][3:21])
    mcore_to_hf(tmp_path / "mcore", tmp_path / "back")
    assert same(hf_tensors(tmp_path / "back"), wanted) == []
    if dtype == torch.bfloat16:  # and in fp32 as they are before they are rounded
        hf_to_mcore(source, tmp_path / "wide", dtype="fp32")
        mcore_to_hf(tmp_path / "wide", tmp_path / "wide back")
        exact, name = read_by_package(stored, torch.float32), names[0]
        assert same_bits(hf_tensors(tmp_path / "wide back")[name], exact[name])
    # The controls: another code, scale or global scale of one weight.
    for end in ENDS:
        other = {name: tensor.clone() for name, tensor in stored.items()}
        raw = other[names[0] + end].view(torch.uint8).view(-1)
        raw[len(raw) // 2] ^= 1
        spoiled = directory(hf, tmp_path / f"spoiled {end}", other, config_of())
        assert [one.name for one in diff(spoiled, plain).differences] == [names[0]]


def test_transformers_reads_the_same(checkpoint, tmp_path):
    hf_to_mcore(checkpoint("qwen3", dtype=torch.bfloat16), tmp_path / "mcore")
    mcore_to_hf(tmp_path / "mcore", tmp_path / "source", quantize="nvfp4")
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "source", dtype="auto", quantization_config=CompressedTensorsConfig(dequantize=True)
    )
    with closing(HuggingFaceSource(tmp_path / "source")) as opened:
        assert len(opened.codes) == 4 * 7
        for name, info in opened.tensors.items():
            ours = opened.read_rows(name, 0, info.rows).reshape(info.shape)
            assert same_bits(ours, loaded.state_dict()[name]), name


@pytest.mark.parametrize("beside", ["float", "int"])
def test_one_checkpoint_may_have_weights_of_several_formats(beside, checkpoint, tmp_path):
    """nvfp4 experts, and others in fp8 by channel, or in words of int4, whose names end as those of
    nvfp4 do."""
    hf = checkpoint("qwen3-moe", dtype=torch.bfloat16)
    plain = hf_tensors(hf)
    stored = stored_by_package(plain, lambda name: ".experts." in name)
    wanted, quantization = read_by_package(stored), config_of()
    how = QuantizationArgs(num_bits=8, type="float", strategy="channel")
    if beside == "int":
        how = QuantizationArgs(num_bits=4, type="int", strategy="group", group_size=16)
    for name in [name for name in stored if name.endswith("_proj.weight")]:
        weight = stored.pop(name)
        groups = weight.unflatten(1, (-1, how.group_size or weight.shape[1]))
        scales, zeros = calculate_qparams(groups.amin(2), groups.amax(2), how)
        codes = quantize(
            weight, scales, zeros, how, dtype=torch.float8_e4m3fn if beside == "float" else torch.int8
        )
        wanted[name] = dequantize(codes, scales)
        stored[f"{name}_scale"] = scales
        if beside == "float":
            stored[name] = codes
        else:
            words, _ = int_groups.IntGroups(4, 16).encode(in_numpy(weight), {})
            stored |= {f"{name}_packed": torch.from_numpy(words), f"{name}_shape": torch.tensor(weight.shape)}
    group = {"targets": ["Linear"], "weights": how.model_dump(mode="json"), "input_activations": None}
    forms = {"float": "float-quantized", "int": "pack-quantized"}
    quantization["config_groups"]["group_1"] = group | {"format": forms[beside]}
    quantization["format"] = "mixed-precision"
    source = directory(hf, tmp_path / "source", stored, quantization)
    assert inspect(source).details["quantized"]["weights"] == len(
        [name for name in plain if name.endswith("_proj.weight")]
    )
    assert diff(source, directory(hf, tmp_path / "plain", wanted, None)).equal
    # Without a group of nvfp4 its weights are those of nobody.
    del quantization["config_groups"]["group_0"]
    strange = directory(hf, tmp_path / "strange", stored, quantization)
    what = {"float": "which none of its config_groups has packed", "int": "which codes in words have not"}
    refused(lambda: inspect(strange), f"holds .*_proj.weight_.*, {what[beside]}")


WRITTEN = [("qwen3-moe", {}), ("deepseek-v3-even", {"mtp": True})]


@pytest.mark.parametrize("variant, options", WRITTEN)
def test_a_conversion_writes_what_the_package_makes(variant, options, checkpoint, tmp_path, monkeypatch):
    hf = checkpoint(variant, dtype=torch.bfloat16, **options)
    plain = {name: tensor.clone() for name, tensor in hf_tensors(hf).items()}
    # A weight of zeros beside one of others, and alone; tiny ones, whose own global scale no dtype
    # holds; one large number.
    for name, change in (
        ("layers.0.self_attn.o_proj", 0), ("layers.1.self_attn.o_proj", 1e-37), ("layers.2.mlp.experts.3.gate_proj", 0),
        ("layers.2.mlp.experts.4.gate_proj", 1e-30), ("layers.2.mlp.experts.5.gate_proj", 1e-38),
        ("layers.2.mlp.experts.5.up_proj", 1e-38),
    ):  # fmt: skip
        plain[f"model.{name}.weight"] *= change
    plain["model.layers.3.mlp.experts.1.up_proj.weight"][5, 7] = -300
    plain["model.layers.3.mlp.experts.2.down_proj.weight"][:, 16:32] = -0.0
    hf_to_mcore(directory(hf, tmp_path / "hf", plain, None), tmp_path / "mcore", MegatronLayout(ep=2, etp=1))
    for module in (quantized, run):
        monkeypatch.setattr(module, "SLAB_BYTES", 1024)  # a few rows at a time
    report = mcore_to_hf(
        tmp_path / "mcore", tmp_path / "out", quantize="nvfp4", max_shard_size="100KB", workers=2
    )
    wanted = stored_by_package(plain)
    assert same(hf_tensors(tmp_path / "out"), wanted) == []
    assert check(tmp_path / "out").ok and report.written_bytes < report.read_bytes
    assert diff(tmp_path / "out", directory(hf, tmp_path / "twin", read_by_package(wanted), None)).equal
    names = [name.removesuffix("_packed") for name in wanted if name.endswith("_packed")]
    # The control: most of those that are fused would have another global scale alone.
    alone = [
        name for name in names if by_package(plain[name])["_global_scale"] != wanted[f"{name}_global_scale"]
    ]
    assert len(alone) > 20 and {nvfp4.fused(name)[0] != nvfp4.fused(name)[-1] for name in alone} == {True}
    assert f"{NAME}_global_scale" in wanted and wanted[f"{NAME}_global_scale"] == 1

    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    read = QuantizationConfig.model_validate(config)
    [scheme] = read.config_groups.values()
    assert scheme.weights == SCHEME.weights and scheme.input_activations is None
    assert scheme.targets == ["Linear"] and read.format == "nvfp4-pack-quantized"
    assert "lm_head" in read.ignore and "model.layers.2.mlp.gate" in read.ignore
    assert not {f"{name}.weight" for name in read.ignore} & {*names}
    # What was quantized is so again, and nothing else.
    hf_to_mcore(tmp_path / "out", tmp_path / "again")
    mcore_to_hf(tmp_path / "again", tmp_path / "twice", quantize="nvfp4")
    assert hf_tensors(tmp_path / "twice").keys() == wanted.keys()


@pytest.mark.parametrize("number", [math.nan, -math.inf])
def test_a_weight_whose_sibling_holds_what_no_scale_can_hold_is_not_quantized(number, source, tmp_path):
    tensors, name = load_file(source / "model.safetensors"), "model.layers.1.self_attn.k_proj.weight"
    tensors[name][-1, 3] = number
    save_file(tensors, source / "model.safetensors")
    hf_to_mcore(source, tmp_path / "mcore")
    refused(
        lambda: mcore_to_hf(tmp_path / "mcore", tmp_path / "out", quantize="nvfp4"),
        f"{name} holds infinities or NaN, .*drop --quantize",
    )
    assert {path.name for path in tmp_path.iterdir()} == {"source", "mcore"}


NOT_WRITTEN = {
    "columns": (
        "deepseek-v3",
        torch.bfloat16,
        {},
        r"q_b_proj.weight has 24 columns, which groups of 16 do not divide \(4 such",
    ),
    "fp32": ("qwen3", torch.float32, {}, "add --dtype bf16"),
    "small numbers in fp16": (
        "qwen3",
        torch.float16,
        {},
        "at most, for which float16 holds no global scale of nvfp4: add --dtype bf16",
    ),
}


@pytest.mark.parametrize("what", NOT_WRITTEN)
def test_a_conversion_refuses_what_it_cannot_quantize(what, checkpoint, tmp_path):
    variant, dtype, options, message = NOT_WRITTEN[what]
    hf = checkpoint(variant, dtype=dtype)
    tensors = {
        name: tensor * 0.01 if "down_proj" in name else tensor for name, tensor in hf_tensors(hf).items()
    }
    hf_to_mcore(directory(hf, tmp_path / "hf", tensors, None), tmp_path / "mcore")
    refused(lambda: mcore_to_hf(tmp_path / "mcore", tmp_path / "out", quantize="nvfp4", **options), message)
    assert not (tmp_path / "out").exists()


def of_vllm(tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The tensors that those of NVIDIA stand for, by vLLM's emulation."""
    from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import dequantize_to_dtype

    names = [name.removesuffix("_scale_2") for name in tensors if name.endswith("_scale_2")]
    plain = {name: tensor for name, tensor in tensors.items() if "_scale" not in name and name not in names}
    return plain | {
        name: dequantize_to_dtype(
            tensors[name], tensors[f"{name}_scale"], tensors[f"{name}_scale_2"], dtype, 16, swizzle=False
        )
        for name in names
    }


@pytest.mark.parametrize("form", FORMS)
def test_what_nvidia_publishes_is_read_as_vllm_dequantizes(form, checkpoint, tmp_path, monkeypatch):
    hf = checkpoint("qwen3-moe" if form == "in a file" else "deepseek-v3-even", dtype=torch.bfloat16)
    source, tensors = published_by_nvidia(hf, tmp_path / "source", form)
    wanted = of_vllm(tensors, torch.bfloat16)
    plain = directory(hf, tmp_path / "plain", wanted, None)
    monkeypatch.setattr(run, "SLAB_BYTES", 1024)
    report = hf_to_mcore(source, tmp_path / "mcore", MegatronLayout(tp=2, ep=2, etp=1), workers=2)
    left = [notice for notice in report.notices if "left behind, since only weights are converted" in notice]
    assert len(left) == 1 and "input_scale" in left[0]
    assert inspect(source).details["quantized"]["weights"] == sum(
        name.endswith("_scale_2") for name in tensors
    )
    assert diff(source, plain).equal and diff(tmp_path / "mcore", plain).equal
    # What says how weights are quantized is not left beside those that are not.
    mcore_to_hf(tmp_path / "mcore", tmp_path / "back")
    assert same(hf_tensors(tmp_path / "back"), wanted) == []
    assert not [*tmp_path.glob("mcore/**/hf_quant_config.json"), *tmp_path.glob("back/hf_quant_config.json")]
    assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())
    name = next(name for name in tensors if name.endswith("_scale_2"))
    other = tensors | {name: tensors[name] * 1.01}
    save_file(other, source / "model.safetensors")
    assert [one.name for one in diff(source, plain).differences] == [name.removesuffix("_scale_2")]
