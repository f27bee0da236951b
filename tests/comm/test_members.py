"""Meetings of members: who may join, and the error where one cannot."""

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from reshard import ReshardError
from reshard.comm import hosts
from reshard.comm.hosts import free_address
from reshard.engines import VllmModel
from reshard.refit import RefitGroup, connect
from tests.starting.ranks import caught, free_port


def test_a_rank_beyond_the_size_is_refused_before_anybody_is_waited_for():
    began = time.monotonic()
    assert (
        caught(lambda: RefitGroup.join("127.0.0.1:1", 2, 2, timeout=20))
        == "rank 2 is not one of 2 members, which count from 0"
    )
    assert time.monotonic() - began < 10


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "nowhere:port", "::1", "127.0.0.1:0", "127.0.0.1:70000", ":29600", "10.0.0.1:²9600"],
)
def test_what_is_no_address_is_refused(address):
    assert "is not an address such as 10.0.0.1:29600 or [::1]:29600" in caught(
        lambda: RefitGroup.join(address, 1, 2)
    )


@pytest.mark.parametrize(
    ("given", "is_spared"), [("32768\t60999\n", True), ("25000 25099", True), ("1024 65535", False)]
)
def test_a_free_port_is_one_that_the_system_gives_to_no_connection(monkeypatch, tmp_path, given, is_spared):
    (tmp_path / "range").write_text(given)
    monkeypatch.setattr(hosts, "RANGE_OF_CONNECTIONS", tmp_path / "range")
    lowest, highest = map(int, given.split())
    random.seed(5)
    before = random.getstate()
    ports = [int(free_address("127.0.0.1").rpartition(":")[2]) for _ in range(300)]
    assert random.getstate() == before, "a training script counts on what its generator gives next"
    assert all(lowest <= port <= highest for port in ports) != is_spared
    assert any(lowest <= port <= highest for port in ports) != is_spared
    assert len(set(ports)) > 200, "two that ask at once get different ones"


NOBODY = """
import time
from reshard.refit import RefitGroup
began = time.monotonic()
try:
    RefitGroup.join("127.0.0.1:{port}", 1, 2, timeout=3)
except Exception as error:
    print(time.monotonic() - began, type(error).__name__, error)
"""


def test_without_a_member_0_one_sentence_comes_within_the_time_limit():
    done = subprocess.run(
        [sys.executable, "-c", NOBODY.format(port=free_port())], capture_output=True, text=True, timeout=300
    )
    seconds, kind, sentence = done.stdout.split(" ", 2)
    assert (
        float(seconds) < 20
        and kind == "ReshardError"
        and sentence.startswith("rank 1 found no member 0 at 127.0.0.1")
    )
    assert "frame #" not in done.stderr and "TCPStore" not in done.stderr, "torch's client prints its stack"


@pytest.fixture
def meeting():
    """The first of three members."""
    port = free_port()
    return port, RefitGroup.join(f"127.0.0.1:{port}", 0, 3, timeout=20)


def test_two_processes_of_one_rank_are_told_apart(meeting):
    port, _ = meeting
    held = RefitGroup.join(f"127.0.0.1:{port}", 1, 3, timeout=20)
    said = caught(lambda: RefitGroup.join(f"127.0.0.1:{port}", 1, 3, timeout=20))
    assert (
        held.rank == 1
        and said.startswith("rank 1 has joined at 127.0.0.1")
        and "give each process a rank of its own" in said
    )


def commit(members: RefitGroup) -> None:
    with members.transaction("a refit"):
        members.prepare()
        members.commit()


def test_members_that_have_closed_their_groups_meet_again_at_the_same_port_in_any_order():
    address = f"127.0.0.1:{free_port()}"
    join = partial(RefitGroup.join, address, size=3, timeout=20)
    before = [join(rank) for rank in range(3)]
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(commit, before))
        for one in before[1:]:
            one.close()
        early = [pool.submit(join, rank) for rank in (1, 2)]
        time.sleep(0.5)  # they have come, and the first has not left
        assert not any(one.done() for one in early)
        before[0].close()
        again = [join(0), *(one.result() for one in early)]
        list(pool.map(commit, again))
    assert caught(lambda: commit(before[0])) == "this group was closed: meet again"
    # Who does not close it is told what to do.
    assert "RefitGroup.close of one that met there gives it back" in caught(lambda: join(0))
    again[1].close()
    assert "has left, and rank 0 still serves that meeting: call close() on rank 0's group" in caught(
        lambda: join(1)
    )


def test_members_that_count_differently_are_refused(meeting):
    port, _ = meeting
    assert "rank 1 expects 2 members at 127.0.0.1" in caught(
        lambda: RefitGroup.join(f"127.0.0.1:{port}", 1, 2, timeout=20)
    )


