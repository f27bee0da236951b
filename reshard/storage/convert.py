"""Conversion on disk: Hugging Face to Megatron ``torch_dist`` and back, a slab at a time, without a model, a
GPU or torch."""

import os
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from reshard.core.dtypes import DTYPES, Dtype, dtype_named
from reshard.core.errors import ReshardError, listed
from reshard.core.limits import MAX_ITERATION, MAX_VOCAB_MULTIPLE, check_number
from reshard.megatron.arguments import version_of
from reshard.megatron.layout import MegatronLayout
from reshard.megatron.parameters import TRANSFORMER_IMPLS
from reshard.models.config_fields import check_ignored
from reshard.storage.channels import Blocks, Channels, PackedChannels, PackedGroups, Tensors
from reshard.storage.destinations.huggingface import HuggingFaceFiles, parse_size
from reshard.storage.destinations.megatron import MegatronFiles
from reshard.storage.fp8 import Fp8Blocks
from reshard.storage.io.casts import overflow_notice
from reshard.storage.io.files import OpenFiles, allow_many_files
from reshard.storage.io.streams import SLAB_BYTES, TensorInfo
from reshard.storage.nvfp4 import Nvfp4
from reshard.storage.quantized import Quantized
from reshard.storage.run.conversion import Run
from reshard.storage.run.team import Team
from reshard.storage.run.workdir import Workdir, fingerprint
from reshard.storage.run.workers import BackgroundCall, Progress, worker_count, workers_for
from reshard.storage.sources.base import Source, has_tokenizer
from reshard.storage.sources.hf_hub import local_directory
from reshard.storage.sources.huggingface import HuggingFaceSource
from reshard.storage.sources.megatron import MegatronSource
from reshard.storage.sources.verify import SourceChecks

# Ways to quantize: blocks of fp8; codes with a scale for each output channel, for all of a weight, or for a block, in another
# format; in words, with one for each output channel, or for so many of its columns; and 4 bits in bytes.
BLOCKS = "fp8"
COMPRESSED: dict[str, Callable[[list[str]], Quantized]] = {
    "fp8_per_channel": lambda names: Channels(names, "float8_e4m3fn"),
    "int8_per_channel": lambda names: Channels(names, "int8"),
    "fp8_per_tensor": lambda names: Tensors(names, "float8_e4m3fn"),
    "fp8_per_block": lambda names: Blocks(names, "float8_e4m3fn"),
    "int4_per_group": lambda names: PackedGroups(names, "int4", 128),
    "int4_per_group_32": lambda names: PackedGroups(names, "int4", 32),
    "int4_per_channel": lambda names: PackedChannels(names, "int4"),
    "nvfp4": Nvfp4,
}
QUANTISATIONS = (BLOCKS, *COMPRESSED)

# About what the interpreter and numpy take before the first slab, a forked worker of its own, and what is
# planned for a tensor (with .metadata, and with what workers copy of it).
BASE_MEMORY_BYTES, WORKER_MEMORY_BYTES, TENSOR_MEMORY_BYTES = 48 << 20, 8 << 20, 9 << 10


@dataclass
class ConversionReport:
    """What a conversion did, or would do with `dry_run`. Sizes in bytes."""

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
        """For ``--json``."""
        return asdict(self)


