"""Engines that vLLM serves from checkpoints in the format of compressed-tensors, by channel or by tensor: a refit makes codes and scales as
that package makes them, and leaves what vLLM makes of its checkpoints."""

import json
import time
import zlib
from pathlib import Path

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig
from compressed_tensors.quantization.lifecycle.forward import quantize
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file

from reshard import Layout, ReshardError, check, hf_to_mcore, inspect, mcore_to_hf
from reshard.core.dtypes import dtype_named
from reshard.disk import channels
from reshard.engines.vllm.compressed import codes_of, scales_of
from tests.checkpoints import make
from tests.oracle import hf_tensors, same
from tests.ranks import free_port, run_on_ranks
from tests.test_engine import run
from tests.test_logits import EP, ETP, PP, TP, flags_at
from tests.test_refit import converted, refit

__all__ = ["converted"]
DTYPES = {"float": torch.float8_e4m3fn, "int": torch.int8}
# Those that published configs name, and routers, whose plain weights vLLM's own class of a router serves.
IGNORED = ["lm_head", "re:.*mlp.gate$"]
# vLLM makes up scales of the key-value cache of dummy weights, which nobody reads unless it is in fp8.
MADE_UP = ["_k_scale", "_v_scale", "_q_scale", "_prob_scale"]


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
        largest = weight.abs().amax(1) if strategy == "channel" else weight.abs().amax().reshape(1)
        ours = scales_of(largest, DTYPES[kind])
        assert ours.dtype == scales.dtype == dtype and torch.equal(ours, scales.flatten()), number
        made = codes_of(weight, ours.expand(len(weight))[:, None], DTYPES[kind])
        assert torch.equal(made.view(torch.uint8), codes.view(torch.uint8)), number
        # As a conversion makes them, in numpy.
        plain = weight.contiguous().view(torch.int32 if dtype == torch.float32 else torch.int16)
        scheme = channels.Scheme(dtype_named(str(DTYPES[kind])), strategy)
        written = channels.quantize(plain.numpy().view(dtype_named(str(dtype)).numpy()), scheme)
        for ours_too, theirs in zip(written, (codes, scales), strict=True):
            assert ours_too.shape == tuple(theirs.shape)
            assert ours_too.tobytes() == theirs.contiguous().view(torch.uint8).numpy().tobytes(), number
    # The next scale of that dtype makes other codes, but in fp32, where the one after some does.
    codes, scales = quantised(values[44:], kind, strategy)
    other = scales.reshape(-1, 1) * (1.001 if dtype == torch.float32 else 1)
    other = torch.nextafter(other, 2 * other).expand(20, 1)
    assert not torch.equal(
        codes_of(values[44:], other, DTYPES[kind]).view(torch.uint8), codes.view(torch.uint8)
    )


def test_many_rows_are_divided_a_few_at_a_time(monkeypatch):
    from reshard.engines.vllm import compressed

    values = hard(torch.bfloat16)
    scales = scales_of(values.abs().amax(1), torch.int8)[:, None]
    at_once = codes_of(values, scales, torch.int8)
    monkeypatch.setattr(compressed, "AT_ONCE", 96 * 5)
    assert torch.equal(codes_of(values, scales, torch.int8), at_once)


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


def refit_compressed(
    checkpoints, kind, strategy, parallel, trainers, engine, engines, together, folder, **options
):
    """Refit an engine that started with dummy weights, and compare it with engines that have loaded the compressed checkpoints."""
    published = [compressed(hf, folder / f"hf {n}", kind, strategy) for n, (hf, _) in enumerate(checkpoints)]
    engine = engine | {"hf_overrides": {"quantization_config": config_of(kind, strategy)}}
    options = {"published": published, "ignored": MADE_UP} | options
    return refit(checkpoints, parallel, trainers, engine, engines, together, folder / "run", **options)


