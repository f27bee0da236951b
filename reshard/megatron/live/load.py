"""Weights on disk into a live Megatron: every rank reads its own boxes, straight into its parameters."""

import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from reshard.core.dtypes import DTYPES, Dtype
from reshard.core.errors import ReshardError, first_line, listed
from reshard.core.gc import gc_paused
from reshard.core.limits import check_switch
from reshard.megatron.live.config import config_path, digest_of
from reshard.megatron.live.filling import Filler
from reshard.megatron.live.memory import ToDevice, bytes_of
from reshard.megatron.live.offload import check_main_parameters
from reshard.megatron.live.ranks import (
    Models,
    Rank,
    check_alike,
    decide,
    keyword_style_errors,
    meet,
    not_covered,
)
from reshard.models.config_fields import check_ignored
from reshard.models.model import Model
from reshard.storage.io.boxes import BoxReader, Rows
from reshard.storage.io.casts import float_dtype, is_exact, overflow_notice
from reshard.storage.io.files import allow_many_files
from reshard.storage.run.team import Team
from reshard.storage.run.workers import Progress, run_jobs, worker_count
from reshard.storage.sources.base import Source
from reshard.storage.sources.hf_hub import local_directory
from reshard.storage.sources.huggingface import HuggingFaceSource
from reshard.storage.sources.megatron import MegatronSource
from reshard.storage.sources.opening import open_source
from reshard.storage.sources.verify import SourceChecks


@dataclass
class LoadReport:
    """What a load did on this rank. Sizes in bytes; `read_bytes` are those of this rank's boxes in the source's
    dtypes, `cast_tensors` how many tensors have another dtype in the model."""

    source: str
    family: str
    rank: int
    ranks: int
    tensors: int
    read_bytes: int
    cast_tensors: int
    padding_rows: int
    seconds: float
    notices: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """As a dictionary of plain values."""
        return asdict(self)


def load(
    models: Models,
    source: str | Path,
    *,
    hf_config: str | Path | None = None,
    family: str | None = None,
    dtype: str | None = None,
    allow_overflow: bool = False,
    skip_mtp: bool = False,
    make_vocab_size_divisible_by: int = 128,
    optimizer: Any = None,
    metadata: Mapping[str, Any] | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
) -> LoadReport:
    """Fill a live Megatron-Core model from a Hugging Face directory or hub id (weights in fp8 or int8 are dequantized), or
    from a Megatron ``torch_dist`` checkpoint at any layout.

    All ranks of torch's default process group call it, each with the `models` that ``get_model`` returned to
    it: chunks of virtual stages, wrapped or bare (or a `MegatronModel` of them, such as the `SwiftModel` of those that
    mcore-bridge makes). Nothing is gathered; each rank reads its own boxes. Weights
    keep their numbers: a cast that rounds is made only to the `dtype` that is given (``bf16``, ``fp16``,
    ``fp32``), and finite numbers that it would make infinite are refused unless `allow_overflow`. `skip_mtp`
    leaves MTP layers behind that the model does not have. `make_vocab_size_divisible_by` bounds what may be
    padding of the vocabulary, which becomes zero. `optimizer` is Megatron's, whose main parameters then follow.
    `hf_config` and `family` are those of `mcore_to_hf`, `metadata` is that of `MegatronModel`;
    `progress(done, total)` is called with this rank's bytes.

    Raises ReshardError on every rank, with nothing changed, where names, shapes, config or dtypes do not fit on
    any rank; what fails while weights are read (a disk, an overflow) leaves a model of two kinds, and is said.
    """
    began = time.monotonic()
    with keyword_style_errors(), gc_paused(), meet("load") as team:
        job = _Load(team, models, source, hf_config, family, dtype, allow_overflow, skip_mtp,
                    make_vocab_size_divisible_by, optimizer, metadata, workers, progress)  # fmt: skip
        return job.run(began)


