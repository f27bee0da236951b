"""Adapters of transformers classes that no mapping table covers, and of language models within larger ones: into vLLM's
slots as vLLM's own loading of what PEFT saves puts them."""

import json

import pytest
import torch
import transformers
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers.conversion_mapping import get_model_conversion_mapping

from reshard import ReshardError, diff, digest, lora_merge, lora_to_megatron, lora_to_peft
from reshard.models.without_table import any_model
from reshard.storage.sources.base import read_config
from reshard.trainers.fsdp_lora import FsdpAdapter
from tests.starting.ranks import free_port, run_on_ranks
from tests.tools.adapted import adapted
from tests.tools.model_classes import make

TP, PP = {"tp": 2}, {"pp": 2}
TOWER = {"target_modules": r".*vision_tower.*\.q_proj"}
FUSED = {"target_modules": ["gate_up_proj"]}
EXPERTS = {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.down_proj"]}
# By a name: the class, PEFT's settings, and the engine's.
CASES = {
    "Gemma 3": ("Gemma3ForCausalLM", {"use_rslora": True}, TP),
    "stages": ("Gemma2ForCausalLM", {}, PP),
    "one layer of stages": ("GraniteForCausalLM", {"layers_to_transform": [0], "target_modules": ["q_proj"]}, PP),
    "Gemma 3 with a tower": ("Gemma3ForConditionalGeneration", {}, TP),
    "Qwen2.5-VL": ("Qwen2_5_VLForConditionalGeneration", {}, TP),
    "attention beside experts": ("PhimoeForCausalLM", {}, TP),
}  # fmt: skip
REFUSED = {
    "of a tower": ("Gemma3ForConditionalGeneration", TOWER, TP),
    "of what vLLM has two for": ("Glm4ForCausalLM", FUSED, TP),
    "of experts": ("PhimoeForCausalLM", EXPERTS, TP),
}
SAID = {
    "of a tower": "the trainer has adapters of 2 layers that this vLLM serves none for: vision_tower.",
    "of what vLLM has two for": "vLLM holds adapters of model.layers.0.mlp.gate_up_proj for 2 weights, and this rank "
    "has 1 published ones in it",
    "of experts": "the trainer's adapter holds 4 matrices of no linear layer that phimoe has by itself: "
    "model.layers.0.mlp.experts.lora_A.default.weight",
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What each of two ranks, of a trainer and of vLLM, says of each case."""
    folder = tmp_path_factory.mktemp("lora")
    names = {name for name, _, _ in (CASES | REFUSED).values()}
    checkpoints = {name: str(make(folder / name, name)) for name in names}
    cases = {
        case: (checkpoints[name], settings, options)
        for case, (name, settings, options) in (CASES | REFUSED).items()
    }
    sides = {"trainer": 2, "engine": 2, "together": True, "folder": str(folder), "port": free_port()}
    return run_on_ranks(
        2, "refit_each", sides, cases, str(folder), module="refit_lora_without_table_on_cpu", timeout=600
    )


@pytest.mark.parametrize("case", CASES)
def test_a_slot_holds_what_vllm_loads_of_the_adapter_that_peft_saves(case, results):
    filled = [0, 0]
    for of in results:
        assert not isinstance(of[case], str), of[case]
        assert of[case]["different"] == [[], []]
        assert of[case]["filled"][0] == of[case]["filled"][1] == of[case]["control"]
        filled = [sum(pair) for pair in zip(filled, of[case]["filled"], strict=True)]
    expected = {"one layer of stages": 2, "stages": 28, "attention beside experts": 32}.get(case, 56)
    assert filled == [expected] * 2, "A and B of every layer, on each rank that has it"


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_slot_in_vllm_is_refused_by_name(case, results):
    for of in results:
        assert SAID[case] in of[case], of[case]


def merged_by_hand(peft, directory):
    """What transformers saves of a model of which each adapted layer has its exact sum, rounded once."""
    for module in peft.modules():
        if getattr(module, "lora_A", None):
            [a], [b] = (
                [linear.weight.double() for linear in side.values()]
                for side in (module.lora_A, module.lora_B)
            )
            weight, scale = module.base_layer.weight, module.scaling["default"]
            with torch.no_grad():
                weight.copy_((weight.double() + scale * (b @ a)).to(weight.dtype))
    model = peft.unload()
    model._weight_conversions = get_model_conversion_mapping(model, add_legacy=False)
    model.save_pretrained(directory)
    return load_file(directory / "model.safetensors")


# A scale and a rank by the names that modules have in memory, which PEFT matches.
Q_PROJ = "model.language_model.layers.0.self_attn.q_proj"
BY_NAMES = {"alpha_pattern": {Q_PROJ: 60}, "rank_pattern": {Q_PROJ: 8}}


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("Gemma3ForConditionalGeneration", BY_NAMES),
        ("Qwen2_5_VLForConditionalGeneration", BY_NAMES),
        ("GraniteMoeForCausalLM", {}),
    ],
)
def test_a_merge_is_the_exact_sum_in_the_layers_that_peft_adapts(name, settings, tmp_path):
    """Bit for bit, but for elements that lie within float32's own rounding of a half of bf16's step."""
    base, adapter = make(tmp_path / "base", name), tmp_path / "adapter"
    adapted(str(base), 1, **settings).save_pretrained(adapter)
    lora_merge(base, adapter, tmp_path / "merged")
    ours = load_file(tmp_path / "merged" / "model.safetensors")
    theirs = merged_by_hand(adapted(str(base), 1, **settings), tmp_path / "by hand")
    other = merged_by_hand(adapted(str(base), 2, **settings), tmp_path / "control")
    assert ours.keys() == theirs.keys()
    assert sum(int((ours[key] != theirs[key]).sum()) for key in theirs) <= 2
    plain = load_file(base / "model.safetensors")
    changed = [key for key in theirs if not torch.equal(theirs[key], plain[key])]
    assert len(changed) == (8 if name.startswith("Granite") else 14)
    assert all((ours[key] != other[key]).float().mean() > 0.1 for key in changed)
    assert not diff(base, tmp_path / "merged").equal and digest(base).text != digest(tmp_path / "merged").text


def test_an_adapter_of_a_base_that_its_table_refuses_is_compared_and_is_not_megatrons(tmp_path):
    name, adapters = "LlamaForCausalLM", [tmp_path / "first", tmp_path / "second"]
    base = make(tmp_path / "base", name)
    for seed, adapter in enumerate(adapters):
        adapted(str(base), seed).save_pretrained(adapter)
    ours = [digest(adapter).text for adapter in adapters]
    assert diff(adapters[0], adapters[0]).equal and not diff(*adapters).equal and ours[0] != ours[1]
    for format in ("bridge", "mcore-bridge"):
        with pytest.raises(
            ReshardError, match="config.json: rope type 'dynamic' has no counterpart in Megatron"
        ):
            lora_to_megatron(adapters[0], tmp_path / "out", format=format)
    assert not (tmp_path / "out").exists()
    make(base, name, rope_parameters={"rope_type": "default", "rope_theta": 1e4})  # which the table takes
    assert [digest(adapter).text for adapter in adapters] == ours
    lora_to_megatron(adapters[0], tmp_path / "out")


@pytest.mark.parametrize("name", ["Qwen2_5_VLForConditionalGeneration", "Qwen3VLForConditionalGeneration"])
def test_peft_loads_what_comes_back_from_megatron_into_the_modules_that_it_was_of(name, tmp_path):
    base = make(tmp_path / "base", name)
    ours = adapted(str(base), 1)
    ours.save_pretrained(tmp_path / "adapter")
    lora_to_megatron(tmp_path / "adapter", tmp_path / "megatron", hf_config=base)
    lora_to_peft(tmp_path / "megatron", tmp_path / "back", hf_config=base)
    model = getattr(transformers, name).from_pretrained(base, dtype=torch.bfloat16)
    loaded = PeftModel.from_pretrained(model, tmp_path / "back")

    def adapters(peft: PeftModel) -> dict[str, torch.Tensor]:
        return {name: parameter for name, parameter in peft.named_parameters() if ".lora_" in name}

    expected, read = adapters(ours), adapters(loaded)
    assert read.keys() == expected.keys() and all(parameter.any() for parameter in expected.values())
    assert all(torch.equal(parameter, expected[name]) for name, parameter in read.items())


def test_what_a_merge_cannot_add_is_refused_and_nothing_is_made(tmp_path):
    name, out = "GraniteMoeForCausalLM", tmp_path / "out"
    base, adapter = make(tmp_path / "base", name), tmp_path / "adapter"
    adapted(str(base), 1).save_pretrained(adapter)
    narrow = make(tmp_path / "narrow", name, hidden_size=32)
    with pytest.raises(ReshardError, match="do not fit the weight"):
        lora_merge(narrow, adapter, out)
    with pytest.raises(ReshardError, match="GraniteMoeForCausalLM"):
        lora_merge(base, adapter, out, format="mcore")
    with pytest.raises(ReshardError, match="no mapping table covers GraniteMoeForCausalLM"):
        lora_to_megatron(adapter, out, hf_config=base)
    tensors = load_file(adapter / "adapter_model.safetensors")
    of_nothing = {name.replace("k_proj", "m_proj"): tensor for name, tensor in tensors.items()}
    save_file(of_nothing, adapter / "adapter_model.safetensors")
    with pytest.raises(
        ReshardError, match="4 tensors that are not A or B of a linear layer of granitemoe.*k_proj|m_proj"
    ):
        lora_merge(base, adapter, out)
    assert json.loads((adapter / "adapter_config.json").read_text())["r"] == 4 and not out.exists()


@pytest.mark.parametrize("says", [{"fan_in_fan_out": False}, {}])
def test_an_adapter_of_a_matrix_that_the_model_has_transposed_is_refused(says, tmp_path):
    """PEFT adds the transpose to GPT-2's square ones, whatever the adapter's config says."""
    base, adapter = make(tmp_path / "base", "GPT2LMHeadModel"), tmp_path / "adapter"
    peft = adapted(str(base), 1, target_modules=r".*attn\.c_proj")
    peft.save_pretrained(adapter)
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert config.pop("fan_in_fan_out") is True
    (adapter / "adapter_config.json").write_text(json.dumps(config | says))
    with pytest.raises(ReshardError, match="not A or B of a linear layer of gpt2: .*attn.c_proj"):
        lora_merge(base, adapter, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(ReshardError, match="no linear layer that gpt2 has by itself: .*attn.c_proj"):
        FsdpAdapter(peft).publish(any_model(read_config(base / "config.json")))
