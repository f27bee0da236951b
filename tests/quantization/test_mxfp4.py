"""gpt-oss as it is published, in mxfp4: each number is the one that transformers makes of codes and
scales."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Mxfp4Config
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from reshard import (
    MegatronLayout,
    ReshardError,
    check,
    diff,
    hf_to_mcore,
    inspect,
    mcore_to_hf,
    read_model,
)
from reshard.core.dtypes import DTYPES
from reshard.quantization.mxfp4 import Mxfp4
from reshard.quantization.scheme import StoredWeight
from reshard.trainers.fsdp import FsdpModel
from tests.starting.ranks import free_port, run_on_ranks
from tests.tools.oracle import hf_tensors, megatron_tensors, same, stored_tensors

LAYOUT = MegatronLayout(tp=2, pp=2, ep=4, etp=1)


@pytest.fixture
def published(checkpoint, tmp_path):
    """A small gpt-oss in the published form: all codes occur, under scales around those of trained
    weights."""
    source, folder = checkpoint("gpt-oss", dtype=torch.bfloat16), tmp_path / "published"
    folder.mkdir()
    tensors, generator = {}, torch.Generator().manual_seed(3)
    for name, tensor in load_file(source / "model.safetensors").items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[name] = tensor
            continue
        experts, columns, rows = tensor.shape
        shape = (experts, rows, columns // 32)
        tensors[name + "_blocks"] = torch.randint(
            0, 256, (*shape, 16), dtype=torch.uint8, generator=generator
        )
        tensors[name + "_scales"] = torch.randint(118, 123, shape, dtype=torch.uint8, generator=generator)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    quantized = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantized}, indent=2))
    (folder / "generation_config.json").write_bytes((source / "generation_config.json").read_bytes())
    return folder


def plain(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """These tensors with the experts in bf16, by transformers' own arithmetic."""
    stems = [name.removesuffix("_blocks") for name in tensors if name.endswith("_blocks")]
    numbers = {
        stem: convert_moe_packed_tensors(tensors[stem + "_blocks"], tensors[stem + "_scales"]).contiguous()
        for stem in stems
    }
    return numbers | {name: t for name, t in tensors.items() if not name.endswith(("_blocks", "_scales"))}


def rewritten(folder, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_the_checkpoint_holds_what_transformers_makes_of_the_codes(published, tmp_path):
    tensors = plain(hf_tensors(published))
    hf_to_mcore(published, tmp_path / "mcore", LAYOUT)
    expected = megatron_tensors(published, 1024, tensors)
    stored = stored_tensors(tmp_path / "mcore" / "release")
    assert (
        same({name: stored[name] for name in expected}, expected) == [] and stored.keys() == expected.keys()
    )
    # Controls: the comparison sees a matrix that is not transposed, and gates that are ups.
    fc1, fc2 = (f"decoder.layers.mlp.experts.experts.linear_{fc}.weight" for fc in ("fc1", "fc2"))
    for key, wrong in ((fc2, expected[fc2].mT), (fc1, expected[fc1].roll(64, dims=2))):
        assert same(stored, expected | {key: wrong.contiguous()}) == [key]

    mcore_to_hf(tmp_path / "mcore", tmp_path / "back", max_shard_size="200KB")
    assert same(tensors, hf_tensors(tmp_path / "back")) == []
    assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())
    assert diff(published, tmp_path / "mcore").equal and diff(published, tmp_path / "back").equal
    assert check(tmp_path / "mcore").ok and check(tmp_path / "back").ok
    assert inspect(published).parameters == inspect(tmp_path / "back").parameters


def test_transformers_loads_the_same_model_of_both_forms(published, tmp_path):
    hf_to_mcore(published, tmp_path / "mcore", LAYOUT)
    mcore_to_hf(tmp_path / "mcore", tmp_path / "back")
    theirs, ours = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **options).state_dict()
        for folder, options in (
            (published, {"quantization_config": Mxfp4Config(dequantize=True)}),
            (tmp_path / "back", {}),
        )
    )
    assert len(ours) > 60 and same(theirs, ours) == []


