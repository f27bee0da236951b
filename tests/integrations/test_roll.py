"""ROLL's weight sync as a refit, with the real Ray, Megatron and vLLM. No package index has ROLL
itself: stand-ins for what ours call of it are in ``tests/standins``, and ``ROLL_CLONE=DIRECTORY``
runs all of this with the real one as well, and compares the two."""

import ast
import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from tests.starting import fork_server, warm
from tests.tools.checkpoints import make
from tests.tools.clones import STANDINS, differing, variables
from tests.tools.environments import REPOSITORY, environment_before_ours, run
from tests.tools.probe import alike

pytestmark = pytest.mark.install
CLONE = Path(os.environ["ROLL_CLONE"]).resolve() if "ROLL_CLONE" in os.environ else None
WITH = {"stand-ins": [STANDINS]} | ({"clone": [CLONE, CLONE / "mcore_adapter" / "src"]} if CLONE else {})
# What importing ROLL takes and this environment lacks; without what they ask for in turn, which is
# here or not needed.
OF_ROLL = [
    "accelerate", "antlr4-python3-runtime==4.9.3", "codetiming", "dacite", "datasets", "deprecated", "dill",
    "einops", "fsspec", "hydra-core", "imageio", "jsonlines", "math-verify", "modelscope", "more_itertools",
    "msgpack", "multiprocess", "omegaconf", "orjson", "pandas", "peft", "pyarrow", "pybase64",
    "python-dateutil", "pyvers", "sentencepiece", "tensordict", "TransferQueue", "trl", "tyro", "wrapt",
    "xxhash",
]  # fmt: skip


def python_of(kind: str, tmp_path_factory) -> str:
    """The Python of an environment with Ray, which finds this one's packages behind its own."""
    if kind == "stand-ins":
        return warm.python_with_ray()
    inside = environment_before_ours(tmp_path_factory.mktemp("roll") / "venv", ["ray", "msgpack", *OF_ROLL])
    return fork_server.python(*warm.WITH_RAY, environment=variables(*WITH[kind]), executable=str(inside))


@pytest.fixture(scope="module", params=WITH)
def outcome(request, tmp_path_factory):
    """What a job of two trainers and two engines says."""
    folders = [
        make(tmp_path_factory.mktemp(n) / "hf", "served-qwen3", torch.bfloat16, seed)
        for seed, n in enumerate("ab")
    ]
    surroundings = variables(*WITH[request.param])
    command = [python_of(request.param, tmp_path_factory), "-m", "tests.on_cpu.roll_on_cpu", *folders]
    out = run(command, env=surroundings, cwd=tmp_path_factory.mktemp("at"))
    [line] = [line for line in out.splitlines() if line.startswith("SAID ")]
    results = json.loads(line.removeprefix("SAID "))
    assert results["real"] == (request.param == "clone")
    assert results["kinds"][2] == ("McaGPTModel" if results["real"] else "GPTModel")
    return results


def test_every_engine_holds_after_a_sync_what_rolls_own_way_into_vllms_loader_leaves(outcome):
    assert outcome["updaters"] == [["Refit"], ["Refit"]]
    assert outcome["before"] == [[False, None]] * 2, "dummy weights are not served"
    for version, sync in enumerate(outcome["syncs"], start=1):
        assert sync["error"] == "" and sync["ready"] == [[True, version]] * 2
        for refitted, loaded, wiped in zip(sync["refitted"], sync["loaded"], sync["wiped"]):
            assert refitted == loaded and alike(refitted, wiped) == 0
        assert sync["then ready"] == [[True, None]] * 2, "what ROLL has loaded is served too"
    first, second, again = (sync["refitted"][0] for sync in outcome["syncs"])
    assert alike(first, second) == alike(first, outcome["dummy"][0]) == 0 and first == again


def test_weights_wake_before_they_are_written_and_vllm_processes_them_once(outcome):
    before = [[False, None], [True, None], [True, None]]
    for sync, fit in zip(outcome["syncs"], before):
        assert sync["woke"] == [[[[["weights"], fit]], 0]] * 2, "a refit's weights are not processed again"
        assert sync["then"] == [[[[["weights"], fit]], 1]] * 2, "those that ROLL has loaded are"