# Fused layers of which each part has a scale, where vLLM takes the largest; rows of o_proj and down_proj, and whole matrices, of which ranks of
# the engine have parts; experts whole and split; kv_b_proj, of which MLA derives matrices; in rounds of a layer, in buckets.
EXPERTS = {"enable_expert_parallel": True}
CASES = [
    ("llama-bias", "float", "channel", "", 1, {}, 1, True, {}),
    ("qwen3", "int", "channel", "", 1, {}, 1, False, {"round_bytes": 1}),
    ("qwen3", "float", "tensor", f"{TP} 2", 2, {"tp": 2}, 2, True, {"round_bytes": 50_000}),
    (
        "qwen2",
        "int",
        "tensor",
        f"{PP} 2",
        2,
        {"tp": 4},
        4,
        False,
        {"round_bytes": 1, "bucket_bytes": 1 << 20},
    ),
    (
        "qwen3-moe",
        "float",
        "channel",
        f"{EP} 2 {ETP} 1",
        2,
        {"tp": 2},
        2,
        True,
        {"round_bytes": 1, "moving": True},
    ),
    ("qwen3-moe", "float", "tensor", f"{TP} 2 {EP} 2 {ETP} 2", 4, {"tp": 2, **EXPERTS}, 2, False, {}),
    ("qwen3-moe", "float", "tensor", f"{TP} 2", 2, {"tp": 2}, 2, True, {"round_bytes": 50_000}),
    ("qwen3-moe", "int", "channel", f"{TP} 2", 2, {"tp": 2}, 2, True, {}),
    ("deepseek-v3", "float", "tensor", f"{TP} 2 {EP} 2 {ETP} 1", 2, {"tp": 2}, 2, True, {}),
    ("deepseek-v3", "float", "channel", f"{PP} 2", 2, {"tp": 2, **EXPERTS}, 2, False, {"traced": True}),
]


@pytest.mark.parametrize(
    "variant, kind, strategy, parallel, trainers, engine, engines, together, options", CASES
)
def test_a_refit_leaves_what_vllm_loads_from_a_compressed_checkpoint(
    variant, kind, strategy, parallel, trainers, engine, engines, together, options, converted, tmp_path
):
    refit_compressed(
        converted(variant), kind, strategy, parallel, trainers, engine, engines, together, tmp_path, **options
    )


def test_a_real_vllm_serves_int8_layers_that_a_refit_has_made(tmp_path):
    pairs = []
    for seed in (0, 1):
        hf, mcore = tmp_path / f"hf {seed}", tmp_path / f"mcore {seed}"
        make(hf, "served-qwen3", torch.bfloat16, seed=seed)
        hf_to_mcore(hf, mcore, Layout())
        pairs.append((str(mcore), compressed(str(hf), tmp_path / f"int8 {seed}", "int", "channel")))
    # The second as a conversion writes it.
    mcore_to_hf(pairs[1][0], tmp_path / "written", quantize="int8_per_channel")
    assert same(hf_tensors(tmp_path / "written"), hf_tensors(Path(pairs[1][1]))) == []
    pairs[1] = pairs[1][0], str(tmp_path / "written")
    said = run(tmp_path, 2, "int8_layers", pairs)
    assert said["refitted"] == said["loaded"], "equal to the last bit, on both ranks"
    assert said["refitted"][0] != said["refitted"][1] and not said["moved"]
    served = said["refitted"][0]["served"][0]
    assert sum(name.endswith("_proj") for name in served) == 16, "what layers multiply with is compared"
    assert [one["kernel"] for one in said["quantised"]] == ["CPUInt8ScaledMMLinearKernel"]
    assert (
        "1 tensors did not arrive as they are in the trainer: model.layers.1.mlp.down_proj.weight"
        in said["mixed up"]
    )
    assert said["mended"] == said["refitted"][1]


def sides(folder: Path, ranks: int, **more) -> dict:
    return {
        "trainer": ranks,
        "engine": ranks,
        "together": True,
        "folder": str(folder),
        "port": free_port(),
        **more,
    }


@pytest.mark.parametrize("variant, kind", [("qwen3-moe", "float"), ("qwen3", "int")])
def test_scales_of_inputs_stay_as_they_were_loaded(variant, kind, converted, tmp_path):
    (first, _), (second, mcore) = converted(variant)
    made = [(first, 0), (second, 0), (second, 1), (first, 0)]  # weights, and the inputs' scales
    directories = [
        compressed(hf, tmp_path / str(n), kind, "tensor", True, seed) for n, (hf, seed) in enumerate(made)
    ]
    flags = flags_at(Path(mcore), f"{TP} 2")
    arguments = sides(tmp_path, 2), flags, mcore, directories, {"tp": 2, "hf_overrides": {}}
    for held, loaded, described, again, dummy in run_on_ranks(
        2, "static_inputs", *arguments, module="refit_on_cpu"
    ):
        assert held == loaded[0] and again == "no error"
        other = {name for name in held if held[name] != loaded[1][name]}
        assert other and all(name.endswith("input_scale") for name in other)
        assert held != loaded[2]
        assert all(
            "a scale for each tensor, scales of the input as they were loaded" in one["how"]
            for one in described
        )
        assert "quantises its input by a scale that comes with a checkpoint and that no trainer has" in dummy


