"""A fleet whose engines, peers and operators reach the trainer at one port."""

import multiprocessing
import re
import socket
import threading
import time
from functools import partial
from typing import Any

import psutil
import pytest
import torch

from reshard.comm.door import Door
from reshard.comm.http import call_route
from reshard.comm.registry import ask
from reshard.comm.secret import new_secret
from reshard.core.errors import OptionError
from reshard.integrations import Fleet, HttpClient
from reshard.integrations.sync import Meeting
from reshard.refit import RefitGroup
from tests.campaigns.fleet import ROWS, Pod, crc
from tests.refit.test_transports import OneShard
from tests.starting.ranks import caught, free_port

SECRET = "a secret of those on call"


class Listening:
    """The ports at which this process listens, other than at the beginning, looked up all the time."""

    def __init__(self) -> None:
        self.process = psutil.Process()
        self.before, self.ports, self.ended = self.now(), set(), threading.Event()
        self.thread = threading.Thread(target=self.look, daemon=True)

    def now(self) -> set[int]:
        connections = self.process.net_connections("tcp")
        return {one.laddr.port for one in connections if one.status == psutil.CONN_LISTEN}

    def look(self) -> None:
        while not self.ended.wait(0.005):
            self.ports |= self.now() - self.before

    def __enter__(self) -> "Listening":
        self.thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.ended.set()
        self.thread.join()


@pytest.fixture(scope="module")
def pods():
    multiprocessing.set_forkserver_preload(["tests.campaigns.fleet"])
    pods = [Pod(name) for name in ("one", "two", "three")]
    for pod in pods:
        pod.start()
    yield pods
    for pod in pods:
        pod.process.kill()
        pod.process.join(10)


def has(pod: Pod, source: OneShard, version: int) -> bool:
    state = call_route(pod.url, "state", timeout=20)
    return state["ready"] and (state["version"], state["crc"]) == (version, crc(source.weight))


def brought(fleet: Fleet, name: str) -> dict:
    """What the fleet says of an engine, once others have brought it up."""
    deadline = time.monotonic() + 60
    while (said := fleet.describe()["engines"][name])["why"] and time.monotonic() < deadline:
        time.sleep(0.05)
    return said


@pytest.mark.parametrize("backend", ["staged", "auto"])
def test_engines_peers_and_operators_reach_a_trainer_that_listens_at_one_port(backend, pods, monkeypatch):
    """By ``auto`` the members here take Gloo, whose connections have ports of their own, as the page says."""
    monkeypatch.setenv("RESHARD_SECRET", SECRET)
    one, two, three = pods
    source, port = OneShard(0, ROWS), free_port()
    address = f"127.0.0.1:{port}"
    with Listening() as listening:
        fleet = Fleet(source, address, registry=True, timeout=30, backend=backend)
        assert fleet.address == address
        with socket.create_connection(("127.0.0.1", port)):  # a stranger, who says nothing all the time
            for version, pod in enumerate((one, two)):
                assert ask(address, "join", url=pod.url, name=pod.name) == pod.name
                source.weight.copy_(torch.randn(ROWS, 8))
                assert fleet.send(version, verify=True).behind == {}
            assert has(one, source, 1) and has(two, source, 1)
            ask(address, "join", url=three.url, name="three")
            assert brought(fleet, "three") | {"age": 0} == {
                "version": 1,
                "age": 0,
                "connected": False,
                "why": None,
            }
            assert has(three, source, 1)
            ask(address, "leave", name="one")
            source.weight.copy_(torch.randn(ROWS, 8))
            assert [*fleet.send(2).reports] == ["two", "three"]  # three joins, while two was connected
            assert has(two, source, 2) and has(three, source, 2) and not has(one, source, 2)
            assert [*ask(address, "describe")["engines"]] == ["two", "three"]
        fleet.close()
    assert listening.ports == {port} if backend == "staged" else listening.ports > {port}


def test_a_fleet_without_a_port_chooses_one_once_and_keeps_it_until_it_is_closed(pods):
    source = OneShard(0, ROWS)
    with Listening() as listening:
        fleet = Fleet(source, "127.0.0.1", timeout=30, backend="staged")
        fleet.add(HttpClient(pods[0].url, timeout=30, name="one"))
        fleet.send(10)
        fleet.add(HttpClient(pods[1].url, timeout=30, name="two"))
        fleet.send(11)
        fleet.close()
        assert fleet.send(12).behind == {}, "a fleet that was closed may go on, at the same port"
        fleet.close()
    assert listening.ports == {fleet.port} and fleet.address == f"127.0.0.1:{fleet.port}"
    socket.create_server(("127.0.0.1", fleet.port)).close()  # it is free


