"""A trainer rank's part of a weight sync: where all meet, what is called beside a refit, and how long its end is
waited for once the refit is over."""

import socket
import sys
import time

import pytest

from reshard import ReshardError
from reshard.comm.background import in_background
from reshard.integrations import HttpClient
from reshard.integrations.sync import Calls
from reshard.refit import RefitGroup
from tests.starting.ranks import caught, free_port, run_on_ranks
from tests.tools.environments import clean, run


@pytest.fixture
def silent():
    """A server that takes a request, and never answers it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield HttpClient(f"http://127.0.0.1:{server.getsockname()[1]}")


def alone(timeout: float) -> RefitGroup:
    return RefitGroup.join(f"127.0.0.1:{free_port()}", 0, 1, timeout=timeout)


def test_an_engine_that_does_not_answer_once_the_refit_is_over_is_given_up_and_named(silent):
    calls = Calls({
        "engine 0": in_background(lambda: None),
        "engine 1": in_background(lambda: silent.update_weights({"version": 1})),
    })  # fmt: skip
    began = time.monotonic()
    assert caught(lambda: calls.alongside(alone(1), lambda: "refitted")) == (
        "engine 1 did not answer within 1 s: dead or stalled"
    )
    assert 1 <= time.monotonic() - began < 10


def test_an_engine_that_fails_after_the_refit_is_named_at_once(silent):
    def fails() -> None:
        time.sleep(0.2)
        raise ReshardError("no luck")

    calls = Calls({
        "engine 0": in_background(silent.finish_weight_update),
        "engine 1": in_background(fails),
    })  # fmt: skip
    began = time.monotonic()
    assert caught(lambda: calls.alongside(alone(60), lambda: "refitted")) == "engine 1 has failed: no luck"
    assert time.monotonic() - began < 10


def test_what_is_answered_in_time_is_the_refits_result():
    calls = Calls({"engine 0": in_background(lambda: time.sleep(0.5))})
    assert calls.alongside(alone(60), lambda: "refitted") == "refitted"


def test_all_ranks_meet_anew_where_one_is_not_connected():
    ours, theirs = run_on_ranks(2, "meetings", module="sync_on_cpu")
    assert ours[:3] == theirs[:3]
    first, connected, anew, _ = ours
    assert connected is None and (first.address, first.size, first.timeout) == ("host:0", 5, 7.0)
    assert len(first.secret) == 64 and anew.secret != first.secret and first.secret not in repr(first)
    assert first.arguments(3) == {
        "address": "host:0",
        "first_rank": 3,
        "size": 5,
        "timeout": 7.0,
        "secret": first.secret,
    }
    assert ours[3] == theirs[3] == "no port for 0", "and not that of the other rank"


def test_what_the_first_rank_calls_is_answered_on_all_ranks_and_its_failure_is_theirs():
    ours, theirs = run_on_ranks(2, "asked", module="sync_on_cpu")
    assert ours == ["made by 0", [0], "no port for 0"] and theirs == ["made by 0", [], "no port for 0"]


def test_a_folder_imports_nothing_of_its_framework_before_a_name_is_used():
    """Where an engine's workers import it, the trainer's packages may be missing."""
    imports = "import sys; from reshard.integrations import nemo_rl, roll, verl, vllm; print(*sys.modules)"
    imported = run([sys.executable, "-c", imports], env=clean()).split()
    assert "reshard.integrations.roll" in imported
    assert not {"nemo_rl", "ray", "roll", "torch", "verl", "vllm"} & {*imported}
