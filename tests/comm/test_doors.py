"""Meetings and servers of one process at one port, told apart by their secrets alone."""

import os
import select
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from reshard.comm.door import held_door
from reshard.comm.registry import Registry, ask
from reshard.core.errors import ReshardError
from reshard.integrations import Fleet
from reshard.refit import RefitGroup
from tests.comm.test_strangers import OTHER, SECRET, of_all
from tests.starting.ranks import caught, free_port


@pytest.fixture
def door():
    held = held_door("127.0.0.1", free_port())
    yield held
    if not held.is_closed:
        held.release()


def meet(address: str, secret: str, size: int = 2, timeout: float = 20) -> list[RefitGroup]:
    return [RefitGroup.join(address, rank, size, timeout, secret) for rank in range(size)]


def listening() -> set[int]:
    """The ports that this process listens at."""
    connections = psutil.Process().net_connections("tcp")
    return {one.laddr.port for one in connections if one.status == psutil.CONN_LISTEN}


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_two_meetings_and_a_registry_share_a_port_and_go_on_when_one_ends(door):
    _, port = door.place
    address, before = f"127.0.0.1:{port}", listening()
    assert port in before
    registry = Registry(address, "a secret of the registry", {"describe": lambda: "all is well"})
    one, other = meet(address, SECRET), meet(address, OTHER)
    of_all(one)
    of_all(other)
    for member in one:
        member.close()
    of_all(other)
    assert "does not know the same secret, or the meeting is over" in caught(
        lambda: RefitGroup.join(address, 1, 2, 20, SECRET)
    ), "and not one who comes to another meeting"
    assert ask(address, "describe", secret="a secret of the registry") == "all is well"
    assert caught(lambda: ask(address, "describe", secret=OTHER)) != "all is well", "a hub is no registry"
    third = meet(address, SECRET)  # once more, with the secret of the one that is over
    of_all(third)
    of_all(other)
    assert listening() == before
    for member in (*other, *third):
        member.close()
    registry.close()
    assert is_open(port), "the door is held"
    door.release()
    assert not is_open(port)


def test_members_that_come_before_the_first_one_wait_for_it_if_they_are_invited(door):
    address, secret = f"127.0.0.1:{door.place[1]}", door.invite(20)
    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(RefitGroup.join, address, 1, 2, 20, secret)
        time.sleep(0.5)
        assert not early.done()
        first = RefitGroup.join(address, 0, 2, 20, secret)
        of_all([first, early.result()])


def test_an_invitation_ends_with_its_time_and_who_waits_is_told(door):
    address, secret = f"127.0.0.1:{door.place[1]}", door.invite(0.5)
    began = time.monotonic()
    assert "rank 0, which serves the hub" in caught(lambda: RefitGroup.join(address, 1, 2, 20, secret))
    assert time.monotonic() - began < 10 and not door.entrances


def test_strangers_who_are_silent_or_guess_delay_no_meeting_and_learn_of_none(door):
    address = f"127.0.0.1:{door.place[1]}"
    silent = [socket.create_connection(door.place) for _ in range(50)]
    said = [caught(lambda: RefitGroup.join(address, 1, 2, 20, "a guess of nothing")) for _ in range(2)]
    meeting = meet(address, SECRET)
    began = time.monotonic()
    for _ in range(5):
        other = meet(address, OTHER)
        said.append(caught(lambda: RefitGroup.join(address, 1, 2, 20, "a guess of nothing")))
        of_all(other)
        for member in other:
            member.close()
    of_all(meeting)
    assert time.monotonic() - began < 10
    assert len({*said}) == 1, "the same is said whether there is a meeting or none"
    for stranger in silent:
        stranger.close()


def test_a_port_is_shared_only_where_it_is_held_and_a_secret_with_nobody(door):
    held, own = f"127.0.0.1:{door.place[1]}", f"127.0.0.1:{free_port()}"
    meeting, alone = meet(held, SECRET), meet(own, SECRET)
    for address, secret in ((held, SECRET), (own, OTHER)):
        said = caught(lambda address=address, secret=secret: RefitGroup.join(address, 0, 2, 20, secret))
        assert f"rank 0 cannot serve at {address} ([Errno 98] Address already in use" in said
    of_all(meeting)
    of_all(alone)


def test_another_process_does_not_get_the_port_and_a_forked_one_does_not_keep_it(door):
    address, meeting = f"127.0.0.1:{door.place[1]}", meet(f"127.0.0.1:{door.place[1]}", SECRET)
    said, child = os.pipe()
    if (pid := os.fork()) == 0:
        refused = caught(lambda: Fleet(None, address))
        door.release()  # which is the parent's
        os.write(child, refused.encode())
        time.sleep(60)
        os._exit(0)
    try:
        assert select.select([said], [], [], 30)[0]
        assert os.read(said, 1000).startswith(
            f"no fleet can listen at {address} ([Errno 98] Address already in use".encode()
        )
        of_all(meeting)
        for member in meeting:
            member.close()
        door.release()
        assert not is_open(door.place[1])
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_meetings_that_come_and_go_at_once_leave_nothing_behind(door):
    address, before = f"127.0.0.1:{door.place[1]}", threading.active_count()

    def comes_and_goes(number: int) -> None:
        for turn in range(10):
            members = meet(address, f"a secret of meeting {number}, turn {turn}")
            of_all(members)
            for member in members:
                member.close()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(comes_and_goes, range(4)))
    deadline = time.monotonic() + 10
    while (door.entrances or threading.active_count() > before) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not door.entrances and not door.handshakes and threading.active_count() <= before


@pytest.mark.parametrize("address", ["10.255.255.1:29600", "127.0.0.1:1"])
def test_a_registry_that_cannot_listen_is_refused_by_its_address(address, monkeypatch):
    monkeypatch.setattr(
        socket, "create_server", lambda *_, **__: (_ for _ in ()).throw(OSError("no such address"))
    )
    with pytest.raises(ReshardError, match=f"no registry can serve at {address} .no such address."):
        Registry(address, SECRET, {})
