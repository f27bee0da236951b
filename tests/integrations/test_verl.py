"""verl by lines of config, slime by an argument, and plain Ray actors: the real verl and ray in an environment of
their own, with this one's torch, megatron-core, vLLM and SGLang. No package index has slime: stand-ins for what ours
call of it are in ``tests/standins``, and ``SLIME_CLONE=DIRECTORY`` compares them with the real one."""

import ast
import json
import os
from pathlib import Path

import pytest

from tests import install_sglang_cpu
from tests.megatron.test_logits import flags_at
from tests.starting import fork_server, warm
from tests.starting.warm import python_with_ray
from tests.tools.checkpoints import make
from tests.tools.clones import RAY_PACKAGES, STANDINS, differing, variables
from tests.tools.environments import REPOSITORY, run
from tests.tools.images import make_served
from tests.tools.vllm_server import with_tokenizer

pytestmark = pytest.mark.install
ALL_LINES = [
    "model_engine=megatron",
    "actor_rollout_ref.model.external_lib=reshard.integrations.verl.plugin",
    "+actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.reshard.verify=true",
    "+actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.reshard.timeout=60",
]
LINES = [
    *ALL_LINES,
    "+actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls=reshard.integrations.verl.VerlExtension",
    "actor_rollout_ref.rollout.name=vllm",
]
SGLANG_LINES = [
    *ALL_LINES,
    "actor_rollout_ref.rollout.name=sglang",
    *(f"actor_rollout_ref.rollout.{line}" for line in (
        "tensor_model_parallel_size=1", "dtype=float32", "enforce_eager=true", "free_cache_engine=false",
        "skip_tokenizer_init=true", "prompt_length=64", "response_length=64",
    )),
]  # fmt: skip


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """What verl makes of the lines."""
    at = tmp_path_factory.mktemp("at")
    hf = make(tmp_path_factory.mktemp("model") / "hf", "served-qwen3")
    with_tokenizer(hf)
    tower = make_served(tmp_path_factory.mktemp("model") / "tower", "Qwen3VLForConditionalGeneration")
    command = [python_with_ray(), "-m", "tests.on_cpu.verl_on_cpu", hf, tower, *LINES]
    out = run(command, env=variables(STANDINS), cwd=at)
    [line] = [line for line in out.splitlines() if line.startswith("SAID ")]
    return json.loads(line.removeprefix("SAID "))


def test_the_lines_of_config_put_ours_in_the_place_of_verls(outcome):
    assert outcome["before"] == [
        "verl.workers.engine.megatron.transformer_impl.MegatronEngineWithLMHead",
        "verl.workers.engine.fsdp.transformer_impl.FSDPEngineWithLMHead",
        "verl.workers.rollout.vllm_rollout.vllm_rollout.ServerAdapter",
    ]
    assert outcome["after"] == [
        "reshard.integrations.verl.plugin.ReshardMegatronEngine",
        "reshard.integrations.verl.plugin.ReshardFsdpEngine",
        "reshard.integrations.verl.vllm.ReshardServerAdapter",
    ]
    assert outcome["extension"] == "reshard.integrations.verl.VerlExtension"
    assert outcome["options"] == {
        "verify": True,
        "timeout": 60,
        "backend": "auto",
        "delta": False,
        "keep_mapped": False,
        "delta_on_host": False,
        "begin": False,
    }
    assert outcome["wrong options"] == [
        "checkpoint_engine.engine_kwargs.reshard has ['verfy']: it takes verify, timeout, backend, delta, "
        "keep_mapped, delta_on_host, begin",
        "checkpoint_engine.engine_kwargs.reshard.verify is 1; it is true or false",
        "checkpoint_engine.engine_kwargs.reshard.timeout is 0; it is a number of seconds above 0",
        "checkpoint_engine.engine_kwargs.reshard.backend 'bucket' is not one of auto, cuda_ipc, staged, nixl, nccl",
        "checkpoint_engine.engine_kwargs.reshard.begin: verl stops the rollouts before it tells the actor of a sync; "
        "leave it out",
    ]


def test_ours_are_called_as_verls_are_and_fit_vllms_worker(outcome):
    assert outcome["called otherwise"] == [] and outcome["in vLLM's worker too"] == []
    assert outcome["order"] == ["vLLMColocateWorkerExtension", "RefitExtension"]
    assert outcome["control"] == ["send_weights"]


