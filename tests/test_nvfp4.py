"""Checkpoints in nvfp4, read and written: each number, code and scale is the one that compressed-tensors makes."""

import json
import math
import re
import shutil
from collections import defaultdict
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from compressed_tensors.compressors import NVFP4PackedCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, preset_name_to_scheme
from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, DeepseekV3Config

from reshard import MegatronLayout, check, diff, hf_to_mcore, inspect, mcore_to_hf
from reshard.core.dtypes import dtype_named
from reshard.engines.vllm.names import vllm_name
from reshard.models.model import Model
from reshard.storage import channels, nvfp4, quantized
from reshard.storage.run import conversion as run
from reshard.storage.sources.huggingface import HuggingFaceSource
from tests import checkpoints
from tests.oracle import hf_tensors, megatron_tensors, same, stored_tensors
from tests.test_compressed import hard
from tests.test_faults import refused

SCHEME = preset_name_to_scheme("NVFP4A16", ["Linear"])
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
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


def in_numpy(tensor: torch.Tensor) -> np.ndarray:
    plain = tensor.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.itemsize])
    return plain.numpy().view(dtype_named(str(tensor.dtype)).numpy())


def by_package(weight: torch.Tensor, *siblings: torch.Tensor) -> dict[str, torch.Tensor]:
    """A matrix as the package stores it, by the ends of its tensors' names, with a global scale that is its siblings' too."""
    least, most = zip(*(torch.aminmax(one) for one in (weight, *siblings)), strict=True)
    number = generate_gparam(min(least), max(most))
    groups = weight.unflatten(1, (-1, 16))
    scales, _ = calculate_qparams(groups.amin(2), groups.amax(2), SCHEME.weights, number)
    plain = {"weight": weight, "weight_scale": scales, "weight_global_scale": number}
    made = NVFP4PackedCompressor.compress(plain, SCHEME)
    assert made.keys() == {f"weight{end}" for end in ENDS}
    return {end: made[f"weight{end}"].contiguous() for end in ENDS}


def of_package(stored: dict[str, torch.Tensor], dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """What the package makes of codes: in bf16 by its compressor, which knows no other dtype, else as that does it."""
    if dtype == torch.bfloat16:
        plain = {f"weight{end}": tensor for end, tensor in stored.items()}
        return NVFP4PackedCompressor.decompress(plain, SCHEME)["weight"].to(
            dtype
        )  # fp32 where a row has one scale
    rows, width = stored["_packed"].shape
    codes = unpack_fp4_from_uint8(stored["_packed"], rows, width * 2, torch.float32)
    scales, number = stored["_scale"].float(), stored["_global_scale"]
    return dequantize(codes, scales, args=SCHEME.weights, global_scale=number, dtype=torch.float32).to(dtype)


def by_us(weight: torch.Tensor, number: np.float32) -> dict[str, np.ndarray]:
    codes, scales = nvfp4.quantize(in_numpy(weight), number)
    return {"_packed": codes, "_scale": scales}


def of_us(stored: dict[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    codes, scales, number = (in_numpy(stored[end]) for end in ENDS)
    out = np.empty((len(codes), codes.shape[1] * 2), dtype_named(str(dtype)).numpy())
    nvfp4.dequantize(codes, scales, number[0], True, out)
    return torch.from_numpy(out.view(np.uint8)).view(dtype)


def same_bits(ours, theirs) -> bool:
    as_bytes = [one if isinstance(one, np.ndarray) else in_numpy(one) for one in (ours, theirs)]
    return as_bytes[0].shape == as_bytes[1].shape and as_bytes[0].tobytes() == as_bytes[1].tobytes()


@settings(max_examples=60, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES), to=st.sampled_from(DTYPES), rows=st.integers(1, 40), groups=st.integers(1, 6),
    magnitude=st.integers(-42, 38), spread=st.integers(0, 20), zeros=st.sampled_from([0, 0.5, 1]), seed=st.integers(0, 99),
)  # fmt: skip
def test_every_code_scale_and_number_is_that_of_the_package(
    dtype, to, rows, groups, magnitude, spread, zeros, seed
):
    torch.manual_seed(seed)
    values = torch.randn(rows, groups * 16, dtype=torch.float64)
    values *= 10.0 ** (magnitude - spread * torch.rand(rows, groups).repeat_interleave(16, 1))
    values[torch.rand(values.shape) < zeros] = -0.0
    weight = values.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype)
    stored = by_package(weight)
    largest = np.float32(weight.abs().max().float().item())
    number = nvfp4.global_scale(largest, dtype_named(str(dtype)).numpy())
    assert number == stored["_global_scale"].item()
    made = by_us(weight, number)
    assert same_bits(made["_packed"], stored["_packed"]) and same_bits(made["_scale"], stored["_scale"])
    assert same_bits(of_us(stored, to), of_package(stored, to))


@pytest.mark.parametrize("dtype", DTYPES)
def test_hard_numbers_are_those_of_the_package(dtype):
    values = hard(dtype)
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5, 0])  # fmt: skip
    below, above = (torch.nextafter(ties, to) for to in (torch.tensor(-9.0), torch.tensor(9.0)))
    cases = [values, values[44:], 0 * values, values[2:3], -values[44:], ties[None].to(dtype), torch.cat([ties, below, above])[None].to(dtype)]  # fmt: skip
    for number, weight in enumerate(cases):
        stored = by_package(weight.contiguous())
        made = by_us(weight.contiguous(), np.float32(stored["_global_scale"].item()))
        assert same_bits(made["_packed"], stored["_packed"]), number
        assert same_bits(made["_scale"], stored["_scale"]), number
    # Negative numbers that are rounded to 0 keep their sign, and -0 has none.
    codes = by_us(torch.tensor([[6.0] + [-0.1] * 7 + [-0.0] * 8], dtype=dtype), np.float32(448))["_packed"]
    assert codes.tolist() == [[0x87, 0x88, 0x88, 0x88, 0, 0, 0, 0]]


