"""Equal bytes, the same model: what configs, arguments, flags and live modules say of what the weights compute."""

import json
import math
import re
import shutil
from pathlib import Path

import pytest
import torch

from reshard import (
    MegatronLayout,
    ReshardError,
    check,
    diff,
    hf_to_mcore,
    ignored_config_fields,
    inspect,
    mcore_to_hf,
)
from reshard.cli.main import cli
from reshard.megatron.arguments import caveats, check_args, megatron_args, model_of_args
from reshard.models.config_defaults import DEFAULTS
from reshard.models.family import families
from reshard.models.model import Model
from reshard.models.numerics_args import DERIVED, NUMERICS_ARGS
from reshard.models.rope import attention_factor, hf_rope, inverse_frequencies, megatron_rope, rope_of
from tests.checkpoints import LLAMA3_ROPE, PLAIN_YARN, VARIANTS, YARN
from tests.config_defaults import defaults
from tests.ranks import run_on_ranks
from tests.test_published import PUBLISHED


def config_of(variant: str, **changes) -> dict:
    config = VARIANTS[variant].to_dict() | changes
    return config | {
        "architectures": config.get("architectures")
        or [families()[VARIANTS[variant].model_type].architecture]
    }


def model(variant: str, **changes) -> Model:
    return Model.from_hf(config_of(variant, **changes))


# Configs

