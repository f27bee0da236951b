"""A conversion as a value: what is read, what is written, by whom and how."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reshard.comm.team import Team
from reshard.core.dtypes import Dtype
from reshard.storage.destinations.base import Destination
from reshard.storage.io.casts import stored_dtype
from reshard.storage.io.files import allow_many_files
from reshard.storage.io.streams import Strip, TensorInfo
from reshard.storage.quantized import Quantized
from reshard.storage.run.workdir import Workdir
from reshard.storage.run.workers import Progress, worker_count
from reshard.storage.sources.base import Source
from reshard.storage.sources.verify import SourceChecks


@dataclass(frozen=True)
class RunOptions:
    """Options of a conversion in either direction; the calls `hf_to_mcore` and `mcore_to_hf`
    explain them."""

    overwrite: bool = False
    resume: bool = False
    sync: bool = True
    workers: int | None = None
    dry_run: bool = False
    progress: Progress | None = None
    allow_overflow: bool = False

    def checked(self) -> "RunOptions":
        """Return these options, for which this process may then open many files. Raises ReshardError for a number
        of workers that cannot be."""
        allow_many_files()
        worker_count(self.workers)
        return self


@dataclass(frozen=True)
class ConversionJob:
    """One conversion.

    `source_name` is what the manifest says of where the weights came from, `tensors` are the
    canonical tensors in the dtypes in which the destination holds them, `checks` holds the checksums of the
    source's manifest, and `quantized` says which weights are stored as codes. Each process of the
    `team` writes whole files.
    """

    source: Source
    source_name: str | Path
    checks: SourceChecks
    tensors: dict[str, TensorInfo]
    quantized: Quantized
    destination: Destination
    workdir: Workdir
    team: Team
    options: RunOptions

    def files_of(self, name: str) -> list[str]:
        """Return the files that a canonical tensor is written to, relative to the destination."""
        return [
            str(strip.path)
            for stored_name in self.quantized.stored_names(name)
            for strip in self.strips_of(stored_name)
        ]

    def strips_of(self, stored_name: str) -> list[Strip]:
        """Return the strips of a stored tensor; none of a copy, which is in no file."""
        return self.destination.strips.get(stored_name, [])

    def strips_below(self, stored_name: str, root: Path, files: Iterable[str]) -> list[Strip]:
        """Return the strips of a stored tensor in some of the files, with their paths below `root`."""
        return [s._replace(path=root / s.path) for s in self.strips_of(stored_name) if str(s.path) in files]

    def tensors_in(self, files: set[str], with_copies: bool = True) -> tuple[list[str], set[str]]:
        """Return the canonical tensors that have rows in these files, and the stored tensors whose checksum
        the writer of these files reports: those whose first strip is in them, and, by the first process
        `with_copies`, those that are in no file."""
        names: list[str] = []
        hashed: set[str] = set()
        for name in self.tensors:
            paths = self.files_of(name)
            reports = paths[0] in files if paths else with_copies and self.team.process == 0
            if reports or any(path in files for path in paths):
                names.append(name)
                hashed.update(self.quantized.stored_names(name) if reports else ())
        return names, hashed

    def units_of(self, names: Iterable[str]) -> dict[str, list[str]]:
        """Return the canonical tensors that are written together, by the first of each: those that
        are columns of one transposed matrix. Any other is a unit of its own."""
        firsts: dict[tuple[Path, int], str] = {}
        units: dict[str, list[str]] = {}
        for name in names:
            matrices = {(s.path, s.offset) for s in self.strips_of(name) if s.transposed is not None}
            first = firsts.setdefault(matrices.pop(), name) if matrices else name
            units.setdefault(first, []).append(name)
        return units

    def manifest_fields(self) -> dict[str, Any]:
        """Return the head of the manifest. Ignored fields of the config are listed: what is written
        contradicts them."""
        model = self.source.model
        quantized = sorted(self.quantized.names) or sorted(self.source.dequantized_names())
        fields = self.destination.fields(model.family.name, self.source_name, quantized)
        if self.source.mapping.packed and not self.source.experts_packed:
            fields = fields | {"experts_packed": False}
        return fields | ({"ignored_config_fields": sorted(model.ignored)} if model.ignored else {})


def tensors_to_store(source: Source, target: Dtype | None) -> dict[str, TensorInfo]:
    """Return the canonical tensors in the dtypes in which they are stored: the `target`, but for
    those that the family keeps in a wider one, whole numbers, and optimizer states."""

    fp32, uncast = source.mapping.fp32, source.uncast
    return {
        name: TensorInfo(
            info.shape, info.dtype if name in uncast else stored_dtype(info.dtype, target, name in fp32)
        )
        for name, info in source.tensors.items()
    }


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
