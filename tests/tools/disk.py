"""Runs of the command on a disk that fails on command (faulty_disk.c), and what they leave."""

import contextlib
import errno
import functools
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from reshard import MegatronLayout, ReshardError, hf_to_mcore, mcore_to_hf

DIRECTIONS = {"hf-to-mcore": ("--tp", "2", "--ep", "2"), "mcore-to-hf": ("--max-shard-size", "200KB")}
RENAME_EXCHANGE_UNKNOWN = "renameat2:*:0:EINVAL"
SUFFIX = {"hf-to-mcore": ".distcp", "mcore-to-hf": ".safetensors"}


@functools.cache
def faulty_disk() -> Path:
    """The shared object, built with the system's C compiler unless it lies in pytest's cache."""
    source = Path(__file__).with_name("faulty_disk.c")
    name = f"faulty_disk-{hashlib.sha256(source.read_bytes()).hexdigest()[:16]}.so"
    library = source.parent.parent / ".pytest_cache" / name
    if library.exists():
        return library
    compiler = next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)
    assert compiler is not None, (
        "faults of the disk are made by a shared object in C: install a C compiler (cc)"
    )
    library.parent.mkdir(exist_ok=True)
    built = library.with_suffix(f".{os.getpid()}")  # other workers build theirs at the same time
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", built, source, "-ldl"], check=True)
    built.replace(library)
    return library


def environment(*faults: str, held: Path | None = None) -> dict[str, str]:
    """The environment of a process that meets these faults: ``call:path:nth:what``, with errors by
    name (``sync:.distcp:1:ENOSPC``).

    ``hold`` adds a byte to the file `held` and stays in the call until that is removed.
    """
    if not faults:
        return dict(os.environ)
    rules = []
    for rule in faults:
        call, path, nth, what = rule.split(":")
        name = what.removeprefix("lose")
        rules.append(
            ":".join(
                (
                    call,
                    path,
                    nth,
                    what.replace(name, str(getattr(errno, name))) if hasattr(errno, name) else what,
                )
            )
        )
    return os.environ | {
        "LD_PRELOAD": str(faulty_disk()),
        "FAULTS": " ".join(rules),
        **({"HELD": str(held)} if held else {}),
    }


def command(*args, python: str = sys.executable) -> list[str]:
    """The command line of ``reshard``, for a process of its own."""
    return [python, "-m", "reshard.cli.main", *map(str, args)]


@contextlib.contextmanager
def ended(process: subprocess.Popen):
    """The process is killed at the end of the block where it has not ended by itself: a test that
    fails waits for nobody."""
    with process:
        try:
            yield process
        finally:
            process.kill()


def cli(*args, faults: tuple[str, ...] = (), **options) -> subprocess.CompletedProcess:
    """Run ``reshard``; it says what it has to say without a traceback."""
    options = {"env": environment(*faults), "timeout": 300} | options
    done = subprocess.run(command(*args), capture_output=True, text=True, **options)
    assert "Traceback" not in done.stderr, done.stderr
    return done


def tree(directory: Path) -> dict[str, bytes]:
    """Every file below a directory, by its path in it."""
    return {
        str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()
    }


def until(condition, *processes):
    """Wait for what these processes, all of which go on meanwhile, are to make true."""
    deadline = time.monotonic() + 300
    while not condition():
        assert all(process.poll() is None for process in processes), "a process ended before"
        assert time.monotonic() < deadline
        time.sleep(0.005)


def journal(folder, process=0):
    """The lines of the journal of an interrupted run, but for one that is being written."""
    path = folder / ".out.reshard-partial" / f"journal-{process}"
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]] if path.exists() else []


@contextlib.contextmanager
def held_run(source, out, *faults, workers=1, direction="hf-to-mcore"):
    """A run of the qwen3-moe checkpoint at TP2 EP2 that stays in one of its writes, half of the
    tensors being finished, and what lets it go on: that gives what it says on stderr."""
    held = out.parent / "held"
    nth = {"hf-to-mcore": 380, "mcore-to-hf": 90}[direction]
    process = subprocess.Popen(
        command(direction, source, out, *DIRECTIONS[direction], "--workers", workers),
        env=environment(f"pwrite:*:{nth}:hold", *faults, held=held), stderr=subprocess.PIPE, text=True,
    )  # fmt: skip

    def go():
        held.unlink()
        return process.communicate(timeout=300)[1]

    with ended(process):
        until(lambda: held.exists() and any(line[0] == "done" for line in journal(out.parent)), process)
        yield process, go


def refused(call, message):
    """The call raises one sentence that matches."""
    with pytest.raises(ReshardError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def beside(folder):
    """What lies in a folder, but for the sources."""
    return sorted({p.name for p in folder.iterdir()} - {"source", "mcore"})


def partial_file(folder, suffix):
    """The largest file of an interrupted run."""
    return max(
        (p for p in (folder / ".out.reshard-partial").rglob(f"*{suffix}")), key=lambda p: p.stat().st_size
    )


def interrupted(direction, whole, out, *faults):
    """Start a run that meets these faults and does not end well."""
    done = cli(direction, whole[direction][0], out, *DIRECTIONS[direction], faults=faults)
    assert done.returncode not in (0, 2) and not out.exists(), done.stderr
    return done


def resumed(direction, whole, out):
    """Go on with it; the bytes are those of an undisturbed run. How many tensors were taken as done."""
    source, expected = whole[direction]
    if direction == "hf-to-mcore":
        report = hf_to_mcore(source, out, MegatronLayout(tp=2, ep=2), resume=True)
    else:
        report = mcore_to_hf(source, out, max_shard_size="200KB", resume=True)
    assert tree(out) == expected and beside(out.parent) == ["out"]
    return report.resumed_tensors


def scribble(path):
    """Change a byte in the middle of a file, in place."""
    with open(path, "r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))


def flip(path, at):
    """Change one bit of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)