def hf_to_mcore(
    source: str | Path,
    destination: str | Path,
    layout: MegatronLayout | None = None,
    *,
    dtype: str | None = None,
    allow_overflow: bool = False,
    transformer_impl: str = "transformer_engine",
    make_vocab_size_divisible_by: int = 128,
    megatron_version: str | None = None,
    iteration: int | None = None,
    overwrite: bool = False,
    resume: bool = False,
    sync: bool = True,
    workers: int | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> ConversionReport:
    """Convert a Hugging Face checkpoint (a directory or a hub id) to a Megatron ``torch_dist`` checkpoint; weights in fp8 blocks, or in
    fp8, int8, int4 or nvfp4 by compressed-tensors, or in nvfp4 by modelopt, are dequantized.

    `layout` decides how the tensors are cut into chunks and files, `dtype` (``bf16``, ``fp16``, ``fp32``)
    casts, `iteration` writes a numbered iteration where None writes a release. The flags file is for
    Megatron-LM `megatron_version` (``0.14``; default: the newest that is known); the weights are the same for
    all. Finite numbers that a cast would make infinite are refused unless `allow_overflow`, and then counted
    in the report's notices. With `sync` all bytes are on the disk before the destination appears. Under
    torchrun, the processes share the work. `progress(done, total)` is called with bytes.

    Raises ReshardError, and leaves no destination, for anything that cannot be converted exactly.
    """
    allow_many_files()
    if not isinstance(layout, (MegatronLayout, type(None))):
        raise ReshardError(
            f"layout is {layout!r:.80}, not a reshard.MegatronLayout such as MegatronLayout(tp=2)"
        )
    layout, target = layout or MegatronLayout(), float_dtype(dtype)
    if transformer_impl not in TRANSFORMER_IMPLS:
        raise ReshardError(f"--transformer-impl {transformer_impl} is not one of {listed(TRANSFORMER_IMPLS)}")
    check_number(make_vocab_size_divisible_by, "--make-vocab-size-divisible-by", MAX_VOCAB_MULTIPLE)
    megatron_lm = version_of(megatron_version)
    if iteration is not None:
        check_number(iteration, "--iteration", MAX_ITERATION)
    worker_count(workers)
    # Codes are dequantized to a dtype that holds them all, so that the cast can count what overflows.
    wide = DTYPES["float32"] if target is not None and target.name == "float16" else target
    with (
        Team.from_environment() as team,
        closing(HuggingFaceSource(local_directory(str(source)), wide)) as src,
    ):
        check_ignored(src.model)
        checks = SourceChecks(src)
        work = Workdir(src.path, src.read_files(), Path(destination), overwrite, resume, team.process)
        if not dry_run:
            team.together(lambda: work.check_destination() if team.process == 0 else None)
        tensors = {
            n: TensorInfo(t.shape, _stored_dtype(t.dtype, target, n in src.mapping.fp32))
            for n, t in src.tensors.items()
        }
        new = MegatronFiles(
            src.model,
            layout,
            tensors,
            src.copies,
            src.hf_files(),
            transformer_impl=transformer_impl,
            divisible_by=make_vocab_size_divisible_by,
            iteration=iteration,
            megatron_lm=megatron_lm,
        )
        report = _report(
            "hf-to-mcore", src, source, destination, str(layout), new.sizes, workers, dry_run, team
        )
        report.notices += src.model.caveats(transformer_impl)
        report.bytes_per_rank = new.rank_files.tensor_bytes()
        report.notices += _without_tokenizer(src, report)
        if dry_run:
            report.notices += _without_space(work, new.sizes)
            return report

        options = {"dtype": target and target.name, "impl": transformer_impl, "divisible": make_vocab_size_divisible_by,
                   "directory": new.directory, "megatron": megatron_lm, "overflow": allow_overflow}  # fmt: skip
        run = Run(
            src,
            tensors,
            new.strips,
            new.sizes,
            work,
            team,
            workers,
            sync,
            progress,
            checks,
            allow_overflow,
        )

        def create(files: OpenFiles, mine: set[str]) -> None:
            new.write_frames(work.tree, mine, files)

        def finish(checksums: dict[str, str]) -> None:
            fields = new.fields(src.model.family.name, source, sorted(src.codes)) | _ignored_field(src)
            new.finish(work, fields, checksums, sync)

        with BackgroundCall(new.rank_files.metadata) as metadata:  # while tensors are written
            new.metadata = metadata.result
            run.meanwhile = (metadata,)
            identity, places = _identity(src)
            shared = fingerprint(identity, asdict(layout), options, team.size)
            report.resumed_tensors = run.run(shared, fingerprint(shared, places), resume, create, finish)
        report.notices += _run_notices(run)
        return report


def mcore_to_hf(
    source: str | Path,
    destination: str | Path,
    *,
    hf_config: str | Path | None = None,
    family: str | None = None,
    dtype: str | None = None,
    allow_overflow: bool = False,
    quantize: bool | str = False,
    max_shard_size: str | int | None = None,
    overwrite: bool = False,
    resume: bool = False,
    sync: bool = True,
    workers: int | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> ConversionReport:
    """Convert a Megatron ``torch_dist`` checkpoint, whoever wrote it and at whatever layout, to a Hugging
    Face directory.

    Without `hf_config` (a ``config.json`` or a directory with one) the config is the one beside the weights,
    else the one that the checkpoint's ``args`` describe. `quantize` writes linear weights as fp8 with a scale
    for each 128x128 block (True, or ``fp8``), or, in the format of compressed-tensors, as fp8 or int8 with a scale
    for each output channel (``fp8_per_channel``, ``int8_per_channel``), as fp8 with one for each weight
    (``fp8_per_tensor``) or 128x128 block (``fp8_per_block``), or as int4 in words with one for 128 or 32 columns of an
    output channel, or all of them (``int4_per_group``, ``int4_per_group_32``, ``int4_per_channel``), or as ``nvfp4``.
    `max_shard_size` is bytes or text like ``5GB``; None is 5 GB, or less where a model would not fill 16 files, which
    are written at once, but not less than 1 GB. The other options are those of `hf_to_mcore`, and so is what it raises.
    """
    allow_many_files()
    way = BLOCKS if quantize is True else quantize or None
    if way not in (None, *QUANTISATIONS):
        raise ReshardError(f"--quantize {way} is none of {', '.join(QUANTISATIONS)}")
    target = float_dtype(dtype)
    shard_bytes = None if max_shard_size is None else parse_size(max_shard_size)
    config = Path(hf_config) if hf_config is not None else None
    worker_count(workers)
    with Team.from_environment() as team, closing(MegatronSource(Path(source), config, family)) as src:
        check_ignored(src.model)
        checks = SourceChecks(src)
        work = Workdir(src.path, src.read_files(), Path(destination), overwrite, resume, team.process)
        if not dry_run:
            team.together(lambda: work.check_destination() if team.process == 0 else None)
        tensors = {
            n: TensorInfo(t.shape, _stored_dtype(t.dtype, target, n in src.mapping.fp32))
            for n, t in src.tensors.items()
        }
        quantized = _scheme_of(way, _names_to_quantize(src, tensors) if way else [])
        if any(tensors[name].dtype.size > 2 for name in quantized.names):
            raise ReshardError(
                f"--quantize {way} goes with bf16 or fp16 for what stays as it is, and that is "
                "fp32 here: add --dtype bf16"
            )
        uneven = [name for name in sorted(quantized.names) if tensors[name].columns % quantized.columns]
        if uneven:
            raise ReshardError(
                f"--quantize {way}: {uneven[0]} has {tensors[uneven[0]].columns} columns, which groups of {quantized.columns} "
                f"do not divide ({len(uneven)} such weights): choose another"
            )
        new = HuggingFaceFiles(src.model, src.mapping.fp32, tensors, quantized, shard_bytes, src.hf_files())
        report = _report(
            "mcore-to-hf", src, source, destination, "whole tensors", new.sizes, workers, dry_run, team
        )
        report.notices += _without_tokenizer(src, report)
        if dry_run:
            report.notices += _without_space(work, new.sizes)
            return report

        run = Run(
            src,
            tensors,
            new.strips,
            new.sizes,
            work,
            team,
            workers,
            sync,
            progress,
            checks,
            allow_overflow,
            quantized,
        )

        def create(files: OpenFiles, mine: set[str]) -> None:
            new.write_frames(work.tree, mine, files)

        def finish(checksums: dict[str, str]) -> None:
            fields = new.fields(src.model.family.name, source, sorted(quantized.names)) | _ignored_field(src)
            new.finish(work, fields, checksums, sync)

        options = {
            "dtype": target and target.name,
            "quantize": {None: False, BLOCKS: True}.get(way, way),
            "shard": new.shard_bytes,
            "overflow": allow_overflow,
        }
        identity, places = _identity(src)
        shared = fingerprint(identity, options, team.size)
        report.resumed_tensors = run.run(shared, fingerprint(shared, places), resume, create, finish)
        report.notices += _run_notices(run)
        return report


def _ignored_field(src: Source) -> dict[str, list[str]]:
    """The fields of the config, or arguments of the checkpoint, that were ignored, for the manifest: what is
    written contradicts them."""
    return {"ignored_config_fields": sorted(src.model.ignored)} if src.model.ignored else {}


def _without_tokenizer(src: Source, report: ConversionReport) -> list[str]:
    """What is said where no tokenizer comes with the weights."""
    if has_tokenizer(src.hf_files()):
        return []
    place = src.hf_directory() or src.path
    if report.direction == "mcore-to-hf":
        return [f"{place} has no tokenizer, and so {report.destination} has none: copy one there"]
    return [
        f"{place} has no tokenizer: training takes --tokenizer-type and --tokenizer-model of one from elsewhere"
    ]


def _without_space(work: Workdir, sizes: dict[str, int]) -> list[str]:
    """What is said where the disk has no space for files of these sizes."""
    needed, free = work.space(sizes)
    return (
        [f"it will not fit: {work.destination} needs {needed:,} more bytes, but the disk has {free:,} free"]
        if needed > free
        else []
    )


def _run_notices(run: Run) -> list[str]:
    """What is said of numbers that became infinite, as was allowed, and of a run that had nothing left to
    do."""
    done = [f"{run.work.destination} was complete: an earlier run had published it"] if run.was_done else []
    return done + [
        overflow_notice(name, count, run.tensors[name].dtype).replace("would become", "became")
        for name, count in run.overflowed.items()
    ]


def float_dtype(name: str | None) -> Dtype | None:
    if name is None:
        return None
    try:
        return {d.name: d for d in map(dtype_named, ("bf16", "fp16", "fp32"))}[dtype_named(name).name]
    except KeyError as error:
        raise ReshardError(f"--dtype {name} is not one of bf16, fp16, fp32") from error


def _stored_dtype(dtype: Dtype, target: Dtype | None, keep_precision: bool) -> Dtype:
    if target is None or (keep_precision and target.size < dtype.size):
        return dtype
    return target


def _report(
    direction: str,
    src: Source,
    source: Any,
    destination: Any,
    layout: str,
    sizes: dict[str, int],
    workers: int | None,
    dry_run: bool,
    team: Team,
) -> ConversionReport:
    read = sum(t.size_bytes for n, t in src.tensors.items())
    slab = max(SLAB_BYTES, *(src.row_multiple(n) * t.columns * 4 for n, t in src.tensors.items()))
    # Read, assembled, cast, cut into columns.
    memory = BASE_MEMORY_BYTES + workers_for(read, workers) * (WORKER_MEMORY_BYTES + 4 * slab)
    return ConversionReport(
        direction,
        src.model.family.name,
        str(source),
        str(destination),
        layout,
        len(src.tensors),
        read,
        sum(sizes.values()),
        len(sizes),
        {},
        memory + len(src.tensors) * TENSOR_MEMORY_BYTES,
        dry_run,
        list(src.notices),
        process=team.process,
    )


def _identity(src: Source) -> tuple[list, list]:
    """What a resumed run must find unchanged: of every file that the source reads its size and times, as what
    its links lead to has them, with what the model was read as; and which files these are, by inode and by
    where their links end, as this host knows it.
    """
    top, times, places = os.path.realpath(src.path), [], []
    for path in src.pinned_files():
        name, version = os.path.relpath(path, src.path), src.versions[path]
        if version is not None:
            times.append([name, version.size_bytes, version.mtime_ns, version.ctime_ns])
            places.append([name, version.inode, os.path.relpath(os.path.realpath(path), top)])
    return [times, src.model.family.name, src.model.config], places


def _scheme_of(way: str | None, names: list[str]) -> Quantized:
    """How these weights are stored, none of them as it is by default."""
    return COMPRESSED[way](names) if way in COMPRESSED else Fp8Blocks(names)


def _names_to_quantize(src: MegatronSource, tensors: dict[str, TensorInfo]) -> list[str]:
    """The names to quantize: those that were in the checkpoint this one came from, else all linear weights of
    the layers, as published checkpoints have them."""
    recorded = (src.manifest() or {}).get("quantized")
    quantized = set(recorded) if recorded else src.model.quantizable()
    return [name for name in tensors if name in quantized]
