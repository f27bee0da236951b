"""Engines of a fleet that come while a trainer is new, or number its versions anew: what others hand on to them."""

import _thread
import multiprocessing
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from threading import Event
from unittest import mock

import pytest
import torch

from reshard.cli.fleet import lines
from reshard.comm.http import call_route
from reshard.core.errors import OptionError, ReshardError
from reshard.integrations import SglangClient
from reshard.integrations.fleet import Fleet
from reshard.integrations.members import new_claim
from reshard.integrations.vllm.transfer import HttpClient, WeightTransfer
from tests.campaigns.fleet import ROWS, Pod, crc
from tests.refit.test_transports import OneShard

TIMEOUT = 4.0
PATIENCE = 30.0


@pytest.fixture(scope="module", autouse=True)
def _preload():
    multiprocessing.set_forkserver_preload(["tests.campaigns.fleet"])


@pytest.fixture
def pods():
    """Three engines' processes, which are ended."""
    pods = [Pod(name) for name in ("one", "two", "three")]
    for pod in pods:
        pod.start()
    yield pods
    for pod in pods:
        with suppress(ProcessLookupError):
            pod.signal(signal.SIGKILL)


def client_of(pod: Pod) -> HttpClient:
    return HttpClient(pod.url, timeout=30, name=pod.name)


def served(pod: Pod) -> tuple[int | None, int]:
    """The version that an engine serves, and a checksum of its bits."""
    state = call_route(pod.url, "state", timeout=20)
    return state["version"] if state["ready"] else None, state["crc"]


def until(holds: Callable[[], bool], seconds: float = PATIENCE) -> bool:
    """Whether it holds before so many seconds are over."""
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.1)
    return holds()


def drawn(source: OneShard) -> int:
    """Give a trainer other weights; return their checksum."""
    source.weight.copy_(torch.randn(ROWS, 8))
    return crc(source.weight)


def test_an_engine_that_missed_a_number_which_was_sent_again_hands_nothing_on_and_is_brought_up(pods):
    """As where the trainer has gone back to an earlier checkpoint, and counts from there."""
    one, two, three = pods
    source = OneShard(0, ROWS)
    fleet = Fleet(source, "127.0.0.1", timeout=TIMEOUT)
    for pod in (two, one):
        fleet.add(client_of(pod))
    drawn(source)
    fleet.send(3)
    two.signal(signal.SIGSTOP)
    new = drawn(source)
    report = fleet.send(3)
    assert [*report.reports] == ["one"]
    two.signal(signal.SIGCONT)
    fleet.add(client_of(three))
    assert until(lambda: served(three)[0] == 3)
    assert served(three) == served(one) == (3, new)
    assert until(lambda: served(two) == (3, new)), fleet.describe()
    fleet.close()


def sent_by_another(version: int, *pods: Pod) -> int:
    """Have a trainer, which ends then, refit engines; return the checksum of what they serve."""
    source = OneShard(0, ROWS)
    fleet = Fleet(source, "127.0.0.1", timeout=TIMEOUT)
    for pod in pods:
        fleet.add(client_of(pod))
    bits = drawn(source)
    assert [*fleet.send(version).reports] == [pod.name for pod in pods]
    fleet.close()
    return bits


def whys(fleet: Fleet) -> dict[str, str | None]:
    return {name: engine["why"] for name, engine in fleet.describe()["engines"].items()}


def test_before_a_new_trainer_sends_engines_that_are_behind_or_new_get_what_the_others_serve(pods):
    one, two, three = pods
    source = OneShard(0, ROWS)
    before = Fleet(source, "127.0.0.1", timeout=TIMEOUT)
    for pod in (one, two):
        before.add(client_of(pod))
    drawn(source)
    before.send(4)
    before.remove("two")
    last = drawn(source)
    before.send(5)
    before.close()
    assert served(two)[0] == 4 and served(three)[0] is None
    source = OneShard(0, ROWS)
    new = drawn(source)
    alone = Fleet(source, "127.0.0.1", timeout=TIMEOUT, peers=False)
    alone.add(client_of(three))
    alone.add(client_of(one))
    fleet = Fleet(source, "127.0.0.1", timeout=TIMEOUT)
    for pod in (three, two, one):
        fleet.add(client_of(pod))
    assert until(lambda: [served(pod) for pod in pods] == [(5, last)] * 3), fleet.describe()
    assert until(lambda: set(whys(fleet).values()) == {None})
    said = fleet.describe()
    assert (said["version"], said["found"]) == (None, 5)
    assert {name: engine["version"] for name, engine in said["engines"].items()} == dict.fromkeys(
        whys(fleet), 5
    )
    assert (
        lines(said)[0]
        == "nothing was sent yet, and engines serve version 5 from before: 3 of 3 engines have it"
    )
    assert lines(said | {"found": None})[0] == "nothing was sent yet: 3 engines"
    report = fleet.send()
    assert report.version == 6 and {*report.reports} == {"one", "two", "three"}
    assert [served(pod) for pod in pods] == [(6, new)] * 3
    assert fleet.describe()["found"] is None
    fleet.close()
    alone.close()


