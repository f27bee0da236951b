"""How members meet, and what is said where they cannot."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor

import pytest

from reshard import ReshardError
from reshard.core.deprecated import renamed_options, renamed_variable
from reshard.engines import VllmModel
from reshard.refit import RefitGroup, connect
from reshard.refit.routes import check_backend
from tests.ranks import caught, free_port


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
    RefitGroup.join(f"127.0.0.1:{port}", 1, 3, timeout=20)
    said = caught(lambda: RefitGroup.join(f"127.0.0.1:{port}", 1, 3, timeout=20))
    assert said.startswith("rank 1 has joined at 127.0.0.1") and "give each process a rank of its own" in said


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


@pytest.mark.parametrize(("old", "new"), [
    ({"executor": "peer"}, {"backend": "cuda_ipc"}),
    ({"executor": "buckets", "release": True}, {"backend": "nccl", "keep_mapped": False}),
    ({"release": False}, {"keep_mapped": True}),
    ({"exact": True, "backend": "staged"}, {"match_vllm_rounding": True, "backend": "staged"}),
])  # fmt: skip
def test_old_names_of_options_and_backends_are_warned_of_and_work(old, new):
    with pytest.warns(DeprecationWarning, match="the old name goes with the next release"):
        options = renamed_options(old)
        assert {**options, "backend": check_backend(options.get("backend", "auto"))} == {
            "backend": "auto"
        } | new


def test_connect_and_the_environment_take_old_names_of_options(monkeypatch):
    members = RefitGroup.join(f"127.0.0.1:{free_port()}", 0, 1, timeout=20)
    with pytest.warns(DeprecationWarning, match="executor= is now backend="):
        sentence = caught(lambda: connect(members, executor="nvlink"))
    assert "backend 'nvlink' is not one of auto, cuda_ipc, staged, nccl" in sentence
    with pytest.raises(TypeError, match="executor is now backend: give backend only"):
        connect(members, executor="peer", backend="cuda_ipc")
    monkeypatch.setenv("RESHARD_EXECUTOR", "staged")
    with pytest.warns(DeprecationWarning, match="RESHARD_EXECUTOR is now RESHARD_BACKEND"):
        assert renamed_variable("RESHARD_EXECUTOR", "RESHARD_BACKEND", "auto") == "staged"


@pytest.mark.parametrize(("given", "sentence"), [
    ({"source": [1]}, "source is a list: give reshard.trainers.MegatronModel(models)"),
    ({"destination": 1}, "destination is a int: give reshard.engines.VllmModel.from_llm(llm)"),
    ({"bucket_bytes": "1GB"}, "bucket_bytes is '1GB'; it is a whole number between 1 and "),
    ({"backend": "nvlink"}, "backend 'nvlink' is not one of auto, cuda_ipc, staged, nccl"),
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


def test_after_a_failed_turn_the_version_is_one_more_than_the_last_good_one():
    members = RefitGroup.join(f"127.0.0.1:{free_port()}", 0, 1, timeout=20)
    for version, agreed, fails in (
        (4, 4, False),
        (None, 5, True),
        (None, 5, False),
        (None, 6, False),
        (9, 9, True),
    ):
        said = []

        def turn(version=version, fails=fails, said=said) -> None:
            with members.transaction("a refit"):
                said.append(members.prepare(version))
                if fails:
                    raise ReshardError("no luck")
                members.commit()

        assert caught(turn) == ("no luck" if fails else "no error") and said == [agreed]
    with members.transaction("release"):
        members.commit()
    assert members.version == 6, "what has no version leaves it, also after a refit that failed"


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
    """Two members meet, take a turn, and are no more."""
    address, together = f"127.0.0.1:{free_port()}", threading.Barrier(2)

    def member(rank: int) -> None:
        members = RefitGroup.join(address, rank, 2, timeout=60)
        with members.transaction("connect"):
            members.prepare()
            members.commit()
        together.wait()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(member, range(2)))


def open_files() -> int:
    """How many this process has, once a store's thread has seen who has left: the fewest within half a second."""
    found = []
    for _ in range(10):
        time.sleep(0.05)
        found.append(len(os.listdir("/proc/self/fd")))
    return min(found)


def test_nothing_stays_open_of_meetings_that_are_over_and_who_comes_late_to_one_that_failed_is_told():
    before = open_files()
    address = f"127.0.0.1:{free_port()}"
    first = RefitGroup.join(address, 0, 2, timeout=0.2)
    with pytest.raises(ReshardError, match="rank 1 did not come to connect"), first.transaction("connect"):
        first.prepare()
    del first
    of_one_meeting()
    two = open_files()
    for _ in range(5):
        of_one_meeting()
    assert before < open_files() <= two
    late = RefitGroup.join(address, 1, 2, timeout=60)
    with (
        pytest.raises(ReshardError, match="rank 0: rank 1 did not come to connect within 0.2 s"),
        late.transaction("connect"),
    ):
        late.prepare()
    del late
    of_one_meeting()
    assert open_files() < two


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
        float(seconds) < 30 and kind == "ReshardError" and sentence.startswith("rank 0, which serves the hub")
    )
    assert second.endswith("meet again to go on")