LINEAR = {"rope_type": "linear", "rope_theta": 1e4}
REFUSED = [
    ("llama", {"attention_bias": True}, "attention_bias != mlp_bias cannot be held"),
    ("qwen3", {"attention_bias": True}, "attention_bias = True cannot be held"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act = gelu"),
    ("deepseek-v3", {"scoring_func": "softmax"}, "scoring_func = softmax"),
    ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification is not supported; the architectures that are: .*LlamaForCausalLM"),
    ("qwen3", {"architectures": ["Qwen3NextForCausalLM"]}, "Qwen3NextForCausalLM is not supported"),
    # fields that nothing maps
    ("deepseek-v3", {"rope_interleave": False}, "rope_interleave = False may make another model"),
    ("qwen3-moe", {"shared_expert_intermediate_size": 64}, "shared_expert_intermediate_size = 64 may make another"),
    ("llama", {"logit_scale": 0.5, "final_logit_softcapping": 30.0}, "logit_scale = 0.5, final_logit_softcapping = 30.0 may make"),
    ("llama", {"is_encoder_decoder": True}, "is_encoder_decoder = True may make"),
    ("llama", {"sliding_window": 4096}, "sliding_window = 4096 may make"),
    # windows
    ("qwen2", {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 3, "layer_types": None}, "attend to a window"),
    ("qwen3", {"layer_types": ["full_attention"] * 3 + ["sliding_attention"]}, "attend to a window"),
    ("qwen3-moe", {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 4}, "attend to a window"),
    ("qwen3-moe", {"use_sliding_window": True, "sliding_window": 16, "layer_types": ["full_attention"] * 4}, "attend to a window"),
    # null, where transformers does not take it as absent
    ("deepseek-v3", {"rope_interleave": None}, "rope_interleave = None may make another model"),
    ("deepseek-v3", {"norm_topk_prob": None}, "norm_topk_prob = None cannot be held"),
    ("deepseek-v3", {"scoring_func": None}, "scoring_func = None cannot be held"),
    ("qwen3-moe", {"norm_topk_prob": None}, "norm_topk_prob is null"),
    ("llama", {"tie_word_embeddings": None}, "tie_word_embeddings is null"),
    ("llama", {"rms_norm_eps": None}, "rms_norm_eps is null"),
    ("llama", {"hidden_act": None}, "hidden_act = None"),
    ("llama", {"is_encoder_decoder": None}, "is_encoder_decoder = None may make"),
    # two names that do not go together, two sizes that contradict each other
    ("llama", {"model_type": "mistral"}, "model_type is 'mistral', but architectures names LlamaForCausalLM"),
    ("qwen3", {"model_type": "qwen3_moe"}, "model_type is 'qwen3_moe', but architectures names Qwen3ForCausalLM"),
    ("deepseek-v3", {"model_type": "deepseek_v2"}, "model_type is 'deepseek_v2'"),
    ("deepseek-v3", {"head_dim": 16}, "head_dim != qk_rope_head_dim"),
    ("deepseek-v3", {"qk_head_dim": 16}, "qk_head_dim != qk_nope_head_dim"),
    # nonsense
    ("llama", {"hidden_size": None}, "has no field hidden_size"),
    ("llama", {"hidden_size": "big"}, "hidden_size is 'big', which is not a positive whole number"),
    ("llama", {"num_attention_heads": -8}, "num_attention_heads is -8"),
    ("llama", {"num_hidden_layers": 2.5}, "num_hidden_layers is 2.5"),
    ("llama", {"num_hidden_layers": True}, "num_hidden_layers is True"),
    ("llama", {"num_hidden_layers": 10**9}, "num_hidden_layers is above 10,000"),
    ("llama", {"num_key_value_heads": 3}, "num_key_value_heads 3 does not divide num_attention_heads 8"),
    ("llama", {"rms_norm_eps": math.nan}, "rms_norm_eps is nan, which is not a number of at least 0"),
    ("llama", {"tie_word_embeddings": 1}, "tie_word_embeddings is 1, which is not true or false"),
    ("qwen3-moe", {"num_experts_per_tok": "2"}, "num_experts_per_tok is '2'"),
    ("qwen3-moe", {"num_experts_per_tok": 3.5}, "num_experts_per_tok is 3.5, which is not a positive whole number"),
    ("qwen3-moe", {"num_experts_per_tok": 9}, "num_experts_per_tok is 9, but num_experts is 8"),
    ("qwen3-moe", {"num_experts": 4}, "num_experts is 4, but num_local_experts, which means the same, is 8"),
    ("qwen3-moe", {"mlp_only_layers": 7}, "do not say which layers are dense"),
    ("qwen3-moe", {"decoder_sparse_step": 0}, "do not say which layers are dense"),
    ("deepseek-v3", {"topk_group": 5}, "topk_group is 5, but n_group is 4"),
    ("deepseek-v3", {"first_k_dense_replace": None}, "has no field first_k_dense_replace"),
    ("deepseek-v3", {"first_k_dense_replace": "three"}, "first_k_dense_replace is 'three'"),
    ("deepseek-v3", {"routed_scaling_factor": None}, "has no field routed_scaling_factor"),
    # rotary embeddings
    ("llama", {"rope_parameters": "llama3"}, "rope_parameters is 'llama3', which is not an object"),
    ("llama", {"rope_parameters": {"rope_type": "llama3"}}, "rope type 'llama3' has no factor"),
    ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic' has no counterpart in Megatron for this family"),
    ("llama", {"rope_parameters": LLAMA3_ROPE | {"factor": math.nan}}, "factor of the rotary embedding is nan"),
    ("llama", {"rope_parameters": LLAMA3_ROPE | {"factor": -1.0}}, "factor of the rotary embedding is -1.0"),
    ("llama", {"rope_parameters": LLAMA3_ROPE | {"low_freq_factor": 2.0}}, "low_freq_factor is 2.0, but Megatron has 1.0 built in"),
    ("llama", {"rope_parameters": {k: v for k, v in LLAMA3_ROPE.items() if "original" not in k}},
     "original_max_position_embeddings is 256, but Megatron has 8192 built in"),
    ("llama", {"rope_parameters": {"rope_theta": True}}, "rope_theta of the rotary embedding is True"),
    ("llama", {"rope_parameters": {"rope_theta": 10000.5}}, "rope_theta 10000.5 is not a whole number"),
    ("llama", {"rope_parameters": {"rope_theta": 1e4}, "rope_theta": 5e4}, "says rope_theta = 10000.0 and rope_theta = 50000.0"),
    ("llama", {"rope_parameters": LINEAR | {"factor": 2.5}}, "factor 2.5, and Megatron's --rotary-seq-len-interpolation-factor takes only"),
    ("llama", {"rope_parameters": LINEAR | {"factor": 2.0, "short_factor": [1.0]}}, r"'linear' has short_factor = \[1.0\], whose meaning"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
    ("glm4-moe", {"rope_parameters": {"partial_rotary_factor": 1.5}}, "partial_rotary_factor is 1.5, which is more than a whole head"),
    ("glm4-moe", {"rope_parameters": PLAIN_YARN}, "'yarn' has no counterpart in Megatron for this family"),
    ("glm4-moe", {"norm_topk_prob": False}, "norm_topk_prob = False cannot be held"),
    ("deepseek-v3", {"rope_parameters": YARN | {"attention_factor": 0.9}}, "scaled by 0.9 in transformers, by 1 in Megatron"),
    ("deepseek-v3", {"rope_parameters": YARN | {"mscale": 0.0}}, "scaled by 1.36889 in transformers, by 1 in Megatron"),
    ("qwen3-yarn", {"rope_parameters": PLAIN_YARN | {"attention_factor": 1.0}}, "scaled by 1 in transformers, by 1.13863 in Megatron"),
]  # fmt: skip


@pytest.mark.parametrize(("variant", "change", "message"), REFUSED, ids=lambda value: str(value)[:60])
def test_a_config_that_makes_another_model_or_none_is_refused_by_name(variant, change, message):
    with pytest.raises(ReshardError, match=message):
        model(variant, **change)


@pytest.mark.parametrize(("variant", "change"), [
    ("qwen2", {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 4, "layer_types": None}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 2, "layer_types": ["full_attention"] * 4}),
    ("qwen3-moe", {"use_sliding_window": True, "sliding_window": None, "layer_types": ["full_attention"] * 4}),
    ("llama", {"head_dim": None, "num_key_value_heads": None, "rope_scaling": None, "pad_token_id": None, "model_type": None}),
    ("llama", {"architectures": ["LLaMAForCausalLM"], "pretraining_tp": 2, "max_sequence_length": 2048}),
    ("qwen3-moe", {"initializer_range": None, "attention_dropout": None, "router_aux_loss_coef": None, "max_position_embeddings": None}),
    ("deepseek-v3", {"model_type": "kimi_k2"}),
    ("deepseek-v3", {"head_dim": 8, "qk_head_dim": 24}),
    ("qwen3", {"use_sliding_window": False, "sliding_window": 32, "max_window_layers": 2, "layer_types": None}),
    ("llama", {"rope_parameters": LINEAR | {"factor": 4.0}}),
    ("llama", {"rope_parameters": None, "rope_scaling": PLAIN_YARN, "rope_theta": 1000000}),
    ("qwen3", {"rope_parameters": LLAMA3_ROPE}),
    ("llama", {"_attn_implementation": "sdpa", "unsloth_version": "2025.1", "logit_scale": None, "temperature": 0.6}),
])  # fmt: skip
def test_what_changes_nothing_is_taken(variant, change):
    model(variant, **change)


ABSENT = object()
WINDOWS = {
    "use_sliding_window": [ABSENT, None, False, True], "sliding_window": [ABSENT, None, 16], "max_window_layers": [ABSENT, 2, 4],
    "layer_types": [ABSENT, None, ["full_attention"] * 4, ["full_attention"] * 3 + ["sliding_attention"]],
}  # fmt: skip


@pytest.mark.parametrize("variant", ["qwen2", "qwen3", "qwen3-moe"])
def test_windows_are_refused_where_layers_of_the_class_of_transformers_slide_and_nowhere_else(variant):
    import itertools

    base = {name: value for name, value in config_of(variant).items() if name not in WINDOWS}
    slid = 0
    for layers in (4, 32):
        for values in itertools.product(*WINDOWS.values()):
            said = {name: value for name, value in zip(WINDOWS, values) if value is not ABSENT}
            types = said.get("layer_types")
            if layers == 32 and types is not None:
                continue
            # transformers checks types of late, and null is no bool: to its code it is as good as false.
            theirs = type(VARIANTS[variant])(**base | {"num_hidden_layers": layers, **said,
                                                       **({"use_sliding_window": False} if said.get("use_sliding_window", 1) is None else {})})  # fmt: skip
            each = (
                ["sliding_attention"] if variant == "qwen3-moe" else theirs.layer_types
            )  # its layers never look at their types
            slides = theirs.sliding_window is not None and "sliding_attention" in each
            slides = slides or "sliding_attention" in (types or ())  # at least to other engines
            try:
                Model.from_hf(base | said | {"num_hidden_layers": layers})
                refused = False
            except ReshardError as error:
                assert "attend to a window" in str(error)
                refused = True
            assert refused == slides, (layers, said)
            slid += slides
    assert slid > 20


def test_a_field_can_be_left_out_by_name(checkpoint, tmp_path, monkeypatch):
    source = copied(checkpoint("qwen3"), tmp_path / "hf", logit_scale=0.5)
    with pytest.raises(ReshardError, match=r'reshard.ignored_config_fields\("logit_scale"\) goes on'):
        hf_to_mcore(source, tmp_path / "mcore")
    assert (
        cli(
            ["hf-to-mcore", str(source), str(tmp_path / "mcore"), "--ignore-config-field", "logit_scale"],
            standalone_mode=False,
        )
        is None
    )
    with ignored_config_fields("logit_scale"):
        assert diff(source, tmp_path / "mcore").equal
    monkeypatch.setenv("RESHARD_IGNORE_CONFIG_FIELDS", "other,logit_scale")
    assert diff(source, tmp_path / "mcore").equal
    monkeypatch.undo()
    mcore_to_hf(tmp_path / "mcore", tmp_path / "back")  # whose manifest says what was ignored
    (tmp_path / "mcore" / "reshard.json").unlink()
    with pytest.raises(ReshardError, match="logit_scale"):
        mcore_to_hf(tmp_path / "mcore", tmp_path / "again")


def test_what_is_ignored_is_said_recorded_and_ignored_again(checkpoint, tmp_path, capsys):
    source, mcore, back = (
        copied(checkpoint("qwen3"), tmp_path / "hf", rms_norm_eps=1e-3),
        tmp_path / "mcore",
        tmp_path / "back",
    )
    with ignored_config_fields("rms_norm_eps"):
        report = hf_to_mcore(source, mcore)
    said = "rms_norm_eps = 0.001 is ignored; 1e-06 is used, as where it is absent"
    assert [notice for notice in report.notices if said in notice]
    assert "--norm-epsilon 1e-06" in (mcore / "megatron_flags.txt").read_text()
    assert json.loads((mcore / "reshard.json").read_text())["ignored_config_fields"] == ["rms_norm_eps"]
    for arguments in (["inspect", str(mcore)], ["check", str(mcore)], ["mcore-to-hf", str(mcore), str(back)], ["diff", str(mcore), str(back)],
                      ["diff", str(mcore / "release"), str(back)]):  # fmt: skip
        assert cli(arguments, standalone_mode=False) in (0, None) and said in capsys.readouterr().err, (
            arguments
        )
    found = diff(source, back)
    assert (
        found.fields.keys() == {"rms_norm_eps"} and not found.differences
    )  # the source says something else still
    args = model_of_args(megatron_args(model("qwen3")), "args")
    with ignored_config_fields("layernorm_epsilon"):
        check_args(args, {"layernorm_epsilon": 0.5}, "args", "")
    assert args.ignored["layernorm_epsilon"] == "args: layernorm_epsilon = 0.5 is ignored; 1e-06 is used"


def test_a_plan_says_what_it_ignores(checkpoint, tmp_path, capsys):
    source = tmp_path / "hf"
    source.mkdir()
    config = json.loads((checkpoint("llama") / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"logit_scale": 9.0}))
    command = ["plan", "--model", str(source), "--trainer", "tp=2", "--engine", "tp=2"]
    with pytest.raises(ReshardError, match="logit_scale"):
        cli(command, standalone_mode=False)
    cli([*command, "--ignore-config-field", "logit_scale"], standalone_mode=False)
    assert "logit_scale = 9.0 is ignored" in capsys.readouterr().err
    cli([*command, "--ignore-config-field", "logit_scale", "--json"], standalone_mode=False)
    assert "logit_scale" in json.loads(capsys.readouterr().out)["notices"][0]
    with pytest.raises(ReshardError, match="did you mean logit_scale"):
        cli(
            [*command, "--ignore-config-field", "logit_scale", "--ignore-config-field", "logit_scales"],
            standalone_mode=False,
        )