def test_without_peers_nobody_is_brought_up_before_the_first_send(pods):
    one, two, _ = pods
    sent_by_another(5, one)
    fleet = Fleet(OneShard(0, ROWS), "127.0.0.1", timeout=TIMEOUT, peers=False)
    fleet.add(client_of(one))
    fleet.add(client_of(two))
    assert not until(lambda: served(two)[0] is not None, 8)
    fleet.close()


def test_what_different_trainers_have_sent_is_not_handed_on_unless_the_trainer_names_one_version(pods):
    one, two, three = pods
    first, second = sent_by_another(40, one), sent_by_another(3, two)
    source = OneShard(0, ROWS)
    new = drawn(source)
    fleet = Fleet(source, "127.0.0.1", timeout=TIMEOUT)
    for pod in pods:
        fleet.add(client_of(pod))
    assert not until(lambda: served(three)[0] is not None, 8)
    assert [served(one), served(two)] == [(40, first), (3, second)]
    assert set(whys(fleet).values()) == {
        "engines serve what different trainers have sent (one version 40, two version 3), and this trainer has sent "
        "nothing yet"
    }
    fleet.close()
    fleet = Fleet(source, "127.0.0.1", timeout=TIMEOUT, version=3)
    for pod in pods:
        fleet.add(client_of(pod))
    assert until(lambda: served(three) == (3, second))
    assert not until(lambda: served(one) != (40, first), 3), "the trainer knows of no such version"
    assert whys(fleet)["one"] == "it serves version 40, and this trainer has named version 3"
    assert fleet.send().version == 41, "no other weights get a number that was served"
    assert [served(pod) for pod in pods] == [(41, new)] * 3
    fleet.close()


def test_two_trainers_versions_of_one_number_are_told_apart_also_if_that_is_named(pods):
    one, two, three = pods
    sent_by_another(3, one)
    sent_by_another(3, two)
    fleet = Fleet(OneShard(0, ROWS), "127.0.0.1", timeout=TIMEOUT, version=3)
    for pod in pods:
        fleet.add(client_of(pod))
    assert not until(lambda: served(three)[0] is not None, 8)
    assert "one version 3, two version 3" in whys(fleet)["three"]
    fleet.close()


def test_an_engine_that_got_another_trainers_weights_of_the_same_number_no_longer_counts_as_having_them(pods):
    one, two, _ = pods
    source = OneShard(0, ROWS)
    fleet = Fleet(source, "127.0.0.1", timeout=TIMEOUT)
    fleet.add(client_of(one))
    bits = drawn(source)
    fleet.send(3)
    assert sent_by_another(3, two) != bits
    fleet.add(client_of(two))
    assert until(lambda: served(two) == (3, bits)), "one that comes with the number is brought up"
    other = sent_by_another(3, one)
    assert served(one) == (3, other)
    assert until(lambda: served(one) == (3, bits)), fleet.describe()
    fleet.close()


def test_without_an_engine_that_serves_a_version_the_first_one_is_0_and_nobody_is_waited_for(pods):
    one, two, _ = pods
    two.signal(signal.SIGSTOP)
    source = OneShard(0, ROWS)
    fleet = Fleet(source, "127.0.0.1", timeout=TIMEOUT)
    fleet.add(client_of(one))
    assert until(
        lambda: whys(fleet)["one"] == "no engine serves a version, and this trainer has sent nothing yet"
    )
    began = time.monotonic()
    assert fleet.send().version == 0 and time.monotonic() - began < 5
    fleet.close()
    fleet = Fleet(source, "127.0.0.1", timeout=TIMEOUT)
    fleet.add(client_of(two))
    fleet.add(client_of(one))
    began = time.monotonic()
    report = fleet.send()
    assert report.version == 1 and [*report.reports] == ["one"], (
        "one that hangs may cost the time for an answer"
    )
    assert time.monotonic() - began < 25
    fleet.close()


class Stalling(HttpClient):
    """An engine's client that stalls the first time that it is paused, until it is `released`; `calls` says whether it
    is paused after each call, and where updates lie."""

    def __init__(self, pod: Pod) -> None:
        super().__init__(pod.url, timeout=30, name=pod.name)
        self.stalls, self.released, self.calls = Event(), Event(), []
        self.is_paused = False

    def pause(self, mode: str = "keep", clear_cache: bool = True) -> None:
        if not self.stalls.is_set():
            self.stalls.set()
            assert self.released.wait(60)
        self.is_paused = True
        self.calls.append("pause")

    def resume(self) -> None:
        self.is_paused = False
        self.calls.append("resume")

    def update_weights(self, update_info: dict) -> None:
        self.calls.append("update")
        self.released.set()
        time.sleep(2)  # for what has stalled to go on
        super().update_weights(update_info)
        self.calls.append(f"updated, {'paused' if self.is_paused else 'not paused'}")


