"""LoRA adapters of every family: merged as PEFT merges them, whatever PEFT's own choice of layers is."""

import copy
import json
import re
import shutil
from pathlib import Path

import peft
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

from reshard import ReshardError, inspect, lora_merge, lora_to_megatron, lora_to_peft
from tests.lora.test_lora_experts import furthest
from tests.lora.test_lora_files import model_of
from tests.tools.checkpoints import VARIANTS
from tests.tools.oracle import hf_tensors, same

BEFORE_0_19 = tuple(map(int, peft.__version__.split(".")[:2])) < (0, 19)


def random_adapter(model, folder: Path, **settings) -> Path:
    """An adapter of a model in memory, of random numbers in every A and B, saved by PEFT."""
    peft = get_peft_model(copy.deepcopy(model), LoraConfig(r=3, lora_alpha=7, **settings))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    peft.save_pretrained(folder)
    return folder


def merged_by_peft(model, of: Path, folder: Path) -> dict[str, torch.Tensor]:
    PeftModel.from_pretrained(copy.deepcopy(model), of).merge_and_unload().save_pretrained(folder)
    return hf_tensors(folder)


def targets_of(model) -> dict[str, dict]:
    """What PEFT is told to adapt, by name: all linear layers, and the parameters of all experts."""
    experts = sorted(
        {name.split(".", 3)[-1] for name, p in model.named_parameters() if p.ndim == 3 and "experts" in name}
    )
    linear: str | list[str] = "all-linear"
    if model.config.model_type == "nemotron_h":  # PEFT has no adapter of out_proj beside Mamba's kernels
        ends = {
            name.rpartition(".")[2] for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)
        }
        linear = sorted(ends - {"lm_head", "out_proj"})
    found = {"all-linear": dict(target_modules=linear)}
    if experts:
        found["experts"] = dict(target_modules=[], target_parameters=experts)
        found["attention-and-experts"] = dict(target_modules=["o_proj"], target_parameters=experts)
    return found


PARTS = {"gate_proj": 0, "w1": 0, "up_proj": 1, "w3": 1}


