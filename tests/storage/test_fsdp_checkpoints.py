"""Checkpoints of trainers under FSDP2, saved by torch's, Accelerate's and others' calls: bit for bit what
``save_pretrained`` writes of the same model."""

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from reshard import MegatronLayout, ReshardError, diff, digest, fsdp_to_hf, hf_to_mcore, inspect, mcore_to_hf
from reshard.cli.main import cli
from reshard.formats import torch_dist
from tests.megatron.test_logits import EP, ETP, TP, flags_at
from tests.starting.ranks import run_on_ranks
from tests.tools import model_classes
from tests.tools.checkpoints import make
from tests.tools.disk import tree
from tests.tools.oracle import hf_tensors, same, stored_tensors
from tests.tools.stores import BUCKET, filesystem, seaweed, variables

HSDP, WITH_TP = {"replicate": 2, "shard": 2}, {"shard": 2, "tp": 2}
BF16, FP32 = torch.bfloat16, torch.float32
# By name: model, mesh, dtype, how it is saved, and the dim along which experts are split.
CASES = {
    "moe": ("qwen3-moe", HSDP, FP32, "states", 0),
    "tied": ("llama-rope-tied", {"shard": 4}, FP32, "side by side", 0),
    "latent": ("deepseek-v3", WITH_TP, BF16, "app", 0),
    "columns of experts": ("mixtral", {"shard": 4}, BF16, "accelerate", 2),
    "rows of experts": ("qwen3-moe-mixed", {"shard": 4}, BF16, "states", 1),
    "transposed": ("gpt-oss", {"shard": 4}, BF16, "alone", 0),
    "Mamba": ("nemotron-h-moe", {"shard": 4}, BF16, "states", 0),
    "uneven": ("qwen2-moe", {"shard": 3}, BF16, "accelerate", 0),
    "uneven and tied": ("llama-rope-tied", {"shard": 3}, BF16, "app", 0),
    "of ranks": ("qwen3-moe", HSDP, FP32, "ranks", 0),
    "of ranks, uneven": ("llama-rope-tied", {"shard": 3}, BF16, "ranks", 0),
    "of ranks, rows of experts": ("qwen3-moe", {"shard": 4}, BF16, "ranks", 1),
    "no table": ("GraniteMoeForCausalLM", {"shard": 3}, BF16, "states", 0),
    "single numbers": ("ApertusForCausalLM", {"shard": 3}, FP32, "app", 0),
    "whole numbers": ("GraniteSpeechForConditionalGeneration", {"shard": 3}, FP32, "accelerate", 0),
    "whole numbers of ranks": ("GraniteSpeechForConditionalGeneration", {"shard": 3}, BF16, "ranks", 0),
}
WITHOUT_TABLE = {"no table", "single numbers", "whole numbers", "whole numbers of ranks"}


@pytest.fixture(scope="module")
def saves(tmp_path_factory) -> dict[str, Path]:
    """The folders of all cases: ``source``, what was ``saved``, and what is ``published``."""
    top = tmp_path_factory.mktemp("fsdp")
    folders, runs = {}, {3: [], 4: []}
    for name, (variant, mesh, dtype, how, dim) in CASES.items():
        folder = folders[name] = top / name
        if name in WITHOUT_TABLE:
            model_classes.make(folder / "source", variant)
        else:
            make(folder / "source", variant, dtype)
        case = dict(
            folder=str(folder), source=f"{folder}/source", mesh=mesh, dtype=dtype, how=how, experts_dim=dim
        )
        runs[3 if mesh["shard"] == 3 else 4].append(case)
    for ranks, cases in runs.items():
        run_on_ranks(ranks, "save", cases, module="fsdp_saves_on_cpu")
    return folders


def copied(saves: dict[str, Path], name: str, to: Path) -> tuple[Path, Path]:
    """A copy of what was saved, and the directory of its ``.metadata``."""
    shutil.copytree(saves[name] / "saved", to)
    [metadata] = [path for path in to.rglob(".metadata") if "optim" not in path.parent.name]
    return to, metadata.parent


