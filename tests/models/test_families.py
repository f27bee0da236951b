"""Families: told apart by a checkpoint's args, and others of an architecture by their published fields."""

import itertools
import json
import shutil

import pytest
import torch
from transformers import CONFIG_MAPPING

from reshard import MegatronLayout, ReshardError, diff, hf_to_mcore, mcore_to_hf, read_model
from reshard.megatron.arguments import family_of_args, megatron_args, mismatched_args, model_of_args
from reshard.models import config_defaults
from reshard.models.family import Family, families
from reshard.models.model import Model
from tests.models.test_published import PUBLISHED
from tests.starting.ranks import run_on_ranks
from tests.tools.checkpoints import OTHERS_OF_DEEPSEEK, VARIANTS, config_of, hf_logits
from tests.tools.oracle import hf_tensors, megatron_tensors, same, stored_tensors

# What Megatron-LM's parser makes of the command lines of models that have no mapping file.
PLAIN = {
    "num_layers": 32, "hidden_size": 4096, "ffn_hidden_size": 14336, "num_attention_heads": 32,
    "group_query_attention": True, "num_query_groups": 8, "kv_channels": 128, "normalization": "RMSNorm",
    "layernorm_epsilon": 1e-05, "swiglu": True, "position_embedding_type": "rope", "rotary_base": 1000000,
    "rotary_percent": 1.0, "max_position_embeddings": 32768, "vocab_size": 32000,
    "untie_embeddings_and_output_weights": True, "add_bias_linear": False, "add_qkv_bias": False, "qk_layernorm": False,
    "multi_latent_attention": False, "init_method_std": 0.02, "attention_dropout": 0.0, "moe_aux_loss_coeff": 0.02,
}  # fmt: skip
EXPERTS = PLAIN | {"num_experts": 8, "moe_router_topk": 2, "moe_layer_freq": 1, "moe_ffn_hidden_size": 14336}
STRANGERS = {
    "Qwen2-MoE without the gate": EXPERTS
    | {"add_qkv_bias": True, "moe_shared_expert_intermediate_size": 5632, "moe_shared_expert_gate": False},
    "DeepSeek-V2": EXPERTS
    | {"multi_latent_attention": True, "qk_layernorm": True, "moe_router_score_function": "softmax"},
    "a sigmoid router without a bias": EXPERTS
    | {"moe_router_score_function": "sigmoid", "qk_layernorm": True},
}


@pytest.mark.parametrize("name", STRANGERS)
def test_args_of_a_model_without_a_mapping_file_are_taken_for_no_family(name):
    with pytest.raises(ReshardError, match="args: no family here has .*qk_layernorm = .*pass --hf-config"):
        model_of_args(STRANGERS[name], "args")


def test_args_are_of_the_one_family_that_made_them_and_a_wrong_one_that_is_named_is_refused():
    for variant in VARIANTS:
        args = megatron_args(Model.from_hf(config_of(variant)))
        identified = [family for family in families().values() if family.identifies]
        fitting = {family.name for family in identified if not mismatched_args(family, args)}
        if fitting == {"qwen3_next", "qwen3_5_moe_text"}:
            with pytest.raises(ReshardError, match="args may be of .*: pass --hf-config .*, or --family"):
                family_of_args(args, "args")
        else:
            # What these are to Megatron.
            others = {
                "dots1": "glm4_moe",
                "ling": "glm4_moe",
                "ling-bias": "glm4_moe",
                "glm4-moe-lite": "deepseek_v3",
                "mistral": "llama",
                "seed-oss": "qwen2",
                "phi3": "llama",
                "phi4": "llama",
            }
            expected = others.get(variant, VARIANTS[variant].model_type)
            assert fitting == {family_of_args(args, "args").name} == {expected}
    for name in ("qwen3_moe", "glm4_moe"):
        with pytest.raises(ReshardError, match="makes another model of the weights"):
            model_of_args(EXPERTS | {"moe_router_score_function": "softmax"}, "args", name)


def test_args_with_a_window_are_a_mistrals_and_refused_as_a_llamas():
    with_window = Model.from_hf(config_of("mistral"))
    args = megatron_args(with_window)
    assert model_of_args(args, "args", "mistral").config["sliding_window"] == 12
    with pytest.raises(
        ReshardError, match="window_size is .*11.* makes another model of the weights than llama"
    ):
        model_of_args(args, "args")
    engines = {"model_type": "", "layer_types": ["sliding_attention"] * 4}  # as vLLM makes it of params.json
    assert Model.from_hf(with_window.config | engines).kinds == with_window.kinds
    for types in (["full_attention"] * 4, ["sliding_attention", "full_attention"] * 2):
        with pytest.raises(ReshardError, match="all layers are sliding_attention, but layer_types is"):
            Model.from_hf(with_window.config | {"layer_types": types})
    without = megatron_args(Model.from_hf(config_of("mistral") | {"sliding_window": None}))
    assert model_of_args(without, "args", "mistral").config["sliding_window"] is None
    assert model_of_args(without, "args").family.name == "llama"