def test_a_rank_that_fails_keeps_nobody_waiting_and_a_check_sees_what_changed(converted, tmp_path):
    checkpoint = converted("qwen3")[0]
    engine = {"tp": 2, "hf_overrides": {"quantization_config": config_of("float", "channel")}}
    arguments = sides(tmp_path, 2, timeout=60), flags_at(Path(checkpoint[1]), f"{TP} 2"), checkpoint, engine
    began = time.monotonic()
    one, two = run_on_ranks(2, "failing_alone", *arguments, module="refit_on_cpu")
    for failed, whole, code, scale, mended in (one, two):
        assert not failed[1] and "out of memory" in failed[0]
        assert whole == mended == ("no error", True)
        for said, fit in (code, scale):
            assert (
                "3 tensors did not arrive as they are in the trainer" in said and "q_proj" in said and not fit
            )
    assert "vLLM fails to process model.layers.0.self_attn.qkv_proj once more" in one[0][0]
    assert time.monotonic() - began < 60, "nobody has waited for its time to be over"


NOT_MADE = [
    ({"weights": {"strategy": "block", "block_structure": [32, 32]}}, "model.layers.0.self_attn.qkv_proj"),
    ({"targets": ["Linear", "re:.*lm_head"]}, "lm_head"),
]


@pytest.mark.parametrize("change, layer", NOT_MADE)
def test_what_a_refit_does_not_make_is_refused_by_name(change, layer, converted, tmp_path):
    checkpoint, config = converted("qwen3")[0], config_of("float", "channel")
    group = config["config_groups"]["group_0"]
    group["weights"] |= change.pop("weights", {})
    group |= change
    config["ignore"] = []
    arguments = (
        sides(tmp_path, 1),
        flags_at(Path(checkpoint[1]), ""),
        checkpoint,
        {"hf_overrides": {"quantization_config": config}},
    )
    [said] = run_on_ranks(1, "connecting", *arguments, module="refit_on_cpu")
    how = "CompressedTensorsLinearMethod (CompressedTensorsW8A8Fp8)"
    assert said.startswith(
        f"{layer} serves from weights that {how} has changed, which a refit cannot write in place"
    ), said


def test_ranks_that_have_not_as_many_experts_are_refused_where_they_would_find_scales_together(
    converted, tmp_path
):
    checkpoint = converted("qwen3-moe")[0]
    config = json.loads((Path(checkpoint[0]) / "config.json").read_text())
    config |= {name: 6 for name in ("num_experts", "num_local_experts") if name in config}
    (tmp_path / "six").mkdir()
    (tmp_path / "six" / "config.json").write_text(json.dumps(config))
    engine = {"tp": 4, **EXPERTS, "hf_overrides": {"quantization_config": config_of("float", "channel")}}
    arguments = (
        sides(tmp_path, 4),
        flags_at(Path(checkpoint[1]), f"{TP} 4"),
        (str(tmp_path / "six"), checkpoint[1]),
        engine,
    )
    for said in run_on_ranks(4, "connecting", *arguments, module="refit_on_cpu"):
        assert said.startswith(
            "not all of vLLM's ranks have as many experts, so that they cannot find scales together"
        )


