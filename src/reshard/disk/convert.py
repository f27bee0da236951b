"""Conversion on disk: Hugging Face to Megatron ``torch_dist`` and back, a slab at a time, without a model, a
GPU or torch."""

import json
import os
from contextlib import closing
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from reshard.core.dtypes import DTYPES, Dtype, dtype_named
from reshard.core.errors import ReshardError, listed
from reshard.core.limits import MAX_ITERATION, MAX_VOCAB_MULTIPLE, check_number
from reshard.core.placement import Placement
from reshard.core.planner import make_plan
from reshard.disk.files import OpenFiles, allow_many_files
from reshard.disk.fp8 import BLOCK, Fp8Blocks, quantizable
from reshard.disk.hub import local_directory
from reshard.disk.manifest import NAME as MANIFEST
from reshard.disk.manifest import file_entry, manifest_json, printable
from reshard.disk.rank_files import RankFiles, file_bytes
from reshard.disk.run import Run, overflow_notice
from reshard.disk.sources import HF_FILES, HuggingFaceSource, MegatronSource, Source
from reshard.disk.streams import SLAB_BYTES, TensorInfo, grouped_strips, strip_of
from reshard.disk.team import Team
from reshard.disk.verify import SourceChecks
from reshard.disk.workdir import Workdir, fingerprint
from reshard.disk.workers import Aside, Progress, worker_count, workers_for
from reshard.formats import safetensors, torch_dist
from reshard.megatron.args import FLAGS_FILE, arguments, checkpoint_args, command_line, version_of
from reshard.megatron.checkpoint import chunks_to_write, extra_states_to_write
from reshard.megatron.layout import Layout
from reshard.megatron.parameters import TRANSFORMER_IMPLS, expand, padded_vocab_size
from reshard.models.config_fields import check_ignored

# About what the interpreter and numpy take before the first slab, a forked worker of its own, and what is
# planned for a tensor (with .metadata, and with what workers copy of it).
BASE_MEMORY_BYTES, WORKER_MEMORY_BYTES, TENSOR_MEMORY_BYTES = 48 << 20, 8 << 20, 9 << 10
# The largest file that transformers wrote for years, unless told otherwise.
MAX_SHARD_BYTES = 5 * 10**9


