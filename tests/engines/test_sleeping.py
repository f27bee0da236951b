"""Refits into engines that have forgotten their weights, by the methods of vLLM's own worker."""

import json
import shutil
from pathlib import Path

import pytest

from tests.megatron.test_logits import EP, ETP, PP, TP, flags_at
from tests.starting.ranks import run_on_ranks

ENGINES = [
    ("qwen3", {}),
    ("qwen3-moe", {}),
    ("deepseek-v3", {}),
    ("deepseek-v3-no-q-lora", {}),
    ("deepseek-v3", {"quantization": "fp8_per_tensor"}),
]


@pytest.mark.parametrize("variant, engine", ENGINES)
def test_a_refit_brings_all_of_an_engine_that_has_forgotten_its_weights(variant, engine, converted):
    checkpoints = converted(variant)
    flags = flags_at(Path(checkpoints[1][1]), "")
    [results] = run_on_ranks(1, "after_losses", flags, checkpoints, engine, module="sleeping_on_cpu")
    assert results.pop("alike") < 0.4, "the two checkpoints differ in most of their tensors"
    for name, one in results.items():
        assert one["wrong"] == [], name
        assert one["version"] == 7 and one["verified"] == "no error"
        assert one["fit"] == (name == "level 1"), "weights that came back are whole, others are not"
        assert all(outcome.startswith("this vLLM sleeps") for outcome in one["said"]), one["said"]
    assert [len(one["said"]) for one in results.values()] == [2, 2, 0, 2]


DRAFTERS = [
    ("deepseek-v3", "", {}, 1),
    ("deepseek-v3", "", {"quantization": "fp8_per_block"}, 1),
    ("deepseek-v3", f"{PP} 2", {"tp": 2}, 2),
    ("qwen3-next", f"{TP} 2", {"tp": 2}, 2),
    # as GLM-4.6, whose MTP layer has no embedding and output of its own
    ("glm4-moe", f"{TP} 2 {EP} 2 {ETP} 1", {"tp": 2, "enable_expert_parallel": True}, 2),
]


def unannounced(source: Path, directory: Path) -> str:
    """A copy of a directory whose config does not say that it has an MTP layer, as Qwen3-Next is published."""
    shutil.copytree(source, directory)
    config = json.loads((directory / "config.json").read_text())
    assert config.pop("num_nextn_predict_layers") == 1
    (directory / "config.json").write_text(json.dumps(config))
    return str(directory)


@pytest.mark.parametrize("variant, parallel, engine, ranks", DRAFTERS)
def test_a_drafter_made_of_mtp_layers_is_refitted_with_its_model(
    variant, parallel, engine, ranks, converted, tmp_path
):
    published = {"copies": False} if variant == "glm4-moe" else {}
    checkpoints = converted(variant, mtp=True, **published)
    flags = flags_at(Path(checkpoints[1][1]), parallel)
    if variant == "qwen3-next":
        checkpoints = [
            (unannounced(Path(hf), tmp_path / str(index)), mcore)
            for index, (hf, mcore) in enumerate(checkpoints)
        ]
    *others, results = run_on_ranks(ranks, "drafted", flags, checkpoints, engine, module="sleeping_on_cpu")
    for one in [*others, results]:
        assert one["wrong"] == [[], []] and one["then"] == "no error"
        assert "did not arrive as they are in the trainer" in one["spoiled"]
        assert "enorm" in one["spoiled"] or "pre_fc_norm_embedding" in one["spoiled"]
        unchanged = [name for name in one["same"] if not name.endswith(("cache", "_scale", "_map"))]
        assert all("embed_tokens" in name or "head.weight" in name for name in unchanged), unchanged
    assert len(results["own"]) >= 17, "vLLM's last stage has the drafter"
    assert {"brought", "left alone"} <= {what for what, _ in results["accounts"]}


def without_mtp(flags: list[str]) -> list[str]:
    """Megatron's flags for a model without its MTP layers."""
    at = flags.index("--mtp-num-layers")
    return flags[:at] + flags[at + 2 :]


def test_a_drafter_that_no_trainer_has_stays_as_it_was_loaded(converted):
    checkpoints = converted("deepseek-v3", mtp=True)
    flags = without_mtp(flags_at(Path(checkpoints[1][1]), ""))
    [results] = run_on_ranks(1, "drafter_left_alone", flags, checkpoints, {}, module="sleeping_on_cpu")
    assert results["wrong"] == [[], []] and results["own"] >= 17
    assert (
        "dummy weights (load_format='dummy')" in results["dummy"] and "has no MTP layers" in results["dummy"]
    )
    assert [one["what"] for one in results["left"]] == ["left alone"] and results["left"][0][
        "tensors"
    ] >= results["own"]
