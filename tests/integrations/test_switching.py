"""Refits that are begun in a fleet of real ``vllm serve``s: they go on serving, and switch together or not at all."""

from pathlib import Path

import pytest

from tests.digests.on_disk import expected
from tests.engines.test_engine import run
from tests.tools.switched_tokens import models_of, switch_within
from tests.tools.vllm_server import two_checkpoints


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    folder = tmp_path_factory.mktemp("switching")
    pairs = two_checkpoints(folder)
    results = run(folder, 2, "switching_on_cpu.switching", pairs)
    return results | {
        "on disk": [expected(Path(hf))[0] for hf, _ in pairs],
        "directories": [hf for hf, _ in pairs],
    }


def both(outcome: dict, weights: int, version: int) -> dict:
    return {name: [outcome["on disk"][weights], version] for name in ("one", "two")}


BEGUN = ["begun", "finish 0", "finish 1", "finish 2", "finish 3", "again", "go on", "go on anew", "abort"]


def test_engines_serve_the_old_weights_until_they_switch_while_the_trainer_has_others(outcome):
    assert outcome["whole"]["begun"] is False
    assert outcome["whole"]["serve"] == outcome["whole"]["pending"] == both(outcome, 0, 0)
    for version, step in enumerate(BEGUN, 1):
        said, weights = outcome[step], version % 2
        assert said["begun"] and said["refused"] == "" and said["version"] == version, (step, said)
        assert said["pending"] == both(outcome, 1 - weights, version - 1), step
        assert said["serve"] == both(outcome, weights, version), step
        assert said["has"] == ["one", "two"] and not said["behind"]


def test_answers_that_end_before_a_switch_are_of_one_version(outcome):
    prompts = outcome["prompts"]
    known: dict = {prompt: set() for prompt in prompts}
    for references in outcome["references"].values():
        for of_version in references:
            for prompt, text in zip(prompts, of_version, strict=True):
                known[prompt].add(text)
    assert all(len(texts) == 2 for texts in known.values()), (
        "each version has an answer of its own, always the same"
    )
    seen = {(prompt, text) for prompt, text in outcome["answers"]}
    assert all(text in known[prompt] for prompt, text in seen)
    assert len(seen) > len({prompt for prompt, _ in seen}), "both versions have answered"


@pytest.mark.parametrize("name", ["go on", "go on anew"])
def test_each_token_is_of_the_weights_that_were_served_when_it_came(outcome, name):
    before, after = models_of(outcome["directories"] if name == "go on" else outcome["directories"][::-1])
    anew = name == "go on anew"
    switches = [
        switch_within(before, after, [int(word[1:]) for word in prompt.split()], answer, anew)
        for prompt, answer in outcome["going"][name]
    ]
    assert sum(1 < switch < 48 for switch in switches) >= 4, "requests were running as the engines switched"


def test_a_fleet_goes_back_to_what_it_served_before_the_last_switch(outcome):
    said = outcome["rolled back"]
    assert said["version"] == 8 and said["serve"] == both(outcome, 0, 8)
    assert "no engine has switched since the last send" in said["again"]
    after = outcome["after a way back"]
    assert after["begun"] and after["version"] == 10, "the version that it went back from is used up"
    assert after["pending"] == both(outcome, 0, 8) and after["serve"] == both(outcome, 1, 10), "all was begun"


def test_where_an_engine_does_not_switch_nobody_does(outcome):
    said = outcome["cannot pause"]
    assert "two did not switch (it does not pause)" in said["refused"], said
    assert said["serve"] == both(outcome, 1, 10), "the other one has gone back"
    assert not outcome["can pause"]["begun"]
    assert outcome["can pause"]["serve"] == both(outcome, 1, outcome["can pause"]["version"])
    together = outcome["together"]
    assert together["begun"] and together["pending"] == both(outcome, 1, outcome["can pause"]["version"])
    assert together["serve"] == both(outcome, 0, together["version"]), "all was begun, by a new connection"
    said = outcome["reloaded"]
    assert "two did not switch (" in said["refused"] and "no version is pending" in said["refused"], said
    before = outcome["and again"]["version"]
    assert outcome["and again"]["begun"]
    assert said["serve"] == {"one": [outcome["on disk"][1], before], "two": [outcome["on disk"][0], None]}
    after = outcome["after that"]
    assert not after["begun"] and after["serve"] == both(outcome, 1, after["version"])


def test_what_nobody_switched_to_is_given_up_for_the_next_send(outcome):
    assert outcome["sent"]["serve"]["one"][0] == outcome["on disk"][1] == outcome["sent"]["serve"]["two"][0]
    after = outcome["after a send"]
    assert after["begun"] and after["serve"] == both(outcome, 0, after["version"])


def test_servers_take_a_version_of_a_chain_together_or_not_at_all(outcome):
    said, [base, newer] = outcome["chain"], outcome["on disk"]
    sentence, served = said["spoiled"]
    assert "version 1 is not served by all: " in sentence and "others have written or moved" in sentence
    assert sentence.endswith(" went back"), "the one that had written it"
    assert served == {"one": [base, 0], "two": [base, None]}
    sentence, served = said["cut off"]
    assert "its answer was lost" in sentence and sentence.endswith(" went back")
    assert served == {"one": [base, 0], "two": [base, 0]}, "both had written it"
    sentence, served = said["unread"]
    assert "no server was written: http://127.0.0.1:9: " in sentence and served["one"] == [base, 0]
    for name in ("written", "again"):
        assert said[name] == [1, {"one": [newer, 1], "two": [newer, 1]}]
    assert "written by others since; the next send brings all" in outcome["after a chain"]["refused"]
    after = outcome["all again"]
    assert after["begun"] and after["pending"] == {"one": [newer, 1], "two": [newer, 1]}, "all was begun"
    assert after["serve"] == both(outcome, 0, after["version"])


def test_an_engine_that_dies_before_the_switch_keeps_nobody_from_it(outcome):
    said = outcome["died"]
    assert said["begun"] and said["has"] == ["one"] and [*said["behind"]] == ["two"], said
    assert said["serve"] == {"one": [outcome["on disk"][1], said["version"]]}
    left, on = outcome["one is left"], outcome["one goes on"]
    assert left["begun"] and left["serve"]["one"] == [outcome["on disk"][0], left["version"]]
    assert on["begun"] and on["serve"]["one"] == [outcome["on disk"][1], on["version"]]
