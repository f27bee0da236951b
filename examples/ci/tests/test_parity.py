"""The converted checkpoint gives the logprobs of the published one. MODEL is a directory or hub id."""

import os

import pytest

from reshard import MegatronLayout
from reshard.testing import assert_logprob_parity, to_megatron  # noqa: F401

MODEL = os.environ["MODEL"]
TEXTS = [
    "The weights of a language model live in four places, and every one of them has names of its own.",
    "def add(a, b):\n    return a + b\n\nassert add(2, 3) == 5",
    "Paris is the capital of France, and Rome is the capital of Italy.",
    "1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377, 610, 987",
    "Pour the milk into the flour slowly, stir, and let the dough rest for half an hour before you bake it.",
    "Der Zug nach Hamburg hat heute leider zwanzig Minuten Verspätung, bitte beachten Sie die Durchsagen.",
]


@pytest.mark.parametrize("layout", [MegatronLayout(), MegatronLayout(pp=2)], ids=str)
def test_the_converted_checkpoint_is_the_model(layout, to_megatron):  # noqa: F811
    report = assert_logprob_parity(MODEL, to_megatron(MODEL, layout), max_abs=1e-4, texts=TEXTS)
    print(f"{report.overall.tokens} tokens, max |difference| {report.overall.max_abs:.2g}")


def test_in_bf16_they_differ_by_rounding_alone(to_megatron):  # noqa: F811
    report = assert_logprob_parity(MODEL, to_megatron(MODEL), dtype="bf16", texts=TEXTS)
    print(report.rounding.sentence)


def test_another_model_does_not_pass(to_megatron, tmp_path):  # noqa: F811
    """The control: a gate that lets everything through would pass the tests above."""
    from transformers import AutoConfig, AutoModelForCausalLM

    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(MODEL)).save_pretrained(tmp_path / "other")
    with pytest.raises(AssertionError, match="max_abs is"):
        assert_logprob_parity(tmp_path / "other", to_megatron(MODEL), prompts=2, lengths=(16,))
