"""Models that no mapping table covers, or whose table refuses their config, as transformers' class reads them: what it
saves, what its config decides, and what is refused."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers.core_model_loading import revert_weight_conversion

from reshard import ReshardError, diff, digest, hf_to_mcore, ignored_config_fields
from reshard.core.boxes import whole
from reshard.core.errors import UnmappedConfigError
from reshard.core.placement import LocalTensor, Part
from reshard.delta import apply, save
from reshard.megatron.arguments import megatron_args
from reshard.megatron.towers import takes_tower
from reshard.models.config_fields import check_ignored
from reshard.models.model import Model, different_fields
from reshard.models.saved_tensors import full_config, saved_tensors
from reshard.models.towers import TAKES_TOWER
from reshard.models.without_table import any_model
from reshard.refit.planning import Sources, _codecs
from reshard.trainers import FsdpModel
from tests.tools.checkpoints import make as make_published
from tests.tools.model_classes import (
    REFUSED_BY_TABLE,
    SIZES,
    WITH_TOWER,
    config_of,
    make,
)


def test_what_transformers_computes_as_it_saves_is_refused(monkeypatch):
    from reshard.models import saved_tensors as module

    def doubled(model, state):
        return {name: tensor * 2 for name, tensor in revert_weight_conversion(model, state).items()}

    monkeypatch.setattr(module, "revert_weight_conversion", doubled)
    with pytest.raises(
        ReshardError, match="transformers computes model.embed_tokens.weight as it saves a Gemma2"
    ):
        config = config_of("Gemma2ForCausalLM", intermediate_size=96)  # of which nothing was asked before
        saved_tensors("Gemma2ForCausalLM", config.to_dict(), "config.json")


def test_a_class_that_transformers_does_not_have_is_named():
    config = {"architectures": ["NeverMadeForCausalLM"], "model_type": "never_made"}
    with pytest.raises(
        ReshardError, match="no mapping table covers NeverMadeForCausalLM, and transformers 5"
    ):
        any_model(config)


def test_fields_that_decide_what_is_computed_are_compared_wherever_they_are():
    name = "Gemma3ForConditionalGeneration"
    one, other = config_of(name).to_dict(), config_of(name).to_dict()
    other["dtype"], other["text_config"]["attention_dropout"] = "float16", 0.5
    assert different_fields(any_model(one), any_model(other)) == {}
    other["text_config"]["rms_norm_eps"] = 0.5
    assert different_fields(any_model(one), any_model(other)) == {"text_config.rms_norm_eps": (1e-6, 0.5)}


@pytest.mark.parametrize(
    "field, written, other", [("is_mm_prefix_lm", True, None), ("attention_output_gate", False, True)]
)
def test_what_vllm_writes_into_a_config_makes_no_other_model(field, written, other):
    name = "Gemma3ForConditionalGeneration"
    one, served = config_of(name).to_dict(), config_of(name).to_dict()
    served["hidden_size"] = served["text_config"]["hidden_size"]
    served["text_config"][field] = written
    assert different_fields(any_model(one), any_model(served)) == {}
    served["hidden_size"] = 7
    assert different_fields(any_model(one), any_model(served)) == {"hidden_size": (None, 7)}
    if other is not None:
        served["text_config"][field] = other
        assert f"text_config.{field}" in different_fields(any_model(one), any_model(served))


def test_what_only_training_reads_makes_no_other_model_and_what_a_router_reads_does():
    name = "PhimoeForCausalLM"
    one, trained, other = (any_model(config_of(name, **fields).to_dict()) for fields in (
        {}, {"attention_dropout": 0.5, "initializer_range": 0.5}, {"router_jitter_noise": 0.5}
    ))  # fmt: skip
    assert different_fields(one, trained) == {}
    assert different_fields(one, other) == {"router_jitter_noise": (0.01, 0.5)}
    with ignored_config_fields("router_jitter_noise"):
        check_ignored(one)
        assert different_fields(one, other) == {}


def test_two_classes_of_one_type_are_two_models():
    name = "Gemma2ForCausalLM"
    base = config_of(name).to_dict() | {"architectures": ["Gemma2Model"]}
    assert "architectures" in different_fields(any_model(config_of(name).to_dict()), any_model(base))


def built(name: str, **fields) -> torch.nn.Module:
    return getattr(transformers, name)(config_of(name, **fields))


@pytest.mark.parametrize("what", ["an embedding", "a stack of experts"])
def test_a_trainer_whose_weights_are_not_of_its_config_is_refused(what):
    model = built("PhimoeForCausalLM")
    served = any_model(model.config.to_dict())
    assert FsdpModel(model).publish(served)
    if what == "an embedding":
        model.model.embed_tokens.weight = torch.nn.Parameter(torch.zeros(600, 64))
        said = r"model.embed_tokens.weight has shape \[600, 64\], and \[500, 64\] by its config"
    else:
        experts = model.model.layers[0].mlp.experts
        experts.down_proj = torch.nn.Parameter(torch.zeros(6, *experts.down_proj.shape[1:]))
        said = r"experts.down_proj has shape \[6, 64, 128\], and \[4, 64, 128\] by its config"
    with pytest.raises(ReshardError, match=said):
        FsdpModel(model).publish(served)


@pytest.mark.parametrize("name", REFUSED_BY_TABLE)
def test_a_trainer_made_from_a_config_that_a_table_refuses_is_of_its_class(name):
    model = built(name)
    served = any_model(model.config.to_dict())
    expected = FsdpModel(model).publish(served)
    model.config.architectures = None
    source = FsdpModel(model)
    source.check_model(served)
    assert source.publish(served) == expected
    other = any_model(config_of(name, rms_norm_eps=0.5).to_dict())
    with pytest.raises(ReshardError, match="the trainer's rms_norm_eps is"):
        source.check_model(other)


def test_the_class_is_that_of_the_model_below_an_adapter():
    model = built("Gemma2ForCausalLM")
    served = any_model(model.config.to_dict())
    model.config.architectures = None  # as of one made from a config
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"], r=2))
    below, adapter = FsdpModel(adapted).split_adapter()
    below.check_model(served)
    assert len(below.publish(served)) == len(FsdpModel(built("Gemma2ForCausalLM")).publish(served))
    assert len(adapter.publish(served)) == 4, "A and B of two layers"


def test_an_adapter_of_a_parameter_that_is_joined_to_another_tensor_is_refused():
    adapted = get_peft_model(built("HrmTextForCausalLM"), LoraConfig(target_modules=["q_proj"], r=2))
    served = any_model(config_of("HrmTextForCausalLM").to_dict())
    _, adapter = FsdpModel(adapted).split_adapter()
    with pytest.raises(ReshardError, match="8 matrices of no linear layer that hrm_text has by itself"):
        adapter.publish(served)


def test_heads_of_other_sizes_than_the_default_are_those_of_the_config():
    name = "Qwen3ForSequenceClassification"
    config = transformers.Qwen3Config(**SIZES, num_labels=5).to_dict() | {"architectures": [name]}
    assert saved_tensors(name, config, name)["score.weight"].shape == (5, 64)


@pytest.mark.parametrize("name", REFUSED_BY_TABLE)
def test_what_megatron_cannot_hold_is_refused_where_megatron_is_one_side_alone(name):
    config = config_of(name).to_dict()
    served = any_model(config)
    with pytest.raises(ReshardError) as refused:
        Model.from_hf(config)
    with pytest.raises(ReshardError) as of_megatron:
        megatron_args(served)
    assert str(of_megatron.value) == str(refused.value)
    assert "Megatron" in str(refused.value) or "not supported" in str(refused.value)
    plain = config_of(name, rope_parameters={"rope_type": "default", "rope_theta": 1e4}, sliding_window=None)
    assert different_fields(served, any_model(config)) == {}
    for one, other in ((config, plain.to_dict()), (plain.to_dict(), config)):
        different = different_fields(any_model(one), any_model(other))
        assert different and all("rope_" in field or field == "sliding_window" for field in different), (
            different
        )


def test_what_is_another_model_to_the_class_is_named_where_the_table_has_read_one_of_two_configs():
    """The table fills fields in, and takes the language model out of a larger one."""
    changed = {"rope_parameters.factor", "rope_parameters.rope_type"}
    for name, sizes, inside in (
        ("Qwen2ForCausalLM", {n: s for n, s in SIZES.items() if n != "head_dim"}, ""),
        (
            "Qwen2_5_VLForConditionalGeneration",
            WITH_TOWER["Qwen2_5_VLForConditionalGeneration"],
            "text_config.",
        ),
    ):
        plain = transformers_config(name, **sizes)
        other = json.loads(json.dumps(plain))
        (other["text_config"] if inside else other)["rope_parameters"] |= {
            "rope_type": "dynamic",
            "factor": 2.0,
        }
        refused, read = any_model(other), any_model(plain)
        assert read.family.has_megatron_names and not refused.family.has_megatron_names
        for model in (read, takes_tower(read, plain)):
            for pair in ((model, refused), (refused, model)):
                assert different_fields(*pair).keys() == {inside + field for field in changed}


def transformers_config(name: str, **sizes) -> dict:
    config = getattr(transformers, name).config_class(architectures=[name], **sizes)
    return json.loads(config.to_json_string(use_diff=False))


def test_fields_that_one_side_ignores_are_named_where_tensors_have_other_names_without_them(tmp_path):
    """Transformers' class of Qwen3-Next, which reads what its table refuses, has some tensors otherwise than that."""
    plain = make_published(tmp_path / "plain", "qwen3-next", torch.bfloat16)
    dynamic = Path(shutil.copytree(plain, tmp_path / "dynamic"))
    config = json.loads((plain / "config.json").read_text())
    config["rope_parameters"] |= {"rope_type": "dynamic", "factor": 2.0}
    (dynamic / "config.json").write_text(json.dumps(config))
    newer = Path(shutil.copytree(dynamic, tmp_path / "newer"))
    weights = load_file(newer / "model.safetensors")
    weights["model.norm.weight"] += 1
    save_file(weights, newer / "model.safetensors", {"format": "pt"})
    fields, mcore, chain = ("factor", "rope_type"), tmp_path / "mcore", tmp_path / "chain"
    ignoring = (
        r'ignore the same .*, by reshard.ignored_config_fields\("(factor|rope_type)", "(factor|rope_type)"\)'
    )
    with ignored_config_fields(*fields):
        hf_to_mcore(dynamic, mcore)
        assert diff(dynamic, mcore).equal
        save(dynamic, newer, chain)
    for look in (
        lambda: diff(dynamic, mcore), lambda: diff(mcore, dynamic), lambda: save(mcore, newer, tmp_path / "never"),
        lambda: apply(dynamic, chain, tmp_path / "never"), lambda: save(dynamic, newer, chain),
    ):  # fmt: skip
        with pytest.raises(ReshardError, match=ignoring):
            look()
    assert not (tmp_path / "never").exists()
    with pytest.raises(
        ReshardError, match="have other names: .*rope type 'dynamic' has no counterpart in Megatron"
    ):
        diff(plain, dynamic)
    with ignored_config_fields(*fields):
        apply(dynamic, chain, tmp_path / "out")
        assert diff(newer, tmp_path / "out").equal and not diff(dynamic, tmp_path / "out").equal
    engine = SimpleNamespace(
        placement=SimpleNamespace(tensors={0: LocalTensor(0, (1,), (Part("a.weight", whole((1,)), (0,)),))}),
        regions={0: SimpleNamespace(tensor=torch.zeros(1))}, scales={},
    )  # fmt: skip
    with pytest.raises(ReshardError, match="lacks 1 parameters that the config calls for: a.weight$"):
        _codecs(engine, Sources(), "the config")
    with (
        ignored_config_fields(*fields, recorded=True),
        pytest.raises(
            ReshardError, match="both processes .*, by RESHARD_IGNORE_CONFIG_FIELDS=factor,rope_type"
        ),
    ):
        _codecs(engine, Sources(), "the config")


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Gemma2ForCausalLM"])
def test_a_tied_output_layer_in_the_files_is_the_embedding_or_refused(name, tmp_path):
    plain = make(tmp_path / "plain", name, tie_word_embeddings=True)
    directories = {
        what: Path(shutil.copytree(plain, tmp_path / what)) for what in ("copied", "other", "newer")
    }
    weights = load_file(plain / "model.safetensors")
    assert "lm_head.weight" not in weights
    embedding = weights["model.embed_tokens.weight"]
    heads = {"copied": embedding, "other": embedding + 1, "newer": embedding}
    for what, head in heads.items():
        changed = {"model.norm.weight": weights["model.norm.weight"] + (what == "newer")}
        tensors = weights | changed | {"lm_head.weight": head.clone()}
        save_file(tensors, directories[what] / "model.safetensors", {"format": "pt"})
    copied, other, newer = directories.values()
    assert digest(copied).text == digest(plain).text != digest(newer).text
    assert diff(plain, copied).equal and not diff(copied, newer).equal and not diff(copied, other).equal
    for look in (lambda: digest(other), lambda: save(other, newer, tmp_path / "never")):
        with pytest.raises(ReshardError, match="lm_head.weight differs from model.embed_tokens.weight, but "):
            look()
    save(copied, newer, tmp_path / "chain")
    for base in (copied, plain):
        apply(base, tmp_path / "chain", tmp_path / f"from {base.name}")
        assert digest(tmp_path / f"from {base.name}").text == digest(newer).text
        written = load_file(tmp_path / f"from {base.name}" / "model.safetensors")
        assert ("lm_head.weight" in written) == (base is copied)
    save_file(weights | {"lm_tail.weight": embedding.clone()}, other / "model.safetensors", {"format": "pt"})
    with pytest.raises(ReshardError, match="holds 1 that .* does not have: lm_tail.weight"):
        digest(other)