def test_another_scale_or_order_makes_other_codes_and_numbers():
    """The controls."""
    weight = hard(torch.bfloat16)[44:]
    stored = by_package(weight)
    number, expected = stored["_global_scale"], of_package(stored)
    another = stored | {"_global_scale": number * 1.01}
    swapped = stored | {"_packed": stored["_packed"] << 4 | stored["_packed"] >> 4}
    following = stored["_scale"].view(torch.uint8).clone()
    following[3, 2] += 1
    following = stored | {"_scale": following.view(torch.float8_e4m3fn)}
    for other in (another, swapped, following):
        ours = of_us(other, torch.bfloat16)
        assert same_bits(ours, of_package(other)) and not same_bits(ours, expected)
    made = by_us(weight, np.float32(another["_global_scale"].item()))
    assert not same_bits(made["_packed"], stored["_packed"])
    assert not same_bits(made["_scale"], stored["_scale"])


TABLES = (
    "llama", "qwen2", "qwen3", "qwen3-moe-mixed", "deepseek-v3", "deepseek-v3-no-q-lora", "glm4-moe", "moonlight",
)  # fmt: skip


@pytest.mark.parametrize("variant", TABLES)
def test_weights_that_share_a_global_scale_are_those_that_vllm_fuses(variant, checkpoint):
    """By the names of vLLM's parameters, which other tests hold against its own loader; of its experts each has a scale."""
    config = json.loads((checkpoint(variant) / "config.json").read_text())
    model, groups = Model.from_hf(config), defaultdict(list)
    for block in model.blocks():
        for row in block.rows:
            if row.hf.endswith("proj.weight") or row.hf.endswith("_mqa.weight"):
                for expert in range(model.num_experts if "{expert}" in row.hf else 1):
                    published = f"{block.published}{row.hf}".format(expert=expert)
                    groups[block.published, vllm_name(model, row), expert].append(published)
    names = {name for together in groups.values() for name in together}
    assert {len(together) for together in groups.values()} >= {1, 2}
    for together in groups.values():
        for name in together:
            assert [other for other in nvfp4.fused(name) if other in names] == together


@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.0.self_attn.q_proj.bias", "q_proj", "a.my_q_proj.weight", "a.q_proj.x.weight"])  # fmt: skip
def test_what_is_fused_with_nothing_has_a_global_scale_of_its_own(name):
    assert nvfp4.fused(name) == (name,)


def stored_by_package(plain: dict[str, torch.Tensor], only=lambda name: True) -> dict[str, torch.Tensor]:
    """The tensors of a model as the package stores them: linear weights by name, fused ones with one global scale."""
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


def read_by_package(stored: dict[str, torch.Tensor], dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:  # fmt: skip
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
    return {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "ignore": ["lm_head", "re:.*mlp.gate$"],
            "quantization_status": "compressed", "config_groups": {"group_0": group | {"format": "nvfp4-pack-quantized"}}}  # fmt: skip


INPUTS = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "dynamic": "local", "symmetric": True}  # fmt: skip


