"""Checkpoints as trainers leave them. The weights are what Megatron-Core's own
``dist_checkpointing.save`` writes of real models, with the keys of a model's
``sharded_state_dict``, which all of them save; directories and files beside them have the trainers'
names and contents."""

import json
import shutil

import pytest
import torch

from reshard import ReshardError, inspect, mcore_to_hf
from tests.megatron.test_logits import PP, TP
from tests.megatron.test_megatron_saves import saved_by_megatron
from tests.tools.oracle import hf_tensors, same

TRACKER = "latest_checkpointed_iteration.txt"


@pytest.fixture(scope="module")
def saved(checkpoint, tmp_path_factory):
    """A Hugging Face directory, and an iteration's directory that Megatron saved of it."""
    source, folder = checkpoint("qwen3"), tmp_path_factory.mktemp("saved")
    theirs = saved_by_megatron(source, folder, f"{TP} 2 {PP} 2", 4)
    return source, theirs / "iter_0000007"


def config_alone(source, directory):
    directory.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "generation_config.json"):
        shutil.copy(source / name, directory)


def verl(source, iteration, root):
    """verl 0.9 with ``use_dist_checkpointing``: ``MegatronCheckpointManager.save_checkpoint``."""
    actor = root / "global_step_7" / "actor"
    shutil.copytree(iteration, actor / "model" / "dist_ckpt")
    config_alone(source, actor / "model" / "huggingface")
    (actor / "ckpt_contents.json").write_text("{}")
    (root / TRACKER).write_text("7")
    return [root, root / "global_step_7", actor, actor / "model", actor / "model" / "dist_ckpt"]


def verl_before(source, iteration, root):
    """verl before its second layout."""
    actor = root / "global_step_7" / "actor"
    shutil.copytree(iteration, actor / "dist_ckpt")
    config_alone(source, actor / "huggingface")
    return [root / "global_step_7", actor, actor / "dist_ckpt"]


def bridge(source, iteration, root):
    """Megatron-Bridge: ``run_config.yaml`` in the iteration names what the training began with."""
    shutil.copytree(iteration, root / "iter_0000007")
    config_alone(source, root.parent / "published")
    (root / "iter_0000007" / "run_config.yaml").write_text(
        f"checkpoint:\n  save: {root}\nmodel:\n  _target_: "
        "megatron.bridge.models.qwen.qwen_provider.Qwen3ModelProvider\n  hf_model_id: "
        f"{root.parent / 'published'}\n  num_layers: 4\n"
    )
    (root / TRACKER).write_text("7")
    return [root, root / "iter_0000007"]


def nemo_rl(source, iteration, root):
    """NeMo-RL: Megatron-Bridge's below each step's policy."""
    weights = root / "step_7" / "policy" / "weights"
    paths = bridge(source, iteration, weights)
    (root / "step_7" / "policy" / "tokenizer").mkdir()
    return [root, root / "step_7", *paths]


def ms_swift(source, iteration, root):
    """ms-swift: config and Hugging Face weights beside the iteration, whose tracker is written
    before an asynchronous save has ended."""
    shutil.copytree(iteration, root / "checkpoint-7" / "iter_0000007")
    shutil.copytree(source, root / "checkpoint-7", dirs_exist_ok=True)
    (root / "checkpoint-7" / TRACKER).write_text("7")
    (root / "checkpoint-7" / "args.json").write_text("{}")
    return [root, root / "checkpoint-7"]


def roll(source, iteration, root):
    """ROLL with ``torch_dist``: the tracker says 1 before anything is saved, and the config is text
    in ``mca_config.json``."""
    shutil.copytree(iteration, root / "iter_0000001" / "dist_model")
    (root / TRACKER).write_text("1")
    fields = {
        "hf_model_type": "qwen3",
        "num_layers": 4,
        "hf_config_json": (source / "config.json").read_text(),
    }
    (root / "mca_config.json").write_text(json.dumps(fields, indent=2))
    return [root, root / "iter_0000001", root / "iter_0000001" / "dist_model"]


@pytest.mark.parametrize(
    "trainer", [verl, verl_before, bridge, nemo_rl, ms_swift, roll], ids=lambda f: f.__name__
)
def test_what_a_trainer_leaves_is_read_from_wherever_one_points(trainer, saved, tmp_path):
    source, iteration = saved
    paths = trainer(source, iteration, tmp_path / "run")
    for path in paths:
        found = inspect(path)
        assert found.format == "megatron" and found.family == "qwen3", path
        assert any(notice.startswith("config taken from ") for notice in found.notices), path
        named = (path / ".metadata").is_file() or any(path.glob("iter_*")) or path.name.startswith("iter_")
        assert named or any(notice.startswith("weights taken from ") for notice in found.notices), path
    report = mcore_to_hf(paths[0], tmp_path / "back")
    assert any("config taken from" in notice for notice in report.notices)
    assert same(hf_tensors(source), hf_tensors(tmp_path / "back")) == []
    left = {path.name for path in (tmp_path / "back").iterdir()}
    assert not left & {TRACKER, "args.json", "mca_config.json", "ckpt_contents.json"}
    assert "config.json" in left


