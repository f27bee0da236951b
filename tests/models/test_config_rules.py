"""Fields of a config: those that make another model are refused by name, those that change nothing
are accepted."""

import json
import math

import pytest

from reshard import (
    ReshardError,
    check,
    delta,
    diff,
    hf_to_mcore,
    ignored_config_fields,
    inspect,
    mcore_to_hf,
)
from reshard.cli.main import cli
from reshard.megatron.arguments import check_args, megatron_args, model_of_args
from reshard.models.config_defaults import DEFAULTS
from reshard.models.family import families
from reshard.models.model import Model
from tests.tools.checkpoints import LLAMA3_ROPE, PLAIN_YARN, VARIANTS, YARN, config_of, model, with_config
from tests.tools.config_defaults import defaults

LINEAR = {"rope_type": "linear", "rope_theta": 1e4}
REFUSED = [
    ("llama", {"attention_bias": True}, "attention_bias is True and mlp_bias is 0, which have to be equal"),
    ("qwen3", {"attention_bias": True}, "attention_bias = True cannot be held"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act = gelu"),
    ("deepseek-v3", {"scoring_func": "softmax"}, "scoring_func = softmax"),
    ("llama", {"architectures": ["LlamaForSequenceClassification"]},
     "LlamaForSequenceClassification is not supported; the architectures that are: .*LlamaForCausalLM"),
    ("qwen3", {"architectures": ["Gemma2ForCausalLM"]}, "Gemma2ForCausalLM is not supported"),
    # fields that nothing maps
    ("deepseek-v3", {"rope_interleave": False}, "rope_interleave = False may make another model"),
    ("qwen3-moe", {"shared_expert_intermediate_size": 64}, "shared_expert_intermediate_size = 64 may make another"),
    ("llama", {"logit_scale": 0.5, "final_logit_softcapping": 30.0},
     "logit_scale = 0.5, final_logit_softcapping = 30.0 may make"),
    ("llama", {"is_encoder_decoder": True}, "is_encoder_decoder = True may make"),
    ("llama", {"sliding_window": 4096}, "sliding_window = 4096 may make"),
    ("qwen3.5", {"output_gate_type": "sigmoid"}, "output_gate_type = 'sigmoid' may make"),
    # windows
    ("qwen2", {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 3, "layer_types": None},
     "attend to a window"),
    ("qwen3", {"layer_types": ["full_attention"] * 3 + ["sliding_attention"]}, "attend to a window"),
    ("qwen3-moe", {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 4}, "attend to a window"),
    ("dots1", {"sliding_window": 16, "max_window_layers": 2, "layer_types": None}, "attend to a window"),
    ("dots1", {"norm_topk_prob": None}, "norm_topk_prob = False cannot be held"),
    ("ling", {"use_bias": True}, "use_bias = True cannot be held"),
    ("ling", {"moe_shared_expert_intermediate_size": 96},
     "moe_shared_expert_intermediate_size is 96 and moe_intermediate_size is [0-9]+, which"),
    ("ling", {"rotary_dim": 16}, "rotary_dim is 16, which is not partial_rotary_factor of head_dim"),
    ("ling", {"rope_parameters": PLAIN_YARN | {"rope_theta": 6e5, "partial_rotary_factor": 0.5}},
     "rope type 'yarn' has no counterpart"),
    ("ling", {"n_group": 0}, "n_group is 0, which is not a positive whole number"),
    ("ling", {"model_type": "bailing_hybrid"}, "model_type is 'bailing_hybrid', but architectures names Bailing"),
    ("ling", {"kv_lora_rank": 512}, "kv_lora_rank = 512 may make another model"),
    ("qwen2-moe", {"qkv_bias": False}, "qkv_bias = False cannot be held"),
    ("seed-oss", {"attention_out_bias": True}, "attention_out_bias = True cannot be held"),
    ("phi4", {"rope_parameters": PLAIN_YARN}, "rope type 'yarn' has no counterpart in Megatron"),
    ("phi4", {"layer_types": ["sliding_attention"] * 4}, "all layers are full_attention, but layer_types is"),
    ("seed-oss", {"head_dim": None}, "head_dim"),
    ("qwen2-moe", {"use_sliding_window": True, "sliding_window": 16, "layer_types": None}, "attend to a window"),
    ("qwen3-moe", {"use_sliding_window": True, "sliding_window": 16, "layer_types": ["full_attention"] * 4},
     "attend to a window"),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": "4", "layer_types": None},
     "attend to a window"),
    ("qwen2", {"layer_types": 5}, "layer_types = 5 makes layers attend to a window"),
    *((variant, {"sliding_window": window}, f"sliding_window {window!r} is not a number of tokens")
      for variant in ("phi3", "mistral") for window in (0, -1, True, 2047.0, "2047")),
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
    ("deepseek-v3", {"head_dim": 16}, "head_dim is 16 and qk_rope_head_dim is [0-9]+, which have to be equal"),
    ("deepseek-v3", {"qk_head_dim": 16}, "qk_head_dim is 16 and qk_nope_head_dim [+] qk_rope_head_dim is"),
    ("glm4-moe-lite", {"head_dim": 16}, "head_dim is 16 and qk_rope_head_dim is [0-9]+, which have to be equal"),
    ("glm-moe-dsa", {"num_experts": 4}, "n_routed_experts is 8, but num_experts, which means the same, is 4"),
    ("glm4-moe-lite", {"mlp_layer_types": ["dense", "dense", "sparse", "sparse"]},
     "mlp_layer_types, which transformers reads, says something else"),
    # layers that share an indexer
    ("glm-moe-dsa-shared", {"index_topk_freq": 3}, "indexer_types and index_topk_freq disagree"),
    ("glm-moe-dsa-shared", {"index_topk_pattern": "FFSF"}, "indexer_types and index_topk_pattern disagree"),
    ("glm-moe-dsa-shared", {"indexer_types": ["full"] * 3},
     "indexer_types is .* which has no entry for each of 4 layers"),
    ("glm-moe-dsa-shared", {"indexer_types": ["full"] * 3 + ["half"]},
     "indexer_types has 'half', which is neither full nor shared"),
    ("glm-moe-dsa", {"indexer_types": ["shared", "full", "full", "full"], "index_topk_freq": None},
     "gives the first layer no indexer"),
    ("glm-moe-dsa", {"indexer_types": None, "index_topk_pattern": "FSFF"}, "at no regular distance"),
    ("glm-moe-dsa", {"indexer_types": None, "index_topk_freq": "two"}, "index_topk_freq is 'two'"),
    ("deepseek-v32", {"q_lora_rank": None}, "has no field q_lora_rank"),
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
    ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
     r"'dynamic' has no counterpart in Megatron for this family, .*"
     r"""\("rope_type", "factor"\) goes on without it, which up to max_pos"""),
    ("llama", {"rope_parameters": {"rope_type": "default", "factor": 2.0}},
     "'default' has factor = 2.0, whose meaning is not known"),
    ("llama", {"rope_parameters": LLAMA3_ROPE | {"factor": math.nan}}, "factor of the rotary embedding is nan"),
    ("llama", {"rope_parameters": LLAMA3_ROPE | {"factor": -1.0}}, "factor of the rotary embedding is -1.0"),
    ("llama", {"rope_parameters": LLAMA3_ROPE | {"low_freq_factor": 2.0}},
     "low_freq_factor is 2.0, but Megatron has 1.0 built in"),
    ("llama", {"rope_parameters": {k: v for k, v in LLAMA3_ROPE.items() if "original" not in k}},
     "original_max_position_embeddings is 256, but Megatron has 8192 built in"),
    ("llama", {"rope_parameters": {"rope_theta": True}}, "rope_theta of the rotary embedding is True"),
    ("llama", {"rope_parameters": {"rope_theta": 10000.5}}, "rope_theta 10000.5 is not a whole number"),
    ("llama", {"rope_parameters": {"rope_theta": 1e4}, "rope_theta": 5e4},
     "says rope_theta = 10000.0 and rope_theta = 50000.0"),
    ("llama", {"rope_parameters": LINEAR | {"factor": 2.5}},
     "factor 2.5, and Megatron's --rotary-seq-len-interpolation-factor takes only"),
    ("llama", {"rope_parameters": LINEAR | {"factor": 2.0, "short_factor": [1.0]}},
     r"'linear' has short_factor = \[1.0\], whose meaning"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
    ("glm4-moe", {"rope_parameters": {"partial_rotary_factor": 1.5}},
     "partial_rotary_factor is 1.5, which is more than a whole head"),
    ("glm4-moe", {"rope_parameters": PLAIN_YARN}, "'yarn' has no counterpart in Megatron for this family"),
    ("glm4-moe", {"norm_topk_prob": False}, "norm_topk_prob = False cannot be held"),
    ("deepseek-v3", {"rope_parameters": YARN | {"attention_factor": 0.9}},
     "scaled by 0.9 in transformers, by 1 in Megatron"),
    ("deepseek-v3", {"rope_parameters": YARN | {"mscale": 0.0}}, "scaled by 1.36889 in transformers, by 1 in Megatron"),
    ("qwen3-yarn", {"rope_parameters": PLAIN_YARN | {"attention_factor": 1.0}},
     "scaled by 1 in transformers, by 1.13863 in Megatron"),
]  # fmt: skip


