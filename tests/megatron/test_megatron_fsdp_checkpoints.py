"""Checkpoints of Megatron-FSDP, saved by Megatron's own code from real models under its wrapper: bit for bit the model
that was loaded into it."""

import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from reshard import MegatronLayout, ReshardError, diff, hf_to_mcore, inspect, mcore_to_hf, mcore_to_mcore
from reshard.formats import torch_dist
from tests.starting.ranks import run_on_ranks
from tests.tools.checkpoints import make
from tests.tools.oracle import hf_tensors, megatron_tensors, same, stored_tensors

CASES = {
    "qwen3": ({"tp": 2}, 4),
    "qwen3-moe-mixed": ({"ep": 2}, 4),
    "deepseek-v3": ({}, 2),
    "llama-rope-tied": ({}, 3),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return a function from a variant to its directory and that of what Megatron-FSDP saved of it."""
    made = {}

    def get(variant: str):
        if variant not in made:
            folder, (layout, ranks) = tmp_path_factory.mktemp(variant), CASES[variant]
            source = make(folder / "hf", variant, torch.float32)
            hf_to_mcore(source, folder / "mcore", MegatronLayout(**layout), transformer_impl="local")
            flags = (folder / "mcore" / "megatron_flags.txt").read_text().split()
            places = (str(folder / "mcore"), str(folder / "saved"))
            run_on_ranks(ranks, "save", flags, *places, module="megatron_fsdp_on_cpu")
            made[variant] = source, folder / "saved"
        return made[variant]

    return get


@pytest.mark.parametrize("variant", CASES)
def test_what_megatron_fsdp_saves_is_the_model_in_both_formats(variant, saved, tmp_path):
    source, directory = saved(variant)
    mcore_to_hf(directory, tmp_path / "hf", hf_config=source)
    made, published = hf_tensors(tmp_path / "hf"), hf_tensors(source)
    if variant == "deepseek-v3":  # its MTP layer, which the model of the test has not
        published = {n: t for n, t in published.items() if n in made}
    assert same(made, published) == [] and diff(directory, tmp_path / "hf", hf_config=source).equal
    refused = {"hf_config": source, "layout": MegatronLayout(tp=2)}
    with pytest.raises(ReshardError, match="fsdp_dtensor.*--without-optimizer"):
        mcore_to_mcore(directory, tmp_path / "never", **refused)
    mcore_to_mcore(directory, tmp_path / "mcore", without_optimizer=True, **refused)
    stored = stored_tensors(tmp_path / "mcore" / "release")
    assert same(stored, megatron_tensors(source, 1024)) == []
    shown = inspect(directory, hf_config=source)
    assert shown.details["saved_by"] == "Megatron-FSDP (fsdp_dtensor)" and "optimizer" in str(shown.notices)


def test_other_keys_of_megatron_fsdp_and_damage(saved, tmp_path):
    """Transformer Engine's grouped experts are numbered at the end of their names."""
    source, directory = saved("qwen3-moe-mixed")
    changed = tmp_path / "changed"
    shutil.copytree(directory, changed)
    dcp_to_torch_save(changed / "iter_0000007", tmp_path / "whole.pt")
    state = torch.load(tmp_path / "whole.pt", weights_only=False)
    weights, grouped = state["model"], {}
    for name, tensor in weights.items():
        before, found, rest = name.partition("local_experts.")
        number, _, module = rest.partition(".")
        linear, _, half = module.partition(".weight")
        grouped[f"{before}{linear}.weight{number}{half}" if found else name] = tensor
    assert any(name.endswith("mlp.experts.linear_fc1.weight7_v") for name in grouped)

    def refused(sentence: str, model: dict, **args) -> None:
        kept = type(state["args"])(**(vars(state["args"]) | args))
        shutil.rmtree(tmp_path / "other", ignore_errors=True)
        dcp.save(
            {"model": model, "args": kept, "iteration": 7}, checkpoint_id=tmp_path / "other", no_dist=True
        )
        if sentence:
            with pytest.raises(ReshardError, match=sentence):
                mcore_to_hf(tmp_path / "other", tmp_path / "never", hf_config=source)
        else:
            assert diff(tmp_path / "other", source, hf_config=source).equal

    refused("", grouped)
    first = next(name for name in grouped if name.endswith("weight3_w"))
    refused("lacks 1 parameters", {name: t for name, t in grouped.items() if name != first})
    refused("holds 1 parameters that", grouped | {"module.decoder.more.weight": torch.ones(2)})
    refused("'torch_dcp' of Megatron's FSDP2", grouped, ckpt_format="torch_dcp")
    checkpoint = torch_dist.read(changed / "iter_0000007")
    chunks = checkpoint.keys["model.module.decoder.layers.1.self_attention.linear_qkv.weight"].chunks
    stored = chunks[max(chunks)]
    tensor, path = checkpoint.tensor_at(stored), changed / "iter_0000007" / stored.file
    data = bytearray(path.read_bytes())
    data[tensor.offset] ^= 1
    path.write_bytes(data)
    found = diff(changed, source, hf_config=source)
    assert [each.name for each in found.differences] == ["model.layers.1.self_attn.v_proj.weight"]
    path.unlink()
    with pytest.raises(ReshardError, match=f"lacks the files {stored.file}"):
        mcore_to_hf(changed, tmp_path / "never", hf_config=source)