@dataclass
class Report:
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
    layout: Layout | None = None,
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
) -> Report:
    """Convert a Hugging Face checkpoint (a directory or a hub id) to a Megatron ``torch_dist`` checkpoint.

    `layout` decides how the tensors are cut into chunks and files, `dtype` (``bf16``, ``fp16``, ``fp32``)
    casts, `iteration` writes a numbered iteration where None writes a release. The flags file is for
    Megatron-LM `megatron_version` (``0.14``; default: the newest that is known); the weights are the same for
    all. Finite numbers that a cast would make infinite are refused unless `allow_overflow`, and then counted
    in the report's notices. With `sync` all bytes are on the disk before the destination appears. Under
    torchrun, the processes share the work. `progress(done, total)` is called with bytes.

    Raises ReshardError, and leaves no destination, for anything that cannot be converted exactly.
    """
    allow_many_files()
    if not isinstance(layout, (Layout, type(None))):
        raise ReshardError(f"layout is {layout!r:.80}, not a reshard.Layout such as Layout(tp=2)")
    layout, target = layout or Layout(), _float_dtype(dtype)
    if transformer_impl not in TRANSFORMER_IMPLS:
        raise ReshardError(f"--transformer-impl {transformer_impl} is not one of {listed(TRANSFORMER_IMPLS)}")
    check_number(make_vocab_size_divisible_by, "--make-vocab-size-divisible-by", MAX_VOCAB_MULTIPLE)
    megatron_lm = version_of(megatron_version)
    if iteration is not None:
        check_number(iteration, "--iteration", MAX_ITERATION)
    worker_count(workers)
    # fp8 blocks are dequantised to a dtype that holds them all, so that the cast can count what overflows.
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
        layout.check(src.model)
        vocab = padded_vocab_size(src.model.symbols["V"], make_vocab_size_divisible_by, layout.tp)
        mapping = expand(src.model, transformer_impl, vocab)
        tensors = {
            n: TensorInfo(t.shape, _stored_dtype(t.dtype, target, n in mapping.fp32))
            for n, t in src.tensors.items()
        }
        chunks = list(chunks_to_write(src.model, mapping, layout, transformer_impl))
        shapes = {n: t.shape for n, t in tensors.items() if n not in src.copies}
        plan = make_plan(Placement.canonical(shapes), Placement.of(shapes, (c.tensor for c in chunks)))
        directory = "release" if iteration is None else f"iter_{iteration:07d}"
        rank_files = RankFiles(
            directory, chunks, extra_states_to_write(src.model, mapping, layout, transformer_impl), tensors
        )
        sizes = rank_files.sizes()
        report = _report("hf-to-mcore", src, source, destination, str(layout), sizes, workers, dry_run, team)
        report.notices += src.model.caveats(transformer_impl)
        model_dtype = tensors[next(iter(tensors))].dtype
        args = arguments(
            src.model, layout, vocab, make_vocab_size_divisible_by, model_dtype, transformer_impl
        )
        flags = command_line(args, megatron_lm)
        report.bytes_per_rank = rank_files.tensor_bytes()
        if dry_run:
            return report

        options = {"dtype": target and target.name, "impl": transformer_impl, "divisible": make_vocab_size_divisible_by,
                   "directory": directory, "megatron": megatron_lm, "overflow": allow_overflow}  # fmt: skip
        run = Run(
            src,
            tensors,
            rank_files.strips(plan),
            sizes,
            work,
            team,
            workers,
            sync,
            progress,
            checks,
            allow_overflow,
        )

        def create(files: OpenFiles, mine: set[str]) -> None:
            rank_files.write_containers(work.tree, mine, files)

        def finish(checksums: dict[str, str]) -> None:
            saved = checkpoint_args(args, layout.world_size(src.model), model_dtype, iteration or 0)
            content = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
            small: dict[str, bytes | str] = {
                f"{directory}/.metadata": metadata.result(),
                f"{directory}/common.pt": torch_dist.common_bytes(saved, iteration or 0, content),
                f"{directory}/metadata.json": json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}),
                torch_dist.TRACKER: "release" if iteration is None else str(iteration),
                FLAGS_FILE: "\n".join(flags) + "\n",
            }  # fmt: skip
            small |= {f"{HF_FILES}/{name}": path.read_bytes() for name, path in src.hf_files().items()}
            fields = {"format": "megatron torch_dist", "family": src.model.family.name, "source": printable(source),
                      "layout": asdict(layout), "world_size": layout.world_size(src.model), "transformer_impl": transformer_impl,
                      "iteration": directory, "quantized": sorted(src.scales), **_ignored_field(src)}  # fmt: skip
            _write_small(work, small, fields, tensors, checksums, rank_files.entries(), sync)

        with Aside(rank_files.metadata) as metadata:  # thousands of objects to pickle
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
    quantize: bool = False,
    max_shard_size: str | int | None = None,
    overwrite: bool = False,
    resume: bool = False,
    sync: bool = True,
    workers: int | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Convert a Megatron ``torch_dist`` checkpoint, whoever wrote it and at whatever layout, to a Hugging
    Face directory.

    Without `hf_config` (a ``config.json`` or a directory with one) the config is the one beside the weights,
    else the one that the checkpoint's ``args`` describe. `quantize` writes linear weights as fp8 with a scale
    for each 128x128 block. `max_shard_size` is bytes or text like ``5GB``; None is 5 GB, or less where a
    model would not fill 16 files, which are written at once, but not less than 1 GB. The other options are
    those of `hf_to_mcore`, and so is what it raises.
    """
    allow_many_files()
    target = _float_dtype(dtype)
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
        fp8 = Fp8Blocks(_quantized(src, tensors) if quantize else ())
        if any(tensors[name].dtype.size > 2 for name in fp8.names):
            raise ReshardError(
                "--quantize fp8 goes with bf16 or fp16 for what stays as it is, and that is "
                "fp32 here: add --dtype bf16"
            )
        laid_out: dict[str, tuple[Dtype, tuple[int, ...]]] = {}
        for name, info in tensors.items():
            laid_out |= fp8.stored(name, info)
        if shard_bytes is None:
            total = sum(prod(shape) * dtype.size for dtype, shape in laid_out.values())
            shard_bytes = min(MAX_SHARD_BYTES, file_bytes(total))
        new_files = safetensors.plan_files(laid_out, shard_bytes)
        placed = {name: tensor for file in new_files for name, tensor in file.tensors.items()}
        sizes = {file.name: file.size_bytes for file in new_files}
        paths = {name: Path(name) for name in sizes}
        report = _report(
            "mcore-to-hf", src, source, destination, "whole tensors", sizes, workers, dry_run, team
        )
        if dry_run:
            return report

        strips = grouped_strips(
            (
                name,
                strip_of(
                    (0,) * len(t.shape),
                    t.shape,
                    (0,) * len(t.shape),
                    t.shape,
                    paths[t.file],
                    t.offset,
                    t.dtype.size,
                ),
            )
            for name, t in placed.items()
        )
        run = Run(
            src, tensors, strips, sizes, work, team, workers, sync, progress, checks, allow_overflow, fp8
        )

        def create(files: OpenFiles, mine: set[str]) -> None:
            for file in new_files:
                if file.name in mine:
                    files.write(work.tree / file.name, 0, file.head)

        def finish(checksums: dict[str, str]) -> None:
            stored = {name: TensorInfo(t.shape, t.dtype) for name, t in placed.items()}
            small: dict[str, bytes | str] = {name: path.read_bytes() for name, path in src.hf_files().items()}
            small["config.json"] = _config_json(src, tensors, fp8, small.get("config.json"))
            index = safetensors.index_json(new_files)
            if index is not None:
                small[safetensors.INDEX] = index
            fields = {
                "format": "huggingface",
                "family": src.model.family.name,
                "source": printable(source),
                "quantized": sorted(fp8.names),
            }
            fields |= _ignored_field(src)
            entries = {
                file.name: file_entry(file.size_bytes, [file.head], around_tensors=True) for file in new_files
            }
            _write_small(work, small, fields, stored, checksums, entries, sync)

        options = {
            "dtype": target and target.name,
            "quantize": quantize,
            "shard": shard_bytes,
            "overflow": allow_overflow,
        }
        identity, places = _identity(src)
        shared = fingerprint(identity, options, team.size)
        report.resumed_tensors = run.run(shared, fingerprint(shared, places), resume, create, finish)
        report.notices += _run_notices(run)
        return report


def _write_small(
    work: Workdir,
    small: dict[str, bytes | str],
    fields: dict[str, Any],
    tensors: dict[str, TensorInfo],
    checksums: dict[str, str],
    entries: dict[str, dict[str, Any]],
    sync: bool,
) -> None:
    """Write the files without weights, and the manifest of all; `entries` are those of the files with
    weights."""
    data = {name: text.encode() if isinstance(text, str) else text for name, text in small.items()}
    entries = entries | {name: file_entry(len(found), [found]) for name, found in data.items()}
    data[MANIFEST] = manifest_json(fields, tensors, checksums, entries).encode()
    for name, found in data.items():
        work.write_file(name, found, sync)


def _ignored_field(src: Source) -> dict[str, list[str]]:
    """The fields of the config, or arguments of the checkpoint, that were ignored, for the manifest: what is
    written contradicts them."""
    return {"ignored_config_fields": sorted(src.model.ignored)} if src.model.ignored else {}


def _run_notices(run: Run) -> list[str]:
    """What is said of numbers that became infinite, as was allowed, and of a run that had nothing left to
    do."""
    done = [f"{run.work.destination} was complete: an earlier run had published it"] if run.was_done else []
    return done + [
        overflow_notice(name, count, run.tensors[name].dtype).replace("would become", "became")
        for name, count in run.overflowed.items()
    ]


def _float_dtype(name: str | None) -> Dtype | None:
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
) -> Report:
    read = sum(t.size_bytes for n, t in src.tensors.items())
    slab = max(SLAB_BYTES, *(src.row_multiple(n) * t.columns * 4 for n, t in src.tensors.items()))
    # Read, assembled, cast, cut into columns.
    memory = BASE_MEMORY_BYTES + workers_for(read, workers) * (WORKER_MEMORY_BYTES + 4 * slab)
    return Report(
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

    The time of the last change of any kind (ctime) is the one that nobody can set.
    """
    top, times, places = os.path.realpath(src.path), [], []
    for path in sorted(set(src.read_files())):
        name = os.path.relpath(path, src.path)
        if path.exists():
            status = path.stat()
            times.append([name, status.st_size, status.st_mtime_ns, status.st_ctime_ns])
            places.append([name, status.st_ino, os.path.relpath(os.path.realpath(path), top)])
    return [times, src.model.family.name, src.model.config], places