def directory(like: Path, folder: Path, tensors: dict[str, torch.Tensor], quantization: dict | None) -> Path:
    """A directory with these tensors, and the config of another one."""
    folder.mkdir()
    config = json.loads((like / "config.json").read_text())
    config |= {"quantization_config": quantization} if quantization else {}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    return folder


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
    said = [notice for notice in report.notices if "left behind, since only weights are converted" in notice]
    assert len(said) == activations and all("input_global_scale" in notice for notice in said)
    hf_to_mcore(plain, tmp_path / "of plain", MegatronLayout(tp=2, pp=2))
    held = [stored_tensors(tmp_path / one / "release") for one in ("mcore", "of plain")]
    assert same(*held) == []
    if variant == "qwen3":
        rows = len(wanted["model.embed_tokens.weight"])
        assert same(held[0], megatron_tensors(plain, -(-rows // 256) * 256)) == []
    assert diff(source, plain).equal and diff(tmp_path / "mcore", source).equal
    assert inspect(source).details["quantized"]["weights"] == len(names)
    with closing(HuggingFaceSource(source)) as opened:
        some = opened.read_rows(names[0], 3, 21)
        assert same_bits(some, wanted[names[0]][3:21])
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
    """nvfp4 experts, and others in fp8 by channel, or in words of int4, whose names end as those of nvfp4 do."""
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
            scheme = channels.Scheme("int4", "group", (1, 16), True)
            words, _ = channels.quantize(in_numpy(weight), scheme)
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
    # A weight of zeros beside one of others, and alone; tiny ones, whose own global scale no dtype holds; one large number.
    for name, change in (
        ("layers.0.self_attn.o_proj", 0), ("layers.1.self_attn.o_proj", 1e-37), ("layers.2.mlp.experts.3.gate_proj", 0),
        ("layers.2.mlp.experts.4.gate_proj", 1e-30), ("layers.2.mlp.experts.5.gate_proj", 1e-38), ("layers.2.mlp.experts.5.up_proj", 1e-38),
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
    "columns": ("deepseek-v3", torch.bfloat16, {}, r"q_b_proj.weight has 24 columns, which groups of 16 do not divide \(4 such"),
    "fp32": ("qwen3", torch.float32, {}, "add --dtype bf16"),
    "small numbers in fp16": ("qwen3", torch.float16, {}, "at most, for which float16 holds no global scale of nvfp4: add --dtype bf16"),
}  # fmt: skip


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


@pytest.fixture(scope="module")
def published(checkpoint, tmp_path_factory):
    """A checkpoint in nvfp4 that nobody spoils."""
    hf, folder = checkpoint("qwen3", dtype=torch.bfloat16), tmp_path_factory.mktemp("published")
    return directory(hf, folder / "nvfp4", stored_by_package(hf_tensors(hf)), config_of())


def of_group(**weights):
    return lambda config, tensors: config["config_groups"]["group_0"]["weights"].update(weights)


def of_part(end, change):
    return lambda config, tensors: tensors.update({NAME + end: change(tensors[NAME + end])})


def extra(name, tensor):
    return lambda config, tensors: tensors.update({name: tensor})


def without(end):
    return lambda config, tensors: tensors.pop(NAME + end)


INSTEAD = "of compressed-tensors reshard reads fp8 and int8 weights with symmetric scales .* and nvfp4: convert the checkpoint that"
FAULTS = {
    "no scales": (without("_scale"), f"holds {NAME}_packed without {NAME}_scale, and nvfp4 weights need both"),
    "no global scale": (without("_global_scale"), f"holds {NAME}_packed without {NAME}_global_scale, and nvfp4"),
    "no codes": (without("_packed"), f"{NAME}_global_scale does not belong to codes, {NAME}_packed"),
    "scales alone": (lambda config, tensors: [without(end)(config, tensors) for end in ("_packed", "_global_scale")], f"{NAME}_scale does not belong to codes, {NAME}_packed"),
    "plain beside packed": (extra(NAME, torch.ones(64, 256)), f"holds both {NAME} and {NAME}_packed: remove one of them"),
    "codes in words": (of_part("_packed", lambda codes: codes.view(torch.int32)), rf"{NAME}_packed is int32 \[64, 32\], which are no codes of nvfp4: those are uint8"),
    "columns that 16 does not divide": (of_part("_packed", lambda codes: codes[:, :-4].contiguous()), r"_packed is uint8 \[64, 124\], which are no codes of nvfp4"),
    "codes of one dim": (of_part("_packed", torch.flatten), r"_packed is uint8 \[8192\], which are no codes"),
    "half the codes": (of_part("_packed", lambda codes: codes[:, ::2].contiguous()), rf"{NAME}_scale is float8_e4m3fn \[64, 16\], expected float8_e4m3fn \[64, 8\] for nvfp4 weights of \[64, 128\]"),
    "scales in bf16": (of_part("_scale", lambda scale: scale.bfloat16()), rf"{NAME}_scale is bfloat16 \[64, 16\], expected float8_e4m3fn \[64, 16\]"),
    "scales of mxfp4": (of_part("_scale", lambda scale: scale.view(torch.uint8)), "_scale is uint8"),
    "scales of other rows": (of_part("_scale", lambda scale: scale[1:].clone()), r"_scale is float8_e4m3fn \[63, 16\], expected"),
    "a scale that is no number": (of_part("_scale", lambda scale: torch.full_like(scale, math.nan)), f"{NAME}_scale holds infinities or NaN, which are no scales"),
    "a global scale in bf16": (of_part("_global_scale", lambda one: one.bfloat16()), rf"{NAME}_global_scale is bfloat16 \[1\], not one number in float32"),
    "two global scales": (of_part("_global_scale", lambda one: torch.cat([one, one])), r"_global_scale is float32 \[2\], not one number"),
    **{f"a global scale of {number}": (of_part("_global_scale", lambda one, number=number: one * 0 + number),
       f"{NAME}_global_scale is {number}, and what divides all scales of a weight is a positive number: take") for number in (0.0, -3.0, math.inf, math.nan)},
    "numbers that no dtype holds": (of_part("_global_scale", lambda one: one * 0 + 1e-37), f"{NAME} has numbers that are too large for bfloat16 once dequantized"),
    "zero points": (extra(f"{NAME}_zero_point", torch.zeros(64, 16)), f"holds {NAME}_zero_point, which nvfp4 weights have not, and {INSTEAD}"),
    "a shape": (extra(f"{NAME}_shape", torch.tensor([64, 256])), f"holds {NAME}_shape, which nvfp4 weights have not"),
    "an order of columns": (extra(f"{NAME}_g_idx", torch.zeros(256)), f"holds {NAME}_g_idx, and {INSTEAD}"),
    "another weight": (lambda config, tensors: tensors.update({f"model.x.weight{end}": tensors[NAME + end].clone() for end in ENDS}), "holds 1 that qwen3 does not have: model.x.weight"),
    "another shape than the config's": (lambda config, tensors: tensors.update({NAME + end: tensors[NAME + end][:32].clone() for end in ENDS}), rf"{NAME} has shape \[32, 256\], expected \[64, 256\]"),
    **{f"{name} {value}": (of_group(**{name: value}), f"group_0 quantizes weights as .*'{name}': {value!r:.5}.*, and {INSTEAD}")
       for name, value in (("num_bits", 8), ("type", "int"), ("strategy", "group"), ("group_size", 32), ("group_size", None), ("symmetric", False), ("actorder", "group"))},
    "mxfp4": (lambda config, tensors: config["config_groups"]["group_0"].update(format="mxfp4-pack-quantized"), "group_0 format is 'mxfp4-pack-quantized'"),
}  # fmt: skip
READ_LATER = ("a scale that is no number", "numbers that no dtype holds", *(name for name in FAULTS if name.startswith("a global scale of")))  # fmt: skip


@pytest.mark.parametrize("what", FAULTS)
def test_what_does_not_add_up_is_refused_in_one_sentence(what, published, tmp_path):
    change, message = FAULTS[what]
    source = Path(shutil.copytree(published, tmp_path / "source"))
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
    refused(lambda: diff(published, source), message)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


WANTED = {
    "plain activations": (config_of(), None),
    "its own activations": (config_of(**INPUTS), "wants activations of group_0 quantized by scales .*: serve it with a config whose input_activations are null"),
    "fp8 activations": (config_of(num_bits=8, type="float", strategy="token", dynamic=True), "whose input_activations are null"),
    **{f"{name} {value}": (({**config_of()}, name, value), f"quantized by compressed-tensors as .*{value}.*, all symmetric, and nvfp4 with plain activations$")
       for name, value in (("group_size", 32), ("num_bits", 8), ("symmetric", False), ("type", "int"))},
    "another order": (({**config_of()}, "actorder", "group"), "all symmetric, and nvfp4 with plain activations$"),
}  # fmt: skip


@pytest.mark.parametrize("what", WANTED)
def test_of_a_megatron_checkpoint_nvfp4_is_served_with_plain_activations(what):
    config, message = WANTED[what]
    if isinstance(config, tuple):
        config, name, value = config
        config["config_groups"]["group_0"]["weights"][name] = value
    if message is None:
        channels.check_wanted(config, "the config")
    else:
        refused(lambda: channels.check_wanted(config, "the config"), message)


def by_modelopt(stored: dict[str, torch.Tensor], scalar: bool) -> dict[str, torch.Tensor]:
    """The same as NVIDIA publishes it: with what scales are multiplied by, and scales of activations and of keys and values."""
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


def of_vllm(tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The tensors that those of NVIDIA stand for, by vLLM's emulation."""
    from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import dequantize_to_dtype

    names = [name.removesuffix("_scale_2") for name in tensors if name.endswith("_scale_2")]
    plain = {name: tensor for name, tensor in tensors.items() if "_scale" not in name and name not in names}
    return plain | {
        name: dequantize_to_dtype(tensors[name], tensors[f"{name}_scale"], tensors[f"{name}_scale_2"], dtype, 16, swizzle=False)
        for name in names
    }  # fmt: skip


IGNORE = {"ignore": ["lm_head", "model.layers.*.mlp.gate"]}
NESTED = {
    "quant_algo": "NVFP4",
    "kv_cache_quant_algo": "FP8",
    "group_size": 16,
    "exclude_modules": ["lm_head"],
}
FORMS = {
    "flat": {"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}, **IGNORE,
             "config_groups": {"group_0": {"weights": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}, "targets": ["Linear"]}}},
    "weights only": {"quant_method": "modelopt", "quant_algo": "w4a16_nvfp4", "group_size": 16, **IGNORE},
    "nested": {"quant_method": "modelopt", "quantization": NESTED},
    "in a file": None,
}  # fmt: skip


def published_by_nvidia(hf: Path, folder: Path, form: str) -> tuple[Path, dict[str, torch.Tensor]]:
    tensors = by_modelopt(stored_by_package(hf_tensors(hf)), form != "nested")
    source = directory(hf, folder, tensors, FORMS[form])
    if form == "in a file":
        said = {"producer": {"name": "modelopt", "version": "0.29.0"}, "quantization": NESTED}
        (source / "hf_quant_config.json").write_text(json.dumps(said))
    return source, tensors


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


OF_NVIDIA = (
    "of modelopt reshard reads NVFP4 and W4A16_NVFP4: convert the checkpoint that this one was made of"
)
NVIDIA_FAULTS = {
    "fp8": (lambda config, tensors: config.update(quant_algo="FP8"), f"its quant_algo is 'FP8', and {OF_NVIDIA}"),
    "no algorithm": (lambda config, tensors: config.pop("quant_algo"), "its quant_algo is None, and"),
    "an algorithm that is a list": (lambda config, tensors: config.update(quant_algo=["NVFP4"]), r"its quant_algo is \['NVFP4'\], and"),
    "a quantization that is text": (lambda config, tensors: config.update(quantization="NVFP4"), "its quant_algo is None, and"),
    "other groups": (lambda config, tensors: config.update(group_size=32), f"its group_size is 32, not 16, and {OF_NVIDIA}"),
    "no scales": (without("_scale"), f"holds {NAME} without {NAME}_scale, and nvfp4 weights need both"),
    "no second scale": (without("_scale_2"), f"holds {NAME} without {NAME}_scale_2, and nvfp4 weights need both"),
    "codes alone": (lambda config, tensors: [without(end)(config, tensors) for end in ("_scale", "_scale_2")], f"holds {NAME} without {NAME}_scale"),
    "no codes": (without(""), f"{NAME}_scale(_2)? does not belong to codes, {NAME}"),
    "a plain weight": (of_part("", lambda codes: torch.ones(64, 256)), rf"{NAME} is float32 \[64, 256\], which are no codes of nvfp4"),
    "a second scale of 0": (of_part("_scale_2", lambda one: one * 0), f"{NAME}_scale_2 is 0.0, and what multiplies all scales of a weight is a positive number"),
    "what awq multiplies by": (extra("model.layers.1.self_attn.o_proj.pre_quant_scale", torch.ones(256)), "holds 1 that qwen3 does not have"),
}  # fmt: skip


@pytest.mark.parametrize("what", NVIDIA_FAULTS)
def test_what_does_not_add_up_of_nvidia_is_refused_in_one_sentence(what, checkpoint, tmp_path):
    change, message = NVIDIA_FAULTS[what]
    hf = checkpoint("qwen3", dtype=torch.bfloat16)
    tensors, quantization = by_modelopt(stored_by_package(hf_tensors(hf)), True), {**FORMS["flat"]}
    change(quantization, tensors)
    source = directory(hf, tmp_path / "source", tensors, quantization)
    refused(lambda: hf_to_mcore(source, tmp_path / "out"), message)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
