"""Engines that vLLM serves from checkpoints in the format of compressed-tensors, by channel, by tensor, or packed by channel or group: a refit makes
codes and scales as that package makes them, and leaves what vLLM makes of its checkpoints."""

import json
import time
import zlib
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import quantize
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file

from reshard import MegatronLayout, ReshardError, check, hf_to_mcore, inspect, mcore_to_hf
from reshard.core.boxes import Box
from reshard.core.dtypes import dtype_named
from reshard.engines.vllm.compressed import codes_of, codes_of_blocks, scales_of, stored_as, words_of
from reshard.engines.vllm.layers import Compressed, Packed
from reshard.engines.vllm.recipes import Held, refuse_parts_of_blocks
from reshard.storage import channels
from reshard.storage import quantized as quantized_slabs
from tests.checkpoints import make
from tests.oracle import hf_tensors, same
from tests.ranks import free_port, run_on_ranks
from tests.test_engine import run
from tests.test_logits import EP, ETP, PP, TP, flags_at
from tests.test_refit import refit

DTYPES = {"float": torch.float8_e4m3fn, "float alone": torch.float8_e4m3fn, "int": torch.int8}
# What codes are; the last two are packed, and like `float alone` of weights only.
CODES = {
    "float": "float8_e4m3fn",
    "float alone": "float8_e4m3fn",
    "int": "int8",
    "int4": "int4",
    "packed int8": "int8",
}
# Those that published configs name, and routers, whose plain weights vLLM's own class of a router serves.
IGNORED = ["lm_head", "re:.*mlp.gate$"]
# vLLM makes up scales of the key-value cache of dummy weights, which nobody reads unless it is in fp8.
MADE_UP = ["_k_scale", "_v_scale", "_q_scale", "_prob_scale"]
# What it makes for experts whose columns lie in another order, and leaves as the memory was.
MADE_UP += ["_g_idx", "_g_idx_sort_indices"]


def is_packed(kind: str) -> bool:
    return kind not in DTYPES


def arguments(kind: str, strategy: str) -> QuantizationArgs:
    strategy, *sizes = strategy.split()
    bits, number = 4 if kind == "int4" else 8, "float" if "float" in kind else "int"
    return QuantizationArgs(num_bits=bits, type=number, strategy=strategy, symmetric=True, dynamic=False,
                            group_size=int(sizes[0]) if strategy == "group" else None,
                            block_structure=[int(size) for size in sizes] if strategy == "block" else None)  # fmt: skip


def block_of(how: QuantizationArgs) -> tuple[int, int] | None:
    """The rows and columns of a block or group."""
    return (1, how.group_size) if how.group_size else how.block_structure and tuple(how.block_structure)


def magnitudes(weight: torch.Tensor, how: QuantizationArgs) -> tuple[torch.Tensor, torch.Tensor]:
    """The least and largest number of all that shares a scale."""
    if how.strategy == "tensor":
        return torch.aminmax(weight)
    rows, columns = block_of(how) or (1, weight.shape[1])
    padded = torch.nn.functional.pad(weight, (0, -weight.shape[1] % columns, 0, -len(weight) % rows))
    blocks = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    return blocks.amin((1, 3)), blocks.amax((1, 3))


def quantized(weight: torch.Tensor, kind: str, strategy: str) -> dict[str, torch.Tensor]:
    """What a matrix is stored as, by the package's own functions and the ends of names; codes come first, then scales."""
    how = arguments(kind, strategy)
    scales, zeros = calculate_qparams(*magnitudes(weight, how), how)
    if not is_packed(kind):
        return {"": quantize(weight, scales, zeros, how, dtype=DTYPES[kind]).contiguous(), "_scale": scales}
    plain = {"weight": weight, "weight_scale": scales, "weight_zero_point": zeros}
    made = PackedQuantizationCompressor.compress(plain, QuantizationScheme(targets=["Linear"], weights=how))
    assert made.keys() == {"weight_packed", "weight_scale", "weight_shape"}
    return {end: made[f"weight{end}"].contiguous() for end in ("_packed", "_scale", "_shape")}


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