def test_after_a_sync_that_failed_the_next_one_connects_again(outcome):
    error, fit = outcome["failed"]
    assert "did not come to refit 4 within 0 s" in error and fit == [[True, None]] * 2
    error, mended, fit = outcome["mended"]
    assert error == "" and mended == outcome["syncs"][2]["refitted"] and fit == [[True, 1]] * 2


def test_an_engine_that_dies_before_it_has_joined_is_not_waited_for(outcome):
    for sentence, seconds in outcome["died"]:
        assert "worker 1 of the rollout has failed: " in sentence and seconds < 30, "of 120"


def test_a_rank_that_has_nothing_to_give_is_not_waited_for(outcome):
    for sentence, seconds in outcome["no model"]:
        assert "the trainer's list of models is empty" in sentence and seconds < 30, "of 120"


def test_what_a_refit_does_not_cover_is_left_to_roll(outcome):
    assert outcome["left"] == [
        "", "lora_target is set for one of actor_train and actor_infer", "the rollout is quantized (quantization)",
        "the rollout's strategy is sglang, not vllm", "the trainer's strategy is fsdp2_train, not megatron_train",
        "the model takes more than text",
    ]  # fmt: skip
    assert outcome["adapters"]["ways"]["left"] == ["MegatronWeightUpdater None"] * 2


def test_an_adapter_is_refitted_as_vllm_loads_its_files(outcome):
    """And vLLM lists it by the number by which ROLL then asks for it."""
    assert outcome["adapters"]["ways"]["adapters"] == ["Refit 1"] * 2
    for [ours, listed], [theirs, _] in outcome["adapters"]["syncs"]:
        assert ours == theirs and listed == [1]
    first, second = (ours for [ours, _], _ in outcome["adapters"]["syncs"])
    assert all(first[name] != second[name] for name in first)


def test_a_rollout_that_drafts_tokens_is_refitted(outcome):
    assert outcome["drafts"] == ""


def test_options_that_are_none_are_refused(outcome):
    assert outcome["wrong options"] == [
        "RESHARD_VERIFY is 'yes': set it to 0 or 1 in actor_train.system_envs",
        "RESHARD_TIMEOUT in actor_train.system_envs is 0.0; it is a number of seconds above 0",
        "RESHARD_TIMEOUT in actor_train.system_envs is 'soon'; it is a number of seconds above 0",
        "RESHARD_BACKEND in actor_train.system_envs 'ring' is not one of auto, cuda_ipc, staged, nixl, nccl",
        "RESHARD_DELTA is 'yes': set it to 0 or 1 in actor_train.system_envs",
        "RESHARD_KEEP_MAPPED is 'yes': set it to 0 or 1 in actor_train.system_envs",
        "RESHARD_BEGIN in actor_train.system_envs: ROLL moves the trainer's weights between step and update; "
        "leave it out",
        "RESHARD_VERIFI in actor_train.system_envs is not an option: RESHARD_VERIFY is",
        "",
    ]


def test_a_line_that_is_missing_is_said(outcome):
    for line in (
        "no attribute 'reshard_wake'",
        "actor_infer.worker_cls=reshard.integrations.roll.InferWorker",
        "worker_extension_cls=reshard.integrations.roll.RollExtension",
    ):
        assert line in outcome["no line"]


def test_a_call_that_has_changed_is_found(tmp_path):
    changed = tmp_path / "roll/distributed/executor/model_update_group.py"
    shutil.copytree(STANDINS / "roll", tmp_path / "roll")
    changed.write_text(changed.read_text().replace("step=None", "steps=None"))
    [wrong], compared = differing("roll", tmp_path)
    assert wrong.startswith("ModelUpdateGroup.model_update: ") and compared == 16


if CLONE is not None:

    def test_the_stand_ins_are_called_as_rolls_own_are():
        wrong, compared = differing("roll", CLONE)
        assert not wrong and compared == 16

    def test_every_class_that_ours_are_in_the_place_of_is_there():
        wanted = ast.parse((REPOSITORY / "reshard/integrations/roll/actors.py").read_text())
        [table] = [n for n in wanted.body if isinstance(n, ast.Assign) and n.targets[0].id == "TRAINING"]
        for path in ast.literal_eval(table.value).values():
            module, _, name = path.rpartition(".")
            tree = ast.parse((CLONE / (module.replace(".", "/") + ".py")).read_text())
            assert name in [node.name for node in tree.body if isinstance(node, ast.ClassDef)], path
