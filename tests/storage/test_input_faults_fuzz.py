"""A seeded part of the fuzzer, and controls that its judges see what goes wrong."""

import json
import pickle
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from reshard.megatron.flags import command_line
from tests.campaigns import fuzz


def test_mutations_of_every_file_are_answered(tmp_path):
    """A seeded part of what `python -m tests.campaigns.fuzz` runs for as long as one likes."""
    found = fuzz.subjects(tmp_path, ("qwen3-moe",))
    outcomes = fuzz.run(2026, list(range(40)), found)
    assert fuzz.failed(outcomes) == []
    assert len({outcome.verdict for outcome in outcomes}) > 1


def test_mutations_of_chains_are_answered(tmp_path):
    """Also where a forger has made the checksums right."""
    [chain] = found = fuzz.chains(tmp_path)
    outcomes = fuzz.run(2026, list(range(40)), found)
    assert fuzz.failed(outcomes) == []
    assert sum("forged" in outcome.mutation for outcome in outcomes) > 10
    assert {"refused", "right"} <= {outcome.verdict for outcome in outcomes}
    (tmp_path / "control").mkdir()
    shutil.copytree(chain.path, tmp_path / "control" / "spoiled")
    unlike = {name: tensor + 1 for name, tensor in chain.truth.items()}
    for truth, expected in ((chain.truth, "right"), (unlike, "wrong")):
        shutil.rmtree(tmp_path / "control" / "out", ignore_errors=True)
        subject = replace(chain, truth=truth)
        outcome = fuzz.Outcome(0, 0, chain.name, "delta-apply", "", "time")
        assert fuzz.answered(subject, "delta-apply", tmp_path / "control", outcome).verdict == expected


def test_mutations_of_adapters_are_answered(tmp_path):
    [adapter] = found = fuzz.adapters(tmp_path)
    outcomes = fuzz.run(2026, list(range(60)), found)
    assert fuzz.failed(outcomes) == []
    assert {"refused", "right", "right for what the files say now"} <= {
        outcome.verdict for outcome in outcomes
    }
    (tmp_path / "control").mkdir()
    shutil.copytree(adapter.path, tmp_path / "control" / "spoiled")
    unlike = {name: tensor + 1 for name, tensor in adapter.truth.items()}
    for truth, expected in ((adapter.truth, "right"), (unlike, "wrong")):
        shutil.rmtree(tmp_path / "control" / "out", ignore_errors=True)
        outcome = fuzz.Outcome(0, 0, adapter.name, "lora-merge", "", "time")
        subject = replace(adapter, truth=truth)
        assert fuzz.answered(subject, "lora-merge", tmp_path / "control", outcome).verdict == expected


def test_the_judges_of_the_fuzzer_see_what_goes_wrong_without_our_checks(tmp_path, monkeypatch):
    """Negative controls: with a check switched off a spoiled checkpoint converts, and is not taken for
    right."""
    published, _, written, saved = fuzz.subjects(tmp_path / "made", ("llama-rope-tied",))

    def verdict(subject, command, spoil):
        with tempfile.TemporaryDirectory() as folder:
            spoiled = Path(shutil.copytree(subject.path, Path(folder) / "spoiled"))
            spoil(spoiled)
            return fuzz.answered(
                subject, command, Path(folder), fuzz.Outcome(0, 0, subject.name, command, "", "time")
            )

    def zeros(spoiled):
        path = spoiled / "release" / "__0_0.distcp"
        data = path.read_bytes()
        path.write_bytes(data[: len(data) // 2] + bytes(64) + data[len(data) // 2 + 64 :])

    def config(**changes):
        def spoil(spoiled):
            path = spoiled / "config.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | changes))

        return spoil

    def other_chunk(spoiled):
        metadata = pickle.loads((spoiled / "release" / ".metadata").read_bytes())
        metadata.state_dict_metadata["decoder.final_layernorm.weight"].properties.dtype = torch.float16
        (spoiled / "release" / ".metadata").write_bytes(pickle.dumps(metadata))

    nothing = config()
    assert (
        verdict(published, "hf-to-mcore", nothing).verdict
        == verdict(written, "mcore-to-hf", lambda spoiled: None).verdict
        == "right"
    )
    assert (
        verdict(saved, "mcore-to-hf", lambda spoiled: None).verdict
        == verdict(saved, "inspect", lambda spoiled: None).verdict
        == "right"
    )
    assert verdict(written, "mcore-to-hf", zeros).verdict == "refused"
    assert verdict(published, "hf-to-mcore", config(logit_scale=9.0)).verdict == "refused"
    assert (
        verdict(published, "hf-to-mcore", config(rms_norm_eps=7.0)).verdict == "right"
    )  # the flags say so too
    assert fuzz.failed([verdict(saved, "inspect", other_chunk)]) == []
    with monkeypatch.context() as off:
        off.setattr("reshard.storage.sources.verify.SourceChecks.compare", lambda self, name, found: None)
        found = verdict(written, "mcore-to-hf", zeros)
        assert (found.verdict, found.detail) == (
            "wrong",
            "other bytes than the manifest has",
        ) and fuzz.failed([found])
    with monkeypatch.context() as off:
        off.setattr("reshard.models.model._check_meaning", lambda *_: None)
        found = verdict(published, "hf-to-mcore", config(logit_scale=9.0))
        assert found.verdict == "wrong" and "logit_scale" in found.detail
    with monkeypatch.context() as off:  # a conversion that writes other flags than the config means
        off.setattr(
            "reshard.storage.destinations.megatron.command_line",
            lambda args, *more: command_line(args | {"layernorm_epsilon": 1e-3}, *more),
        )
        found = verdict(published, "hf-to-mcore", nothing)
        assert found.verdict == "wrong" and "norm_epsilon" in found.detail
    with monkeypatch.context() as off:  # a listing that nobody's files have
        off.setattr(
            "reshard.storage.inspection.asdict",
            lambda found: {"tensors": {n: e | {"shape": [1]} for n, e in found.tensors.items()}},
        )
        found = verdict(saved, "inspect", lambda spoiled: None)
        assert found.verdict in ("wrong", "no judgment") and fuzz.failed([found])
