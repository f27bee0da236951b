"""Optimizer states of every kind of layer lie where their parameters do, number by number: each state here is
twice its parameter and 1."""

import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp

from reshard import MegatronLayout, check, hf_to_mcore, mcore_to_mcore
from tests.tools.oracle import same, stored_tensors

FORM = {"transformer_impl": "local", "make_vocab_size_divisible_by": 8}
CASES = [
    ("deepseek-v3", {"mtp": True}, MegatronLayout(tp=2, pp=2, ep=2, etp=1), "hybrid"),
    ("qwen3-next", {}, MegatronLayout(tp=2, ep=2, etp=1), "hybrid"),
    ("qwen2-tied", {}, MegatronLayout(pp=2), "hybrid"),
    ("glm4-moe", {}, MegatronLayout(pp=2, ep=2, etp=1), "hybrid"),
    ("gpt-oss", {}, MegatronLayout(tp=2, pp=2, ep=2, etp=1), "gpt"),
]  # fmt: skip


def state_of(key: str) -> str:
    return f"optimizer.state.exp_avg.{key}"


def as_trained(directory, weights):
    """Make a training's checkpoint of a converted one, saved by torch."""
    states = {
        state_of(key): 2 * tensor.float() + 1 for key, tensor in weights.items() if "expert_bias" not in key
    }
    (directory / "reshard.json").unlink()
    iteration = directory / "iter_0000005"
    for path in iteration.glob("*.distcp"):
        path.unlink()
    dcp.save(weights | states, storage_writer=dcp.FileSystemWriter(str(iteration)), no_dist=True)
    common = torch.load(iteration / "common.pt", weights_only=False)
    common["optimizer"] = {
        "optimizer": {"param_groups": [{"is_expert_parallel": False, "wd_mult": 1.0, "step": 5}]}
    }
    torch.save(common, iteration / "common.pt")
    return states


@pytest.mark.parametrize(("variant", "options", "layout", "model_class"), CASES, ids=lambda v: str(v))
def test_each_state_lies_where_its_parameter_does(
    variant, options, layout, model_class, checkpoint, tmp_path
):
    source = checkpoint(variant, **options)
    hf_to_mcore(source, tmp_path / "trained", iteration=5, **FORM)
    weights = stored_tensors(tmp_path / "trained" / "iter_0000005")
    states = as_trained(tmp_path / "trained", weights)
    form = FORM | {"model_class": model_class, "make_vocab_size_divisible_by": 8 // layout.tp}  # 1000 rows
    mcore_to_mcore(tmp_path / "trained", tmp_path / "moved", layout, **form)
    mcore_to_mcore(tmp_path / "moved", tmp_path / "back", **FORM)
    moved, back = (stored_tensors(tmp_path / name / "iter_0000005") for name in ("moved", "back"))
    of_weights = {key for key in moved if not key.startswith("optimizer.")}
    with_state = {key for key in of_weights if "expert_bias" not in key}
    assert moved.keys() == of_weights | {state_of(key) for key in with_state}
    assert [k for k in with_state if not torch.equal(moved[state_of(k)], 2 * moved[k].float() + 1)] == []
    assert same(weights | states, back) == []
    assert check(tmp_path / "moved").ok and check(tmp_path / "back").ok


def test_a_state_that_lies_elsewhere_is_seen(checkpoint, tmp_path):
    """The control: of a model with other weights."""
    hf_to_mcore(checkpoint("qwen2-tied"), tmp_path / "trained", iteration=5, **FORM)
    weights = stored_tensors(tmp_path / "trained" / "iter_0000005")
    key = next(key for key in weights if "linear_qkv.weight" in key)
    shutil.copytree(tmp_path / "trained", tmp_path / "other")
    as_trained(tmp_path / "other", weights | {key: weights[key].flip(-2)})
    mcore_to_mcore(tmp_path / "other", tmp_path / "moved", MegatronLayout(tp=2), **FORM)
    moved = stored_tensors(tmp_path / "moved" / "iter_0000005")
    assert torch.equal(moved[state_of(key)], 2 * moved[key].float() + 1)
    assert not torch.equal(moved[state_of(key)], 2 * weights[key].float() + 1)
