"""Megatron's arguments of a model, and the model of arguments."""

import json
from pathlib import Path

import pytest
import torch

from reshard import (
    ReshardError,
    diff,
    hf_to_mcore,
    ignored_config_fields,
    mcore_to_hf,
)
from reshard.cli.main import cli
from reshard.megatron.arguments import check_args, megatron_args, model_of_args
from reshard.models.model import Model
from tests.tools.checkpoints import PLAIN_YARN, VARIANTS, config_of, model, with_config
from tests.tools.oracle import hf_tensors, same

ANOTHER = {
    "position_embedding_type": "none", "rotary_percent": 0.5, "rotary_interleaved": True, "no_rope_freq": 4,
    "quick_geglu": True, "window_size": (128, 0), "softmax_scale": 0.1, "layernorm_zero_centered_gamma": True,
    "normalization": "LayerNorm", "swiglu": False, "qk_l2_norm": True, "attention_output_gate": True,
    "glu_linear_offset": 1.0, "softmax_type": "learnable", "moe_shared_expert_gate": True,
    "moe_expert_capacity_factor": 1.25, "moe_router_load_balancing_type": "sinkhorn", "moe_router_num_groups": 4,
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
    for change, message in (({"moe_layer_freq": "every second"}, "cannot be read as a model's"),
                            ({"num_layers": None}, "num_layers"), ({"moe_layer_freq": [1]}, "1 entries for 4 layers"),
                            ({"squared_relu": True}, "squared_relu"),
                            ({"qk_layernorm": False},
                             "moe_layer_freq is .* makes another model of the weights than mixtral models here"),
                            ({"qk_layernorm": False, "add_qkv_bias": True},
                             "no family here has .*qk_layernorm = False"),
                            ({"qk_layernorm": None, "add_qkv_bias": True},
                             "no family here has .*qk_layernorm = None")):  # fmt: skip
        with pytest.raises(ReshardError, match=message):
            model_of_args(args | change, "args")
    with pytest.raises(ReshardError, match="--family gpt is not one of"):
        model_of_args(args, "args", "gpt")


@pytest.mark.parametrize("variant", VARIANTS)
def test_arguments_are_those_of_the_family_that_made_them(variant):
    made = model(variant)
    back = model_of_args(megatron_args(made), "args", made.family.name)
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


def test_linear_attention_has_another_name_in_megatrons_main():
    made = model("qwen3-next")
    args = megatron_args(made) | {"experimental_attention_variant": "gdn"}
    check_args(made, args, "args", "")
    assert model_of_args(args, "args", "qwen3_next").kinds == made.kinds
    with pytest.raises(ReshardError, match="experimental_attention_variant is 'gdn2'"):
        check_args(made, args | {"experimental_attention_variant": "gdn2"}, "args", "")


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
    ({"num_attention_heads": 4, "num_key_value_heads": 4},
     "num_attention_heads is 8 .not 4., num_query_groups is 2 .not 4."),
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


def test_tokens_that_training_added_are_not_taken_for_padding(checkpoint, tmp_path):
    source, run = checkpoint("qwen3"), tmp_path / "mcore"
    vocab = config_of("qwen3")["vocab_size"]
    hf_to_mcore(source, run)
    (run / "reshard.json").unlink()  # the training has gone on
    common = torch.load(run / "release" / "common.pt", weights_only=False)

    def trained_with(tokens: int) -> None:
        common["args"].vocab_size = tokens
        torch.save(common, run / "release" / "common.pt")

    trained_with(vocab + 3)
    with pytest.raises(ReshardError, match=rf"vocab_size is {vocab + 3} .not {vocab}..*pass --hf-config"):
        mcore_to_hf(run, tmp_path / "never")
    assert not (tmp_path / "never").exists()
    config = tmp_path / "config.json"
    config.write_text(json.dumps(config_of("qwen3", vocab_size=vocab + 3)))
    mcore_to_hf(run, tmp_path / "all", hf_config=config)
    rows = hf_tensors(tmp_path / "all")["model.embed_tokens.weight"]
    assert (
        torch.equal(rows[:vocab], hf_tensors(source)["model.embed_tokens.weight"]) and len(rows) == vocab + 3
    )
    trained_with(vocab - 3)  # the control: of a tokenizer with fewer tokens than the model has rows
    mcore_to_hf(run, tmp_path / "back")
    assert same(hf_tensors(source), hf_tensors(tmp_path / "back")) == []


def test_what_training_chose_does_not_contradict_a_config(checkpoint, tmp_path):
    hf_to_mcore(checkpoint("qwen3"), tmp_path / "mcore")
    config = config_of("qwen3", max_position_embeddings=128, attention_dropout=0.1, initializer_range=0.5)
    (tmp_path / "mcore" / "hf" / "config.json").write_text(json.dumps(config))
    mcore_to_hf(tmp_path / "mcore", tmp_path / "back", hf_config=tmp_path / "mcore" / "hf")


def test_diff_names_the_fields_that_make_two_models_of_the_same_weights(checkpoint, tmp_path, capsys):
    source = checkpoint("qwen3")
    assert diff(
        source, with_config(source, tmp_path / "same", max_position_embeddings=128, use_cache=False)
    ).equal
    other = with_config(source, tmp_path / "other", rms_norm_eps=0.1, rope_parameters=PLAIN_YARN)
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


@pytest.mark.parametrize(("name", "value"), [
    ("dsa_indexer_n_heads", 8), ("dsa_indexer_head_dim", 32), ("dsa_indexer_topk", 9), ("dsa_indexer_topk_freq", 3),
    ("dsa_indexer_skip_topk_offset", 2), ("dsa_indexer_rope_interleaved", False), ("dsa_indexer_scoring_relu", False),
    ("dsa_indexer_k_norm_epsilon", 1e-5), ("experimental_attention_variant", None),
])  # fmt: skip
def test_an_indexer_that_chooses_other_tokens_is_another_model(name, value):
    made = model("glm-moe-dsa-shared")
    args = megatron_args(made) | {"dsa_indexer_scoring_relu": True}
    check_args(made, args, "args", "")
    # One spelling of several, and what leaves the scores as they are.
    check_args(
        made, args | {"dsa_indexer_skip_topk_offset": 0, "dsa_indexer_rotate_activation": True}, "args", ""
    )
    with pytest.raises(ReshardError, match=f"{'dsa_indexer_topk_freq' if 'skip' in name else name} is"):
        check_args(made, args | {name: value}, "args", "")


def test_layers_that_share_an_indexer_are_those_of_glm_5_2():
    lines = (Path(__file__).parent.parent / "models" / "published_configs.jsonl").read_text().splitlines()
    [config] = [entry["config"] for entry in map(json.loads, lines) if entry["name"] == "zai-org/GLM-5.2"]
    by_types = Model.from_hf(config | {"index_topk_freq": None, "index_skip_topk_offset": None})
    by_frequency = Model.from_hf(config | {"indexer_types": None})
    args = megatron_args(by_types)
    assert by_types.kinds == by_frequency.kinds and args == megatron_args(by_frequency)
    assert (args["dsa_indexer_topk_freq"], args["dsa_indexer_skip_topk_offset"]) == (4, 3)
    with_indexer = [layer for layer, kind in enumerate(by_types.kinds) if "indexer" in kind]
    assert with_indexer == [0, 1, *range(2, 78, 4)] and "indexer" in by_types.mtp_kinds[0]
    assert not {"dsa_indexer_topk_freq"} & megatron_args(model("glm-moe-dsa")).keys()