@pytest.mark.parametrize(("variant", "change", "message"), REFUSED, ids=lambda value: str(value)[:60])
def test_a_config_that_makes_another_model_or_none_is_refused_by_name(variant, change, message):
    with pytest.raises(ReshardError, match=message):
        model(variant, **change)


@pytest.mark.parametrize(("variant", "change"), [
    ("qwen2", {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 4, "layer_types": None}),
    ("qwen2",
     {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 2, "layer_types": ["full_attention"] * 4}),
    ("qwen3-moe", {"use_sliding_window": True, "sliding_window": None, "layer_types": ["full_attention"] * 4}),
    ("llama",
     {"head_dim": None, "num_key_value_heads": None, "rope_scaling": None, "pad_token_id": None, "model_type": None}),
    ("llama", {"architectures": ["LLaMAForCausalLM"], "pretraining_tp": 2, "max_sequence_length": 2048}),
    ("qwen3-moe", {"initializer_range": None, "attention_dropout": None, "router_aux_loss_coef": None,
                   "max_position_embeddings": None}),
    ("deepseek-v3", {"model_type": "kimi_k2"}),
    ("deepseek-v3", {"head_dim": 8, "qk_head_dim": 24}),
    ("qwen3", {"use_sliding_window": False, "sliding_window": 32, "max_window_layers": 2, "layer_types": None}),
    ("llama", {"rope_parameters": LINEAR | {"factor": 4.0}}),
    ("llama", {"rope_parameters": None, "rope_scaling": PLAIN_YARN, "rope_theta": 1000000}),
    ("qwen3", {"rope_parameters": LLAMA3_ROPE}),
    ("qwen2", {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1], "factor": 1.0,
                                   "original_max_position_embeddings": 64}}),
    ("minimax-m2",
     {"cache_implementation": "static", "max_window_layers": 28, "decoder_sparse_step": 1, "mlp_only_layers": [],
      "auto_map": {"AutoModelForCausalLM": "modeling_minimax_m2.MiniMaxM2ForCausalLM"}}),
    ("qwen3", {"architectures": ["FSDPQwen3ForCausalLM"]}),
    ("deepseek-v3", {"architectures": None, "model_type": "kimi_k2"}),
    ("llama", {"_attn_implementation": "sdpa", "unsloth_version": "2025.1", "logit_scale": None, "temperature": 0.6}),
])  # fmt: skip
def test_what_changes_nothing_is_taken(variant, change):
    model(variant, **change)


