"""Transactions of a group's members: their outcome is the same for all, and whoever is late, gone
or silent is named."""

import subprocess
import sys
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from reshard import ReshardError
from reshard.comm.client import PeerMemoryError
from reshard.comm.protocol import PREPARE
from reshard.refit import RefitGroup
from reshard.refit.copying.copies import wait_for_device
from tests.starting.ranks import caught, free_port

pytestmark = pytest.mark.slow


def test_after_a_failed_transaction_the_version_is_one_more_than_the_last_good_one():
    members = RefitGroup.join(f"127.0.0.1:{free_port()}", 0, 1, timeout=20)
    for version, agreed, fails in (
        (4, 4, False),
        (None, 5, True),
        (None, 5, False),
        (None, 6, False),
        (9, 9, True),
    ):
        said = []

        def attempt(version=version, fails=fails, said=said) -> None:
            with members.transaction("a refit"):
                said.append(members.prepare(version))
                if fails:
                    raise ReshardError("no luck")
                members.commit()

        assert caught(attempt) == ("no luck" if fails else "no error") and said == [agreed]
    with members.transaction("release"):
        members.commit()
    assert members.version == 6, "what has no version leaves it, also after a refit that failed"


class Transactions:
    """Three members in threads, one of whom is late, or fails, in the first of two transactions;
    what each says of both."""

    def __init__(self, who: int, phase: str) -> None:
        self.who, self.phase = who, phase
        self.port, self.said = free_port(), {rank: [] for rank in range(3)}
        self.others_know, self.all = threading.Semaphore(0), threading.Barrier(3)
        self.failed: list[str] = []
        threads = [threading.Thread(target=self.run, args=(rank,), daemon=True) for rank in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert not self.failed, self.failed[0]
        assert not any(thread.is_alive() for thread in threads), self.said

    def run(self, rank: int) -> None:
        try:
            self.take_part(rank)
        except BaseException:
            # The first is the cause; the others, who wait for this member, are told to wait no longer.
            self.failed.append(f"member {rank}:\n{traceback.format_exc()}")
            self.all.abort()
            self.others_know.release(2)

    def take_part(self, rank: int) -> None:
        members = RefitGroup.join(f"127.0.0.1:{self.port}", rank, 3, timeout=60)
        self.all.wait(60)
        members.timeout = 4
        for odd in (rank == self.who, False):
            if odd and self.phase == "before":
                self.wait_for_others()
            self.said[rank].append(caught(lambda odd=odd: self.take_part_once(members, odd)))
            self.others_know.release()
            self.all.wait(60)

    def wait_for_others(self) -> None:
        for _ in range(2):
            assert self.others_know.acquire(timeout=60), "the others wait longer than their limit"

    def take_part_once(self, members: RefitGroup, odd: bool) -> None:
        with members.transaction("a refit"):
            members.prepare()
            if odd and self.phase == "between":
                self.wait_for_others()
            if odd and self.phase == "fails":
                raise ReshardError("no luck")
            members.commit()


PHASES = [(phase, who) for phase in ("before", "between", "fails") for who in range(3)]


@pytest.fixture(scope="module")
def transactions():
    """All of them, which mostly wait, at once."""
    with ThreadPoolExecutor(len(PHASES)) as pool:
        yield {(phase, who): pool.submit(Transactions, who, phase) for phase, who in PHASES}


@pytest.mark.parametrize(("phase", "who"), PHASES)
def test_all_members_agree_on_the_outcome_of_every_transaction(phase, who, transactions):
    """Whoever is late or fails, before the first byte or after: for all it failed, and the next one
    succeeds for all."""
    for first, second in transactions[phase, who].result().said.values():
        assert ("no luck" if phase == "fails" else f"rank {who} did not") in first
        assert second == "no error"


def in_threads(*members) -> list[str]:
    """What each of these says, which do what they do at the same time."""
    with ThreadPoolExecutor(len(members)) as pool:
        return list(pool.map(caught, members))


def met(size: int, but: int = 0, timeout: float = 60) -> list[RefitGroup]:
    """Members that have joined, the last ones left out."""
    address = f"127.0.0.1:{free_port()}"
    return [RefitGroup.join(address, rank, size, timeout=timeout) for rank in range(size - but)]


def test_all_say_the_same_of_a_member_that_does_not_come():
    members = met(24, but=1)
    members[-1].timeout = 0.5  # it comes last, so that its limit is the first that is over

    def last() -> None:
        deadline = time.monotonic() + 50
        while members_that_came(members[0]) < 22 and time.monotonic() < deadline:
            time.sleep(0.01)
        waits(members[-1], "prepare")

    said = in_threads(*(partial(waits, one, "prepare") for one in members[:-1]), last)
    sentence = "rank 23 has not joined within 0.5 s: dead, stalled or not started"
    assert all(one.endswith(sentence) for one in said), said


def members_that_came(first: RefitGroup) -> int:
    """How many members have prepared the first transaction, by the hub of the first one."""
    transaction = first.hub.transactions.get(1)
    return len(transaction.arrived[PREPARE]) if transaction is not None else 0


def test_who_only_waits_for_another_is_not_blamed():
    members = met(3)
    members[0].timeout = 1

    def reads(rank: int, other: int) -> None:
        with members[rank].transaction("a refit"):
            members[rank].read("parts", other)

    first, second = in_threads(lambda: reads(0, 1), lambda: reads(1, 2))
    sentence = (
        "rank 2 is silent, and rank 1, which waits for it, did not reach 'parts' within 1 s: dead, stalled "
        "or not started"
    )
    assert (first, second) == (sentence, f"rank 0: {sentence}")


def test_who_cannot_map_what_another_has_freed_says_why_that_one_gave_up():
    members = met(2)
    given_up = threading.Event()

    def gives_up() -> None:
        with members[0].transaction("a refit"):
            raise ReshardError("no luck")

    def maps() -> None:
        with members[1].transaction("a refit"):
            assert given_up.wait(60)
            raise PeerMemoryError("the memory of rank 0 is gone")

    _, second = in_threads(lambda: (caught(gives_up), given_up.set()), maps)
    assert second == "rank 0: no luck"
    given_up.set()
    # Where nobody was first it is said as it is.
    members = met(2)
    (alone,) = in_threads(maps)
    assert alone == "the memory of rank 0 is gone"


def test_who_is_in_a_long_call_and_says_so_is_not_blamed():
    members = met(3)
    members[0].timeout = 4

    def reads() -> None:
        with members[0].transaction("a refit"):
            members[0].read("parts", 1)

    def exchanges() -> None:
        with members[1].transaction("a refit"), members[1].reporting_alive():
            time.sleep(3)
            members[1].read("parts", 2)

    first, second = in_threads(reads, exchanges)
    assert "rank 2 is silent, and rank 1, which waits for it, did not reach" in first, first
    assert second == f"rank 0: {first}"


def test_who_waits_for_a_gpu_learns_at_once_that_another_has_failed():
    """The GPU waits in a kernel that a lost partner never lets go."""
    members, gpu = met(2), torch.device("cuda")

    def waits() -> None:
        with members[0].transaction("a refit"):
            wait_for_device(
                gpu, 60, members[0].attend, cast(torch.cuda.Event, SimpleNamespace(query=lambda: False))
            )

    def fails() -> None:
        with members[1].transaction("a refit"):
            raise ReshardError("a layer is broken")

    began = time.monotonic()
    first, second = in_threads(waits, fails)
    assert first == f"rank 1: {second}" and time.monotonic() < began + 30


def test_a_call_that_is_interrupted_as_it_begins_does_not_say_that_it_goes_on(monkeypatch):
    [member], plain = met(1), threading.Thread.start

    def start(thread) -> None:
        plain(thread)
        if thread.name == "reshard alive":
            raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(KeyboardInterrupt), member.reporting_alive():
        raise AssertionError("it has begun")
    assert not [one for one in threading.enumerate() if one.name == "reshard alive"]


DIES = """
import os, sys
from reshard.refit import RefitGroup
members = RefitGroup.join("127.0.0.1:{port}", 2, 3, timeout=60)
with members.transaction("a refit"):
    if {phase!r} in ("prepare", "commit"):
        members.gather("hello", b"")
    if {phase!r} == "commit":
        members.prepare()
    print("here", flush=True)
    sys.stdin.readline()
    os._exit(0)
"""


@pytest.mark.parametrize("phase", ["a message", "prepare", "commit"])
def test_a_member_whose_process_ends_is_named_at_once(phase):
    """Two members wait for a third, which dies; and the next refit says so before it begins."""
    port = free_port()
    members = [RefitGroup.join(f"127.0.0.1:{port}", rank, 3, timeout=60) for rank in range(2)]
    code = DIES.format(port=port, phase=phase)
    with (
        subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, text=True) as third,
        ThreadPoolExecutor(2) as pool,
    ):
        both = [pool.submit(caught, lambda one=one: waits(one, "a message")) for one in members]
        assert third.stdout.readline() == "here\n"
        assert not any(one.done() for one in both), "nobody is waited for in vain yet"
        third.stdin.close()
        third.wait(60)
        began = time.monotonic()
        said = [one.result() for one in both]
    gone = "rank 2 is gone: the process has ended, or has let go of this connection"
    assert said == [gone, gone] and time.monotonic() - began < 30, "of 60"
    assert in_threads(*(lambda one=one: waits(one, "prepare") for one in members)) == [gone, gone]
    assert time.monotonic() - began < 30


