"""What becomes of a fleet whose engines fail at each step of a switch, by clients that do as SGLang's and vLLM's."""

import time
from types import SimpleNamespace

import pytest

from reshard.core.errors import ReshardError
from reshard.engines.workers.actions import BEGIN, DROP, REFIT, ROLL_BACK, SWITCH
from reshard.integrations import sglang
from reshard.integrations.fleet import Fleet, _Connection
from reshard.integrations.members import Member
from reshard.integrations.sglang import SglangClient
from reshard.integrations.switching import ABORT, GO_ON, RESET, Switching, begin, switch, switch_all
from reshard.integrations.vllm.transfer import WeightTransfer

PLAIN, TICKET = Switching(), "meeting/7"


class Engine:
    """A vLLM with an update session, which serves version 6 and has another beside it."""

    def __init__(self, fails: str = "") -> None:
        self.weights = self.label = 6
        self.beside, self.open, self.begun, self.fails, self.paused = 7, True, TICKET, fails, False

    def serves(self) -> int:
        if self.fails == "gone":
            raise ReshardError("it does not answer")
        return self.label

    def start_weight_update(self) -> None:
        assert not self.open, "an update is already active"
        self.open = True

    def update_weights(self, info: dict) -> None:
        assert self.open, "start comes first"
        action, is_theirs = info["action"], self.begun == info["ticket"]
        if action == BEGIN:
            self.begun, self.beside = info["ticket"], info["version"]
        elif action == SWITCH:
            self.begun = None if is_theirs else self.begun
            if not is_theirs or self.fails in ("finish", "gone"):
                self.open = False  # as vLLM does where an update fails
                raise ReshardError("it cannot switch")
            self.weights, self.beside = self.beside, self.weights
        elif action == DROP:
            self.begun = None if is_theirs else self.begun
        else:
            assert action == ROLL_BACK and info["ticket"] == TICKET and info["version"] in (6, None)
            self.begun = None
            if self.weights == 7:
                self.weights, self.beside = self.beside, self.weights

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        assert self.open, "start comes first"
        self.open = False
        if weight_version is not None:
            self.label = int(weight_version)

    def pause(self, mode: str, clear_cache: bool) -> None:
        self.paused = True
        if self.fails == "late":
            time.sleep(1.5)
        if self.fails == "pause":
            raise ReshardError("it does not pause")

    def resume(self) -> None:
        self.paused = False
        if self.fails == "resume" and self.label == 7:
            raise ReshardError("it does not go on")

    def reset_prefix_cache(self) -> None:
        if self.fails == "reset":
            raise ReshardError("it keeps its caches")


@pytest.mark.parametrize("fails", ["finish", "pause", "resume", "reset", "late"])
def test_where_one_fails_all_serve_what_they_served_whichever_step_it_fails_at(fails):
    engines = {"one": Engine(), "two": Engine(fails), "three": Engine("gone")}
    version, failed = switch_all(engines, 7, TICKET, 6, Switching(GO_ON, RESET), seconds=1.0)
    if fails == "late":
        time.sleep(1.5)
    assert version == 6 and "two" in failed and "three" in failed and "one" not in failed, failed
    for name in ("one", "two"):
        assert (engines[name].weights, engines[name].label) == (6, 6), name
        assert not engines[name].begun and not engines[name].paused
        if fails != "late":
            assert not engines[name].open


def test_one_that_no_longer_answers_keeps_nobody_back():
    engines = {"one": Engine(), "two": Engine("gone")}
    version, failed = switch_all(engines, 7, TICKET, 6, PLAIN, seconds=1.0)
    assert version == 7 and [*failed] == ["two"] and (engines["one"].weights, engines["one"].label) == (7, 7)


