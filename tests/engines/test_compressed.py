"""Engines that vLLM serves from checkpoints in the format of compressed-tensors: a refit leaves
what vLLM makes of its checkpoints."""

import json
import time
from pathlib import Path

import pytest
import torch

from reshard import MegatronLayout, ReshardError, hf_to_mcore, mcore_to_hf
from reshard.core.boxes import Box
from reshard.engines.vllm.quantized.recipes import Held, refuse_parts_of_blocks
from tests.engines.test_engine import run
from tests.megatron.test_logits import EP, ETP, PP, TP, flags_at
from tests.starting.ranks import run_on_ranks
from tests.tools.by_compressed_tensors import (
    EXPERTS,
    IGNORED,
    MADE_UP,
    compressed,
    config_of,
    sides,
)
from tests.tools.checkpoints import make
from tests.tools.oracle import hf_tensors, same
from tests.tools.refits import refit


@pytest.mark.parametrize("offset, length, row", [(48, 80, 0), (64, 48, 0), (64, 64, 8)])
def test_a_part_of_what_has_one_scale_is_refused(offset, length, row):
    whole = Held("weight", "some.weight", (64, 130), Box((0, 64), (64, 66)), 0)
    refuse_parts_of_blocks("a layer", (16, 32), 64, [whole])
    part = whole._replace(box=Box((0, offset), (64, length)), row=row)
    with pytest.raises(
        ReshardError, match="some.weight that begins or ends within what has one scale, 16 rows and 32"
    ):
        refuse_parts_of_blocks("a layer", (16, 32), 64, [whole, part])


def refit_compressed(
    checkpoints, kind, strategy, parallel, trainers, engine, engines, together, folder, **options
):
    """Refit an engine that started with dummy weights, and compare it with engines that have loaded
    the compressed checkpoints."""
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
    ("qwen3-moe", "float", "tensor", f"{TP} 2 {EP} 2 {ETP} 1", 2, {"tp": 2, **EXPERTS}, 2, True, {}),
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
        {"tp": 2},
        2,
        False,
        {"round_bytes": 1, "bucket_bytes": 1 << 20},
    ),
    ("served-int8", "int4", "group 32", f"{EP} 2 {ETP} 1", 2, {"tp": 2}, 2, True, {"round_bytes": 1}),
    ("qwen3-moe", "int4", "group 8", f"{TP} 2", 2, {"tp": 2}, 2, True, {}),
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
    ("served-qwen3", "int", "channel", None, "CPUInt8ScaledMMLinearKernel"),
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
    if way is not None:  # the second as a conversion writes it
        mcore_to_hf(pairs[1][0], tmp_path / "written", quantize=way)
        assert same(hf_tensors(tmp_path / "written"), hf_tensors(Path(pairs[1][1]))) == []
        pairs[1] = pairs[1][0], str(tmp_path / "written")
    report = run(tmp_path, 2, "engine_quantized_on_cpu.compressed_layers", pairs)
    assert report["refitted"] == report["loaded"], "equal to the last bit, on both ranks"
    assert report["refitted"][0] != report["refitted"][1] and not report["moved"]
    served = report["refitted"][0]["served"][0]
    ends = ("_proj.weight_packed", "_proj")
    assert sum(name.endswith(ends) for name in served) == 16, "what layers multiply with is compared"
    assert [one["kernel"] for one in report["quantized"]] == [kernel]
    assert (
        "1 tensors did not arrive as they are in the trainer: model.layers.1.mlp.down_proj.weight"
        in report["mixed up"]
    )
    assert report["mended"] == report["refitted"][1]
    hidden = f"keeps its weights in a form that only {kernel} reads, so that they are not handed on: give a trainer"
    assert hidden in report["handed on"] if kind == "int" else report["handed on"] == "no error"


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
        for message, fit in (code, scale):
            assert (
                "3 tensors did not arrive as they are in the trainer" in message
                and "q_proj" in message
                and not fit
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
    for (message, whole), after in run_on_ranks(
        2, "of_infinities", *arguments, module="refit_reloads_on_cpu"
    ):
        assert "for model.layers.0.mlp.down_proj.weight hold infinities or NaN" in message and not whole
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
    [message] = run_on_ranks(1, "connecting", *arguments, module="refit_on_cpu")
    how = f"CompressedTensorsLinearMethod (CompressedTensors{scheme})"
    assert message.startswith(
        f"{layer} serves from weights that {how} has changed, which a refit cannot write in place"
    ), message


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
    for message in run_on_ranks(4, "connecting", *arguments, module="refit_on_cpu"):
        assert message.startswith(
            "not all of vLLM's ranks have as many experts, so that they cannot find scales together"
        )
