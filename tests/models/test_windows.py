"""Windows of attention: from a config to Megatron's arguments and back, and what is no window that
Megatron has."""

import pytest
from transformers import GptOssConfig

from reshard import MegatronLayout, ReshardError, hf_to_mcore, read_model
from reshard.megatron.arguments import megatron_args, model_of_args
from reshard.megatron.build import transformer_config
from reshard.models.model import Model, different_fields
from tests.tools.checkpoints import config_of, model

FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.mark.parametrize(("types", "window", "frequency"), [
    ([SLIDING, FULL, SLIDING, FULL], (5, 0), [1, 0, 1, 0]), ([SLIDING, SLIDING, SLIDING, FULL], (5, 0), [1, 1, 1, 0]),
    ([SLIDING] * 4, (5, 0), [1, 1, 1, 1]), ([FULL] * 4, None, None),
])  # fmt: skip
def test_layer_types_become_megatrons_arguments_and_come_back(types, window, frequency):
    before = model("gpt-oss", layer_types=types)
    args = megatron_args(before)
    assert (args["window_size"], args["window_attn_skip_freq"]) == (window, frequency)
    after = model_of_args(args, "args")
    assert megatron_args(after) == args and after.config["layer_types"] == types
    assert different_fields(before, after) == {} or window is None  # its size is of no layer then


def test_a_number_counts_the_layers_to_the_next_without_a_window_as_in_megatron():
    from megatron.core.transformer.utils import is_layer_window_attention

    for frequency in (None, 1, 2, 3, 4):
        args = megatron_args(model("gpt-oss")) | {"window_attn_skip_freq": frequency}
        theirs = [is_layer_window_attention((5, 0), frequency, layer + 1) for layer in range(4)]
        types = model_of_args(args, "args").config["layer_types"]
        assert [kind == SLIDING for kind in types] == theirs


def test_every_second_layer_has_one_where_a_config_does_not_say():
    config = config_of("gpt-oss")
    assert config.pop("layer_types") == [SLIDING, FULL] * 2
    assert megatron_args(Model.from_hf(config)) == megatron_args(model("gpt-oss"))


def test_yarn_is_transformers_own_where_a_config_says_nothing_of_it():
    config = config_of("gpt-oss")
    said = Model.from_hf(config | {"rope_parameters": GptOssConfig().rope_parameters})
    for name in ("rope_parameters", "rope_scaling", "rope_theta"):
        config.pop(name, None)
    assert megatron_args(Model.from_hf(config)) == megatron_args(said)


@pytest.mark.parametrize(("fields", "sentence"), [
    ({"layer_types": [SLIDING] * 3}, "does not say which of 4 layers attend to a window"),
    ({"layer_types": [SLIDING, FULL, SLIDING, "chunked_attention"]}, "does not say which of 4 layers"),
    ({"sliding_window": None}, "sliding_window is null"),
    ({"sliding_window": 0}, "sliding_window is 0, which is not a positive"),
    ({"swiglu_alpha": 1.5}, "swiglu_alpha = 1.5 cannot be held by Megatron: .*quick-geglu"),
    ({"attention_bias": False}, "attention_bias = False cannot be held by Megatron"),
])  # fmt: skip
def test_what_megatron_cannot_hold_is_refused_by_name(fields, sentence):
    with pytest.raises(ReshardError, match=sentence):
        model("gpt-oss", **fields)


@pytest.mark.parametrize(("change", "named"), [
    ({"window_size": (5, 1)}, "window_size"), ({"softmax_type": "vanilla"}, "softmax_type"),
    ({"glu_linear_offset": 0.0}, "glu_linear_offset"), ({"quick_geglu": False, "swiglu": True}, "quick_geglu"),
])  # fmt: skip
def test_arguments_of_another_model_are_refused_by_name(change, named):
    args = megatron_args(model("gpt-oss"))
    with pytest.raises(ReshardError, match=f"args: .*{named} is .*makes another model of the weights"):
        model_of_args(args | change, "args", "gpt_oss")


def test_a_hybrid_model_which_counts_layers_otherwise_is_refused(checkpoint, tmp_path):
    source, sentence = checkpoint("gpt-oss"), "layers with a window among others are counted otherwise"
    with pytest.raises(ReshardError, match=sentence):
        hf_to_mcore(source, tmp_path / "mcore", model_class="hybrid")
    with pytest.raises(ReshardError, match=sentence):
        transformer_config(
            read_model(str(source)), MegatronLayout(), transformer_impl="local", model_class="hybrid"
        )
    assert not (tmp_path / "mcore").exists()
    args = {
        "hybrid_layer_pattern": "*E*E*E*E",
        "window_size": (5, 0),
        "window_attn_skip_freq": [1, 1, 0, 0] * 2,
    }
    with pytest.raises(
        ReshardError, match="args: window_attn_skip_freq .* counts the layers of a HybridModel"
    ):
        model_of_args(megatron_args(model("gpt-oss")) | args, "args")


def test_other_windows_are_other_models():
    one, other = model("gpt-oss"), model("gpt-oss", layer_types=[FULL, SLIDING] * 2)
    assert different_fields(one, other)["window_attn_skip_freq"] == ([1, 0, 1, 0], [0, 1, 0, 1])
    assert "sliding_window" in different_fields(one, model("gpt-oss", sliding_window=7))
