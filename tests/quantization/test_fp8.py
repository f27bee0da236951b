"""Block-fp8 checkpoints, as DeepSeek-V3 is published: dequantized on the way in, quantized again on
request."""

import json
import re
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from reshard import MegatronLayout, ReshardError, check, diff, hf_to_mcore, inspect, lora_merge, mcore_to_hf
from reshard.megatron.parameters import expand
from reshard.models.family import families
from reshard.models.model import Model
from reshard.quantization.fp8_blocks import decode
from tests.tools.oracle import dequantized, hf_tensors, megatron_tensors, same, stored_tensors

CONFIG = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}


def quantize(weight):
    """One fp32 scale for each 128x128 block, in torch, block by block."""
    n, m = weight.shape
    fp8 = torch.empty(n, m, dtype=torch.float8_e4m3fn)
    scales = torch.empty(-(-n // 128), -(-m // 128))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            block = weight[i * 128 : i * 128 + 128, j * 128 : j * 128 + 128].float()
            scales[i, j] = block.abs().max() / 448
            fp8[i * 128 : i * 128 + 128, j * 128 : j * 128 + 128] = (block / scales[i, j]).to(
                torch.float8_e4m3fn
            )
    return fp8, scales


def dequantize(fp8, scales):
    """weight = fp8 * scale, rounded to bf16."""
    full = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[: fp8.shape[0], : fp8.shape[1]]
    return (fp8.float() * full).bfloat16()


@settings(max_examples=60, deadline=None)
@given(
    block=st.sampled_from([(128, 128), (64, 32), (1, 128), (128, 1), (3, 5)]),
    rows=st.integers(1, 300), columns=st.integers(1, 700), start=st.integers(0, 200),
    magnitude=st.integers(-42, 38), dtype=st.sampled_from([torch.bfloat16, torch.float32]), seed=st.integers(0, 99),
)  # fmt: skip
def test_numbers_that_are_looked_up_are_the_products(block, rows, columns, start, magnitude, dtype, seed):
    torch.manual_seed(seed)
    weight = torch.randint(0, 256, (rows, columns), dtype=torch.uint8)
    first, last = start // block[0], -(-(start + rows) // block[0])
    scales = torch.randn(last - first, -(-columns // block[1])) * 10.0**magnitude
    out = np.empty((rows, columns), {torch.bfloat16: ml_dtypes.bfloat16, torch.float32: np.float32}[dtype])
    row = start - first * block[0]
    decode(weight.numpy().view(ml_dtypes.float8_e4m3fn), scales.numpy(), block, row, out)
    factors = scales.repeat_interleave(block[0], 0)[row : row + rows].repeat_interleave(block[1], 1)
    expected = (weight.view(torch.float8_e4m3fn).float() * factors[:, :columns]).to(dtype)
    ours = torch.from_numpy(out.view(f"i{out.itemsize}")).view(dtype)
    assert torch.equal(ours.isnan(), expected.isnan())
    assert torch.equal(ours.nan_to_num(), expected.nan_to_num())


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A DeepSeek-V3 with matrices larger than a block (and not multiples of it), quantized as
    published; and what it stands for."""
    from transformers import AutoModelForCausalLM, DeepseekV3Config

    from tests.tools.checkpoints import MLA

    folder = tmp_path_factory.mktemp("fp8")
    torch.manual_seed(3)
    sizes = dict(
        hidden_size=192,
        intermediate_size=320,
        moe_intermediate_size=160,
        q_lora_rank=136,
        kv_lora_rank=144,
        vocab_size=500,
    )
    AutoModelForCausalLM.from_config(
        DeepseekV3Config(**MLA | sizes, tie_word_embeddings=False)
    ).bfloat16().save_pretrained(folder / "bf16")
    shutil.copytree(folder / "bf16", folder / "fp8")
    tensors, stored = load_file(folder / "bf16" / "model.safetensors"), {}
    for name, tensor in tensors.items():
        if tensor.ndim == 2 and "layers" in name and not name.endswith("mlp.gate.weight"):
            stored[name], stored[name + "_scale_inv"] = quantize(tensor)
            tensors[name] = dequantize(stored[name], stored[name + "_scale_inv"])
        else:
            stored[name] = tensor
    save_file(stored, folder / "fp8" / "model.safetensors", metadata={"format": "pt"})
    save_file(tensors, folder / "bf16" / "model.safetensors", metadata={"format": "pt"})
    for kind in ("fp8", "bf16"):
        config = json.loads((folder / kind / "config.json").read_text())
        config["num_nextn_predict_layers"] = 0
        if kind == "fp8":
            config["quantization_config"] = CONFIG
        (folder / kind / "config.json").write_text(json.dumps(config, indent=2))
    return folder


def test_fp8_blocks_are_dequantized_on_the_way_in(published, tmp_path):
    hf_to_mcore(published / "fp8", tmp_path / "mcore", MegatronLayout(tp=2, pp=2, ep=2, etp=1))
    assert (
        same(stored_tensors(tmp_path / "mcore" / "release"), megatron_tensors(published / "bf16", 512)) == []
    )
    assert diff(published / "fp8", published / "bf16").equal
    assert diff(tmp_path / "mcore", published / "fp8").equal
    mcore_to_hf(tmp_path / "mcore", tmp_path / "back")
    assert same(hf_tensors(tmp_path / "back"), hf_tensors(published / "bf16")) == []
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert "quantization_config" not in config


def test_an_adapter_is_added_to_what_the_blocks_stand_for(published, tmp_path):
    """Bit for bit as to the same numbers in bf16, of which `test_lora_files` compares the sum."""
    generator, pairs = torch.Generator().manual_seed(4), {}
    for name, tensor in hf_tensors(published / "bf16").items():
        if re.search(r"(o_proj|experts\.[0-3]\.gate_proj)\.weight$", name):
            path = f"base_model.model.{name.removesuffix('.weight')}"
            pairs[f"{path}.lora_A.weight"] = torch.randn((4, tensor.shape[1]), generator=generator)
            pairs[f"{path}.lora_B.weight"] = torch.randn((tensor.shape[0], 4), generator=generator) * 0.01
    (tmp_path / "adapter").mkdir()
    save_file(pairs, tmp_path / "adapter" / "adapter_model.safetensors")
    adapter = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["o_proj", "gate_proj"]}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(adapter))
    for kind in ("fp8", "bf16"):
        lora_merge(published / kind, tmp_path / "adapter", tmp_path / kind)
    ours = hf_tensors(tmp_path / "fp8")
    assert same(ours, hf_tensors(tmp_path / "bf16")) == []
    assert len(same(ours, hf_tensors(published / "bf16"))) == len(pairs) // 2 > 8
    assert "quantization_config" not in json.loads((tmp_path / "fp8" / "config.json").read_text())
    # and quantized again by way of Megatron
    lora_merge(published / "fp8", tmp_path / "adapter", tmp_path / "mcore", format="mcore")
    mcore_to_hf(tmp_path / "mcore", tmp_path / "back", quantize="fp8")
    back = hf_tensors(tmp_path / "back")
    assert set(back) == set(hf_tensors(published / "fp8"))
    assert all(
        torch.equal(quantize(ours[n.removesuffix("_scale_inv")])[1], back[n])
        for n in back
        if n.endswith("_inv")
    )


def test_they_are_quantized_again_on_request(published, tmp_path):
    hf_to_mcore(published / "fp8", tmp_path / "mcore", MegatronLayout(tp=4, ep=4, etp=2))
    mcore_to_hf(tmp_path / "mcore", tmp_path / "back", quantize=True, max_shard_size="1MB")
    ours, theirs = hf_tensors(tmp_path / "back"), hf_tensors(published / "fp8")
    assert set(ours) == set(theirs) and {n: t.dtype for n, t in ours.items()} == {
        n: t.dtype for n, t in theirs.items()
    }
    exact = hf_tensors(published / "bf16")
    for name in (n for n in ours if n + "_scale_inv" in ours):
        fp8, scales = quantize(exact[name])
        assert torch.equal(scales, ours[name + "_scale_inv"]), name
        assert torch.equal(fp8.view(torch.uint8), ours[name].view(torch.uint8)), name
    quantization = json.loads((tmp_path / "back" / "config.json").read_text())["quantization_config"]
    assert quantization.pop("modules_to_not_convert") == [
        "lm_head",
        "model.embed_tokens",
        *(name.removesuffix(".weight") for name in sorted(ours) if name.endswith("mlp.gate.weight")),
    ]
    assert quantization == CONFIG
    assert check(tmp_path / "back").ok
    assert inspect(tmp_path / "back").details["quantized"] == {
        "method": "fp8",
        "formats": [],
        "weights": sum(name.endswith("_scale_inv") for name in ours),
    }
    # and it is a source like any other
    hf_to_mcore(tmp_path / "back", tmp_path / "again", MegatronLayout(tp=2))
    assert (
        same(
            stored_tensors(tmp_path / "again" / "release"),
            megatron_tensors(tmp_path / "back", 512, dequantized(tmp_path / "back")),
        )
        == []
    )


@pytest.mark.parametrize("before", [
    "fp8", ["fp8"], CONFIG | {"activation_scheme": "static"}, CONFIG | {"weight_block_size": [64, 64]},
    CONFIG | {"ignored_layers": ["model.layers.1.self_attn.o_proj"]},
    CONFIG | {"modules_to_not_convert": ["model.layers.1.self_attn.o_proj"]},
    {"quant_method": "compressed-tensors", "format": "float-quantized"},
], ids=str)  # fmt: skip
def test_the_config_says_what_was_quantized_whatever_it_said_before(before, published, tmp_path):
    hf_to_mcore(published / "bf16", tmp_path / "mcore")
    config = json.loads((published / "bf16" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": before}))
    mcore_to_hf(tmp_path / "mcore", tmp_path / "back", hf_config=tmp_path / "config.json", quantize=True)
    quantization = json.loads((tmp_path / "back" / "config.json").read_text())["quantization_config"]
    kept = {
        name.removesuffix(".weight")
        for name, t in hf_tensors(tmp_path / "back").items()
        if t.ndim == 2 and t.dtype == torch.bfloat16
    }
    assert quantization == CONFIG | {"modules_to_not_convert": sorted(kept)}


def test_a_bf16_model_can_be_quantized(published, tmp_path):
    hf_to_mcore(published / "bf16", tmp_path / "mcore", MegatronLayout(tp=2))
    mcore_to_hf(tmp_path / "mcore", tmp_path / "back", quantize=True)
    ours, theirs, exact = (
        hf_tensors(path) for path in (tmp_path / "back", published / "fp8", published / "bf16")
    )
    assert set(ours) == set(theirs)
    expected = dict(exact)
    for name in (name for name in exact if name + "_scale_inv" in theirs):
        expected[name], expected[name + "_scale_inv"] = quantize(exact[name])
    assert same(ours, expected) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dequantizing_to_fp32_keeps_every_bit_whatever_the_scales_are_stored_in(dtype, published, tmp_path):
    """Qwen3's are published in bf16 and fp16."""
    stored = hf_tensors(published / "fp8")
    stored = {n: (1000 * t).to(dtype) if n.endswith("_scale_inv") else t for n, t in stored.items()}
    source = saved(published, tmp_path / "source", stored)
    hf_to_mcore(source, tmp_path / "mcore", dtype="fp32")
    mcore_to_hf(tmp_path / "mcore", tmp_path / "back")
    ours = hf_tensors(tmp_path / "back")
    for name in (name for name in ours if name + "_scale_inv" in stored):
        scales = stored[name + "_scale_inv"].float().repeat_interleave(128, 0).repeat_interleave(128, 1)
        assert torch.equal(
            ours[name], stored[name].float() * scales[: len(ours[name]), : ours[name].shape[1]]
        )


def saved(published, folder, tensors, **quantization):
    """A copy of the fp8 directory with other tensors and another ``quantization_config``."""
    folder.mkdir()
    config = json.loads((published / "fp8" / "config.json").read_text())
    config["quantization_config"] = quantization or CONFIG
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {n: t.contiguous() for n, t in tensors.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    return folder


SCALED = {
    "ModelOpt": {"quant_method": "modelopt", "quant_algo": "FP8"},
    "TensorRT-LLM": {"quant_algo": "FP8", "kv_cache_scheme": "FP8",
                     "producer": {"name": "modelopt", "version": "0.31.0"}},
    "AutoFP8": {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
    "FBGEMM": {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]},
}  # fmt: skip


@pytest.mark.parametrize("package", SCALED)
def test_fp8_with_a_scale_for_a_matrix_or_for_each_row_is_dequantized_on_the_way_in(
    package, published, tmp_path
):
    exact, stored, expected = hf_tensors(published / "bf16"), {}, {}
    for name, tensor in exact.items():
        if tensor.ndim == 2 and "layers" in name and not name.endswith("mlp.gate.weight"):
            largest = tensor.float().abs().amax(1, keepdim=True)
            scales = (largest if package == "FBGEMM" else largest.max()) / 448
            stored[name], stored[name + "_scale"] = (tensor.float() / scales).to(torch.float8_e4m3fn), scales
            stored[name.replace("weight", "input_scale")] = torch.ones(())
            expected[name] = (stored[name].float() * scales).bfloat16()
        else:
            stored[name] = expected[name] = tensor
    source = saved(published, tmp_path / "source", stored, **SCALED[package])
    report = hf_to_mcore(source, tmp_path / "mcore", MegatronLayout(tp=2, ep=2, etp=1))
    assert any("scales of activations" in notice for notice in report.notices)
    oracle = megatron_tensors(published / "bf16", 512, expected)
    assert same(stored_tensors(tmp_path / "mcore" / "release"), oracle) == []
    mcore_to_hf(tmp_path / "mcore", tmp_path / "back")
    assert same(hf_tensors(tmp_path / "back"), expected) == []
    assert "quantization_config" not in (tmp_path / "back" / "config.json").read_text()
    # Controls: one scale, which shows; a scale of nothing; and one of another shape.
    name = "model.layers.1.self_attn.o_proj.weight"
    other = saved(
        published,
        tmp_path / "other",
        stored | {name + "_scale": 2 * stored[name + "_scale"]},
        **SCALED[package],
    )
    assert not diff(other, source).equal
    for key, scale, message in (
        ("model.norm.weight_scale", torch.ones(()), "does not belong to a matrix in fp8"),
        (
            name + "_scale",
            torch.ones(7, 1),
            r"has shape \(7, 1\), expected \(1,\) by tensor or \(192, 1\) by channel",
        ),
    ):
        wrong = saved(published, tmp_path / key, stored | {key: scale}, **SCALED[package])
        with pytest.raises(ReshardError, match=message):
            hf_to_mcore(wrong, tmp_path / "never")


@pytest.mark.parametrize("spoil", ["no scale", "scale shape", "scale dtype", "other method"])
def test_fp8_that_does_not_add_up_is_refused(spoil, published, tmp_path):
    shutil.copytree(published / "fp8", tmp_path / "source")
    path = tmp_path / "source" / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.1.self_attn.o_proj.weight"
    if spoil == "no scale":
        del tensors[name + "_scale_inv"]
    elif spoil == "scale shape":
        tensors[name + "_scale_inv"] = torch.ones(5, 5)
    elif spoil == "scale dtype":
        tensors[name + "_scale_inv"] = tensors[name + "_scale_inv"].int()
    else:
        config = json.loads((tmp_path / "source" / "config.json").read_text())
        config["quantization_config"]["quant_method"] = "awq"
        (tmp_path / "source" / "config.json").write_text(json.dumps(config))
    save_file(tensors, path, metadata={"format": "pt"})
    messages = {
        "no scale": "is float8_e4m3fn without",
        "scale shape": r"expected \[2, 1\]",
        "scale dtype": "or is not one of float32, bfloat16, float16",
        "other method": "quantized as 'awq'",
    }
    with pytest.raises(ReshardError, match=messages[spoil]):
        hf_to_mcore(tmp_path / "source", tmp_path / "out")


def blocks_of(experts: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scales for each block of each expert's rows and columns, and the numbers that they stand for."""
    n, rows, columns = experts.shape
    parts = experts.float().view(n, rows // block, block, columns // block, block)
    scales = parts.abs().amax((2, 4), keepdim=True).div(448).bfloat16()
    codes = (parts / scales.float()).to(torch.float8_e4m3fn)
    numbers = (codes.float() * scales.float()).bfloat16()
    return (
        codes.view(experts.shape),
        scales.view(n, rows // block, columns // block),
        numbers.view(experts.shape),
    )


@pytest.mark.parametrize("variant", ["qwen3.5-moe", "qwen3-moe"])
def test_experts_in_one_fp8_tensor_are_read_expert_by_expert(variant, checkpoint, tmp_path):
    """As transformers quantizes and saves Qwen3.5's, and those of others with its own names in memory."""
    plain = checkpoint(variant, dtype=torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "saved", save_original_format=False)
    tensors, stored, expected = hf_tensors(tmp_path / "saved"), {}, {}
    for name, tensor in tensors.items():
        stored[name] = expected[name] = tensor
        if tensor.ndim == 3 and ".experts." in name:
            stored[name], stored[name + "_scale_inv"], expected[name] = blocks_of(tensor, 16)
    assert len(stored) == len(tensors) + 8
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    quantized = config | {"quantization_config": CONFIG | {"weight_block_size": [16, 16]}}
    for folder, held, fields in (("fp8", stored, quantized), ("bf16", expected, config)):
        (tmp_path / folder).mkdir()
        save_file(held, tmp_path / folder / "model.safetensors", metadata={"format": "pt"})
        (tmp_path / folder / "config.json").write_text(json.dumps(fields))
    for folder in ("fp8", "bf16"):
        hf_to_mcore(tmp_path / folder, tmp_path / f"{folder}-mcore", MegatronLayout(tp=2, ep=2, etp=1))
    ours, theirs = (stored_tensors(tmp_path / f"{folder}-mcore" / "release") for folder in ("fp8", "bf16"))
    assert same(ours, theirs) == []
    # Controls: the scale of another expert; and blocks across two experts.
    name = next(name for name in stored if name.endswith("gate_up_proj_scale_inv"))
    other = {**stored, name: stored[name].roll(1, 0)}
    save_file(other, tmp_path / "fp8" / "model.safetensors", metadata={"format": "pt"})
    assert not diff(tmp_path / "fp8", tmp_path / "bf16").equal
    quantized["quantization_config"]["weight_block_size"] = [40, 16]
    (tmp_path / "fp8" / "config.json").write_text(json.dumps(quantized))
    with pytest.raises(ReshardError, match=r"has (64|96) rows for each expert, in blocks of 40"):
        hf_to_mcore(tmp_path / "fp8", tmp_path / "never")


def test_queries_keys_and_values_in_one_fp8_matrix_are_read_with_their_blocks(checkpoint, tmp_path):
    """As Ling 2.0 is published in fp8. Keys and values here have a block in common."""
    plain = checkpoint("ling", dtype=torch.bfloat16)
    tensors, config = hf_tensors(plain), json.loads((plain / "config.json").read_text())
    stored, expected = dict(tensors), dict(tensors)
    for name in (name for name in tensors if name.endswith("query_key_value.weight")):
        codes, scales, numbers = (part[0] for part in blocks_of(tensors[name][None], 64))
        stored[name], stored[name + "_scale_inv"], expected[name] = codes, scales, numbers
    quantized = config | {"quantization_config": CONFIG | {"weight_block_size": [64, 64]}}
    for folder, held, fields in (("fp8", stored, quantized), ("bf16", expected, config)):
        (tmp_path / folder).mkdir()
        save_file(held, tmp_path / folder / "model.safetensors", metadata={"format": "pt"})
        (tmp_path / folder / "config.json").write_text(json.dumps(fields))
        hf_to_mcore(tmp_path / folder, tmp_path / f"{folder}-mcore", MegatronLayout(tp=4, ep=2, etp=1))
    ours, theirs = (stored_tensors(tmp_path / f"{folder}-mcore" / "release") for folder in ("fp8", "bf16"))
    assert same(ours, theirs) == []
    # The control: the scales of other rows.
    name = next(name for name in stored if name.endswith("query_key_value.weight_scale_inv"))
    save_file(
        stored | {name: stored[name].roll(1, 0)},
        tmp_path / "fp8" / "model.safetensors",
        metadata={"format": "pt"},
    )
    assert not diff(tmp_path / "fp8", tmp_path / "bf16").equal


# What is quantized


# The linear layers of the checkpoints that are published in fp8 (DeepSeek-V3's index, Qwen3's,
# GLM-4.5's, GLM-5's and MiniMax-M2's configs), as patterns by hand.
LINEAR = (
    r"self_attn\.(q|k|v|o|q_a|q_b|kv_b)_proj|self_attn\.kv_a_proj_with_mqa",
    r"self_attn\.indexer\.(wq_b|wk)",
    r"mlp\.(experts\.\d+\.|shared_experts\.)?(gate|up|down)_proj|block_sparse_moe\.experts\.\d+\.w[123]",
)
QUANTIZED = re.compile(rf"model\.layers\.\d+\.({'|'.join(LINEAR)})\.weight")


@pytest.mark.parametrize("way", ["fp8", "fp8_per_channel"])
@pytest.mark.parametrize(
    "variant",
    [
        "llama",
        "qwen2",
        "qwen3",
        "qwen3-moe",
        "deepseek-v3",
        "glm4-moe",
        "mixtral",
        "minimax-m2",
        "olmoe",
        "deepseek-v32",
        "glm-moe-dsa-shared",
    ],
)
def test_every_family_is_quantized_where_published_checkpoints_are(variant, way, checkpoint, tmp_path):
    mtp = variant.startswith(("deepseek", "glm"))
    source = checkpoint(variant, mtp=mtp)
    hf_to_mcore(source, tmp_path / "mcore", dtype="bf16")
    mcore_to_hf(tmp_path / "mcore", tmp_path / "back", quantize=way)
    tensors, names = hf_tensors(tmp_path / "back"), hf_tensors(source).keys()
    codes = {name for name, tensor in tensors.items() if tensor.dtype == torch.float8_e4m3fn}
    assert codes == {name for name in names if QUANTIZED.fullmatch(name)} and codes
    assert mtp == any(name.endswith("eh_proj.weight") for name in tensors)
    hf_to_mcore(tmp_path / "back", tmp_path / "again", MegatronLayout(tp=2))
    mcore_to_hf(tmp_path / "again", tmp_path / "plain")
    assert same(hf_tensors(tmp_path / "plain"), dequantized(tmp_path / "back")) == []


@pytest.mark.parametrize("name", ["Qwen/Qwen3-30B-A3B-FP8", "Qwen/Qwen3-235B-A22B-FP8"])
def test_what_stays_as_it_is_is_what_qwen_names_in_its_published_config(name):
    lines = (Path(__file__).parent.parent / "models" / "published_configs.jsonl").read_text().splitlines()
    [config] = [entry["config"] for entry in map(json.loads, lines) if entry["name"] == name]
    model = Model.from_hf(config)
    matrices = {name for name, shape in expand(model).shapes.items() if len(shape) == 2}
    kept = {name.removesuffix(".weight") for name in matrices - model.quantizable()}
    published = {
        name for name in config["quantization_config"]["modules_to_not_convert"] if "layernorm" not in name
    }
    assert kept == published | {"model.embed_tokens"} and len(kept) == config["num_hidden_layers"] + 2


@pytest.mark.parametrize("name", ["zai-org/GLM-5-FP8", "zai-org/GLM-5.2-FP8"])
def test_what_stays_as_it_is_is_what_glm_names_in_its_published_config(name):
    """Which also says which layers of GLM-5.2 have an indexer: the multi-token-prediction layer does."""
    lines = (Path(__file__).parent.parent / "models" / "published_configs.jsonl").read_text().splitlines()
    [config] = [entry["config"] for entry in map(json.loads, lines) if entry["name"] == name]
    model = Model.from_hf(config)
    expanded = expand(model)
    matrices = {n for n, shape in expanded.shapes.items() if len(shape) == 2} - expanded.copies.keys()
    kept = {n.removesuffix(".weight") for n in matrices - model.quantizable()}
    published = {
        n.replace("indexers_proj", "indexer.weights_proj")
        for n in config["quantization_config"]["modules_to_not_convert"]
        if "norm" not in n and "bias" not in n
    }
    assert kept == published and len(kept) == 2 + 76 + 1 + (79 if name == "zai-org/GLM-5-FP8" else 22)
    assert {n for n in expanded.shapes if "indexer.wk." in n} <= model.quantizable()


def test_a_linear_layer_with_a_mark_stays_as_it_is():
    """As DSA's indexer has one that stays in bf16."""
    base = type(families()["qwen3_moe"])
    row = (
        "self_attn.indexer.weights_proj.weight",
        "H H",
        "self_attention.indexer.linear_weights_proj.weight",
        "plain",
        "-",
        "always",
    )
    quantizable = {}
    for marks in ("", "unquantized"):
        entries = {"layer": (*base.layer, (*row, marks)), "__module__": "mappings.other"}
        quantizable[marks] = {r.hf for r in type("Other", (base,), entries)().rows["layer"] if r.quantizable}
    assert (
        quantizable[""] - quantizable["unquantized"] == {row[0]} and "mlp.gate.weight" not in quantizable[""]
    )
