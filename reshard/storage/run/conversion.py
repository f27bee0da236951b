"""A run of a conversion: create the files, stream every tensor, meet the other processes, finish and
publish."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from reshard.core.errors import ReshardError, is_resumable
from reshard.storage.fp8 import Fp8Blocks
from reshard.storage.io.casts import cast, overflow, overflow_notice
from reshard.storage.io.files import EarlySync, NoSync, OpenFiles, write_error
from reshard.storage.io.streams import SLAB_BYTES, Strip, StripReader, StripWriter, TensorInfo
from reshard.storage.quantized import Quantized
from reshard.storage.run.journal import Done, Journal
from reshard.storage.run.team import Team
from reshard.storage.run.workdir import Workdir
from reshard.storage.run.workers import BackgroundCall, Progress, Workers, run_jobs
from reshard.storage.sources.base import Source
from reshard.storage.sources.verify import SourceChecks, checksum_of


@dataclass
class Run:
    """What both directions share.

    `tensors` are the canonical tensors as they are stored, `strips` say where their rows go (paths relative
    to the destination), `sizes` are the files' bytes, `checks` what the source's manifest says. Each process
    of the `team` writes whole files. Numbers that a cast makes infinite are refused unless `allow_overflow`;
    `overflowed` counts them by tensor. `was_done` says in the end that nothing was left to do: a run that was
    ended after it had published. `meanwhile` are calls whose results are taken as they come.
    """

    source: Source
    tensors: dict[str, TensorInfo]
    strips: dict[str, list[Strip]]
    sizes: dict[str, int]
    work: Workdir
    team: Team
    workers: int | None
    sync: bool
    progress: Progress | None
    checks: SourceChecks
    allow_overflow: bool = False
    quantized: Quantized = field(default_factory=lambda: Fp8Blocks(()))
    meanwhile: tuple[BackgroundCall, ...] = ()
    overflowed: dict[str, int] = field(default_factory=dict)
    was_done: bool = False

    def run(self, shared: str, recorded: str, resume: bool, create: Callable, finish: Callable) -> int:
        """Write everything; the number of tensors that a resumed run found done.

        `shared` is a fingerprint of the run that is the same in all its processes, `recorded` the one of the
        first process that a resumed run has to repeat: hosts know the same file under different numbers.
        """
        team, work = self.team, self.work
        files, whole, abandon = OpenFiles(os.O_RDWR | os.O_NOFOLLOW), False, False
        try:
            if len(set(team.exchange(shared))) > 1:
                raise ReshardError(
                    "the processes of this run were given different sources, layouts or options",
                    resumable=True,
                )
            if any(team.together(lambda: self._open(recorded, resume))):
                whole = self.was_done = True
                return len(self.tensors)
            answers = team.together(lambda: self._stream(files, create))
            resumed = set(answers[team.process][2])
            spoiled = self._spoiled(answers)
            if spoiled:
                answers = team.together(lambda: self._stream(files, create, spoiled))
                resumed &= set(answers[team.process][2])
            checksums = {
                name: value for some, _, _ in answers for name, value in some.items() if value != "-"
            }
            for _, overflowed, _ in answers:
                self.overflowed |= overflowed
            team.conclude(lambda: self._publish(checksums, finish))
            whole = True
            return len(resumed)
        except BaseException as error:
            # An interrupt or a kill leaves the directory for --resume; what cannot be resumed goes away.
            abandon = not is_resumable(error)
            raise
        finally:
            files.close()
            if not whole:
                team.stop()  # before another run can take the lock
            work.close(remove=abandon)

    def _open(self, recorded: str, resume: bool) -> bool:
        """Prepare the working directory; whether an interrupted run of the same had published all before."""
        if self.team.process:
            return False
        self._check_space()
        return self.work.open(recorded, resume)

    def _publish(self, checksums: dict[str, str], finish: Callable) -> None:
        with self.source.unchanged():
            self._check_copies(checksums)
            finish(checksums)
        self.work.publish(self.sync)

    def _stream(
        self, files: OpenFiles, create: Callable, spoiled: frozenset[str] = frozenset()
    ) -> tuple[dict[str, str], dict[str, int], list[str]]:
        """See `_write`, of a source that does not change meanwhile."""
        with self.source.unchanged():
            return self._write(files, create, spoiled)

    def _write(
        self, files: OpenFiles, create: Callable, spoiled: frozenset[str] = frozenset()
    ) -> tuple[dict[str, str], dict[str, int], list[str]]:
        """Write this process's files; the checksums and overflows of its tensors, and the names of those that
        were done before.

        The `spoiled` stored tensors are written again.
        """
        tree = self.work.tree
        mine = self.team.share(self.sizes)
        paths = {name: tree / name for name in sorted(mine)}
        here = {
            n: [s._replace(path=paths[str(s.path)]) for s in strips if str(s.path) in mine]
            for n, strips in self.strips.items()
        }
        names, hashed = self._tensors_of(mine)
        parts = {
            part: {str(s.path) for s in self.strips.get(part, ())} & mine
            for name in names
            for part in self.quantized.parts(name)
        }
        journal = Journal(
            self.work.path / f"journal-{self.team.process}",
            tree,
            {n: self.sizes[n] for n in mine},
            parts,
            self.sync,
        )
        try:
            journal.unfinish(spoiled & parts.keys())
            journal.create(paths)
            for name, path in paths.items():
                files.resize(path, self.sizes[name])
            finished = dict(journal.finished)
            todo = [
                name for name in names if any(part not in finished for part in self.quantized.parts(name))
            ]
            sizes = {name: self.tensors[name].size_bytes for name in todo}
            done = sum(self.tensors[name].size_bytes for name in names) - sum(sizes.values())
            writer = StripWriter(here, files)

            def lost(path: Path) -> None:
                journal.forget(str(path.relative_to(tree)))

            def copy(name: str) -> dict[str, Done]:
                return self._copy(name, writer)

            def written_into(name: str) -> set[str]:
                return {
                    str(strip.path) for part in self.quantized.parts(name) for strip in here.get(part, ())
                }

            # Workers are forked before the thread that syncs is there.
            with (
                BackgroundCall(lambda: create(files, mine), files.close) as created,
                Workers(copy, sizes, self.workers, written_into, files.close) as workers,
                (EarlySync if self.sync else NoSync)(
                    files, list(paths.values()), journal.record, lost
                ) as sync,
            ):

                def ended(name: str, written: dict[str, Done]) -> None:
                    for part, value in written.items():
                        finished[part] = value if part in hashed else value._replace(checksum="-")
                        sync.written((part, finished[part]))

                def check() -> None:
                    self.team.check()
                    sync.check()
                    for aside in (created, *self.meanwhile):
                        aside.check()

                unwritten = workers.run(ended, check, self.progress, done)
                created.result()
            self._close(files, list(paths.values()), [*unwritten, created.left], lost)
        finally:
            journal.close()
        checksums = {part: finished[part].checksum for part in parts if part in hashed}
        return (
            checksums,
            {part: finished[part].overflowed for part in parts if finished[part].overflowed},
            sorted(set(names) - set(todo)),
        )

    def _spoiled(self, answers: list[Any]) -> frozenset[str]:
        """Of the stored tensors that were done before, those whose bytes in the files are no longer those
        that were written.

        A journal and an inode cannot say that: a file may be changed in place, or another may get the inode
        of one that was removed. So the bytes are read again, each tensor by one process.
        """
        before = {part for _, _, names in answers for name in names for part in self.quantized.parts(name)}
        if not before:
            return frozenset()
        written = {part: value for some, _, _ in answers for part, value in some.items()}
        return frozenset(
            part for some in self.team.together(lambda: self._unlike(before, written)) for part in some
        )

    def _unlike(self, before: set[str], written: dict[str, str]) -> list[str]:
        """Of these stored tensors, those of this process's share whose bytes do not have the checksum that
        was `written`."""
        infos = {part: TensorInfo(shape, dtype) for name, info in self.tensors.items()
                 for part, (dtype, shape) in self.quantized.stored(name, info).items()}  # fmt: skip
        _, hashed = self._tensors_of(self.team.share(self.sizes))
        strips = {
            part: [s._replace(path=self.work.tree / s.path) for s in self.strips.get(part, ())]
            for part in before & hashed
        }
        with OpenFiles(os.O_RDONLY | os.O_NOFOLLOW) as files:
            reader = StripReader(infos, files)

            def differs(part: str) -> bool:
                try:
                    return (
                        checksum_of(
                            part,
                            infos[part],
                            lambda name, start, stop: reader.read_rows(name, start, stop, strips[name]),
                        )
                        != written[part]
                    )
                except ReshardError:  # it cannot be read
                    return True

            # copies are in no file
            sizes = {part: infos[part].size_bytes for part, places in strips.items() if places}
            return [
                part
                for part, differ in run_jobs(sizes, differs, self.workers, check=self.team.check).items()
                if differ
            ]

    def _tensors_of(self, mine: set[str]) -> tuple[list[str], set[str]]:
        """The canonical tensors of which some rows go to these files, and the stored tensors whose checksum
        this process gives."""
        names: list[str] = []
        hashed: set[str] = set()
        for name in self.tensors:
            paths = [
                str(strip.path) for part in self.quantized.parts(name) for strip in self.strips.get(part, ())
            ]
            owns = paths[0] in mine if paths else self.team.process == 0
            if owns or any(path in mine for path in paths):
                names.append(name)
                hashed.update(self.quantized.parts(name) if owns else ())
        return names, hashed

    def _close(
        self,
        files: OpenFiles,
        paths: list[Path],
        closed: list[dict[Path, OSError] | None],
        lost: Callable[[Path], None],
    ) -> None:
        """Close the files that were written; `closed` are the errors that this gave in each worker's process,
        since some systems tell them once. Raises ReshardError where one of them is not what is at its
        path."""
        replaced = [path for path in paths if files.replaced(path)]
        errors = files.close()
        for found in closed:
            errors |= found or {}
        for path in errors:
            lost(path)
        for path, error in errors.items():
            raise write_error(path, error)
        if replaced:
            raise ReshardError(
                f"{replaced[0]} was removed or replaced while it was written; run again with --resume",
                resumable=True,
            )

    def _copy(self, name: str, writer: StripWriter) -> dict[str, Done]:
        """Stream one tensor; its checksum, and that of its scales."""
        info, source_dtype = self.tensors[name], self.source.tensors[name].dtype
        same_bytes = source_dtype == info.dtype and name not in self.quantized.names
        # What is written as it was read is hashed once: the manifest has that checksum too.
        watch = None if same_bytes and self.checks.plain(name) else self.checks.watch(name)
        overflowed = 0

        def read(start: int, stop: int) -> np.ndarray:
            nonlocal overflowed
            rows = self.source.read_rows(name, start, stop)
            if watch is not None:
                watch.rows(rows, start, stop)
            slab = cast(rows, source_dtype, info.dtype)
            overflowed += overflow(rows, slab, source_dtype, info.dtype)
            return slab

        def look(other: str) -> Iterator[np.ndarray]:
            stored, info = self.source.tensors[other].dtype, self.tensors[other]
            for start, stop in info.slabs(SLAB_BYTES, self.source.row_multiple(other)):
                yield cast(self.source.read_rows(other, start, stop), stored, info.dtype)

        if name in self.quantized.names:
            checksums = self.quantized.copy(name, info, read, writer, look)
        else:
            digest = xxhash.xxh3_128()
            for start, stop in info.slabs(SLAB_BYTES, self.source.row_multiple(name)):
                slab = read(start, stop)
                digest.update(memoryview(slab.view(np.uint8).reshape(-1)))
                writer.write_rows(name, start, slab)
            checksums = {name: digest.hexdigest()}
        if watch is not None:
            watch.end()
        elif same_bytes:
            self.checks.compare(name, checksums[name])
        if overflowed and not self.allow_overflow:
            raise ReshardError(
                f"{overflow_notice(name, overflowed, info.dtype)}; choose another --dtype, "
                f"or pass --allow-overflow"
            )
        first = self.quantized.parts(name)[0]
        return {part: Done(value, overflowed if part == first else 0) for part, value in checksums.items()}

    def _check_copies(self, checksums: dict[str, str]) -> None:
        for name, primary in self.source.copies.items():
            parts = [[checksums[part] for part in self.quantized.parts(n)] for n in (name, primary)]
            if parts[0] != parts[1]:
                raise ReshardError(
                    f"{self.source.path}: {name} differs from {primary}, but Megatron holds "
                    f"the two as one parameter"
                )

    def _check_space(self) -> None:
        """Raise ReshardError where the disk has no space for what all processes have yet to write."""
        needed, free = self.work.space(self.sizes)
        if needed > free:
            raise ReshardError(
                f"{self.work.destination} needs {needed:,} more bytes, but the disk has {free:,} free",
                resumable=True,
            )