@pytest.mark.parametrize(
    "variant, kind, strategy",
    [("qwen3-moe", "float", "channel"), ("deepseek-v3", "int", "channel"), ("qwen3-moe", "float", "tensor")],
)
def test_a_conversion_writes_what_the_package_makes(
    variant, kind, strategy, converted, tmp_path, monkeypatch
):
    hf, mcore = converted(variant)[0]
    way = {"float": "fp8_per_", "int": "int8_per_"}[kind] + strategy
    monkeypatch.setattr(channels, "SLAB_BYTES", 2048)  # a few rows at a time
    mcore_to_hf(mcore, tmp_path / "out", quantize=way, max_shard_size="100KB", workers=2)
    wanted = load_file(Path(compressed(hf, tmp_path / "package", kind, strategy)) / "model.safetensors")
    assert same(hf_tensors(tmp_path / "out"), wanted) == []
    assert sum(name.endswith("_scale") for name in wanted) > 20 and check(tmp_path / "out").ok
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    read = QuantizationConfig.model_validate(config)
    [scheme] = read.config_groups.values()
    assert scheme.weights == arguments(kind, strategy) and scheme.targets == ["Linear"]
    assert (
        scheme.input_activations.strategy == ("token" if strategy == "channel" else "tensor")
        and scheme.input_activations.dynamic is True
    )
    layers = range(4) if variant == "qwen3-moe" else range(1, 4)
    assert read.ignore == ["lm_head", *(f"model.layers.{layer}.mlp.gate" for layer in layers)]
    assert inspect(tmp_path / "out").details["compressed"] == sum(name.endswith("_scale") for name in wanted)
    file = next((tmp_path / "out").glob("*00002-of*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + bytes([file.read_bytes()[-1] ^ 1]))
    assert not check(tmp_path / "out").ok
    with pytest.raises(ReshardError, match="add --dtype bf16"):
        mcore_to_hf(mcore, tmp_path / "fp32", quantize=way, dtype="fp32")
    with pytest.raises(
        ReshardError,
        match="--quantize int4 is none of fp8, fp8_per_channel, int8_per_channel, fp8_per_tensor",
    ):
        mcore_to_hf(mcore, tmp_path / "int4", quantize="int4")


RESHARD = {"load_format": "reshard"}


def test_an_engine_that_loads_a_megatron_checkpoint_holds_what_it_has_of_the_compressed_one(
    converted, tmp_path
):
    cases = []
    for variant, kind, strategy in (
        ("qwen3", "int", "tensor"),
        ("qwen3-moe", "float", "channel"),
        ("deepseek-v3", "float", "tensor"),
    ):
        (hf, mcore), (_, other) = converted(variant)
        folder = tmp_path / variant
        package = compressed(hf, folder / "package", kind, strategy)
        served = RESHARD | {"hf_overrides": {"quantization_config": config_of(kind, strategy)}}
        directories = {
            "package": (package, {"hf_overrides": {}}),
            "megatron": (mcore, served),
            "other": (other, served),
        }
        if kind == "float":
            mcore_to_hf(mcore, folder / "converted", quantize=f"fp8_per_{strategy}")
            directories |= {"converted": (folder / "converted", {"hf_overrides": {}}), "by our loader": (package, RESHARD | {"hf_overrides": {}}),
                            "by its config": (mcore, RESHARD | {"hf_config_path": package, "hf_overrides": {}})}  # fmt: skip
        cases.append(({"tp": 2}, directories))
    for rank in run_on_ranks(2, "loaded", cases, module="serving_on_cpu"):
        for found in rank:
            wanted, *_ = found.pop("package")
            other, *_ = found.pop("other")
            assert other != wanted and other.keys() == wanted.keys()
            assert {name for name, (held, *_) in found.items() if held != wanted} == set()
            assert (
                "whole tensors (" in found["megatron"][2]
                and "is loaded by Compressed" in found["megatron"][2]
            )


def test_a_running_engine_loads_another_megatron_checkpoint(converted, tmp_path):
    directories = [mcore for _, mcore in converted("qwen3")]
    options = RESHARD | {"tp": 2, "hf_overrides": {"quantization_config": config_of("float", "channel")}}
    for now, other in run_on_ranks(2, "reloaded", directories, options, module="serving_on_cpu"):
        assert now == other


def test_configs_that_no_megatron_checkpoint_can_serve_are_refused_in_one_sentence(converted, tmp_path):
    mcore = converted("qwen3")[0][1]
    static, groups, output = (
        config_of("float", "tensor", static=True),
        config_of("int", "channel"),
        config_of("float", "channel"),
    )
    groups["config_groups"]["group_0"]["weights"] |= {"num_bits": 4, "strategy": "group", "group_size": 32}
    output["config_groups"]["group_0"]["targets"] += ["re:.*lm_head"]
    output["ignore"] = []
    sentences = {
        "wants activations of group_0 quantised by scales that come with a checkpoint": static,
        "reshard makes 8 bits for each channel or tensor": groups,
        "has no config_groups": config_of("float", "channel", config_groups={}),
        "lm_head is loaded by CompressedTensorsLinearMethod (CompressedTensorsW8A8Fp8), for which reshard cannot": output,
    }
    cases = []
    for number, quantisation in enumerate(sentences.values()):
        folder = tmp_path / str(number)
        folder.mkdir()
        config = json.loads((Path(mcore) / "hf" / "config.json").read_text()) | {
            "quantization_config": quantisation
        }
        (folder / "config.json").write_text(json.dumps(config))
        cases.append((mcore, RESHARD | {"hf_config_path": str(folder), "hf_overrides": {}}))
    for sentence, said in zip(
        sentences, run_on_ranks(1, "refused", cases, module="serving_on_cpu")[0], strict=True
    ):
        assert sentence in said and "\n" not in said, said
