"""Run a function on several ranks: processes with a gloo group, forked from a server that has
Megatron imported already."""

import contextlib
import itertools
import math
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from pathlib import Path

from tests.starting.fork_server import Forked, wait_for_any
from tests.starting.warm import python_of_ranks

# How long the others may go on where a rank has failed: they wait for it, some for very long, and
# it has said why.
GRACE_SECONDS = 10
# Far from those of a process that was started right before or after this one.
_ports = itertools.count(os.getpid() * 97 % 2000)
CODE = "import sys; from tests.starting.ranks import rank_in; rank_in(*sys.argv[1:])"


def run_on_ranks(
    world_size: int,
    function: str,
    *args,
    module: str = "megatron_on_cpu",
    options: dict | None = None,
    may_die: bool = False,
    timeout: float = 600,
    python: str = "",
    environment: Mapping[str, str] = os.environ,
):
    """Call ``tests.MODULE.FUNCTION(rank, *args)`` on every rank; the results by rank. An error on
    any rank is raised here, with its traceback, the first one first.

    The ranks have a gloo group, unless the module makes its own. A rank that `may_die` has None for
    a result. `timeout` is for all of them together; no process is left when this returns or raises.
    `python` is one with other packages (`warm`), `environment` its own.
    """
    deadline = time.monotonic() + timeout
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "arguments").write_bytes(
            pickle.dumps((world_size, module, function, args, options or {}))
        )
        processes: list[Forked] = []
        try:
            for rank in range(world_size):
                processes.append(
                    Forked(
                        python or python_of_ranks(), "-c", CODE, folder, str(rank), environment=environment
                    )
                )
            while running := [process for process in processes if process.is_alive()]:
                if not wait_for_any(running, deadline - time.monotonic()):
                    break
                if not may_die and any(process.exitcode for process in processes):
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
            late = {rank for rank, process in enumerate(processes) if process.is_alive()}
        finally:
            # Whatever was raised, a time limit of pytest's too.
            left = [process for process in processes if process.is_alive()]
            for process in left:
                process.kill()
            for process in left:
                process.join(60)
        failed: list[tuple[float, str]] = []  # when, and what
        for rank, process in enumerate(processes):
            error = Path(folder) / f"error{rank}"
            if error.exists():
                failed.append((error.stat().st_mtime, f"rank {rank}:\n{error.read_text()}"))
            elif rank in late:
                failed.append((math.inf, f"rank {rank} did not end"))
            elif process.exitcode:
                failed.append((0.0, f"rank {rank} ended with {process.exitcode}"))
        # The first is the cause: what others say later is of a rank that has ended, or that they wait for.
        assert not failed, "\n".join(text for _, text in sorted(failed)[:2])
        results = [Path(folder) / f"result{rank}" for rank in range(world_size)]
        assert may_die or all(path.exists() for path in results), "a rank ended early"
        return [pickle.loads(path.read_bytes()) if path.exists() else None for path in results]


def rank_in(folder: str, number: str) -> None:
    """Run a rank: its arguments and its result are files in the folder."""
    try:
        rank = int(number)
        world_size, module, function, args, options = pickle.loads((Path(folder) / "arguments").read_bytes())
        import importlib

        import torch

        torch.set_num_threads(1)
        os.environ.update(
            RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), CUDA_DEVICE_MAX_CONNECTIONS="1"
        )
        own_groups = module.startswith("refit_") or module == "fsdp_on_cpu"
        if not own_groups:
            torch.distributed.init_process_group(
                "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size
            )
        result = getattr(
            importlib.import_module(module if "." in module else f"tests.on_cpu.{module}"), function
        )(rank, *args, **options)
        if not own_groups:
            torch.distributed.barrier()
        (Path(folder) / f"result{rank}").write_bytes(pickle.dumps(result))
        torch.distributed.destroy_process_group()
    except BaseException:
        (Path(folder) / f"error{rank}").write_text(traceback.format_exc())
        os._exit(1)


def run_to_the_end(command, timeout: float, **options) -> subprocess.CompletedProcess:
    """Run a command and take what it prints. One that does not end in time is killed with all that
    it has started.

    It prints into files: what it has started, and left behind when it failed, would keep a pipe open.
    """
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        process = subprocess.Popen([*map(str, command)], stdout=stdout, stderr=stderr, text=True, **options)
        try:
            process.wait(timeout)
        except BaseException:
            import psutil

            # By descent, not by group or session: torchrun gives each of its processes a session of its own.
            with contextlib.suppress(psutil.NoSuchProcess):
                agent = psutil.Process(process.pid)
                for one in [agent, *agent.children(recursive=True)]:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        one.kill()
            process.wait()
            raise
        printed = []
        for file in (stdout, stderr):
            file.seek(0)
            printed.append(file.read())
    return subprocess.CompletedProcess(process.args, process.returncode, *printed)


def torchrun(processes: int, python: str = sys.executable) -> list[str]:
    """The beginning of a command that starts so many processes."""
    return [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]


def caught(action) -> str:
    """The sentence of the ReshardError that an action raises."""
    from reshard.core.errors import ReshardError

    try:
        action()
    except ReshardError as error:
        return str(error)
    return "no error"


def free_port() -> int:
    """A port that nobody listens at, and that neither the system nor `free_address` gives to anybody: below those,
    each pytest worker has its own."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    while True:
        port = 10000 + 2000 * (worker % 5) + next(_ports) % 2000
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