class Server:
    """What an SGLang server is asked, and what it holds."""

    def __init__(self, monkeypatch, deaf: str = "") -> None:
        self.weights, self.beside, self.told, self.deaf = 6, 7, "6", deaf
        monkeypatch.setattr(sglang, "act_on_server", self.act)
        monkeypatch.setattr(sglang, "refit_server", lambda url, version, *_: self.refit(version))

    def act(self, url, action, timeout, **options) -> None:
        if action == SWITCH or (action == ROLL_BACK and self.weights == 7):
            self.weights, self.beside = self.beside, self.weights

    def refit(self, version) -> None:
        self.weights, self.told = version, str(version)

    def client(self) -> SglangClient:
        client = SglangClient("http://127.0.0.1:1", name="pod")
        client._call = self.call  # type: ignore[method-assign]
        return client

    def call(self, method, route, body=None):
        if route == self.deaf:
            raise ReshardError(f"it does not answer /{route}")
        if route == "update_weight_version":
            self.told = body["new_version"]
        return {"weight_version": self.told}


def test_an_sglang_is_never_told_a_version_that_it_was_not_switched_to(monkeypatch):
    server = Server(monkeypatch)
    client = server.client()
    begin(client, {"version": 7, "verify": False, "ticket": TICKET})
    switch(client, 7, TICKET, PLAIN)
    assert (server.weights, server.told) == (7, "7")
    with pytest.raises(ReshardError, match="nothing to switch to"):
        switch(client, 8, TICKET, PLAIN)
    client.update_weights({"version": 9, "verify": False, "action": REFIT})
    client.finish_weight_update("9")
    with pytest.raises(ReshardError, match="got nothing of version 10"):
        client.finish_weight_update("10")
    assert (server.weights, server.told) == (9, "9")


def test_an_sglang_that_switched_and_was_not_told_goes_back(monkeypatch):
    server = Server(monkeypatch, deaf="update_weight_version")
    client = server.client()
    client.update_weights({"version": 7, "verify": False, "ticket": TICKET, "action": BEGIN})
    version, failed = switch_all({"pod": client}, 7, TICKET, 6, PLAIN, seconds=5.0)
    assert version == 6 and "does not answer /update_weight_version" in failed["pod"]
    assert (server.weights, server.told) == (6, "6")


def test_an_sglang_whose_pause_was_not_answered_counts_as_paused(monkeypatch):
    client = Server(monkeypatch, deaf="pause_generation").client()
    with pytest.raises(ReshardError):
        client.pause(ABORT)
    assert client._is_paused
    client.resume()
    assert not client._is_paused


def test_what_was_begun_stays_begun_where_a_client_cannot_pause_for_the_switch():
    transfer = WeightTransfer.__new__(WeightTransfer)
    transfer.clients, transfer.rank, transfer.is_begun = [object()], 0, True
    with pytest.raises(ReshardError, match="object cannot pause its engine: switch with requests='go on'"):
        transfer.switch(ABORT, RESET)
    assert transfer.is_begun


def transfer_of(*clients, timeout: float = 5.0) -> WeightTransfer:
    """A trainer's end, whose exchange has brought version 7."""
    transfer = WeightTransfer.__new__(WeightTransfer)
    transfer.clients, transfer.rank, transfer.is_begun, transfer.before = [*clients], 0, True, 6
    transfer.ticket = TICKET
    transfer.link = SimpleNamespace(
        group=SimpleNamespace(timeout=timeout), begun=SimpleNamespace(settle=lambda: None)
    )
    return transfer


class Slow(Engine):
    """One whose calls take a while."""

    def update_weights(self, info: dict) -> None:
        time.sleep(0.5)
        super().update_weights(info)


def test_no_call_of_what_was_given_up_comes_into_what_is_begun_next():
    refuses, slow = Engine(), Slow()
    refuses.open = False
    transfer = transfer_of(refuses, slow)
    transfer.give_up()
    assert not slow.begun and not slow.open, "its calls have ended, though another engine has refused"
    slow.start_weight_update()
    slow.begun = "meeting/8"  # the next one
    time.sleep(1.0)
    assert slow.begun and slow.open and slow.weights == 6