def with_one_that_stalls(one: Pod, two: Pod) -> tuple[OneShard, Fleet, Stalling]:
    """A trainer's fleet that has sent its first version, by which one engine is to bring up another, which stalls."""
    source = OneShard(0, ROWS)
    fleet = Fleet(source, "127.0.0.1", timeout=TIMEOUT)
    fleet.add(client_of(one))
    drawn(source)
    fleet.send(0, pausing=True)
    client = Stalling(two)
    fleet.add(client)
    assert client.stalls.wait(PATIENCE)
    return source, fleet, client


def test_one_that_stalled_while_it_was_to_be_brought_up_stays_paused_until_the_send_that_came_has_ended(pods):
    one, two, _ = pods
    source, fleet, client = with_one_that_stalls(one, two)
    new = drawn(source)
    report = fleet.send(1, pausing=True)
    assert {*report.reports} == {"one", "two"}, report
    assert served(two) == (1, new)
    assert "updated, paused" in client.calls, client.calls
    assert until(lambda: not client.is_paused), client.calls
    assert whys(fleet) == {"one": None, "two": None}
    fleet.close()


def test_one_that_stalled_until_the_send_that_came_had_ended_goes_on_and_is_behind_or_brought_up(pods):
    one, two, _ = pods
    source, fleet, client = with_one_that_stalls(one, two)
    two.signal(signal.SIGSTOP)
    new = drawn(source)
    report = fleet.send(1, pausing=True)
    assert [*report.reports] == ["one"] and [*report.behind] == ["two"]
    two.signal(signal.SIGCONT)
    client.released.set()
    assert until(lambda: served(two) == (1, new)), fleet.describe()
    assert until(lambda: not client.is_paused), client.calls
    assert until(lambda: whys(fleet) == {"one": None, "two": None})
    fleet.close()


def test_numbers_that_do_not_go_up_have_another_origin_and_those_after_them_the_same_connection(pods):
    one, *_ = pods
    source = OneShard(0, ROWS)
    fleet = Fleet(source, "127.0.0.1", timeout=TIMEOUT)
    fleet.add(client_of(one))
    origins, connections = [], []
    for version in (7, 8, 3, 4, 4, 9):
        bits = drawn(source)
        fleet.send(version)
        assert served(one) == (version, bits)
        held = client_of(one).holds()
        assert held == (version, fleet.origin)
        origins.append(held.origin)
        connections.append(fleet._connections[0].transfer)
    for same in (origins, connections):
        assert same[0] == same[1] != same[2] == same[3] != same[4] == same[5]
    assert len(set(origins)) == 3
    assert fleet.send().version == 10
    fleet.close()


def test_an_sglang_is_refused_before_anything_is_sent_where_the_trainer_sends_an_adapter():
    url = "http://127.0.0.1:1"
    said = f"{url} is an SGLang, whose LoRA adapters are not refitted: serve adapter 'policy' with a vLLM"
    fleet = Fleet(None, "127.0.0.1", adapter="policy", peers=False)
    with pytest.raises(OptionError, match=said):
        fleet.add(SglangClient(url))
    with pytest.raises(OptionError, match=said):
        fleet._join(url, sglang=True)
    fleet.add(HttpClient(url))
    assert fleet.names() == [url]
    fleet.close()
    with pytest.raises(OptionError, match=said):
        WeightTransfer(None, [HttpClient(url), SglangClient(url)], "127.0.0.1:1", adapter="policy")
    plain = Fleet(None, "127.0.0.1", peers=False)
    assert plain.add(SglangClient(url)) == url
    plain.close()


class Noting(HttpClient):
    """An engine's client that notes when requests wait, and what is served when they run again. With `dies` its engine
    is killed in the middle of the next update."""

    def __init__(self, pod: Pod) -> None:
        super().__init__(pod.url, timeout=30, name=pod.name)
        self.pod, self.dies, self.calls = pod, False, []

    def pause(self, mode: str = "keep", clear_cache: bool = True) -> None:
        self.calls.append("pause")

    def resume(self) -> None:
        self.calls.append("resume")
        if not self.dies:
            self.calls.append(served(self.pod))

    def reset_prefix_cache(self, external: bool = False) -> None:
        self.calls.append("reset")

    def update_weights(self, update_info: dict) -> None:
        if self.dies:
            self.pod.signal(signal.SIGKILL)
        super().update_weights(update_info)


