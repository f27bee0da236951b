"""A fleet: real ``vllm serve``s that come and go, and a trainer that refits those that are there."""

import multiprocessing
import re
from pathlib import Path

import pytest

from tests.campaigns.fleet import campaign
from tests.digests.on_disk import expected
from tests.engines.test_engine import run
from tests.tools.vllm_server import two_checkpoints


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fleet")
    pairs = two_checkpoints(folder)
    results = run(folder, 2, "fleet_on_cpu.fleet", pairs)
    return results | {"on disk": [expected(Path(hf))[0] for hf, _ in pairs]}


# What each step's weights are, and who has them then.
STEPS = [
    ("alone", 0, []),
    ("one joins", 1, ["one"]),
    ("two joins", 0, ["one", "two"]),
    ("two has died", 1, ["one"]),
    ("two is back", 1, ["one", "two"]),
    ("two hangs", 0, ["one"]),
    ("two goes on", 1, ["one", "two"]),
    ("after a peer", 0, ["one", "two"]),
    ("one has left", 1, ["two"]),
    ("another trainer", 0, ["one", "two"]),
]


@pytest.mark.parametrize("step, weights, refitted", STEPS, ids=[step[0] for step in STEPS])
def test_engines_that_are_there_have_the_weights_and_no_other_is_waited_for(step, weights, refitted, outcome):
    said, digests = outcome[step], outcome["on disk"]
    assert said["refitted"] == refitted, said
    assert {name: said["serve"][name] for name in refitted} == dict.fromkeys(refitted, digests[weights])


def test_who_is_behind_is_named_with_the_reason_and_the_others_have_their_weights_in_time(outcome):
    died, hangs, left = (outcome[step] for step in ("two has died", "two hangs", "one has left"))
    assert [*died["behind"]] == ["two"] == [*hangs["behind"]], (died, hangs)
    assert died["seconds"] < 20 and hangs["seconds"] < 60, (
        "at most the time limit, and a margin for a loaded machine"
    )
    assert "engine two" in died["behind"]["two"] and died["described"]["engines"]["two"]["version"] == 2
    one = died["described"]["engines"]["one"]
    assert (
        one | {"age": 0} == {"version": 3, "age": 0, "connected": True, "why": None} and 0 <= one["age"] < 60
    )
    assert left["serve"]["one"] == outcome["on disk"][0], "it serves what it has"
    assert [*left["described"]["engines"]] == ["two"]


def test_a_required_engine_that_is_behind_is_an_error_once_the_others_have_their_weights(outcome):
    said = outcome["two is required"]
    assert (
        said["refused"].startswith("version 4 is not in two (")
        and said["serve"]["one"] == outcome["on disk"][0]
    )


def test_engines_of_one_layout_pass_on_to_each_other_what_the_trainer_sends_once(outcome):
    together = [["engine one, worker 0", "engine two, worker 0"]]
    assert outcome["two joins"]["sends"] == outcome["another trainer"]["sends"]
    assert all(line in (together[0], together[0][::-1]) for line in outcome["two joins"]["sends"])
    assert outcome["two has died"]["sends"] == [["engine one, worker 0"]]
    assert outcome["two is back"]["sends"] == [[engine] for engine in together[0]], (
        "it has to show first that it works"
    )


def test_an_engine_that_is_new_or_was_started_again_gets_the_weights_from_one_that_serves_requests(outcome):
    for brought in outcome["from a peer"]:
        assert brought["serves"] == 7 and brought["digest"] == outcome["on disk"][1]
        assert brought["said"] == {"version": 7, "age": None, "connected": False, "why": None}
    assert len(outcome["from a peer"]) == 2
    sends = outcome["after a peer"]["sends"]
    assert all({*line} == {"engine one, worker 0", "engine two, worker 0"} for line in sends), (
        "it is refitted with the others at once"
    )


def test_a_trainer_that_starts_again_has_engines_brought_up_before_it_sends(outcome):
    said = outcome["before it sends"]
    assert outcome["one has left"]["serve"]["one"] == outcome["on disk"][0], "it was behind"
    assert said["serve"] == [outcome["on disk"][1]] * 2
    has_it = {"version": 9, "connected": False, "why": None}
    assert (said["version"], said["found"]) == (None, 9)
    assert all(engine.items() >= has_it.items() for engine in said["engines"].values())


def test_who_is_on_call_sees_the_engines_and_adds_and_removes_them_from_a_shell(outcome):
    text, fields = outcome["shown"]
    lines = text.splitlines()
    assert lines[0] == "version 7: 2 of 2 engines have it"
    assert re.fullmatch(r"  one  version 7, \d+ s ago", lines[1]) and len(lines) == 3
    assert fields["version"] == 7 and [*fields["engines"]] == ["one", "two"]
    assert outcome["nobody"] == "Error: the fleet has no engine three: it has two\n"


def test_versions_go_on_and_a_trainer_that_comes_later_says_its_own(outcome):
    assert [outcome[step]["version"] for step, *_ in STEPS] == [0, 1, 2, 3, 5, 6, 7, 8, 9, 40]
    assert outcome["wrong"] == [
        "the fleet has an engine two: remove it first, or give another name",
        "the fleet has no engine three: it has two",
    ]


def test_engines_that_join_die_hang_and_leave_at_random_never_serve_a_wrong_bit():
    """A seeded part of what ``python -m tests.campaigns.fleet`` runs for as long as one likes."""
    multiprocessing.set_forkserver_preload(["tests.campaigns.fleet"])
    violations, counts, _ = campaign(seed=11, sends=15, engines=4)
    assert not violations and counts["refitted"] > 15 and counts["kill"] + counts["within"] > 0, (
        violations,
        counts,
    )
