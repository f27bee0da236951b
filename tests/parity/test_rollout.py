"""Rollouts: what a step says of its tokens, in whatever form they come, and what a run's file says of its steps."""

import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from reshard import ReshardError
from reshard.parity import Limits, RolloutMonitor, check_rollout, parity, read_run
from reshard.parity.rollout.parts import Part, parts_of
from reshard.parity.rollout.tokens import Tokens
from reshard.parity.rollout.weights import effective_share, weights_of
from tests.tools.checkpoints import make

REPOSITORY = Path(__file__).resolve().parent.parent.parent
FIGURES = ("mean_abs", "kl_k1", "kl_estimate_reverse")


def whole_of(figures: dict, kind: str) -> dict[str, float]:
    """The sums of the parts of a kind."""
    return {
        name: sum(
            value for key, value in figures.items() if key.startswith(f"{kind}_") and key.endswith(f"/{name}")
        )
        for name in Part._fields
    }


def adds_up(figures: dict, kind: str) -> bool:
    """True if the parts of a kind are those of the whole."""
    whole = whole_of(figures, kind)
    return whole["share"] == pytest.approx(1) and all(
        whole[name] == pytest.approx(figures[name], rel=1e-9, abs=1e-15) for name in FIGURES
    )


@pytest.fixture(scope="module")
def sampled(trained):
    """Tokens that a trained model in bf16, the engine, samples at each position of real text: their logprobs in fp32,
    the trainer, and in bf16 ``[samples, positions]``, and the exact KL(bf16 || fp32) at each ``[positions]``."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    ids = torch.tensor(AutoTokenizer.from_pretrained(trained)(text)["input_ids"][:320]).reshape(2, 160)
    logprobs = []
    for dtype in (torch.float32, torch.bfloat16):
        model = AutoModelForCausalLM.from_pretrained(trained, dtype=dtype).eval()
        with torch.no_grad():
            logprobs.append(model(ids).logits.flatten(0, 1).double().log_softmax(-1))
    p, q = logprobs
    torch.manual_seed(0)
    tokens = torch.multinomial(q.exp(), 16, replacement=True)
    return p.gather(-1, tokens).T, q.gather(-1, tokens).T, (q.exp() * (q - p)).sum(-1)


def test_estimates_are_those_of_the_exact_kl_of_a_trained_model(sampled):
    """Within five standard errors of the tokens. The control are logprobs of another distribution than the one that was
    sampled from, as those without the temperature."""
    train, engine, exact = sampled
    verdict = check_rollout(train, engine)
    log_ratio = (train - engine).numpy().ravel()
    for value, of_tokens in (
        (verdict.metrics.kl_estimate_reverse, np.exp(log_ratio) - 1 - log_ratio),
        (verdict.weights.kl_k1, -log_ratio),
        (verdict.weights.ratio_mean, np.exp(log_ratio)),
    ):
        assert value == pytest.approx(of_tokens.mean())
        target = 1.0 if value == verdict.weights.ratio_mean else float(exact.mean())
        error = of_tokens.std() / np.sqrt(len(of_tokens))
        assert abs(value - target) < 5 * error, (value, target, error)
    assert 1e-5 < float(exact.mean()) < 0.02 and verdict.metrics.mean_abs > 0.005, "bf16 rounds"
    assert verdict.weights.kl_k1 - verdict.metrics.kl_estimate_reverse == pytest.approx(
        1 - verdict.weights.ratio_mean
    )
    hotter = check_rollout(train, 0.8 * engine)
    assert abs(hotter.weights.ratio_mean - 1) > 10 * abs(verdict.weights.ratio_mean - 1) and not hotter.ok


def test_a_rollout_has_a_kl_of_the_tokens_that_the_engine_sampled():
    random = np.random.default_rng(0)
    q = random.dirichlet(np.ones(8), 4000)
    p = q * np.exp(random.normal(0, 0.3, q.shape))
    p /= p.sum(-1, keepdims=True)
    tokens = np.array([random.choice(8, p=row) for row in q])
    rows = np.arange(len(q))
    verdict = check_rollout(np.log(p[rows, tokens]), np.log(q[rows, tokens]))
    kl = float((q * np.log(q / p)).sum(-1).mean())
    assert verdict.metrics.kl_estimate_reverse == pytest.approx(kl, rel=0.1)
    assert any(sentence.startswith("kl_estimate_reverse is") for sentence in verdict.exceeded)
    near = check_rollout(np.log(q[rows, tokens]) + random.normal(0, 0.02, len(q)), np.log(q[rows, tokens]))
    assert near.ok and near.to_dict()["kl_estimate_reverse"] < 1e-3


def test_parts_by_experts_are_those_that_parity_finds(checkpoint, tmp_path):
    """Two real mixtures of experts whose weights differ a little: the choices come from their routers."""
    one = checkpoint("qwen3-moe")
    other = make(tmp_path / "other", "qwen3-moe", torch.float32, seed=0)
    from safetensors.torch import load_file, save_file

    tensors = load_file(other / "model.safetensors")
    random = torch.Generator().manual_seed(0)
    for tensor in tensors.values():
        if tensor.is_floating_point() and tensor.ndim > 1:
            tensor += 0.02 * tensor.std() * torch.randn(tensor.shape, generator=random)
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    report = parity(one, other, 6, lengths=[64, 33], dtype="fp32")
    assert 0 < report.routing.differing_tokens < report.routing.tokens
    a, b = report.scores_a, report.scores_b
    # In another order within a layer, as an engine may have them.
    experts = [[s.choices.experts for s in a], [s.choices.experts[..., ::-1] for s in b]]
    logprobs = [[s.logprobs for s in side] for side in (a, b)]
    verdict = check_rollout(*logprobs, train_experts=experts[0], inference_experts=experts[1])
    figures, routing = verdict.to_dict(), report.routing
    share = figures["experts_differ/share"]
    assert share == pytest.approx(routing.differing_tokens / routing.tokens)
    assert figures["experts_differ/mean_abs"] / share == pytest.approx(routing.mean_abs_differing)
    assert figures["experts_same/mean_abs"] / (1 - share) == pytest.approx(routing.mean_abs_same)
    assert adds_up(figures, "experts") and adds_up(figures, "ratio")
    # The same as padded tensors, on the GPU too where there is one.
    length = max(map(len, logprobs[0]))
    padded = [torch.full((6, length), float("nan")) for _ in range(2)]
    routed = [torch.zeros((6, length, *experts[0][0].shape[1:]), dtype=torch.int16) for _ in range(2)]
    for side in range(2):
        for i, row in enumerate(logprobs[side]):
            padded[side][i, : len(row)] = torch.as_tensor(row)
            routed[side][i, : len(row)] = torch.as_tensor(experts[side][i].copy())
    mask = ~padded[0].isnan()
    routed[0][~mask] = 7  # padding does not count
    for device in ("cpu", *["cuda"] * torch.cuda.is_available()):
        again = check_rollout(
            *(values.to(device) for values in padded),
            mask.to(device),
            train_experts=routed[0].to(device),
            inference_experts=routed[1].to(device),
        ).to_dict()
        assert again == pytest.approx(figures, rel=1e-5, abs=1e-7)
    control = check_rollout(*logprobs, train_experts=experts[0], inference_experts=experts[0]).to_dict()
    assert control["experts_differ/share"] == 0 != share


def test_a_rollout_comes_in_any_form(sampled):
    train, engine = (values[:5, :12] for values in sampled[:2])
    lengths = [12, 3, 7, 12, 1]
    mask = torch.arange(12) < torch.tensor(lengths)[:, None]
    versions = torch.tensor([3, 4, 5, 5, 2])
    every = (versions[:, None] * mask).int()
    expected = check_rollout(train, engine, mask, versions=versions, version=5).to_dict()
    rows = [[values[i, :n] for i, n in enumerate(lengths)] for values in (train, engine)]
    forms = {
        "arrays": (train.numpy(), engine.numpy(), mask.numpy(), every.numpy()),
        "a mask of numbers": (train, engine, mask.float(), every),
        "an array and a tensor": (train.numpy(), engine, mask, versions.tolist()),
        "ragged tensors": (*rows, None, versions),
        "ragged arrays": (*([np.asarray(row) for row in side] for side in rows), None, versions.numpy()),
        "ragged lists": (*([row.tolist() for row in side] for side in rows), None, versions.tolist()),
        "nested": (*(torch.nested.nested_tensor(side, layout=torch.jagged) for side in rows), None, versions),
        "ragged against padded": (
            rows[0] if all(n == 12 for n in lengths) else list(train), engine, mask, every,
        ),
        "micro-batches": ([train[:2], train[2:]], [engine[:2], engine[2:]], [mask[:2], mask[2:]], versions),
    }  # fmt: skip
    for name, (one, other, chosen, made_by) in forms.items():
        figures = check_rollout(one, other, chosen, versions=made_by, version=5).to_dict()
        assert figures == pytest.approx(expected, rel=1e-12), name
    assert expected["tokens"] == sum(lengths) and expected["samples"] == 5
    assert expected["lag_mean"] == pytest.approx((2 * 12 + 3 + 3) / 35) and expected["lag_max"] == 3
    assert {key.split("/")[0] for key in expected if key.startswith("lag_") and "/" in key} == {
        "lag_0", "lag_1", "lag_2", "lag_3",
    }  # fmt: skip
    assert adds_up(expected, "lag") and adds_up(expected, "ratio")
    short = check_rollout(train.bfloat16(), engine.bfloat16(), mask).metrics
    assert short.mean_abs == pytest.approx(
        float((train.bfloat16().double() - engine.bfloat16().double()).abs()[mask].mean())
    )
    assert short.mean_abs != pytest.approx(expected["mean_abs"], rel=1e-3), "bf16 logprobs are rounded"


def test_figures_follow_their_definitions(sampled):
    train, engine = (values.numpy() for values in sampled[:2])
    engine = engine + np.random.default_rng(1).normal(0, 0.4, engine.shape)
    verdict = check_rollout(train, engine, bounds=(0.8, 1.25))
    weights, parts = verdict.weights, verdict.parts
    ratio = np.exp(train - engine)
    of_samples = ratio.prod(1)
    assert weights.ess == pytest.approx(ratio.sum() ** 2 / (ratio**2).sum() / ratio.size)
    assert weights.sample_ess == pytest.approx(
        of_samples.sum() ** 2 / (of_samples**2).sum() / len(of_samples)
    )
    assert (
        weights.sample_above == (of_samples > 1.25).mean()
        and weights.sample_below == (of_samples < 0.8).mean()
    )
    assert weights.sample_log_ratio_max == pytest.approx(np.log(of_samples).max())
    ordered = np.sort(ratio.ravel())
    for name, share in (("ratio_p99", 0.99), ("ratio_p999", 0.999)):
        value = getattr(weights, name)
        assert np.isclose(ordered, value).any() and (ordered <= value * (1 + 1e-12)).mean() >= share
    assert weights.sample_mult_prob_error_max == pytest.approx(np.exp(abs(train - engine)).mean(1).max())
    assert (
        parts.ratio["above"].share == (ratio > 1.25).mean()
        and parts.ratio["below"].share == (ratio < 0.8).mean()
    )
    high = ratio > 1.25
    assert parts.ratio["above"].kl_k1 == pytest.approx(-np.log(ratio)[high].sum() / ratio.size)


def test_weights_of_any_size_have_an_effective_size():
    assert effective_share(np.full(5, 900.0)) == pytest.approx(1)
    assert effective_share(np.array([900.0, -900.0, -900.0, -900.0])) == pytest.approx(0.25)
    far = check_rollout([[-1.0] * 4000], [[-2.0] * 4000])
    assert far.weights.sample_log_ratio_max == pytest.approx(4000) and far.weights.sample_ess == 1


def test_lags_beyond_those_with_a_group_share_one():
    lag = np.array([0, 7, 8, 30, 500])
    tokens = Tokens(np.arange(5) - 9.0, np.arange(5) - 9.5, np.array([5]), lag)
    parts = parts_of(tokens)
    assert {name: part.share for name, part in parts.lag.items()} == {"0": 0.2, "7": 0.2, "8_or_more": 0.6}
    assert parts.lag_max == 500 and weights_of(tokens).samples == 1


def test_a_rollout_is_watched():
    torch.manual_seed(0)
    train = -torch.rand(3, 5)
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0]])
    engine = train + 0.001
    engine[0, 3:], engine[2, 1:] = float("nan"), float("-inf")  # padding, which does not count
    verdict = check_rollout(train, engine, mask)
    assert verdict.ok and verdict.metrics.tokens == 9 and verdict.to_dict()["ok"] == 1
    assert verdict.metrics.token_mult_prob_error == pytest.approx(np.exp(0.001), rel=1e-4)
    assert verdict.to_dict("rollout/").keys() == {f"rollout/{name}" for name in verdict.to_dict()}
    assert "every figure is within its limit" in str(verdict) and "by ratio" in str(verdict)
    far = check_rollout(train.bfloat16(), engine - 0.5, mask)
    assert not far.ok and far.exceeded[0].startswith("mean_abs is 0.49")
    assert check_rollout([-1.0, -2.0], [-1.0, -2.0]).metrics.tokens == 2
    ragged = [np.array([-1.0, -2.0]), np.array([-3.0])]
    assert check_rollout(ragged, ragged).metrics.tokens == 3


@pytest.mark.parametrize(("given", "sentence"), [
    (dict(mask=None), "the engine gives the logprob nan for token 4 of those that count of sample 0"),
    (dict(mask=torch.zeros(3, 5)), "no token of the rollout counts"),
    (dict(mask=torch.ones(3, 4)), "the mask (3, 4)"),
    (dict(train_experts=torch.zeros(3, 5, 2, 1)), "give train_experts and inference_experts"),
    (dict(train_experts=torch.zeros(3, 5, 2, 1), inference_experts=torch.zeros(3, 5, 3, 1)), "the same layers"),
    (dict(versions=[1, 2, 3]), "staleness needs versions"),
    (dict(versions=[1, 2, 3], version=2), "made by version 3, which is newer than the trainer's 2"),
    (dict(bounds=(1.1, 2.0)), "hold no weight of 1"),
])  # fmt: skip
def test_what_cannot_be_compared_is_refused(given, sentence):
    torch.manual_seed(0)
    train = -torch.rand(3, 5)
    engine = train.clone()
    engine[0, 3:] = float("nan")
    known = dict(mask=torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0]])) | given
    with pytest.raises(ReshardError) as error:
        check_rollout(train, engine, **known)
    assert sentence in str(error.value)
    for nothing in ([], torch.zeros(0, 5)):
        with pytest.raises(ReshardError, match="no token of the rollout counts"):
            check_rollout(nothing, nothing)
    with pytest.raises(ReshardError, match="have shape"):
        check_rollout([[-1.0], [-2.0]], [[-1.0], [-2.0, -1.0]])
    with pytest.raises(ReshardError, match="have shape 2 samples, the engine's logprobs 1"):
        check_rollout([[-1.0], [-2.0]], [[-1.0]])


def a_step(size: float, seed: int = 0, lag: int = 0):
    """Arguments of a step whose logprobs differ by about `size`."""
    random = np.random.default_rng(seed)
    train = -random.gamma(1.5, 1.0, (4, 64))
    return dict(
        train=train, inference=train + random.normal(0, size, train.shape), versions=9 - lag, version=9
    )


def test_a_monitor_writes_a_line_a_step_and_a_run_reads_them(tmp_path, caplog):
    path = tmp_path / "run.jsonl"
    monitor = RolloutMonitor(path, Limits.of_rollout(mean_abs=0.05))
    with caplog.at_level(logging.WARNING, "reshard.monitor"):
        verdicts = [monitor.step(**a_step(0.01 if i != 3 else 0.2, i, i % 3)) for i in range(6)]
        nothing = monitor.step([[-1.0]], [[float("nan")]])
    assert [v.ok for v in verdicts] == [True] * 3 + [False] + [True] * 2 and not nothing.ok
    assert nothing.to_dict() == {"tokens": 0, "ok": 0}
    assert [record.message.partition(":")[0] for record in caplog.records] == ["step 3", "step 6"]
    header, *lines = map(json.loads, path.read_text().splitlines())
    assert header["limits"]["mean_abs"] == 0.05 and [line["step"] for line in lines] == list(range(7))
    for line, verdict in zip(lines, verdicts):
        assert {name: line[name] for name in verdict.to_dict()} == verdict.to_dict()
    run = read_run(path)
    assert not run.ok and list(run.failed) == [3, 6] and run.notices == []
    assert run.verdict.startswith("2 of 7 steps are beyond the limits, first step 3: mean_abs is 0.1")
    figure = run.figures()["mean_abs"]
    assert (figure.worst_step, figure.worst) == (3, verdicts[3].metrics.mean_abs)
    assert figure.mean == pytest.approx(np.mean([v.metrics.mean_abs for v in verdicts])), "of equal steps"
    for kind, groups in run.parts().items():
        assert sum(part.share for part in groups.values()) == pytest.approx(1), kind
        assert sum(part.mean_abs for part in groups.values()) == pytest.approx(figure.mean)
    assert set(run.parts()) == {"ratio", "lag"} and set(run.parts()["lag"]) == {"0", "1", "2"}


def test_figures_of_a_run_are_those_of_all_tokens_together(tmp_path):
    """Steps of other lengths, of which only some know the experts."""
    path = tmp_path / "run.jsonl"
    monitor, random = RolloutMonitor(path), np.random.default_rng(0)
    trains = [-random.gamma(1.5, 1.0, (n, 32)) for n in (1, 5, 2)]
    engines = [train + random.normal(0, 0.05, train.shape) for train in trains]
    experts = [random.integers(0, 4, (*train.shape, 3, 1)) for train in trains]
    others = [np.where(random.random(e.shape) < 0.05, (e + 1) % 4, e) for e in experts]
    for i, (train, engine) in enumerate(zip(trains, engines)):
        known = dict(train_experts=experts[i], inference_experts=others[i]) if i else {}
        monitor.step(train, engine, **known)
    run, every = read_run(path), check_rollout(np.concatenate(trains), np.concatenate(engines))
    for name in ("mean_abs", "kl_estimate_reverse", "token_mult_prob_error"):
        assert run.figures()[name].mean == pytest.approx(getattr(every.metrics, name))
    assert run.figures()["kl_k1"].mean == pytest.approx(every.weights.kl_k1)
    known = check_rollout(*(np.concatenate(side[1:]) for side in (trains, engines)),
                          train_experts=np.concatenate(experts[1:]),
                          inference_experts=np.concatenate(others[1:])).parts  # fmt: skip
    for group, part in run.parts()["experts"].items():
        assert part == pytest.approx(known.experts[group]), "of the steps that know them"


def test_a_run_goes_on_in_its_file(tmp_path):
    path = tmp_path / "run.jsonl"
    first = RolloutMonitor(path)
    for i in range(4):
        first.step(**a_step(0.01, i))
    with open(path, "ab") as file:
        file.write(b'{"step":4,"tokens":256,"mean_a')  # torn by a crash
    again = RolloutMonitor(path)
    assert again.next_step == 4, "torn lines are no steps"
    again.step(**a_step(0.02, 4), step=2)  # from an older checkpoint
    again.step(**a_step(0.02, 5))
    run = read_run(path)
    assert run.steps.tolist() == [0, 1, 2, 3] and run.figures()["mean_abs"].last > 0.015
    assert run.notices == [
        "lines that are not whole, as after a crash, are left out: 6",
        "2 steps were run again: the last time counts",
    ]
    assert RolloutMonitor(path).next_step == 4


def test_a_killed_run_leaves_whole_lines(tmp_path):
    """Killed while it writes as fast as it can; the monitor's memory does not grow with its steps."""
    path = tmp_path / "run.jsonl"
    code = f"""
import numpy as np
from reshard.parity import RolloutMonitor
monitor = RolloutMonitor({str(path)!r})
values = np.full((2, 8), -1.0)
while True:
    monitor.step(values, values)
"""
    process = subprocess.Popen([sys.executable, "-c", code])
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not (path.exists() and path.stat().st_size > 100_000):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    run = read_run(path)
    assert (
        run.ok
        and run.notices == []
        and run.steps.tolist() == list(range(len(run.steps)))
        and len(run.steps) > 50
    )


