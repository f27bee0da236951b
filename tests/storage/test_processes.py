"""Conversions by several processes, of which one is slow, dies, or finds other bytes."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import psutil
import pytest

from reshard import MegatronLayout, ReshardError, hf_to_mcore
from reshard.comm import team
from tests.starting.ranks import free_port
from tests.starting.warm import python_of_trainer
from tests.tools.disk import (
    DIRECTIONS,
    beside,
    cli,
    command,
    environment,
    flip,
    journal,
    tree,
    until,
)


@pytest.mark.parametrize("victim", [0, 2])
def test_processes_wait_for_a_slow_one_and_end_at_once_with_a_dead_one(victim, whole, tmp_path):
    arguments = [
        "hf-to-mcore",
        whole["hf-to-mcore"][0],
        tmp_path / "out",
        *DIRECTIONS["hf-to-mcore"],
        "--resume",
    ]
    held, others = tmp_path / "held", {0, 1, 2} - {victim}

    @contextlib.contextmanager
    def stopped(log, write):
        """Three processes, one of which is stopped at this write of its work, while the others have
        come to the end of theirs."""
        with started(arguments, 3, tmp_path / log, {victim: (f"pwrite:*:{write}:hold",)}, held) as runs:
            until(held.exists, *runs)
            runs[victim].send_signal(signal.SIGSTOP)
            done, before = [0, 0], None
            while done != before or not all(done):
                time.sleep(0.5)
                assert all(run.poll() is None for run in runs), (tmp_path / log).read_text()
                before, done = (
                    done,
                    [sum(line[0] == "done" for line in journal(tmp_path, other)) for other in others],
                )
            yield runs

    with stopped("dead", 100) as runs:
        runs[victim].kill()
        codes, said = [run.wait(60) for run in runs], (tmp_path / "dead").read_text()
    assert codes.pop(victim) == -signal.SIGKILL and codes == [1, 1]
    assert (
        said.count(f"process {victim} of 3 was ended; run again with --resume") == 2
        and "Traceback" not in said
    )
    held.unlink()
    # The first of those that are left: other threads have gone on until the process was stopped.
    with stopped("slow", 1) as runs:
        held.unlink()
        runs[victim].send_signal(signal.SIGCONT)
        assert [run.wait(300) for run in runs] == [0, 0, 0], (tmp_path / "slow").read_text()
    assert tree(tmp_path / "out") == whole["hf-to-mcore"][1] and beside(tmp_path) == ["dead", "out", "slow"]


def test_a_process_whose_others_were_never_started_says_for_whom_it_waits(monkeypatch, caplog):
    variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(team, "NOTICE_SECONDS", 0.1)
    monkeypatch.setattr(team, "JOIN_SECONDS", 1.0)
    alone = "unset RANK and WORLD_SIZE in the environment for a single process"
    with pytest.raises(ReshardError, match=f"process 0 of 2 cannot reach the others: .*; {alone}$"):
        team.Team.from_environment()
    assert caplog.messages == [f"process 0 of 2 waits for the others to start; {alone}"]


def together(arguments, size, log, faults=None):
    """Run a command in processes of their own, as torchrun starts them; the exit codes."""
    with started(arguments, size, log, faults) as runs:
        return [run.wait(300) for run in runs]


@contextlib.contextmanager
def started(arguments, size, log, faults=None, held=None):
    """The processes of such a run, some of which meet faults; the others are forked from a server
    that has torch."""
    faults = faults or {}
    shared = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with open(log, "ab") as out:
        runs = [
            subprocess.Popen(
                command(*arguments, python=sys.executable if faults.get(rank) else python_of_trainer()),
                stdout=out,
                stderr=out,
                env=environment(*faults.get(rank, ()), held=held) | shared | {"RANK": str(rank)},
            )
            for rank in range(size)
        ]
        try:
            yield runs
        finally:
            for run in runs:
                run.kill()
                run.wait()


def test_bytes_that_changed_in_one_process_s_file_are_written_again_by_all_that_share_them(whole, tmp_path):
    source, expected = whole["hf-to-mcore"]
    arguments = ["hf-to-mcore", source, tmp_path / "out", *DIRECTIONS["hf-to-mcore"], "--resume"]
    codes = together(arguments, 2, tmp_path / "log", {0: ("sync:reshard.json:1:KILL",)})
    assert codes == [-signal.SIGKILL, 1]
    path = tmp_path / ".out.reshard-partial" / "tree" / "release" / "__1_0.distcp"  # the second process's
    flip(path, path.stat().st_size // 2)
    assert together([*arguments, "--json"], 2, tmp_path / "said") == [0, 0], (tmp_path / "said").read_text()
    assert tree(tmp_path / "out") == expected and beside(tmp_path) == ["log", "out", "said"]
    assert json.loads((tmp_path / "said").read_text())["resumed_tensors"] > 80  # of the first process's 87


def test_a_process_that_is_lost_after_the_first_has_published_makes_no_failure_of_it(whole, tmp_path):
    arguments = ["hf-to-mcore", whole["hf-to-mcore"][0], tmp_path / "out", *DIRECTIONS["hf-to-mcore"]]
    held = tmp_path / "held"
    with started(
        arguments, 3, tmp_path / "log", {0: (f"sync:/{tmp_path.name}$:1:hold",)}, held
    ) as runs:  # right after the rename
        until(held.exists, *runs)
        assert (tmp_path / "out").exists()
        runs[1].kill()
        runs[1].wait(60)
        held.unlink()
        assert [run.wait(60) for run in runs] == [0, -signal.SIGKILL, 0], (tmp_path / "log").read_text()
    assert tree(tmp_path / "out") == whole["hf-to-mcore"][1] and beside(tmp_path) == ["log", "out"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_resume_of_a_run_that_was_killed_after_it_had_published_says_that_it_is_done(
    overwrite, whole, tmp_path
):
    arguments = [
        "hf-to-mcore",
        whole["hf-to-mcore"][0],
        tmp_path / "out",
        *DIRECTIONS["hf-to-mcore"],
        *(["--overwrite"] if overwrite else []),
    ]
    if overwrite:
        hf_to_mcore(whole["hf-to-mcore"][0], tmp_path / "out", MegatronLayout(pp=2))
    done = cli(*arguments, faults=("renameat2:*:1:DIE" if overwrite else "rename:/out$:1:DIE",))
    assert done.returncode == -signal.SIGKILL and tree(tmp_path / "out") == whole["hf-to-mcore"][1]
    inode = (tmp_path / "out").stat().st_ino
    done = cli(*arguments, "--dtype", "fp32", "--resume") if not overwrite else None
    assert done is None or (done.returncode == 1 and "exists; pass --overwrite" in done.stderr)
    if not overwrite:
        assert beside(tmp_path) == ["out"]
        return
    done = cli(*arguments, "--resume")
    assert done.returncode == 0 and "was complete: an earlier run had published it" in done.stderr
    assert (tmp_path / "out").stat().st_ino == inode and tree(tmp_path / "out") == whole["hf-to-mcore"][1]
    assert beside(tmp_path) == ["out"]
    done = cli("hf-to-mcore", *arguments[1:3], *DIRECTIONS["hf-to-mcore"], "--resume")
    assert done.returncode == 1 and "reshard check says whether it is whole" in done.stderr


@pytest.mark.parametrize(("size", "rank"), [("x", "0"), ("3", "3"), ("3", "-1")])
def test_an_environment_that_makes_no_sense_is_one_sentence(size, rank, whole, tmp_path):
    variables = {"WORLD_SIZE": size, "RANK": rank}
    done = cli("hf-to-mcore", whole["hf-to-mcore"][0], tmp_path / "out", env=os.environ | variables)
    assert done.returncode == 1 and re.search("WORLD_SIZE|RANK", done.stderr) and done.stderr.count("\n") == 1
    assert beside(tmp_path) == []


LATE = """
import sys, time
from reshard.comm import group, team
plain = group.connect
group.connect = lambda *where: (time.sleep(float(sys.argv[1])), plain(*where))[1]
with team.Team.from_environment() as one:
    print(one.exchange(one.process), flush=True)
