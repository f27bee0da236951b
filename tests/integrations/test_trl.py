"""TRL's GRPO under accelerate's FSDP 2, with one line before the trainer is made: the real TRL, in vLLM's processes and
with a real ``vllm serve``."""

import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from tests.digests.on_disk import expected
from tests.starting.ranks import free_port, run_on_ranks
from tests.starting.warm import python_with_ray
from tests.tools import environments
from tests.tools.checkpoints import make
from tests.tools.clones import variables
from tests.tools.disk import until
from tests.tools.images import make_served
from tests.tools.vllm_server import served, with_tokenizer

pytestmark = pytest.mark.install
SHARDS = {"text": 47, "LoRA": 103, "images": 70}
TRL = "trl==1.16.0"
LOCAL = {
    "VLLM_HOST_IP": "127.0.0.1",
    "MASTER_ADDR": "127.0.0.1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A function that calls another one on several ranks, which find TRL; what each says. Beside TRL verl would import
    what newer ones lack, so that it lies in a folder of its own."""
    folder = tmp_path_factory.mktemp("packages")
    environments.run([*environments.UV, "pip", "install", "--quiet", "--no-deps", "--target", folder, TRL])

    def run_function(ranks: int, function: str, *args) -> list[dict]:
        environment = variables() | LOCAL | {"TRL_PACKAGES": str(folder), "MASTER_PORT": str(free_port())}
        return run_on_ranks(
            ranks, function, *args, module="trl_on_cpu", python=python_with_ray(), environment=environment
        )

    return run_function


def checkpoint(folder: Path, with_images: bool = False) -> Path:
    """A small model that vLLM serves, with a tokenizer or with what reads images."""
    if with_images:
        return make_served(folder / "hf", "Qwen3VLForConditionalGeneration")
    with_tokenizer(make(folder / "hf", "served-qwen3"))
    return folder / "hf"


@pytest.fixture(scope="module", params=SHARDS)
def ranks(request, run, tmp_path_factory):
    """What each of two ranks says of a training, of all weights of a model of texts, of a LoRA above them, and of all
    weights of a model with a vision tower."""
    folder = tmp_path_factory.mktemp("trl")
    hf = checkpoint(folder, request.param == "images")
    outcomes = run(2, "colocated", str(hf), str(folder), request.param == "LoRA")
    return [outcome | {"what": request.param} for outcome in outcomes]


def test_a_sync_leaves_what_trls_own_leaves_of_shards_of_fsdp2(ranks):
    for outcome in ranks:
        assert outcome["unequal"] == [] and outcome["syncs"] == 3, "two steps, and one at the end"
        assert outcome["sharded"] == SHARDS[outcome["what"]]
        changed = outcome["changed"]
        if outcome["what"] == "LoRA":
            assert sorted({name for name in changed if changed[name]}) == sorted(
                name for name in changed if name.endswith("proj.weight")
            )
        else:
            # The control: all was trained, but for a merger that feeds a layer which this small model does not have.
            unused = "visual.deepstack_merger_list.1."
            assert all(changed[name] or name.startswith(unused) for name in changed)
        of_tower = sum(name.startswith("visual.") for name in changed)
        assert (of_tower > 20) == (outcome["what"] == "images"), "the tower is trained, and synced"


def test_what_a_refit_does_not_cover_goes_by_trls_own_sync_and_is_refused_with_a_server(ranks):
    for outcome in ranks:
        why = "the parameters are sharded by FSDP 1 (set fsdp_version to 2)"
        assert outcome["why"] == why and outcome["left"] == [] and outcome["left syncs"] == 0
        assert outcome["reasons"] == [
            "", "the parameters are offloaded to the host", "the parameters are quantized"
        ]  # fmt: skip
        assert outcome["a server"].startswith(f"{why}, which no refit covers: leave trl.use() out")


@pytest.fixture(scope="module")
def trainer(run, tmp_path_factory):
    """What the first of two ranks says that train with a server, which is started anew after that."""
    folder, port = tmp_path_factory.mktemp("served"), free_port()
    hf = checkpoint(folder)
    options = ("--weight-transfer-config", json.dumps({"backend": "reshard"}))
    started = partial(served, hf, *options, port=port, VLLM_SERVER_DEV_MODE="1", **LOCAL)
    with ThreadPoolExecutor(1) as thread:
        with started(log=folder / "log") as url:
            trained = thread.submit(run, 2, "served", str(hf), str(folder), url, free_port())
            until(lambda: trained.done() or (folder / "is trained").exists())
        with started(log=folder / "log 2"):
            (folder / "is started").touch()
            outcome, _ = trained.result()
    return outcome | {"on disk": [expected(path)[0] for path in (hf, folder / "saved")]}


def test_a_server_has_after_a_training_what_trl_saves(trainer):
    assert [trainer["before"], trainer["after"]] == trainer["on disk"]
    assert trainer["before"] != trainer["after"] and trainer["syncs"] == 3


def test_a_server_that_is_started_anew_is_not_left_paused_and_gets_the_next_sync(trainer):
    assert "not connected" in trainer["gone"] and not trainer["paused"]
    assert trainer["again"] == trainer["after"]


def test_a_server_that_generates_while_trl_learns_has_what_trl_saves(run, tmp_path):
    # Requests are computed anew after a sync, and vLLM's generators of numbers do that in one part alone on a CPU.
    whole = ("--max-num-batched-tokens", "512")
    options = ("--weight-transfer-config", json.dumps({"backend": "reshard"}), *whole)
    hf = checkpoint(tmp_path)
    with served(hf, *options, log=tmp_path / "log", VLLM_SERVER_DEV_MODE="1", **LOCAL) as url:
        outcome, _ = run(2, "asynchronous", str(hf), str(tmp_path), url)
    assert [outcome["before"], outcome["after"]] == [expected(path)[0] for path in (hf, tmp_path / "saved")]
    assert outcome["before"] != outcome["after"] and outcome["syncs"] == outcome["version"] == 3
    assert outcome["called"] == ["pause", "resume"] and outcome["given"] == SHARDS["text"], (
        "it was given a transfer"
    )
    assert outcome["syncs then"] == 3


def test_a_trainer_that_has_met_its_server_for_trls_own_sync_is_refused(trainer):
    assert "call trl.use() before it is made" in trainer["late"]


def test_a_server_that_takes_weights_in_another_way_is_named(run, tmp_path):
    options = ("--weight-transfer-config", json.dumps({"backend": "nccl"}))
    with served(
        checkpoint(tmp_path), *options, log=tmp_path / "log", VLLM_SERVER_DEV_MODE="1", **LOCAL
    ) as url:
        [outcome] = run(1, "refused", url)
    assert outcome["another backend"] == (
        f"{url} takes weights by nccl: start it with VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config "
        '\'{"backend": "reshard"}\''
    )
    assert outcome["wrong options"] == [
        "verify of trl.use is 'yes'; it is true or false",
        "backend of trl.use 'ipc' is not one of auto, cuda_ipc, staged, nixl, nccl",
        "timeout of trl.use is 0; it is a number of seconds above 0",
    ]