def test_members_meet_while_other_threads_open_and_close_connections():
    over = threading.Event()

    def others() -> None:
        while not over.is_set():
            for end in socket.socketpair():
                end.close()

    threads = [threading.Thread(target=others, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        said = [
            caught(lambda: RefitGroup.join(f"127.0.0.1:{free_port()}", 0, 1, timeout=20)) for _ in range(30)
        ]
    finally:
        over.set()
    assert set(said) == {"no error"}


@pytest.mark.parametrize(("given", "sentence"), [
    ({"source": [1]}, "source is a list: give reshard.trainers.MegatronModel(models)"),
    ({"destination": 1}, "destination is a int: give reshard.engines.VllmModel.from_llm(llm)"),
    ({"bucket_bytes": "1GB"}, "bucket_bytes is '1GB'; it is a whole number between 1 and "),
    ({"backend": "nvlink"}, "backend 'nvlink' is not one of auto, cuda_ipc, staged, nixl, nccl"),
    ({"destination": lambda: VllmModel.from_llm(None)}, "this LLM's workers run in other processes"),
])  # fmt: skip
def test_a_mistake_at_connect_is_told_to_all_at_once(given, sentence):
    port, said = free_port(), {}

    def join(rank: int) -> None:
        members, began = RefitGroup.join(f"127.0.0.1:{port}", rank, 2, timeout=60), time.monotonic()
        said[rank] = caught(lambda: connect(members, **(given if rank else {}))), time.monotonic() - began

    threads = [threading.Thread(target=join, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert sorted(said) == [0, 1], said
    assert (
        sentence in said[1][0]
        and said[0][0] in [f"{role}rank 1: {said[1][0]}" for role in ("", "trainer ", "inference ")]
        and max(seconds for _, seconds in said.values()) < 30
    )


@pytest.mark.parametrize(("rank", "size"), [("0", 2), (0, 1 << 40), (None, 2)])
def test_numbers_of_members_that_are_none_are_refused(rank, size):
    assert "is not a whole number" in caught(lambda: RefitGroup.join("127.0.0.1:1", rank, size))


FORKED = """
import os, sys
from reshard.refit import RefitGroup

def meet(port):
    members = RefitGroup.join(f"127.0.0.1:{port}", 0, 1, timeout=20)
    with members.transaction("connect"):
        members.prepare()
        members.commit()

meet(PORT)
pid = os.fork()
if not pid:
    meet(OTHER)
    print("has met", flush=True)
    sys.exit(0)
print(os.waitpid(pid, 0)[1])
"""


def test_a_forked_process_leaves_the_meetings_of_the_one_that_forked_it_alone():
    code = FORKED.replace("PORT", str(free_port())).replace("OTHER", str(free_port()))
    assert subprocess.check_output([sys.executable, "-c", code], text=True, timeout=120) == "has met\n0\n"


def of_one_meeting() -> None:
    """Two members meet, take part in a transaction, and are no more."""
    address, together = f"127.0.0.1:{free_port()}", threading.Barrier(2)

    def member(rank: int) -> None:
        members = RefitGroup.join(address, rank, 2, timeout=60)
        with members.transaction("connect"):
            members.prepare()
            members.commit()
        together.wait()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(member, range(2)))


def open_files(at_most: int = 0) -> int:
    """How many this process has, once a store's thread has seen who has left: the fewest within half a second, or
    until there are no more than `at_most`, which a busy machine may take longer for."""
    found, began = [len(os.listdir("/proc/self/fd"))], time.monotonic()
    while len(found) < 10 or (min(found) > at_most > 0 and time.monotonic() - began < 20):
        time.sleep(0.05)
        found.append(len(os.listdir("/proc/self/fd")))
    return min(found)


def test_nothing_stays_open_of_meetings_that_are_over_and_who_comes_late_to_one_that_failed_is_told():
    before = open_files()
    address = f"127.0.0.1:{free_port()}"
    first = RefitGroup.join(address, 0, 2, timeout=0.2)
    with pytest.raises(ReshardError, match="rank 1 has not joined"), first.transaction("connect"):
        first.prepare()
    del first
    of_one_meeting()
    two = open_files()
    for _ in range(5):
        of_one_meeting()
    assert before < open_files(at_most=two) <= two
    late = RefitGroup.join(address, 1, 2, timeout=60)
    with (
        pytest.raises(ReshardError, match="rank 0: rank 1 has not joined within 0.2 s"),
        late.transaction("connect"),
    ):
        late.prepare()
    del late
    of_one_meeting()
    assert open_files(at_most=two - 1) < two


STOPPED = """
import sys, time
from reshard.refit import RefitGroup
rank = int(sys.argv[1])
print("here", flush=True)
sys.stdin.readline()
members = RefitGroup.join("127.0.0.1:{port}", rank, 2, timeout=5)
with members.transaction("connect"):
    members.prepare()
    members.commit()
print("connected", flush=True)
sys.stdin.readline()
began = time.monotonic()
for what in ("refit 1", "refit 2"):
    try:
        with members.transaction(what):
            members.prepare()
    except Exception as error:
        print(round(time.monotonic() - began, 1), type(error).__name__, error, flush=True)
"""


def test_a_member_0_that_is_stopped_is_named_within_the_time_limit():
    code = STOPPED.format(port=free_port())
    both = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(rank)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    try:
        assert [process.stdout.readline() for process in both] == ["here\n"] * 2
        for process in both:
            print(file=process.stdin, flush=True)
        assert [process.stdout.readline() for process in both] == ["connected\n"] * 2
        both[0].send_signal(signal.SIGSTOP)
        first, second = both[1].communicate("\n", timeout=60)[0].splitlines()
    finally:
        for process in both:
            process.kill()
            process.wait()
    seconds, kind, sentence = first.split(" ", 2)
    assert (
        float(seconds) < 30 and kind == "HubLostError" and sentence.startswith("rank 0, which serves the hub")
    )
    assert second.endswith("meet again to go on")


@pytest.mark.parametrize("timeout", [0, -1, "60", float("inf"), True, None])
def test_a_time_limit_that_is_none_is_refused(timeout):
    for rank in (0, 1):
        said = caught(lambda rank=rank: RefitGroup.join("127.0.0.1:1", rank, 2, timeout=timeout))
        assert said == f"timeout is {timeout!r}; it is a number of seconds above 0"
