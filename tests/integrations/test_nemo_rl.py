"""NeMo-RL's weight sync as a refit, with the real Ray, Megatron and vLLM. No package index has
NeMo-RL itself: stand-ins for what ours call of it are in ``tests/standins``, and
``NEMO_RL_CLONE=DIRECTORY`` runs all of this with the real one as well, and compares the two."""

import ast
import json
import os
import re
from pathlib import Path

import pytest
import torch

from tests.starting import fork_server, warm
from tests.tools.checkpoints import make
from tests.tools.clones import STANDINS, differing, variables
from tests.tools.drafters import Eagle3
from tests.tools.environments import attempt, environment_before_ours, run
from tests.tools.probe import alike

pytestmark = pytest.mark.install
CLONE = Path(os.environ["NEMO_RL_CLONE"]).resolve() if "NEMO_RL_CLONE" in os.environ else None
WITH = {"stand-ins": STANDINS} | ({"clone": CLONE} if CLONE else {})
# What importing NeMo-RL takes and this environment lacks or has too new; without what they ask for in turn.
OF_NEMO_RL = [
    "transformers==5.8.*", "tokenizers==0.22.*", "huggingface-hub<2", "accelerate",
    "antlr4-python3-runtime==4.9.3", "datasets", "decord2", "dill", "fsspec", "hydra-core", "math-verify",
    "mlflow", "multiprocess", "num2words", "nvtx", "omegaconf", "orjson", "pandas", "peft", "plotly",
    "pyarrow", "python-dateutil", "pyvers", "swanlab", "tensorboard", "tensordict", "torchdata",
    "TransferQueue", "wandb", "xxhash",
]  # fmt: skip
KIND = "reshard.integrations.nemo_rl.ReshardWorker"
BACKEND = "reshard.integrations.nemo_rl:ReshardCheckpointEngine"


def python_of(kind: str, tmp_path_factory) -> str:
    """The Python of an environment with Ray, which finds this one's packages behind its own."""
    if kind == "stand-ins":
        return warm.python_with_ray()
    inside = environment_before_ours(
        tmp_path_factory.mktemp("nemo_rl") / "venv", ["ray", "msgpack", *OF_NEMO_RL]
    )
    return fork_server.python(*warm.WITH_RAY, environment=variables(WITH[kind]), executable=str(inside))


@pytest.fixture(scope="module", params=WITH)
def outcome(request, tmp_path_factory):
    """What a job of two ranks of a policy and two engines says."""
    folders = [
        make(tmp_path_factory.mktemp(n) / "hf", "served-qwen3", torch.bfloat16, seed)
        for seed, n in enumerate("ab")
    ]
    at = tmp_path_factory.mktemp("drafters")
    drafters = [Eagle3(folders[0], 40, seed=seed).publish(at / name) for seed, name in enumerate("ab")]
    surroundings, program = variables(WITH[request.param]), "tests.on_cpu.nemo_rl_on_cpu"
    command = [python_of(request.param, tmp_path_factory), "-m", program, *folders, *drafters]
    out = run(command, env=surroundings, cwd=tmp_path_factory.mktemp("at"))
    [line] = [line for line in out.splitlines() if line.startswith("SAID ")]
    results = json.loads(line.removeprefix("SAID "))
    assert results["real"] == (request.param == "clone")
    return results


@pytest.fixture(params=["separate", "colocated"])
def placement(request):
    return request.param


def test_every_engine_holds_after_a_sync_what_vllms_loader_leaves(outcome, placement):
    assert outcome["before"] == [[False, None]] * 2, "dummy weights are not served"
    first, second = outcome["loaded"]
    assert alike(first[0], second[0]) == alike(first[0], outcome["dummy"][0]) == 0
    for version, (sync, loaded) in enumerate(
        zip(outcome[placement]["syncs"], (first, second, first)), start=1
    ):
        assert sync["error"] == "" and sync["ready"] == [[True, version]] * 2
        assert sync["refitted"] == loaded
    assert outcome[placement]["stale"] == [True, False]