def sent_once(pods: list[Pod]) -> tuple[OneShard, Fleet, list[Noting]]:
    """A trainer, its fleet of these engines after a send that has paused them, and their clients."""
    source, clients = OneShard(0, ROWS), [Noting(pod) for pod in pods]
    fleet = Fleet(source, "127.0.0.1", timeout=TIMEOUT)
    for client in clients:
        fleet.add(client)
    drawn(source)
    fleet.send(0, pausing=True)
    return source, fleet, clients


def test_requests_wait_on_while_another_engine_dies_in_the_middle_of_a_send(pods):
    """Until their engine has all of the new weights: none runs into one whose weights are not whole."""
    source, fleet, clients = sent_once(pods)
    for client in clients:
        client.calls.clear()
    clients[1].dies = True
    new = drawn(source)
    report = fleet.send(1, pausing=True)
    assert {*report.reports} == {"one", "three"} and [*report.behind] == ["two"], report
    for client in (clients[0], clients[2]):
        assert client.calls == ["pause", "reset", "resume", (1, new)], client.calls
    assert clients[1].calls.count("resume") == 1, "it may only have seemed to be dead"
    fleet.close()


@pytest.mark.parametrize("ends", [KeyboardInterrupt, torch.OutOfMemoryError])
def test_a_send_that_ends_by_no_error_of_ours_lets_requests_run_and_says_nothing_of_what_engines_have(
    ends, pods
):
    """And the next one brings all engines what it sends, by the same number, too."""
    source, fleet, clients = sent_once(pods)
    new = drawn(source)
    with (
        mock.patch.object(source, "check_current", side_effect=ends("as torch says")),
        pytest.raises(
            KeyboardInterrupt if ends is KeyboardInterrupt else ReshardError, match="as torch says"
        ),
    ):
        fleet.send(1, pausing=True)
    for client in clients:
        assert client.calls.count("pause") == client.calls.count("resume") == 2, client.calls
    said = fleet.describe()["engines"]
    assert all(said[pod.name]["version"] != 1 and said[pod.name]["why"] for pod in pods), said
    assert {*fleet.send(1).reports} == {"one", "two", "three"}
    assert all(served(pod) == (1, new) for pod in pods)
    fleet.close()


def test_a_send_that_is_interrupted_while_engines_are_paused_leaves_none_paused(pods):
    """Also one whose pause is under way then, and comes after its requests were to run again, or begins so late."""
    _, fleet, [client] = sent_once(pods[:1])
    pausing, let_go = Event(), Event()
    note = client.pause

    def late(*arguments: object) -> None:
        pausing.set()
        _thread.interrupt_main()
        assert let_go.wait(TIMEOUT)
        note()

    with mock.patch.object(client, "pause", late), pytest.raises(KeyboardInterrupt):
        fleet.send(1, pausing=True)
    assert pausing.is_set()
    let_go.set()

    def calls() -> list[str]:
        return [call for call in client.calls if call in ("pause", "resume")]

    assert until(lambda: calls()[2:] == ["resume", "pause", "resume"]), client.calls

    member, claim, later = fleet._members[pods[0].name], new_claim(), new_claim()
    client.calls.clear()
    member.go_on(claim, is_new=False)
    member.pause(claim)
    assert calls() == ["resume"], "a claim that has ended pauses nobody"
    member.pause(later)
    member.go_on(later, is_new=False)
    assert calls() == ["resume", "pause", "resume"]
    fleet.close()


def test_an_engine_that_joins_again_or_under_another_name_is_asked_and_not_written_again(pods):
    """Under two names it would be brought up from itself."""
    source = OneShard(0, ROWS)
    fleet = Fleet(source, "127.0.0.1", timeout=TIMEOUT)
    for pod in pods:
        fleet.add(HttpClient(pod.url, timeout=30, name=pod.name))
    new = drawn(source)
    fleet.send(0)
    with mock.patch.object(HttpClient, "update_weights") as written:
        fleet._join(pods[1].url, "two")
        fleet._join(pods[0].url, "other")
        versions = dict.fromkeys(["other", "two", "three"], 0)
        assert until(
            lambda: {n: one["version"] for n, one in fleet.describe()["engines"].items()} == versions
        )
        engines = fleet.describe()["engines"]
        assert not any(one["why"] for one in engines.values()), engines
        with pytest.raises(OptionError, match=f"has the engine at {pods[0].url} as other: remove that first"):
            fleet.add(HttpClient(pods[0].url, name="again"))
        assert not written.called and all(served(pod) == (0, new) for pod in pods)
    new = drawn(source)
    assert {*fleet.send(1).reports} == {"other", "two", "three"}
    assert all(served(pod) == (1, new) for pod in pods)
    fleet.close()