def test_a_name_to_be_ignored_that_nothing_has_is_refused(checkpoint, tmp_path):
    hf_to_mcore(checkpoint("qwen3"), tmp_path / "mcore")
    for call in (lambda: hf_to_mcore(checkpoint("qwen3"), tmp_path / "out"), lambda: mcore_to_hf(tmp_path / "mcore", tmp_path / "out"),
                 lambda: diff(checkpoint("qwen3"), tmp_path / "mcore"), lambda: check(tmp_path / "mcore"), lambda: inspect(tmp_path / "mcore")):  # fmt: skip
        for name, hint in (("rms_norm_epsilon", "did you mean "), ("zzz", "no such field is in")):
            with (
                ignored_config_fields(name),
                pytest.raises(ReshardError, match=f"{name} is to be ignored, but .*{hint}"),
            ):
                call()
    assert not (tmp_path / "out").exists()
    for name in ("rms_norm_eps", "layernorm_epsilon", "sliding_window", "rope_interleave", "rope_scaling"):
        with ignored_config_fields(name):
            inspect(checkpoint("deepseek-v3" if name == "rope_interleave" else "qwen3"))


def test_the_defaults_are_those_of_the_installed_transformers():
    """If not: ``python -m tests.config_defaults > reshard/models/config_defaults.py``."""
    assert defaults() == DEFAULTS