ABSENT = object()
WINDOWS = {
    "use_sliding_window": [ABSENT, None, False, True], "sliding_window": [ABSENT, None, 16],
    "max_window_layers": [ABSENT, 2, 4],
    "layer_types": [ABSENT, None, ["full_attention"] * 4, ["full_attention"] * 3 + ["sliding_attention"]],
}  # fmt: skip


@pytest.mark.parametrize("variant", ["qwen2", "qwen3", "qwen3-moe", "dots1"])
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
            theirs = type(VARIANTS[variant])(
                **base
                | {
                    "num_hidden_layers": layers,
                    **said,
                    **({"use_sliding_window": False} if said.get("use_sliding_window", 1) is None else {}),
                }
            )
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
    source = with_config(checkpoint("qwen3"), tmp_path / "hf", logit_scale=0.5)
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
        with_config(checkpoint("qwen3"), tmp_path / "hf", rms_norm_eps=1e-3),
        tmp_path / "mcore",
        tmp_path / "back",
    )
    with ignored_config_fields("rms_norm_eps"):
        report = hf_to_mcore(source, mcore)
    said = "rms_norm_eps = 0.001 is ignored; 1e-06 is used, as where it is absent"
    assert [notice for notice in report.notices if said in notice]
    assert "--norm-epsilon 1e-06" in (mcore / "megatron_flags.txt").read_text()
    assert json.loads((mcore / "reshard.json").read_text())["ignored_config_fields"] == ["rms_norm_eps"]
    for arguments in (["inspect", str(mcore)], ["check", str(mcore)], ["mcore-to-hf", str(mcore), str(back)],
                      ["diff", str(mcore), str(back)], ["diff", str(mcore / "release"), str(back)]):  # fmt: skip
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
    for call in (lambda: hf_to_mcore(checkpoint("qwen3"), tmp_path / "out"),
                 lambda: mcore_to_hf(tmp_path / "mcore", tmp_path / "out"),
                 lambda: diff(checkpoint("qwen3"), tmp_path / "mcore"), lambda: check(tmp_path / "mcore"),
                 lambda: inspect(tmp_path / "mcore"),
                 lambda: delta.save(checkpoint("qwen3"), checkpoint("qwen3"), tmp_path / "out")):  # fmt: skip
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
    """If not: ``python -m tests.tools.config_defaults --write``."""
    assert defaults() == DEFAULTS


def test_a_config_that_says_only_what_it_must_has_the_defaults_of_transformers():
    """The numbers of a table's CONFIG are what the class has."""
    from transformers import CONFIG_MAPPING

    for name, family in families().items():
        theirs = CONFIG_MAPPING[name]().to_dict()
        larger, kind = family.wrapped_in
        if family.architecture == larger:  # a class that is always in a larger one, whose fields come first
            theirs["tie_word_embeddings"] = CONFIG_MAPPING[kind]().tie_word_embeddings
        for row in family.config_rows:
            field = row.field
            # Without a rank queries are not compressed; transformers builds no MTP layers.
            if (
                field in theirs
                and not row.needed
                and not isinstance(row.default, str)
                and field not in ("q_lora_rank", "num_nextn_predict_layers")
            ):
                assert theirs[field] == row.default, (name, field)
