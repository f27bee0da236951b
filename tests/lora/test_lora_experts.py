"""LoRA adapters of all experts of a layer in one tensor, as PEFT has them for transformers 5."""

import json

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from reshard import ReshardError, check, diff, lora_merge, lora_to_megatron, lora_to_peft
from tests.lora.test_lora_files import adapter, model_of
from tests.tools.oracle import hf_tensors, same


def test_adapters_of_all_experts_in_one_tensor_become_each_experts(checkpoint, tmp_path):
    """As PEFT has them for transformers 5, which holds all experts in one parameter: merged as PEFT merges
    them, and the same through Megatron."""
    source = checkpoint("qwen3-moe")
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    of = adapter(
        source,
        tmp_path / "adapter",
        target_modules=["o_proj"],
        target_parameters=experts,
        alpha_pattern={r".*\.down_proj": 3},
    )
    assert any("experts.base_layer.lora_A" in name for name in load_file(of / "adapter_model.safetensors"))
    lora_merge(source, of, tmp_path / "merged")
    whole = PeftModel.from_pretrained(model_of(source), of).merge_and_unload()
    whole.save_pretrained(tmp_path / "theirs")
    ours, theirs, base = (hf_tensors(tmp_path / name) for name in ("merged", "theirs", source))
    assert ours.keys() == theirs.keys() == base.keys()
    assert all(torch.allclose(theirs[name], value, rtol=0, atol=1e-6) for name, value in ours.items())
    assert sum(
        not torch.allclose(base[name], value, rtol=0, atol=1e-3) for name, value in ours.items()
    ) == 4 * (1 + 8 * 3)
    with pytest.raises(ReshardError, match=r"several alphas \(3, 10\), and bridge has one for all layers"):
        lora_to_megatron(of, tmp_path / "back")
    config = json.loads((of / "adapter_config.json").read_text()) | {"alpha_pattern": {}}
    (of / "adapter_config.json").write_text(json.dumps(config))
    lora_to_megatron(of, tmp_path / "back")
    lora_to_peft(tmp_path / "back", tmp_path / "apart")
    lora_merge(source, of, tmp_path / "same")
    lora_merge(source, tmp_path / "apart", tmp_path / "again")
    assert same(hf_tensors(tmp_path / "same"), hf_tensors(tmp_path / "again")) == []
    # together again, as PEFT itself saved them, and loaded by PEFT
    lora_to_peft(tmp_path / "back", tmp_path / "together", experts="together")
    saved, again = (load_file(d / "adapter_model.safetensors") for d in (of, tmp_path / "together"))
    assert same(saved, again) == [] and any("base_layer.lora_B" in name for name in again)
    assert check(tmp_path / "together").ok and diff(of, tmp_path / "together", hf_config=source).equal
    PeftModel.from_pretrained(model_of(source), tmp_path / "together").merge_and_unload().save_pretrained(
        tmp_path / "theirs"
    )
    theirs, ours = (hf_tensors(tmp_path / name) for name in ("theirs", "same"))
    assert all(torch.allclose(theirs[name], value, rtol=0, atol=1e-6) for name, value in ours.items())
    file = tmp_path / "apart" / "adapter_model.safetensors"
    pairs = load_file(file)
    next(tensor for name, tensor in pairs.items() if "2.up_proj.lora_A" in name)[0] += 1
    save_file(pairs, file, {"format": "pt"})
    (tmp_path / "apart" / "reshard.json").unlink()
    with pytest.raises(ReshardError, match=r"2\.up_proj.weight have different A, and PEFT has one for both"):
        lora_to_peft(tmp_path / "apart", tmp_path / "none", experts="together")


# Families whose experts a transformers model has in one parameter.
FAMILIES = (
    "qwen2-moe", "qwen3-moe", "mixtral", "minimax-m2", "gpt-oss", "deepseek-v3", "glm4-moe", "olmoe", "ernie",
)  # fmt: skip
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def merged_by_peft(source, of, folder):
    PeftModel.from_pretrained(model_of(source), of).merge_and_unload().save_pretrained(folder)
    return hf_tensors(folder)


def furthest(ours, theirs, base) -> float:
    """The largest difference between two merges of one base; tensors that one of them lacks are as the base's."""
    return max(float((ours[name] - theirs.get(name, value)).abs().max()) for name, value in base.items())


@pytest.mark.parametrize("family", FAMILIES)
def test_an_adapter_of_all_experts_is_merged_as_peft_merges_it_and_written_as_peft_reads_it(
    family, checkpoint, tmp_path
):
    source = checkpoint(family)
    base = hf_tensors(source)
    of = adapter(source, tmp_path / "adapter", target_modules=["o_proj"], target_parameters=EXPERTS)
    theirs = merged_by_peft(source, of, tmp_path / "theirs")
    lora_merge(source, of, tmp_path / "merged")
    ours = hf_tensors(tmp_path / "merged")
    assert furthest(ours, theirs, base) < 1e-5
    assert furthest(ours, base, base) > 0.01, "an adapter that does nothing would hide errors"
    lora_to_megatron(of, tmp_path / "lora", hf_config=source)
    for experts in ("apart", "together"):
        lora_to_peft(tmp_path / "lora", tmp_path / experts, hf_config=source, experts=experts)
        lora_merge(source, tmp_path / experts, tmp_path / f"{experts}-merged")
        assert furthest(hf_tensors(tmp_path / f"{experts}-merged"), theirs, base) < 1e-5
    again = merged_by_peft(source, tmp_path / "together", tmp_path / "again")
    assert furthest(again, theirs, base) < 1e-5, "PEFT reads what is written"


@pytest.mark.parametrize("said", [{"peft_version": "0.18.1"}, {"peft_version": None}])
def test_experts_as_peft_before_0_19_has_them_are_refused_where_they_may_be_read_otherwise(
    said, checkpoint, tmp_path
):
    """Then in and out are exchanged, which nobody sees in a square weight."""
    source = checkpoint("deepseek-v3")  # gate and up of an expert have as many rows as columns
    of = adapter(source, tmp_path / "adapter", target_modules=["o_proj"], target_parameters=EXPERTS)
    lora_merge(source, of, tmp_path / "merged")
    config = json.loads((of / "adapter_config.json").read_text()) | said
    (of / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ReshardError, match="as PEFT before 0.19 has those of gate_up_proj, with in and out"):
        lora_merge(source, of, tmp_path / "refused")