def test_a_config_that_says_only_what_it_must_has_the_defaults_of_transformers():
    """The numbers of a table's CONFIG are what the class has."""
    from transformers import CONFIG_MAPPING

    for name, family in families().items():
        theirs = CONFIG_MAPPING[name]().to_dict()
        for field, _, _, _, default in family.spellings:
            # Without a rank queries are not compressed; transformers builds no MTP layers.
            if (
                field in theirs
                and not isinstance(default, str)
                and field not in ("q_lora_rank", "num_nextn_predict_layers")
            ):
                assert theirs[field] == default, (name, field)


# Rotary embeddings


def test_rope_settings_go_there_and_back():
    cases = [("mla", YARN | {"beta_fast": 1.0, "original_max_position_embeddings": 8192}), ("gpt", LLAMA3_ROPE), ("gpt", LINEAR | {"factor": 4.0}), ("gpt", {"rope_type": "default", "rope_theta": 1e6}), ("mla", YARN),
             ("gpt", PLAIN_YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "truncate": False}), ("mla", {"rope_type": "default", "rope_theta": 1e4})]  # fmt: skip
    for kind, rope in cases:
        args = {"position_embedding_type": "rope"} | megatron_rope(
            rope_of({"rope_parameters": rope}), kind == "mla", "config"
        )
        back = hf_rope(args | {"multi_latent_attention": kind == "mla"})
        assert back["rope_theta"] == rope["rope_theta"]
        assert (back["rope_scaling"] or {"rope_type": "default"}).items() >= {
            k: v for k, v in rope.items() if k != "rope_theta"
        }.items()


def test_what_megatron_has_no_flag_for_is_an_argument_and_said_but_not_on_the_command_line():
    from reshard.megatron.flags import command_line

    made = model("deepseek-v3", rope_parameters=YARN | {"beta_fast": 16})
    assert megatron_args(made)["beta_fast"] == 16 and "beta_slow" not in megatron_args(made)
    assert not any("beta" in flag for flag in command_line(megatron_args(made)))
    assert any("no flag for beta_fast 16 of the rotary embedding" in said for said in caveats(made, "local"))
    assert not caveats(model("deepseek-v3"), "local")
    assert megatron_args(model_of_args(megatron_args(made), "args")) == megatron_args(made)


def test_megatrons_yarn_of_latent_attention_is_read_where_no_type_is_given():
    assert (
        hf_rope({"multi_latent_attention": True, "rotary_scaling_factor": 40.0, "mscale": 1.0})[
            "rope_scaling"
        ]["rope_type"]
        == "yarn"
    )


@pytest.mark.parametrize("rope", [
    {"rope_type": "default", "rope_theta": 5e5}, LINEAR | {"factor": 3.0}, LLAMA3_ROPE, PLAIN_YARN, YARN,
    PLAIN_YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "truncate": False, "factor": 8.0}, {"rope_type": "yarn", "factor": 2.0},
], ids=str)  # fmt: skip
def test_frequencies_are_those_of_transformers(rope):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        num_hidden_layers=1,
        max_position_embeddings=256,
        rope_parameters=rope,
    )
    init = ROPE_INIT_FUNCTIONS.get(rope["rope_type"])
    theirs, factor = (
        init(config, torch.device("cpu")) if init else (LlamaRotaryEmbedding(config).inv_freq, 1.0)
    )
    ours = rope_of({"rope_parameters": rope, "max_position_embeddings": 256})
    assert torch.allclose(torch.tensor(inverse_frequencies(ours, 64)), theirs, rtol=1e-5, atol=0)
    assert attention_factor(ours) == pytest.approx(factor)


# Megatron's arguments

ANOTHER = {
    "position_embedding_type": "none", "rotary_percent": 0.5, "rotary_interleaved": True, "no_rope_freq": 4, "quick_geglu": True,
    "window_size": (128, 0), "softmax_scale": 0.1, "layernorm_zero_centered_gamma": True, "normalization": "LayerNorm",
    "swiglu": False, "qk_l2_norm": True, "attention_output_gate": True, "glu_linear_offset": 1.0, "softmax_type": "learnable",
    "moe_shared_expert_gate": True, "moe_expert_capacity_factor": 1.25, "moe_router_load_balancing_type": "sinkhorn",
    "experimental_attention_variant": "dsa", "moe_router_num_groups": 4,
}  # fmt: skip


@pytest.mark.parametrize("name", ANOTHER)
def test_an_argument_that_makes_another_model_is_refused_by_name(name):
    args = megatron_args(model("qwen3-moe"))
    model_of_args(args | {"window_size": (-1, -1), "moe_router_load_balancing_type": "seq_aux_loss"}, "args")
    with pytest.raises(ReshardError, match=f"args: .*{name} is .* makes another model of the weights"):
        model_of_args(args | {name: ANOTHER[name]}, "args")
    with ignored_config_fields(name):
        model_of_args(args | {name: ANOTHER[name]}, "args")


