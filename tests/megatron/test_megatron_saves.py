"""Checkpoints that Megatron-Core's own ``dist_checkpointing.save`` wrote, back to Hugging Face."""

import json
import pickle
import shutil

import pytest
import torch

from reshard import ReshardError, diff, hf_to_mcore, inspect, mcore_to_hf
from reshard.formats import pickles
from reshard.models.family import families
from tests.megatron.test_logits import EP, ETP, PP, TP, VPP, flags_at
from tests.starting.ranks import run_on_ranks
from tests.tools.checkpoints import VARIANTS
from tests.tools.oracle import hf_tensors, same

SAVED = [
    ("llama", f"{TP} 2 {PP} 2", 4),
    ("llama-bias", f"{TP} 4", 4),
    ("llama-rope-tied", f"{TP} 2 {PP} 2", 4),
    ("qwen2", f"{PP} 2 {VPP} 2", 2),
    ("qwen2-tied", f"{TP} 4", 4),
    ("qwen3", f"{TP} 2 {PP} 2 --decoder-first-pipeline-num-layers 1", 4),
    ("qwen3-moe", f"{TP} 2 {EP} 2 {ETP} 2", 4),
    ("qwen3-moe-mixed", f"{TP} 2 {PP} 2 {EP} 2 {ETP} 1", 4),
    ("deepseek-v3", f"{TP} 2 {PP} 2 {EP} 2 {ETP} 1", 4),
    ("deepseek-v3-no-q-lora", f"{TP} 2 {EP} 2 {ETP} 1", 2),
    ("glm4-moe", f"{TP} 2 {EP} 2 {ETP} 1", 2),
    ("glm4-moe-air", f"{TP} 2", 2),
    ("mixtral", f"{PP} 2 {VPP} 2 {EP} 2 {ETP} 1", 4),
    ("seed-oss", f"{TP} 4", 4),
    ("phi4", f"{TP} 4", 4),
    ("qwen2-moe-mixed", f"{TP} 4 {EP} 2 {ETP} 2", 4),
    ("minimax-m2", f"{TP} 4 {EP} 2 {ETP} 2", 4),
    ("olmoe", f"{TP} 2 {EP} 2 {ETP} 1", 2),
    ("dots1", f"{TP} 4 {EP} 2 {ETP} 2", 4),
    ("ling", f"{TP} 4 {EP} 2 {ETP} 2", 4),
    ("ernie", f"{TP} 2 {EP} 2 {ETP} 1", 2),
    ("gpt-oss", f"{TP} 2 {EP} 2 {ETP} 1", 2),
    ("deepseek-v32", f"{EP} 2 {ETP} 1", 2),
    ("glm-moe-dsa-shared", f"{PP} 2", 2),
]


def saved_by_megatron(source, folder, parallel, ranks, **options):
    """Save a model of these weights with Megatron's code; the directory that ``--load`` would take."""
    hf_to_mcore(source, folder / "ours", transformer_impl="local")
    (folder / "theirs" / "iter_0000007").mkdir(parents=True)
    run_on_ranks(
        ranks,
        "load_and_save",
        flags_at(folder / "ours", parallel),
        str(folder / "ours"),
        str(folder / "theirs" / "iter_0000007"),
        *options.values(),
    )
    (folder / "theirs" / "latest_checkpointed_iteration.txt").write_text("7")
    return folder / "theirs"


@pytest.mark.parametrize(
    ("variant", "parallel", "ranks"), SAVED, ids=lambda v: str(v).replace("-model-parallel-size", "")
)
def test_what_megatron_saves_becomes_the_hugging_face_tensors(variant, parallel, ranks, checkpoint, tmp_path):
    """With the config beside it, and without: then a training's checkpoint says it by its args."""
    source = checkpoint(variant)
    theirs = saved_by_megatron(source, tmp_path, parallel, ranks, training=True)
    mcore_to_hf(theirs, tmp_path / "back", hf_config=source)
    assert (tmp_path / "back" / "generation_config.json").read_bytes() == (
        source / "generation_config.json"
    ).read_bytes()
    assert same(hf_tensors(source), hf_tensors(tmp_path / "back")) == []
    # A family whose arguments are another's has to be named.
    kind = VARIANTS[variant].model_type
    family = None if families()[kind].identifies else kind
    assert diff(source, theirs).equal
    assert diff(theirs, tmp_path / "ours", hf_config=family and source).equal
    mcore_to_hf(theirs, tmp_path / "by args", family=family)
    assert same(hf_tensors(source), hf_tensors(tmp_path / "by args")) == []
    assert unlike(source, tmp_path / "by args") == {}


def unlike(source, back) -> dict:
    """What a config that Megatron's args stand in for says otherwise, that is not what they leave out and
    changes nothing."""
    from transformers import AutoConfig

    ours, wanted = (AutoConfig.from_pretrained(d).to_dict() for d in (back, source))
    left_out = {"initializer_range", "transformers_version", "dtype", "_name_or_path", "bos_token_id", "eos_token_id",
                "pad_token_id", "auto_map"}  # fmt: skip
    if wanted.get("head_dim") is None:  # which means the quotient
        left_out.add("head_dim")
    return {k: (ours.get(k), wanted[k]) for k in wanted.keys() - left_out if ours.get(k) != wanted[k]}