def test_after_a_sync_that_failed_the_next_one_connects_again(outcome, placement):
    error, stale = outcome[placement]["failed"]
    assert "did not come to refit 4 within 0 s" in error and stale
    assert outcome[placement]["mended"] == ["", outcome["loaded"][0], [[True, 1]] * 2]


def test_an_engine_that_dies_before_it_has_joined_is_not_waited_for(outcome, placement):
    sentence, seconds, why = outcome[placement]["died"]
    failed = "engine 1 of the rollout has failed: "
    assert sentence.startswith(failed if placement == "colocated" else "") and sentence and seconds < 30, (
        "of 120"
    )
    assert all(
        failed in one if placement == "colocated" else "rank 1 of the rollout is gone" in one for one in why
    )


def test_after_a_shutdown_a_sync_connects_again(outcome, placement):
    assert outcome[placement]["after a shutdown"] == ["", True]


def test_policy_and_vllm_take_turns_on_their_gpus_as_under_nemo_rl(outcome):
    order = [["offload the rest"], ["wake", ["weights"]], ["offload"], ["wake", ["kv_cache"]]]
    assert [sync["phases"] for sync in outcome["colocated"]["syncs"]] == [order] * 3
    assert [sync["phases"] for sync in outcome["separate"]["syncs"]] == [[]] * 3, "there NeMo-RL does"


def test_a_sync_that_was_begun_after_a_training_step_is_a_switch(outcome):
    begun, [one, other] = outcome["begun"], outcome["loaded"]
    assert begun["kind"] == "BegunSynchronizer"
    first, second, back = begun["first"], begun["second"], begun["back"]
    assert not first["begun"] and first["serves"] == [one, [[True, 1]] * 2], "the first sync connects"
    for version, step, before, weights in ((2, second, one, other), (3, back, other, one)):
        assert step["begun"] and step["error"] == "" and not step["stale"]
        assert step["meanwhile"] == [before, [[True, version - 1]] * 2], "they go on serving"
        assert step["serves"] == [weights, [[True, version]] * 2], (
            "what the step left, not what came after it"
        )


def test_what_a_step_that_failed_has_left_is_synced_and_not_what_was_begun_before(outcome):
    said, [_, other] = outcome["begun"]["failed"], outcome["loaded"]
    assert not said["begun"] and said["error"] == "" and said["serves"][0] == other


def test_where_an_engine_does_not_switch_all_serve_what_they_did_and_the_next_sync_connects(outcome):
    begun, [one, other] = outcome["begun"], outcome["loaded"]
    refused = begun["refused"]
    assert "it refuses" in refused["error"] and "engine 0" not in refused["error"]
    assert "did not switch to version 4: all serve version 3 again" in refused["error"]
    assert refused["stale"] and refused["serves"] == [one, [[True, 3]] * 2]
    assert begun["mended"]["error"] == "" and begun["mended"]["serves"][0] == other
    assert not begun["evaluated"], "an evaluation changes no weights"
    assert begun["again"]["begun"] and begun["again"]["serves"][0] == one


def test_an_engine_that_dies_is_left_out_and_its_replacement_taken_along(outcome):
    said, [one, other] = outcome["survivors"], [digests for digests, _ in outcome["loaded"]]
    assert said["kind"] == "SurvivingSynchronizer"
    assert said["first"][0] and not said["same"][0], "a sync connects where an engine is new"
    syncs = {
        "first": ([one] * 2, said["first"][1]), "same": ([other] * 2, said["same"][1]),
        "dies": ([one], said["dies"]), "without it": ([other], said["without it"][1]),
        "replaced": ([one] * 2, said["replaced"][1]), "back": ([other] * 2, said["back"][1]),
        "swiftly": ([one] * 2, said["swiftly"][1]),
    }  # fmt: skip
    for name, (weights, sync) in syncs.items():
        assert sync["error"] == "" and not sync["stale"], name
        assert [digests for digests, _ in sync["serves"]] == weights, name
        assert all(ready for _, [ready, _] in sync["serves"]), name
        assert sync["seconds"] < 30, "of 120"
    assert not said["without it"][0], "who is dead is not tried again"
    [[digests, ready]] = said["new"]
    assert ready == [False, None] and digests == outcome["dummy"][0], "dummy weights are not served"
    assert said["replaced"][0] and said["absent"][0] and said["back"][0] and said["swiftly"][0]


