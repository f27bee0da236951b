"""Workers: jobs by name, on all cores.

A worker is a process that is forked from this one: it has the sources, the plan and the open files
as they are, and an interpreter's lock of its own. In a program that has loaded torch or runs other
threads, where a fork is not safe (another thread's lock stays locked in the child), workers are
threads. Either takes batches of names from a pipe and answers with the result of each job.
"""

import contextlib
import ctypes
import gc
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

from reshard.core.errors import ReshardError
from reshard.core.limits import MAX_WORKERS, check_number
from reshard.storage.run.batches import NAME_BYTES, Batch, Batches

# Called with the bytes that are done and the bytes in all.
Progress = Callable[[int, int], None]
Job = Callable[[str], Any]

# Threads share the interpreter's lock: more than this gain nothing.
MAX_THREADS = 8
# A batch takes long against a message to a worker (BATCH_BYTES), and each worker gets about so many
# of them, but so many at least that all end at about the same time. No further worker is started
# unasked for less than WORKER_BYTES.
BATCH_BYTES, WORKER_BYTES = 16 << 20, 8 << 20
BATCHES_PER_WORKER, MIN_BATCHES_PER_WORKER = 64, 4
# How often it is looked whether a run has failed elsewhere.
CHECK_SECONDS = 0.1
PR_SET_PDEATHSIG = 1
CGROUP = Path("/sys/fs/cgroup")


def can_fork() -> bool:
    """Return True where workers are processes: on Linux, without torch, and without other threads
    (but for tqdm's monitor, which a download leaves behind, and which only sleeps)."""
    others = [
        thread
        for thread in threading.enumerate()
        if thread is not threading.current_thread() and thread.name != "tqdm_monitor"
    ]
    return sys.platform == "linux" and "torch" not in sys.modules and not others


