"""The page of a run and the command that makes it: one file that fetches nothing, with every step that it shows."""

import json
import subprocess
import sys

import numpy as np
import pytest
from bokeh.models import HoverTool

from reshard.parity import RolloutMonitor, read_run
from reshard.parity.rollout import html
from reshard.parity.rollout.html import html_run
from tests.tools.html_pages import Parsed, assert_stands_alone

HOSTILE = "</script><img src=https://example.org/x onerror=alert(2)>"


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A run of 40 steps, of which two are beyond the limits; experts are known from the tenth on."""
    path = tmp_path_factory.mktemp("run") / "run.jsonl"
    monitor, random = RolloutMonitor(path), np.random.default_rng(0)
    for step in range(40):
        train = -random.gamma(1.5, 1.0, (4, 32))
        engine = train + random.normal(0, 0.3 if step in (7, 30) else 0.02, train.shape)
        experts = random.integers(0, 8, (4, 32, 2, 1))
        others = np.where(random.random(experts.shape) < 0.1, (experts + 1) % 8, experts)
        known = dict(train_experts=experts, inference_experts=others) if step >= 10 else {}
        monitor.step(train, engine, versions=[step - s for s in (0, 0, 1, 2)], version=step, **known)
    return path


def command(*arguments) -> subprocess.CompletedProcess:
    program = [sys.executable, "-m", "reshard", "monitor", *map(str, arguments)]
    return subprocess.run(program, capture_output=True, text=True)


def test_the_charts_have_every_step_and_stacks_are_as_high_as_the_whole(path):
    run = read_run(path)
    parsed = Parsed(html_run(run))
    assert_stands_alone(parsed)
    assert "Rollouts: beyond the limits" in parsed.text and "2 of 40 steps" in parsed.text
    charts = {chart.title.text: chart for chart in parsed.charts.roots}
    assert len(charts) == 9
    data = charts["Mean |difference of logprobs|"].renderers[0].data_source.data
    assert data["step"].tolist() == list(range(40))
    assert np.array_equal(data["mean_abs"], run.columns["mean_abs"])
    whole = run.columns["kl_estimate_reverse"]
    for last, first in (("ratio_above", 0), ("lag_2", 0), ("experts_differ", 10)):
        highest = data[f"high_{last}_of_kl_estimate_reverse"]
        assert (
            np.allclose(highest[first:], whole[first:], rtol=1e-9, atol=1e-15) and not highest[:first].any()
        )
    assert not np.allclose(data["high_lag_1_of_kl_estimate_reverse"], whole), (
        "the control: without the last group"
    )
    hovers = [tool for chart in charts.values() for tool in chart.tools if isinstance(tool, HoverTool)]
    assert hovers and all(tool.tooltips[0][1] == "@step" for tool in hovers)
    assert {"7", "30"} <= set(parsed.cells) and parsed.text.count("mean_abs is 0.2") == 3


def test_of_many_steps_those_beyond_the_limits_are_shown_and_the_page_says_so(path, monkeypatch):
    run = read_run(path)
    monkeypatch.setattr(html, "POINTS", 10)
    monkeypatch.setattr(html, "KEPT", 5)
    parsed = Parsed(html_run(run))
    [data] = {id(chart.renderers[0].data_source): chart.renderers[0].data_source.data
              for chart in parsed.charts.roots}.values()  # fmt: skip
    steps = data["step"].tolist()
    assert len(steps) == len(set(steps)) == 10 and {7, 30, 0, 39} <= set(steps) and steps == sorted(steps)
    assert "The charts show 10 of 40 steps" in parsed.text


def test_a_hostile_file_is_text_and_nothing_else(tmp_path):
    (tmp_path / "run.jsonl").write_text(
        json.dumps(
            {
                "step": 1,
                "tokens": 4,
                "mean_abs": 0.1,
                "mean_rel": HOSTILE,
                HOSTILE: 2.0,
                "exceeded": [HOSTILE],
            }
        )
    )
    parsed = Parsed(html_run(read_run(tmp_path / "run.jsonl")))
    assert_stands_alone(parsed)
    assert "img" not in parsed.tags and HOSTILE in parsed.text


def test_the_command_prints_the_run_and_fails_where_a_step_did(path, tmp_path):
    done = command(path, "--html", tmp_path / "run.html")
    assert done.returncode == 1 and done.stdout.splitlines() == [*read_run(path).lines()]
    assert done.stderr.startswith("Error: 2 of 40 steps are beyond the limits, first step 7: mean_abs is 0.2")
    assert_stands_alone(Parsed((tmp_path / "run.html").read_text(encoding="utf-8")))
    document = json.loads(command(path, "--json").stdout)
    assert document == json.loads(json.dumps(read_run(path).to_dict())) and not document["ok"]
    good = tmp_path / "good.jsonl"
    RolloutMonitor(good).step([[-1.0]], [[-1.001]])
    assert command(good).returncode == 0
    absent = command(tmp_path / "absent")
    assert absent.returncode == 1 and "cannot be read: No such file or directory" in absent.stderr
    nowhere = command(good, "--html", tmp_path / "no" / "run.html")
    assert nowhere.returncode == 1 and "--html: cannot write" in nowhere.stderr