def test_a_drafter_that_nemo_rl_trains_comes_with_the_model(outcome):
    said, [one, other] = outcome["drafting"], [digests[0] for digests in outcome["loaded"]]
    dummy, [first, second] = said["dummy"], said["loaded"]
    assert len(first) > 8 and all(len({dummy[name], first[name], second[name]}) == 3 for name in first)
    assert said["first"] == ["", one, first, [True, 1]]
    assert said["is begun"] and said["meanwhile"] == [one, first]
    assert said["switched"] == ["", other, second, [True, 2]], "what the step left, not what came after it"
    assert said["again"][:3] == ["", one, first]


def test_an_engine_that_nemo_rl_has_found_dead_is_not_called(outcome):
    said, [one, other] = outcome["survivors"], [digests for digests, _ in outcome["loaded"]]
    absent = said["absent"][1]
    assert absent["error"] == "" and [digests for digests, _ in absent["serves"]] == [other, one]
    assert said["none left"] == "all engines of the rollout are dead"
    assert said["shared"].startswith("engine 1 of the rollout is dead, and the others share its experts")


def test_a_single_controller_gets_our_synchronizer_where_its_config_says_so(outcome):
    said = outcome["survivors"]
    assert said["begin"].endswith("NeMo-RL's SingleController begins no sync; leave it out")
    assert said["no line"] == f"policy.generation.vllm_kwargs.worker_cls is None: make that {KIND}"
    if not outcome["real"]:
        assert said["another transport"] == "a stand-in makes nothing"


def test_a_setup_ends_with_our_synchronizer(outcome):
    assert outcome["setup"]["plain"] == [{"worker_cls": KIND}, "ColocatedSynchronizer", "more", False, 600.0]
    assert outcome["setup"]["options"][3:] == [True, 5.0]


def test_a_rollout_that_drafts_tokens_is_refitted(outcome):
    drafts = {"speculative_config": {"num_speculative_tokens": 2}, "worker_cls": KIND}
    assert outcome["setup"]["drafts"][:2] == [drafts, "ColocatedSynchronizer"]


@pytest.mark.parametrize(("config", "sentence"), [
    ("a wrong option", f"policy.generation.refit_cfg['{BACKEND}'] has ['verfy']: it takes verify, timeout, backend, "
                       "delta, keep_mapped, delta_on_host, begin, release_after_refit, "
                       "update_weights_bucket_memory_ratio"),
    ("a wrong time", f"timeout of policy.generation.refit_cfg['{BACKEND}'] is 0; it is a number of seconds above 0"),
    ("separate", "policy and vLLM do not share GPUs: run NeMo-RL's own script, "
                 f"with policy.generation.refit_transport={BACKEND}"),
    ("begun on one GPU", f"begin of policy.generation.refit_cfg['{BACKEND}']: policy and vLLM share GPUs; "
                         "leave it out"),
    ("begun and released", f"begin of policy.generation.refit_cfg['{BACKEND}']: release_after_refit connects anew at "
                           "every sync; leave it out"),
    ("begun by another way", f"begin of policy.generation.refit_cfg['{BACKEND}'] goes by nccl, not by staged"),
    ("begun by nobody", f"begin of policy.generation.refit_cfg['{BACKEND}'] is true, and NeMo-RL's own script begins "
                        "no sync: start it with python -m reshard.integrations.nemo_rl"),
    ("another backend", "policy.generation.backend is sglang: reshard refits vllm"),
    ("no Megatron", "reshard refits from Megatron here: set policy.megatron_cfg.enabled=true"),
    ("another worker", f"vllm_kwargs.worker_cls is a.B: make that {KIND}, or unset it"),
    ("adapters", "the model has LoRA adapters (policy.megatron_cfg.peft), which"),
    ("fp8", "the rollout is quantized (vllm_cfg.precision), which"),
    ("fp8 cache", "the rollout has an fp8 key-value cache (vllm_cfg.kv_cache_dtype), which"),
    ("quantized", "the model is quantized (quant_cfg), which"),
])  # fmt: skip
def test_what_a_refit_does_not_cover_is_refused_before_anything_starts(outcome, config, sentence):
    error, started = outcome["setup"][config]
    assert error.startswith(sentence) and not started


