"""A gate lists what it did not look at: tensors that are noise in one side, and that no logprob shows."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from reshard import MegatronLayout, hf_to_mcore, inspect
from tests.tools.parity_runs import run


def spoiled(hf, mcore, belongs):
    """Make a Megatron checkpoint of a directory with noise in the tensors that `belongs` names."""
    for file in hf.glob("*.safetensors"):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            if belongs(name):
                tensors[name] = torch.randn_like(tensor.float()).to(tensor.dtype)
        save_file(tensors, file, metadata={"format": "pt"})
    hf_to_mcore(hf, mcore, MegatronLayout(), transformer_impl="local")


@pytest.mark.parametrize("variant", ["deepseek-v3", "qwen3-next"])
def test_noise_in_an_mtp_layer_passes_and_is_named(variant, checkpoint, tmp_path):

    hf = checkpoint(variant, mtp=True)
    shutil.copytree(hf, tmp_path / "noise")
    names = set(inspect(hf).tensors)
    prefix = {"deepseek-v3": "model.layers.4.", "qwen3-next": "mtp."}[variant]
    repeated = ("embed_tokens.weight", "shared_head.head.weight")  # which Megatron holds once
    of_mtp = {name for name in names if name.startswith(prefix) and not name.endswith(repeated)}
    assert len(of_mtp) > 10
    spoiled(tmp_path / "noise", tmp_path / "mcore", of_mtp.__contains__)
    report = run(hf, tmp_path / "mcore", prompts=8, lengths=(64,))
    assert report["ok"] and of_mtp <= set(report["not_looked_at"])
    assert all(".experts." in name for name in {*report["not_looked_at"]} - of_mtp)


def test_experts_that_no_token_chose_are_named(checkpoint):
    hf = checkpoint("qwen3-moe")
    report = run(hf, hf, prompts=[[5, 6]], routing=True)
    experts = {name for name in inspect(hf).tensors if ".experts." in name}
    unseen = set(report["not_looked_at"])
    assert unseen and unseen < experts, "one token goes to some experts of a layer"
    assert run(hf, hf, prompts=16, lengths=(64,))["not_looked_at"] == []