WAYS = [
    *[(kind, strategy) for kind in ("float", "int") for strategy in ("channel", "tensor")],
    ("float", "block 16 32"), ("float", "block 24 40"),
    ("int4", "channel"), ("int4", "group 32"), ("int4", "group 4"), ("packed int8", "channel"), ("packed int8", "group 16"),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind, strategy", WAYS)
def test_codes_and_scales_are_those_of_the_package(kind, strategy, dtype):
    values, how = hard(dtype), arguments(kind, strategy)
    size, block, words = how.group_size, block_of(how), is_packed(kind)
    cases = [
        values,
        values[44:],
        values[8:16] * 1e-3,
        values[:1],
        values[3:4],
        values[:, : size or 1],
        values[:, : size or 13],
        0 * values,
    ]

    def codes_by(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        if words:
            return words_of(weight, scales, CODES[kind], how.num_bits)
        if how.strategy == "block":
            return codes_of_blocks(weight, scales, block, CODES[kind]).view(torch.uint8)
        return codes_of(weight, scales.expand(len(weight), -1), CODES[kind]).view(torch.uint8)

    for number, weight in enumerate(cases):
        weight = weight.contiguous()
        stored = quantized(weight, kind, strategy)
        codes, scales, *_ = stored.values()
        least, most = magnitudes(weight, how)
        ours = scales_of(torch.maximum(-least, most).reshape(scales.shape), CODES[kind])
        assert ours.dtype == scales.dtype == dtype and torch.equal(ours, scales), number
        assert torch.equal(codes_by(weight, ours), codes if words else codes.view(torch.uint8)), number
        # As a conversion makes them, in numpy.
        plain = weight.view(torch.int32 if dtype == torch.float32 else torch.int16)
        scheme = channels.Scheme(CODES[kind], how.strategy, block, words)
        written = channels.quantize(plain.numpy().view(dtype_named(str(dtype)).numpy()), scheme)
        for ours_too, theirs in zip(written, (codes, scales), strict=True):
            assert ours_too.shape == tuple(theirs.shape)
            assert ours_too.tobytes() == theirs.contiguous().view(torch.uint8).numpy().tobytes(), number
        # As vLLM is given them.
        compressed = Compressed(
            (), CODES[kind], how.strategy, (), "", block, Packed(how.num_bits, False, ()) if words else None
        )
        given = stored_as(weight, compressed)
        assert given.keys() == stored.keys()
        for end, theirs in stored.items():
            assert given[end].dtype == theirs.dtype and given[end].shape == theirs.shape
            assert torch.equal(given[end].view(torch.uint8), theirs.view(torch.uint8)), number
    # The next scale of that dtype makes other codes, but in fp32, where the one after some does.
    weight = values[44:]
    codes, scales, *_ = quantized(weight, kind, strategy).values()
    other = scales.reshape(-1, scales.shape[-1]) * (1.01 if dtype == torch.float32 else 1)
    other = torch.nextafter(other, 2 * other)
    assert not torch.equal(codes_by(weight, other), codes if words else codes.view(torch.uint8))


@pytest.mark.parametrize("offset, length, row", [(48, 80, 0), (64, 48, 0), (64, 64, 8)])
def test_a_part_of_what_has_one_scale_is_refused(offset, length, row):
    whole = Held("weight", "some.weight", (64, 130), Box((0, 64), (64, 66)), 0)
    refuse_parts_of_blocks("a layer", (16, 32), 64, [whole])
    part = whole._replace(box=Box((0, offset), (64, length)), row=row)
    with pytest.raises(
        ReshardError, match="some.weight that begins or ends within what has one scale, 16 rows and 32"
    ):
        refuse_parts_of_blocks("a layer", (16, 32), 64, [whole, part])


def test_many_rows_are_divided_a_few_at_a_time(monkeypatch):
    from reshard.engines.vllm import compressed

    values = hard(torch.bfloat16)
    scales = scales_of(values.abs().amax(1), "int8")[:, None]
    at_once = codes_of(values, scales, "int8"), words_of(values, scales, "int8", 8)
    monkeypatch.setattr(compressed, "AT_ONCE", 96 * 5)
    assert torch.equal(codes_of(values, scales, "int8"), at_once[0])
    assert torch.equal(words_of(values, scales, "int8", 8), at_once[1])


def config_of(kind: str, strategy: str, static: bool = False, **more) -> dict:
    """The ``quantization_config`` of a checkpoint, as those are published."""
    how = arguments(kind, strategy)
    weights = {
        "num_bits": how.num_bits,
        "type": how.type,
        "strategy": how.strategy,
        "symmetric": True,
        "dynamic": False,
    }
    strategies = {"tensor": "tensor", "block": "group"} if "float" in kind else {}
    inputs = weights | {
        "strategy": "tensor" if static else strategies.get(how.strategy, "token"),
        "dynamic": not static,
    }
    if how.strategy == "block":
        weights["block_structure"], inputs["group_size"] = how.block_structure, how.block_structure[1]
    group = {
        "targets": ["Linear"],
        "weights": weights | ({"group_size": how.group_size} if how.group_size else {}),
        "input_activations": None if is_packed(kind) or kind == "float alone" else inputs,
        "output_activations": None,
    }
    form = "pack-quantized" if is_packed(kind) else f"{how.type}-quantized"
    return {"quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed", "ignore": IGNORED,
            "config_groups": {"group_0": group}} | more  # fmt: skip


def compressed(
    directory: str,
    folder: Path,
    kind: str,
    strategy: str,
    static: bool = False,
    seed: int = 0,
    only: str = "_proj",
    **more,
) -> str:
    """A checkpoint as llm-compressor writes it, quantized by the package's own functions: weights with `only` in their names."""
    folder.mkdir(parents=True)
    for file in Path(directory).iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    tensors = {}
    for name, tensor in load_file(Path(directory) / "model.safetensors").items():
        tensors[name] = tensor
        if only in name and name.endswith(".weight") and tensor.ndim == 2:
            layer = name.removesuffix(".weight")
            stored = quantized(tensors.pop(name), kind, strategy)
            tensors |= {name + end: one for end, one in stored.items()}
            if static:
                fused = f"{seed} {layer}".replace("up_proj", "gate_proj")  # vLLM wants both to be the same
                tensors[f"{layer}.input_scale"] = torch.tensor([zlib.crc32(fused.encode()) / 2**32 + 0.01])
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((Path(directory) / "config.json").read_text())
    config["quantization_config"] = config_of(kind, strategy, static, **more)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return str(folder)


def refit_compressed(
    checkpoints, kind, strategy, parallel, trainers, engine, engines, together, folder, **options
):
    """Refit an engine that started with dummy weights, and compare it with engines that have loaded the compressed checkpoints."""
    only = EXPERTS_ONLY if options.pop("experts", False) else {}
    published = [
        compressed(hf, folder / f"hf {n}", kind, strategy, **only) for n, (hf, _) in enumerate(checkpoints)
    ]
    config = config_of(kind, strategy) | {name: value for name, value in only.items() if name != "only"}
    engine = engine | {"hf_overrides": {"quantization_config": config}}
    options = {"published": published, "ignored": MADE_UP} | options
    return refit(checkpoints, parallel, trainers, engine, engines, together, folder / "run", **options)


# As Kimi-K2-Thinking.
EXPERTS_ONLY = {
    "only": ".experts.",
    "ignore": [
        *IGNORED,
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
    ],
}
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
    ("llama-bias", "int4", "group 16", f"{TP} 2", 2, {"tp": 2}, 2, True, {}),
    (
        "qwen2",
        "int4",
        "channel",
        f"{PP} 2",
        2,
        {"tp": 4},
        4,
        False,
        {"round_bytes": 1, "bucket_bytes": 1 << 20},
    ),
    ("served-int8", "int4", "group 32", f"{EP} 2 {ETP} 1", 2, {"tp": 2}, 2, True, {"round_bytes": 1}),
    ("qwen3-moe", "int4", "group 8", f"{TP} 2", 2, {"tp": 2}, 2, False, {}),
    (
        "deepseek-v3",
        "int4",
        "group 32",
        f"{TP} 2 {EP} 2 {ETP} 1",
        2,
        {"tp": 2, **EXPERTS},
        2,
        True,
        {"experts": True},
    ),
    ("qwen3", "packed int8", "channel", "", 1, {}, 1, True, {}),
    ("qwen3", "float", "block 16 16", f"{TP} 2", 2, {"tp": 2}, 2, True, {}),
    ("qwen3", "float", "block 32 40", "", 1, {}, 1, False, {}),
    ("qwen3-moe", "float", "block 16 16", f"{EP} 2 {ETP} 1", 2, {"tp": 2, **EXPERTS}, 2, True, {}),
    ("deepseek-v3", "float", "block 8 8", f"{TP} 2", 2, {"tp": 2}, 2, False, {}),
    ("qwen3", "float alone", "channel", f"{TP} 2", 2, {"tp": 2}, 2, True, {}),
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


SERVED = [
    ("served-qwen3", "int", "channel", "int8_per_channel", "CPUInt8ScaledMMLinearKernel"),
    ("served-blocks", "int4", "group 32", "int4_per_group_32", "CPUWNA16LinearKernel"),
]


@pytest.mark.parametrize("variant, kind, strategy, way, kernel", SERVED)
def test_a_real_vllm_serves_layers_that_a_refit_has_made(variant, kind, strategy, way, kernel, tmp_path):
    pairs = []
    for seed in (0, 1):
        hf, mcore = tmp_path / f"hf {seed}", tmp_path / f"mcore {seed}"
        make(hf, variant, torch.bfloat16, seed=seed)
        hf_to_mcore(hf, mcore, MegatronLayout())
        pairs.append((str(mcore), compressed(str(hf), tmp_path / f"compressed {seed}", kind, strategy)))
    # The second as a conversion writes it.
    mcore_to_hf(pairs[1][0], tmp_path / "written", quantize=way)
    assert same(hf_tensors(tmp_path / "written"), hf_tensors(Path(pairs[1][1]))) == []
    pairs[1] = pairs[1][0], str(tmp_path / "written")
    said = run(tmp_path, 2, "compressed_layers", pairs)
    assert said["refitted"] == said["loaded"], "equal to the last bit, on both ranks"
    assert said["refitted"][0] != said["refitted"][1] and not said["moved"]
    served = said["refitted"][0]["served"][0]
    ends = ("_proj.weight_packed", "_proj")
    assert sum(name.endswith(ends) for name in served) == 16, "what layers multiply with is compared"
    assert [one["kernel"] for one in said["quantized"]] == [kernel]
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


# The last one is what vLLM's own reloading takes: of the others it fails.
@pytest.mark.parametrize("variant, kind", [("qwen3-moe", "float"), ("qwen3", "int"), ("qwen3", "float")])
def test_scales_of_inputs_stay_as_they_were_loaded(variant, kind, converted, tmp_path):
    (first, _), (second, mcore) = converted(variant)
    made = [(first, 0), (second, 0), (second, 1), (first, 0)]  # weights, and the inputs' scales
    directories = [
        compressed(hf, tmp_path / str(n), kind, "tensor", True, seed) for n, (hf, seed) in enumerate(made)
    ]
    flags = flags_at(Path(mcore), f"{TP} 2")
    arguments = sides(tmp_path, 2), flags, mcore, directories, {"tp": 2, "hf_overrides": {}}
    for held, loaded, described, again, dummy, (_, woken), anew in run_on_ranks(
        2, "static_inputs", *arguments, (variant, kind) == ("qwen3", "float"), module="refit_reloads_on_cpu"
    ):
        assert held == loaded[0] and again == "no error" and woken
        reloaded = (variant, kind) == ("qwen3", "float")
        assert anew == (loaded[1] if reloaded else held), (
            "with the inputs' scales of what it has loaded since"
        )
        other = {name for name in held if held[name] != loaded[1][name]}
        assert other and all(name.endswith("input_scale") for name in other)
        assert held != loaded[2]
        assert all(
            "a scale for each tensor, scales of the input as they were loaded" in one["how"]
            for one in described
        )
        assert "quantizes its input by a scale that comes with a checkpoint and that no trainer has" in dummy


def test_a_rank_that_fails_keeps_nobody_waiting_and_a_check_sees_what_changed(converted, tmp_path):
    checkpoint = converted("qwen3")[0]
    engine = {"tp": 2, "hf_overrides": {"quantization_config": config_of("float", "channel")}}
    arguments = sides(tmp_path, 2, timeout=60), flags_at(Path(checkpoint[1]), f"{TP} 2"), checkpoint, engine
    began = time.monotonic()
    one, two = run_on_ranks(2, "failing_alone", *arguments, module="refit_reloads_on_cpu")
    for failed, whole, code, scale, mended in (one, two):
        assert not failed[1] and "out of memory" in failed[0]
        assert whole == mended == ("no error", True)
        for said, fit in (code, scale):
            assert (
                "3 tensors did not arrive as they are in the trainer" in said and "q_proj" in said and not fit
            )
    assert "vLLM fails to process model.layers.0.self_attn.qkv_proj once more" in one[0][0]
    assert time.monotonic() - began < 60, "nobody has waited for its time to be over"


@pytest.mark.parametrize(
    "kind, strategy, number",
    [("float", "tensor", torch.nan), ("int", "channel", torch.inf), ("int4", "group 16", -torch.inf)],
)
def test_infinities_and_nan_in_the_trainer_are_named_by_all_ranks(
    kind, strategy, number, converted, tmp_path
):
    checkpoint = converted("qwen3")[0]
    engine = {"tp": 2, "hf_overrides": {"quantization_config": config_of(kind, strategy)}}
    arguments = sides(tmp_path, 2), flags_at(Path(checkpoint[1]), f"{TP} 2"), checkpoint, engine, number
    for (said, whole), after in run_on_ranks(2, "of_infinities", *arguments, module="refit_reloads_on_cpu"):
        assert "for model.layers.0.mlp.down_proj.weight hold infinities or NaN" in said and not whole
        assert after == ("no error", True)


QKV = "model.layers.0.self_attn.qkv_proj"
NOT_MADE = [
    (("float alone", "channel"), {"weights": {"strategy": "tensor"}}, QKV, "W8A16Fp8"),
    (("float", "channel"), {"targets": ["Linear", "re:.*lm_head"]}, "lm_head", "W8A8Fp8"),
    (("int4", "group 32"), {"weights": {"symmetric": False}}, QKV, "WNA16, asymmetric"),
    (("int4", "group 32"), {"weights": {"actorder": "group"}}, QKV, "WNA16"),
    (("int4", "group 32"), {"weights": {"num_bits": 2}}, QKV, "WNA16"),
]


@pytest.mark.parametrize("way, change, layer, scheme", NOT_MADE)
def test_what_a_refit_does_not_make_is_refused_by_name(way, change, layer, scheme, converted, tmp_path):
    checkpoint, config = converted("qwen3")[0], config_of(*way)
    group = config["config_groups"]["group_0"]
    group["weights"] |= change.get("weights", {})
    group |= {name: value for name, value in change.items() if name != "weights"}
    config["ignore"] = []
    arguments = (
        sides(tmp_path, 1),
        flags_at(Path(checkpoint[1]), ""),
        checkpoint,
        {"hf_overrides": {"quantization_config": config}},
    )
    [said] = run_on_ranks(1, "connecting", *arguments, module="refit_on_cpu")
    how = f"CompressedTensorsLinearMethod (CompressedTensors{scheme})"
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


WRITTEN = [
    ("qwen3-moe", "float", "channel", "fp8_per_channel"),
    ("deepseek-v3", "int", "channel", "int8_per_channel"),
    ("qwen3-moe", "float", "tensor", "fp8_per_tensor"),
    ("served-blocks", "float", "block 128 128", "fp8_per_block"),
    ("served-int8", "int4", "group 32", "int4_per_group_32"),
    ("qwen3-moe", "int4", "channel", "int4_per_channel"),
]


@pytest.mark.parametrize("variant, kind, strategy, way", WRITTEN)
def test_a_conversion_writes_what_the_package_makes(
    variant, kind, strategy, way, converted, tmp_path, monkeypatch
):
    hf, mcore = converted(variant)[0]
    monkeypatch.setattr(channels, "SLAB_BYTES", 2048)  # a few rows at a time
    monkeypatch.setattr(quantized_slabs, "SLAB_BYTES", 2048)
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
        inputs = {"channel": "token", "tensor": "tensor"}.get(strategy, "group")
        assert scheme.input_activations.strategy == inputs and scheme.input_activations.dynamic is True
    layers = {"deepseek-v3": range(1, 4), "served-blocks": range(0)}.get(variant, range(4))
    assert read.ignore == ["lm_head", *(f"model.layers.{layer}.mlp.gate" for layer in layers)]
    assert inspect(tmp_path / "out").details["compressed"] == sum(name.endswith("_scale") for name in wanted)
    file = next((tmp_path / "out").glob("*00002-of*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + bytes([file.read_bytes()[-1] ^ 1]))
    assert not check(tmp_path / "out").ok
    with pytest.raises(ReshardError, match="add --dtype bf16"):
        mcore_to_hf(mcore, tmp_path / "fp32", quantize=way, dtype="fp32")


def test_a_conversion_refuses_what_it_cannot_quantize(converted, tmp_path):
    mcore = converted("qwen3-moe")[0][1]
    with pytest.raises(
        ReshardError,
        match="--quantize int2 is none of fp8, fp8_per_channel, int8_per_channel, fp8_per_tensor, fp8_per_block, int4_per_group, int4_per_group_32, int4_per_channel",
    ):
        mcore_to_hf(mcore, tmp_path / "out", quantize="int2")
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


RESHARD = {"load_format": "reshard"}


def test_an_engine_that_loads_a_megatron_checkpoint_holds_what_it_has_of_the_compressed_one(
    converted, tmp_path
):
    cases = []
    # Two published weights whose shapes have one place beside those that vLLM fuses.
    latent = {"only": "a_proj", "ignore": [*IGNORED, "re:.*(b|o|gate|up|down)_proj$"]}
    for variant, kind, strategy, *some in (
        ("served-int8", "int4", "group 32", {}, EXPERTS),
        ("qwen3", "int", "tensor"),
        ("qwen3-moe", "float", "channel"),
        ("deepseek-v3", "float", "tensor"),
        ("deepseek-v3", "int4", "group 32", latent),
        ("served-int8", "int4", "group 32"),
        ("served-blocks", "float", "block 128 128"),
    ):
        (hf, mcore), (_, other) = converted(variant)
        only, parallel = (*some, {}, {})[:2]
        folder = tmp_path / f"{len(cases)}"
        package = compressed(hf, folder / "package", kind, strategy, **only)
        ignored = {"ignore": only["ignore"]} if only else {}
        served = RESHARD | {"hf_overrides": {"quantization_config": config_of(kind, strategy, **ignored)}}
        directories = {
            "package": (package, {"hf_overrides": {}}),
            "megatron": (mcore, served),
            "other": (other, served),
        }
        if kind != "int" and not only:
            way = f"fp8_per_{strategy.split()[0]}" if kind == "float" else "int4_per_group_32"
            mcore_to_hf(mcore, folder / "converted", quantize=way)
            directories |= {"converted": (folder / "converted", {"hf_overrides": {}}), "by our loader": (package, RESHARD | {"hf_overrides": {}}),
                            "by its config": (mcore, RESHARD | {"hf_config_path": package, "hf_overrides": {}})}  # fmt: skip
        cases.append(({"tp": 2, **parallel}, directories))
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
    asymmetric, ordered = config_of("int4", "group 32"), config_of("int4", "group 32")
    asymmetric["config_groups"]["group_0"]["weights"]["symmetric"] = False
    ordered["config_groups"]["group_0"]["weights"]["actorder"] = "group"
    output["config_groups"]["group_0"]["targets"] += ["re:.*lm_head"]
    output["ignore"] = []
    sentences = {
        "wants activations of group_0 quantized by scales that come with a checkpoint": static,
        "'num_bits': 4, 'type': 'int', 'strategy': 'group', 'symmetric': True, 'group_size': 32}, and of these reshard makes 8 bits": groups,
        "'symmetric': False, 'group_size': 32}, and of these reshard makes 8 bits": asymmetric,
        "and packed int4 or int8 for each channel or group, with plain activations, all symmetric": ordered,
        "has no config_groups": config_of("float", "channel", config_groups={}),
        "lm_head is loaded by CompressedTensorsLinearMethod (CompressedTensorsW8A8Fp8), for which reshard cannot": output,
    }
    cases = []
    for number, quantization in enumerate(sentences.values()):
        folder = tmp_path / str(number)
        folder.mkdir()
        config = json.loads((Path(mcore) / "hf" / "config.json").read_text()) | {
            "quantization_config": quantization
        }
        (folder / "config.json").write_text(json.dumps(config))
        cases.append((mcore, RESHARD | {"hf_config_path": str(folder), "hf_overrides": {}}))
    for sentence, said in zip(
        sentences, run_on_ranks(1, "refused", cases, module="serving_on_cpu")[0], strict=True
    ):
        assert sentence in said and "\n" not in said, said