def _quantized(src: MegatronSource, tensors: dict[str, TensorInfo]) -> list[str]:
    """The names to quantise: those that were in the checkpoint this one came from, else all linear weights of
    the layers."""
    recorded = (src.manifest() or {}).get("quantized")
    return (
        [n for n in recorded if n in tensors]
        if recorded
        else [n for n, t in tensors.items() if quantizable(n, t)]
    )


def _config_json(
    src: Source, tensors: dict[str, TensorInfo], fp8: Fp8Blocks, original: bytes | str | None
) -> bytes | str:
    """config.json: as it was, but for dtype and quantisation where those changed."""
    config = dict(src.model.config) if original is None else json.loads(original)
    before = json.dumps(config)
    key = "dtype" if "dtype" in config else "torch_dtype"
    dtype = next(t.dtype.name for n, t in tensors.items() if n not in src.mapping.fp32)
    if fp8.names:
        config.setdefault(
            "quantization_config",
            {
                "activation_scheme": "dynamic",
                "fmt": "e4m3",
                "quant_method": "fp8",
                "weight_block_size": [BLOCK, BLOCK],
            },
        )
    else:
        config.pop("quantization_config", None)
    if config.get(key) != dtype:
        config[key] = dtype
    if original is not None and json.dumps(config) == before:
        return original
    return json.dumps(config, indent=2) + "\n"


def parse_size(size: str | int) -> int:
    """Bytes of ``5GB``, ``500MB``, ``1.5GiB`` or a number. Raises ReshardError for anything else."""
    units = {
        "": 1,
        "b": 1,
        "kb": 10**3,
        "mb": 10**6,
        "gb": 10**9,
        "tb": 10**12,
        "kib": 1 << 10,
        "mib": 1 << 20,
        "gib": 1 << 30,
        "tib": 1 << 40,
    }
    text = str(size).strip().lower()
    number = text.rstrip("bkmgti ")
    try:
        value = int(float(number) * units[text[len(number) :].strip()])
    except (ValueError, KeyError, OverflowError) as error:
        raise ReshardError(f"--max-shard-size {size} is not a size such as 5GB or 500MB") from error
    if value < 1:
        raise ReshardError(f"--max-shard-size {size} is less than a byte")
    return value
