"""Workers: jobs by name, on all cores.

Workers are the processes of an executor, forked from this one: they have the sources, the plan and
the open files as they are, and an interpreter's lock of their own. In a program that has loaded
torch or runs other threads, where a fork is not safe (another thread's lock stays locked in the
child), they are threads.
"""

import contextlib
import ctypes
import gc
import multiprocessing
import os
import queue
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from typing import Any

from reshard.core.errors import ReshardError
from reshard.core.limits import MAX_WORKERS, check_number

# Called with the bytes that are done and the bytes in all.
Progress = Callable[[int, int], None]
Job = Callable[[str], Any]

# Threads share the interpreter's lock: more than this gain nothing.
MAX_THREADS = 8
# A batch takes long against a message to a worker (BATCH_BYTES), and each worker gets about so many
# of them, but so many at least that all end at about the same time. No further worker is started
# unasked for less than WORKER_BYTES. The smallest job counts as NAME_BYTES.
BATCH_BYTES, WORKER_BYTES, NAME_BYTES = 16 << 20, 8 << 20, 128 << 10
BATCHES_PER_WORKER, MIN_BATCHES_PER_WORKER = 64, 4
# How often it is looked whether a run has failed elsewhere.
CHECK_SECONDS = 0.1
PR_SET_PDEATHSIG = 1
CGROUP = Path("/sys/fs/cgroup")


def can_fork() -> bool:
    """Return True where workers are processes: on Linux, without torch, without other threads (but
    for tqdm's monitor, which a download leaves behind, and which only sleeps), and where
    `multiprocessing` lets this process have children."""
    others = [
        thread
        for thread in threading.enumerate()
        if thread is not threading.current_thread() and thread.name != "tqdm_monitor"
    ]
    is_daemon = multiprocessing.current_process().daemon
    return sys.platform == "linux" and "torch" not in sys.modules and not others and not is_daemon


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
    return results


