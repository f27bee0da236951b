"""Parity's metrics, near-ties of routing, rollouts, and limits that fail on a figure that was not
measured."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from reshard import ReshardError
from reshard.parity import Limits, Scores, check_rollout, compare_scores, metrics_of
from reshard.parity.noise import noise_of
from reshard.parity.routing import Choices, ExpertGroups, compare_routing
from reshard.parity.systems.base import ScoringOptions


def scores(*logprobs: float, best=None) -> Scores:
    return Scores(np.array(logprobs), None if best is None else np.array(best))


def test_routing_tells_a_near_tie_from_an_error():
    """In bf16 both systems of a correct model send some tokens elsewhere; a fault does it where no
    tie is near."""
    scores = np.array([[[2.0, 1.0, 0.999, -1.0], [0.0, 1.0, 2.0, 3.0]]])
    one = Choices((1, 3), np.array([[[0, 1], [2, 3]]]), scores)
    tie = one._replace(experts=np.array([[[0, 2], [0, 3]]]), scores=None)
    routing = compare_routing([one], [tie], apart=[np.array([0.25])])
    assert (
        routing.differing == 2
        and routing.tokens == routing.differing_tokens == 1
        and routing.worst_layer == 1
    )
    assert routing.margin == pytest.approx(0.001 / scores[0, 0].std()), (
        "the second layer follows from the first"
    )
    assert (routing.mean_abs_same, routing.mean_abs_differing) == (
        None,
        0.25,
    ) and "2 of 2 choices of experts differ" in routing.sentence
    assert compare_routing([tie], [one]).margin == routing.margin, "whichever system tells its scores"
    error = one._replace(experts=np.array([[[0, 3], [2, 3]]]))
    assert compare_routing([one], [error]).margin == pytest.approx(2 / scores[0, 0].std())
    for wrong in (one._replace(layers=(1, 2)), one._replace(experts=one.experts[..., :1])):
        with pytest.raises(ReshardError, match="chooses experts in layers"):
            compare_routing([one], [wrong])
    with pytest.raises(ReshardError, match="neither system tells"):
        compare_routing([tie], [one._replace(scores=None)])


@pytest.mark.parametrize(("theirs", "distance"), [
    ([0, 5], 0.001),  # the third group for the second: the same but for rounding, while its experts are not
    ([0, 1], 0.001),  # the third group for the second too, though none of its experts is taken
    ([0, 6], 1.2),  # a group that is far from the best two
    ([0, 3], 0.6),  # both groups are taken, and in one an expert that is not the best
])  # fmt: skip
def test_routing_knows_near_ties_between_groups_of_experts(theirs, distance):
    """Four groups of two, of which the best two are taken, and two experts of those."""
    scores = np.array([[[1.0, 0.6, 0.9, 0.3, 0.599, 0.6, 0.0, 0.0]]])
    one = Choices((0,), np.array([[[0, 2]]]), scores)
    routing = compare_routing([one], [one._replace(experts=np.array([[theirs]]))], ExpertGroups(4, 2))
    assert routing.margin == pytest.approx(distance / scores.std())


def test_metrics_follow_their_definitions():
    a, b = (
        [scores(-1.0, -2.0, best=[3, 4]), scores(-3.0, best=[5])],
        [scores(-1.1, -2.0, best=[3, 9]), scores(-2.7, best=[5])],
    )
    metrics = metrics_of(a, b)
    assert (
        metrics.tokens == 3
        and metrics.mean_abs == pytest.approx(0.4 / 3)
        and metrics.max_abs == pytest.approx(0.3)
    )
    assert metrics.token_mult_prob_error == pytest.approx((np.exp(0.1) + 1 + np.exp(0.3)) / 3)
    assert metrics.argmax_agreement == pytest.approx(2 / 3) and metrics.kl is None
    assert metrics.ratio_max == pytest.approx(np.exp(0.1)) and metrics.ratio_min == pytest.approx(
        np.exp(-0.3)
    )
    assert metrics.kl_estimate == pytest.approx((np.exp(-0.1) - 1 + 0.1 + np.exp(0.3) - 1 - 0.3) / 3)
    assert metrics.pearson == pytest.approx(np.corrcoef([-1, -2, -3], [-1.1, -2.0, -2.7])[0, 1])
    p, q = np.log([[0.5, 0.5], [0.9, 0.1]]), np.log([[0.25, 0.75], [0.9, 0.1]])
    both = metrics_of(
        [replace(scores(-1.0, -1.0), distributions=p)], [replace(scores(-1.0, -1.0), distributions=q)]
    )
    assert (
        both.kl == pytest.approx((0.5 * np.log(2) + 0.5 * np.log(2 / 3)) / 2)
        and both.kl_tokens == 2
        and both.pearson == 1.0
    )


@pytest.mark.parametrize(("a", "b", "sentence"), [
    (scores(-1.0, float("nan")), scores(-1.0, -1.0), "A gives the logprob nan for token 2 of prompt 0"),
    (scores(-1.0), scores(float("-inf")), "B gives the logprob -inf for token 1 of prompt 0"),
    (scores(-1.0, -1.0), scores(-1.0), "prompt 0: A gives 2 logprobs, B 1"),
    (scores(), scores(), "the prompts have no token to predict"),
])  # fmt: skip
def test_missing_or_infinite_logprobs_are_an_error(a, b, sentence):
    with pytest.raises(ReshardError) as error:
        metrics_of([a], [b])
    assert sentence in str(error.value)


def test_limits_that_cannot_fail_or_cannot_be_met_are_refused():
    for limits in (Limits(), Limits(max_abs=float("inf")), Limits(max_abs=float("nan")), Limits(mean_abs=-1.0),
                   Limits(token_mult_prob_error=0.99), Limits(argmax_agreement=0.0),
                   Limits(argmax_agreement=1.5)):  # fmt: skip
        with pytest.raises(ReshardError, match="limit"):
            limits.check()
    assert Limits(max_abs=0.5).exceeded(metrics_of([scores(-1.0)], [scores(-1.6)])) == [
        "max_abs is 0.6, the limit is 0.5"
    ]
    assert Limits(argmax_agreement=0.9).exceeded(
        metrics_of([scores(-1.0, best=[1])], [scores(-1.0, best=[2])])
    )


def rounding(seed: int, tokens: int, size: float = 0.05) -> list[Scores]:
    """Scores of prompts of 64 tokens in all that are off zero by rounding, some tokens by more than
    others."""
    random = np.random.default_rng(seed)
    spread = np.random.default_rng(99).gamma(1.0, 1.0, tokens)
    return [
        scores(*part) for part in np.array_split(random.normal(0, size, tokens) * spread - 1, tokens // 64)
    ]


def test_the_ratio_to_rounding_is_one_for_systems_that_round_independently():
    exact = [scores(*[-1.0] * 64) for _ in range(16)]
    a, b = rounding(0, 1024), rounding(1, 1024)
    noise = noise_of(a, b, (a, b), (exact, exact), (exact, exact))
    assert noise.low < 1 < noise.high < 1.5 and noise.exceeded(1.5) == [] and noise.in_fp32 == 0
    assert noise_of(a, b, (a, None), (exact, None)).ratio == pytest.approx(1, abs=0.15), "A's stands for B's"
    shifted = [replace(s, logprobs=s.logprobs + 0.2) for s in b]
    [sentence] = noise_of(a, shifted, (a, None), (exact, None)).exceeded(1.5)
    assert (
        sentence.startswith("noise_ratio is")
        and "99% confidence" in sentence
        and "the limit is 1.5" in sentence
    )
    worse = rounding(2, 1024, 0.5)
    assert noise_of(a, worse, (a, worse), (exact, exact)).exceeded(1.5), "ten times as much is no rounding"
    off = [replace(s, logprobs=s.logprobs + 0.05) for s in exact]
    [sentence] = noise_of(a, b, (a, b), (exact, exact), (exact, off)).exceeded(1.5)
    assert "in fp32 A and B still differ" in sentence
    one_token = [replace(exact[0], logprobs=exact[0].logprobs - 0.3 * (np.arange(64) == 7)), *exact[1:]]
    [sentence] = noise_of(a, b, (a, b), (exact, exact), (exact, one_token)).exceeded(1.5)
    assert "in fp32 a token of A and B still differs" in sentence
    assert noise_of(a, b, (None, None), (exact, exact)) is None


def test_few_tokens_decide_nothing():
    exact, a, b = [scores(*[-1.0] * 64)], rounding(0, 64), rounding(1, 64)
    [sentence] = noise_of(a, b, (a, b), (exact, exact)).exceeded(1.5)
    assert sentence.startswith("64 tokens are too few to tell a difference from rounding")
    exact, a, b = [scores(*[-1.0] * 64) for _ in range(4)], rounding(0, 256), rounding(1, 256)
    noise = noise_of(a, b, (a, b), (exact, exact))
    [sentence] = noise.exceeded((noise.ratio + noise.high) / 2)
    assert "which 256 tokens are too few to hold against the limit" in sentence


@pytest.mark.parametrize(("name", "value", "instead"), [
    ("kl", 1e-9, "distributions"), ("argmax_agreement", 0.99, "best"), ("routing_margin", 1e-3, "Scores.choices"),
])  # fmt: skip
def test_a_limit_on_a_figure_that_was_not_measured_is_exceeded(name, value, instead):
    """Logprobs alone, as a rollout has them, say nothing about it: not even of the same values."""
    for engine in ([-1.0, -2.0], [-6.0, -7.0]):
        verdict = check_rollout([-1.0, -2.0], engine, limits=Limits(**{name: value}))
        assert not verdict.ok and verdict.to_dict()["ok"] == 0
        [sentence] = verdict.exceeded
        assert f"{name} was not measured, the limit is {value:g}" in sentence and instead in sentence
    for limits in (
        Limits.of_dtype("bf16", **{name: value}),
        replace(Limits.of_dtype("bf16"), **{name: value}),
    ):
        assert len(check_rollout([-1.0], [-1.0], limits=limits).exceeded) == 1, "given beside the defaults"
    for dtype in ("fp32", "bf16", "fp8"):
        assert check_rollout([-1.0], [-1.0], limits=Limits.of_dtype(dtype)).ok, (
            "the defaults hold for what there is"
        )
        assert not check_rollout([-1.0], [-2.0], limits=Limits.of_dtype(dtype)).ok
        given = Limits.of_dtype(dtype)
        if getattr(given, name) is not None:
            assert check_rollout(
                [-1.0], [-1.0], limits=Limits.of_dtype(dtype, **{name: getattr(given, name)})
            ).exceeded


def test_a_figure_of_nothing_passes_no_limit():
    nothing = replace(
        scores(-1.0, best=[3]),
        distributions=np.zeros((0, 4)),
        choices=Choices((), np.zeros((1, 0, 2), int), None),
    )
    metrics = metrics_of([nothing], [nothing])
    assert metrics.kl is None and metrics.kl_tokens == 0
    assert Limits(kl=1.0).exceeded(metrics)
    assert Limits(routing_margin=1.0).exceeded(metrics, compare_routing([nothing.choices], [nothing.choices]))
    empty = scores(best=[])
    with_best = metrics_of([empty, scores(-1.0)], [empty, scores(-1.0)])
    assert with_best.argmax_agreement is None and Limits(argmax_agreement=0.5).exceeded(with_best)


@pytest.mark.parametrize(("a", "b", "sentence"), [
    ([], [], "there are no prompts"),
    ([scores_ := Scores(np.array([-1.0]), np.array([1, 2]))], [scores_], "2 best tokens for 1 logprobs"),
    ([Scores(np.array([-1.0]), None, np.zeros((1, 4)))], [Scores(np.array([-1.0]), None, np.zeros((1, 5)))],
     "of 4 tokens, B of 5"),
    ([Scores(np.array([-1.0]), None, np.zeros((2, 4)))], [Scores(np.array([-1.0]), None, np.zeros((2, 4)))],
     "2 distributions for 1"),
])  # fmt: skip
def test_scores_that_do_not_fit_together_are_refused(a, b, sentence):
    with pytest.raises(ReshardError, match=sentence):
        compare_scores(a, b, Limits(mean_abs=1.0))


def test_the_first_of_many_prompts_keep_their_distributions():
    assert ScoringOptions(keep=10).kept_of(2) == [5, 5]
    assert ScoringOptions(keep=3).kept_of(5) == [1, 1, 1, 0, 0]
    assert ScoringOptions(keep=0).kept_of(2) == [0, 0]
    assert sum(ScoringOptions(keep=1790).kept_of(5000)) == 1790


def test_a_running_engines_config_is_read_as_it_was_published():
    """vLLM's class of DeepSeek renames the type of the rotary embedding in place, and transformers
    adds fields of its own."""
    from types import SimpleNamespace

    from reshard.parity.systems.vllm import LiveVllm
    from tests.tools.checkpoints import VARIANTS

    config = VARIANTS["deepseek-v3"].to_dict() | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "_name_or_path": "x",
    }
    config["rope_parameters"] = config["rope_parameters"] | {"rope_type": "deepseek_yarn"}
    served = SimpleNamespace(
        model="x", dtype=torch.bfloat16, quantization=None, hf_config=SimpleNamespace(to_dict=lambda: config)
    )
    llm = SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=SimpleNamespace(model_config=served)))
    assert LiveVllm(llm).model.family.name == "deepseek_v3"