def test_args_that_describe_no_model_are_refused():
    args = megatron_args(model("qwen3-moe-mixed"))
    assert model_of_args(args, "args").kinds == model("qwen3-moe-mixed").kinds
    for change, message in (({"moe_layer_freq": "every second"}, "cannot be read as a model's"), ({"num_layers": None}, "num_layers"),
                            ({"moe_layer_freq": [1]}, "1 entries for 4 layers"), ({"squared_relu": True}, "squared_relu"),
                            ({"qk_layernorm": False}, "no family here has .*qk_layernorm = False"),  # Mixtral's
                            ({"qk_layernorm": None}, "no family here has .*qk_layernorm = None")):  # fmt: skip
        with pytest.raises(ReshardError, match=message):
            model_of_args(args | change, "args")
    with pytest.raises(ReshardError, match="--family gpt is not one of"):
        model_of_args(args, "args", "gpt")


@pytest.mark.parametrize("variant", VARIANTS)
def test_arguments_are_those_of_the_family_that_made_them(variant):
    made = model(variant)
    back = model_of_args(megatron_args(made), "args")
    assert (
        back.family == made.family and back.kinds == made.kinds and megatron_args(back) == megatron_args(made)
    )


def test_what_args_lack_is_at_megatrons_default_and_older_ones_name_the_epsilon_otherwise():
    args = megatron_args(model("llama", rms_norm_eps=2e-4))
    epsilon = args.pop("layernorm_epsilon")
    assert model_of_args(args, "args").config["rms_norm_eps"] == 1e-5  # Megatron's; the family's is 1e-6
    older = args | {"norm_epsilon": epsilon}
    assert model_of_args(older, "args").config["rms_norm_eps"] == epsilon == 2e-4
    with pytest.raises(ReshardError, match="layernorm_epsilon is 0.0002 .not 1e-06."):
        check_args(model("llama", rms_norm_eps=1e-6), older, "args", "")


def test_yarn_of_megatron_before_0_14_began_at_max_position_embeddings():
    args = megatron_args(model("deepseek-v3", max_position_embeddings=32768))
    assert args["rope_type"] == "yarn" and args["rotary_scaling_factor"] != 1
    now = model_of_args(args, "args")
    assert now.config["rope_scaling"].get("original_max_position_embeddings", 4096) == 4096
    args.pop("rope_type")
    before = model_of_args(args, "args")
    assert before.config["rope_scaling"]["original_max_position_embeddings"] == 32768
    with pytest.raises(ReshardError, match="original_max_position_embeddings is 32768 .not 4096."):
        check_args(now, args, "args", "")