def test_a_connection_stays_until_a_member_is_replaced(outcome):
    first, second, third = outcome["meeting"]
    assert [(rank, size) for _, rank, size, *_ in first] == [(2, 4), (3, 4)]
    assert [[new for *_, new in sync] for sync in (first, second, third)] == [
        [True, True],
        [False, False],
        [True, True],
    ]
    address, *others = {at for at, *_ in first + second}
    assert not others and {at for at, *_ in third} != {address}
    secret, *others = {secret for *_, secret, _ in first + second}
    assert not others and len(secret) == 64 and {one for *_, one, _ in third} != {secret}


def test_verls_adapter_refits_a_real_vllm_at_every_sync_and_after_one_that_failed(outcome):
    first, second, failed, mended, *_ = outcome["live"]["syncs"]
    assert first[:4] == ["no error", "", [3], ["cleared", 3]]
    assert second[:4] == ["no error", "", [4], ["cleared", 3, "cleared", 4]]
    assert failed[0] == "ReshardError" and "did not come to refit 3 within 0 s" in failed[1]
    assert mended[0] == "no error" and mended[2] == [6]
    assert len({str(one[4]) for one in (first, second, mended)}) == 3, "other weights say other words"


def test_a_model_that_verl_has_offloaded_is_loaded_for_a_connection_alone(outcome):
    """And the numbers in host memory are those that verl took there; verl offloads what was loaded once more."""
    first, second, _, mended, again, last = outcome["live"]["syncs"]
    loads, on_gpu = zip(*outcome["live"]["loads"], strict=True)
    assert loads == (2, 0, 0, 1, 0, 1), (
        "the first for the source too, the last since engines read it 3 times over"
    )
    assert [bytes_there > 100_000 for bytes_there in on_gpu] == [True, False, False, True, False, True]
    assert set(on_gpu) == {0, on_gpu[0]}
    assert again[5] == first[5], "from host memory, the bits of the same weights from the GPU"
    assert len({str(one[5]) for one in (first, second, mended, last)}) == 4, (
        "the control: others have other bits"
    )


def test_a_model_under_fsdp2_is_refitted_with_its_tower_as_vllm_loads_what_is_saved_of_it(outcome):
    whole = outcome["with a tower"]
    assert [said[:2] for said in whole["syncs"]] == [["no error", ""]] * 2
    for steps, held, loaded in zip((1, 2), whole["held"], whole["loaded"], strict=True):
        assert held[0] == [steps] and held[2:] == loaded, "tokens, and the bits of all parameters"
    first, second = (held[3] for held in whole["held"])
    assert all(first[name] != second[name] for name in first), "the control: other weights"
    assert sum(name.startswith("visual.") for name in first) > 20


def test_what_verl_syncs_itself_under_fsdp_or_of_multimodal_models_is_said(outcome):
    assert outcome["with a tower"]["left"] == {
        "fits": "",
        "_qat_enabled": "the model is trained quantized (QAT)",
        "_uses_fsdp2_cpu_offload_policy": "FSDP2 has the parameters on the host (fsdp_config.offload_policy)",
        "peft": "the model has LoRA adapters, and FSDP",
        "whole": "the model is not sharded by FSDP2 (actor.strategy=fsdp2)",
        "multimodal": "",
        "multimodal, adapted": "the model is multimodal, and has adapters",
        "by mbridge": "",
        "another": "",
        "another by mbridge": (
            "the model is multimodal, and no table has the tower of qwen2_5_vl_text as mbridge makes it, of Megatron's "
            "layers (vanilla_mbridge)"
        ),
    }


def test_an_adapter_is_refitted_and_served_as_verl_asks_for_it(outcome):
    """In the one slot that verl gives vLLM, as vLLM's own loading leaves PEFT's files there."""
    assert outcome["adapters"] == [
        [None, ""], ["123", ""], [None, "the model has LoRA adapters that are merged (model.lora.merge)"],
    ]  # fmt: skip
    (slot, listed, _), (_, _, without, _) = outcome["live"]["loaded"]
    assert listed == [77]
    first, second = outcome["live"]["adapters"]
    assert first[:4] == ["no error", "", slot, [123]]
    assert second[:2] == ["no error", ""] and second[3] == [123]
    assert all(second[2][name] != slot[name] for name in slot)
    assert len({str(tokens) for tokens in (first[4], second[4], without)}) == 3


def test_an_engine_that_dies_before_it_has_joined_is_not_waited_for(outcome):
    kind, sentence, seconds = outcome["live"]["died together"]
    assert kind == "ReshardError" and sentence.startswith(
        "the rollout's replica 0 has failed: The actor died"
    )
    assert seconds < 20, "of 60"
    actor, beside = outcome["live"]["died elsewhere"]
    assert actor[1].startswith("the rollout's replica 0 has failed: The actor died") and actor[1] == beside[1]
    assert actor[0] == beside[0] == "ReshardError" and max(actor[2], beside[2]) < 20


