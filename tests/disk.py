"""Runs of the command on a disk that fails on command (faulty_disk.c), and what they leave."""

import contextlib
import errno
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path


@functools.cache
def faulty_disk() -> Path:
    """The shared object, built with the system's C compiler."""
    compiler = next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)
    assert compiler is not None, (
        "faults of the disk are made by a shared object in C: install a C compiler (cc)"
    )
    library = Path(tempfile.mkdtemp(prefix="faulty-disk-")) / "faulty_disk.so"
    source = Path(__file__).with_name("faulty_disk.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    return library


def environment(*faults: str, held: Path | None = None) -> dict[str, str]:
    """The environment of a process that meets these faults: ``call:path:nth:what``, with errors by name (``sync:.distcp:1:ENOSPC``).

    ``hold`` makes the file `held` and stays in the call until that is removed.
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


def command(*args) -> list[str]:
    """The command line of ``reshard``, for a process of its own."""
    return [sys.executable, "-m", "reshard.cli.main", *map(str, args)]


@contextlib.contextmanager
def ended(process: subprocess.Popen):
    """The process is killed at the end of the block where it has not ended by itself: a test that fails waits for nobody."""
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
