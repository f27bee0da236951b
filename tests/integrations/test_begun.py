"""A sync that is begun when a step ends: what changed travels while both sides work, and the sync only switches. Where
it cannot be begun all is sent, and where an engine does not switch nobody does."""

from types import SimpleNamespace

import pytest

from reshard.core.errors import ReshardError
from reshard.engines.sglang import group
from reshard.engines.workers.actions import ROLL_BACK, SWITCH
from reshard.integrations.options import SyncOptions
from tests.refit.test_deltas import same_as
from tests.refit.test_pending import same
from tests.starting.ranks import run_on_ranks

SWITCHED, SENT = ["begin", "switch"], ["refit"]


@pytest.fixture(scope="module")
def told():
    """What the trainer's first rank is told of each step, and the weights of both."""
    first, second = run_on_ranks(2, "beginning", module="sync_on_cpu")
    for name, step in second.items():
        for key in ("why", "raised", "connected"):
            assert step.get(key) == first[name].get(key), f"ranks are told the same: {name}"
        first[name]["packed"] = (first[name].get("packed"), step.get("packed"))
    return first


def has(step: dict, when: str, version: int) -> None:
    """Both engines serve the weights of this step, and say so."""
    for weights, told, ready in step[when]:
        assert same_as(step["packed"], weights) and told == version and ready


def unchanged(step: dict, when: str) -> None:
    for (weights, version, ready), (before, version_before, _) in zip(
        step[when], step["before"], strict=True
    ):
        assert same(weights, before) and version == version_before and ready


def test_engines_serve_the_old_weights_until_the_sync_which_only_switches(told):
    first = told["first"]
    assert first["why"] == "engines are to be connected" and first["switched"] is None
    assert first["calls"] == [["connect", "refit"]] * 2
    has(first, "after", 1)
    for version, name in ((2, "begun"), (3, "begun again")):
        step = told[name]
        assert step["why"] == step["raised"] == "" and step["switched"].is_pending
        assert step["switched"].version == version and step["calls"] == [SWITCHED] * 2
        unchanged(step, "while begun")
        has(step, "after", version)
        assert not same_as(step["packed"], step["before"][0][0]), "the control: they were others before"


@pytest.mark.parametrize("fails", ["before switch", "after switch", "late switch"])
def test_where_an_engine_does_not_switch_all_go_back_and_the_next_sync_connects_again(told, fails):
    step, then = told[fails], told[f"then {fails}"]
    why = "did not answer within 2 s" if fails == "late switch" else "no luck"
    assert f"two ({why}" in step["raised"].replace("it did", "did"), step["raised"]
    assert not step["connected"]
    assert step["calls"] == [["begin", "switch", "roll back"]] * 2
    if fails != "late switch":
        unchanged(step, "after")
    else:
        [one, _], [before, _] = step["after"], step["before"]
        assert same(one[0], before[0]) and one[1] == before[1]
        for weights, version, _ in told["when it was late"]["after"]:
            of = step["before"] if version == before[1] else None
            assert same(weights, of[0][0]) if of else same_as(step["packed"], weights), (
                "it says what it holds"
            )
    assert then["raised"] == "" and then["calls"] == [["connect", "refit"]] * 2
    has(then, "after", then["after"][0][1])


def test_where_an_engine_was_written_by_others_all_go_back_too(told):
    step, then = told["lost"], told["then lost"]
    assert "two (no version is pending" in step["raised"] and not step["connected"]
    assert step["raised"].endswith("again, but for two, which did not go back")
    [one, two], [before, _] = step["after"], step["before"]
    assert same(one[0], before[0]) and one[1] == before[1] and not two[2], "the other one refuses to serve"
    assert then["raised"] == ""
    has(then, "after", then["after"][0][1])


def test_where_an_engine_cannot_begin_all_connect_anew_and_all_is_sent(told):
    step, then = told["not begun"], told["then not begun"]
    assert step["raised"] == "" and step["switched"] is None
    assert step["calls"] == [["begin", "connect", "refit"]] * 2
    unchanged(step, "while begun")
    has(step, "after", step["after"][0][1])
    assert then["switched"].is_pending and then["calls"] == [SWITCHED] * 2


@pytest.mark.parametrize(
    ("name", "calls"),
    [("another version", ["begin", "refit"]), ("too large", ["begin", "refit"]), ("begun twice", ["begin", "refit"]),
     ("one rank is not connected", ["connect", "refit"])],
)  # fmt: skip
def test_what_cannot_be_switched_to_is_sent_whole(told, name, calls):
    step = told[name]
    assert step["raised"] == "" and step["switched"] is None and step["connected"]
    assert step["calls"] == [calls] * 2
    unchanged(step, "while begun")
    has(step, "after", step["after"][0][1])


def test_what_is_sent_whole_is_said_at_once_where_that_is_known(told):
    assert "more than pending_bytes=10" in told["too large"]["why"]
    assert told["one rank is not connected"]["why"] == "engines are to be connected"
    assert told["then too large"]["switched"].is_pending


def test_an_sglang_tells_no_version_that_its_schedulers_do_not_hold():
    told: list = []
    scheduler = SimpleNamespace(
        reshard_switch=lambda version: told.append((SWITCH, version)),
        reshard_roll_back=lambda version: told.append((ROLL_BACK, version)),
    )
    group._swap(scheduler, SWITCH, "6")
    group._swap(scheduler, ROLL_BACK, "5")
    assert told == [(SWITCH, 6), (ROLL_BACK, 5)], "they refuse another version before they swap"


def test_nothing_is_begun_without_the_option(told):
    assert told["no option"] == {"why": "it is not to be begun (begin=True)", "switched": None, "calls": [[], []],
                                 "packed": (None, None)}  # fmt: skip


def test_the_option_brings_those_that_it_needs_and_refuses_what_it_cannot_have(monkeypatch):
    monkeypatch.setenv("RESHARD_BEGIN", "1")
    options = SyncOptions.of_environment("there")
    assert (options.begin, options.delta, options.backend) == (True, True, "nccl")
    monkeypatch.setenv("RESHARD_BACKEND", "staged")
    with pytest.raises(ReshardError, match="RESHARD_BEGIN in there goes by nccl, not by staged"):
        SyncOptions.of_environment("there")
    assert not SyncOptions().checked().delta