@dataclass
class _Load:
    """A load on this rank; the fields are what `load` was given."""

    team: Team
    models: Any
    path: str | Path
    hf_config: str | Path | None
    family: str | None
    dtype: str | None
    allow_overflow: bool
    skip_mtp: bool
    divisible_by: int
    optimizer: Any
    metadata: Mapping[str, Any] | None
    workers: int | None
    progress: Progress | None
    target: Dtype | None = None
    overflowed: dict[str, int] = field(default_factory=dict)

    def run(self, began: float) -> LoadReport:
        team = self.team
        opened: list[Source] = []
        try:
            team.together(lambda: opened.append(self._open()))
            [source] = opened
            team.together(lambda: self._prepare(source))
            self._agree_on_options(source)
            held = team.gather(self.rank.told())
            decide(team, lambda: self._check_all_taken(source, held))
            team.together(lambda: self._check_copies(source))
            # What is still on its way would come after what is loaded.
            team.together(self.rank.trainer.sync_params)
            try:
                read = team.together(lambda: self._read_unchanged(source))[team.process]
            except ReshardError as error:
                raise ReshardError(
                    f"{error}; the model now has some of the new weights: load again"
                ) from error
            team.together(self._follow)
            return self._report(source, read, time.monotonic() - began)
        finally:
            for found in opened:
                found.close()

    def _open(self) -> Source:
        allow_many_files()
        check_switch(self.allow_overflow, "allow_overflow")
        check_switch(self.skip_mtp, "skip_mtp")
        worker_count(self.workers)
        target = self.target = float_dtype(self.dtype)
        # As in a conversion: to a dtype that holds all that codes stand for, so that the cast can count what overflows.
        wide = DTYPES["float32"] if target is not None and target.name == "float16" else target
        config = None if self.hf_config is None else config_path(self.hf_config)
        source = open_source(local_directory(str(self.path)), config, self.family, wide)
        if config is not None and isinstance(source, HuggingFaceSource):
            source.close()
            raise ReshardError(
                f"{self.path} is a Hugging Face directory with a config of its own: leave hf_config out"
            )
        check_ignored(source.model)
        return source

    def _prepare(self, source: Source) -> None:
        """Find what this rank reads, and refuse what does not fit it."""
        if self.team.process == 0:
            SourceChecks(source)
        self.rank = Rank(self.models, self.metadata)
        self.rank.describe(source.model, self.divisible_by)
        check_main_parameters(self.optimizer)
        missing = sorted({piece.name for piece in self.rank.pieces} - source.tensors.keys())
        if missing:
            raise ReshardError(
                f"{source.path} lacks {len(missing)} tensors that the model takes: {listed(missing)}"
            )
        self._check_dtypes(source)

    def _agree_on_options(self, source: Source) -> None:
        """Raise ReshardError where the ranks were not told the same, or have not found the same iteration of a run that
        is being written: each reads its own boxes, and all would make a model of several."""
        mine = {
            "source": _taken(self.path, source), "the digest of the config": digest_of(source.model),
            "dtype": None if self.target is None else self.target.name, "allow_overflow": self.allow_overflow,
            "skip_mtp": self.skip_mtp, "optimizer": None if self.optimizer is None else "given",
            "make_vocab_size_divisible_by": self.divisible_by,
        }  # fmt: skip
        check_alike(self.team, "loads", mine)

    def _check_dtypes(self, source: Source) -> None:
        """Raise ReshardError where a cast would round that nobody asked for."""
        rounded = [
            piece
            for piece in self.rank.pieces
            if not is_exact(source.tensors[piece.name].dtype, piece.dtype) and piece.dtype != self.target
        ]
        if rounded:
            first, there = rounded[0], source.tensors[rounded[0].name].dtype
            short = {"bfloat16": "bf16", "float16": "fp16"}.get(first.dtype.name, first.dtype.name)
            raise ReshardError(
                f"{source.path}: {first.name} is {there.name} and the trainer's parameter is "
                f'{first.dtype.name}, which does not hold all of its numbers: pass dtype="{short}" to round them'
            )

    def _check_all_taken(self, source: Source, held: list[dict]) -> None:
        shapes = {name: info.shape for name, info in source.tensors.items() if name not in source.copies}
        if self.skip_mtp:
            shapes = {name: shape for name, shape in shapes.items() if not of_mtp(name, source.model)}
        left = not_covered(held, shapes)
        if left:
            hint = "; skip_mtp=True leaves MTP layers behind" if of_mtp(left[0], source.model) else ""
            raise ReshardError(
                f"{source.path} holds {len(left)} tensors of which no rank's model takes every element: "
                f"{listed(left, 3)}{hint}"
            )

    def _check_copies(self, source: Source) -> None:
        """Raise ReshardError where two published tensors differ that Megatron holds as one; each rank compares
        some of their rows."""
        reader = BoxReader(source.files, source.strips, source.read_rows)
        share = self.team
        for name, primary in source.copies.items():
            info, same = source.tensors[name], source.tensors[name] == source.tensors[primary]
            first, last = (info.rows * n // share.size for n in (share.process, share.process + 1))
            for rows in (
                Rows(first, last, 0, info.columns).slabs(info.dtype.size) if same and first < last else ()
            ):
                a, b = (
                    np.empty((rows.stop - rows.start, info.columns * info.dtype.size), np.uint8) for _ in "ab"
                )
                reader.read(name, rows, a)
                reader.read(primary, rows, b)
                same = same and np.array_equal(a, b)
            if not same:
                raise ReshardError(
                    f"{source.path}: {name} differs from {primary}, but Megatron holds the two as one parameter"
                )

    def _read_unchanged(self, source: Source) -> int:
        """See `_read`, of a source that does not change meanwhile."""
        with source.unchanged():
            return self._read(source)

    def _read(self, source: Source) -> int:
        """Fill this rank's parameters; the bytes that were read of the source's tensors."""
        device = ToDevice(self.rank.device)
        reader = BoxReader(source.files, source.strips, source.read_rows)
        filler = Filler(source.tensors, reader, device, source.row_multiple)
        groups = dict(enumerate(filler.groups(self.rank.pieces)))
        sizes = {str(i): sum(part.size_bytes for part in group) for i, group in groups.items()}
        try:
            for region, rows in self.rank.fills:
                bytes_of(region, rows).zero_()
            counts = run_jobs(
                sizes, lambda i: filler.fill(groups[int(i)]), self.workers, self.progress, self.team.check
            )
        finally:
            device.close()
        for found in counts.values():
            for name, count in found.items():
                self.overflowed[name] = self.overflowed.get(name, 0) + count
        if self.overflowed and not self.allow_overflow:
            raise ReshardError(
                f"{self._overflow_notices()[0]}; choose another dtype, or pass allow_overflow=True"
            )
        return sum(sizes.values())

    def _overflow_notices(self) -> list[str]:
        """What is said of numbers that became infinite in the cast that was asked for."""
        return [
            overflow_notice(name, count, self.target).replace("would become", "became")
            for name, count in self.overflowed.items()
            if self.target is not None
        ]

    def _follow(self) -> None:
        if self.optimizer is None:
            return
        try:
            self.optimizer.reload_model_params()
        except (NotImplementedError, RuntimeError) as error:
            raise ReshardError(
                f"the model has the new weights, but the optimizer's main parameters do not: {first_line(error)}"
            ) from error

    def _report(self, source: Source, read: int, seconds: float) -> LoadReport:
        names = {piece.name for piece in self.rank.pieces}
        casts = {piece.name for piece in self.rank.pieces if source.tensors[piece.name].dtype != piece.dtype}
        padding = sum(rows.stop - rows.start for _, rows in self.rank.fills)
        notices = [*source.notices, *self._overflow_notices()]
        return LoadReport(str(self.path), source.model.family.name, self.team.process, self.team.size, len(names), read,
                          len(casts), padding, seconds, notices)  # fmt: skip


def _taken(path: str | Path, source: Source) -> str:
    """The directory that a rank reads; of a hub id, which each host may have elsewhere, the id and the commit."""
    taken = source.checkpoint.directory if isinstance(source, MegatronSource) else source.path
    return os.path.realpath(taken) if os.path.isdir(path) else f"{path} at {taken.name}"


def of_mtp(name: str, model: Model) -> bool:
    """Whether a published name is of an MTP layer."""
    return any(
        name.startswith(f"model.layers.{model.num_layers + layer}.") for layer in range(model.mtp_layers)
    )
