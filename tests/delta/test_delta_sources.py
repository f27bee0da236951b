"""What a chain of deltas, a merge and a load are made of: files that change meanwhile, bits that a manifest
contradicts, copies that differ, and chains that began alike."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from reshard import (
    DeltaWriter,
    MegatronLayout,
    ReshardError,
    hf_to_mcore,
    lora_merge,
    lora_to_peft,
    mcore_to_hf,
)
from reshard.delta import apply, save, show
from reshard.trainers import FsdpModel
from tests.engines.test_delta_engines import moved
from tests.lora.test_lora_files import adapter
from tests.tools.checkpoints import make
from tests.tools.disk import flip


@pytest.fixture(scope="module")
def steps(tmp_path_factory) -> list[Path]:
    """A small Llama in bf16, and three versions of it."""
    root = tmp_path_factory.mktemp("steps")
    made = [make(root / "0", "llama", torch.bfloat16)]
    for number in (1, 2, 3):
        made.append(moved(made[-1], root / str(number), number))
    return made


def written(source: Path, to: Path) -> Path:
    """Write a checkpoint as reshard writes it, with a manifest."""
    hf_to_mcore(source, to.with_name(f"{to.name}-mcore"), MegatronLayout())
    mcore_to_hf(to.with_name(f"{to.name}-mcore"), to)
    return to


def test_a_chain_that_is_rewritten_while_it_is_applied_makes_nothing(steps, tmp_path):
    save(steps[0], steps[1], tmp_path / "chain")
    file = tmp_path / "chain" / "delta-000001.safetensors"

    def rewrite(done: int, total: int) -> None:
        flip(file, file.stat().st_size - 9)

    with pytest.raises(ReshardError, match="delta-000001.safetensors changed while it was read"):
        apply(steps[0], tmp_path / "chain", tmp_path / "out", progress=rewrite, workers=1)
    assert not (tmp_path / "out").exists()


def test_a_delta_of_a_chain_that_began_alike_is_refused(steps, tmp_path):
    for name, last in (("chain", 2), ("branch", 3)):
        save(steps[0], steps[1], tmp_path / name)
        save(steps[1], steps[last], tmp_path / name)
    before = [[delta["digest"] for delta in show(tmp_path / name)["deltas"]] for name in ("chain", "branch")]
    assert before[0][0] == before[1][0] and before[0][1] != before[1][1]
    for end in ("json", "safetensors"):
        shutil.copy(tmp_path / "branch" / f"delta-000002.{end}", tmp_path / "chain")
    for call in (
        lambda: apply(steps[0], tmp_path / "chain", tmp_path / "out"),
        lambda: show(tmp_path / "chain"),
        lambda: save(steps[3], steps[2], tmp_path / "chain"),
    ):
        with pytest.raises(ReshardError, match=r"delta-000002 is of another chain \([0-9a-f]{32}, not"):
            call()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("spoiled", ["old", "new"])
def test_a_flipped_bit_that_a_manifest_contradicts_does_not_enter_a_chain(spoiled, steps, tmp_path):
    ends = {"old": written(steps[0], tmp_path / "old"), "new": written(steps[1], tmp_path / "new")}
    save(*ends.values(), tmp_path / "control")
    flip(ends[spoiled] / "model.safetensors", -9)
    with pytest.raises(ReshardError, match=f"{spoiled}: .* does not have the checksum of reshard.json"):
        save(*ends.values(), tmp_path / "chain")
    assert not (tmp_path / "chain").exists()
    (ends[spoiled] / "reshard.json").unlink()
    save(*ends.values(), tmp_path / "chain")


def test_a_flipped_bit_that_a_manifest_contradicts_is_not_merged(checkpoint, tmp_path):
    base = written(checkpoint("llama"), tmp_path / "base")
    of = adapter(base, tmp_path / "adapter")
    lora_to_peft(of, tmp_path / "peft", hf_config=base)
    lora_merge(base, tmp_path / "peft", tmp_path / "control")
    name = "model.layers.0.self_attn.q_proj.weight"  # to which the adapter adds
    for directory, file in ((base, "model.safetensors"), (tmp_path / "peft", "adapter_model.safetensors")):
        path = directory / file
        raw = path.read_bytes()
        header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
        tensor = next(entry for key, entry in sorted(header.items()) if name.removesuffix(".weight") in key)
        flip(path, 8 + int.from_bytes(raw[:8], "little") + tensor["data_offsets"][0])
        with pytest.raises(ReshardError, match="does not have the checksum of reshard.json"):
            lora_merge(base, tmp_path / "peft", tmp_path / "merged")
        assert not (tmp_path / "merged").exists()
        path.write_bytes(raw)
    lora_merge(base, tmp_path / "peft", tmp_path / "merged")


def test_a_stored_copy_that_differs_is_not_dropped(tmp_path):
    old = make(tmp_path / "old", "llama-rope-tied", torch.bfloat16)
    weights = load_file(old / "model.safetensors")
    copy = weights["model.embed_tokens.weight"].clone()
    save_file(weights | {"lm_head.weight": copy}, old / "model.safetensors", {"format": "pt"})
    save(old, moved_tied(old, tmp_path / "alike", copy_moves=True), tmp_path / "control")
    new = moved_tied(old, tmp_path / "new", copy_moves=False)
    with pytest.raises(
        ReshardError, match="new: lm_head.weight differs from model.embed_tokens.weight, but a chain holds"
    ):
        save(old, new, tmp_path / "chain")
    assert not (tmp_path / "chain").exists()


def moved_tied(old: Path, to: Path, copy_moves: bool) -> Path:
    """Write a checkpoint with another embedding, whose stored copy follows or does not."""
    shutil.copytree(old, to)
    weights = load_file(old / "model.safetensors")
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"] * 2
    if copy_moves:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, to / "model.safetensors", {"format": "pt"})
    return to


def test_a_writer_begins_a_chain_only_with_weights_that_somebody_has(steps, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(steps[1], dtype=torch.bfloat16)
    with pytest.raises(
        ReshardError, match="holds other weights than .*give base= the checkpoint that the model"
    ):
        DeltaWriter(FsdpModel(model), steps[0], tmp_path / "chain")
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(steps[0] / "config.json", bare)
    with pytest.raises(
        ReshardError, match="the weights of .*bare are not on this host, .*: give base= the check"
    ):
        DeltaWriter(FsdpModel(model), bare, tmp_path / "chain")
    assert not (tmp_path / "chain").exists()
    writer = DeltaWriter(FsdpModel(model), steps[0], tmp_path / "chain", base=steps[1])
    model.model.norm.weight.data += 1
    writer.save()
    apply(steps[1], tmp_path / "chain", tmp_path / "out")
    assert torch.equal(
        load_file(tmp_path / "out" / "model.safetensors")["model.norm.weight"], model.model.norm.weight.data
    )
    DeltaWriter(FsdpModel(model), bare, tmp_path / "chain").close()  # it goes on with what is there
    DeltaWriter(FsdpModel(model), bare, tmp_path / "named", base="org/model").close()
    assert show(tmp_path / "named")["base"] == "org/model"
