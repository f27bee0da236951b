"""The share of a process in a conversion to an object store: some files at a time are written in the spool, and sent
while the next are written."""

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from reshard.storage.io.files import OpenFiles
from reshard.storage.run.conversion import Share, ShareResult
from reshard.storage.run.job import ConversionJob
from reshard.storage.stores.workdir import StoreWorkdir

# Files that are sent at a time, each in parts.
FILES_AT_ONCE = 4
CHECK_SECONDS = 0.2


class StoreShare(Share):
    """The files that this process writes and sends. What an earlier run had sent is not sent again."""

    def __init__(self, job: ConversionJob, files: OpenFiles) -> None:
        assert isinstance(job.workdir, StoreWorkdir)
        super().__init__(job, files)
        self.workdir = job.workdir

    def write(self, to_rewrite: frozenset[str]) -> ShareResult:
        """Write and send what is not in the store yet. Raises ReshardError if the source changes meanwhile."""
        job, workdir = self.job, self.workdir
        workdir.expect(job.destination.sizes)
        if job.team.process:
            workdir.open_spool()
        sizes = {name: job.destination.sizes[name] for name in sorted(self.file_names)}
        sent = workdir.sent(sizes)
        workdir.sent_before = sum(sizes[name] for name in sent)
        done: dict[str, list[Any]] = {}
        for record in sent.values():
            done |= record["tensors"]
        left = {name: n for name, n in sizes.items() if name not in sent}
        with Sending(workdir) as sending:
            rounds = in_rounds(left, workdir.spool_bytes // 2)
            if not rounds and any(not job.strips_of(name) for name in self.hashed):
                rounds = [[]]  # for the copies, which are in no file
            for number, names in enumerate(rounds):
                sending.wait_for_room(sum(sizes[name] for name in names), job.team.check)
                done |= self._write_round(names, sizes, sum(sizes[name] for name in left), number == 0)
                for name in names:
                    own = {n: done[n] for n in sorted(self.hashed) if self._first_file(n) == name}
                    sending.begin(name, sizes[name], own)
                    del left[name]
            sending.wait(job.team.check)
        resumed = [name for name in self.names if job.files_of(name) and sent.keys() >= self._own_files(name)]
        reported = [name for name in self.stored_names if name in self.hashed]
        return ShareResult(
            {name: done[name][0] for name in reported},
            {name: done[name][1] for name in reported if done[name][1]},
            sorted(resumed),
        )

    def changed_tensors(self, stored_names: set[str], checksums: dict[str, str]) -> list[str]:
        """Return no tensor: the store's versions have shown that the files are those that were sent."""
        return []

    def _write_round(
        self, names: list[str], sizes: Mapping[str, int], left_bytes: int, with_copies: bool
    ) -> dict[str, list[Any]]:
        """Write some files in the spool; return checksum and overflow of the stored tensors that they report."""
        total, report_progress = sum(sizes.values()), self.job.options.progress
        size = sum(sizes[name] for name in names)

        def progress(done: int, of: int) -> None:
            if report_progress is not None:
                report_progress(total - left_bytes + size * done // max(1, of), total)

        # What is in the spool is sent, or written again.
        options = replace(self.job.options, sync=False, progress=progress)
        files = OpenFiles.of_destination(write=True)
        try:
            share = RoundShare(replace(self.job, options=options), files, set(names), with_copies)
            share.slow_files = self.slow_files
            share.journal_path.unlink(missing_ok=True)  # of another round
            result = share.write(frozenset())
        finally:
            files.close()
        self.slow_files = share.slow_files
        return {
            name: [checksum, result.overflowed.get(name, 0)] for name, checksum in result.checksums.items()
        }

    def _own_files(self, name: str) -> set[str]:
        return self.file_names.intersection(self.job.files_of(name))

    def _first_file(self, stored_name: str) -> str:
        strips = self.job.strips_of(stored_name)
        return str(strips[0].path) if strips else ""


class RoundShare(Share):
    """Files that are written together. Of a tensor whose checksum another round reports, only the rows that are written
    here are read again."""

    def _reads_all_of(self, name: str) -> bool:
        return any(stored in self.hashed for stored in self.job.quantized.stored_names(name))


def in_rounds(sizes: Mapping[str, int], round_bytes: int) -> list[list[str]]:
    """Return the files that are written together: neighbors, which have parts of the same tensors, of at most these
    bytes or one file."""
    rounds: list[list[str]] = []
    size = 0
    for name, n in sizes.items():
        if not rounds or size + n > round_bytes:
            rounds.append([])
            size = 0
        rounds[-1].append(name)
        size += n
    return rounds


class Sending:
    """Files on their way from the spool to the store, to the end of the `with` block. The first failure is raised by
    each wait."""

    def __init__(self, workdir: StoreWorkdir) -> None:
        self.workdir, self.held_bytes = workdir, 0
        self.changed = threading.Condition()
        self.futures: list[Future[None]] = []
        self.pool = ThreadPoolExecutor(FILES_AT_ONCE, "reshard-send")

    def begin(self, name: str, size_bytes: int, tensors: Mapping[str, list[Any]]) -> None:
        """Send a file, with what is recorded of its tensors."""
        with self.changed:
            self.held_bytes += size_bytes
        future = self.pool.submit(self.workdir.send, name, tensors)
        self.futures.append(future)
        future.add_done_callback(lambda _: self._sent(size_bytes))

    def _sent(self, size_bytes: int) -> None:
        with self.changed:
            self.held_bytes -= size_bytes
            self.changed.notify()

    def wait_for_room(self, size_bytes: int, check: Callable[[], None]) -> None:
        """Wait until the spool has room for so many bytes, or holds nothing."""
        self._wait(
            lambda: not self.held_bytes or self.held_bytes + size_bytes <= self.workdir.spool_bytes, check
        )

    def wait(self, check: Callable[[], None]) -> None:
        """Wait until everything is sent."""
        self._wait(lambda: not self.held_bytes, check)

    def _wait(self, is_over: Callable[[], bool], check: Callable[[], None]) -> None:
        while True:
            for future in [future for future in self.futures if future.done()]:
                future.result()
            check()
            with self.changed:
                if is_over():
                    break
                self.changed.wait(CHECK_SECONDS)
        for future in [future for future in self.futures if future.done()]:
            future.result()

    def __enter__(self) -> "Sending":
        return self

    def __exit__(self, *exc: object) -> None:
        self.pool.shutdown(cancel_futures=True)


def send_files(workdir: StoreWorkdir, sizes: Mapping[str, int], check: Callable[[], None]) -> None:
    """Send files of a spool that holds them all, and remove them from it; `check` raises where another process has
    failed."""
    with Sending(workdir) as sending:
        for name in sorted(sizes):
            sending.begin(name, sizes[name], {})
        sending.wait(check)
