"""A run of a conversion: create the files, stream every tensor, meet the other processes, finish and publish."""

import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import xxhash

from reshard.dtypes import Dtype
from reshard.errors import ReshardError
from reshard.files import EarlySync, OpenFiles
from reshard.fp8 import Fp8Blocks
from reshard.sources import Source
from reshard.streams import SLAB_BYTES, Progress, Strip, StripWriter, TensorInfo, run_jobs
from reshard.team import Team
from reshard.workdir import Workdir


def default_workers() -> int:
    """Worker threads: as many as there are cores, at most eight (one disk has no use for more)."""
    return min(8, len(os.sched_getaffinity(0)))


@dataclass
class Run:
    """What both directions share.

    `tensors` are the canonical tensors as they are stored, `strips` say where their rows go (paths relative to the destination),
    `sizes` are the files' bytes. Each process of the `team` writes whole files.
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
    fp8: Fp8Blocks = field(default_factory=lambda: Fp8Blocks(()))

    def run(self, print_of_run: str, resume: bool, create: Callable, finish: Callable) -> int:
        """Write everything; the number of tensors that a resumed run found done."""
        team, work = self.team, self.work
        files, abandon = OpenFiles(os.O_RDWR | os.O_CREAT), False
        try:
            prints = team.together(lambda: self._open(print_of_run, resume))
            if len(set(prints)) > 1:
                raise ReshardError("the processes of this run were given different sources, layouts or options")
            answers = team.together(lambda: self._stream(files, create))
            checksums = {name: value for some, _ in answers for name, value in some.items() if value != "-"}
            team.together(lambda: self._publish(checksums, finish))
            return answers[team.process][1]
        except ReshardError as error:
            # An interrupt or a kill leaves the directory for --resume; what cannot be resumed goes away.
            abandon = not error.resumable
            raise
        finally:
            files.close()
            work.close(remove=abandon)

    def _open(self, print_of_run: str, resume: bool) -> str:
        if self.team.process == 0:
            self.work.open(print_of_run, resume)
        return print_of_run

    def _publish(self, checksums: dict[str, str], finish: Callable) -> None:
        if self.team.process == 0:
            self._check_copies(checksums)
            finish(checksums)
            self.work.publish()

    def _stream(self, files: OpenFiles, create: Callable) -> tuple[dict[str, str], int]:
        team, work = self.team, self.work
        mine = team.share(self.sizes)
        self._check_space(mine)
        for name in mine:
            path = work.path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            files.resize(path, self.sizes[name])
        finished = work.done()
        create(files, mine)
        paths = {Path(name): work.path / name for name in mine}
        here = {n: [s._replace(path=paths[s.path]) for s in strips if s.path in paths] for n, strips in self.strips.items()}
        writer = StripWriter(here, files)
        names: list[str] = []
        hashed: set[str] = set()
        for name in self.tensors:
            parts = [part for part in self.fp8.parts(name) if part in self.strips]
            all_strips = [strip for part in parts for strip in self.strips[part]]
            owns = str(all_strips[0].path) in mine if all_strips else team.process == 0
            if owns or any(here[part] for part in parts):
                names.append(name)
                hashed.update(self.fp8.parts(name) if owns else ())
        todo = [name for name in names if any(part not in finished for part in self.fp8.parts(name))]
        sizes = {name: self.tensors[name].size_bytes for name in todo}
        done = sum(self.tensors[name].size_bytes for name in names) - sum(sizes.values())

        def job(name: str) -> dict[str, str]:
            sums = self._copy(name, writer)
            for part, value in sums.items():
                work.record(part, value if part in hashed else "-")
            return sums

        with EarlySync(files, sorted(work.path / name for name in mine)) if self.sync else nullcontext():
            results = run_jobs(sizes, job, self.workers or default_workers(), self.progress, done)
        checksums = {part: finished[part] for name in names if name not in results for part in self.fp8.parts(name)}
        checksums |= {part: value for sums in results.values() for part, value in sums.items() if part in hashed}
        return checksums, len(names) - len(todo)

    def _copy(self, name: str, writer: StripWriter) -> dict[str, str]:
        """Stream one tensor; its checksum, and that of its scales."""
        info = self.tensors[name]
        source_dtype = self.source.tensors[name].dtype
        if name in self.fp8.names:
            return self.fp8.copy(name, info, lambda a, b: _cast(self.source.read_rows(name, a, b), source_dtype, info.dtype), writer)
        digest = xxhash.xxh3_128()
        for start, stop in info.slabs(SLAB_BYTES, self.source.row_multiple(name)):
            slab = _cast(self.source.read_rows(name, start, stop), source_dtype, info.dtype)
            digest.update(memoryview(slab.view(np.uint8).reshape(-1)))
            writer.write_rows(name, start, slab)
        return {name: digest.hexdigest()}

    def _check_copies(self, checksums: dict[str, str]) -> None:
        for name, primary in self.source.copies.items():
            if checksums[name] != checksums[primary]:
                raise ReshardError(f"{self.source.path}: {name} differs from {primary}, but Megatron holds the two as one parameter")

    def _check_space(self, mine: set[str]) -> None:
        needed = sum(self.sizes[name] for name in mine)
        for name in mine:
            path = self.work.path / name
            if path.exists():
                needed -= path.stat().st_blocks * 512
        status = os.statvfs(self.work.path)
        if needed > status.f_bavail * status.f_frsize:
            raise ReshardError(
                f"{self.work.destination} needs {needed:,} more bytes, but the disk has {status.f_bavail * status.f_frsize:,} free"
            )


def _cast(slab: np.ndarray, source: Dtype, target: Dtype) -> np.ndarray:
    if source == target:
        return slab
    with np.errstate(over="ignore", invalid="ignore"):  # inf and NaN are weights like any other
        return slab.astype(target.numpy())