@pytest.mark.parametrize(
    "variant", ["qwen3", "qwen3-moe", "deepseek-v3", "glm4-moe-air", "minimax-m2", "gpt-oss"]
)
def test_the_singleton_scheme_of_keys_is_read(variant, checkpoint, tmp_path):
    source = checkpoint(variant)
    theirs = saved_by_megatron(source, tmp_path, f"{TP} 2 {ETP} 1", 2, training=False, singleton=True)
    keys = pickle.loads((theirs / "iter_0000007" / ".metadata").read_bytes()).state_dict_metadata
    assert any(key.endswith("linear_fc1.weight_w") for key in keys)
    mcore_to_hf(theirs, tmp_path / "back", hf_config=source)
    assert same(hf_tensors(source), hf_tensors(tmp_path / "back")) == []


@pytest.mark.parametrize("variant", ["deepseek-v3", "glm4-moe"])
def test_mtp_parameters_load_and_save(variant, checkpoint, tmp_path):
    source = checkpoint(variant, mtp=True)
    theirs = saved_by_megatron(source, tmp_path, f"{TP} 2 {PP} 2 {EP} 2 {ETP} 1", 4)
    mcore_to_hf(theirs, tmp_path / "back", hf_config=source)
    assert same(hf_tensors(source), hf_tensors(tmp_path / "back")) == []


def test_a_training_checkpoint_gives_its_weights_and_says_what_is_left_out(checkpoint, tmp_path):
    source = checkpoint("llama")
    theirs = saved_by_megatron(source, tmp_path, f"{TP} 2 {PP} 2", 4, training=True)
    report = mcore_to_hf(theirs, tmp_path / "back", hf_config=source / "config.json")
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == json.loads(
        (source / "config.json").read_text()
    )
    assert same(hf_tensors(source), hf_tensors(tmp_path / "back")) == []
    told = " ".join(report.notices)
    assert "optimizer state" in told and "RNG state" in told and "Transformer Engine state" in told


def test_without_args_and_config_the_error_says_what_to_pass(checkpoint, tmp_path):
    hf_to_mcore(checkpoint("qwen3"), tmp_path / "mcore")
    shutil.rmtree(tmp_path / "mcore" / "hf")
    (tmp_path / "mcore" / "release" / "common.pt").unlink()
    with pytest.raises(ReshardError, match="pass --hf-config"):
        mcore_to_hf(tmp_path / "mcore", tmp_path / "back")


def test_both_spellings_of_the_norms_are_read(checkpoint, tmp_path):
    source = checkpoint("qwen3-moe")
    for impl, key in (
        ("local", "decoder.layers.mlp.linear_fc1.layer_norm_weight"),
        ("transformer_engine", "decoder.layers.pre_mlp_layernorm.weight"),
    ):
        hf_to_mcore(source, tmp_path / impl, transformer_impl=impl)
        assert (
            key in pickle.loads((tmp_path / impl / "release" / ".metadata").read_bytes()).state_dict_metadata
        )
        mcore_to_hf(tmp_path / impl, tmp_path / f"{impl}-back")
        assert same(hf_tensors(source), hf_tensors(tmp_path / f"{impl}-back")) == []


def test_a_path_is_read_as_python_3_13_names_its_class():
    """torch's metadata has the path that it was written to."""
    for module in ("pathlib", "pathlib._local"):
        found = pickles.load(pickles.dump(pickles.call(module, "PosixPath", "a", "b")), "here")
        assert (found.module, found.name, found.args) == (module, "PosixPath", ("a", "b"))
    with pytest.raises(ReshardError, match="refers to pathlib._local.WindowsPath"):
        pickles.load(pickles.dump(pickles.call("pathlib._local", "WindowsPath", "a")), "here")


def test_an_unknown_parameter_is_refused_by_name(checkpoint, tmp_path):
    """A vision tower, say, in a checkpoint of a text model."""
    import torch.distributed.checkpoint as dcp

    hf_to_mcore(checkpoint("qwen3"), tmp_path / "mcore")
    release = tmp_path / "mcore" / "release"
    reader = dcp.FileSystemReader(str(release))
    state = {
        k: torch.empty(e.size, dtype=e.properties.dtype)
        for k, e in reader.read_metadata().state_dict_metadata.items()
        if hasattr(e, "size")
    }
    dcp.load(state, storage_reader=reader, no_dist=True)
    state["vision_model.conv1.weight"] = torch.zeros(3)
    for path in release.glob("*.distcp"):
        path.unlink()
    dcp.save(state, storage_writer=dcp.FileSystemWriter(str(release)), no_dist=True)
    with pytest.raises(ReshardError, match=r"does not have: vision_model\.conv1\.weight"):
        mcore_to_hf(tmp_path / "mcore", tmp_path / "back")


def test_inspect_names_layout_and_iteration_of_a_megatron_checkpoint(checkpoint, tmp_path):
    theirs = saved_by_megatron(checkpoint("qwen3-moe"), tmp_path, f"{TP} 2 {EP} 2 {ETP} 1", 2)
    found = inspect(theirs).to_dict()
    assert (
        found["details"]["iteration"] == "iter_0000007"
        and found["family"] == "qwen3_moe"
        and found["manifest"] is None
    )
    assert found["layout"] == {"tp": 2, "pp": 1, "ep": 2, "etp": 1, "gtp": 1, "egtp": 1}
    assert json.loads(json.dumps(found)) == found