def test_plain_ray_actors_refit_an_engine_after_every_step_and_another_one_once_it_has_died():
    # The worker in the engine's process: those of its own would import vLLM anew.
    # And what actors say is not printed in the midst of the lines that are looked at.
    in_one = variables(STANDINS) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "RAY_LOG_TO_DRIVER": "0"}
    command = [python_with_ray(), REPOSITORY / "examples" / "refit_ray.py", "--lose", "2"]
    out = run(command, env=in_one, cwd=REPOSITORY)
    steps = [line for line in out.splitlines() if line.startswith("step ")]
    assert [line.split(",")[0] for line in steps] == [f"step {i}: version {i}" for i in range(3)]
    assert len({line.split("then ")[1] for line in steps}) == 3 and all(
        ", 1.6 MB, " in line for line in steps
    )


@pytest.fixture(scope="module")
def sglang(converted, tmp_path_factory):
    """What verl's own server of SGLang answers, refitted by the lines that refit vLLM, and by slime's updater."""
    checkpoints = converted("qwen3")
    for hf, _ in checkpoints:
        with_tokenizer(Path(hf))
    path = ":".join(map(str, (install_sglang_cpu.TARGET, REPOSITORY, STANDINS)))
    variables_of_sglang = variables() | install_sglang_cpu.WITHOUT_GPU | {"PYTHONPATH": path}
    python = fork_server.python(*warm.SGLANG_WITH_RAY, environment=variables_of_sglang, packages=RAY_PACKAGES)
    arguments = [json.dumps(checkpoints), json.dumps(flags_at(Path(checkpoints[0][1]), "")), *SGLANG_LINES]
    out = run(
        [python, "-m", "tests.on_cpu.sglang_trainers_on_cpu", *arguments],
        env=variables_of_sglang, cwd=tmp_path_factory.mktemp("sglang"),
    )  # fmt: skip
    [line] = [line for line in out.splitlines() if line.startswith("SAID ")]
    return json.loads(line.removeprefix("SAID "))


def test_a_server_of_sglang_answers_after_each_refit_as_one_that_has_loaded_the_checkpoint(sglang):
    """By verl's adapter twice, by its checkpoint engine, and by slime's updater."""
    assert [one[:2] for one in sglang["served"]] == sglang["loaded"]
    assert sglang["dummy"] not in sglang["loaded"] and sglang["loaded"][0] != sglang["loaded"][1]


def test_verls_adapter_refits_sglang_from_the_actors_process_and_from_elsewhere(sglang):
    assert sglang["adapters"] == ["reshard.integrations.verl.sglang.ReshardSglangAdapter"] * 2
    assert sglang["said"] == sglang["apart"] == [["no error", ""]] * 2
    assert [one[2] for one in sglang["served"]] == [3, 4, 9, 9] and sglang["version"] == "4"
    kind, sentence = sglang["lora"]
    assert kind == "ReshardError" and sentence.startswith("LoRA adapters are refitted into vLLM alone")
    kind, sentence, seconds = sglang["died"]
    # Whichever ends first: the call, or the connection of the scheduler.
    assert kind == "ReshardError" and (
        "replica 0 has failed: " in sentence or "inference rank 1 is gone" in sentence
    )
    assert seconds < 20, "of 60"


def test_slimes_updater_reads_the_copies_of_an_offloaded_model(sglang):
    version, metrics, disk, missing, called_otherwise, is_delta, refused, without_plugin = sglang["slime"]
    assert (version, metrics, called_otherwise) == (2, {}, []) and sglang["version of slime"] == "2"
    assert is_delta, "RESHARD_DELTA=1"
    assert "does not answer inference rank 1" in refused, (
        "SGLang's own words, since verl's trainer has closed"
    )
    assert ": this SGLang has no plugin of reshard" in without_plugin
    assert disk.startswith("--update-weight-transport disk sends weights as files, and a refit does not")
    assert missing.startswith(
        "slime keeps no copy of decoder.final_layernorm.weight while the model is offloaded"
    )


def test_slimes_updater_begins_an_update_at_the_end_of_a_step_and_then_only_switches(sglang):
    first, second = sglang["loaded"][:2]
    said = sglang["begun"]
    *_, version, is_pending = said["first"]
    assert version == 41 and is_pending
    assert said["pending"] == [*first, "41"], "the trainer has other weights, and the server serves these"
    assert said["switch"] == ["", ["switch"]] and said["switched"] == [*second, "42"]


