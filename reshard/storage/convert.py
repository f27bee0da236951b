"""Conversion on disk: Hugging Face to Megatron ``torch_dist`` and back, a slab at a time, without a
model, a GPU or torch."""

import re
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

from reshard.comm.team import Team
from reshard.core.dtypes import DTYPES, Dtype
from reshard.core.errors import OptionError, ReshardError, listed, shown
from reshard.core.limits import MAX_ITERATION, MAX_VOCAB_MULTIPLE, check_number
from reshard.core.views import tensor_of
from reshard.megatron.arguments import caveats
from reshard.megatron.flags import version_of
from reshard.megatron.hybrid import MODEL_CLASSES, class_of
from reshard.megatron.layout import MegatronLayout, checked_layout
from reshard.megatron.parameters import TRANSFORMER_IMPLS
from reshard.megatron.training.progress import TrainingState
from reshard.models.config_fields import check_ignored
from reshard.models.without_table import any_model
from reshard.storage.destinations.huggingface import HuggingFaceFiles, parse_size
from reshard.storage.destinations.megatron import MegatronFiles
from reshard.storage.io.casts import float_dtype
from reshard.storage.io.streams import TensorInfo
from reshard.storage.quantized import Quantized, Scheme, scheme_named
from reshard.storage.report import (
    ConversionReport,
    destination_notices,
    new_report,
    outcome_notices,
    tokenizer_notices,
)
from reshard.storage.run.conversion import run_conversion
from reshard.storage.run.job import ConversionJob, RunOptions, tensors_to_store
from reshard.storage.run.workdir import Workdir
from reshard.storage.run.workers import Progress
from reshard.storage.sources.base import Source
from reshard.storage.sources.derived import DerivedSource
from reshard.storage.sources.foreign import check_foreign
from reshard.storage.sources.fsdp import FsdpSource, locate_fsdp
from reshard.storage.sources.hf_hub import config_path, source_directory
from reshard.storage.sources.megatron import MegatronSource, States
from reshard.storage.sources.opening import check_config_is_read, check_directory, open_published
from reshard.storage.sources.verify import SourceChecks, manifest_of
from reshard.storage.stores.mirror import local_path
from reshard.storage.stores.place import is_store
from reshard.storage.stores.sending import StoreShare
from reshard.storage.stores.workdir import StoreWorkdir


