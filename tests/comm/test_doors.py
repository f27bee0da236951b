"""Meetings and servers of one process at one port, told apart by their secrets alone."""

import gc
import itertools
import os
import resource
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import psutil
import pytest
import torch.distributed as dist

from reshard.comm.door import held_door
from reshard.comm.hosts import parsed
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


@contextmanager
def files_left(number: int) -> Iterator[None]:
    """Let this process open so many more files."""
    gc.collect()  # which would close others meanwhile
    before, held = resource.getrlimit(resource.RLIMIT_NOFILE), []
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(512, before[0]), before[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        for _ in range(number):
            os.close(held.pop())
        yield
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("number", range(7))
@pytest.mark.parametrize(
    "serve",
    [
        lambda address: Registry(address, SECRET, {}),
        lambda address: RefitGroup.join(address, 0, 1, 3, SECRET),
        lambda address: Fleet(None, address, registry=True, secret=SECRET, timeout=5),
    ],
    ids=["registry", "meeting", "fleet"],
)
def test_too_many_open_files_are_said_in_a_sentence_and_leave_no_port_taken(
    serve: Callable[[str], Any], number: int
):
    address = f"127.0.0.1:{free_port()}"
    with files_left(number), pytest.raises(ReshardError, match=f"at {address} "):
        serve(address)
    deadline, (host, port) = time.monotonic() + 5, parsed(address)
    while is_open(port) and time.monotonic() < deadline:  # a hub that has begun ends a moment later
        time.sleep(0.05)
    socket.create_server((host, port)).close()
    serve(address).close()


def test_an_invitation_at_a_door_that_is_closed_is_refused(door):
    door.release()
    with pytest.raises(ReshardError, match="nobody can meet at .*, which is closed"):
        door.invite(20)


def test_a_door_that_is_held_by_a_name_is_found_in_whatever_order_its_addresses_come(monkeypatch):
    resolve, turns = (
        socket.getaddrinfo,
        itertools.cycle([("127.0.0.2", "127.0.0.3"), ("127.0.0.3", "127.0.0.2")]),
    )

    def turning(host: str, *arguments: Any, **keywords: Any) -> list:
        hosts = next(turns) if host == "trainer-0" else (host,)
        return [found for host in hosts for found in resolve(host, *arguments, **keywords)]

    monkeypatch.setattr(socket, "getaddrinfo", turning)
    held, before = held_door("trainer-0", free_port()), listening()
    for secret in (SECRET, OTHER):
        members = meet(f"trainer-0:{held.place[1]}", secret)
        of_all(members)
        assert listening() == before
        for member in members:
            member.close()
    held.release()


def test_a_secret_that_is_refused_leaves_no_port_of_a_process_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        before = listening()
        for _ in range(2):
            with pytest.raises(ReshardError, match="secret is not a text of at least 16 characters"):
                RefitGroup.of_process_group(secret="short")
        assert listening() == before
    finally:
        dist.destroy_process_group()


def test_a_member_that_takes_a_registry_for_its_meeting_is_told_at_once(door):
    address = f"127.0.0.1:{door.place[1]}"
    registry, began = Registry(address, SECRET, {}), time.monotonic()
    assert "the connection has ended" in caught(lambda: RefitGroup.join(address, 1, 2, 20, SECRET))
    assert time.monotonic() - began < 5
    said = caught(lambda: Registry(address, SECRET, {}))
    assert "it has the same secret: give secret= another" in said
    registry.close()
    assert "or no registry is served there" in caught(lambda: ask(address, "describe", secret=SECRET))


def test_a_registry_at_what_is_no_host_is_refused_in_a_sentence():
    for call in (
        lambda: Registry("a..b:29700", SECRET, {}),
        lambda: ask("a..b:29700", "describe", secret=SECRET),
    ):
        with pytest.raises(ReshardError, match=r"registry .* at a..b:29700 .label empty or too long"):
            call()