def test_what_an_engine_took_for_given_up_too_late_is_not_finished():
    slow = Slow()
    transfer_of(slow, timeout=0.1).give_up()
    time.sleep(1.0)
    assert slow.open and not slow.begun and slow.weights == 6


def test_what_was_switched_to_is_not_given_up(monkeypatch):
    engine, other = Engine(), Engine()
    transfer = transfer_of(engine, other)
    report = SimpleNamespace(is_pending=True, version=7)
    monkeypatch.setattr(transfer, "arrived", lambda: report)
    assert transfer.switch() == 7 and engine.weights == other.weights == 7
    assert not transfer.is_begun
    with pytest.raises(ReshardError, match="nothing is begun"):
        WeightTransfer.arrived(transfer)


class Late(Engine):
    """One whose first answers take so many seconds."""

    def __init__(self, fails: str = "", dropping: float = 0.0, finishing: float = 0.0) -> None:
        super().__init__(fails)
        self.dropping, self.finishing = dropping, finishing

    def update_weights(self, info: dict) -> None:
        super().update_weights(info)
        if info["action"] == DROP:
            wait, self.dropping = self.dropping, 0.0
            time.sleep(wait)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        wait, self.finishing = self.finishing, 0.0
        time.sleep(wait)
        super().finish_weight_update(weight_version)


def begin_again(client: Engine, transfer: WeightTransfer) -> None:
    """Begin version 8; where that is refused, since an update is open, give up and begin once more."""
    for _ in range(2):
        try:
            begin(client, {"version": 8, "verify": False, "ticket": "meeting/8"})
        except AssertionError:
            transfer.give_up()


@pytest.mark.parametrize("how", ["its pause", "its end"])
def test_a_call_that_comes_late_switches_to_nothing_that_was_begun_since(how):
    late = Late("late", dropping=2.0) if how == "its pause" else Late(finishing=1.5)
    transfer = transfer_of(late, timeout=0.5)
    if how == "its pause":
        served, failed = switch_all(
            {"good": Engine(), "late": late}, 7, TICKET, 6, Switching(GO_ON, RESET), 1.0
        )
        assert served == 6 and "late" in failed
        time.sleep(1.0)
        late.fails = ""
    else:
        transfer.give_up()
    begin_again(late, transfer)
    assert late.begun == "meeting/8" and late.weights == 6
    time.sleep(3.0)
    assert late.weights == 6, "nobody has told it to switch"
    with pytest.raises((ReshardError, AssertionError)):  # an update that is over, or one of another refit
        switch(late, 7, TICKET, PLAIN)
    assert late.weights == 6


def test_of_an_engine_that_did_not_go_back_nobody_says_which_version_it_serves():
    """Its number may be given once more, to what the step makes that is done again; see `reshard.integrations.peers`,
    by which it would hand on the first one."""
    fleet = Fleet(lambda: None, "127.0.0.1", timeout=5.0, delta=True, peers=False)
    clients = {"one": Engine(), "two": Engine("gone"), "three": Engine()}
    for name, client in clients.items():
        client.weights = client.label = 7
        client.beside, client.open, client.begun = 6, name == "two", None
        fleet._members[name] = Member(name, client)
        fleet._members[name].refitted(7)
    fleet.version = 7
    link = SimpleNamespace(roll_back=lambda: 6)
    transfer = SimpleNamespace(before=6, ticket=TICKET, link=link, close=lambda: None)
    fleet._switched = _Connection(("one", "two"), transfer)
    with pytest.raises(ReshardError, match="version 6 is not in two"):
        fleet.roll_back()
    assert clients["one"].weights == clients["one"].label == 6
    versions = {name: engine["version"] for name, engine in fleet.describe()["engines"].items()}
    assert versions == {"one": 6, "two": None, "three": None}, "three got 7 from another one"