def test_a_policy_with_adapters_and_a_worker_of_vllms_are_refused_where_they_meet(outcome):
    # From the rank that found it, or from one that was told of it first.
    assert re.match(r"(trainer rank \d: )?the model has LoRA adapters \(policy", outcome["adapters"])
    assert f"set policy.generation.vllm_kwargs.worker_cls={KIND}" in outcome["no line"]


def test_a_script_finds_our_setup_in_the_place_of_nemo_rls(tmp_path):
    python = warm.python_with_ray()
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nfrom nemo_rl.algorithms.grpo import setup\n"
        "print('FOUND', setup.__wrapped__.__name__, setup.__code__.co_name, sys.argv[1:])\n"
        "from nemo_rl.algorithms.single_controller_utils.setup import create_weight_synchronizer as create\n"
        "print('CREATES', create.__wrapped__.__name__, create.__code__.co_name)\n"
    )
    plain = [python, script, "a"]
    ours = [python, "-m", "reshard.integrations.nemo_rl", script, "--config", "b"]
    out = run(ours, env=variables(STANDINS), cwd=tmp_path)
    assert "FOUND setup refitting ['--config', 'b']" in out
    assert "CREATES create_weight_synchronizer creating" in out
    assert "has no attribute '__wrapped__'" in attempt(plain, env=variables(STANDINS), cwd=tmp_path).stderr
    assert (
        "give NeMo-RL's examples/run_grpo.py"
        in attempt(ours[:3], env=variables(STANDINS), cwd=tmp_path).stderr
    )


if CLONE is not None:

    def test_the_stand_ins_are_called_as_nemo_rls_own_are():
        kind = "CheckpointEngineWeightSynchronizer"
        wrong, compared = differing(
            "nemo_rl", CLONE, (f"{kind}.__init__", f"{kind}._policy", f"{kind}._engines", "_gathered")
        )
        assert not wrong and compared == 32

    def test_nemo_rls_scripts_take_setup_from_where_ours_is_put():
        text = (CLONE / "examples" / "run_grpo.py").read_text()
        assert "from nemo_rl.algorithms.grpo import (" in text and "    setup,\n" in text

    def test_nemo_rl_trains_and_syncs_by_the_calls_that_ours_are_put_before():
        """And counts the version when the sync has returned."""
        tree = ast.parse((CLONE / "nemo_rl/algorithms/grpo.py").read_text())
        functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert "synchronizer.sync_weights(" in ast.unparse(functions["refit_policy_generation"])
        step = ast.unparse(functions["async_grpo_train"])
        order = [
            "policy.train(",
            "prepare_for_refit.remote()",
            "= refit_policy_generation(",
            "weight_version += 1",
        ]
        places = [step.rindex(order[0])]
        for call in order[1:]:
            places.append(step.index(call, places[-1]))
        assert step.count("policy.train(") == 1
        between = step[places[0] : places[2]]
        assert not any(
            word in between for word in ("prepare_for_training", "get_logprobs", "load_checkpoint")
        )