"""


@contextlib.contextmanager
def strangers_at(process, but: int):
    """Connections to where a process listens, but for one port: silent ones, one that says a byte
    now and then, and garbage."""
    over, connected = threading.Event(), []

    def keep_coming() -> None:
        while not over.wait(0.05):
            try:
                listening = [one.laddr for one in process.net_connections("tcp") if one.status == "LISTEN"]
            except psutil.Error:  # it has ended
                return
            for host, port in ((at.ip, at.port) for at in listening if at.port != but):
                with contextlib.suppress(OSError):
                    if len(connected) < 12:
                        connected.append(socket.create_connection((host, port), timeout=5))
                        connected[-1].sendall((b"", b"\0", os.urandom(4096))[len(connected) % 3])
            for one in connected[1::3]:
                with contextlib.suppress(OSError):
                    one.sendall(b"-")

    thread = threading.Thread(target=keep_coming)
    thread.start()
    try:
        yield connected
    finally:
        over.set()
        thread.join()
        for one in connected:
            one.close()


def test_strangers_at_the_first_process_hold_up_nobody():
    port = free_port()
    shared = os.environ | {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    began = time.monotonic()
    runs = [
        subprocess.Popen(
            [python, "-c", LATE, str(2 * rank)],
            env=shared | {"RANK": str(rank)},
            stdout=-1,
            stderr=-1,
            text=True,
        )
        for rank, python in enumerate([sys.executable, python_of_trainer(), python_of_trainer()])
    ]
    with strangers_at(psutil.Process(runs[0].pid), but=port) as connected:
        said = [run.communicate(timeout=200) for run in runs]
    assert [out for out, _ in said] == ["[0, 1, 2]\n"] * 3, said
    assert len(connected) == 12, "the strangers came in time"
    assert time.monotonic() - began < 60, "of 10 seconds for each of them"


def test_processes_that_do_not_know_the_secret_are_not_let_in():
    shared = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    secrets = ["the secret of the first process", "another secret than that one"]
    runs = [
        subprocess.Popen(
            [python_of_trainer(), "-c", LATE, "0"],
            env=shared | {"RANK": str(rank), "RESHARD_SECRET": secret},
            stderr=-1,
            text=True,
        )
        for rank, secret in enumerate(secrets)
    ]
    said = runs[1].communicate(timeout=120)[1]
    runs[0].kill()
    runs[0].communicate()
    assert "cannot reach the others: rank 1 is not let in at 127.0.0.1" in said and "RESHARD_SECRET" in said
    assert not any(secret in said for secret in secrets)
