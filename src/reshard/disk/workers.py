"""Workers: jobs by name, on all cores.

A worker is a process that is forked from this one: it has the sources, the plan and the open files as they
are, and an interpreter's lock of its own. In a program that has loaded torch or runs other threads, where a
fork is not safe (another thread's lock stays locked in the child), workers are threads. Either takes batches
of names from a pipe and answers with the result of each job.
"""

import contextlib
import ctypes
import gc
import os
import signal
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

from reshard.core.errors import ReshardError
from reshard.core.limits import MAX_WORKERS, check_number

# Called with the bytes that are done and the bytes in all.
Progress = Callable[[int, int], None]
Job = Callable[[str], Any]

# Threads share the interpreter's lock: more of them do no more.
MOST_THREADS = 8
# What a worker is given at a time: long against the way to it (BATCH_BYTES), and so much that each gets some
# BATCHES; but FEWEST_BATCHES at least, so that all end at about the same time. The smallest tensor counts as
# NAME_BYTES. For less than WORKER_BYTES no further worker is started unasked.
BATCH_BYTES, NAME_BYTES, WORKER_BYTES = 16 << 20, 128 << 10, 8 << 20
BATCHES, FEWEST_BATCHES = 64, 4
# How often it is looked whether a run has failed elsewhere.
CHECK_SECONDS = 0.1
PR_SET_PDEATHSIG = 1


def can_fork() -> bool:
    """Whether workers are processes here."""
    return sys.platform == "linux" and "torch" not in sys.modules and threading.active_count() == 1


def worker_count(workers: int | None) -> int:
    """How many workers: where it is not given, one for each core, of threads at most eight.

    Raises ReshardError for fewer than one or more than a machine has use for.
    """
    if workers is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return min(cores, MAX_WORKERS if can_fork() else MOST_THREADS)
    check_number(workers, "--workers", MAX_WORKERS)
    return workers