def test_what_neither_the_table_nor_the_class_reads_is_refused_with_both_reasons():
    config = config_of("Phi3ForCausalLM").to_dict()
    config["rope_parameters"] = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    of_table = "partial_rotary_factor 0.75 is not supported"
    with pytest.raises(
        UnmappedConfigError, match=f"{of_table}.*; nor can it be read without.* of Phi3ForCausalLM .*long"
    ):
        any_model(config)
    with pytest.raises(UnmappedConfigError, match=of_table) as of_none:
        any_model(config | {"architectures": None})
    assert "nor can it be read" not in str(of_none.value)


def test_what_transformers_says_of_a_config_is_one_line():
    with pytest.raises(ReshardError, match="is no config of GraniteForCausalLM .* 'vocab_size'") as refused:
        any_model({"architectures": ["GraniteForCausalLM"], "model_type": "granite", "vocab_size": "many"})
    assert "expected int" in str(refused.value) and "\n" not in str(refused.value)


def test_a_config_that_has_its_parts_elsewhere_than_transformers_reads_them_is_refused():
    """As vLLM's own class of Qwen3-ASR has them. Transformers would take the sizes of its defaults."""
    name = "Qwen3ASRForConditionalGeneration"
    config = transformers.Qwen3ASRConfig().to_dict() | {"architectures": [name]}
    parts = {part: config.pop(part) for part in ("audio_config", "text_config")}
    with pytest.raises(
        ReshardError, match="has audio_config, text_config in its thinker_config, where transformers"
    ):
        full_config(name, config | {"thinker_config": parts}, "vLLM's config")
    assert full_config(name, config | parts, name)["text_config"]["hidden_size"] == 2048


def test_a_change_in_place_is_no_view(monkeypatch):
    from reshard.models import saved_tensors as module

    def changed(model, state):
        return {name: tensor.clone().add_(1) for name, tensor in state.items()}

    monkeypatch.setattr(module, "revert_weight_conversion", changed)
    with pytest.raises(ReshardError, match="transformers computes tensors as it saves a Gemma2"):
        config = config_of("Gemma2ForCausalLM", intermediate_size=96)  # of which nothing was asked before
        saved_tensors("Gemma2ForCausalLM", config.to_dict(), "config.json")


def test_a_tower_that_computes_something_else_is_refused_where_an_engine_takes_it():
    name = "Qwen3VLForConditionalGeneration"
    config = config_of(name).to_dict()
    engine = any_model(config | {TAKES_TOWER: config})
    FsdpModel(built(name)).check_model(engine)
    changed = built(name)
    changed.config.vision_config.deepstack_visual_indexes = [1, 0]
    with pytest.raises(
        ReshardError, match=r"has vision_config.deepstack_visual_indexes \[1, 0\], but the served"
    ):
        FsdpModel(changed).check_model(engine)
    FsdpModel(changed).check_model(any_model(config))  # its own tower stays in the engine