@pytest.mark.parametrize("what", ["scale", "code", "expert"])
def test_one_other_code_or_scale_shows(what, published, tmp_path):
    hf_to_mcore(published, tmp_path / "mcore", LAYOUT)
    name = "model.layers.2.mlp.experts.gate_up_proj"

    def change(tensors):
        if what == "scale":
            tensors[name + "_scales"][3, 5, 1] += 1
        elif what == "code":
            tensors[name + "_blocks"][3, 5, 1, 7] ^= 0x10
        else:
            for suffix in ("_blocks", "_scales"):
                tensors[name + suffix] = tensors[name + suffix].roll(1, 0)

    rewritten(published, change)
    report = diff(published, tmp_path / "mcore")
    experts = 1 if what != "expert" else 16
    assert not report.equal and len(report.differences) == experts


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
def test_every_byte_under_every_scale_is_what_transformers_makes_of_it(dtype):
    scales = torch.arange(255, dtype=torch.uint8).reshape(1, 255, 1)
    codes = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16).expand(1, 255, 16, 16)
    scales = scales.expand(1, 255, 16).contiguous()
    usable = slice(1, 253) if dtype != "float16" else slice(127 - 24, 127 + 13)
    numbers = convert_moe_packed_tensors(codes.contiguous(), scales, dtype=torch.float32)[0].T[usable]
    weight = StoredWeight("w", (1, 255, 512), Mxfp4(), ("w_blocks", "w_scales"))
    out = np.empty((255, 512), DTYPES[dtype].numpy())[usable]
    parts = codes[0].reshape(255, -1).numpy()[usable], scales[0].numpy()[usable]
    weight.decode(parts, 0, out, "here")
    wanted = numbers.to(getattr(torch, dtype)).float().numpy()
    assert np.array_equal(out.astype(np.float32), wanted)
    assert np.array_equal(np.signbit(out.astype(np.float32)), np.signbit(wanted))


def spoiled(what, tensors):
    name = "model.layers.1.mlp.experts.down_proj"
    if what == "NaN":
        tensors[name + "_scales"][0, 0, 0] = 255
    elif what == "too large":
        tensors[name + "_scales"][0, 0, 0] = 254
        tensors[name + "_blocks"][0, 0, 0] = 0x77
    elif what == "lacking":
        del tensors[name + "_scales"]
    elif what == "shape":
        tensors[name + "_scales"] = tensors[name + "_scales"][:, :-1].contiguous()
    elif what == "both":
        tensors[name] = torch.zeros(8, 64, 64, dtype=torch.bfloat16)


@pytest.mark.parametrize(("what", "sentence"), [
    ("NaN", "down_proj_scales holds 255, which is NaN and no scale"),
    ("too large", "down_proj_blocks has numbers that are too large for bfloat16"),
    ("lacking", "down_proj_blocks has no _scales beside it"),
    ("shape", "are not the uint8 codes of 32 columns and one scale for them"),
    ("both", "holds 1 that gpt_oss does not have: model.layers.1.mlp.experts.down_proj"),
])  # fmt: skip
def test_what_does_not_add_up_is_refused_and_leaves_nothing(what, sentence, published, tmp_path):
    rewritten(published, lambda tensors: spoiled(what, tensors))
    with pytest.raises(ReshardError, match=sentence):
        hf_to_mcore(published, tmp_path / "mcore", LAYOUT)
    assert not (tmp_path / "mcore").exists()


def test_a_config_with_more_experts_than_the_files_can_hold_is_refused_before_they_are_listed(published):
    config = json.loads((published / "config.json").read_text())
    (published / "config.json").write_text(json.dumps(config | {"num_local_experts": 40_000}))
    with pytest.raises(ReshardError, match="says 160,000 experts in all layers, but the files hold only"):
        hf_to_mcore(published, published.parent / "never")


def test_experts_in_codes_are_not_written(published, tmp_path):
    hf_to_mcore(published, tmp_path / "mcore", LAYOUT)
    with pytest.raises(
        ReshardError, match="--quantize fp8: a GptOssForCausalLM is written in bf16, fp16 or fp32"
    ):
        mcore_to_hf(tmp_path / "mcore", tmp_path / "back", quantize="fp8")
    assert not (tmp_path / "back").exists()


def test_an_engine_that_serves_the_codes_is_not_refitted(published, tmp_path):
    """vLLM packs them for its kernels. It is refitted where it serves the same model in bf16."""
    sides = {"trainer": 1, "engine": 1, "together": True, "folder": str(tmp_path), "port": free_port()}
    arguments = sides, str(published), [], False, {}, ""
    [(said, ready)] = run_on_ranks(1, "of_a_table_without", *arguments, module="refit_on_cpu")
    assert "serves from weights that GptOssMxfp4MoEMethod has changed" in said and not ready


def test_a_trainer_that_has_the_experts_transposed_is_refused(checkpoint):
    source = checkpoint("gpt-oss", dtype=torch.bfloat16)
    trainer = FsdpModel(AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16))
    with pytest.raises(ReshardError, match="holds the experts of a GptOssForCausalLM transposed"):
        trainer.publish(read_model(str(source)))
