"""Start Python processes with their imports done: they are forked from a server that has done them.

fork_server.python("vllm", "megatron.core", environment={...})      # the path of a program, to be
started where ``sys.executable`` would be

Start the program wherever you would start ``sys.executable``. The server forks a process with its
arguments, environment, folder and open files; signals are passed on, and the exit status comes
back. ``sys.executable`` and multiprocessing's spawn use the server there, too.

These differ from a real Python: what modules read from the environment at import, the seed of
hashes, limits and the umask are the server's, and the interpreter is not finalized. A real Python
is started if the environment has other variables for Python. A server imports when it is first
used.
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
MAKE = "--make"  # a server's environment first
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
            "tests.starting.fork_server",
            "--serve",
            str(listener.fileno()),
            str(program),
            *made,
            *modules,
        ]
        servers.append(
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=sys.stderr, env=environment,
                             cwd=Path(__file__).parent.parent.parent, pass_fds=[listener.fileno()],
                             start_new_session=True)
        )  # fmt: skip
    return str(program)


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

        from reshard.core.errors import ReshardError  # as of an engine that is not installed

        # Files that modules open get numbers above those of the files that are passed.
        held = [os.open(os.devnull, os.O_RDONLY) for _ in range(FILES)]
        gc.disable()
        for module in modules:
            # Whoever needs it will report it.
            with contextlib.suppress(ImportError, AttributeError, ReshardError):
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
    """Return Python's own variables, except those that `become` heeds itself, and the one that is read when
    needed, which Ray sets."""
    omitted = {"PYTHONUNBUFFERED", "PYTHONFAULTHANDLER", "PYTHONBREAKPOINT"}
    names = [name for name in environment if name.startswith("PYTHON") and name not in omitted]
    return {name: environment[name] for name in names}


def become(program: str, arguments: list[str], environment: dict[str, str], folder: str) -> None:
    """Run what ``python`` would with these arguments; start a real one for other packages or
    arguments not handled here."""
    import faulthandler
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
    if environment.get("PYTHONFAULTHANDLER"):  # SGLang sets it for what it spawns
        faulthandler.enable()
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

    from tests.tools.environments import environment_before_ours

    os.set_inheritable(int(listener), True)
    inside = str(environment_before_ours(Path(folder), packages.split()))
    os.execv(inside, [inside, "-m", "tests.starting.fork_server", "--serve", listener, program, *modules])


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