def cores() -> int:
    """Return how many cores this process may use: those it is bound to, or its container's share
    where that is less (``cpu.max`` of cgroups, version 2, or its counterpart in version 1)."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for names in (["cpu.max"], ["cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"]):
        with contextlib.suppress(OSError, ValueError):
            quota, period = " ".join((CGROUP / name).read_text(encoding="utf-8") for name in names).split()
            return max(1, min(bound, -(-int(quota) // int(period)))) if int(quota) > 0 else bound
    return bound


def worker_count(workers: int | None) -> int:
    """Return the number of workers: where it is not given, one for each core, of threads at most
    eight.

    Raises ReshardError for fewer than one or more than a machine has use for.
    """
    if workers is None:
        return min(cores(), MAX_WORKERS if can_fork() else MAX_THREADS)
    check_number(workers, "--workers", MAX_WORKERS)
    return workers


def workers_for(size_bytes: int, workers: int | None) -> int:
    """Return how many workers so many bytes get: `workers`, or as many as they keep busy."""
    return min(worker_count(None), 1 + size_bytes // WORKER_BYTES) if workers is None else workers


def run_jobs(
    sizes: Mapping[str, int],
    job: Job,
    workers: int | None,
    progress: Progress | None = None,
    check: Callable[[], None] = lambda: None,
    files_of: Callable[[str], Iterable[str]] = lambda name: (),
) -> dict[str, Any]:
    """Run `job(name)` for every name in `sizes` (bytes); return the results by name. For the rest
    see `Workers`."""
    results: dict[str, Any] = {}
    done, total = 0, sum(sizes.values())
    report_progress = progress or (lambda done, total: None)
    with Workers(job, sizes, workers, files_of) as pool:
        report_progress(done, total)
        check()
        for completed in pool.completed():
            for name, result in completed:
                results[name] = result
                done += sizes[name]
                report_progress(done, total)
            check()
        pool.leave_all()
    return results


class Workers:
    """Workers for `job(name)` of every name in `sizes` (bytes), from the beginning of the `with`
    block to its end; never more than there are batches.

    `files_of` gives the files into which a job writes. What a job returns or raises is pickled. A
    worker that is a process calls `leave` when all is done.
    """

    def __init__(
        self,
        job: Job,
        sizes: Mapping[str, int],
        workers: int | None = None,
        files_of: Callable[[str], Iterable[str]] = lambda name: (),
        leave: Callable[[], Any] = lambda: None,
    ) -> None:
        self.job, self.sizes, self.leave, self.requested = job, sizes, leave, workers
        total = sum(max(size, NAME_BYTES) for size in sizes.values())
        count = workers_for(total, workers)
        batch_bytes = max(BATCH_BYTES, total // (BATCHES_PER_WORKER * count))
        self.batches = Batches(sizes, files_of, min(batch_bytes, total // (MIN_BATCHES_PER_WORKER * count)))
        self.count = min(count, len(self.batches))
        self.workers: list[_Process | _Thread] = []

    def __enter__(self) -> "Workers":
        try:
            for _ in range(self.count):
                try:
                    _start(self.job, self.leave, self.workers)
                except ReshardError:
                    if self.requested is not None or not self.workers:
                        raise
                    break  # nobody asked for more than the system has
        except BaseException:
            _end(self.workers, at_once=True)
            raise
        return self

    def completed(self) -> Iterator[list[tuple[str, Any]]]:
        """Do all jobs. Yield the names and results of those that have ended since the last time, in
        whatever order they end, and an empty list where none has within `CHECK_SECONDS`: so that
        the caller can look at other things.

        The first error of a job is raised; the end of the `with` block ends the other workers then.
        """
        idle, busy = list(self.workers), dict[Connection, _Busy]()
        while True:
            while idle and (batch := self.batches.take()) is not None:
                worker = idle.pop()
                busy[worker.connection] = _Busy(worker, batch)
                worker.send_batch(batch.names)
            if not busy:
                return
            results = []
            for connection in wait(list(busy), CHECK_SECONDS):
                state = busy[connection]  # type: ignore[index]
                results.append(state.worker.next_result())
                state.answers += 1
                if state.answers == len(state.batch.names):
                    self.batches.give_back(state.batch)
                    idle.append(busy.pop(state.worker.connection).worker)
            yield results

    def leave_all(self) -> list[Any]:
        """Let the workers leave, once all jobs are done; return what `leave` gave in each process."""
        return [worker.leave() for worker in self.workers]

    def __exit__(self, kind: type | None, *exc: object) -> None:
        _end(self.workers, at_once=kind is not None)


class BackgroundCall:
    """A call in a worker of its own, from the beginning of the `with` block on; its result is
    pickled.

    `leave_result` is what `leave` returns, which a worker that is a process calls at the end.
    """

    def __init__(self, call: Callable[[], Any], leave: Callable[[], Any] = lambda: None) -> None:
        self.call, self.leave = call, leave
        self.workers: list[_Process | _Thread] = []
        self.value: Any = None
        self.leave_result: Any = None

    def __enter__(self) -> "BackgroundCall":
        try:
            _start(lambda name: self.call(), self.leave, self.workers)
            self.workers[0].send_batch([""])
        except BaseException:
            self.__exit__()
            raise
        return self

    def check(self) -> None:
        """Take the result if it is there, so that the worker ends. Raises what the call raised."""
        if self.workers and self.workers[0].connection.poll():
            self.result()

    def result(self) -> Any:
        """Return the call's result. Raises what it raised."""
        if self.workers:
            self.value = self.workers[0].next_result()[1]
            self.leave_result = self.workers[0].leave()
            self.__exit__()
        return self.value

    def __exit__(self, *exc: object) -> None:
        _end(self.workers, at_once=True)  # its result was taken, or nobody needs it
        self.workers = []


@dataclass
class _Busy:
    """A worker, its batch, and how many jobs of that it has answered."""

    worker: "_Process | _Thread"
    batch: Batch
    answers: int = 0


class _Worker:
    """This end of a worker's pipe."""

    def __init__(self) -> None:
        self.connection, self.worker_end = Pipe()

    def send_batch(self, names: list[str] | None) -> None:
        """Send the worker a batch, or None to let it leave. That it has ended shows when its result
        is waited for."""
        with contextlib.suppress(OSError):
            self.connection.send(names)

    def next_result(self) -> tuple[str, Any]:
        """Return the next job that is done and its result.

        Raises the error of a job that failed, and ReshardError where the worker has ended.
        """
        try:
            name, result, error = self.connection.recv()
        except (EOFError, OSError) as problem:
            exit_status = self.wait()
            hint = ", as the system does where memory runs out" if exit_status == "SIGKILL" else ""
            raise ReshardError(
                f"a worker of this command was ended ({exit_status}){hint}; a conversion goes on with --resume, and "
                f"needs less with fewer --workers",
                resumable=True,
            ) from problem
        if error is not None:
            raise error
        return name, result

    def leave(self) -> Any:
        """Let the worker leave once it has done its jobs; return what `leave` gave. None for a
        thread, whose files are ours."""
        return None

    def let_go(self, at_once: bool) -> None:
        """Let the worker end when it has done its job; a process `at_once`, where that is asked
        for."""
        self.connection.close()

    def wait(self) -> str:
        """Wait until the worker has ended; return how."""
        raise NotImplementedError