def test_dots_llm1_without_its_config_is_a_glm_with_the_same_logits(checkpoint, tmp_path):
    source, tokens = checkpoint("dots1"), torch.arange(48).reshape(2, 24)
    hf_to_mcore(source, tmp_path / "mcore")
    shutil.rmtree(tmp_path / "mcore" / "hf")
    (tmp_path / "mcore" / "reshard.json").unlink()
    for family, architecture in ((None, "Glm4MoeForCausalLM"), ("dots1", "Dots1ForCausalLM")):
        back = tmp_path / architecture
        mcore_to_hf(tmp_path / "mcore", back, family=family)
        assert json.loads((back / "config.json").read_text())["architectures"] == [architecture]
        assert same(hf_tensors(source), hf_tensors(back)) == []
        assert torch.equal(hf_logits(source, tokens), hf_logits(back, tokens))


def test_a_ling_without_its_config_is_a_glm_with_the_same_logits(checkpoint, tmp_path):
    """transformers' own class of another family, with other names, computes what the published code does."""
    source, tokens = checkpoint("ling"), torch.arange(48).reshape(2, 24)
    hf_to_mcore(source, tmp_path / "mcore")
    shutil.rmtree(tmp_path / "mcore" / "hf")
    (tmp_path / "mcore" / "reshard.json").unlink()
    mcore_to_hf(tmp_path / "mcore", tmp_path / "glm")
    assert json.loads((tmp_path / "glm" / "config.json").read_text())["architectures"] == [
        "Glm4MoeForCausalLM"
    ]
    assert torch.allclose(hf_logits(source, tokens), hf_logits(tmp_path / "glm", tokens), rtol=0, atol=1e-5)
    mcore_to_hf(tmp_path / "mcore", tmp_path / "ling", family="bailing_moe_v2")
    assert same(hf_tensors(source), hf_tensors(tmp_path / "ling")) == []
    config = json.loads((tmp_path / "ling" / "config.json").read_text())
    assert config["rotary_dim"] == 8 and config["score_function"] == "sigmoid", "engines read these"


def test_args_of_mixtral_as_megatron_lms_own_example_has_them_are_read():
    """Without the width of an expert, which is that of the MLP then, and arguments that came later."""
    later = ("qk_layernorm", "multi_latent_attention", "add_qkv_bias", "moe_ffn_hidden_size")
    for args in (EXPERTS, {name: value for name, value in EXPERTS.items() if name not in later}):
        read = model_of_args(args, "args")
        assert read.family.name == "mixtral" and read.symbols["FE"] == 14336 and read.num_experts == 8


def test_any_two_families_differ_in_an_argument_by_which_both_are_identified():
    identified = [family for family in families().values() if family.identifies]
    assert {*families()} - {family.name for family in identified} == {
        "dots1",  # a GLM-4.5
        "bailing_moe_v2",  # a GLM-4.5
        "glm4_moe_lite",  # a DeepSeek-V3
        "mistral",  # a Llama
        "qwen3_vl_moe_text",  # a Qwen3-MoE
        "qwen2_5_vl_text",  # a Qwen2
        "phi3",  # a Llama or a Mistral
        "seed_oss",  # a Qwen2
    }

    def told_apart(a: Family, b: Family) -> bool:
        common = a.identifies.keys() & b.identifies.keys()
        return any(a.identifies[name] != b.identifies[name] for name in common)

    pairs = itertools.combinations(identified, 2)
    alike = [sorted((a.name, b.name)) for a, b in pairs if not told_apart(a, b)]
    assert alike == [["qwen3_5_moe_text", "qwen3_next"]], "each pair needs an argument in both identifies"


ROW = ("input_layernorm.weight", "H", "input_layernorm.weight", "plain", "-", "always")


@pytest.mark.parametrize(("column", "entry", "message"), [
    (3, "turned", "no arrangement is called 'turned'"), (4, "pp 0", "'pp 0' does not say which axis"),
    (4, "tp", "'tp' does not say"), (4, "remote tp 0", "'remote tp 0' does not say"),
    (5, "use_qk_norms", "nothing maps the condition 'use_qk_norms'"),
    (5, "moe, not bias", "nothing maps the condition 'not bias'"),
])  # fmt: skip
def test_a_row_that_does_not_follow_the_columns_is_refused_with_its_file(column, entry, message):
    base = type(families()["llama"])
    rows = (ROW, tuple(entry if i == column else word for i, word in enumerate(ROW)))
    assert (
        type("Good", (base,), {"layer": (ROW,), "__module__": "mappings.good"})().rows["layer"][0].hf
        == ROW[0]
    )
    with pytest.raises(ValueError, match=f"mappings.strange: {message}"):
        type("Strange", (base,), {"layer": rows, "__module__": "mappings.strange"})()


