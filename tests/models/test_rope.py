"""Rotary embeddings in configs, in Megatron's arguments, and in numbers: those of transformers."""

import pytest
import torch

from reshard import ReshardError, ignored_config_fields
from reshard.megatron.arguments import caveats, megatron_args, model_of_args
from reshard.models.config_fields import check_ignored
from reshard.models.rope import attention_factor, hf_rope, inverse_frequencies, megatron_rope, rope_of
from tests.tools.checkpoints import LLAMA3_ROPE, PLAIN_YARN, YARN, model

LINEAR = {"rope_type": "linear", "rope_theta": 1e4}


def test_rope_settings_go_there_and_back():
    cases = [
        ("mla", YARN | {"beta_fast": 1.0, "original_max_position_embeddings": 8192}),
        ("gpt", LLAMA3_ROPE),
        ("gpt", LINEAR | {"factor": 4.0}),
        ("gpt", {"rope_type": "default", "rope_theta": 1e6}),
        ("mla", YARN),
        ("gpt", PLAIN_YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "truncate": False}),
        ("mla", {"rope_type": "default", "rope_theta": 1e4}),
    ]
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


def test_a_scale_that_only_vllm_reads_is_refused_unless_it_is_one_or_ignored():
    """DeepSeek-R1-0528-Qwen3-8B has one, which undoes the scale of YaRN in vLLM alone."""
    plain = megatron_args(model("qwen3-yarn", rope_parameters=PLAIN_YARN))
    assert megatron_args(model("qwen3-yarn", rope_parameters=PLAIN_YARN | {"attn_factor": 1.0})) == plain
    inverse = PLAIN_YARN | {"attn_factor": 1 / attention_factor(PLAIN_YARN)}
    with pytest.raises(
        ReshardError, match=r"which only vLLM reads; reshard.ignored_config_fields\(\"attn_factor\"\)"
    ):
        model("qwen3-yarn", rope_parameters=inverse)
    with ignored_config_fields("attn_factor"):
        ignoring = model("qwen3-yarn", rope_parameters=inverse)
    check_ignored(ignoring)
    assert megatron_args(ignoring) == plain and any("attn_factor = " in note for note in ignoring.notices)


@pytest.mark.parametrize("rope", [
    {"rope_type": "default", "rope_theta": 5e5}, LINEAR | {"factor": 3.0}, LLAMA3_ROPE, PLAIN_YARN, YARN,
    PLAIN_YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "truncate": False, "factor": 8.0},
    {"rope_type": "yarn", "factor": 2.0},
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