def workers_for(size_bytes: int, workers: int | None) -> int:
    """How many workers so many bytes get: `workers`, or as many as they keep busy."""
    return min(worker_count(None), 1 + size_bytes // WORKER_BYTES) if workers is None else workers


def run_jobs(
    sizes: Mapping[str, int],
    job: Job,
    workers: int | None,
    progress: Progress | None = None,
    check: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Run `job(name)` for every name in `sizes` (bytes); the results by name. For the rest see `Workers`."""
    results: dict[str, Any] = {}
    with Workers(job, sizes, workers) as pool:
        pool.run(results.__setitem__, check, progress)
    return results


@dataclass
class Batch:
    """Jobs that a worker does one after the other, their bytes, and the files that they write into."""

    files: tuple[str, ...]
    names: list[str] = field(default_factory=list)
    size_bytes: int = 0


class Batches:
    """All jobs, in batches. Neighbours that write into the same files are together: they are neighbours on
    the disk, and what is known of them is in the same pages of memory, which a forked worker copies when it
    counts references there."""

    def __init__(
        self, sizes: Mapping[str, int], files_of: Callable[[str], Iterable[str]], batch_bytes: int
    ) -> None:
        self.left: dict[tuple[str, ...], list[Batch]] = {}
        self.left_bytes: Counter[tuple[str, ...]] = Counter()
        self.writers: Counter[str] = Counter()
        for name, size in sizes.items():
            files, cost = tuple(sorted(files_of(name))), max(size, NAME_BYTES)
            batches = self.left.setdefault(files, [])
            if not batches or batches[-1].size_bytes + cost > batch_bytes:
                batches.append(Batch(files))
            batches[-1].names.append(name)
            batches[-1].size_bytes += cost
            self.left_bytes[files] += cost
        for batches in self.left.values():
            # The largest is taken first, from the end, so that no worker is left alone with it.
            batches.sort(key=lambda batch: -batch.size_bytes)
            batches.reverse()

    def __len__(self) -> int:
        return sum(map(len, self.left.values()))

    def take(self) -> Batch | None:
        """The next batch: into the files into which the fewest workers write, since a kernel lets one at a
        time write into a file; of those with the most to do."""
        if not self.left:
            return None
        files = min(
            self.left,
            key=lambda files: (max((self.writers[f] for f in files), default=0), -self.left_bytes[files]),
        )
        batch = self.left[files].pop()
        self.left_bytes[files] -= batch.size_bytes
        if not self.left[files]:
            del self.left[files]
        self.writers.update(batch.files)
        return batch

    def give_back(self, batch: Batch) -> None:
        """A worker is done with a batch."""
        self.writers.subtract(batch.files)


class Workers:
    """Workers for `job(name)` of every name in `sizes` (bytes), from the beginning of the `with` block to its
    end; never more than there are batches.

    `files_of` says into which files a job writes. What a job returns is pickled, and so is what it raises.
    """

    def __init__(
        self,
        job: Job,
        sizes: Mapping[str, int],
        workers: int | None = None,
        files_of: Callable[[str], Iterable[str]] = lambda name: (),
    ) -> None:
        self.job, self.sizes = job, sizes
        total = sum(max(size, NAME_BYTES) for size in sizes.values())
        count = workers_for(total, workers)
        batch_bytes = max(BATCH_BYTES, total // (BATCHES * count))
        self.batches = Batches(sizes, files_of, min(batch_bytes, total // (FEWEST_BATCHES * count)))
        self.count = min(count, len(self.batches))
        self.workers: list[_Process | _Thread] = []

    def __enter__(self) -> "Workers":
        try:
            for _ in range(self.count):
                self.workers.append(_start(self.job, self.workers))
        except BaseException:
            _end(self.workers, at_once=True)
            raise
        return self

    def run(
        self,
        ended: Callable[[str, Any], object],
        check: Callable[[], None] = lambda: None,
        progress: Progress | None = None,
        done: int = 0,
    ) -> None:
        """Do all jobs. `ended(name, result)` is called here for each, in whatever order they end; `check`
        often.

        `done` are the bytes that `progress` counts as done before. The first error of any of them ends the
        others, and is raised.
        """
        total = done + sum(self.sizes.values())
        idle, busy = list(self.workers), dict[Connection, _Busy]()
        if progress is not None:
            progress(done, total)
        while True:
            while idle and (batch := self.batches.take()) is not None:
                worker = idle.pop()
                busy[worker.connection] = _Busy(worker, batch)
                worker.tell(batch.names)
            if not busy:
                return
            check()
            for connection in wait(list(busy), CHECK_SECONDS):
                now = busy[connection]  # type: ignore[index]
                name, result = now.worker.hear()
                ended(name, result)
                done += self.sizes[name]
                if progress is not None:
                    progress(done, total)
                now.answers += 1
                if now.answers == len(now.batch.names):
                    self.batches.give_back(now.batch)
                    idle.append(busy.pop(now.worker.connection).worker)

    def __exit__(self, kind: type | None, *exc: object) -> None:
        _end(self.workers, at_once=kind is not None)


class Aside:
    """A call in a worker of its own, from the beginning of the `with` block on; what it returns is
    pickled."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.call = call
        self.worker: _Process | _Thread | None = None
        self.found: Any = None

    def __enter__(self) -> "Aside":
        self.worker = _start(lambda name: self.call(), [])
        self.worker.tell([""])
        return self

    def check(self) -> None:
        """Take the result if it is there, so that the worker ends. Raises what the call has raised."""
        if self.worker is not None and self.worker.connection.poll():
            self.result()

    def result(self) -> Any:
        """What the call returns. Raises what it raises."""
        if self.worker is not None:
            self.found = self.worker.hear()[1]
            self.__exit__()
        return self.found

    def __exit__(self, *exc: object) -> None:
        if self.worker is not None:
            _end([self.worker], at_once=True)  # its result was taken, or nobody needs it
            self.worker = None


@dataclass
class _Busy:
    """A worker, the batch that it has, and how many of its jobs it has answered."""

    worker: "_Process | _Thread"
    batch: Batch
    answers: int = 0


class _Worker:
    """This end of a worker's pipe."""

    def __init__(self) -> None:
        self.connection, self.theirs = Pipe()

    def tell(self, names: list[str]) -> None:
        """Give it a batch; that it has ended shows when its answer is waited for."""
        with contextlib.suppress(OSError):
            self.connection.send(names)

    def hear(self) -> tuple[str, Any]:
        """The next job that is done and its result. Raises the error of a job that failed, and ReshardError
        where the worker has ended."""
        try:
            name, result, error = self.connection.recv()
        except (EOFError, OSError) as problem:
            raise ReshardError(
                f"a worker of this command was ended ({self.wait()}), as the system does where memory runs "
                f"out; a conversion goes on with --resume, and needs less with fewer --workers",
                resumable=True,
            ) from problem
        if error is not None:
            raise error
        return name, result

    def wait(self) -> str:
        """Wait until it has ended; how it has."""
        raise NotImplementedError


class _Process(_Worker):
    """A worker in a forked process. `others` are this process's ends of the pipes of those before it."""

    def __init__(self, job: Job, others: list[Connection]) -> None:
        super().__init__()
        parent = os.getpid()
        self.pid: int | None = os.fork()
        self.how = ""
        if self.pid == 0:
            status = 1
            try:
                for connection in (*others, self.connection):
                    connection.close()
                _follow(parent)
                _serve(self.theirs, job)
                status = 0
            finally:
                os._exit(status)
        self.theirs.close()

    def dismiss(self, at_once: bool) -> None:
        """Let it end, when it has done its batch or at once."""
        self.connection.close()
        if at_once and self.pid is not None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> str:
        if self.pid is not None:
            _, status = os.waitpid(self.pid, 0)
            self.pid, code = None, os.waitstatus_to_exitcode(status)
            self.how = signal.Signals(-code).name if code < 0 else f"status {code}"
        return self.how


class _Thread(_Worker):
    """A worker in a thread."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.ended = threading.Event()
        threading.Thread(target=self._work, args=(job,), daemon=True).start()

    def _work(self, job: Job) -> None:
        try:
            _serve(self.theirs, job)
        finally:
            self.theirs.close()
            self.ended.set()

    def dismiss(self, at_once: bool) -> None:
        """Let it end, when it has done the job that it is at."""
        self.connection.close()

    def wait(self) -> str:
        # Not by joining: a thread whose join was interrupted counts as ended in Python up to 3.12.
        self.ended.wait()
        return "as a thread"


def _start(job: Job, others: "list[_Process | _Thread]") -> "_Process | _Thread":
    """A worker beside others. Raises ReshardError where the system has none."""
    try:
        return _Process(job, [other.connection for other in others]) if can_fork() else _Thread(job)
    except (OSError, RuntimeError) as error:
        raise ReshardError(
            f"the system has no more than {len(others)} workers for this process ({error}); use fewer "
            f"--workers",
            resumable=True,
        ) from error


def _end(workers: "list[_Process | _Thread]", at_once: bool) -> None:
    """Wait for workers, also where Ctrl-C comes meanwhile: they write to files that are closed after this.

    Processes are killed where they shall end `at_once`; threads end their job.
    """
    interrupt: KeyboardInterrupt | None = None
    for worker in workers:
        worker.dismiss(at_once)
    for worker in workers:
        while True:
            try:
                worker.wait()
                break
            except KeyboardInterrupt as error:
                interrupt = error
    if interrupt is not None:
        raise interrupt


def _follow(parent: int) -> None:
    """What a forked worker needs besides a fork: it ends with its parent, and leaves Ctrl-C to it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    # The parent's objects stay as they are: looking through them for garbage would copy their memory.
    gc.freeze()


def _serve(connection: Connection, job: Job) -> None:
    """The worker's end: batches of names in, results out, until the other end is closed."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            for name in connection.recv():
                answer = _answer(name, job)
                connection.send(answer)


def _answer(name: str, job: Job) -> tuple[str, Any, BaseException | None]:
    try:
        return name, job(name), None
    except (ReshardError, MemoryError) as error:
        return name, None, error
    except BaseException as error:
        # Whatever it is, it may not be picklable, and where it was raised is what a report needs.
        return name, None, RuntimeError(f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