# Fields of published configs, and of the code of models, that transformers' config class does not have.
PUBLISHED_ONLY = {
    "bailing_moe_v2": {"moe_shared_expert_intermediate_size"},
    "deepseek_v3": {"moe_layer_freq", "scoring_func", "topk_method"},
    "dots1": {"scoring_func"},
    "glm4_moe_lite": {"head_dim"},  # another name of qk_rope_head_dim there
    "olmoe": {"sliding_window"},
}
BASE = families()["qwen3"]
MISTAKES = {
    "a relation": ({"config": (("hidden_size", "hidden_size", "nto", "needed"), *BASE.config)},
                   "config, hidden_size: the relation 'nto'"),
    "a default": ({"config": (("hidden_size", "hidden_size", "=", "neded"), *BASE.config)},
                  "config, hidden_size: the default 'neded'"),
    "a config row too short": ({"config": (("hidden_size", "hidden_size", "="),)},
                               "config, hidden_size: a row has 4 columns"),
    "a symbol of no field": ({"symbols": BASE.symbols | {"X": "hiden_size"}},
                             "symbols, X: no row of config has a field 'hiden_size'"),
    "a letter of no symbol": ({"layer": ((ROW[0], "NX*D H", *ROW[2:]),)},
                              "layer, input_layernorm.weight: the shape 'NX[*]D H'"),
    "brackets": ({"layer": (("q_proj.weight[0:D of 2*D]", *ROW[1:]),)},
                 "layer, q_proj.weight.0:D of 2.D.: brackets hold"),
    "a letter in brackets": ({"layer": (("q_proj.weight[0:X in 2*D]", *ROW[1:]),)},
                             "layer, q_proj.weight.*: the part of a tensor has a letter 'X'"),
    "a row too short": ({"layer": (ROW[:5],)}, "layer, input_layernorm.weight: a row has 6 columns"),
    "always, and a condition": ({"layer": ((*ROW[:5], "dense, always"),)},
                                "layer, input_layernorm.weight: 'dense, always' says"),
    "a mark": ({"layer": ((*ROW, "fp16"),)}, "no mark is called 'fp16'"),
    "a field that is compared": ({"equal": (("head_dim", "hed_dim", "why"),)},
                                 "equal, head_dim: no row of config has a field 'hed_dim'"),
    "a sum": ({"equal": (("head_dim", "hidden_size +num_attention_heads", "why"),)}, "equal, head_dim: no row"),
    "values that are no tuple": ({"refused": (("hidden_act", "silu", "why"),)},
                                 "refused, hidden_act: the values 'silu'"),
    "what identifies it": ({"identifies": {"qk_layernorms": True}}, "identifies: 'qk_layernorms' is not an argument"),
    "what it is never": ({"identifies": BASE.identifies | {"qk_layernorm": False}},
                         "identifies: qk_layernorm is False, but True in"),
    "specs": ({"specs": "reshard.megatron.layers.mla.specs"},
              "specs: 'reshard.megatron.layers.mla.specs' is not module:function"),
    "experts apart": ({"experts_apart": False}, "experts_apart: experts that are in no file apart need places"),
    "a packed name": ({"packed": (("mlp.experts.up", "mlp.experts[{expert}].T"),)},
                      "packed, mlp.experts.up: no row of layer has this name"),
    "a packed part": (
        {"packed": (("mlp.up_proj.weight", "mlp.gates[0:1 of 2].T"),)},
        "packed, mlp.gates.*brackets hold an index, .*, .T may follow",
    ),
    "a name in memory": ({"in_memory": (("mlp.gates.weight", "mlp.gate.weight"),)},
                         "in_memory, mlp.gates.weight: no row of layer"),
    "a window": ({"window": "from max_window_layer"}, "window: 'from max_window_layer' is not one of"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_a_table_is_a_sentence_that_names_file_and_row(mistake):
    entries, message = MISTAKES[mistake]
    type("Good", (type(BASE),), {"__module__": "mappings.good"})()
    with pytest.raises(ValueError, match=f"^mappings.strange: {message}"):
        type("Strange", (type(BASE),), entries | {"__module__": "mappings.strange"})()


def test_a_family_that_lacks_an_entry_or_has_the_name_of_another_is_a_sentence(monkeypatch):
    """As a copied file has it until it is changed."""
    entries = {
        name: getattr(BASE, name)
        for name in ("name", "architecture", "symbols", "config", "layer", "identifies")
    }
    type("Good", (Family,), entries | {"__module__": "mappings.good"})()
    del entries["symbols"], entries["identifies"]
    with pytest.raises(ValueError, match="^mappings.strange: symbols, identifies: every family says this"):
        type("Strange", (Family,), entries | {"__module__": "mappings.strange"})()
    monkeypatch.setattr(type(families()["mistral"]), "name", "llama")
    with pytest.raises(ValueError, match="^mappings/mistral.py: another file has the name 'llama' too"):
        families.__wrapped__()


def test_a_family_without_defaults_names_the_command_that_makes_them():
    new = type("New", (type(BASE),), {"name": "new_family", "__module__": "mappings.new"})()
    with pytest.raises(
        ReshardError, match="no defaults for new_family: run python -m tests.tools.config_defaults"
    ):
        _ = new.defaults
    assert BASE.defaults == config_defaults.DEFAULTS["qwen3"]


@pytest.mark.parametrize("name", families())
def test_fields_that_are_refused_are_fields_of_transformers_class_or_of_the_table(name):
    """A misspelled field would never be refused."""
    family = families()[name]
    rows = {spelling for row in family.config_rows for spelling in row.spellings}
    known = {*CONFIG_MAPPING[name]().to_dict(), *rows, *family.always}
    refused = {refusal.field for refusal in family.refusals}
    assert refused - known == PUBLISHED_ONLY.get(name, set())


def test_what_a_mapping_file_does_not_say_is_as_the_class_has_it():
    assert {
        name
        for name in ("model", "mtp", "ends", "outputs", "layers")
        if name in vars(type(families()["glm4_moe"]))
    } == set()
    assert families()["glm4_moe"].rows["mtp"] == families()["deepseek_v3"].rows["mtp"] and not Family.refused


@pytest.mark.parametrize("variant", OTHERS_OF_DEEPSEEK)
def test_models_built_like_deepseek_v3_convert_and_have_the_logits_of_transformers(
    variant, checkpoint, tmp_path
):
    published = PUBLISHED["Kimi-K2" if variant == "kimi-k2" else "Moonlight-16B-A3B"][0]
    source = tmp_path / "hf"
    shutil.copytree(checkpoint(variant), source)
    config = json.loads((source / "config.json").read_text())
    sizes = {
        name
        for name in config
        if type(config[name]) is int
        and type(published.get(name)) is int
        and name not in ("n_group", "topk_group")
    }
    for name in config.keys() & published.keys() - sizes - {
        "torch_dtype",
        "architectures",
        "model_type",
        "rope_scaling",
    }:
        assert config[name] == published[name], name
    # As they are published: Kimi-K2 by a name of its own, with the older spelling of the rotary embedding.
    rope = config.pop("rope_parameters")
    config |= {
        "model_type": published["model_type"],
        "rope_theta": rope["rope_theta"],
        "rope_scaling": published["rope_scaling"],
    }
    assert not config["rope_scaling"] or config["rope_scaling"] == {
        ("type" if name == "rope_type" else name): value
        for name, value in rope.items()
        if name not in ("rope_theta", "partial_rotary_factor")
    }
    (source / "config.json").write_text(json.dumps(config))
    hf_to_mcore(source, tmp_path / "te", MegatronLayout(tp=2, pp=2, ep=2, etp=1))
    assert same(stored_tensors(tmp_path / "te" / "release"), megatron_tensors(source, 1024)) == []
    mcore_to_hf(tmp_path / "te", tmp_path / "back")
    assert (
        same(hf_tensors(source), hf_tensors(tmp_path / "back")) == [] and diff(source, tmp_path / "te").equal
    )
    hf_to_mcore(source, tmp_path / "mcore", transformer_impl="local")
    torch.manual_seed(1)
    tokens = torch.randint(0, 1000, (2, 200))
    expected = hf_logits(checkpoint(variant), tokens, config["rms_norm_eps"])

    def distance(config: dict) -> float:
        [output] = run_on_ranks(1, "build_and_run", config, {}, str(tmp_path / "mcore" / "release"), tokens)
        return float((output[..., :1000] - expected).abs().max())

    model = read_model(str(source))
    assert distance(model.config) < 1e-5
    if config["rope_scaling"]:
        other = {name: value for name, value in config["rope_scaling"].items() if "beta" not in name}
        assert distance(config | {"rope_scaling": other}) > 1e-3, "betas show"
