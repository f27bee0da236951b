"""Deltas into running engines of several processes: under load, of two engines of one model, by two callers
at once, and beside others who write into the same model."""

import json
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from reshard.delta import save
from tests.digests.on_disk import expected
from tests.engines.test_engine import run
from tests.tools.checkpoints import make


def moved(old: Path, to: Path, seed: int) -> Path:
    """Write a checkpoint of which every other element of the large tensors is another one's."""
    shutil.copytree(old, to)
    weights, generator = load_file(old / "model.safetensors"), torch.Generator().manual_seed(seed)
    for weight in weights.values():
        if weight.ndim > 1:
            other = torch.randn(weight.shape, generator=generator) * weight.std()
            weight.view(-1)[::2] = other.view(-1)[::2]
    save_file(weights, to / "model.safetensors", {"format": "pt"})
    return to


def test_two_engines_of_one_model_follow_a_chain_under_load_and_say_what_others_wrote(tmp_path):
    steps = [make(tmp_path / "0", "served-qwen3")]
    for number in range(1, 6):
        steps.append(moved(steps[-1], tmp_path / str(number), number))
        save(steps[-2], steps[-1], tmp_path / "chain")
    (tmp_path / "run").mkdir()
    arguments = str(steps[0]), str(tmp_path / "chain"), str(tmp_path)
    outcome = run(tmp_path / "run", 1, "engine_deltas_on_cpu.follow", *arguments)
    (tmp_path / "outcome.json").write_text(json.dumps(outcome, indent=1))

    def said_alike(answers: list) -> float:
        [[first, anew], [second, anew_there]] = answers
        assert first == pytest.approx(anew, abs=1e-4), "nothing that other weights left in the cache"
        assert second == pytest.approx(anew_there, abs=1e-4) and first == pytest.approx(second, abs=1e-4)
        return first[0]

    said = [said_alike(outcome[key]) for key in ("base", "under load", "resumed", "after both", "gone back")]
    assert all(abs(one - next_one) > 1e-2 for one, next_one in pairwise(said)), "the control"
    assert outcome["first"] == "reached 1" and outcome["was running"] == [True, True]
    assert outcome["while read"] is False, "both served what they had while files were read"
    assert min(outcome["tokens since"]) > 0 and not outcome["paused"], "requests went on"
    for last, anew in outcome["went on"]:
        assert last == pytest.approx(anew, abs=1e-4), "as a request of the new weights after the same tokens"
    assert outcome["while paused"] == ["reached 2", True], "it stays paused"
    assert outcome["at once"] == ["reached 3", "reached 4"] and outcome["version"] == [4]
    applied = [line for line in outcome["lines"] if line.startswith("reshard: the engine serves version ")]
    assert outcome["back"] == ["reached 3", [3]] and outcome["forward"][0] == "reached 4"
    assert said_alike(outcome["forward"][1]) == pytest.approx(said[3], abs=1e-4)
    assert "since it went back already" in outcome["back twice"][0] and not outcome["back twice"][1]
    assert [line.split()[5] for line in applied] == ["1", "2", "3", "4", "3", "4", "4", "4"], (
        "a line for each call that succeeded"
    )
    assert sum("failed after" in line for line in outcome["lines"]) == 5, "and for each that did not"
    assert outcome["version then"] == [None]
    assert outcome["digest"] == expected(steps[4])[0] != outcome["digest then"], "of both engines"
    assert "are awaited: await reshard.engines.digest.digest_of_engine_async" in outcome["not awaited"]
    for between in ("loaded between", "written between"):
        assert "the engine holds weights with digest" in outcome[between], outcome[between]
    assert outcome["loaded back"] == "reached 4"
    assert "somebody resumed this engine while it was written" in outcome["resumed meanwhile"]
    assert outcome["version after that"] == [None] and outcome["from the base"] == "reached 4"
    assert "the disk of the second engine is gone" in outcome["replica"]
    assert outcome["versions then"] == [None] and outcome["paused then"], "no engine serves what one lacks"