class Workers:
    """Workers for `job(name)` of every name in `sizes` (bytes), from the beginning of the `with`
    block to its end; never more than there are batches.

    `files_of` gives the files into which a job writes. What a job returns or raises is pickled.
    """

    def __init__(
        self,
        job: Job,
        sizes: Mapping[str, int],
        workers: int | None = None,
        files_of: Callable[[str], Iterable[str]] = lambda name: (),
    ) -> None:
        self.job, self.requested = job, workers
        total = sum(max(size, NAME_BYTES) for size in sizes.values())
        count = workers_for(total, workers)
        batch_bytes = max(BATCH_BYTES, total // (BATCHES_PER_WORKER * count))
        self.batches = in_batches(
            sizes, files_of, min(batch_bytes, total // (MIN_BATCHES_PER_WORKER * count))
        )
        self.count = min(count, len(self.batches))
        self.pool: _Processes | _Threads | None = None

    def __enter__(self) -> "Workers":
        if self.count:
            self.pool = self._start()
        return self

    def _start(self) -> "_Processes | _Threads":
        """Start the workers: fewer where the system has no more and nobody asked for so many.

        No signal comes between a fork and either side's knowing what it is: in the child it would
        run through the parent's frames, in the parent it would lose the child.
        """
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            kind, count = (_Processes if can_fork() else _Threads), self.count
            while True:
                try:
                    return kind(self.job, self.batches, count)
                except _NoWorkerError as error:
                    count = min(error.started, count - 1)  # the executor's own threads count too
                    if self.requested is not None or count < 1:
                        raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def completed(self) -> Iterator[list[tuple[str, Any]]]:
        """Do all jobs. Yield the names and results of those that have ended since the last time, in
        whatever order they end, and an empty list where none has within `CHECK_SECONDS`: so that
        the caller can look at other things.

        The first error of a job is raised; the end of the `with` block ends the other workers then.
        """
        left = len(self.batches)
        while left and self.pool is not None:
            try:
                future = self.pool.ended.get(timeout=CHECK_SECONDS)
            except queue.Empty:
                self.pool.check()
                yield []
                continue
            left -= 1
            try:
                yield future.result()
            except BrokenProcessPool as error:
                raise self.pool.error() from error

    def __exit__(self, kind: type | None, *exc: object) -> None:
        """Wait for the workers, also where Ctrl-C comes meanwhile: they write to files that are
        closed after this."""
        interrupt: KeyboardInterrupt | None = None
        while self.pool is not None:
            try:
                self.pool.end(at_once=kind is not None)
                break
            except KeyboardInterrupt as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt


class _NoWorkerError(ReshardError):
    """The system has no more workers for this process than have been `started`."""

    def __init__(self, started: int, cause: BaseException) -> None:
        super().__init__(
            f"the system has no more than {started} workers for this process ({cause}); use fewer --workers",
            resumable=True,
        )
        self.started = started


class _Processes:
    """Workers in forked processes. `ended` gets the futures of batches as these end."""

    def __init__(self, job: Job, batches: list[list[str]], count: int) -> None:
        before = multiprocessing.active_children()
        self.ended: queue.SimpleQueue[Future] = queue.SimpleQueue()
        try:
            # The arguments of the initializer are inherited by a fork, not pickled.
            self.executor = ProcessPoolExecutor(
                count, multiprocessing.get_context("fork"), _become_worker, (os.getpid(), job)
            )
            with warnings.catch_warnings():
                # Of native threads, which hold no lock of ours.
                warnings.simplefilter("ignore", DeprecationWarning)
                # The first submission forks all workers, and then starts the executor's thread.
                _submit(self.executor, batches, _run_batch, self.ended)
        except (OSError, RuntimeError, NotImplementedError) as error:
            self.children = [c for c in multiprocessing.active_children() if c not in before]
            self._kill()
            raise _NoWorkerError(len(self.children), error) from error
        self.children = [c for c in multiprocessing.active_children() if c not in before]
        # A worker may be ended when only half of its result has been sent. The executor waits for
        # the rest until nobody is left who could send it: which this process, too, could.
        self.executor._result_queue._writer.close()  # type: ignore[attr-defined]

    def check(self) -> None:
        """End all workers where one has ended, as the executor does, unless it waits for the rest of
        that one's result."""
        if not all(child.is_alive() for child in self.children):
            for child in self.children:
                child.terminate()

    def error(self) -> ReshardError:
        """Return the error for a worker that has ended before its time."""
        for child in self.children:
            child.join()
        codes = [child.exitcode for child in self.children]
        # The executor ends the others by SIGTERM.
        code = next((code for code in codes if code not in (0, None, -signal.SIGTERM)), codes[0] or None)
        status = "exit status unknown" if code is None else f"status {code}"
        if code is not None and code < 0:
            status = signal.Signals(-code).name
        hint = ", as the system does where memory runs out" if status == "SIGKILL" else ""
        return ReshardError(
            f"a worker of this command was ended ({status}){hint}; a conversion goes on with --resume, and "
            f"needs less with fewer --workers",
            resumable=True,
        )

    def _kill(self) -> None:
        for child in self.children:
            child.kill()
        for child in self.children:
            child.join()

    def end(self, at_once: bool) -> None:
        """Wait until all workers have ended; kill them `at_once`, where that is asked for."""
        if at_once:
            self._kill()
        self.executor.shutdown()


class _Threads:
    """Workers in threads."""

    def __init__(self, job: Job, batches: list[list[str]], count: int) -> None:
        self.ended: queue.SimpleQueue[Future] = queue.SimpleQueue()
        self.stopped = threading.Event()
        self.executor = ThreadPoolExecutor(count)
        self.futures: list[Future] = []
        try:
            self.futures = _submit(
                self.executor, batches, partial(_run_batch, job=job, stopped=self.stopped), self.ended
            )
        except RuntimeError as error:
            self.end(at_once=True)
            raise _NoWorkerError(0, error) from error

    def check(self) -> None:
        """Do nothing: a thread does not end before its time."""

    def error(self) -> ReshardError:
        """Return the error for a worker that has ended before its time: a thread does not."""
        raise NotImplementedError

    def end(self, at_once: bool) -> None:
        """Wait until all workers have ended; they end their job, and do no further one where they
        are to end `at_once`."""
        if at_once:
            self.stopped.set()
        # Not by joining: a thread whose join was interrupted counts as ended in Python up to 3.12.
        wait(self.futures)
        self.executor.shutdown()


def in_batches(
    sizes: Mapping[str, int], files_of: Callable[[str], Iterable[str]], batch_bytes: int
) -> list[list[str]]:
    """Return the names in batches, in the order in which workers take them.

    Neighbors that write into the same files are together: they are neighbors on the disk, and their
    plans share pages of memory, which a forked worker copies when it counts references there. The
    files take turns, each by its share of the bytes: a kernel lets one worker at a time write into
    a file. Of a file the largest batch comes first, so that no worker is left alone with it.
    """
    groups: dict[tuple[str, ...], list[tuple[int, list[str]]]] = {}
    for name, size in sizes.items():
        batches, cost = groups.setdefault(tuple(sorted(files_of(name))), []), max(size, NAME_BYTES)
        if batches and batches[-1][0] + cost <= batch_bytes:
            batch_size, names = batches.pop()
            batches.append((batch_size + cost, [*names, name]))
        else:
            batches.append((cost, [name]))
    turns: list[tuple[float, list[str]]] = []
    for batches in groups.values():
        total, before = sum(size for size, _ in batches), 0
        for size, names in sorted(batches, key=lambda batch: -batch[0]):
            turns.append((before / total, names))
            before += size
    return [names for _, names in sorted(turns, key=lambda turn: turn[0])]


def _submit(
    executor: ProcessPoolExecutor | ThreadPoolExecutor,
    batches: list[list[str]],
    run: Callable[[list[str]], Any],
    ended: "queue.SimpleQueue[Future]",
) -> list[Future]:
    """Submit all batches; return their futures, which go to `ended` as they end."""
    futures = []
    for names in batches:
        try:
            future = executor.submit(run, names)
        except BrokenProcessPool as error:  # a worker has ended already
            future = Future()
            future.set_exception(error)
        future.add_done_callback(ended.put)
        futures.append(future)
    return futures


# The job of a worker that is a process.
_job: Job | None = None


def _become_worker(parent: int, job: Job) -> None:
    """Prepare a forked worker: it ends with its parent, leaves Ctrl-C to it, and runs none of its
    signal handlers."""
    global _job
    _job = job
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # by which the executor ends it
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    # The parent's objects stay as they are: looking through them for garbage would copy their memory.
    gc.freeze()


def _run_batch(
    names: list[str], job: Job | None = None, stopped: threading.Event | None = None
) -> list[tuple[str, Any]]:
    """Run the worker's job for each name; return the names and results, fewer once it is `stopped`."""
    job = job or _job
    assert job is not None
    results = []
    for name in names:
        if stopped is not None and stopped.is_set():
            break
        try:
            results.append((name, job(name)))
        except (ReshardError, MemoryError, OSError):
            raise
        except BaseException as error:
            # As one that can be pickled and says where it was raised.
            raise RuntimeError(f"{type(error).__name__}: {error}\n{traceback.format_exc()}") from None
    return results