class _Process(_Worker):
    """A worker in a forked process. `others` are this process's ends of the pipes of the workers
    before it."""

    def __init__(self, job: Job, leave: Callable[[], Any], others: list[Connection]) -> None:
        super().__init__()
        parent = os.getpid()
        self.exit_status = ""
        with warnings.catch_warnings():
            # Of native threads, which hold no lock of ours.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid: int | None = os.fork()
        if self.pid == 0:
            status = 1
            try:
                for connection in (*others, self.connection):
                    connection.close()
                _become_worker(parent)
                _serve(self.worker_end, job, leave)
                status = 0
            finally:
                os._exit(status)
        self.worker_end.close()

    def leave(self) -> Any:
        self.send_batch(None)
        return self.next_result()[1]

    def let_go(self, at_once: bool) -> None:
        super().let_go(at_once)
        if at_once and self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> str:
        if self.pid is not None:
            try:
                _, status = os.waitpid(self.pid, 0)
                code = os.waitstatus_to_exitcode(status)
                self.exit_status = signal.Signals(-code).name if code < 0 else f"status {code}"
            except ChildProcessError:  # SIGCHLD is ignored here, or somebody else has waited for it
                self.exit_status = "exit status unknown"
            self.pid = None
        return self.exit_status


class _Thread(_Worker):
    """A worker in a thread."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.ended = threading.Event()
        threading.Thread(target=self._work, args=(job,), daemon=True).start()

    def _work(self, job: Job) -> None:
        try:
            _serve(self.worker_end, job, lambda: None)
        finally:
            self.worker_end.close()
            self.ended.set()

    def wait(self) -> str:
        # Not by joining: a thread whose join was interrupted counts as ended in Python up to 3.12.
        self.ended.wait()
        return "a thread"


def _start(job: Job, leave: Callable[[], Any], workers: "list[_Process | _Thread]") -> None:
    """Add a worker to `workers`. Raises ReshardError where the system has none.

    No signal comes between the fork and either side's knowing what it is: in the child it would run
    through the parent's frames, in the parent it would lose the child.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        if can_fork():
            workers.append(_Process(job, leave, [worker.connection for worker in workers]))
        else:
            workers.append(_Thread(job))
    except (OSError, RuntimeError) as error:
        raise ReshardError(
            f"the system has no more than {len(workers)} workers for this process ({error}); use fewer "
            f"--workers",
            resumable=True,
        ) from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _end(workers: "list[_Process | _Thread]", at_once: bool) -> None:
    """Wait for workers, also where Ctrl-C comes meanwhile: they write to files that are closed
    after this.

    Processes are killed where they shall end `at_once`; threads end their job.
    """
    interrupt: KeyboardInterrupt | None = None
    for worker in workers:
        worker.let_go(at_once)
    for worker in workers:
        while True:
            try:
                worker.wait()
                break
            except KeyboardInterrupt as error:
                interrupt = error
    if interrupt is not None:
        raise interrupt


def _become_worker(parent: int) -> None:
    """Prepare a forked worker: it ends with its parent, leaves Ctrl-C to it, and runs none of its
    signal handlers."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    # The parent's objects stay as they are: looking through them for garbage would copy their memory.
    gc.freeze()


def _serve(connection: Connection, job: Job, leave: Callable[[], Any]) -> None:
    """Serve the worker's end: batches of names in, results out, until it is to leave or the other
    end is closed."""
    with contextlib.suppress(EOFError, OSError):
        while (names := connection.recv()) is not None:
            for name in names:
                _send(connection, _run_job(name, job))
        _send(connection, _run_job("", lambda name: leave()))


def _send(connection: Connection, answer: tuple[str, Any, BaseException | None]) -> None:
    try:
        connection.send(answer)
    except (EOFError, OSError):
        raise
    except Exception as error:  # it cannot be pickled
        connection.send((answer[0], None, _picklable_error(error)))


def _run_job(name: str, job: Job) -> tuple[str, Any, BaseException | None]:
    try:
        return name, job(name), None
    except (ReshardError, MemoryError, OSError) as error:
        return name, None, error
    except BaseException as error:
        return name, None, _picklable_error(error)


def _picklable_error(error: BaseException) -> RuntimeError:
    """Return an unexpected error as one that can be pickled and says where it was raised."""
    return RuntimeError(f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