def test_the_last_complete_iteration_is_taken(saved, tmp_path):
    source, iteration = saved
    run = tmp_path / "run"
    for name in ("iter_0000007", "iter_0000014"):
        shutil.copytree(iteration, run / name)
    config_alone(source, run / "hf")
    (run / TRACKER).write_text("14")
    assert inspect(run).details["iteration"] == "iter_0000014" and "took" not in str(inspect(run).notices)
    (run / "iter_0000021").mkdir()  # being written, and not yet named
    assert inspect(run).details["iteration"] == "iter_0000014"
    (run / TRACKER).write_text("21")  # named before it is written
    found = inspect(run)
    assert found.details["iteration"] == "iter_0000014"
    assert found.notices[0] == f"took iter_0000014: {TRACKER} names iter_0000021, which is not complete"
    (run / TRACKER).unlink()
    assert inspect(run).details["iteration"] == "iter_0000014"
    for name in ("iter_0000007", "iter_0000014"):
        (run / name / ".metadata").unlink()
    (run / TRACKER).write_text("14")
    with pytest.raises(ReshardError, match="iter_0000014 has no .metadata"):
        inspect(run)


def rewritten(iteration, directory, change):
    """The iteration with other tensors, saved by torch."""
    import torch.distributed.checkpoint as dcp

    reader = dcp.FileSystemReader(str(iteration))
    metadata = reader.read_metadata().state_dict_metadata
    state = {
        k: torch.empty(e.size, dtype=e.properties.dtype) for k, e in metadata.items() if hasattr(e, "size")
    }
    dcp.load(state, storage_reader=reader, no_dist=True)
    dcp.save(change(state), storage_writer=dcp.FileSystemWriter(str(directory)), no_dist=True)
    return directory


def test_what_is_no_language_model_or_another_format_is_named(saved, tmp_path):
    source, iteration = saved
    legacy = tmp_path / "legacy" / "iter_0000007"
    (legacy / "mp_rank_00").mkdir(parents=True)
    (legacy.parent / TRACKER).write_text("7")
    qkv = "decoder.layers.self_attention.linear_qkv"
    lora = {
        f"{qkv}.adapter.linear_in.weight": torch.zeros(4, 8, 64),
        f"{qkv}.adapter.linear_out.weight": torch.zeros(4, 384, 8),
    }
    hugging_face = tmp_path / "verl" / "global_step_7"
    shutil.copytree(source, hugging_face / "actor" / "huggingface")
    cases = [
        (rewritten(iteration, tmp_path / "critic", lambda s: s | {"output_layer.weight": torch.zeros(1, 64)}),
         "is a value or reward model's: output_layer.weight is a value head, of [1, 64]"),
        (rewritten(iteration, tmp_path / "lora", lambda s: lora),
         "holds a LoRA adapter (2 tensors: decoder.layers.self_attention.linear_qkv.adapter"),
        (rewritten(iteration, tmp_path / "peft",
                   lambda s: s | {"decoder.layers.0.mlp.linear_fc1.lora_A.default.weight": torch.zeros(8, 64)}),
         "holds a LoRA adapter (1 tensors"),
        (rewritten(iteration, tmp_path / "fsdp", lambda s: {f"model.module.{key}": value for key, value in s.items()}),
         "is in the format 'torch_dcp' of Megatron's FSDP2, or does not say that it is in 'fsdp_dtensor' "
         "(model.module.embedding.word_embeddings.weight)"),
        (rewritten(iteration, tmp_path / "dcp", lambda s: {f"model.{key}": value for key, value in s.items()}),
         "is in the format 'torch_dcp' of Megatron's FSDP2, or does not say that it is in 'fsdp_dtensor' "
         "(model.embedding.word_embeddings.weight)"),
        (legacy.parent, "is in Megatron's legacy format 'torch' (mp_rank_*)"),
        (hugging_face, "has its weights in Hugging Face's format, in actor/huggingface: name that directory"),
    ]  # fmt: skip
    for path, sentence in cases:
        with pytest.raises(ReshardError) as error:
            mcore_to_hf(path, tmp_path / "hf", hf_config=source)
        assert sentence in str(error.value) and "\n" not in str(error.value)


def test_a_run_config_that_names_a_hub_id_is_a_hint(saved, tmp_path):
    source, iteration = saved
    without_args = rewritten(iteration, tmp_path / "iteration", lambda state: state)
    [run, named] = bridge(source, without_args, tmp_path / "run")
    (named / "run_config.yaml").write_text("model:\n  hf_model_id: Qwen/Qwen3-0.6B\n")
    with pytest.raises(
        ReshardError, match="pass --hf-config .* such as Qwen/Qwen3-0.6B, with which its training began"
    ):
        inspect(run)
    notices = inspect(run, hf_config=source).notices
    assert "config taken" not in str(notices)
    assert "beside the weights, and not carried along: run_config.yaml" in notices
