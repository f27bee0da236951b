"""One process's share of a conversion: the files that it writes whole, as far as its journal has
them not already."""

from collections.abc import Callable
from typing import Any, NamedTuple

from reshard.core.errors import ReshardError
from reshard.storage.io.boxes import BoxReader
from reshard.storage.io.files import OpenFiles, write_error
from reshard.storage.io.streams import StripWriter
from reshard.storage.io.sync import EarlySync, NoSync
from reshard.storage.run.job import ConversionJob
from reshard.storage.run.journal import Done, Journal
from reshard.storage.run.tensor_copy import TensorCopy
from reshard.storage.run.workers import Workers, run_jobs
from reshard.storage.sources.verify import checksum_of


class ShareResult(NamedTuple):
    """The report of a process on its share of the files: checksums of stored tensors, how many values of each
    tensor overflowed, and the names of the tensors that an earlier run had finished."""

    checksums: dict[str, str]
    overflowed: dict[str, int]
    resumed: list[str]


# Jobs beside those of the tensors, whose names cannot be these.
FRAMES, SLOW_FILES = "\0frames", "\0slow files"


class Share:
    """The files of a conversion that this process writes.

    `slow_files` are the destination's once they are made; `write` makes them where they are wanted
    and not there.
    """

    def __init__(self, job: ConversionJob, slow_files: dict[str, bytes] | None = None) -> None:
        self.job, self.root = job, job.workdir.tree
        self.slow_files = slow_files
        self.file_names = files_of_process(job.destination.sizes, job.team.process, job.team.size)
        self.paths = {name: self.root / name for name in sorted(self.file_names)}
        self.names, self.hashed = job.tensors_in(self.file_names)
        self.units = job.units_of(self.names)
        self.stored_names = [
            stored_name for name in self.names for stored_name in job.quantized.stored_names(name)
        ]

    def write(self, files: OpenFiles, to_rewrite: frozenset[str]) -> ShareResult:
        """Write what the journal does not have as done; `to_rewrite` stored tensors are written again.

        Raises ReshardError if the source changes meanwhile.
        """
        with self.job.source.unchanged():
            journal = self._journal()
            try:
                return self._write(files, journal, to_rewrite)
            finally:
                journal.close()

    def _journal(self) -> Journal:
        job = self.job
        files_of_parts = {
            stored_name: {str(strip.path) for strip in job.strips_of(stored_name)} & self.file_names
            for stored_name in self.stored_names
        }
        sizes = {name: job.destination.sizes[name] for name in self.file_names}
        path = job.workdir.path / f"journal-{job.team.process}"
        return Journal(path, self.root, sizes, files_of_parts, job.options.sync)

    def _write(self, files: OpenFiles, journal: Journal, to_rewrite: frozenset[str]) -> ShareResult:
        job = self.job
        journal.unfinish(to_rewrite & set(self.stored_names))
        journal.create(self.paths)
        for name, path in self.paths.items():
            files.resize(path, job.destination.sizes[name])
        finished = dict(journal.finished)
        todo = [
            name
            for unit in self.units.values()
            if any(p not in finished for name in unit for p in job.quantized.stored_names(name))
            for name in unit
        ]
        self._write_tensors(todo, files, journal, finished)
        return ShareResult(
            {
                stored_name: finished[stored_name].checksum
                for stored_name in self.stored_names
                if stored_name in self.hashed
            },
            {
                stored_name: finished[stored_name].overflowed
                for stored_name in self.stored_names
                if finished[stored_name].overflowed
            },
            sorted(set(self.names) - set(todo)),
        )

    def _write_tensors(
        self, todo: list[str], files: OpenFiles, journal: Journal, finished: dict[str, Done]
    ) -> None:
        """Write tensors and all that stands around them in this share's files, and close them; what
        is done goes to `finished`."""
        job, paths = self.job, list(self.paths.values())
        left = set(todo)
        sizes = {
            first: sum(job.tensors[name].size_bytes for name in unit)
            for first, unit in self.units.items()
            if first in left
        }
        total = sum(job.tensors[name].size_bytes for name in self.names)
        done = total - sum(sizes.values())
        report_progress = job.options.progress or (lambda done, total: None)
        calls = self._calls(files)
        # Workers are forked before the thread that syncs is there.
        with Workers(
            self._job_by_name(files, calls),
            dict.fromkeys(calls, 0) | sizes,
            job.options.workers,
            lambda name: {name} if name in calls else self.file_names.intersection(job.files_of(name)),
        ) as workers:
            with (EarlySync if job.options.sync else NoSync)(files, paths, journal) as sync:
                report_progress(done, total)
                for completed in workers.completed():
                    for name, result in completed:
                        if name == SLOW_FILES:
                            self.slow_files = result
                        if name in calls:
                            continue
                        finished.update(result)
                        for item in result.items():
                            sync.written(item)
                        done += sizes[name]
                        report_progress(done, total)
                    job.team.check()
                    sync.check()
            # Before the workers end, which have the same files open: some systems report a failed
            # write only once, to the first that closes a file.
            self._close(files, journal)

    def _calls(self, files: OpenFiles) -> dict[str, Callable[[], Any]]:
        """Return what workers do beside copying tensors, by the names of these jobs."""
        job = self.job
        calls: dict[str, Callable[[], Any]] = {
            FRAMES: lambda: job.destination.write_frames(self.root, self.file_names, files)
        }
        if job.destination.has_slow_files and self.slow_files is None and job.team.process == 0:
            calls[SLOW_FILES] = job.destination.slow_files
        return calls

    def _job_by_name(self, files: OpenFiles, calls: dict[str, Callable[[], Any]]) -> Callable[[str], Any]:
        """Return what a worker does for a name: one of the `calls`, or the copy of the tensors of a unit,
        which gives what a journal keeps of them."""
        job = self.job
        strips = {
            stored_name: job.strips_below(stored_name, self.root, self.file_names)
            for stored_name in self.stored_names
        }
        writer = StripWriter(strips, files)

        def run(name: str) -> Any:
            if name in calls:
                return calls[name]()
            done: dict[str, Done] = {}
            with writer.whole_matrices():
                for each in self.units[name]:
                    done |= TensorCopy(job, each, writer).run()
            return done

        return run

    def _close(self, files: OpenFiles, journal: Journal) -> None:
        """Close the files that were written.

        Raises ReshardError if a file reports only now that bytes were not written, and if one
        of the files is no longer the one at its path.
        """
        replaced = [path for path in self.paths.values() if files.replaced(path)]
        errors = files.close()
        for path in errors:
            journal.lose(path)
        for path, error in errors.items():
            raise write_error(path, error)
        if replaced:
            raise ReshardError(
                f"{replaced[0]} was removed or replaced while it was written; run again with --resume",
                resumable=True,
            )

    def changed_tensors(self, stored_names: set[str], checksums: dict[str, str]) -> list[str]:
        """Read stored tensors of this share again; return those whose bytes no longer have their
        checksums.

        A journal and an inode cannot say that: a file may be changed in place, or another may get
        the inode of one that was removed.
        """
        job, infos = self.job, self.job.destination.stored
        files = job.destination.sizes.keys()
        strips = {
            stored_name: job.strips_below(stored_name, self.root, files)
            for stored_name in stored_names & self.hashed
        }
        with OpenFiles.of_destination(write=False) as opened:
            reader = BoxReader(infos, opened, strips.__getitem__)

            def differs(stored_name: str) -> bool:
                try:
                    checksum = checksum_of(stored_name, infos[stored_name], reader.published)
                except ReshardError:  # it cannot be read
                    return True
                return checksum != checksums[stored_name]

            # Copies are in no file.
            sizes = {
                stored_name: infos[stored_name].size_bytes for stored_name, places in strips.items() if places
            }
            outcomes = run_jobs(sizes, differs, job.options.workers, check=job.team.check)
            return [stored_name for stored_name, differ in outcomes.items() if differ]


def files_of_process(sizes: dict[Any, int], process: int, processes: int) -> set[Any]:
    """Return the files (of these, name to bytes) that one of several processes writes: contiguous
    runs of about equal bytes."""
    total, names, position = sum(sizes.values()) or 1, set(), 0
    for name, n in sizes.items():
        middle = position + n // 2
        if min(processes - 1, middle * processes // total) == process:
            names.add(name)
        position += n
    return names