@pytest.mark.parametrize("invited", [True, False], ids=["invited", "control"])
def test_engines_that_come_before_the_trainer_wait_for_it(invited, pods, monkeypatch):
    joins = Meeting.join

    def late(meeting: Meeting, rank: int) -> RefitGroup:
        time.sleep(1)
        return joins(meeting, rank)

    monkeypatch.setattr(Meeting, "join", late)
    if not invited:
        monkeypatch.setattr(Door, "invite", lambda *_: new_secret())
    fleet = Fleet(OneShard(0, ROWS), "127.0.0.1", timeout=30, backend="staged")
    fleet.add(HttpClient(pods[0].url, timeout=30, name="one"))
    if invited:
        assert fleet.send(20).behind == {}
    else:
        assert "does not know the same secret, or the meeting is over" in caught(lambda: fleet.send(20))
    fleet.close()


def test_a_fleet_whose_registry_cannot_be_served_gives_its_port_back(monkeypatch):
    monkeypatch.delenv("RESHARD_SECRET", raising=False)
    monkeypatch.setattr("reshard.comm.secret.is_loopback", lambda _: False)
    port = free_port()
    said = caught(lambda: Fleet(None, f"127.0.0.1:{port}", registry=True))
    assert "which other hosts may reach, need a secret" in said
    socket.create_server(("127.0.0.1", port)).close()


@pytest.mark.parametrize("ended", ["closed", "failed"])
def test_a_fleet_that_goes_on_serves_its_registry_again_at_its_port(ended, monkeypatch):
    fleet = Fleet(None, "127.0.0.1", registry=True, secret=SECRET, timeout=6)
    if ended == "closed":
        fleet.close()
    else:
        with monkeypatch.context() as failing:
            failing.setattr(Door, "_accept", lambda _: 1 // 0)
            socket.create_connection(("127.0.0.1", fleet.port)).close()
            deadline = time.monotonic() + 10
            while not fleet._door.is_closed and time.monotonic() < deadline:
                time.sleep(0.05)
    asks = partial(ask, fleet.address, "describe", timeout=1, secret=SECRET)
    assert re.search(r"no registry answers at \S+ \([^\[<]*\): a trainer opens one with Fleet", caught(asks))
    fleet.send(1)  # to nobody
    assert asks()["version"] == 1
    meetings = []
    for _ in range(2):  # beside each other
        address, secret = fleet._invite()
        meetings += [RefitGroup.join(address, rank, 2, 5, secret) for rank in range(2)]
    for member in meetings:
        member.close()
    fleet.close()
    socket.create_server(("127.0.0.1", fleet.port)).close()


def test_a_registry_at_no_address_is_refused():
    with pytest.raises(OptionError, match='registry="" is no address'):
        Fleet(None, "127.0.0.1", registry="")


def test_a_fleet_at_a_name_is_at_one_of_its_addresses():
    fleet = Fleet(None, "localhost")
    assert fleet.address == f"127.0.0.1:{fleet.port}"
    fleet.close()


class LatePause(HttpClient):
    """An engine that is paused only when it is let, and notes whether it is called to connect after that."""

    begun, let, ended, called = threading.Event(), threading.Event(), threading.Event(), False

    def pause(self, *_: Any, **__: Any) -> None:
        self.begun.set()
        self.let.wait(60)

    def init_weight_transfer_engine(self, info: dict[str, Any]) -> None:
        self.called = True
        super().init_weight_transfer_engine(info)

    def resume(self) -> None:
        super().resume()
        self.ended.set()


def test_a_fleet_that_is_closed_while_an_engine_is_paused_calls_nobody_and_listens_no_more(pods, monkeypatch):
    monkeypatch.setattr("reshard.integrations.peers.STOP_SECONDS", 0.5)
    one, two, _ = pods
    late = LatePause(two.url, timeout=30, name="two")
    with Listening() as listening:
        fleet = Fleet(OneShard(0, ROWS), "127.0.0.1", timeout=20, backend="staged")
        fleet.add(HttpClient(one.url, timeout=30, name="one"))
        fleet.send(30, pausing=True)
        fleet.add(late)
        assert late.begun.wait(30)
        fleet.close()
    assert listening.ports == {fleet.port}
    with Listening() as listening:
        late.let.set()
        assert late.ended.wait(30)
    assert not late.called and not listening.ports
