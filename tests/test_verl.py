"""verl by lines of config, and plain Ray actors: the real verl and ray in an environment of their
own, with this one's torch, megatron-core and vLLM."""

import json

import pytest

from tests.checkpoints import make
from tests.clones import STANDINS, variables
from tests.environments import REPOSITORY, run
from tests.vllm_server import with_tokenizer
from tests.warm import python_with_ray

pytestmark = pytest.mark.install
LINES = [
    "model_engine=megatron",
    "actor_rollout_ref.model.external_lib=reshard.integrations.verl",
    "+actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls=reshard.integrations.verl_worker.VerlExtension",
    "actor_rollout_ref.rollout.name=vllm",
    "+actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.reshard.verify=true",
    "+actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.reshard.timeout=60",
]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """What verl makes of the lines."""
    at = tmp_path_factory.mktemp("at")
    hf = make(tmp_path_factory.mktemp("model") / "hf", "served-qwen3")
    with_tokenizer(hf)
    out = run([python_with_ray(), "-m", "tests.verl_on_cpu", hf, *LINES], env=variables(STANDINS), cwd=at)
    [line] = [line for line in out.splitlines() if line.startswith("SAID ")]
    return json.loads(line.removeprefix("SAID "))


def test_the_lines_of_config_put_ours_in_the_place_of_verls(outcome):
    assert outcome["before"] == [
        "verl.workers.engine.megatron.transformer_impl.MegatronEngineWithLMHead",
        "verl.workers.rollout.vllm_rollout.vllm_rollout.ServerAdapter",
    ]
    assert outcome["after"] == [
        "reshard.integrations.verl.ReshardMegatronEngine",
        "reshard.integrations.verl.ReshardServerAdapter",
    ]
    assert outcome["extension"] == "reshard.integrations.verl_worker.VerlExtension"
    assert outcome["options"] == {"verify": True, "timeout": 60, "backend": "auto", "delta": False}
    assert outcome["wrong options"] == [
        "checkpoint_engine.engine_kwargs.reshard has ['verfy']: it takes verify, timeout, backend and delta",
        "checkpoint_engine.engine_kwargs.reshard.verify is 1; it is true or false",
        "checkpoint_engine.engine_kwargs.reshard.timeout is 0; it is a number of seconds above 0",
        "checkpoint_engine.engine_kwargs.reshard.backend 'bucket' is not one of auto, cuda_ipc, staged, nixl, nccl",
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
    first, second, failed, mended = outcome["live"]["syncs"]
    assert first[:4] == ["no error", "", [3], ["cleared", 3]]
    assert second[:4] == ["no error", "", [4], ["cleared", 3, "cleared", 4]]
    assert failed[0] == "ReshardError" and "did not come to refit 3 within 0 s" in failed[1]
    assert mended[0] == "no error" and mended[2] == [6]
    assert len({str(one[4]) for one in (first, second, mended)}) == 3, "other weights say other words"


def test_an_adapter_is_refitted_and_served_as_verl_asks_for_it(outcome):
    """In the one slot that verl gives vLLM, as vLLM's own loading leaves PEFT's files there."""
    assert outcome["adapters"] == [
        [None, ""], ["123", ""], [None, "the model has LoRA adapters that are merged (model.lora.merge)"],
    ]  # fmt: skip
    (slot, listed, _), (_, _, without) = outcome["live"]["loaded"]
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


def test_plain_ray_actors_refit_an_engine_after_every_step():
    # The worker in the engine's process: those of its own would import vLLM anew.
    # And what actors say is not printed in the midst of the lines that are looked at.
    in_one = variables(STANDINS) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "RAY_LOG_TO_DRIVER": "0"}
    out = run([python_with_ray(), REPOSITORY / "examples" / "refit_ray.py"], env=in_one, cwd=REPOSITORY)
    steps = [line for line in out.splitlines() if line.startswith("step ")]
    assert [line.split(",")[0] for line in steps] == [f"step {i}: version {i}" for i in range(3)]
    assert len({line.split("then ")[1] for line in steps}) == 3 and all(
        ", 1.6 MB, " in line for line in steps
    )