def waits(members: RefitGroup, phase: str) -> None:
    """Begin a transaction, of which a member does not come to this phase."""
    with members.transaction("a refit"):
        if phase == "a message":
            members.gather("hello", b"")
        members.prepare()
        members.commit()


@pytest.mark.parametrize("told", [False, True], ids=["watching", "told"])
@pytest.mark.parametrize("phase", ["a message", "prepare", "commit"])
def test_who_knows_that_a_process_is_gone_ends_the_transaction_for_all(phase, told):
    """Two members wait for a third, whose process is killed: the first looks at that process, or
    another one that is no member says it."""
    address, gone = f"127.0.0.1:{free_port()}", "the engine is gone"
    process = subprocess.Popen(["sleep", "100"])
    members = [RefitGroup.join(address, rank, 3, timeout=60) for rank in range(2 if phase != "commit" else 3)]
    said: dict[int, str] = {}

    def take_part(rank: int) -> None:
        look = (lambda: gone if process.poll() is not None else "") if rank == 0 and not told else str
        with members[rank].watching(look):
            said[rank] = caught(lambda: waits(members[rank], phase))

    threads = [threading.Thread(target=take_part, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    if phase == "commit":  # the third has come, and does not end
        members[2].transaction_number = 1
        members[2].prepare()
    time.sleep(1)
    assert not said, "nobody is waited for in vain yet"
    process.kill()
    process.wait()
    began = time.monotonic()
    if told:
        RefitGroup.abort(address, gone)
    for thread in threads:
        thread.join(90)
    assert time.monotonic() - began < 30, "of 60"
    assert sorted(said) == [0, 1] and all(gone in sentence for sentence in said.values())


def test_an_outcome_that_came_while_a_process_was_held_up_is_the_same_for_it():
    """As one that is stopped, and goes on: all others have committed, and so has it."""
    members, committed = met(2), threading.Event()
    answer_to = members[0]._answer_to
    members[0]._answer_to = lambda number, _, watches: answer_to(number, time.monotonic() + 0.2, watches)

    def held_up() -> str:
        assert committed.wait(60)
        time.sleep(0.2)
        return ""

    def commit(rank: int) -> None:
        with members[rank].transaction("a refit"), members[rank].watching(str if rank else held_up):
            time.sleep(0.15 * rank)
            members[rank].commit()
        committed.set()

    assert in_threads(partial(commit, 0), partial(commit, 1)) == ["no error"] * 2


def test_a_transaction_that_nobody_ends_says_who_is_gone_as_long_as_the_others_live():
    members = met(3)
    for one in members:
        one.names = {rank: f"rank {rank} of the rollout" for rank in range(3)}
        one.begin("syncs")
        one.post("seated")
    members[0].post("meet/1", b"there")
    assert members[2].read("meet/1", 0) == b"there" and [one.failure() for one in members] == ["", "", ""]
    del members[2], one
    deadline = time.monotonic() + 20
    while not all(one.failure() for one in members) and time.monotonic() < deadline:
        time.sleep(0.01)
    gone = "rank 2 of the rollout is gone: the process has ended, or has let go of this connection"
    assert [one.failure() for one in members] == [gone, gone]
    assert caught(lambda: members[1].read("meet/2", 0)) == gone


def test_who_has_gathered_has_it_also_where_another_fails_right_afterward():
    port, said = free_port(), {}

    def run(rank: int) -> None:
        group = RefitGroup.join(f"127.0.0.1:{port}", rank, 2, timeout=20)
        group.begin("a save")
        if rank:
            send = group.channel.send

            def send_late(*message: object) -> None:
                send(*message)
                time.sleep(0.3)

            group.channel.send = send_late  # what it sends next comes after the other has failed
        said[rank] = group.gather("sizes", str(rank).encode())
        if rank:
            said["next"] = caught(lambda: group.gather("names", b""))
        else:
            group.fail(ReshardError("the disk is full"))

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert said[0] == said[1] == [b"0", b"1"]
    assert said["next"].endswith("the disk is full")


def test_a_call_is_for_the_transaction_that_failed_before_it_came_unless_it_failed_for_that():
    """Each member calls as often as the others: one that is slower than another's error is told of that error, also
    where the other has called again already."""
    members, failed = met(2), threading.Event()

    def fails_and_calls_again() -> list[str]:
        def fail() -> None:
            with members[0].transaction("a refit"):
                raise ReshardError("no luck")

        said = [caught(fail)]
        threading.Timer(0.3, failed.set).start()
        return [*said, caught(lambda: waits(members[0], "prepare"))]

    def comes_later() -> list[str]:
        assert failed.wait(60)
        return [caught(lambda: waits(members[1], "prepare")) for _ in range(2)]

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.submit(fails_and_calls_again), pool.submit(comes_later)
        assert (first.result(), second.result()) == (["no luck", "no error"], ["rank 0: no luck", "no error"])
