"""Workers: jobs by name, on all cores.

Workers are processes, forked from this one: they have the sources, the plan and the open files as
they are, and an interpreter's lock of their own. In a program that has loaded torch or runs other
threads, where a fork is not safe (another thread's lock stays locked in the child), they are
threads.
"""

import contextlib
import gc
import multiprocessing
import os
import pickle
import queue
import signal
import socket
import struct
import sys
import threading
import traceback
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from multiprocessing.connection import wait as wait_for
from multiprocessing.process import BaseProcess
from typing import Any

from reshard.core.errors import ReshardError
from reshard.core.interrupts import wait_out
from reshard.core.limits import MAX_WORKERS, check_number
from reshard.core.system import cores, end_with_parent

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
# Messages between a worker and its parent: the number of a batch, and the length of an answer.
NUMBER, READ_BYTES = struct.Struct("<Q"), 1 << 20


def can_fork() -> bool:
    """Return True if workers are processes: on Linux, without torch, without other threads (but
    for tqdm's monitor, which a download leaves behind, and which only sleeps), and where
    `multiprocessing` lets this process have children."""
    others = [
        thread
        for thread in threading.enumerate()
        if thread is not threading.current_thread() and thread.name != "tqdm_monitor"
    ]
    is_daemon = multiprocessing.current_process().daemon
    return sys.platform == "linux" and "torch" not in sys.modules and not others and not is_daemon


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
        try:
            if self.count:
                self._start()
        except BaseException as error:  # Ctrl-C, when some or all have started
            self.__exit__(type(error))
            raise
        return self

    def _start(self) -> None:
        """Start the workers: fewer where the system has no more and nobody asked for so many.

        No signal comes between a fork and either side's knowing what it is: in the child it would
        run through the parent's frames, in the parent it would lose the child.
        """
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            kind, count = (_Processes if can_fork() else _Threads), self.count
            while True:
                self.pool = kind(self.job, self.batches)
                try:
                    self.pool.start(count)
                    return
                except _NoWorkerError as error:
                    if self.requested is not None or not error.started:
                        raise
                    count = max(1, error.started - 1)  # the thread that syncs counts too
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
            ended = self.pool.ended()
            left -= len(ended)
            yield [result for batch in ended for result in batch]

    def __exit__(self, kind: type | None, *exc: object) -> None:
        """Wait for the workers, also where Ctrl-C comes meanwhile: they write to files that are
        closed after this."""
        pool = self.pool
        if pool is not None:
            wait_out(lambda: pool.end(at_once=kind is not None))


class _NoWorkerError(ReshardError):
    """The system has no more workers for this process than have been `started`."""

    def __init__(self, started: int, cause: BaseException) -> None:
        super().__init__(
            f"the system has no more than {started} workers for this process ({cause}); use fewer --workers",
            resumable=True,
        )
        self.started = started