def hf_to_mcore(
    source: str | Path,
    destination: str | Path,
    layout: MegatronLayout | None = None,
    *,
    hf_config: str | Path | None = None,
    dtype: str | None = None,
    allow_overflow: bool = False,
    transformer_impl: str = "transformer_engine",
    model_class: str | None = None,
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
    """Convert a Hugging Face checkpoint (a directory or a hub id), or one of a trainer under FSDP (`fsdp_to_hf`), to a
    Megatron ``torch_dist`` checkpoint; weights in fp8 blocks, in mxfp4, in fp8, int8, int4 or nvfp4 by
    compressed-tensors, or in nvfp4 by modelopt, are dequantized.

    `hf_config` is the config of an FSDP checkpoint that has none beside it. `layout` decides how the tensors are cut
    into chunks and files, `dtype` (``bf16``, ``fp16``,
    ``fp32``) casts, `iteration` writes a numbered iteration where None writes a release.
    `model_class` is the class of Megatron's model that loads it, ``gpt`` (GPTModel) or ``hybrid``
    (HybridModel; the default where no GPTModel has such layers). The flags file is for Megatron-LM
    `megatron_version` (``0.14``; default: the newest that is known); the weights are the same for all.
    Finite numbers that a cast would make infinite are refused unless `allow_overflow`, and then counted
    in the report's notices. With `sync` all bytes are on the disk before the destination appears. Under
    torchrun, the processes share the work. `progress(done, total)` is called with bytes.

    Raises ReshardError, and leaves no destination, for anything that cannot be converted exactly.
    """
    layout, target = checked_layout(layout), float_dtype(dtype)
    form = megatron_form(
        transformer_impl, model_class, make_vocab_size_divisible_by, megatron_version, iteration
    )
    options = RunOptions(overwrite, resume, sync, workers, dry_run, progress, allow_overflow).checked()
    config = config_path(hf_config) if hf_config is not None else None
    # Codes are dequantized to a dtype that holds them all, so that the cast can count what overflows.
    wide = DTYPES["float32"] if target is not None and target.name == "float16" else target
    directory = source_directory(str(source))
    check_config_is_read(hf_config, directory)
    with Team.from_environment() as team, closing(open_published(directory, config, wide)) as src:
        return to_mcore("hf-to-mcore", src, source, destination, layout, target, form, team, options)


def mcore_to_mcore(
    source: str | Path,
    destination: str | Path,
    layout: MegatronLayout | None = None,
    *,
    hf_config: str | Path | None = None,
    family: str | None = None,
    without_adapters: bool = False,
    without_optimizer: bool = False,
    dtype: str | None = None,
    allow_overflow: bool = False,
    transformer_impl: str = "transformer_engine",
    model_class: str | None = None,
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
    """Convert a Megatron ``torch_dist`` checkpoint to another one: of a GPTModel to a HybridModel's or the
    other way round, for other layers or another layout. Every bit stays; `dtype` casts the weights alone.

    Optimizer states that can be moved go along, with schedule, arguments and iteration of the training, unless
    `without_optimizer`. `hf_config`, `family` and `without_adapters` are those of `mcore_to_hf`, the other options
    those of `hf_to_mcore`, and so is what it raises.
    """
    layout, target = checked_layout(layout), float_dtype(dtype)
    form = megatron_form(
        transformer_impl, model_class, make_vocab_size_divisible_by, megatron_version, iteration
    )
    config = config_path(hf_config) if hf_config is not None else None
    options = RunOptions(overwrite, resume, sync, workers, dry_run, progress, allow_overflow).checked()
    states: States = "none" if without_optimizer else "all"
    multiple = make_vocab_size_divisible_by * layout.tp
    with (
        Team.from_environment() as team,
        closing(
            MegatronSource(local_path(source), config, family, without_adapters, states, multiple)
        ) as src,
    ):
        training = src.training_state()
        if training is not None and iteration is None:
            form["iteration"] = training.resumed_iteration(src.path)
        places = (src, source, destination, layout)
        return to_mcore("mcore-to-mcore", *places, target, form, team, options, training)


def to_mcore(
    direction: str,
    src: Source,
    source: str | Path,
    destination: str | Path,
    layout: MegatronLayout,
    target: Dtype | None,
    form: dict[str, Any],
    team: Team,
    options: RunOptions,
    training: TrainingState | None = None,
) -> ConversionReport:
    """Convert an open source to a Megatron checkpoint of this `form` (`megatron_form`), from which a
    `training` goes on."""
    form = form | {"model_class": class_of(src.model, form["model_class"])}
    checks, workdir = check_both_ends(src, destination, team, options)
    tensors = tensors_to_store(src, target)
    files = MegatronFiles(src.model, layout, tensors, src.copies, src.hf_files(), training=training, **form)
    states = {} if training is None else {"optimizer": True}  # settings of other runs stay as they were
    settings = form | {"layout": asdict(layout), "dtype": target and target.name} | states
    job = ConversionJob(src, source, checks, files.stored, Quantized(), files, workdir, team, options)
    report = new_report(direction, job, destination, str(layout))
    sentences = caveats(src.model, form["transformer_impl"], form["model_class"])
    report.notices += [sentence for sentence in sentences if sentence not in report.notices]
    report.bytes_per_rank = files.rank_files.tensor_bytes()
    return carry_out(job, settings, report)


def mcore_to_hf(
    source: str | Path,
    destination: str | Path,
    *,
    hf_config: str | Path | None = None,
    family: str | None = None,
    without_adapters: bool = False,
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
    """Convert a Megatron ``torch_dist`` checkpoint, whoever wrote it and at whatever layout, to a
    Hugging Face directory.

    Without `hf_config` (a ``config.json`` or a directory with one) the config is the one beside the
    weights, else the one that the checkpoint's ``args`` describe. `without_adapters` leaves out an
    adapter that lies beside the weights. `quantize` writes linear weights as fp8 with a scale for each
    128x128 block (True, or ``fp8``), or, in the format of compressed-tensors, as fp8 with a scale for
    each output channel (``fp8_per_channel``), as int4 with one for 128 or 32 columns of an output
    channel (``int4_per_group``, ``int4_per_group_32``), or as ``nvfp4``. `max_shard_size` is bytes or
    text like ``5GB``; None is 5 GB, or less where a model would not fill 16 files, which are written at
    once, but not less than 1 GB. The other options are those of `hf_to_mcore`, and so is what it raises.
    """
    scheme_name, scheme = scheme_named(quantize) or (None, None)
    target = float_dtype(dtype)
    shard_bytes = None if max_shard_size is None else parse_size(max_shard_size)
    config = config_path(hf_config) if hf_config is not None else None
    options = RunOptions(overwrite, resume, sync, workers, dry_run, progress, allow_overflow).checked()
    with (
        Team.from_environment() as team,
        closing(MegatronSource(local_path(source), config, family, without_adapters)) as src,
    ):
        check_towers(src)
        return to_hf(
            "mcore-to-hf", src, source, destination, target, shard_bytes, team, options, scheme_name, scheme
        )


def fsdp_to_hf(
    source: str | Path,
    destination: str | Path,
    *,
    hf_config: str | Path | None = None,
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
    """Convert a checkpoint that a trainer under FSDP has saved with ``torch.distributed.checkpoint``, whatever its mesh
    was, to a Hugging Face directory: what ``save_pretrained`` would have written.

    The keys are those of a transformers model, after any prefix; the states of the optimizer stay behind. `hf_config`
    is the config of the model, or a directory or hub id that has it, where none lies beside the checkpoint. The other
    options are those of `mcore_to_hf`, and so is what it raises.
    """
    scheme_name, scheme = scheme_named(quantize) or (None, None)
    target = float_dtype(dtype)
    shard_bytes = None if max_shard_size is None else parse_size(max_shard_size)
    config = config_path(hf_config) if hf_config is not None else None
    options = RunOptions(overwrite, resume, sync, workers, dry_run, progress, allow_overflow).checked()
    path = local_path(source)
    check_directory(path)
    located = locate_fsdp(path)
    if located is None:
        check_foreign(path)
        raise ReshardError(
            f"{path} is no checkpoint of torch.distributed.checkpoint with a transformers model's names: reshard "
            f"inspect {path} says what it is"
        )
    with (
        Team.from_environment() as team,
        closing(FsdpSource(path, located, config, any_model)) as src,
    ):
        places = (src, source, destination)
        return to_hf("fsdp-to-hf", *places, target, shard_bytes, team, options, scheme_name, scheme)


def to_hf(
    direction: str,
    src: Source,
    source: str | Path,
    destination: str | Path,
    target: Dtype | None,
    shard_bytes: int | None,
    team: Team,
    options: RunOptions,
    scheme_name: str | None = None,
    scheme: Scheme | None = None,
) -> ConversionReport:
    """Convert an open source to a Hugging Face directory, its linear weights quantized by a scheme."""
    checks, workdir = check_both_ends(src, destination, team, options)
    tensors = tensors_to_store(src, target)
    quantized = _quantized(scheme_name, scheme, src, tensors)
    # Codes are those of whole tensors.
    packed = src.mapping.packed if src.experts_packed and not quantized.names else {}
    files = HuggingFaceFiles(
        src.model, src.mapping.fp32, tensors, quantized, shard_bytes, src.hf_files(), packed
    )
    settings = {
        "dtype": target and target.name,
        "quantize": {None: False, "fp8": True}.get(scheme_name, scheme_name),
        "shard": files.shard_bytes,
    }
    job = ConversionJob(src, source, checks, tensors, quantized, files, workdir, team, options)
    report = new_report(direction, job, destination, "whole tensors")
    report.notices += _full_notices(job, scheme_name)
    return carry_out(job, settings, report)


def megatron_form(
    transformer_impl: str,
    model_class: str | None,
    make_vocab_size_divisible_by: int,
    megatron_version: str | None,
    iteration: int | None,
) -> dict[str, Any]:
    """Return the options of a Megatron checkpoint that decide its bytes, as `MegatronFiles` takes
    them. Raises ReshardError for a value that cannot be."""
    if transformer_impl not in TRANSFORMER_IMPLS:
        raise OptionError(f"--transformer-impl {transformer_impl} is not one of {listed(TRANSFORMER_IMPLS)}")
    if model_class not in (None, *MODEL_CLASSES):
        raise OptionError(f"--model-class {model_class} is not one of {listed(MODEL_CLASSES)}")
    check_number(make_vocab_size_divisible_by, "--make-vocab-size-divisible-by", MAX_VOCAB_MULTIPLE)
    if iteration is not None:
        check_number(iteration, "--iteration", MAX_ITERATION)
    return {
        "transformer_impl": transformer_impl,
        "model_class": model_class,
        "make_vocab_size_divisible_by": make_vocab_size_divisible_by,
        "megatron_lm": version_of(megatron_version),
        "iteration": iteration,
    }


def check_both_ends(
    source: Source, destination: str | Path, team: Team, options: RunOptions
) -> tuple[SourceChecks, Workdir]:
    """Hold a source against its manifest, and see that the destination can be written. Raises
    ReshardError."""
    check_ignored(source.model)
    checks = source.checks() if isinstance(source, DerivedSource) else SourceChecks(source)
    workdir: Workdir
    if is_store(destination):
        workdir = StoreWorkdir(
            source.path,
            str(destination),
            options.overwrite,
            options.resume,
            team.process,
            reads=[*source.read_files(), *filter(None, [getattr(source, "hf_config", None)])],
        )
    else:
        workdir = Workdir(
            source.path,
            source.read_files(),
            Path(destination),
            options.overwrite,
            options.resume,
            team.process,
        )
    if not options.dry_run:
        team.together(lambda: workdir.check_destination() if team.process == 0 else None)
        if isinstance(source, DerivedSource):
            team.together(lambda: source.check_read(team.process, team.size, options.workers))
    return checks, workdir


def check_towers(source: MegatronSource) -> None:
    """Raise ReshardError if a larger model is to be written, and only its language model is there: not
    where it was converted from a directory that had no more, as its manifest shows."""
    has_tower = source.towers or any(name.startswith(source.model.family.towers) for name in source.tensors)
    if source.model.wrapped and not has_tower and manifest_of(source) is None:
        raise ReshardError(
            f"{source.path} has the language model of {source.model.family.wrapped_in[0]} only: pass "
            "--hf-config with the Hugging Face directory that it comes from, whose other tensors are "
            "carried along"
        )


def carry_out(job: ConversionJob, settings: dict[str, Any], report: ConversionReport) -> ConversionReport:
    """Carry out a conversion, or only say what is in its way where it is a dry run; return the
    report, completed.

    `settings` is all but the source that decides the bytes.
    """
    if job.source.is_model:
        report.notices += tokenizer_notices(job, report)
    if job.options.dry_run:
        report.notices = [shown(notice) for notice in report.notices + destination_notices(job)]
        return report
    share_of = StoreShare if isinstance(job.workdir, StoreWorkdir) else None
    outcome = run_conversion(job, settings | {"overflow": job.options.allow_overflow}, share_of)
    report.resumed_tensors = outcome.resumed_tensors
    report.notices = [shown(notice) for notice in report.notices + outcome_notices(job, outcome)]
    return report


def _quantized(
    scheme_name: str | None, scheme: Scheme | None, source: Source, tensors: dict[str, TensorInfo]
) -> Quantized:
    """Return which weights are quantized, and how; none without a scheme. Raises ReshardError if
    the scheme cannot hold them."""
    if scheme and not source.model.family.experts_apart:
        raise ReshardError(
            f"--quantize {scheme_name}: a {source.model.family.architecture} is written in bf16, fp16 or fp32 only, "
            "since no engine reads its experts one by one: leave --quantize out"
        )
    quantized = Quantized(_names_to_quantize(source, tensors) if scheme else (), scheme)
    if any(tensors[name].dtype.size > 2 for name in quantized.names):
        raise ReshardError(
            f"--quantize {scheme_name} goes with bf16 or fp16 for what stays as it is, and that is "
            "fp32 here: add --dtype bf16"
        )
    multiple = quantized.scheme.column_multiple
    uneven = [name for name in sorted(quantized.names) if tensors[name].columns % multiple]
    if uneven:
        raise ReshardError(
            f"--quantize {scheme_name}: {uneven[0]} has {tensors[uneven[0]].columns} columns, which groups "
            f"of {multiple} do not divide ({len(uneven)} such weights): choose another"
        )
    return quantized


def _full_notices(job: ConversionJob, scheme_name: str | None) -> list[str]:
    """Return a notice of the linear weights that a scheme leaves as they are: of those that were quantized in the
    checkpoint this one came from, or that no router is."""
    if scheme_name is None:
        return []
    wanted = (job.source.manifest() or {}).get("quantized") or job.source.model.kept_in_full()
    left = [name for name in job.tensors if name not in job.quantized.names]
    in_full = sorted({*map(tensor_of, left)} & {*map(tensor_of, wanted)})
    if not in_full:
        return []
    dtypes = sorted({job.tensors[name].dtype.name for name in left if tensor_of(name) in in_full})
    kinds = sorted({re.sub(r"\.\d+\.", ".*.", name) for name in in_full})
    return [
        f"--quantize {scheme_name} leaves {len(in_full):,} linear weights in {listed(dtypes)}: {listed(kinds)}"
    ]


def _names_to_quantize(source: Source, tensors: dict[str, TensorInfo]) -> list[str]:
    """Return the names to quantize: those that were in the checkpoint this one came from, else all
    linear weights of the layers, as published checkpoints have them."""
    recorded = (source.manifest() or {}).get("quantized")
    quantized = set(recorded) if recorded else source.model.quantizable()
    return [name for name in tensors if name in quantized]