@pytest.mark.parametrize("name", CASES)
def test_an_fsdp_checkpoint_becomes_what_save_pretrained_writes(name, saves, tmp_path):
    folder = saves[name]
    report = fsdp_to_hf(folder / "saved", tmp_path / "hf", hf_config=folder / "source")
    made, published = hf_tensors(tmp_path / "hf"), hf_tensors(folder / "published")
    assert same(made, published) == [] and made.keys() == published.keys()
    before = hf_tensors(folder / "source")  # the control: the step of training is in every weight
    assert all(not torch.equal(made[n], before[n]) for n in made.keys() & before.keys() if made[n].ndim > 1)
    told, how = " ".join(report.notices), CASES[name][3]
    assert ("entries of" in told) == (how in ("states", "side by side", "app")), told
    found = diff(folder / "saved", folder / "published", hf_config=folder / "source")
    assert found.equal and not diff(folder / "saved", folder / "source", hf_config=folder / "source").equal
    assert digest(folder / "saved", hf_config=folder / "source").text == digest(tmp_path / "hf").text
    if name in WITHOUT_TABLE:
        fsdp_to_hf(folder / "saved", tmp_path / "bf16", hf_config=folder / "source", dtype="bf16")
        cast = {n: t.to(BF16) if t.is_floating_point() else t for n, t in published.items()}
        assert same(hf_tensors(tmp_path / "bf16"), cast) == [], "whole numbers are not cast"
        return
    layout = MegatronLayout(tp=2, etp=1)
    hf_to_mcore(folder / "saved", tmp_path / "mcore", layout, hf_config=folder / "source")
    hf_to_mcore(folder / "published", tmp_path / "expected", layout)
    stored = stored_tensors(tmp_path / "mcore" / "release")
    assert same(stored, stored_tensors(tmp_path / "expected" / "release")) == []


def states_of(directory: Path) -> dict:
    """What a checkpoint holds, as torch reads it: nested dicts of whole tensors."""
    file = directory.parent / "whole.pt"
    dcp_to_torch_save(directory, file)
    return torch.load(file, weights_only=False)


def test_a_changed_element_is_found_and_a_shard_of_other_files_refused(saves, tmp_path):
    folder = saves["moe"]
    changed, directory = copied(saves, "moe", tmp_path / "changed")
    checkpoint = torch_dist.read(directory)
    chunks = checkpoint.keys["model.model.layers.1.mlp.experts.down_proj"].chunks
    stored = chunks[max(chunks)]
    tensor, path = checkpoint.tensor_at(stored), directory / stored.file
    data = bytearray(path.read_bytes())
    data[tensor.offset + 4] ^= 1  # the second element of an expert in the second half
    path.write_bytes(data)
    found = diff(changed, folder / "published", hf_config=folder / "source")
    assert [each.name for each in found.differences] == ["model.layers.1.mlp.experts.4.down_proj.weight"]
    path.write_bytes((saves["latent"] / "saved" / stored.file).read_bytes())
    with pytest.raises(ReshardError, match=r"truncated|says|readable"):
        fsdp_to_hf(changed, tmp_path / "never", hf_config=folder / "source")
    path.unlink()
    with pytest.raises(ReshardError, match=rf"lacks the files {stored.file} that its .metadata names"):
        fsdp_to_hf(changed, tmp_path / "never", hf_config=folder / "source")
    assert not (tmp_path / "never").exists()


def test_a_shard_that_metadata_lacks_or_has_twice_is_named(saves, tmp_path):
    folder = saves["moe"]
    changed, directory = copied(saves, "moe", tmp_path / "changed")
    metadata, key = pickle.loads((directory / ".metadata").read_bytes()), "model.lm_head.weight"
    chunks = metadata.state_dict_metadata[key].chunks
    for others, problem in ((chunks[:1], "lacks shards"), ([chunks[0], chunks[0]], "overlap|lacks shards")):
        metadata.state_dict_metadata[key].chunks = others
        (directory / ".metadata").write_bytes(pickle.dumps(metadata))
        with pytest.raises(ReshardError, match=f"{key} (has )?({problem})|{key} .*{problem}"):
            fsdp_to_hf(changed, tmp_path / "never", hf_config=folder / "source")
    metadata.state_dict_metadata[key].chunks = chunks  # the control
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))
    assert fsdp_to_hf(changed, tmp_path / "hf", hf_config=folder / "source").tensors


