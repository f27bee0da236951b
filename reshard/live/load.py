"""Load weights from disk into a live Megatron: every rank reads its own boxes, straight into its
parameters."""

import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from reshard.comm.team import Team
from reshard.core.dtypes import DTYPES, Dtype
from reshard.core.errors import ReshardError, first_line, listed, shown
from reshard.core.gc import gc_paused
from reshard.core.limits import check_switch
from reshard.device.box_loader import BoxLoader
from reshard.device.staging import ToDevice, byte_view
from reshard.live.collective import check_same_options, keyword_style_errors, open_team, run_on_first
from reshard.live.local_boxes import uncovered_tensors
from reshard.live.local_model import LocalModel, Models
from reshard.live.offload import check_main_parameters
from reshard.live.published_model import digest_of
from reshard.megatron.towers import takes_tower
from reshard.models.config_fields import check_ignored
from reshard.models.model import Model
from reshard.storage.io.boxes import Rows
from reshard.storage.io.casts import float_dtype, is_exact, overflow_notice
from reshard.storage.io.files import allow_many_files
from reshard.storage.run.workers import Progress, run_jobs, worker_count
from reshard.storage.sources.base import Source
from reshard.storage.sources.hf_hub import config_path, source_directory
from reshard.storage.sources.huggingface import HuggingFaceSource
from reshard.storage.sources.megatron import MegatronSource
from reshard.storage.sources.opening import open_source
from reshard.storage.sources.verify import SourceChecks, check_listed


@dataclass
class LoadReport:
    """The result of a load on this rank. Sizes in bytes; `read_bytes` are those of its boxes in the
    source's dtypes, `cast_tensors` counts the tensors that have another dtype in the model."""

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
        """Return the fields as plain values."""
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
    verify: bool = False,
    workers: int | None = None,
    progress: Progress | None = None,
) -> LoadReport:
    """Fill a live Megatron-Core model from a Hugging Face directory or hub id, or from a Megatron
    ``torch_dist`` checkpoint at any layout, here or at the URL of an object store. Weights in fp8 or int8 are
    dequantized.

    All ranks of torch's default process group call it. Each rank reads its own boxes; nothing is gathered.

    Args:
        models: what ``get_model`` returned to this rank: chunks of virtual stages, wrapped or bare, or a
            `MegatronModel` of them, such as the `SwiftModel` of those that mcore-bridge makes.
        dtype: a dtype (``bf16``, ``fp16``, ``fp32``) that weights may be rounded to. Without it a cast that rounds is
            refused.
        allow_overflow: let a cast make infinities of finite numbers, which is refused otherwise.
        skip_mtp: leave out MTP layers that the model does not have.
        make_vocab_size_divisible_by: how much of the vocabulary may be padding, which becomes zero.
        optimizer: Megatron's, whose main parameters then follow.
        hf_config, family: as for `mcore_to_hf`. metadata: as for `MegatronModel`.
        verify: compare every tensor with the manifest of the source before the first is loaded. Without it only small
            files, dtypes and shapes are. All is read once more, each rank a part.
        progress: called as ``progress(done, total)`` with this rank's bytes.

    Raises ReshardError on every rank, with nothing changed, where names, shapes, config or dtypes
    do not fit on any rank. An error while weights are read (a disk, an overflow) leaves a model
    with some new weights, and says so.
    """
    began = time.monotonic()
    with keyword_style_errors(), gc_paused(), open_team("load") as team:
        job = _Load(team, models, source, hf_config, family, dtype, allow_overflow, skip_mtp,
                    make_vocab_size_divisible_by, optimizer, metadata, verify, workers, progress)  # fmt: skip
        return job.run(began)