def test_where_sglang_does_not_switch_it_says_what_it_serves_and_slimes_next_update_sends_all(sglang):
    said = sglang["begun"]
    [raised, asked] = said["refused"]
    assert said["begun"] and asked == ["switch", "roll back"]
    assert "the rollout's engine 0 (it refuses) did not switch to version 43: all serve version 42" in raised
    assert said["stays"] == said["switched"]
    assert said["again"] == ["", [None]] and said["mended"] == [*sglang["loaded"][0], "44"]


def test_slimes_update_is_not_begun_where_it_cannot_be(sglang):
    where = "RESHARD_BEGIN in --train-env-vars: "
    reasons = ("(--colocate)", "(--offload-train)", "(--offload-rollout)", "(--update-weights-interval)")
    for said, reason in zip(sglang["begun"]["first"], reasons):
        assert said.startswith(where) and reason in said


def test_slimes_updater_leaves_out_an_engine_that_dies_and_takes_its_replacement_along(sglang):
    one, other = sglang["loaded"][:2]
    said = sglang["replaced"]
    assert said["both"][0][::2] == ["", 2] and said["both"][1] == [[*other, "101"]] * 2
    for name, weights, version in (("dies", one, "102"), ("without it", other, "103")):
        [raised, seconds, engines], serves = said[name]
        assert (raised, engines) == ("", 1) and seconds < 30, "of 600"
        assert serves == [[*weights, version]]
    assert "ActorDiedError" in said["ended"] or "actor died" in said["ended"], "slime's monitor finds it dead"
    assert said["new"][0][:2] not in sglang["loaded"]
    assert said["replaced"][0][::2] == ["", 2] and said["replaced"][1] == [[*one, "104"]] * 2


def test_slimes_updater_names_engines_that_are_busy_or_refuse_and_leaves_out_a_new_one_that_is_dead(sglang):
    said = sglang["met"]
    assert said["dead"] == said["dead, asked"] == ["", 1]
    assert said["refuses"].startswith("the rollout's engine 1 has failed in pause_generation: ")
    assert "it refuses the pause" in said["refuses"]
    sentence, seconds = said["busy"]
    assert (
        sentence == "the rollout's engine 0 has failed in get_url: it did not answer within 8 s"
        and seconds < 40
    )


def test_an_update_that_was_begun_is_sent_whole_where_an_engine_has_died_since(sglang):
    one, other = sglang["loaded"][:2]
    said = sglang["replaced"]
    assert said["all"][1] == [[*other, "101"]] * 2 and said["begun"]
    assert said["died while begun"][0][::2] == ["", 1] and said["died while begun"][1] == [[*one, "102"]]


def test_where_slime_replaces_no_engines_an_update_names_the_one_that_is_dead(sglang):
    raised, _, engines = sglang["replaced"]["not replaced"]
    assert raised.startswith("the rollout's engine 1 has failed in pause_generation: ") and engines == 2


if "SLIME_CLONE" in os.environ:

    def test_the_stand_ins_are_called_as_slimes_own_are():
        wrong, compared = differing("slime", Path(os.environ["SLIME_CLONE"]), ("SGLangEngine.__init__",))
        assert not wrong and compared == 20

    def test_slime_asks_for_metrics_once_a_step_after_the_weights_are_new():
        """That is where an update begins."""
        clone = Path(os.environ["SLIME_CLONE"]) / "slime/backends/megatron_utils/actor.py"
        tree = ast.parse(clone.read_text())
        methods = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        called = {method.name: [ast.unparse(call.func) for call in ast.walk(method) if isinstance(call, ast.Call)]
                  for method in methods}  # fmt: skip
        asks = "self.weight_updater.pop_metrics"
        assert [name for name, calls in called.items() if asks in calls] == ["train_actor"]
        [method] = [one for one in methods if one.name == "train_actor"]
        lines = {
            ast.unparse(call.func): call.lineno for call in ast.walk(method) if isinstance(call, ast.Call)
        }
        assert called["train_actor"].count("train") == called["train_actor"].count(asks) == 1
        assert lines["train"] < lines["self.weights_backuper.backup"] < lines[asks], (
            "nothing changes them after that"
        )
        changing = (
            "train",
            "self._switch_model",
            "self.load_other_checkpoint",
            "self.weights_backuper.restore",
        )
        assert all(lines[asks] > lines[name] for name in changing if name in lines)
