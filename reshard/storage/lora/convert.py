"""LoRA adapters on disk: between PEFT's files and Megatron checkpoints, and merged into their base model."""

from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from reshard.comm.team import Team
from reshard.core.errors import OptionError, ReshardError, listed
from reshard.core.limits import MAX_ITERATION, check_number
from reshard.lora.names import A, module_of, peft_name
from reshard.lora.parameters import FORMATS, AdapterForm, part_names
from reshard.megatron.layout import MegatronLayout, checked_layout
from reshard.models.family import no_table
from reshard.storage.convert import (
    carry_out,
    check_both_ends,
    check_towers,
    megatron_form,
    to_hf,
    to_mcore,
)
from reshard.storage.destinations.huggingface import parse_size
from reshard.storage.io.casts import float_dtype
from reshard.storage.lora.fused import FusedExpertsSource
from reshard.storage.lora.megatron_files import MegatronAdapterFiles, trainer_settings
from reshard.storage.lora.merged import MergedSource
from reshard.storage.lora.opening import open_adapter
from reshard.storage.lora.peft_files import PeftFiles
from reshard.storage.lora.source import AdapterSource
from reshard.storage.quantized import Quantized
from reshard.storage.report import ConversionReport, new_report
from reshard.storage.run.job import ConversionJob, RunOptions, tensors_to_store
from reshard.storage.run.workers import Progress
from reshard.storage.sources.base import Source
from reshard.storage.sources.hf_hub import config_path, local_directory
from reshard.storage.sources.megatron import MegatronSource
from reshard.storage.sources.opening import check_config_is_read, open_source
from reshard.storage.sources.paths import locate
from reshard.storage.stores.place import is_store

EXPERTS = ("apart", "together")
NO_PLACE = "train without, or add it to the model with reshard lora-merge"
ADAPTER_NAME = "default"  # PEFT's and ms-swift's, of the only adapter