@pytest.mark.parametrize(("change", "message"), [
    ({"num_attention_heads": 4, "num_key_value_heads": 4}, "num_attention_heads is 8 .not 4., num_query_groups is 2 .not 4."),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e4}}, "rotary_base is 10000 .not 50000."),
    ({"rope_parameters": PLAIN_YARN}, "position_embedding_type is 'rope' .not 'yarn'."),
    ({"rms_norm_eps": 0.1}, "layernorm_epsilon is 1e-06 .not 0.1."),
])  # fmt: skip
def test_a_checkpoint_whose_args_contradict_its_config_is_refused(change, message, checkpoint, tmp_path):
    hf_to_mcore(checkpoint("qwen3"), tmp_path / "mcore")
    (tmp_path / "mcore" / "hf" / "config.json").write_text(json.dumps(config_of("qwen3", **change)))
    with pytest.raises(ReshardError, match=message):
        mcore_to_hf(tmp_path / "mcore", tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_what_training_chose_does_not_contradict_a_config(checkpoint, tmp_path):
    hf_to_mcore(checkpoint("qwen3"), tmp_path / "mcore")
    config = config_of("qwen3", max_position_embeddings=128, attention_dropout=0.1, initializer_range=0.5)
    (tmp_path / "mcore" / "hf" / "config.json").write_text(json.dumps(config))
    mcore_to_hf(tmp_path / "mcore", tmp_path / "back", hf_config=tmp_path / "mcore" / "hf")


def copied(source: Path, to: Path, **changes) -> Path:
    """A Hugging Face directory with another config."""
    to.mkdir()
    (to / "model.safetensors").symlink_to(source / "model.safetensors")
    (to / "config.json").write_text(json.dumps(json.loads((source / "config.json").read_text()) | changes))
    return to


def test_diff_names_the_fields_that_make_two_models_of_the_same_weights(checkpoint, tmp_path, capsys):
    source = checkpoint("qwen3")
    assert diff(source, copied(source, tmp_path / "same", max_position_embeddings=128, use_cache=False)).equal
    other = copied(source, tmp_path / "other", rms_norm_eps=0.1, rope_parameters=PLAIN_YARN)
    found = diff(source, other)
    assert (
        not found.equal
        and not found.differences
        and found.fields.keys() == {"rms_norm_eps", "rope_parameters"}
    )
    with pytest.raises(SystemExit) as ended:
        cli(["diff", str(source), str(other)])
    assert (
        ended.value.code == 1
        and f"rms_norm_eps is 1e-06 in {source}, 0.1 in {other}" in capsys.readouterr().out
    )


# Megatron's own parser


def test_every_argument_of_the_installed_megatron_either_decides_or_does_not():
    """A new argument of Megatron's has to be put into `NUMERICS_ARGS` or into ``not_deciding.txt``."""
    [(actions, fields)] = run_on_ranks(1, "arguments")
    others = set((Path(__file__).parent / "not_deciding.txt").read_text().split())
    assert (
        actions | fields
    ).keys() - NUMERICS_ARGS.keys() - others == set() and others & NUMERICS_ARGS.keys() == set()
    sizes = {name for name, default in NUMERICS_ARGS.items() if default is DERIVED}
    wrong = {
        name
        for name in NUMERICS_ARGS.keys() & actions.keys() - sizes
        if actions[name] != repr(NUMERICS_ARGS[name])
    }
    assert wrong == set(), "defaults that are not Megatron's"


# What the published configs mean, in the terms of Megatron's config: read off the papers and modeling code, not off this project.
EVERYWHERE = {
    "normalization": "RMSNorm", "activation_func": "silu", "gated_linear_unit": True, "hidden_dropout": 0.0, "attention_dropout": 0.0,
    "init_method_std": 0.02, "add_bias_linear": False, "attention_softmax_in_fp32": True, "tokenizer_type": "HuggingFaceTokenizer",
    "seq_length": 4096, "rotary_percent": 1.0, "rotary_interleaved": False, "position_embedding_type": "rope", "use_rope_scaling": False,
    "rotary_seq_len_interpolation_factor": None, "num_moe_experts": None, "multi_latent_attention": False, "mtp_num_layers": None,
    "sequence_parallel": False, "qk_layernorm": False, "add_qkv_bias": False, "layernorm_epsilon": 1e-06,
}  # fmt: skip
MEANT = {
    "Llama-2-7b": {
        "num_layers": 32, "hidden_size": 4096, "ffn_hidden_size": 11008, "num_attention_heads": 32, "num_query_groups": 32, "kv_channels": 128,
        "layernorm_epsilon": 1e-05, "rotary_base": 10000, "untie_embeddings_and_output_weights": True, "vocab_size": 32000,
        "max_position_embeddings": 4096, "params": "fp16",
    },
    "Llama-3.2-1B": {
        "num_layers": 16, "hidden_size": 2048, "ffn_hidden_size": 8192, "num_attention_heads": 32, "num_query_groups": 8, "kv_channels": 64,
        "layernorm_epsilon": 1e-05, "rotary_base": 500000, "use_rope_scaling": True, "rope_scaling_factor": 32.0,
        "untie_embeddings_and_output_weights": False, "vocab_size": 128256, "max_position_embeddings": 131072,
    },
    "Qwen2.5-7B": {
        "num_layers": 28, "hidden_size": 3584, "ffn_hidden_size": 18944, "num_attention_heads": 28, "num_query_groups": 4, "kv_channels": 128,
        "rotary_base": 1000000, "add_qkv_bias": True, "untie_embeddings_and_output_weights": True, "vocab_size": 152064,
        "max_position_embeddings": 131072,
    },
    "Qwen3-32B": {
        "num_layers": 64, "hidden_size": 5120, "ffn_hidden_size": 25600, "num_attention_heads": 64, "num_query_groups": 8, "kv_channels": 128,
        "rotary_base": 1000000, "qk_layernorm": True, "untie_embeddings_and_output_weights": True, "vocab_size": 151936,
        "max_position_embeddings": 40960,
    },
    "Qwen3-32B with YaRN": {
        "num_layers": 64, "hidden_size": 5120, "ffn_hidden_size": 25600, "num_attention_heads": 64, "num_query_groups": 8, "kv_channels": 128,
        "rotary_base": 1000000, "qk_layernorm": True, "untie_embeddings_and_output_weights": True, "vocab_size": 151936,
        "max_position_embeddings": 131072, "position_embedding_type": "yarn", "yarn_rotary_scaling_factor": 4.0, "yarn_beta_fast": 32.0,
        "yarn_original_max_position_embeddings": 32768, "yarn_beta_slow": 1.0, "yarn_mscale": 1.0, "yarn_mscale_all_dim": 0.0,
        "yarn_correction_range_round_to_int": True,
    },
    "Qwen3-30B-A3B": {
        "num_layers": 48, "hidden_size": 2048, "num_attention_heads": 32, "num_query_groups": 4, "kv_channels": 128, "ffn_hidden_size": 6144,
        "rotary_base": 1000000, "qk_layernorm": True, "untie_embeddings_and_output_weights": True, "vocab_size": 151936,
        "max_position_embeddings": 40960, "num_moe_experts": 128, "moe_router_topk": 8, "moe_ffn_hidden_size": 768, "moe_layer_freq": 1,
        "moe_router_score_function": "softmax", "moe_router_pre_softmax": False, "moe_aux_loss_coeff": 0.001,
        "moe_router_load_balancing_type": "aux_loss", "moe_router_dtype": "fp32", "sequence_parallel": True,
    },
    "DeepSeek-V3": {
        "num_layers": 61, "hidden_size": 7168, "ffn_hidden_size": 18432, "num_attention_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512,
        "qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 128, "multi_latent_attention": True, "qk_layernorm": True,
        "rotary_base": 10000, "rope_type": "yarn", "rotary_scaling_factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1, "untie_embeddings_and_output_weights": True,
        "vocab_size": 129280, "max_position_embeddings": 163840, "num_moe_experts": 256, "moe_router_topk": 8, "moe_ffn_hidden_size": 2048,
        "moe_layer_freq": [0] * 3 + [1] * 58, "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": 2.5, "moe_router_num_groups": 8, "moe_router_group_topk": 4, "moe_router_dtype": "fp32",
        "moe_shared_expert_intermediate_size": 2048, "moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.0001,
        "mtp_num_layers": 1, "sequence_parallel": True, "moe_router_pre_softmax": False,
    },
    "GLM-4.5": {
        "num_layers": 92, "hidden_size": 5120, "ffn_hidden_size": 12288, "num_attention_heads": 96, "num_query_groups": 8, "kv_channels": 128,
        "layernorm_epsilon": 1e-05, "rotary_base": 1000000, "rotary_percent": 0.5, "qk_layernorm": True, "add_qkv_bias": True,
        "untie_embeddings_and_output_weights": True, "vocab_size": 151552, "max_position_embeddings": 131072, "num_moe_experts": 160,
        "moe_router_topk": 8, "moe_ffn_hidden_size": 1536, "moe_layer_freq": [0] * 3 + [1] * 89, "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True, "moe_router_topk_scaling_factor": 2.5, "moe_router_dtype": "fp32",
        "moe_shared_expert_intermediate_size": 1536, "moe_router_load_balancing_type": "seq_aux_loss", "mtp_num_layers": 1,
        "sequence_parallel": True,
    },
}  # fmt: skip


def published(name: str) -> tuple[dict, MegatronLayout]:
    config, _, layout = PUBLISHED[name.split(" ")[0]]
    if "YaRN" in name:
        yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
        config = config | {"rope_scaling": yarn, "max_position_embeddings": 131072}
    return config | ({"aux_loss_alpha": 0.0001, "seq_aux": True} if name == "DeepSeek-V3" else {}), layout


def flags_of(
    config: dict, layout: MegatronLayout, transformer_impl: str = "transformer_engine"
) -> tuple[list[str], int]:
    """The flags as the conversion writes them, word by word, and the size of their world."""
    from reshard.core.dtypes import dtype_named
    from reshard.megatron.arguments import arguments
    from reshard.megatron.flags import command_line
    from reshard.megatron.parameters import padded_vocab_size

    made = Model.from_hf(config)
    dtype = dtype_named(str(config.get("torch_dtype") or "float32"))
    args = arguments(
        made, layout, padded_vocab_size(config["vocab_size"], 128, layout.tp), 128, dtype, transformer_impl
    )
    return " ".join(command_line(args)).split(), layout.world_size(made)


def test_the_flags_alone_make_the_published_model_in_megatrons_own_parser():
    found = run_on_ranks(1, "configs", [flags_of(*published(name)) for name in MEANT])[0]
    for (name, meant), config in zip(MEANT.items(), found, strict=True):
        wanted = EVERYWHERE | meant
        dtype = wanted.pop("params", "bf16")
        assert config[dtype] and config["tensor_model_parallel_size"] == PUBLISHED[name.split(" ")[0]][2].tp
        assert {key: (config[key], value) for key, value in wanted.items() if config[key] != value} == {}, (
            name
        )
        # Whatever else decides what the model computes is as Megatron has it for a plain transformer.
        plain = {
            key: value
            for key, value in NUMERICS_ARGS.items()
            if key in config and key not in wanted and value is not None
        }
        own = {"num_experts", "moe_router_topk", "moe_ffn_hidden_size", "rope_type", "rope_scaling_factor", "swiglu",
               *("kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "num_query_groups", "kv_channels")}  # fmt: skip
        assert {
            key: (config[key], value)
            for key, value in plain.items()
            if key not in own and config[key] != value
        } == {}, name


# What Megatron 0.19 does not restore from a checkpoint's args, of what makes the model (and of the flags that its training needs).
NOT_RESTORED = """--norm-epsilon --qk-layernorm --use-rope-scaling --rope-scaling-factor --rotary-seq-len-interpolation-factor
--yarn-original-max-position-embeddings --yarn-beta-fast --yarn-beta-slow --yarn-correction-range-round-to-int --rotary-scaling-factor
--mscale --mscale-all-dim --multi-latent-attention --q-lora-rank --kv-lora-rank --qk-head-dim --qk-pos-emb-head-dim --v-head-dim
--rope-type --no-rope-fusion --moe-router-num-groups --moe-router-group-topk --moe-router-dtype --moe-router-load-balancing-type
--moe-aux-loss-coeff --init-method-std --attention-softmax-in-fp32 --transformer-impl --bf16 --fp16 --vocab-size
--make-vocab-size-divisible-by --tokenizer-type --sequence-parallel --tensor-model-parallel-size --pipeline-model-parallel-size
--expert-model-parallel-size --expert-tensor-parallel-size""".split()
RESTORED = [
    "glm4-moe",
    "llama-rope-tied",
    "llama-bias",
    "qwen2",
    "qwen3",
    "qwen3-yarn",
    "qwen3-moe-mixed",
    "deepseek-v3",
    "deepseek-v3-no-q-lora",
]


def test_use_checkpoint_args_needs_the_listed_flags_and_no_others(checkpoint, tmp_path):
    cases, flags = [], {"layernorm_epsilon": "--norm-epsilon", "apply_rope_fusion": "--no-rope-fusion"}
    for variant in RESTORED:
        directory = tmp_path / variant
        source = shutil.copytree(checkpoint(variant), tmp_path / f"{variant}-hf")
        (source / "tokenizer.json").write_text("{}")  # whose type is a flag, too
        hf_to_mcore(source, directory, transformer_impl="local")
        lines = (directory / "megatron_flags.txt").read_text().splitlines()
        words = " ".join(lines).split()
        flags |= {word.removeprefix("--").replace("-", "_"): word for word in words if word.startswith("--")}
        passed = [word for line in lines if line.split()[0] in NOT_RESTORED for word in line.split()]
        cases += [(words, str(directory), passed), (words, str(directory), [])]
    [found] = run_on_ranks(1, "restored", cases)
    assert {variant: wrong for variant, wrong in zip(RESTORED, found[::2]) if wrong} == {}
    needed = {
        flags[name]
        for (words, *_), alone in zip(cases[1::2], found[1::2])
        for name in alone
        if flags.get(name) in words
    }
    # In these small models at Megatron's default, or said as Megatron says it without a flag.
    as_default = {"--bf16", "--fp16", "--kv-lora-rank", "--mscale", "--rope-scaling-factor", "--rotary-seq-len-interpolation-factor",
                  "--yarn-correction-range-round-to-int", "--make-vocab-size-divisible-by", "--sequence-parallel",
                  "--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--expert-model-parallel-size",
                  "--expert-tensor-parallel-size"}  # fmt: skip
    assert needed == set(NOT_RESTORED) - as_default


@pytest.mark.parametrize(
    ("variant", "other"), [("llama", MegatronLayout(tp=2)), ("qwen3-moe", MegatronLayout(ep=2, etp=1))]
)
def test_the_first_loss_of_a_training_is_the_same_at_two_layouts_with_the_flags_alone(
    variant, other, checkpoint, tmp_path
):
    torch.manual_seed(3)
    tokens, losses = torch.randint(0, 1000, (2, 33)), []
    for ranks, layout in ((1, MegatronLayout()), (2, other)):
        hf_to_mcore(checkpoint(variant), tmp_path / str(ranks), layout, transformer_impl="local")
        flags = (tmp_path / str(ranks) / "megatron_flags.txt").read_text().split()
        losses += run_on_ranks(ranks, "training_loss", flags, str(tmp_path / str(ranks)), tokens)
    assert max(losses) - min(losses) < 1e-5, losses


# Live trainers

TRAINERS = {
    "qwen3": [
        ("", "no error"),
        ("--rotary-base 50000", "the trainer's rotary_base is 50000, but the served model's is 10000"),
        ("--rotary-interleaved", "rotary_interleaved is True, but the served model's is False"),
        (
            "--rotary-seq-len-interpolation-factor 2",
            r"rotary_pos_emb has inv_freq\[0\] = 0.5, but the served model's is 1 ",
        ),
        ("--use-rope-scaling", "use_rope_scaling is True, but the served model's is False"),
        ("--position-embedding-type yarn", "position_embedding_type is yarn, but the served model's is rope"),
        ("--norm-epsilon 1e-5", "layernorm_epsilon is 1e-05, but the served model's is 1e-06"),
        ("--attention-dropout 0.1 --max-position-embeddings 512", "no error"),
    ],
    "qwen3-yarn": [
        ("", "no error"),
        ("--yarn-beta-fast 8", "yarn_beta_fast is 8.0, but the served model's is 32.0"),
        ("--rotary-scaling-factor 2", "inv_freq|rotary_scaling_factor"),
    ],
    "glm4-moe": [
        ("", "no error"),
        ("--rotary-percent 0.25", "rotary_percent is 0.25, but the served model's is 0.5"),
        ("--moe-router-pre-softmax", "no error"),  # as some trainers say of a router that has no softmax
    ],
    "deepseek-v3": [
        ("", "no error"),
        ("--rotary-scaling-factor 20", "rotary_scaling_factor is 20.0, but the served model's is 40.0"),
        ("--mscale-all-dim 0.5", "mscale_all_dim is 0.5, but the served model's is 1.0"),
        (
            "--moe-router-topk-scaling-factor 1.5",
            "moe_router_topk_scaling_factor is 1.5, but the served model's is 2.5",
        ),
        (
            "--moe-router-num-groups 2 --moe-router-group-topk 1",
            "moe_router_group_topk is 1|moe_router_num_groups is 2",
        ),
    ],
}
CHANGED = {
    "qwen3": [
        ("rotary_pos_emb.inv_freq", ("times", 1.01), "rotary_pos_emb has inv_freq.0. = 1.01, but the served model's is 1 "),
        ("rotary_pos_emb.inv_freq", ("first", 8), "rotary_pos_emb turns 8 pairs of dims, but the served model's 16"),
        ("config.layernorm_zero_centered_gamma", True, "layernorm_zero_centered_gamma is True"),
        ("config.activation_func", torch.nn.functional.gelu, "swiglu is False, but the served model's is True"),
        ("config.window_size", (16, 0), "window_size is .16, 0., but the served model's is None"),
        ("config.softmax_scale", 0.5, "softmax_scale is 0.5, but the served model's is None"),
        ("config.qk_layernorm", False, "qk_layernorm is False, but the served model's is True"),
    ],
    "qwen3-yarn": [
        ("config.yarn_beta_slow", 3.0, "yarn_beta_slow is 3.0, but the served model's is 1.0"),
        ("rotary_pos_emb.beta_slow", 3.0, "rotary_pos_emb has inv_freq"),
        ("rotary_pos_emb.scaling_factor", 3.0, "rotary_pos_emb has inv_freq"),
    ],
    "glm4-moe": [("rotary_pos_emb.inv_freq", ("first", 2), "rotary_pos_emb turns 2 pairs of dims, but the served model's 4")],
    "deepseek-v3": [("decoder.layers.0.self_attention.rotary_pos_emb.rotary_base", 20000, "self_attention.rotary_pos_emb has inv_freq")],
}  # fmt: skip


@pytest.mark.parametrize("variant", TRAINERS)
def test_a_trainer_that_computes_something_else_than_what_is_served_is_refused(variant, checkpoint, tmp_path):
    hf_to_mcore(checkpoint(variant), tmp_path / "mcore", transformer_impl="local")
    flags = (tmp_path / "mcore" / "megatron_flags.txt").read_text().split()
    lines = [[*flags, *extra.split()] for extra, _ in TRAINERS[variant]]
    changes = [(path, value) for path, value, _ in CHANGED[variant]]
    [said] = run_on_ranks(1, "as_trainers", config_of(variant), lines, changes)
    for sentence, (*what, pattern) in zip(said, [*TRAINERS[variant], *CHANGED[variant]], strict=True):
        assert re.search(pattern, sentence), (what, sentence)