OTHER = {
    "a key is missing": (lambda m: m.pop("model.norm.weight"), r"lacks model.norm.weight of Qwen3MoeForCausalLM's"),
    "another is missing": (lambda m: m.pop("model.layers.0.mlp.gate.weight"), r"lacks 1 of qwen3_moe's tensors"),
    "there is one more": (lambda m: m.update({"model.extra": torch.ones(2)}), "does not have: model.extra"),
    "of another shape": (lambda m: m.update({"lm_head.weight": torch.ones(9, 64)}), r"shape \[9, 64\], expected"),
    "LoRA": (
        lambda m: m.update({"model.layers.0.self_attn.q_proj.lora_A.default.weight": torch.ones(8, 64)}),
        "adapter of PEFT on it .*merge_and_unload",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", OTHER)
def test_weights_that_are_not_the_models_are_refused(what, saves, tmp_path):
    change, sentence = OTHER[what]
    model = dict(states_of(copied(saves, "moe", tmp_path / "copy")[1])["model"])
    source = saves["moe"] / "source"
    dcp.save({"model": model}, checkpoint_id=tmp_path / "whole", no_dist=True)
    assert diff(tmp_path / "whole", saves["moe"] / "published", hf_config=source).equal, "the control"
    change(model)
    dcp.save({"model": model}, checkpoint_id=tmp_path / "other", no_dist=True)
    with pytest.raises(ReshardError, match=sentence):
        fsdp_to_hf(tmp_path / "other", tmp_path / "never", hf_config=source)
    assert not (tmp_path / "never").exists()


def test_weights_of_two_models_and_states_of_an_optimizer_are_not_taken_for_weights(saves, tmp_path):
    source = saves["tied"] / "source"
    model = {
        name: tensor
        for name, tensor in states_of(copied(saves, "tied", tmp_path / "copy")[1]).items()
        if torch.is_tensor(tensor) and name != "train_state"
    }
    averaged = {name: tensor * 0.5 for name, tensor in model.items()}
    dcp.save({"model": model, "ema": averaged}, checkpoint_id=tmp_path / "two", no_dist=True)
    with pytest.raises(ReshardError, match=r"weights of several models, under 'ema\.', 'model\.'"):
        fsdp_to_hf(tmp_path / "two", tmp_path / "never", hf_config=source)
    dcp.save(
        {"model": model, "optim": {"exp_avg": averaged}}, checkpoint_id=tmp_path / "reversed", no_dist=True
    )
    assert diff(tmp_path / "reversed", saves["tied"] / "published", hf_config=source).equal
    untied = model | {"lm_head.weight": model["lm_head.weight"] * 2}
    dcp.save({"model": untied}, checkpoint_id=tmp_path / "untied", no_dist=True)
    with pytest.raises(
        ReshardError, match='lm_head.weight differs from model.embed_tokens.weight.*"tie_word'
    ):
        fsdp_to_hf(tmp_path / "untied", tmp_path / "never", hf_config=source)
    titan = {"tok_embeddings.weight": torch.ones(8, 8), "layers.0.attention.wq.weight": torch.ones(8, 8)}
    dcp.save(titan, checkpoint_id=tmp_path / "titan", no_dist=True)
    with pytest.raises(ReshardError, match="torchtitan's own names.*convert_to_hf.py"):
        fsdp_to_hf(tmp_path / "titan", tmp_path / "never", hf_config=source)
    alone = saves["transposed"]
    with pytest.raises(ReshardError, match="states of an optimizer only"):
        fsdp_to_hf(alone / "saved" / "optim", tmp_path / "never", hf_config=alone / "source")
    assert not (tmp_path / "never").exists()


def test_where_it_is_not_certain_which_weights_or_files_are_meant_nothing_is_guessed(saves, tmp_path):
    source = saves["tied"] / "source"
    model = {name: tensor.clone() for name, tensor in hf_tensors(saves["tied"] / "published").items()}
    other = {name: tensor / 2 for name, tensor in model.items()}
    states = {"nested": {"state": {"model": model}, "ema": other}, "named": {"opt": model, "shadow": other}}
    for name, state in states.items():
        dcp.save(state, checkpoint_id=tmp_path / name, no_dist=True)
        with pytest.raises(ReshardError, match="weights of several models"):
            fsdp_to_hf(tmp_path / name, tmp_path / "never", hf_config=source)
    dcp.save(model, checkpoint_id=tmp_path / "run" / "step-1", no_dist=True)
    wrong = json.loads((source / "config.json").read_text()) | {"rms_norm_eps": 0.5}
    (tmp_path / "run" / "config.json").write_text(json.dumps(wrong))
    (tmp_path / "run" / "notes.txt").write_text("a secret")
    shutil.copy(source / "config.json", tmp_path / "run" / "step-1")
    fsdp_to_hf(tmp_path / "run" / "step-1", tmp_path / "own")
    assert json.loads((tmp_path / "own" / "config.json").read_text())["rms_norm_eps"] != 0.5
    fsdp_to_hf(tmp_path / "run" / "step-1", tmp_path / "given", hf_config=tmp_path / "run" / "config.json")
    assert not (tmp_path / "given" / "notes.txt").exists() and not (tmp_path / "never").exists()
    shutil.copy(saves["tied"] / "published" / "model.safetensors", tmp_path / "run" / "step-1")
    with pytest.raises(ReshardError, match="and in .safetensors files"):
        fsdp_to_hf(tmp_path / "run" / "step-1", tmp_path / "never")


def test_commands_take_a_trainers_folder_and_the_config_beside_it(saves, tmp_path):
    run, folder = CliRunner().invoke, saves["uneven"]
    checkpoint = tmp_path / "run" / "checkpoint-7"
    copied(saves, "uneven", checkpoint)
    refused = run(cli, ["fsdp-to-hf", str(checkpoint), str(tmp_path / "never")])
    assert "pass --hf-config with the model that the training began with" in str(refused.exception)
    for name in ("config.json", "generation_config.json"):
        shutil.copy(folder / "source" / name, checkpoint)
    (checkpoint / "tokenizer.json").write_text("{}")
    for path, out in ((checkpoint, "a"), (checkpoint / "pytorch_model_fsdp_0", "b"), (tmp_path / "run", "c")):
        done = run(cli, ["fsdp-to-hf", str(path), str(tmp_path / out)])
        assert done.exit_code == 0, done.output
        assert same(hf_tensors(tmp_path / out), hf_tensors(folder / "published")) == []
        assert (tmp_path / out / "tokenizer.json").is_file() and not list((tmp_path / out).glob("*.pkl"))
        assert json.loads((tmp_path / out / "config.json").read_text())["model_type"] == "qwen2_moe"
    assert inspect(checkpoint).details["saved_by"] == "Accelerate" and inspect(checkpoint).format == "fsdp"
    with pytest.raises(ReshardError, match=f"reshard fsdp-to-hf {checkpoint / 'pytorch_model_fsdp_0'}"):
        mcore_to_hf(checkpoint, tmp_path / "never")
    command = run(cli, ["mcore-to-hf", str(checkpoint), str(tmp_path / "never")])
    assert f"reshard fsdp-to-hf {checkpoint} " in str(command.exception)
    done = run(cli, ["hf-to-mcore", str(checkpoint), str(tmp_path / "mcore"), "--tp", "2"])
    assert done.exit_code == 0 and diff(tmp_path / "mcore", folder / "published").equal
    with pytest.raises(ReshardError, match="reshard inspect .* says what it is"):
        fsdp_to_hf(tmp_path / "mcore", tmp_path / "never")
    with pytest.raises(ReshardError, match="a Hugging Face directory has its own"):
        hf_to_mcore(folder / "published", tmp_path / "never", hf_config=folder / "source")


def test_the_shards_of_ranks_are_all_there_and_hold_what_they_say(saves, tmp_path):
    source, actor = saves["of ranks"] / "source", tmp_path / "global_step_5" / "actor"
    shutil.copytree(saves["of ranks"] / "saved" / "actor", actor)
    (actor / "huggingface").mkdir()
    shutil.copy(source / "config.json", actor / "huggingface")
    shown = inspect(tmp_path / "global_step_5")
    assert "as verl does" in shown.details["saved_by"] and "optim_world_size_4_rank_0.pt" in str(
        shown.notices
    )
    with pytest.raises(ReshardError, match=f"convert them with reshard fsdp-to-hf {actor} "):
        mcore_to_hf(actor, tmp_path / "never")
    assert diff(actor, saves["of ranks"] / "published").equal, "the control"

    def refused(sentence: str) -> None:
        with pytest.raises(ReshardError, match=sentence):
            fsdp_to_hf(actor, tmp_path / "never")
        assert not (tmp_path / "never").exists()

    last = actor / "model_world_size_4_rank_3.pt"
    kept = last.read_bytes()
    last.write_bytes((actor / "model_world_size_4_rank_2.pt").read_bytes())  # another rank's part
    refused("the part of another rank than the file's name says.*verl.model_merger merge")
    last.write_bytes((saves["of ranks, rows of experts"] / "saved" / "actor" / last.name).read_bytes())
    refused("has another dtype or shape than in the shards before")
    last.write_bytes(kept[:-100])
    refused("truncated or corrupt")
    torch.save({"model.norm.weight": CallsPrint()}, last)
    refused("refers to builtins.print, .*refused, nothing was run")
    last.unlink()
    refused("lacks the shards of ranks 3 of 4")
    shutil.copy(actor / "model_world_size_4_rank_2.pt", actor / "model_world_size_2_rank_0.pt")
    refused("has shards of 2 and of 4 ranks")


def test_a_live_megatron_is_filled_from_an_fsdp_checkpoint(saves, tmp_path):
    name, mcore = "rows of experts", tmp_path / "mcore"
    _, directory = copied(saves, name, tmp_path / "saved")
    shutil.copy(saves[name] / "source" / "config.json", directory)
    hf_to_mcore(saves[name] / "published", mcore, MegatronLayout(tp=2, etp=1), transformer_impl="local")
    flags = flags_at(mcore, f"{TP} 2 {EP} 2 {ETP} 1")
    places = [str(saves[name] / "published"), str(directory)], str(mcore), str(saves[name] / "source")
    for differ, _, count in run_on_ranks(2, "load_each", flags, *places, module="live_megatron_on_cpu"):
        published, fsdp, other = map(len, differ)
        assert published == fsdp == 0 and other > count // 2, "the last is the control"


class CallsPrint:
    def __reduce__(self):
        return print, ("executed",)


def test_what_is_in_an_object_store_is_read_as_here(saves, tmp_path, monkeypatch):
    monkeypatch.setenv("RESHARD_SPOOL", str(tmp_path))
    with seaweed(tmp_path / "server") as address:
        for variable, value in variables(address).items():
            monkeypatch.setenv(variable, value)
        for name in ("uneven and tied", "of ranks, uneven"):
            folder, url = saves[name], f"s3://{BUCKET}/{name.replace(' ', '-')}"
            filesystem(address).put(str(folder), url.removeprefix("s3://"), recursive=True)
            fsdp_to_hf(folder / "saved", tmp_path / name, hf_config=folder / "source")
            fsdp_to_hf(f"{url}/saved", tmp_path / f"{name} there", hf_config=f"{url}/source")
            here, there = tree(tmp_path / name), tree(tmp_path / f"{name} there")
            assert there.pop("reshard.json") != here.pop("reshard.json") and there == here
            read = digest(f"{url}/saved", hf_config=f"{url}/source").text
            assert read == digest(tmp_path / name).text
            assert read != digest(f"{url}/source").text, "the control: a step of training is between them"
