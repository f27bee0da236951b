"""Workers: who does what when, and what is left where one of them dies."""

import contextlib
import os
import pty
import signal
import subprocess
import sys

import psutil
import pytest
import torch

import reshard.storage.destinations.rank_files
from reshard import MegatronLayout, check, hf_to_mcore, mcore_to_hf
from reshard.core import system
from reshard.storage.run.workers import in_batches
from tests.tools.disk import cli, held_run, tree, until
from tests.tools.oracle import hf_tensors, megatron_tensors, same, stored_tensors

OPTIONS = ("--tp", "2", "--ep", "2")


@pytest.fixture(scope="module")
def source(checkpoint):
    return checkpoint("qwen3-moe", dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def expected(source, tmp_path_factory):
    """What threads make of the source: torch is loaded in this process."""
    out = tmp_path_factory.mktemp("expected") / "mcore"
    hf_to_mcore(source, out, MegatronLayout(tp=2, ep=2))
    return tree(out)


def send(number, *processes):
    """Send a signal to these processes, those of them that are still there."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def alive(process):
    """Whether a process still runs."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_any_number_of_workers_writes_the_same_bytes(source, expected, tmp_path):
    for count in (1, 2, 7):
        out = tmp_path / f"{count}"
        assert cli("hf-to-mcore", source, out, *OPTIONS, "--workers", count).returncode == 0
        assert tree(out) == expected


def test_a_killed_worker_is_one_sentence_and_the_run_goes_on_with_resume(source, expected, tmp_path):
    with held_run(source, tmp_path / "out", workers=2) as (process, _):
        children = psutil.Process(process.pid).children()
        assert len(children) >= 2
        send(signal.SIGKILL, *children)
        stderr = process.communicate(timeout=60)[1]
    assert process.returncode == 1 and "a worker of this command was ended (SIGKILL)" in stderr
    assert "Traceback" not in stderr and not (tmp_path / "out").exists()
    done = cli("hf-to-mcore", source, tmp_path / "out", *OPTIONS, "--resume")
    assert done.returncode == 0 and tree(tmp_path / "out") == expected


def test_workers_end_with_the_process_that_started_them(source, expected, tmp_path):
    with held_run(source, tmp_path / "out", workers=3) as (process, _):
        children = psutil.Process(process.pid).children()
        process.kill()
        process.wait()
        until(lambda: not any(map(alive, children)))
    # Nobody holds the lock any more.
    done = cli("hf-to-mcore", source, tmp_path / "out", *OPTIONS, "--resume")
    assert done.returncode == 0 and tree(tmp_path / "out") == expected


def test_ctrl_c_in_the_terminal_is_the_parents(source, tmp_path):
    with held_run(source, tmp_path / "out", workers=2) as (process, _):
        parent = psutil.Process(process.pid)
        send(signal.SIGINT, *parent.children(), parent)  # as a terminal does it
        stderr = process.communicate(timeout=60)[1]
    assert process.returncode == 130 and stderr.strip().endswith(
        "Interrupted: run the same command with --resume to continue."
    )


@pytest.mark.parametrize("threads", [False, True])
def test_what_nobody_expected_says_where_it_was_raised(threads):
    code = f"""
import sys
from reshard.storage.run.workers import can_fork, run_jobs
sys.modules.update(torch=sys) if {threads} else None  # as in a program that has loaded it
assert can_fork() != {threads}
def job(name):
    raise KeyError("the key")
try:
    run_jobs(dict.fromkeys("abc", 1), job, 2)
except RuntimeError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "KeyError: 'the key'" in done.stdout and "in job" in done.stdout, done.stderr


def test_a_result_comes_from_a_process_of_its_own_unless_there_are_threads():
    code = """
import os, threading
from reshard.storage.run.workers import run_jobs
assert os.getpid() not in run_jobs(dict.fromkeys("abc", 1 << 30), lambda name: os.getpid(), 2).values()
assert run_jobs({"a": 1}, lambda name: bytes(1 << 22), 1) == {"a": bytes(1 << 22)}  # more than a pipe holds
stop = threading.Event()
threading.Thread(target=stop.wait).start()
assert set(run_jobs(dict.fromkeys("abc", 1 << 30), lambda name: os.getpid(), 2).values()) == {os.getpid()}
stop.set()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("kill", [True, False], ids=["killed", "stopped by an error"])
def test_a_worker_that_ends_within_its_result_leaves_nobody_waiting_for_the_rest(kill, tmp_path):
    code = f"""
import os, signal, socket, time
from pathlib import Path
from reshard.core.errors import ReshardError
from reshard.storage.run.workers import run_jobs
half = Path("half")
def job(name):
    def send_half(self, data):
        self.send(data[:len(data) // 2])
        half.touch()
        if {kill}:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)
    if name == "b":
        socket.socket.sendall = send_half
        return bytes(20_000)
    time.sleep(600)
def check():
    if half.exists() and not {kill}:
        raise ReshardError("the disk is full")
try:
    run_jobs(dict.fromkeys("ab", 1 << 30), job, 2, check=check)
except ReshardError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=tmp_path
    )
    expected = "a worker of this command was ended (SIGKILL)" if kill else "the disk is full"
    assert done.stdout.startswith(expected), done.stderr


@pytest.mark.parametrize("what", [
    "signal.signal(signal.SIGCHLD, signal.SIG_IGN)",
    """
def reap(*arguments):
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
signal.signal(signal.SIGCHLD, reap)""",
    "signal.signal(signal.SIGTERM, lambda *a: sys.exit(143))",
])  # fmt: skip
def test_signal_handlers_of_the_program_do_not_disturb(what, source, expected, tmp_path):
    code = f"""
import os, signal, sys
from reshard import MegatronLayout, hf_to_mcore
{what}
hf_to_mcore({str(source)!r}, {str(tmp_path / "out")!r}, MegatronLayout(tp=2, ep=2), workers=3)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and tree(tmp_path / "out") == expected, done.stderr


def test_a_signal_to_a_worker_runs_no_handler_of_the_program():
    code = """
import os, signal, sys, time
from reshard.storage.run.workers import run_jobs
signal.signal(signal.SIGTERM, lambda *a: sys.exit(143))
try:
    run_jobs({"a": 1}, lambda name: os.kill(os.getpid(), signal.SIGTERM) or time.sleep(30), 1)
except Exception as error:
    print(type(error).__name__, error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("ReshardError a worker of this command was ended (SIGTERM);"), done.stdout


@pytest.mark.parametrize("handled", [True, False])
def test_a_signal_as_a_worker_starts_runs_nothing_of_the_parents(handled, source, expected, tmp_path):
    """Ctrl-C goes to all processes of a terminal, also to one that has just been forked."""
    code = f"""
import os, signal
fork = os.fork
def forked():
    pid = fork()
    if pid == 0:
        os.kill(os.getpid(), signal.SIGINT)
    return pid
os.fork = forked
from reshard import MegatronLayout, hf_to_mcore
{"signal.signal(signal.SIGINT, signal.SIG_DFL)" if not handled else ""}
hf_to_mcore({str(source)!r}, {str(tmp_path / "out")!r}, MegatronLayout(tp=2, ep=2), workers=4)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and tree(tmp_path / "out") == expected, done.stderr
    assert "KeyboardInterrupt" not in done.stderr


def test_ctrl_c_as_threads_get_their_jobs_has_them_do_no_further_one():
    """In a process that has loaded torch, whose native threads take a signal that is blocked in this one."""
    code = """
import sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from reshard.storage.run.workers import run_jobs
sys.modules["torch"] = sys
submit, calls, done = ThreadPoolExecutor.submit, iter(range(6)), []
def interrupted(self, *arguments):
    if next(calls) == 3:
        raise KeyboardInterrupt
    return submit(self, *arguments)
ThreadPoolExecutor.submit = interrupted
try:
    run_jobs(dict.fromkeys("abcdef", 1 << 30), lambda name: done.append(name) or time.sleep(0.2), 1)
except KeyboardInterrupt:
    print(threading.active_count(), len(done))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "1 1\n", done.stdout + done.stderr


def test_ctrl_c_as_the_workers_start_leaves_none_of_them():
    """It comes when all are there: a program that goes on would have them write on, and hold the lock."""
    code = """
import multiprocessing, os, signal, time
from reshard.storage.run.workers import run_jobs
fork = os.fork
def forked():
    os.kill(os.getpid(), signal.SIGINT)
    return fork()
os.fork = forked
try:
    run_jobs(dict.fromkeys("abc", 1 << 30), lambda name: time.sleep(600), 2)
except KeyboardInterrupt:
    print(multiprocessing.active_children())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stdout + done.stderr


def test_errors_of_the_system_stay_what_they_are_and_odd_results_are_reported():
    code = """
from reshard.storage.run.workers import run_jobs
def job(name):
    if name == "disk":
        raise OSError(5, "Input/output error", "a file")
    return lambda: None
for name in ("disk", "odd"):
    try:
        run_jobs({name: 1}, job, 1)
    except Exception as error:
        print(type(error).__name__, error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    first, second = done.stdout.splitlines()[:2]
    assert first == "OSError [Errno 5] Input/output error: 'a file'", done.stderr
    assert "pickle" in second and "<lambda>" in second


def test_a_terminal_has_a_bar_and_processes(source, tmp_path):
    """Under a terminal of its own: the bar starts no thread, which would make workers threads."""
    code = f"""
import os, sys
fork = os.fork
def forked():
    os.write(1, b"a process\\n")
    return fork()
os.fork = forked
sys.argv = ["reshard", "hf-to-mcore", {str(source)!r}, {str(tmp_path / "out")!r}, "--workers", "2"]
from reshard.cli.main import main
main()
"""
    ours, theirs = pty.openpty()
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=theirs, text=True, timeout=60,
        env=os.environ | {"TERM": "xterm"},
    )  # fmt: skip
    os.close(theirs)
    shown = os.read(ours, 1 << 16)
    os.close(ours)
    assert done.returncode == 0 and done.stdout.count("a process") == 2, shown
    assert b"%" in shown or b"/" in shown


def test_a_containers_share_of_the_cores_counts(tmp_path, monkeypatch):
    bound = len(os.sched_getaffinity(0))
    monkeypatch.setattr(system, "CGROUP", tmp_path)
    assert system.cores() == bound
    for text, expected in (
        ("max 100000", bound),
        ("100000 100000", 1),
        ("150000 100000", min(2, bound)),
        ("1000 100000", 1),
    ):
        (tmp_path / "cpu.max").write_text(text)
        assert system.cores() == expected


def test_batches_are_neighbors_and_files_take_turns():
    sizes = {f"{file}{index}": 1 << 20 for file in "ab" for index in range(8)} | {"a-large": 9 << 20}
    assert in_batches(sizes, lambda name: name[0], 4 << 20) == [
        ["a-large"],  # the largest first
        ["b0", "b1", "b2", "b3"],
        ["b4", "b5", "b6", "b7"],  # half of b is left, and less than half of a
        ["a0", "a1", "a2", "a3"],
        ["a4", "a5", "a6", "a7"],
    ]


def test_a_worker_is_ended_that_a_system_without_more_processes_started():
    code = """
import errno, multiprocessing, os
from reshard.storage.run.workers import run_jobs
fork, count = os.fork, 0
def forked():
    global count
    count += 1
    if count == 3:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
    return fork()
os.fork = forked
sizes = dict.fromkeys("abcdef", 16 << 20)
try:
    run_jobs(sizes, lambda name: os.getpid(), 4)
except Exception as error:
    print(type(error).__mro__[1].__name__, error)
assert not multiprocessing.active_children()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("ReshardError the system has no more than 2 workers"), done.stderr
    assert done.returncode == 0, done.stderr


def test_unasked_there_are_as_many_workers_as_the_system_has_room_for_beside_the_executors_thread():
    code = """
import errno, multiprocessing, os, threading
from reshard.storage.run import workers
workers.worker_count = lambda asked: 4
fork, start = os.fork, threading.Thread.start
def forked():
    if len(multiprocessing.active_children()) == 2:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
    return fork()
def started(thread):
    if len(multiprocessing.active_children()) == 2:
        raise RuntimeError("can't start new thread")
    start(thread)
os.fork, threading.Thread.start = forked, started
done = workers.run_jobs(dict.fromkeys("abcdef", 16 << 20), lambda name: os.getpid(), None)
assert len(set(done.values())) == 1 and os.getpid() not in done.values()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_rank_has_several_files_where_its_bytes_would_keep_one_worker_busy(source, tmp_path, monkeypatch):
    monkeypatch.setattr(reshard.storage.destinations.rank_files, "SMALLEST_FILE_BYTES", 100_000)
    hf_to_mcore(source, tmp_path / "mcore", MegatronLayout(tp=2, pp=2))
    release = tmp_path / "mcore" / "release"
    files = {path.name: path.stat().st_size for path in release.glob("*.distcp")}
    assert {f"__{rank}_{index}.distcp" for rank in range(4) for index in (0, 1)} <= files.keys()
    assert min(files.values()) > 0.3 * max(files.values())
    assert check(tmp_path / "mcore").ok
    assert same(stored_tensors(release), megatron_tensors(source, 1024)) == []
    mcore_to_hf(tmp_path / "mcore", tmp_path / "back")
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 4
    assert same(hf_tensors(source), hf_tensors(tmp_path / "back")) == []
    data = bytearray((release / "__0_1.distcp").read_bytes())
    data[data.index(b"PK\5\6") + 22] ^= 1  # between the first container and the second
    (release / "__0_1.distcp").write_bytes(data)
    assert check(tmp_path / "mcore").changed == ["release/__0_1.distcp"]
