"""Refits into engines that have forgotten their weights, by the methods of vLLM's own worker."""

from pathlib import Path

import pytest

from tests.ranks import run_on_ranks
from tests.test_logits import flags_at

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
    [found] = run_on_ranks(1, "after_losses", flags, checkpoints, engine, module="sleeping_on_cpu")
    assert found.pop("alike") < 0.4, "the two checkpoints differ in most of their tensors"
    for name, one in found.items():
        assert one["wrong"] == [], name
        assert one["version"] == 7 and one["verified"] == "no error"
        assert one["fit"] == (name == "level 1"), "weights that came back are whole, others are not"
        assert all(said.startswith("this vLLM sleeps") for said in one["said"]), one["said"]
    assert [len(one["said"]) for one in found.values()] == [2, 2, 0, 2]
