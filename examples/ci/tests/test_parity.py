"""The converted checkpoint gives the logprobs of the published one. MODEL is a directory or hub id."""

import os

import pytest

from reshard import Layout
from reshard.testing import assert_logprob_parity, to_megatron  # noqa: F401

MODEL = os.environ["MODEL"]


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2, pp=2)], ids=str)
def test_the_converted_checkpoint_is_the_model(layout, to_megatron):  # noqa: F811
    report = assert_logprob_parity(
        MODEL, to_megatron(MODEL, layout), max_abs=1e-4, prompts=4, lengths=(16, 64)
    )
    print(f"{report.overall.tokens} tokens, max |difference| {report.overall.max_abs:.2g}")


def test_another_model_does_not_pass(to_megatron, tmp_path):  # noqa: F811
    """The control: a gate that lets everything through would pass the test above."""
    from transformers import AutoConfig, AutoModelForCausalLM

    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(MODEL)).save_pretrained(tmp_path / "other")
    with pytest.raises(AssertionError, match="max_abs is"):
        assert_logprob_parity(tmp_path / "other", to_megatron(MODEL), prompts=2, lengths=(16,))
