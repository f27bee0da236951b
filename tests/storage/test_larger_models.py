"""Checkpoints of larger models on disk, whose tower is made of Megatron's layers: whose number of heads says how its
rows lie, adapters beside it, and optimizer states."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from megatron.training.config.yaml_utils import safe_yaml_representers
from safetensors.torch import load_file
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig

from reshard import (
    ReshardError,
    diff,
    digest,
    hf_to_mcore,
    inspect,
    lora_merge,
    lora_to_peft,
    mcore_to_hf,
    mcore_to_mcore,
)
from tests.tools.larger_files import keys_of, keys_of_larger, write
from tests.tools.model_classes import make
from tests.tools.oracle import hf_tensors

PROJ = "decoder.layers.self_attention.linear_proj"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The directory of a larger model, a checkpoint of its language model, and the keys of all of it."""
    folder = tmp_path_factory.mktemp("larger")
    make(folder / "hf", "Qwen3VLForConditionalGeneration", 0)
    hf_to_mcore(folder / "hf", folder / "mcore", transformer_impl="local")
    return folder / "hf", folder / "mcore", keys_of_larger(folder / "hf", folder / "mcore")


def adapter(prefix: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """An adapter of a stack of weights, as Megatron-Bridge has it."""
    layers, rows, columns = weight.shape
    shapes = {"in": (layers, 4, columns), "out": (layers, rows, 4)}
    return {f"{prefix}.adapter.linear_{n}.weight": torch.randn(s).to(weight.dtype) for n, s in shapes.items()}


def test_an_adapter_of_the_language_model_in_a_larger_one_is_converted_and_merged(made, tmp_path):
    hf, mcore, keys = made
    own = adapter(f"language_model.{PROJ}", keys[f"language_model.{PROJ}.weight"])
    published = "model.language_model.layers.{}.self_attn.o_proj"
    matrices = [
        (
            published.format(layer),
            *(own[f"language_model.{PROJ}.adapter.linear_{n}.weight"][layer] for n in ("in", "out")),
        )
        for layer in range(2)
    ]
    # Alone, beside its base, and as a text model has it: the control of what is read today.
    for name, tensors in (("alone", own), ("beside", keys | own),
                          ("text", {key.removeprefix("language_model."): t for key, t in own.items()})):  # fmt: skip
        trained = write(tmp_path / name, mcore, tensors)
        report = lora_to_peft(trained, tmp_path / f"{name}-peft", hf_config=hf / "config.json", alpha=8)
        assert not any("of the tower" in notice for notice in report.notices)
        got = load_file(tmp_path / f"{name}-peft" / "adapter_model.safetensors")
        assert len(got) == 4
        for module, a, b in matrices:
            assert torch.equal(got[f"base_model.model.{module}.lora_A.weight"], a)
            assert torch.equal(got[f"base_model.model.{module}.lora_B.weight"], b)
    lora_merge(hf, tmp_path / "alone", tmp_path / "merged", alpha=8)
    before, after = hf_tensors(hf), hf_tensors(tmp_path / "merged")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {f"{module}.weight" for module, _, _ in matrices}
    for module, a, b in matrices:
        weight = before[f"{module}.weight"]
        expected = weight.float() + 2 * (b.float() @ a.float())
        assert torch.allclose(after[f"{module}.weight"].float(), expected, rtol=2**-7, atol=2**-7)
    with pytest.raises(ReshardError, match="reshard lora-to-peft"):  # which now does it
        mcore_to_hf(tmp_path / "beside", tmp_path / "never", hf_config=hf / "config.json")
    mcore_to_hf(tmp_path / "beside", tmp_path / "base", hf_config=hf / "config.json", without_adapters=True)
    assert diff(hf, tmp_path / "base").equal


@pytest.mark.parametrize(
    "of_tower", ["vision_model.decoder.layers.self_attention.linear_proj", "visual.visual"]
)
def test_an_adapter_of_a_tower_is_refused_by_name(of_tower, made, tmp_path):
    hf, mcore, keys = made
    weight = keys[f"language_model.{PROJ}.weight"]
    both = adapter(of_tower, weight) | adapter(f"language_model.{PROJ}", weight)
    trained = write(tmp_path / "trained", mcore, both)
    for convert in (
        lambda: lora_to_peft(trained, tmp_path / "out", hf_config=hf / "config.json", alpha=8),
        lambda: lora_merge(hf, trained, tmp_path / "out", alpha=8),
    ):
        with pytest.raises(ReshardError, match=r"holds an adapter of the tower .* \(2 tensors: vis"):
            convert()
    assert not (tmp_path / "out").exists()


def test_optimizer_states_of_a_larger_model_are_refused_by_name_and_its_weights_moved(made, tmp_path):
    hf, mcore, keys = made

    def with_states(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return tensors | {f"optimizer.state.{kind}.{key}": tensor.float()
                          for key, tensor in tensors.items() for kind in ("exp_avg", "exp_avg_sq")}  # fmt: skip

    config = {"hf_config": hf / "config.json"}
    larger = write(tmp_path / "larger", mcore, with_states(keys))
    with pytest.raises(
        ReshardError, match="format regular, of a larger model, .* or pass --without-optimizer for the"
    ):
        mcore_to_mcore(larger, tmp_path / "moved", **config)
    assert "of a larger model" in inspect(larger, **config).details["optimizer"]
    compared = diff(larger, larger, **config)
    assert compared.equal and "optimizer states were not compared" in str(compared.notices)
    mcore_to_mcore(larger, tmp_path / "moved", **config, without_optimizer=True)
    mcore_to_hf(tmp_path / "moved", tmp_path / "back")
    assert diff(hf, tmp_path / "back").equal
    # The control: those of the language model alone are not refused for that.
    text = write(tmp_path / "text", mcore, with_states(keys_of(mcore)))
    assert "moved by mcore-to-mcore" in inspect(text, **config).details["optimizer"]


def run_configs(vision: dict) -> list[str]:
    """What Megatron-Bridge leaves beside a checkpoint of a model with this tower: written by Megatron's own
    representers, and with the fields in place, as its version 0.6 has them."""
    config = Qwen3VLVisionConfig(**vision)
    target = {"_target_": f"{Qwen3VLVisionConfig.__module__}.Qwen3VLVisionConfig"}
    models = [{"vision_config": config}, {"vision_config": target | config.to_dict()}]
    others = {"num_heads": 7, "hidden_size": 64, "activation_func": abs, "z": [1]}
    with safe_yaml_representers():
        return [yaml.safe_dump({"model": others | model, "train": {"num_heads": 9}}) for model in models]


def test_the_heads_of_a_tower_are_those_of_its_training_or_a_notice_says_that_nothing_compares(
    made, tmp_path
):
    hf, mcore, keys = made
    config = json.loads((hf / "config.json").read_text())
    heads = config["vision_config"]["num_heads"]

    def changed(name: str, **change) -> Path:
        path = tmp_path / name / "config.json"
        path.parent.mkdir()
        path.write_text(json.dumps(config | {"vision_config": config["vision_config"] | change}))
        return path

    alone = write(tmp_path / "alone", mcore, keys)
    said = f"in order for the {heads} heads that"
    report = mcore_to_hf(alone, tmp_path / "out", hf_config=hf / "config.json")
    assert [said in notice for notice in report.notices].count(True) == 1
    assert diff(hf, tmp_path / "out").equal
    settings = {"hf_config": hf / "config.json"}
    compared, number = diff(tmp_path / "out", alone, **settings), digest(alone, **settings)
    assert compared.equal and number.text == digest(hf).text
    assert all(any(said in notice for notice in each.notices) for each in (compared, number))
    # The control: what the heads of another config make of it, which the notice says.
    report = mcore_to_hf(alone, tmp_path / "other", hf_config=changed("more", num_heads=2 * heads))
    assert any(f"the {2 * heads} heads that" in notice for notice in report.notices)
    differing = {each.name.split(".attn.")[-1] for each in diff(hf, tmp_path / "other").differences}
    assert differing == {"qkv.weight", "qkv.bias"}
    order = config["vision_config"]["deepstack_visual_indexes"][::-1]
    for number, text in enumerate(run_configs(config["vision_config"])):
        trained = write(tmp_path / f"trained-{number}", mcore, keys)
        (trained / "release" / "run_config.yaml").write_text(text)
        report = mcore_to_hf(trained, tmp_path / f"out-{number}", hf_config=hf / "config.json")
        assert not any("heads that" in notice for notice in report.notices)
        assert diff(hf, tmp_path / f"out-{number}").equal
        for name, value in (("num_heads", 1), ("hidden_act", "gelu"), ("deepstack_visual_indexes", order)):
            other = changed(f"{name}-{number}", **{name: value})
            with pytest.raises(ReshardError, match=f"run_config.yaml says that the tower has {name} "):
                mcore_to_hf(trained, tmp_path / "never", hf_config=other)