class _Processes:
    """Workers in forked processes.

    A worker has a connection of its own, through which it gets the number of a batch and sends the
    results. Nobody else has its end of it, neither this process nor another worker: where it dies,
    be it within its results, the connection ends.
    """

    def __init__(self, job: Job, batches: list[list[str]]) -> None:
        self.job, self.batches, self.left = job, batches, iter(range(len(batches)))
        self.workers: dict[socket.socket, BaseProcess] = {}  # by our end of the connection
        self.received: dict[socket.socket, bytearray] = defaultdict(bytearray)

    def start(self, count: int) -> None:
        """Start so many workers, each with a batch; none is left where the system has no more."""
        context = multiprocessing.get_context("fork")
        try:
            for _ in range(count):
                ours, theirs = socket.socketpair()
                with theirs, warnings.catch_warnings():
                    # Of native threads, which hold no lock of ours.
                    warnings.simplefilter("ignore", DeprecationWarning)
                    worker = context.Process(
                        target=_work, args=(theirs, os.getpid(), self.job, self.batches), daemon=True
                    )
                    worker.start()
                self.workers[ours] = worker
        except OSError as error:
            self.end(at_once=True)
            raise _NoWorkerError(len(self.workers), error) from error
        for ours in self.workers:
            self._hand_out(ours)

    def _hand_out(self, ours: socket.socket) -> None:
        """Send a worker the number of the next batch, where there is one."""
        number = next(self.left, None)
        if number is not None:
            with contextlib.suppress(OSError):  # it has ended, which reading will tell
                ours.sendall(NUMBER.pack(number))

    def ended(self) -> list[list[tuple[str, Any]]]:
        """Return the results of the batches that have ended, as `Workers.completed` yields them."""
        batches = []
        ready: list[Any] = wait_for(self.workers, CHECK_SECONDS)
        for ours in ready:
            answer = self._read(ours)
            if answer is not None:
                results, error, where = pickle.loads(answer)
                if error is not None:
                    raise error from RuntimeError(where)
                batches.append(results)
                self._hand_out(ours)
        return batches

    def _read(self, ours: socket.socket) -> bytearray | None:
        """Read what has come from a worker; return its answer once all of that is there. Nothing
        here waits for the rest: the worker may never send it, and others have something to say."""
        try:
            data = ours.recv(READ_BYTES)
        except OSError:
            data = b""
        if not data:
            raise self._error(self.workers[ours])
        received = self.received[ours]
        received += data
        if len(received) < NUMBER.size or len(received) < NUMBER.size + NUMBER.unpack_from(received)[0]:
            return None
        return self.received.pop(ours)[NUMBER.size :]

    def _error(self, worker: BaseProcess) -> ReshardError:
        """Return the error for a worker that has ended before its time."""
        worker.join()
        code = worker.exitcode
        status = "exit status unknown" if code is None else f"status {code}"
        if code is not None and code < 0:
            status = signal.Signals(-code).name
        hint = ", as the system does where memory runs out" if status == "SIGKILL" else ""
        return ReshardError(
            f"a worker of this command was ended ({status}){hint}; run a conversion again with --resume to "
            "continue it; it needs less memory with fewer --workers",
            resumable=True,
        )

    def end(self, at_once: bool) -> None:
        """Kill the workers. Those that are not to end `at_once` have nothing left to do."""
        for worker in self.workers.values():
            worker.kill()
        for ours, worker in self.workers.items():
            worker.join()
            ours.close()


class _Threads:
    """Workers in threads."""

    def __init__(self, job: Job, batches: list[list[str]]) -> None:
        self.job, self.batches = job, batches
        self.queue: queue.SimpleQueue[Future] = queue.SimpleQueue()
        self.stopped = threading.Event()
        self.executor: ThreadPoolExecutor | None = None
        self.futures: list[Future] = []

    def start(self, count: int) -> None:
        """Start so many workers, and submit all batches."""
        self.executor = ThreadPoolExecutor(count)
        try:
            for names in self.batches:
                self.futures.append(self.executor.submit(_run_batch, names, self.job, self.stopped))
                self.futures[-1].add_done_callback(self.queue.put)
        except RuntimeError as error:
            self.end(at_once=True)
            raise _NoWorkerError(0, error) from error

    def ended(self) -> list[list[tuple[str, Any]]]:
        """Return the results of a batch that has ended, as `Workers.completed` yields them."""
        try:
            future = self.queue.get(timeout=CHECK_SECONDS)
        except queue.Empty:
            return []
        return [future.result()]

    def end(self, at_once: bool) -> None:
        """Wait until all workers have ended; they end their job, and do no further one where they
        are to end `at_once`."""
        if at_once:
            self.stopped.set()
        # Not by joining: a thread whose join was interrupted counts as ended in Python up to 3.12.
        wait(self.futures)
        if self.executor is not None:
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


def _work(theirs: socket.socket, parent: int, job: Job, batches: list[list[str]]) -> None:
    """Run, as a worker, the batches whose numbers come through its connection, and send back the
    results of each, or its error and where that was raised."""
    _become_worker(parent)
    with contextlib.suppress(OSError):  # the parent is gone
        while number := theirs.recv(NUMBER.size):
            names = batches[NUMBER.unpack(number)[0]]
            try:
                answer = pickle.dumps((_run_batch(names, job), None, ""))
            except BaseException as error:
                answer = pickle.dumps((None, error, traceback.format_exc()))
            theirs.sendall(NUMBER.pack(len(answer)) + answer)


def _become_worker(parent: int) -> None:
    """Prepare a forked worker: it ends with its parent, leaves Ctrl-C to it, and runs none of its
    signal handlers."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())
    end_with_parent(parent)
    # The parent's objects stay as they are: looking through them for garbage would copy their memory.
    gc.freeze()


def _run_batch(names: list[str], job: Job, stopped: threading.Event | None = None) -> list[tuple[str, Any]]:
    """Run the worker's job for each name; return the names and results, fewer once it is `stopped`."""
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
