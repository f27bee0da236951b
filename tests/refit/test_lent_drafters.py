"""Engines that hand on the drafter that a trainer has brought with the model: the newcomer drafts by the same bits, or
gets nothing. A drafter changes no token, so that nobody would see another one in the answers."""

import pytest
import torch

from tests import install_sglang_cpu
from tests.refit.test_blocks_engine import published
from tests.starting import warm
from tests.starting.ranks import run_on_ranks
from tests.tools.checkpoints import make
from tests.tools.drafters import Eagle3


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return [str(make(folder / str(seed), "qwen3", torch.bfloat16, seed)) for seed in (0, 1)]


def with_drafters(models: list[str], vocabulary: int | None, folder) -> list[list[str]]:
    return [
        [model, Eagle3(model, vocabulary, seed=seed).publish(folder / str(seed))]
        for seed, model in enumerate(models)
    ]


def check(said: dict, is_quantized: bool, engine: str) -> None:
    """Raise AssertionError unless a newcomer has the bits of what it was handed on, and others heard why not."""
    of_drafter = [name for name in said["lent"] if name.startswith("draft.")]
    assert said["said"] == "no error" and said["got"] == said["lent"] == said["still lent"]
    assert (said["version"], said["ready"], said["stale"]) == (3, True, [])
    assert len({*said["digests"]}) == 1 and bool(said["quantized"]) == is_quantized
    assert sum(said["before"][name] != said["lent"][name] for name in of_drafter) > 8
    assert said["again"] == ("no error", said["lent"]), "the newcomer hands both on, too"
    # Controls: the same, where nobody says that there is a drafter.
    sentence, held, serves = said["unaware"]
    if is_quantized:
        assert "draft." in sentence and "is nothing here, and " in sentence, sentence
    else:
        wrong = {name for name in said["lent"] if held[name] != said["lent"][name]}
        assert sentence == "no error" and serves and wrong and wrong <= {*of_drafter}
    assert "the trainer has a drafter (" in said["without"] and "drafts by no other model" in said["without"]
    sentence, version = said["left alone"]
    assert f"this {engine} drafts by what a trainer has brought before" in sentence and version == 3


@pytest.mark.parametrize(
    "engine, vocabulary, ranks",
    [
        ({"tp": 2}, 64, 2),
        ({"quantization": "fp8_per_block"}, 64, 1),
        ({"quantization": "fp8", "tp": 2}, None, 2),
    ],
    ids=["bf16", "fp8 in blocks", "fp8 by tensor"],
)
def test_a_newcomer_drafts_by_the_bits_that_a_trainer_has_brought_to_another(
    engine, vocabulary, ranks, models, tmp_path
):
    pairs = with_drafters(models, vocabulary, tmp_path)
    sides = {"trainer": ranks, "engine": ranks, "together": True, "folder": str(tmp_path)}
    for said in run_on_ranks(ranks, "brought_up", sides, pairs, engine, module="refit_lent_drafters_on_cpu"):
        check(said, "quantization" in engine, "vLLM")


@pytest.mark.parametrize("kind", ["bf16", "fp8 in blocks"])
def test_a_newcomer_of_sglang_drafts_by_the_bits_and_for_the_tokens_of_another(
    kind, models, converted, tmp_path
):
    if kind != "bf16":
        checkpoints = converted("served-blocks")
        models = [published(checkpoints, tmp_path / "fp8")[0][0], checkpoints[1][0]]
    pairs = with_drafters(models, 64, tmp_path)
    sides = {"trainer": 1, "engine": 1, "together": True, "folder": str(tmp_path)}
    [said] = run_on_ranks(
        1, "brought_up", sides, pairs, {}, module="refit_lent_drafters_sglang_on_cpu",
        python=warm.python_of_sglang(), environment=install_sglang_cpu.environment_of_engine(),
    )  # fmt: skip
    check(said, kind != "bf16", "SGLang")
    assert "draft.tokens" in said["lent"]
