"""Deltas of a live Megatron into a running engine: bit for bit what the engine's own loader makes of each version."""

import json
import shutil
from pathlib import Path
from threading import Event, Timer

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from reshard import DeltaWriter, ReshardError, diff, digest, hf_to_mcore
from reshard.delta import apply, save, show
from reshard.delta.stores import LocalStore
from reshard.live.begun_save import BegunSave
from reshard.trainers import FsdpModel
from tests.delta.test_delta_chain import rewrite
from tests.megatron.test_logits import EP, ETP, PP, TP, flags_at
from tests.starting.ranks import run_on_ranks
from tests.tools.checkpoints import make
from tests.tools.model_classes import config_of
from tests.tools.model_classes import save as save_model

CASES = [
    ("llama-rope-tied", f"{TP} 2 {PP} 2", 4, {"tp": 4}),
    ("qwen3-moe", f"{TP} 2 {EP} 2 {ETP} 1", 4, {"tp": 4, "enable_expert_parallel": True}),
    ("deepseek-v3", f"{PP} 2 {EP} 2 {ETP} 1", 4, {"tp": 2, "pp": 2}),
    ("qwen3-next", f"{TP} 2", 2, {"tp": 2}),
]
# What is said of engines that quantize as they load, and that serve in fp16.
REFUSED = (
    "quantized, and deltas are of plain weights: write the version with reshard delta apply",
    "as float16, and the base of",
)


def steps_of(variant: str, folder: Path, count: int = 4) -> list[tuple[str, str]]:
    """A small model and versions of it, each with a few percent of the elements of the last one changed, in
    both formats."""
    steps, generator = [], torch.Generator().manual_seed(0)
    for step in range(count):
        hf = folder / f"hf{step}"
        if not step:
            make(hf, variant, torch.bfloat16)
        else:
            shutil.copytree(steps[-1][0], hf)
            weights = load_file(hf / "model.safetensors")
            for name, tensor in weights.items():
                chosen = torch.rand(tensor.shape, generator=generator) < 0.03
                weights[name] = torch.where(chosen, tensor + tensor.abs().max() / 8, tensor)
            save_file(weights, hf / "model.safetensors", {"format": "pt"})
        hf_to_mcore(hf, folder / f"mcore{step}", transformer_impl="local")
        steps.append((str(hf), str(folder / f"mcore{step}")))
    return steps


def test_a_writer_says_what_keeps_it_from_going_on(checkpoint, tmp_path, monkeypatch):
    source = checkpoint("qwen3", dtype=torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    monkeypatch.chdir(tmp_path)
    for empty in ("", " "):
        with pytest.raises(ReshardError, match=f"the chain is '{empty}'; it is a directory or a URL, . for"):
            DeltaWriter(FsdpModel(model), source, empty)
    with pytest.raises(
        ReshardError, match=r"is not a Megatron-Core model.*reshard.trainers.FsdpModel\(model\)"
    ):
        DeltaWriter(model, source, "chain")
    assert not list(tmp_path.iterdir())
    writer = DeltaWriter(FsdpModel(model), source, "chain")
    model.model.norm.weight.data += 1
    assert writer.save().changed == 64
    (tmp_path / "chain").rename("moved")
    with pytest.raises(ReshardError, match="chain is not a chain of deltas, since it has no base.json"):
        writer.save()
    (tmp_path / "moved").rename("chain")
    assert writer.save().version == 2
    writer.close()
    with pytest.raises(ReshardError, match="this DeltaWriter is closed: make another one"):
        writer.save()


@pytest.mark.parametrize(
    "name, changes",
    [
        ("LlamaForCausalLM", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
        ("Gemma2ForCausalLM", {}),
    ],
)
def test_a_chain_has_versions_of_one_model_by_their_configs(name, changes, tmp_path):
    """The same weights with another epsilon are another model, which `apply` would write with the base's config."""
    base, chain = tmp_path / "base", tmp_path / "chain"
    save_model(base, config_of(name, **changes))
    other = Path(shutil.copytree(base, tmp_path / "other"))
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    own, others = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16) for path in (base, other))
    differs = "its config has rms_norm_eps 0.5, and had 1e-06; begin a new chain"
    with pytest.raises(ReshardError, match=f"the trainer's model is not a new version of .*base: {differs}"):
        DeltaWriter(FsdpModel(others), other, chain, base=base)
    assert not chain.exists()
    DeltaWriter(FsdpModel(own), own.config, chain, base="a name that is believed").close()

    def refused() -> None:
        with pytest.raises(ReshardError, match=f"the trainer's model is not a new version of .*{differs}"):
            DeltaWriter(FsdpModel(others), other, chain)
        with pytest.raises(ReshardError, match=f"other is not a new version of .*{differs}"):
            save(other, other, chain)

    refused()
    manifest = json.loads((chain / "base.json").read_text())  # of a chain that says nothing of the config
    rewrite(chain / "base.json", config=None, name=str(base))
    refused()
    rewrite(chain / "base.json", config=manifest["config"], name=manifest["name"])
    writer = DeltaWriter(FsdpModel(own), base, chain)
    own.model.norm.weight.data += 1
    assert writer.save().version == 1
    writer.close()
    apply(base, chain, tmp_path / "out")
    assert not diff(tmp_path / "out", base).equal


DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4, "partial_rotary_factor": 0.5}


@pytest.mark.parametrize("rope", [None, DYNAMIC], ids=["by the table", "by the class alone"])
def test_what_a_model_keeps_in_fp32_is_in_fp32_in_a_chain_in_bf16(rope, tmp_path):
    """As a router's bias, also where the table refuses the config, and with it where no cast is asked for."""
    base, chain, bias = (
        make(tmp_path / "base", "glm4-moe", torch.bfloat16),
        tmp_path / "chain",
        "e_score_corr",
    )
    weights = load_file(base / "model.safetensors")
    biases = [name for name in weights if bias in name]
    weights |= {name: torch.rand(weights[name].shape) for name in biases}
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    if rope:
        config = json.loads((base / "config.json").read_text())
        (base / "config.json").write_text(json.dumps(config | {"rope_parameters": rope}))
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    writer = DeltaWriter(FsdpModel(model), base, chain, dtype="bf16", base=base)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if bias in name:
            tensor.data += 0.1
    writer.save()
    writer.close()
    apply(base, chain, tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert biases and all(torch.equal(written[name], weights[name] + 0.1) for name in biases)
    assert {str(tensor.dtype) for name, tensor in written.items() if name not in biases} == {"torch.bfloat16"}
    assert digest(tmp_path / "out", dtype="bf16").text.startswith("bf16+fp32:")


def check_back(outcome: dict, expected: dict[int, dict]) -> None:
    """An engine has gone back from version 30, and says why it does not."""
    assert outcome["nothing yet"] == (
        "no deltas were written into this engine, so it keeps no version to go back to"
    )
    versions = [20, 30, 20, 0]
    assert outcome["served"] == [(v, expected[v], v, True) for v in versions] and outcome["emptied"] == 1
    refusals = {
        "another": "this vLLM goes back to version 20, and not to version 10",
        "twice": "this vLLM keeps no version to go back to, since it went back already",
        "too large": "since what it replaced takes more than pending_bytes=64",
        "of one rank": "since others have written, moved or discarded weights since",
        "in place": "others have written into weights of this vLLM in place, so it cannot go back to version 0",
    }
    for key, sentence in refusals.items():
        said, serves_on = outcome[key]
        assert sentence in said and said.endswith("write that one with reshard delta apply, and load it"), (
            said
        )
        assert serves_on, key
    assert outcome["half"] == ("a GPU is gone", False)


@pytest.mark.parametrize("variant, parallel, ranks, engine", CASES, ids=[case[0] for case in CASES])
def test_an_engine_follows_a_live_trainer_through_a_chain(variant, parallel, ranks, engine, tmp_path):
    steps = steps_of(variant, tmp_path)
    # Once by fsspec, whose ranks each put their own file there.
    chain = f"{'file://' if variant == 'qwen3-moe' else ''}{tmp_path}/chain"
    arguments = flags_at(Path(steps[0][1]), parallel), steps, engine, chain
    outcomes = run_on_ranks(ranks, "follow", *arguments, module="delta_on_cpu")
    for outcome in outcomes:
        for version, emptied in ((20, 1), (30, 2)):
            assert outcome["held"][version] == (outcome["expected"][version], version, emptied, True)
        assert outcome["expected"][20] != outcome["expected"][30], "the control"
        check_back(outcome["back"], outcome["expected"])
        if variant == "qwen3-moe":
            said, as_it_was = outcome["overtaken"]
            assert "has version 35 since this process read it: one process at a time" in said and as_it_was
        assert outcome["begun_anew"], "of a second chain in the place of the first"
        assert outcome["same"] == 30 and outcome["healed"] == (40, True)
        assert outcome["again"].endswith("has version 30, so the next cannot be 20: give a higher one")
        assert "ends with version 30, and the trainer's model holds other weights" in outcome["behind"]
        assert "lacks delta-000030, which delta-000040 follows" in outcome["lost"][0]
        assert outcome["lost"][1:] == (True, True), "it serves on, as it was"
        absent, replaced, prepared = outcome["calls"]
        assert "chain-not is not a chain of deltas" in absent and prepared == 0
        assert "was replaced while it was read: version 40 has other weights now" in replaced
        assert "the engine does not hold version 50" in outcome["withheld"][0] and not outcome["withheld"][1]
        assert outcome["unchanged"] == (0, 45, 45, 3), "the version alone"
        for said, sentence in zip(outcome["refused"], REFUSED if engine == {"tp": 2} else (), strict=True):
            assert sentence in said
        assert outcome["half"].startswith("this vLLM holds a half-written model")
        assert (
            "neither the base of" in outcome["strange"]
            and "load the base into it first" in outcome["strange"]
        )
    held = show(chain)
    assert all(0.02 < delta["density"] < 0.04 and delta["files"] == ranks for delta in held["deltas"][:3])
    assert sum(outcome["kept_bytes"] for outcome in outcomes) == held["weights_bytes"], "each element once"
    apply(steps[0][0], chain, tmp_path / "out", version=20)
    written = diff(steps[2][0], tmp_path / "out")
    assert written.equal or all(
        each.values_equal for each in written.differences
    )  # router biases, which stay in fp32


def check_versions(base: str, chain: Path, expected: dict[int, str], others: list[str], to: Path) -> None:
    """The versions of a chain are these checkpoints, and none is another one."""
    for version, checkpoint in expected.items():
        apply(base, chain, to / f"of {version}", version=version)
        for other in others:
            assert diff(other, to / f"of {version}").equal == (other == checkpoint), (
                f"version {version}: {other}"
            )


@pytest.mark.parametrize("parallel", [None, f"{TP} 2"], ids=["fsdp", "megatron"])
def test_a_trainer_goes_on_while_its_versions_are_saved(parallel, tmp_path):
    steps = steps_of("llama-rope-tied", tmp_path)
    chain, flags = tmp_path / "chain", None if parallel is None else flags_at(Path(steps[0][1]), parallel)
    for outcome in run_on_ranks(2, "save_behind", steps, flags, str(chain), module="delta_on_cpu"):
        assert outcome["ranks"] == 2 and not outcome["early"] and outcome["files"] == ["base.json"]
        assert outcome["report"]["version"] == 10 and outcome["again"]
        assert outcome["first is there"] and outcome["at once"] == [20, 21]
        for key in ("full", "not waited for"):
            assert "the disk is full: " in outcome[key] and "resume" not in outcome[key], outcome[key]
        assert "was begun, and failed" in outcome["not waited for"]
        assert outcome["after full"] and outcome["after that"], "a version that fails leaves nothing"
        assert outcome["lower"].endswith("has version 21, so the next cannot be 20: give a higher one")
        assert outcome["then"] == 30
        assert outcome["closed"] == (40, "this DeltaWriter is closed: make another one")
    expected = {10: 1, 20: 2, 21: 3, 30: 2, 40: 1}
    held = [hf for hf, _ in steps]
    check_versions(held[0], chain, {v: held[step] for v, step in expected.items()}, held, tmp_path)


def test_a_version_whose_rank_dies_meanwhile_is_in_no_chain(tmp_path):
    steps = steps_of("llama-rope-tied", tmp_path, 2)
    arguments = steps, str(tmp_path / "chain")
    first, died = run_on_ranks(2, "save_behind_and_die", *arguments, module="delta_on_cpu", may_die=True)
    said, files = first
    assert died is None and "process 1 of 2 was ended" in said and files == ["base.json"]


def test_a_rank_that_has_lost_what_a_version_holds_adds_no_other(tmp_path):
    steps = steps_of("llama-rope-tied", tmp_path, 3)
    chain = tmp_path / "chain"
    first, second = run_on_ranks(2, "save_unheard", steps, str(chain), module="delta_on_cpu")
    assert first[0] == "no error" and second[0] == "no memory", "the version is there"
    for said in (first, second):
        assert "no memory" not in said[1] and "no error" not in said[1:]
        assert "the digest of the last version" in said[2]
    held = [hf for hf, _ in steps]
    check_versions(held[0], chain, {1: held[1], 2: held[2]}, held, tmp_path)


def test_a_save_that_is_interrupted_forgets_no_version_that_is_on_its_way(tmp_path, monkeypatch):
    """Elements that go back to what they were meanwhile would be missing from the next version."""
    source = make(tmp_path / "source", "llama", torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    writer = DeltaWriter(FsdpModel(model), source, tmp_path / "chain")
    norm, go_on, put = model.model.norm.weight.data, Event(), LocalStore.put
    before = norm.clone()
    monkeypatch.setattr(LocalStore, "put", lambda *of: (go_on.wait(), put(*of))[1])
    norm[0:4] += 1
    begun = writer.begin_save()
    norm[0:4], norm[4:8] = before[0:4], norm[4:8] + 1

    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(BegunSave, "tell", interrupted)
        with pytest.raises(KeyboardInterrupt):
            writer.save()
    Timer(0.5, go_on.set).start()
    assert writer.save().version == 2 and begun.is_done and begun.wait().version == 1
    apply(source, tmp_path / "chain", tmp_path / "out")
    [file] = (tmp_path / "out").glob("*.safetensors")
    assert torch.equal(load_file(file)["model.norm.weight"], norm)