@dataclass
class _Load:
    """A load on this rank; the fields are the arguments of `load`."""

    team: Team
    models: Any
    path: str | Path
    hf_config: str | Path | None
    family: str | None
    dtype: str | None
    allow_overflow: bool
    skip_mtp: bool
    make_vocab_size_divisible_by: int
    optimizer: Any
    metadata: Mapping[str, Any] | None
    verify: bool
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
            boxes_of_ranks = team.gather(self.local.held_boxes())
            run_on_first(team, lambda: self._check_all_source_identity(source, boxes_of_ranks))
            team.together(lambda: self._check_copies(source))
            if self.verify:
                team.together(lambda: check_listed(source, team.process, team.size, self.workers))
            # Parameters that are still being gathered would overwrite what is loaded.
            team.together(self.local.trainer.sync_params)
            try:
                read = team.together(lambda: self._read_unchanged(source))[team.process]
            except ReshardError as error:
                raise _half_loaded(error) from error
            team.together(self._update_optimizer)
            return self._report(source, read, time.monotonic() - began)
        finally:
            for source in opened:
                source.close()

    def _open(self) -> Source:
        allow_many_files()
        check_switch(self.allow_overflow, "allow_overflow")
        check_switch(self.skip_mtp, "skip_mtp")
        check_switch(self.verify, "verify")
        worker_count(self.workers)
        target = self.target = float_dtype(self.dtype)
        # As in a conversion: to a dtype that holds all that codes stand for, so that the cast can
        # count what overflows.
        wide = DTYPES["float32"] if target is not None and target.name == "float16" else target
        config = None if self.hf_config is None else config_path(self.hf_config)
        source = open_source(source_directory(str(self.path)), config, self.family, wide)
        if config is not None and source.kind == HuggingFaceSource.kind:
            source.close()
            raise ReshardError(
                f"{self.path} is a Hugging Face directory with a config of its own: leave hf_config out"
            )
        check_ignored(source.model)
        return source

    def _prepare(self, source: Source) -> None:
        """Find the boxes that this rank reads, and refuse a source that does not fit them."""
        if self.team.process == 0:
            SourceChecks(source)
        self.local = LocalModel(self.models, self.metadata)
        config = source.config_fields if isinstance(source, MegatronSource) else getattr(source, "config", {})
        self.local.find_boxes(takes_tower(source.model, config), self.make_vocab_size_divisible_by)
        check_main_parameters(self.optimizer)
        missing = sorted({box.name for box in self.local.boxes} - source.tensors.keys())
        if missing:
            raise ReshardError(
                f"{source.path} lacks {len(missing)} tensors that the model takes: {listed(missing)}"
            )
        self._check_dtypes(source)

    def _agree_on_options(self, source: Source) -> None:
        """Raise ReshardError if the ranks were given different options, or found different
        iterations of a run that is still being written: the model would be a mixture."""
        options = {
            "source": _source_identity(self.path, source), "the digest of the config": digest_of(source.model),
            "dtype": None if self.target is None else self.target.name, "allow_overflow": self.allow_overflow,
            "skip_mtp": self.skip_mtp, "verify": self.verify, "optimizer": None if self.optimizer is None else "given",
            "make_vocab_size_divisible_by": self.make_vocab_size_divisible_by,
        }  # fmt: skip
        check_same_options(self.team, "loads", options)

    def _check_dtypes(self, source: Source) -> None:
        """Raise ReshardError if a cast would round, and `dtype` does not ask for it."""
        rounded = [
            box
            for box in self.local.boxes
            if not is_exact(source.tensors[box.name].dtype, box.dtype) and box.dtype.published != self.target
        ]
        if rounded:
            first, stored_dtype = rounded[0], source.tensors[rounded[0].name].dtype
            short = {"bfloat16": "bf16", "float16": "fp16"}.get(first.dtype.name, first.dtype.name)
            raise ReshardError(
                f"{source.path}: {first.name} is {stored_dtype.name} and the trainer's parameter is "
                f'{first.dtype.name}, which does not hold all of its numbers: pass dtype="{short}" to round them'
            )

    def _check_all_source_identity(self, source: Source, boxes_of_ranks: list[dict]) -> None:
        towers = source.model.family.towers
        apart = {name for name in source.tensors if name in source.copies or source.model.is_of_tower(name)}
        if any(name.startswith(towers) for boxes in boxes_of_ranks for name in boxes):  # they have one, too
            apart = {name for name in apart if not name.startswith(towers)}
        shapes = {name: info.shape for name, info in source.tensors.items() if name not in apart}
        if self.skip_mtp:
            shapes = {name: shape for name, shape in shapes.items() if not of_mtp(name, source.model)}
        left = uncovered_tensors(boxes_of_ranks, shapes)
        if left:
            hint = "; skip_mtp=True leaves MTP layers behind" if of_mtp(left[0], source.model) else ""
            raise ReshardError(
                f"{source.path} holds {len(left)} tensors of which no rank's model takes every element: "
                f"{listed(left, 3)}{hint}"
            )

    def _check_copies(self, source: Source) -> None:
        """Raise ReshardError if two published tensors differ that Megatron holds as one; each
        rank compares some of their rows."""
        for name, primary in source.copies.items():
            info, same = source.tensors[name], source.tensors[name] == source.tensors[primary]
            first, last = (
                info.rows * n // self.team.size for n in (self.team.process, self.team.process + 1)
            )
            for rows in (
                Rows(first, last, 0, info.columns).slabs(info.dtype.size) if same and first < last else ()
            ):
                a, b = (
                    np.empty((rows.stop - rows.start, info.columns * info.dtype.size), np.uint8) for _ in "ab"
                )
                source.reader.read(name, rows, a)
                source.reader.read(primary, rows, b)
                same = same and np.array_equal(a, b)
            if not same:
                raise ReshardError(
                    f"{source.path}: {name} differs from {primary}, but Megatron holds the two as one parameter"
                )

    def _read_unchanged(self, source: Source) -> int:
        """Read the source, and raise ReshardError where it changed meanwhile. What the model is
        then is said here, for ranks that have not begun to read."""
        try:
            with source.unchanged():
                return self._read(source)
        except ReshardError as error:
            raise _half_loaded(error) from error

    def _read(self, source: Source) -> int:
        """Fill this rank's parameters; return how many bytes of the source's tensors were read."""
        device = ToDevice(self.local.device)
        loader = BoxLoader(source.reader, device, source.row_multiple)
        batches = dict(enumerate(loader.batches(self.local.boxes)))
        sizes = {str(i): sum(slab.size_bytes for slab in batch) for i, batch in batches.items()}
        try:
            for region, rows in self.local.padding:
                byte_view(region, rows).zero_()
            counts = run_jobs(
                sizes, lambda i: loader.load(batches[int(i)]), self.workers, self.progress, self.team.check
            )
        finally:
            device.close()
        for overflowed in counts.values():
            for name, count in overflowed.items():
                self.overflowed[name] = self.overflowed.get(name, 0) + count
        if self.overflowed and not self.allow_overflow:
            raise ReshardError(
                f"{self._overflow_notices()[0]}; choose another dtype, or pass allow_overflow=True"
            )
        return sum(sizes.values())

    def _overflow_notices(self) -> list[str]:
        """Return a sentence for each tensor with numbers that became infinite in the cast."""
        return [
            overflow_notice(name, count, self.target).replace("would become", "became")
            for name, count in self.overflowed.items()
            if self.target is not None
        ]

    def _update_optimizer(self) -> None:
        if self.optimizer is None:
            return
        try:
            self.optimizer.reload_model_params()
        except (NotImplementedError, RuntimeError) as error:
            raise ReshardError(
                f"the model has the new weights, but the optimizer's main parameters do not: {first_line(error)}"
            ) from error

    def _report(self, source: Source, read: int, seconds: float) -> LoadReport:
        names = {box.name for box in self.local.boxes}
        casts = {
            box.name
            for box in self.local.boxes
            if source.held[box.name].dtype.published != box.dtype.published
        }
        padding = sum(rows.stop - rows.start for _, rows in self.local.padding)
        notices = [shown(notice) for notice in (*source.notices, *self._overflow_notices())]
        return LoadReport(str(self.path), source.model.family.name, self.team.process, self.team.size, len(names), read,
                          len(casts), padding, seconds, notices)  # fmt: skip


def _source_identity(path: str | Path, source: Source) -> str:
    """Return the directory that a rank reads; of a hub id, which hosts keep in different places, id
    and commit."""
    directory = source.checkpoint.directory if isinstance(source, MegatronSource) else source.path
    return os.path.realpath(directory) if os.path.isdir(path) else f"{path} at {directory.name}"


def of_mtp(name: str, model: Model) -> bool:
    """Return True for a published name of an MTP layer."""
    return any(name.startswith(model.mtp_prefixes(layer)) for layer in range(model.mtp_layers))


def _half_loaded(error: ReshardError) -> ReshardError:
    """Return an error of a load that had begun, with what the model is now and what to do."""
    sentence = "the model now has some of the new weights: load again"
    return error if sentence in str(error) else ReshardError(f"{error}; {sentence}")
