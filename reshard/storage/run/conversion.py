"""A conversion, from top to bottom: agree with the other processes, write this one's files, read again what an earlier
run had written, and publish.

`run_conversion` has these steps, `Share.write` those of one process, `copy_tensor` those of one tensor: read a slab,
check it, cast it, hash it, write it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import xxhash

from reshard.core.errors import ReshardError, is_resumable
from reshard.storage.io.boxes import BoxReader
from reshard.storage.io.casts import cast, overflow, overflow_notice
from reshard.storage.io.files import OpenFiles, write_error
from reshard.storage.io.streams import SLAB_BYTES, StripWriter
from reshard.storage.io.sync import EarlySync, NoSync
from reshard.storage.run.job import ConversionJob, files_of_process
from reshard.storage.run.journal import Done, Journal
from reshard.storage.run.workdir import fingerprint
from reshard.storage.run.workers import Workers, run_jobs
from reshard.storage.sources.verify import checksum_of


@dataclass
class Outcome:
    """The outcome of a conversion: how many tensors an earlier run had finished, how many values of each
    tensor a cast made infinite, and whether an earlier run had published everything."""

    resumed_tensors: int = 0
    overflowed: dict[str, int] = field(default_factory=dict)
    was_published: bool = False


class ShareResult(NamedTuple):
    """The report of a process on its share of the files: checksums of stored tensors, how many values of each
    tensor overflowed, and the names of the tensors that an earlier run had finished."""

    checksums: dict[str, str]
    overflowed: dict[str, int]
    resumed: list[str]


def run_conversion(
    job: ConversionJob,
    settings: dict[str, Any],
    share_of: "Callable[[ConversionJob, OpenFiles], Share] | None" = None,
) -> Outcome:
    """Write everything and publish it. `settings` is all but the source that decides the bytes: a
    run is resumed only with the same. `share_of` gives what a process writes, by default a `Share`.

    Raises ReshardError. What can be resumed is left for that, all else is removed.
    """
    team = job.team
    contents, inodes = job.source.identity()
    # Hosts know the same file under different inodes, so only the first process compares those.
    same_run = fingerprint(contents, settings, team.size)
    files, published, unusable = OpenFiles.of_destination(write=True), False, False
    try:
        if len(set(team.exchange(same_run))) > 1:
            raise ReshardError(
                "the processes of this run were given different sources, layouts or options", resumable=True
            )
        if any(team.together(lambda: _open_workdir(job, fingerprint(same_run, inodes)))):
            published = True
            return Outcome(len(job.tensors), was_published=True)
        share = (share_of or Share)(job, files)
        results = _write_together(share)
        resumed = set(results[team.process].resumed)
        changed = _changed_since(share, results)
        if changed:
            results = _write_together(share, changed)
            resumed &= set(results[team.process].resumed)
        team.conclude(lambda: publish(job, _checksums(results), share.slow_files))
        published = True
        return Outcome(len(resumed), {name: n for result in results for name, n in result.overflowed.items()})
    except BaseException as error:
        # An interrupt or a kill leaves the directory for --resume; what cannot be resumed goes
        # away.
        unusable = not is_resumable(error)
        team.fail(error)
        raise
    finally:
        files.close()
        if not published:
            team.stop()  # before another run can take the lock
        job.workdir.close(remove=unusable)


def _open_workdir(job: ConversionJob, recorded: str) -> bool:
    """Prepare the working directory; return True where an interrupted run of the same had
    published all before."""
    if job.team.process:
        return False
    needed, free = job.workdir.space(job.destination.sizes)
    if needed > free:
        raise ReshardError(
            f"{job.workdir.destination} needs {needed:,} more bytes, but the disk has {free:,} free",
            resumable=True,
        )
    return job.workdir.open(recorded, job.options.resume)


def _write_together(share: "Share", to_rewrite: frozenset[str] = frozenset()) -> list[ShareResult]:
    """Write the shares of all processes; return what each reports."""
    return [ShareResult(*answer) for answer in share.job.team.together(lambda: share.write(to_rewrite))]


def _checksums(results: list[ShareResult]) -> dict[str, str]:
    return {name: checksum for result in results for name, checksum in result.checksums.items()}


def _changed_since(share: "Share", results: list[ShareResult]) -> frozenset[str]:
    """Return the stored tensors of an earlier run whose bytes are no longer those that it
    wrote. Each is read again by one process."""
    stored_names = share.job.quantized.stored_names
    resumed = {stored for result in results for name in result.resumed for stored in stored_names(name)}
    if not resumed:
        return frozenset()
    checksums = _checksums(results)
    answers = share.job.team.together(lambda: share.changed_tensors(resumed, checksums))
    return frozenset(stored for names in answers for stored in names)


def publish(job: ConversionJob, checksums: dict[str, str], slow_files: dict[str, bytes] | None) -> None:
    """Write what stands beside the weights, and the manifest, and put the destination in its place. Raises
    ReshardError if the source has changed, or holds two tensors for one."""
    with job.source.unchanged():
        _check_copies(job, checksums)
        job.destination.finish(job.workdir, job.manifest_fields(), checksums, job.options.sync, slow_files)
    job.workdir.publish(job.options.sync)


def _check_copies(job: ConversionJob, checksums: dict[str, str]) -> None:
    """Raise ReshardError if tensors that Megatron holds as one parameter differ."""
    for copy, primary in {**job.source.copies, **job.destination.copies}.items():
        of_copy, of_primary = (
            [checksums[stored_name] for stored_name in job.quantized.stored_names(name)]
            for name in (copy, primary)
        )
        if of_copy != of_primary:
            hint = (
                ': if they are two, say "tie_word_embeddings": false in config.json' * job.source.model.tied
            )
            raise ReshardError(
                f"{job.source.path}: {copy} differs from {primary}, but Megatron holds "
                f"the two as one parameter{hint}"
            )


# Jobs beside those of the tensors, whose names cannot be these.
FRAMES, SLOW_FILES = "\0frames", "\0slow files"


class Share:
    """The files of a conversion that this process writes, and has open as `files`: those of `file_names`, by default
    all that are its own. Without `with_copies`, tensors that are in no file are left out.

    `slow_files` are the destination's once they are made: `write` makes them where they are wanted
    and not there.
    """

    def __init__(
        self,
        job: ConversionJob,
        files: OpenFiles,
        file_names: set[str] | None = None,
        with_copies: bool = True,
    ) -> None:
        self.job, self.files, self.root = job, files, job.workdir.tree
        self.slow_files: dict[str, bytes] | None = None
        own = files_of_process(job.destination.sizes, job.team.process, job.team.size)
        self.file_names = own if file_names is None else file_names
        self.journal_path = job.workdir.path / f"journal-{job.team.process}"
        self.paths = {name: self.root / name for name in sorted(self.file_names)}
        self.names, self.hashed = job.tensors_in(self.file_names, with_copies)
        self.units = job.units_of(self.names)
        self.stored_names = [stored for name in self.names for stored in job.quantized.stored_names(name)]

    def write(self, to_rewrite: frozenset[str]) -> ShareResult:
        """Write what the journal does not have as done; `to_rewrite` stored tensors are written again.

        Raises ReshardError if the source changes meanwhile.
        """
        job = self.job
        with job.source.unchanged():
            journal = self._journal()
            try:
                journal.unfinish(to_rewrite & set(self.stored_names))
                journal.create(self.paths)
                for name, path in self.paths.items():
                    self.files.resize(path, job.destination.sizes[name])
                finished = dict(journal.finished)
                todo = [
                    name
                    for unit in self.units.values()
                    if any(p not in finished for name in unit for p in job.quantized.stored_names(name))
                    for name in unit
                ]
                self._write_tensors(todo, journal, finished)
            finally:
                journal.close()
        reported = [name for name in self.stored_names if name in self.hashed]
        return ShareResult(
            {name: finished[name].checksum for name in reported},
            {name: finished[name].overflowed for name in reported if finished[name].overflowed},
            sorted(set(self.names) - set(todo)),
        )

    def _journal(self) -> Journal:
        job = self.job
        files_of_parts = {
            stored_name: {str(strip.path) for strip in job.strips_of(stored_name)} & self.file_names
            for stored_name in self.stored_names
        }
        sizes = {name: job.destination.sizes[name] for name in self.file_names}
        return Journal(self.journal_path, self.root, sizes, files_of_parts, job.options.sync)

    def _write_tensors(self, todo: list[str], journal: Journal, finished: dict[str, Done]) -> None:
        """Write tensors and all that stands around them in this share's files, and close them; what
        is done goes to `finished`."""
        job, left = self.job, set(todo)
        sizes = {
            first: sum(job.tensors[name].size_bytes for name in unit)
            for first, unit in self.units.items()
            if first in left
        }
        total = sum(job.tensors[name].size_bytes for name in self.names)
        done = total - sum(sizes.values())
        report_progress = job.options.progress or (lambda done, total: None)
        calls = self._calls()
        # Workers are forked before the thread that syncs is there.
        with Workers(
            self._job_by_name(calls),
            dict.fromkeys(calls, 0) | sizes,
            job.options.workers,
            lambda name: {name} if name in calls else self.file_names.intersection(job.files_of(name)),
        ) as workers:
            sync_files = EarlySync if job.options.sync else NoSync
            with sync_files(self.files, list(self.paths.values()), journal) as sync:
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
            self._close(journal)

    def _calls(self) -> dict[str, Callable[[], Any]]:
        """Return what workers do beside copying tensors, by the names of these jobs."""
        job = self.job
        calls: dict[str, Callable[[], Any]] = {
            FRAMES: lambda: job.destination.write_frames(self.root, self.file_names, self.files)
        }
        if job.destination.has_slow_files and self.slow_files is None and job.team.process == 0:
            calls[SLOW_FILES] = job.destination.slow_files
        return calls

    def _job_by_name(self, calls: dict[str, Callable[[], Any]]) -> Callable[[str], Any]:
        """Return what a worker does for a name: one of the `calls`, or the copy of the tensors of a unit,
        which gives what a journal keeps of them."""
        strips = {
            stored_name: self.job.strips_below(stored_name, self.root, self.file_names)
            for stored_name in self.stored_names
        }
        writer = StripWriter(strips, self.files)

        def run(name: str) -> Any:
            if name in calls:
                return calls[name]()
            done: dict[str, Done] = {}
            with writer.whole_matrices():
                for each in self.units[name]:
                    done |= copy_tensor(self.job, each, writer, self._reads_all_of(each))
            return done

        return run

    def _reads_all_of(self, name: str) -> bool:
        """Return True for a tensor that is read whole, and compared with the source's manifest, also where only some
        of its rows are written."""
        return True

    def _close(self, journal: Journal) -> None:
        """Close the files that were written.

        Raises ReshardError if a file reports only now that bytes were not written, and if one
        of the files is no longer the one at its path.
        """
        replaced = [path for path in self.paths.values() if self.files.replaced(path)]
        errors = self.files.close()
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


def copy_tensor(
    job: ConversionJob, name: str, writer: StripWriter, reads_all: bool = True
) -> dict[str, Done]:
    """Copy a canonical tensor to its place in the destination's files, a slab of rows at a time; return the checksums
    of the stored tensors that it becomes. Without `reads_all` slabs of which nothing is written are not read, and the
    checksums are of no use.

    Raises ReshardError if the source's manifest has another checksum, or if a cast makes
    numbers infinite and that is not allowed.
    """
    info, source_dtype = job.tensors[name], job.source.held[name].dtype
    is_quantized, overflowed = name in job.quantized.names, 0
    # What is written as it was read is hashed once: the source's manifest has that checksum too.
    same_bytes = source_dtype.published == info.dtype.published and not is_quantized
    checks_what_is_written = same_bytes and job.checks.plain(name)
    reads_all = reads_all or is_quantized
    watch = None if checks_what_is_written or not reads_all else job.checks.watch(name)

    def read(start: int, stop: int) -> np.ndarray:
        nonlocal overflowed
        rows = job.source.reader.rows(name, start, stop)
        if watch is not None:
            watch.rows(cast(rows, source_dtype, source_dtype.published), start, stop)
        slab = cast(rows, source_dtype, info.dtype, name)
        overflowed += overflow(rows, slab, source_dtype, info.dtype)
        return slab

    if is_quantized:
        checksums = job.quantized.copy(name, info, read, writer, lambda other: _slabs(job, other))
    else:
        digest = xxhash.xxh3_128()
        for start, stop in info.slabs(SLAB_BYTES, job.source.row_multiple(name)):
            if not reads_all and not writer.takes(name, start, stop):
                continue
            slab = read(start, stop)
            published = cast(slab, info.dtype, info.dtype.published)
            digest.update(memoryview(published.view(np.uint8).reshape(-1)))
            writer.write_rows(name, start, slab)
        checksums = {name: digest.hexdigest()}
    if watch is not None:
        watch.end()
    elif checks_what_is_written and reads_all:
        job.checks.compare(name, checksums[name])
    if overflowed and not job.options.allow_overflow:
        raise ReshardError(
            f"{overflow_notice(name, overflowed, info.dtype)}; choose another --dtype, or pass --allow-overflow"
        )
    first = job.quantized.stored_names(name)[0]
    return {
        stored_name: Done(checksum, overflowed if stored_name == first else 0)
        for stored_name, checksum in checksums.items()
    }


def _slabs(job: ConversionJob, name: str) -> Iterator[np.ndarray]:
    """Yield the slabs of any tensor in its stored dtype, for a scheme that needs more than one weight."""
    source, info = job.source, job.tensors[name]
    for start, stop in info.slabs(SLAB_BYTES, source.row_multiple(name)):
        yield cast(source.read_rows(name, start, stop), source.tensors[name].dtype, info.dtype)
