"""A Python whose imports are done runs what a Python runs."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests.starting import fork_server
from tests.starting.ranks import run_on_ranks

SPAWNING = """
import atexit, multiprocessing, os, threading, time

def inside(pipe, lock):
    with lock:
        pipe.send([os.environ["SAID"], multiprocessing.current_process().name])
    pipe.close()
    os._exit(5)

if __name__ == "__main__":
    atexit.register(print, "at exit")
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    os.environ["SAID"] = "changed"
    lock = spawn.Lock()
    process = spawn.Process(target=inside, args=(theirs, lock), name="one")
    process.start()
    theirs.close()
    print(ours.recv())
    try:
        ours.recv()
    except EOFError:
        print("its end is seen")
    process.join()
    print(process.exitcode)
    threading.Thread(target=lambda: (time.sleep(0.2), print("a thread"))).start()
"""
COMMANDS = {
    "arguments": ["-c", "import sys; print(sys.argv, sys.path[0]); sys.exit(3)", "-u", "b"],
    "surroundings": ["-u", "-c", "import os; print(os.getcwd(), os.environ['SAID'], 'HOME' in os.environ)"],
    "an error": ["-c", "1 / 0"],
    "a last word": ["-c", "raise SystemExit('no')"],
    "a signal": ["-c", "import os; os.kill(os.getpid(), 9)"],
    "what was said before the end": ["-u", "-c", "import os; print('said'); os._exit(3)"],
    "an interrupt": ["-c", "raise KeyboardInterrupt"],
    "a hook": ["-c", "import sys; sys.excepthook = lambda *error: print('hooked', error[0]); 1 / 0"],
    "a module": ["-m", "json.tool", "--compact"],
    "a script": ["script.py", "--option"],
    "options": ["-X", "utf8", "-W", "error", "-c", "import sys; print(sys.flags.utf8_mode, sys.warnoptions)"],
    "a handler of faults": ["-c", "import faulthandler; print(faulthandler.is_enabled())"],
    "other packages": ["-c", "import there; print(there.__name__)"],
}


@pytest.fixture(scope="module")
def python():
    return fork_server.python("decimal", environment=dict(os.environ))


@pytest.mark.parametrize("what", COMMANDS)
def test_it_does_what_a_python_does(what, python, tmp_path):
    (tmp_path / "script.py").write_text(SPAWNING)
    (tmp_path / "there.py").touch()
    variables = {key: value for key, value in os.environ.items() if key != "HOME"} | {"SAID": "this"}
    if what == "a handler of faults":
        variables["PYTHONFAULTHANDLER"] = "1"
    if what == "other packages":
        variables["PYTHONPATH"] = str(tmp_path)
    done = [
        subprocess.run(
            [one, *COMMANDS[what]],
            cwd=tmp_path,
            env=variables,
            input='{"a": 1}',
            capture_output=True,
            text=True,
        )
        for one in (python, sys.executable)
    ]
    ours, theirs = ((one.returncode, one.stdout, one.stderr.splitlines()[-1:]) for one in done)
    assert ours == theirs


def test_what_cannot_be_written_at_the_end_is_an_error(python):
    for one in (python, sys.executable):
        with open("/dev/full", "w") as full:
            assert (
                subprocess.run([one, "-c", "print(1)"], stdout=full, stderr=subprocess.DEVNULL).returncode > 0
            )


def test_what_it_runs_has_the_imports_behind_it(python):
    code = (
        "import subprocess, sys; print('decimal' in sys.modules); sys.stdout.flush(); "
        "subprocess.run([sys.executable, *sys.argv[1:]])"
    )
    asked = ["-c", code, "-c", "import sys; print('decimal' in sys.modules)"]
    for one, expected in ((python, "True\nTrue\n"), (sys.executable, "False\nFalse\n")):
        assert subprocess.run([one, *asked], capture_output=True, text=True).stdout == expected


def wait_for_the_end_of(*pids: int) -> None:
    deadline = time.monotonic() + 30
    while any(map(psutil.pid_exists, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(("end", "status"), [("terminate", -15), ("kill", -9)])
def test_who_is_ended_ends_with_what_it_has_started(end, status, python):
    code = (
        "import os, subprocess, sys, time\n"
        "print(os.getpid(), flush=True)\n"
        "subprocess.run([sys.executable, '-c', 'import os, time; print(os.getpid(), flush=True); time.sleep(600)'])"
    )
    with subprocess.Popen([python, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        pids = [int(process.stdout.readline()) for _ in range(2)]
        assert all(map(psutil.pid_exists, pids))
        getattr(process, end)()
        assert process.wait(30) == status
        wait_for_the_end_of(*(pids if end == "kill" else pids[:1]))  # as with any Python
        if end == "terminate":
            psutil.Process(pids[1]).kill()


def test_a_signal_that_comes_after_the_end_changes_nothing_of_it(python):
    code = "import os, sys; print(os.getpid(), flush=True); sys.stdin.read(); sys.exit(7)"
    with subprocess.Popen(
        [python, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        pid = int(process.stdout.readline())
        process.send_signal(signal.SIGSTOP)
        try:
            process.stdin.close()
            wait_for_the_end_of(pid)
            process.terminate()
        finally:
            process.send_signal(signal.SIGCONT)
        assert process.wait(30) == 7


def fails(rank: int) -> None:
    """What rank 2 says is the cause; rank 0 says later that it waits for it, and rank 1 goes on waiting."""
    if rank == 1:
        time.sleep(300)
    time.sleep(0 if rank == 2 else 2)
    raise RuntimeError("the cause" if rank == 2 else "rank 2 did not reach 'hello' within 180 s")


def test_of_ranks_that_fail_the_first_is_named_first_and_no_other_is_waited_for():
    started = time.monotonic()
    with pytest.raises(AssertionError) as raised:
        run_on_ranks(3, "fails", module="tests.starting.test_fork_server")
    text = str(raised.value)
    assert text.index("the cause") < text.index("did not reach 'hello'") and time.monotonic() - started < 90
