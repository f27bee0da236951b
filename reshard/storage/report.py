"""The report of a conversion: what it reads, writes and takes, and what its user should know."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from reshard.core.errors import ReshardError
from reshard.core.printed import Printed, size
from reshard.storage.destinations.huggingface import HuggingFaceFiles
from reshard.storage.io.casts import overflow_notice
from reshard.storage.io.streams import SLAB_BYTES
from reshard.storage.run.conversion import Outcome
from reshard.storage.run.job import ConversionJob
from reshard.storage.run.workers import workers_for
from reshard.storage.sources.base import has_tokenizer

# About what the interpreter and numpy take before the first slab, a forked worker of its own, and what is
# planned for a tensor (with .metadata, and with what workers copy of it).
BASE_MEMORY_BYTES, WORKER_MEMORY_BYTES, TENSOR_MEMORY_BYTES = 48 << 20, 8 << 20, 9 << 10
SHOWN_RANKS = 16


@dataclass
class ConversionReport(Printed):
    """The result of a conversion, or with `dry_run` what it would be. Sizes in bytes."""

    direction: str
    family: str
    source: str
    destination: str
    layout: str
    tensors: int
    read_bytes: int
    written_bytes: int
    files: int
    bytes_per_rank: dict[str, int]
    peak_memory_bytes: int
    dry_run: bool
    notices: list[str] = field(default_factory=list)
    resumed_tensors: int = 0
    process: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return the report as the object that ``--json`` prints."""
        return asdict(self)

    def lines(self) -> Iterator[str]:
        verb = "would write" if self.dry_run else "wrote"
        yield (
            f"{self.family}, {self.tensors} tensors, {size(self.read_bytes)}: {verb} {self.destination} "
            f"({self.layout}, {self.files} file{'s' * (self.files != 1)}, {size(self.written_bytes)})"
        )
        if self.resumed_tensors and not self.dry_run:
            yield f"resumed: {self.resumed_tensors} tensors were done before"
        if not self.dry_run:
            return
        if self.bytes_per_rank:
            sizes = list(self.bytes_per_rank.values())
            yield f"bytes per rank: {size(min(sizes))} to {size(max(sizes))} on {len(sizes)} ranks that save"
            for rank, n in list(self.bytes_per_rank.items())[:SHOWN_RANKS]:
                yield f"  rank {rank}: {size(n)}"
            if len(sizes) > SHOWN_RANKS:
                yield f"  ... {len(sizes) - SHOWN_RANKS} more (--json has all)"
        yield f"peak memory: about {size(self.peak_memory_bytes)}; all names and shapes match"


def new_report(direction: str, job: ConversionJob, destination: str | Path, layout: str) -> ConversionReport:
    """Return the report of a conversion that has not begun."""
    source, sizes = job.source, job.destination.sizes
    read_bytes = sum(info.size_bytes for info in source.tensors.values())
    slab_bytes = max(
        SLAB_BYTES, *(source.row_multiple(n) * info.columns * 4 for n, info in source.tensors.items())
    )
    # Each worker has a slab as it is read, assembled, cast, and cut into columns, and a transposed
    # matrix both ways.
    matrix_bytes = 2 * (source.matrix_bytes() + job.destination.matrix_bytes())
    worker_bytes = WORKER_MEMORY_BYTES + 4 * slab_bytes + matrix_bytes
    memory_bytes = BASE_MEMORY_BYTES + workers_for(read_bytes, job.options.workers) * worker_bytes
    return ConversionReport(
        direction=direction,
        family=source.model.family.name,
        source=str(job.source_name),
        destination=str(destination),
        layout=layout,
        tensors=len(source.tensors),
        read_bytes=read_bytes,
        written_bytes=sum(sizes.values()),
        files=len(sizes),
        bytes_per_rank={},
        peak_memory_bytes=memory_bytes + len(source.tensors) * TENSOR_MEMORY_BYTES,
        dry_run=job.options.dry_run,
        notices=list(source.notices),
        process=job.team.process,
    )


def tokenizer_notices(job: ConversionJob, report: ConversionReport) -> list[str]:
    """Return a notice if no tokenizer comes with the weights."""
    source = job.source
    if has_tokenizer(source.hf_files()):
        return []
    place = source.hf_directory() or source.path
    if isinstance(job.destination, HuggingFaceFiles):
        return [f"{place} has no tokenizer, and so {report.destination} has none: copy one there"]
    return [
        f"{place} has no tokenizer: training takes --tokenizer-type and --tokenizer-model of one from elsewhere"
    ]


def destination_notices(job: ConversionJob) -> list[str]:
    """Return notices where a run would refuse the destination as it is now, and where the disk has no space for it."""
    notices = []
    needed = free = 0
    try:
        job.workdir.check_without_recovery()
        needed, free = job.workdir.space(job.destination.sizes)
    except ReshardError as error:
        notices.append(f"as it is now, the run would be refused: {error}")
    if needed > free:
        notices.append(
            f"it will not fit: {job.workdir.destination} needs {needed:,} more bytes, but the disk has {free:,} free"
        )
    return notices + job.workdir.notices


def outcome_notices(job: ConversionJob, outcome: Outcome) -> list[str]:
    """Return notices of numbers that became infinite, as was allowed, and of a run that had nothing
    left to do."""
    notices = []
    if outcome.was_published:
        notices.append(f"{job.workdir.destination} was complete: an earlier run had published it")
    notices += job.workdir.notices
    if job.workdir.holds_current_directory:
        notices.append(f"the current directory was replaced: cd {job.workdir.destination} enters the new one")
    for name, count in outcome.overflowed.items():
        notice = overflow_notice(name, count, job.tensors[name].dtype)
        notices.append(notice.replace("would become", "became"))
    return notices