def test_a_file_that_cannot_be_written_does_not_end_a_run(tmp_path, caplog):
    monitor = RolloutMonitor(tmp_path / "absent" / "run.jsonl")
    with caplog.at_level(logging.WARNING, "reshard.monitor"):
        assert monitor.step(**a_step(0.01)).ok
    assert "is not in" in caplog.text and "No such file" in caplog.text
    os.mkdir(tmp_path / "absent")
    monitor.step(**a_step(0.01))
    assert read_run(tmp_path / "absent" / "run.jsonl").steps.tolist() == [1]


def test_what_is_no_file_of_a_run_is_refused(tmp_path):
    with pytest.raises(ReshardError, match="cannot be read: No such file"):
        read_run(tmp_path / "absent")
    for text, sentence in (
        ("", "has no step"),
        ('{"loss": 1.0}\n[1]\nx\n', "has no step"),
        ('{"monitor": 2, "reshard": "9.0"}\n{"step": 0}\n', "is of a later reshard"),
    ):
        (tmp_path / "run.jsonl").write_text(text)
        with pytest.raises(ReshardError, match=sentence):
            read_run(tmp_path / "run.jsonl")
    infinite = RolloutMonitor(tmp_path / "far.jsonl").step([[-1.0]], [[-900.0]])
    assert infinite.metrics.ratio_max == float("inf")
    assert read_run(tmp_path / "far.jsonl").columns["ratio_max"][0] == float("inf")