class Turns:
    """Three members in threads, one of whom is late, or fails, in the first of two turns; what each says of both."""

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
            self.said[rank].append(caught(lambda odd=odd: self.turn(members, odd)))
            self.others_know.release()
            self.all.wait(60)

    def wait_for_others(self) -> None:
        for _ in range(2):
            assert self.others_know.acquire(timeout=60), "the others wait longer than their limit"

    def turn(self, members: RefitGroup, odd: bool) -> None:
        with members.transaction("a refit"):
            members.prepare()
            if odd and self.phase == "between":
                self.wait_for_others()
            if odd and self.phase == "fails":
                raise ReshardError("no luck")
            members.commit()


PHASES = [(phase, who) for phase in ("before", "between", "fails") for who in range(3)]


@pytest.fixture(scope="module")
def turns():
    """All of them, which mostly wait, at once."""
    with ThreadPoolExecutor(len(PHASES)) as pool:
        yield {(phase, who): pool.submit(Turns, who, phase) for phase, who in PHASES}


@pytest.mark.parametrize(("phase", "who"), PHASES)
def test_all_members_agree_on_how_every_turn_ended(phase, who, turns):
    """Whoever is late or fails, before the first byte or after: for all it failed, and the next turn is whole for all."""
    for first, second in turns[phase, who].result().said.values():
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
    for one in members:
        one.timeout = 0.5
    said = in_threads(*(lambda one=one: waits(one, "go") for one in members))
    sentence = "rank 23 did not come to a refit within 0.5 s: dead, stalled or not started"
    assert all(one.endswith(sentence) for one in said), said


def test_who_only_waits_for_another_is_not_blamed():
    members = met(3)
    members[0].timeout = 1

    def reads(rank: int, other: int) -> None:
        with members[rank].transaction("a refit"):
            members[rank].read("parts", other)

    first, second = in_threads(lambda: reads(0, 1), lambda: reads(1, 2))
    sentence = "rank 2 is silent, and rank 1, which waits for it, did not reach 'parts' within 1 s: dead, stalled or not started"
    assert (first, second) == (sentence, f"rank 0: {sentence}")


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


DIES = """
import os, sys
from reshard.refit import RefitGroup
members = RefitGroup.join("127.0.0.1:{port}", 2, 3, timeout=60)
with members.transaction("a refit"):
    if {phase!r} in ("go", "done"):
        members.gather("hello", b"")
    if {phase!r} == "done":
        members.prepare()
    print("here", flush=True)
    sys.stdin.readline()
    os._exit(0)
"""


@pytest.mark.parametrize("phase", ["a message", "go", "done"])
def test_a_member_whose_process_ends_is_named_at_once(phase):
    """Two members wait for a third, which dies; and the next refit says so before it begins."""
    port = free_port()
    members = [RefitGroup.join(f"127.0.0.1:{port}", rank, 3, timeout=60) for rank in range(2)]
    code = DIES.format(port=port, phase=phase)
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, text=True) as third, ThreadPoolExecutor(2) as pool:  # fmt: skip
        both = [pool.submit(caught, lambda one=one: waits(one, "a message")) for one in members]
        assert third.stdout.readline() == "here\n"
        assert not any(one.done() for one in both), "nobody is waited for in vain yet"
        third.stdin.close()
        third.wait(60)
        began = time.monotonic()
        said = [one.result() for one in both]
    gone = "rank 2 is gone: the process has ended, or has let go of this connection"
    assert said == [gone, gone] and time.monotonic() - began < 5
    assert in_threads(*(lambda one=one: waits(one, "go") for one in members)) == [gone, gone]
    assert time.monotonic() - began < 5


def waits(members: RefitGroup, phase: str) -> None:
    """One turn, of which a member does not come to this phase."""
    with members.transaction("a refit"):
        if phase == "a message":
            members.gather("hello", b"")
        members.prepare()
        members.commit()


@pytest.mark.parametrize("told", [False, True], ids=["watching", "told"])
@pytest.mark.parametrize("phase", ["a message", "go", "done"])
def test_who_knows_that_a_process_is_gone_ends_the_turn_for_all(phase, told):
    """Two members wait for a third, whose process is killed: the first looks at that process, or another one that is no member says it."""
    address, gone = f"127.0.0.1:{free_port()}", "the engine is gone"
    process = subprocess.Popen(["sleep", "100"])
    members = [RefitGroup.join(address, rank, 3, timeout=60) for rank in range(2 if phase != "done" else 3)]
    said: dict[int, str] = {}

    def take_part(rank: int) -> None:
        look = (lambda: gone if process.poll() is not None else "") if rank == 0 and not told else str
        with members[rank].watching(look):
            said[rank] = caught(lambda: waits(members[rank], phase))

    threads = [threading.Thread(target=take_part, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    if phase == "done":  # the third has come, and does not end
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
    assert time.monotonic() - began < 10, "of 60"
    assert sorted(said) == [0, 1] and all(gone in sentence for sentence in said.values())


@pytest.mark.parametrize("timeout", [0, -1, "60", float("inf"), True, None])
def test_a_time_limit_that_is_none_is_refused(timeout):
    for rank in (0, 1):
        said = caught(lambda rank=rank: RefitGroup.join("127.0.0.1:1", rank, 2, timeout=timeout))
        assert said == f"timeout is {timeout!r}; it is a number of seconds above 0"


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