def each_expert_apart(of: Path, base: dict[str, torch.Tensor], folder: Path) -> Path:
    """The same adapter with a pair for each published weight of an expert, cut by hand out of those of all experts."""
    together = load_file(of / "adapter_model.safetensors")
    rank = json.loads((of / "adapter_config.json").read_text())["r"]
    apart = {name: value for name, value in together.items() if ".experts." not in name}
    of_layer: dict[tuple[str, bool], str] = {}
    for name in together:
        if ".experts." in name and ".lora_A" in name:
            of_layer[name.split("layers.")[1].split(".")[0], ".base_layer." in name] = name
    for weight in base:
        match = re.fullmatch(r".*layers\.(\d+)\..*\.experts\.(\d+)\.(\w+)\.weight", weight)
        if match is None:
            continue
        expert, part = int(match[2]), match[3]
        # PEFT wraps a module once more for down_proj, above what it has of gate and up.
        a = together[of_layer[match[1], part in PARTS]]
        b = together[of_layer[match[1], part in PARTS].replace("lora_A", "lora_B")]
        b = b.reshape(len(b), rank, -1)[:, :, expert]
        if len(b) != len(base[weight]):
            b = b.chunk(2)[PARTS[part]]
        module = f"base_model.model.{weight.removesuffix('.weight')}"
        apart[f"{module}.lora_A.weight"] = a[expert * rank : (expert + 1) * rank].clone()
        apart[f"{module}.lora_B.weight"] = b.contiguous()
    folder.mkdir()
    (folder / "adapter_config.json").write_bytes((of / "adapter_config.json").read_bytes())
    save_file(apart, folder / "adapter_model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("family", VARIANTS)
def test_an_adapter_of_every_layer_that_peft_adapts_is_merged_as_peft_merges_it(family, checkpoint, tmp_path):
    source = checkpoint(family)
    model, base = model_of(source), hf_tensors(source)
    for kind, settings in targets_of(model).items():
        of = random_adapter(model, tmp_path / kind, **settings)
        theirs = merged_by_peft(model, of, tmp_path / f"{kind}-theirs")
        try:
            lora_merge(source, of, tmp_path / f"{kind}-ours", sync=False)
        except ReshardError as error:  # its files do not say which of two forms theirs are
            assert BEFORE_0_19 and "are as PEFT before 0.19 has those of" in str(error), kind
            continue
        ours = hf_tensors(tmp_path / f"{kind}-ours")
        assert furthest(ours, theirs, base) < 1e-5, kind
        changed = [name for name, value in base.items() if not torch.equal(ours[name], value)]
        assert len(changed) >= len(load_file(of / "adapter_model.safetensors")) // 2, kind
        if any(".experts.0." in name for name in base) and "target_parameters" in settings:
            apart = each_expert_apart(of, base, tmp_path / f"{kind}-apart")
            lora_merge(source, apart, tmp_path / f"{kind}-apart-ours", sync=False)
            assert same(ours, hf_tensors(tmp_path / f"{kind}-apart-ours")) == [], kind
        # The control: a merge of all but one pair is not taken for PEFT's.
        pairs = load_file(of / "adapter_model.safetensors")
        pairs[next(name for name in reversed(pairs) if ".lora_B." in name)].zero_()
        save_file(pairs, of / "adapter_model.safetensors", {"format": "pt"})
        lora_merge(source, of, tmp_path / f"{kind}-control", sync=False)
        assert furthest(hf_tensors(tmp_path / f"{kind}-control"), theirs, base) > 0.01, kind


NO_PLACE = "train without, or add it to the model with reshard lora-merge"
# Layers of which a trainer has no adapter, by family, and one that it has beside them as a control.
WITHOUT_A_PLACE = [
    ("qwen3-next", ["q_proj"], ["out_proj"]),  # queries with a gate: canonical LoRA has no name for the parts
    ("qwen3-next", ["in_proj_qkvz"], ["out_proj"]),
    ("qwen3-next", ["in_proj_ba"], ["out_proj"]),
    ("qwen3-next", ["shared_expert_gate"], ["out_proj"]),
    ("qwen3.5", ["in_proj_qkv"], ["out_proj"]),
    ("nemotron-h-moe", ["in_proj"], ["o_proj"]),
]


@pytest.mark.parametrize(("family", "targets", "placed"), WITHOUT_A_PLACE)
def test_what_no_trainer_has_an_adapter_for_is_not_sent_from_one_format_to_the_other(
    family, targets, placed, checkpoint, tmp_path
):
    source = checkpoint(family)
    model = model_of(source)
    of = random_adapter(model, tmp_path / "adapter", target_modules=targets)
    for options in ({}, {"format": "mcore-bridge"}, {"canonical": False}):
        with pytest.raises(ReshardError) as said:
            lora_to_megatron(of, tmp_path / "out", hf_config=source, **options)
        assert str(said.value).endswith(NO_PLACE), options
        assert "--" not in str(said.value).replace("without --canonical", ""), options
        lora_to_megatron(
            random_adapter(model, tmp_path / "placed", target_modules=placed),
            tmp_path / "out",
            hf_config=source,
            overwrite=True,
            **options,
        )
        shutil.rmtree(tmp_path / "out")
    with pytest.raises(ReshardError, match="has no adapters for the parts|bridge has no adapter for"):
        lora_to_megatron(of, tmp_path / "out", hf_config=source, canonical=True)


def test_parts_of_one_published_matrix_have_one_a(checkpoint, tmp_path):
    """Phi's queries, keys and values: canonical LoRA, which has an A for each, is read and written by name only."""
    source, targets = checkpoint("phi4"), ["qkv_proj", "gate_up_proj", "o_proj"]
    of = random_adapter(model_of(source), tmp_path / "adapter", target_modules=targets)
    lora_to_megatron(of, tmp_path / "fused", hf_config=source)
    lora_to_peft(tmp_path / "fused", tmp_path / "back", hf_config=source)
    pairs, back = (load_file(folder / "adapter_model.safetensors") for folder in (of, tmp_path / "back"))
    assert same(pairs, back) == []
    refused = "has an A for each of .*qkv_proj.*, which are published as one tensor"
    with pytest.raises(ReshardError, match=refused):
        lora_to_megatron(of, tmp_path / "out", hf_config=source, canonical=True)
    # A trainer's, of a model of the same sizes.
    llama = checkpoint("llama")
    apart = random_adapter(model_of(llama), tmp_path / "apart", target_modules=["q_proj", "k_proj", "v_proj"])
    lora_to_megatron(apart, tmp_path / "canonical", hf_config=llama)
    with pytest.raises(ReshardError, match=refused):
        lora_to_peft(tmp_path / "canonical", tmp_path / "never", hf_config=source)
    lora_to_peft(tmp_path / "canonical", tmp_path / "taken", hf_config=llama)


def test_another_format_is_named_only_where_it_takes_the_adapter(checkpoint, tmp_path):
    source = checkpoint("llama")
    model = model_of(source)
    for name, ranks, sentence in (
        ("one", {}, "--format bridge has one for each"),
        ("two", {"q_proj": 2}, NO_PLACE),  # Megatron-Bridge has one rank for all layers
    ):
        of = random_adapter(model, tmp_path / name, target_modules=["q_proj", "k_proj"], rank_pattern=ranks)
        with pytest.raises(ReshardError, match=sentence):
            lora_to_megatron(of, tmp_path / "out", hf_config=source, format="mcore-bridge")
        if ranks:
            with pytest.raises(ReshardError, match="Megatron-Bridge has one rank for all layers"):
                lora_to_megatron(of, tmp_path / "out", hf_config=source)
        else:
            lora_to_megatron(of, tmp_path / "out", hf_config=source)
            shutil.rmtree(tmp_path / "out")


@pytest.mark.parametrize("family", ["llama", "qwen3-moe"])
def test_an_adapter_that_was_not_trained_is_said(family, checkpoint, tmp_path):
    """The control has one number in one B that is not zero, the last."""
    source = checkpoint(family)
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"] if family == "qwen3-moe" else None
    of = random_adapter(
        model_of(source), tmp_path / "adapter", target_modules=["o_proj"], target_parameters=experts
    )
    pairs = load_file(of / "adapter_model.safetensors")
    of_b = [name for name in pairs if ".lora_B." in name]
    for name in of_b:
        pairs[name].zero_()
    for trained in (False, True):
        pairs[of_b[-1]][-1, -1] = float(trained)
        save_file(pairs, of / "adapter_model.safetensors", {"format": "pt"})
        converted = lora_to_megatron(of, tmp_path / "lora", hf_config=source, overwrite=True)
        for said in (
            inspect(of, hf_config=source),
            inspect(tmp_path / "lora"),
            lora_merge(source, of, tmp_path / "merged", overwrite=True),
            lora_merge(source, tmp_path / "lora", tmp_path / "merged", overwrite=True),
            converted,
        ):
            sentences = [notice for notice in said.notices if "adds nothing: every lora_B is zero" in notice]
            assert len(sentences) == (not trained)