def lora_to_peft(
    source: str | Path,
    destination: str | Path,
    *,
    hf_config: str | Path | None = None,
    alpha: float | None = None,
    tp: int | None = None,
    experts: str = "apart",
    dtype: str | None = None,
    overwrite: bool = False,
    resume: bool = False,
    sync: bool = True,
    workers: int | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> ConversionReport:
    """Convert the LoRA adapter in a Megatron checkpoint of Megatron-Bridge or mcore-bridge, at whatever
    layout, to a PEFT directory. Every bit stays, without `dtype`.

    `hf_config` is the config of the base model, or its directory; `alpha` the adapter's, where the
    checkpoint does not say it; `tp` the tensor-parallel size with which mcore-bridge saved it, where
    its arguments do not say that. Adapters of experts are written one by one (`experts` ``apart``), or
    ``together``: those of all experts of a layer in one tensor, as PEFT trains them in transformers 5
    (``target_parameters``). The other options are those of `hf_to_mcore`.

    Raises ReshardError, and leaves no destination, for an adapter that is more than LoRA's A and B.
    """
    if experts not in EXPERTS:
        raise OptionError(f"--experts {experts} is not one of {listed(EXPERTS)}")
    check_places(source, destination)
    options = RunOptions(overwrite, resume, sync, workers, dry_run, progress).checked()
    config = None if hf_config is None else config_path(hf_config)
    with (
        Team.from_environment() as team,
        closing(open_adapter(Path(source), config, alpha, tp)) as src,
    ):
        checks, workdir = check_both_ends(src, destination, team, options)
        _name_base(src, hf_config)
        written = FusedExpertsSource(src) if experts == "together" else src
        tensors = tensors_to_store(written, float_dtype(dtype))
        files = PeftFiles(written, tensors)
        src.notices += _notices_for_peft(written)
        job = ConversionJob(written, source, checks, tensors, Quantized(), files, workdir, team, options)
        return carry_out(
            job,
            {"dtype": dtype, "alpha": alpha, "tp": tp, "experts": experts},
            new_report("lora-to-peft", job, destination, "PEFT"),
        )


def lora_to_megatron(
    source: str | Path,
    destination: str | Path,
    *,
    format: str = "bridge",
    hf_config: str | Path | None = None,
    canonical: bool | None = None,
    tp: int | None = None,
    alpha: float | None = None,
    saved_tp: int | None = None,
    iteration: int = 0,
    dtype: str | None = None,
    overwrite: bool = False,
    resume: bool = False,
    sync: bool = True,
    workers: int | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> ConversionReport:
    """Convert a LoRA adapter, a PEFT directory or in another trainer's checkpoint, to a Megatron checkpoint
    that Megatron-Bridge (`format` ``bridge``) or mcore-bridge (``mcore-bridge``) loads at any layout.

    Both fuse q, k and v, and gate and up, and have one A for them. Where an adapter's A's differ, or some
    of these layers have none, it becomes Megatron-Bridge's canonical LoRA, as with `canonical`; False
    refuses it. A layer without an adapter gets one of zeros where the trainer will have one. `tp` is the
    tensor-parallel size at which it will be loaded: the order of rows of gate and up depends on it in
    mcore-bridge's checkpoints and in those of canonical LoRA. `alpha` and `saved_tp` are those of a
    checkpoint that does not say them, the other options those of `lora_to_peft`.

    Raises ReshardError, and leaves no destination, for what the format cannot hold.
    """
    if format not in FORMATS:
        raise OptionError(f"--format {format} is not one of {listed(FORMATS)}")
    if format == "mcore-bridge" and canonical:
        raise OptionError(
            "--canonical is a kind of adapter of Megatron-Bridge only: leave it out, or use --format bridge"
        )
    if iteration:
        check_number(iteration, "--iteration", MAX_ITERATION)
    check_places(source, destination)
    options = RunOptions(overwrite, resume, sync, workers, dry_run, progress).checked()
    config = None if hf_config is None else config_path(hf_config)
    with (
        Team.from_environment() as team,
        closing(open_adapter(Path(source), config, alpha, saved_tp)) as src,
    ):
        if not src.model.family.has_megatron_names:
            raise no_table(src.model.family)
        checks, workdir = check_both_ends(src, destination, team, options)
        tensors = tensors_to_store(src, float_dtype(dtype))
        _name_base(src, hf_config)
        src.note_untrained()
        form = _form(src, format, canonical, tp or 1)
        files = MegatronAdapterFiles(src, tensors, form, iteration)
        settings = {
            "dtype": dtype,
            "form": [form.canonical, form.adapter, form.swiglu_ranks],
            "iteration": iteration,
            "alpha": alpha,
            "saved_tp": saved_tp,
        }
        job = ConversionJob(src, source, checks, tensors, Quantized(), files, workdir, team, options)
        report = new_report("lora-to-megatron", job, destination, f"{format}{', canonical' * form.canonical}")
        return carry_out(job, settings, report)


def lora_merge(
    base: str | Path,
    adapter: str | Path,
    destination: str | Path,
    *,
    format: str = "hf",
    layout: MegatronLayout | None = None,
    hf_config: str | Path | None = None,
    alpha: float | None = None,
    saved_tp: int | None = None,
    dtype: str | None = None,
    transformer_impl: str = "transformer_engine",
    max_shard_size: str | int | None = None,
    overwrite: bool = False,
    resume: bool = False,
    sync: bool = True,
    workers: int | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> ConversionReport:
    """Add a LoRA adapter, PEFT's or in a Megatron checkpoint, to the weights of its base model, and write the
    sum as a Hugging Face directory (`format` ``hf``) or as a Megatron checkpoint at `layout` (``mcore``).

    Each weight becomes ``W + scale * B @ A``, computed in float32 and rounded once, to `dtype` or to the
    base's. `saved_tp` is the tensor-parallel size with which mcore-bridge saved the adapter. The other
    options are those of `hf_to_mcore`, `mcore_to_hf` and `lora_to_peft`.

    Raises ReshardError, and leaves no destination, where the two do not belong together.
    """
    if format not in ("hf", "mcore"):
        raise OptionError(f"--format {format} is not one of hf, mcore")
    check_places(base, adapter, destination)
    options = RunOptions(overwrite, resume, sync, workers, dry_run, progress).checked()
    layout, target = checked_layout(layout), float_dtype(dtype)
    shard_bytes = None if max_shard_size is None else parse_size(max_shard_size)
    form = megatron_form(transformer_impl, "gpt", 128, None, None)
    with ExitStack() as stack:
        team = stack.enter_context(Team.from_environment())
        base_source = stack.enter_context(closing(_open_base(base, hf_config)))
        added = stack.enter_context(
            closing(open_adapter(Path(adapter), None, alpha, saved_tp, base_source.model))
        )
        if format == "hf" and isinstance(base_source, MegatronSource):
            check_towers(base_source)
        source = MergedSource(base_source, added, target)
        name = f"{base} + {adapter}"
        if format == "mcore":
            return to_mcore("lora-merge", source, name, destination, layout, target, form, team, options)
        return to_hf("lora-merge", source, name, destination, target, shard_bytes, team, options)


def check_places(*places: str | Path) -> None:
    """Raise ReshardError if one of the places of a LoRA command is the URL of an object store."""
    for place in places:
        if is_store(place):
            raise ReshardError(
                f"{place} is in an object store, and the LoRA commands read and write directories: give one, and copy "
                "it from or to there"
            )


def _open_base(path: str | Path, hf_config: str | Path | None) -> Source:
    """Open the base model, without the adapter that may lie beside its weights."""
    directory = local_directory(str(path))
    if directory.is_dir() and locate(directory) is not None:
        config = None if hf_config is None else config_path(hf_config)
        return MegatronSource(directory, config, without_adapters=True)
    check_config_is_read(hf_config, directory)
    return open_source(directory)


def _notices_for_peft(source: AdapterSource) -> list[str]:
    """Return notices of what readers of PEFT's files make of these: PEFT takes the names of experts' layers in a
    model of transformers 5 for those of all layers that end alike."""
    notices = []
    if len({(scale.rank, scale.alpha) for scale in source.scales.values()}) > 1:
        notices.append(
            "layers have different ranks or alphas (rank_pattern, alpha_pattern), which vLLM heeds from 0.33 on"
        )
    ends = [
        {
            module_of(name).rpartition(".")[2]
            for a in source.adapters
            if a.layer.of_experts is of_experts
            for name in a.ranks
        }
        for of_experts in (True, False)
    ]
    if not ends[0] & ends[1]:
        return notices
    if source.parameters:
        return [
            *notices,
            "PEFT 0.21 with transformers 5 does not load adapters of dense layers and shared experts "
            f"({listed(sorted(ends[0] & ends[1]))}) beside those of all routed experts in one tensor: write them with "
            "--experts apart for vLLM; reshard lora-merge adds either",
        ]
    return [
        *notices,
        (
            "PEFT 0.21 with transformers 5 drops the adapters of dense layers and shared experts "
            f"({listed(sorted(ends[0] & ends[1]))}) beside those of routed experts: vLLM reads all of them, and "
            "reshard lora-merge adds them all"
        ),
    ]


def _name_base(source: AdapterSource, hf_config: str | Path | None) -> None:
    """Take the directory or hub id that was given for the model's name, which adapters record."""
    if hf_config is not None and not Path(hf_config).is_file():
        source.base_name = str(hf_config)


def _form(source: AdapterSource, format: str, canonical: bool | None, tp: int) -> AdapterForm:
    """Return the form of the checkpoint to write: canonical where it has to be, unless that is refused."""
    if canonical:
        return AdapterForm(canonical=True, swiglu_ranks=tp)
    reason = _not_fused(source)
    if reason and (format == "mcore-bridge" or canonical is False):
        another = "--format bridge" if format == "mcore-bridge" else "--canonical"
        advice = f"{another} has one for each" if not _not_canonical(source) else NO_PLACE
        raise ReshardError(
            f"{source.path}: {reason}, where {format}{'' if format == 'mcore-bridge' else ' without --canonical'} "
            f"has one A for all of them: {advice}"
        )
    if format == "mcore-bridge":
        return AdapterForm(adapter=ADAPTER_NAME, swiglu_ranks=tp)
    if reason and (refusal := _not_canonical(source)):
        raise ReshardError(
            f"{source.path}: {reason}, where {format} has one A for all of them, and {refusal}: {NO_PLACE}"
        )
    if reason:
        source.notices.append(f"written as canonical LoRA: {reason}")
    return AdapterForm(canonical=bool(reason), swiglu_ranks=tp)


def _not_canonical(source: AdapterSource) -> str:
    """Return why canonical LoRA has no place for an adapter; empty if it has one."""
    try:
        for adapter in source.adapters:
            if not adapter.layer.of_experts and len(adapter.layer.published()) > 1:
                part_names(adapter.layer)
        trainer_settings(source, AdapterForm(canonical=True))
    except ReshardError as error:
        return str(error)
    return ""


def _not_fused(source: AdapterSource) -> str:
    """Return why an adapter's layers cannot share one A where Megatron fuses them; empty if they can."""
    for adapter in source.adapters:
        names = adapter.layer.published()
        if adapter.layer.of_experts or len(names) == 1:
            continue
        without = [name for name in names if name not in adapter.ranks]
        if without:
            return f"{without[0]} has no adapter, and {next(n for n in names if n in adapter.ranks)} has one"
        if len({adapter.ranks[name] for name in names}) > 1:
            return f"{listed(names)} have different ranks"
        if len({_digest(source, peft_name(name, A)) for name in names}) > 1:
            return f"{listed(names)} have different A"
    return ""


def _digest(source: AdapterSource, name: str) -> str:
    info: Any = source.tensors[name]
    rows = source.read_rows(name, 0, info.rows)
    return xxhash.xxh3_128(memoryview(np.ascontiguousarray(rows).view(np.uint8).reshape(-1))).hexdigest()
