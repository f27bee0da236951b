"""The demo, the examples that need no GPU, and those in docstrings run as they are written."""

import doctest
import importlib
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

import reshard
from tests.install_vllm_cpu import environment_of_engine
from tests.starting.ranks import run_to_the_end, torchrun
from tests.starting.warm import python_of_engine, python_of_trainer
from tests.tools.checkpoints import make

REPOSITORY = Path(__file__).resolve().parent.parent.parent
EXAMPLES = REPOSITORY / "examples"
DOCUMENTED = [
    path
    for path in sorted((REPOSITORY / "reshard").rglob("*.py"))
    if "\n    >>> " in path.read_text() or "\n>>> " in path.read_text()
]


def run(*command, env=None) -> str:
    done = run_to_the_end(command, 800, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_convert(tmp_path):
    make(tmp_path / "qwen", "qwen3-moe")
    output = run(
        sys.executable, EXAMPLES / "convert.py", tmp_path / "qwen", tmp_path / "out", "--tp", 2, "--ep", 2
    )
    assert "there and back equal: True" in output


def test_demo():
    output = run(python_of_trainer(), "-m", "reshard", "demo")
    assert output.endswith("all steps agree, bit for bit\n") and output.count("ok  ") == 6


def test_the_example_on_ray_says_how_to_get_ray():
    """In an environment without Ray, as that of the tests."""
    program = (
        f"import runpy, sys; sys.modules['ray'] = None; runpy.run_path({str(EXAMPLES / 'refit_ray.py')!r}, "
        "run_name='__main__')"
    )
    done = run_to_the_end([sys.executable, "-c", program], 100)
    needs = "this example needs Ray, which is not installed here: "
    assert (done.returncode, done.stderr) == (1, f"{needs}{sys.executable} -m pip install ray\n")


@pytest.mark.parametrize("example", ["refit_colocated.py", "refit_separate.py"])
def test_an_example_for_torchrun_says_so(example):
    done = run_to_the_end([sys.executable, EXAMPLES / example], 100)
    assert (
        done.returncode == 2
        and f"torchrun starts it: torchrun --nproc-per-node 2 examples/{example}" in done.stderr
    )


def test_what_the_package_offers_is_listed_and_there():
    assert set(reshard.__all__) <= set(dir(reshard)) and "hf_to_mcore" in dir(reshard)
    offered = [getattr(reshard, name) for name in reshard.__all__]
    packages = {each.__name__ for each in offered if isinstance(each, ModuleType)}
    assert all(callable(each) for each in offered if not isinstance(each, ModuleType))
    assert packages == {f"reshard.{name}" for name in ("delta", "engines", "parity", "refit", "trainers")}
    listed = (REPOSITORY / "docs" / "reference" / "python.md").read_text()
    assert [name for name in reshard.__all__ if not re.search(rf"\b{name}\b", listed)] == []


def test_calls_take_paths_and_their_results_are_short_and_never_true_by_themselves(checkpoint):
    source, layouts = Path(checkpoint("qwen3")), (reshard.MegatronLayout(), reshard.VllmLayout())
    assert (
        reshard.plan_refit(source, *layouts).trainer_bytes
        == reshard.plan_refit(str(source), *layouts).trainer_bytes
    )
    assert reshard.estimate_memory(source).peak == reshard.estimate_memory(str(source)).peak
    difference, inspection = reshard.diff(source, source), reshard.inspect(source)
    assert difference.equal and max(len(repr(difference)), len(repr(inspection))) < 1000
    with pytest.raises(TypeError, match=r"a Diff is neither true nor false: ask for its \.equal"):
        assert difference
    verdict = reshard.parity.check_rollout([[-1.0, -2.0]], [[-1.0, -9.0]])
    with pytest.raises(TypeError, match=r"a Verdict is neither true nor false: ask for its \.ok"):
        assert verdict


def refit(example: str, *options) -> list[str]:
    """The lines of an example's steps, on two ranks of the trainer."""
    command = (*torchrun(2, python_of_engine()), EXAMPLES / example, *options)
    return [
        line for line in run(*command, env=environment_of_engine()).splitlines() if line.startswith("step ")
    ]


def test_refit_colocated(tmp_path):
    """Of a saved model, whose config has a list for each layer, with fewer layers."""
    config = make(tmp_path / "qwen", "qwen3") / "config.json"
    fields = json.loads(config.read_text())
    assert len(fields["layer_types"]) == 4
    config.write_text(json.dumps(fields | {"max_position_embeddings": 2048}))
    steps = refit("refit_colocated.py", tmp_path / "qwen", "--layers", 2, "--vllm-pp", 2)
    losses = [float(line.split("loss ")[1].split(",")[0]) for line in steps]
    assert len(losses) == 3 and min(losses[1:]) < losses[0] and "version 2, 0.2 MB" in steps[2]
    assert len({line.split("then ")[1] for line in steps}) == 3


def test_refit_separate():
    steps = refit("refit_separate.py", "--engine-gpus", "0")
    assert (
        len(steps) == 3 and "version 2, " in steps[2] and len({line.split("then ")[1] for line in steps}) == 3
    )


def test_refit_fleet():
    """Two servers, a third that gets its weights from one of these, and one that is killed."""
    out = run(python_of_engine(), EXAMPLES / "refit_fleet.py", env=environment_of_engine())
    assert "version 0 in 2 of 2 engines" in out and "version 1 in 3 of 3 engines" in out
    assert "version 2 in 2 of 3 engines" in out and "pod-0 is behind: " in out
    answers: dict[str, set[str]] = {}
    for part in out.split("step ")[1:]:
        for answer in re.findall(r"pod-\d answers (.*)", part):
            answers.setdefault(part[0], set()).add(answer)
    assert [len(answers[step]) for step in "0123"] == [1, 1, 1, 1], "all engines of a step answer alike"
    assert len(set.union(*answers.values())) > 1


@pytest.mark.parametrize("path", DOCUMENTED, ids=lambda path: path.stem)
def test_docstrings(path):
    name = ".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__")
    done = doctest.testmod(importlib.import_module(name))
    assert done.attempted and not done.failed
