"""Deltas between checkpoints: what changed from one to the next is added to a chain, and a chain is applied to
its base. Either format, read a few megabytes at a time."""

from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reshard.comm.team import Team
from reshard.core.errors import ReshardError, rewrite_message
from reshard.delta.chain import (
    Chain,
    check_digest,
    check_tensors,
    in_words,
    next_version,
)
from reshard.delta.configs import (
    check_config_of_base,
    check_config_of_chain,
    check_named_alike,
    check_same_config,
    recorded_of_source,
)
from reshard.delta.files import RecordWriter
from reshard.delta.manifests import Base, Delta, delta_name
from reshard.delta.records import RECORD_BYTES, row_box
from reshard.delta.source import DeltaSource, own_tensors
from reshard.delta.stored_drafter import written_beside
from reshard.digests.numbers import seed_of, start_of, sum_rows, text_of, total_of
from reshard.models.config_fields import check_ignored
from reshard.storage.convert import check_towers, to_hf
from reshard.storage.destinations.huggingface import parse_size
from reshard.storage.io.files import allow_many_files
from reshard.storage.io.streams import TensorInfo
from reshard.storage.report import ConversionReport
from reshard.storage.run.job import RunOptions
from reshard.storage.run.workers import Progress, run_jobs
from reshard.storage.sources.base import Source
from reshard.storage.sources.hf_hub import config_path, local_directory
from reshard.storage.sources.megatron import MegatronSource
from reshard.storage.sources.opening import check_config_is_read, open_source, with_larger_model
from reshard.storage.sources.verify import SourceChecks, check_listed


@dataclass(frozen=True)
class DeltaReport:
    """A delta that was added to a chain: `changed` of `elements` changed, which takes `delta_bytes` where all
    weights take `weights_bytes`."""

    chain: str
    version: int
    follows: int
    changed: int
    elements: int
    delta_bytes: int
    weights_bytes: int

    @property
    def density(self) -> float:
        """Share of the elements that changed."""
        return self.changed / max(1, self.elements)

    @staticmethod
    def of(chain: Chain, delta: Delta) -> "DeltaReport":
        """Return the report of a delta."""
        base = chain.base
        weights = sum(info.size_bytes for info in base.tensors.values())
        numbers = delta.version, delta.follows, delta.changed
        return DeltaReport(chain.where, *numbers, base.elements, delta.bytes, weights)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as the object that ``--json`` prints."""
        return self.__dict__ | {"density": self.density}


def save(
    old: str | Path,
    new: str | Path,
    chain: str | Path,
    *,
    version: int | None = None,
    hf_config: str | Path | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
) -> DeltaReport:
    """Add to a chain what changed from checkpoint `old` to checkpoint `new`, of either format and any layout.

    The first call begins the chain, with `old` as its base. Later, `old` has to be what the newest version
    gives. `version` is by default the one after the newest.

    Raises ReshardError, and adds nothing, if the two are not of one model, or `old` has other weights than
    the chain.
    """
    allow_many_files()
    with rewrite_message(("run again with --resume", "run again")), ExitStack() as stack:
        target = stack.enter_context(Chain(chain))
        directories = [local_directory(str(path)) for path in (old, new)]
        check_config_is_read(hf_config, *directories)
        config = None if hf_config is None else config_path(hf_config)
        left, right = (stack.enter_context(closing(open_source(path, config))) for path in directories)
        check_ignored(left.model, right.model)
        tensors, others = own_tensors(left), own_tensors(right)
        check_named_alike((left.model, tensors), (right.model, others), str(old), str(new))
        _check_same_model(tensors, others, str(old), str(new))
        old_model = with_larger_model(left)
        check_same_config(old_model, with_larger_model(right), str(old), str(new))
        exists = target.exists
        if exists and target.base.drafter is not None:
            raise ReshardError(
                f"{target.where} has a drafter ({target.base.drafter.name}), and delta save compares models alone: "
                f"versions of it come from a trainer that has both (DeltaWriter); give a new chain for the model alone"
            )
        deltas = target.deltas() if exists else []
        if exists:
            check_tensors(target.base, tensors, str(old), target.where)
            check_config_of_chain(target.base, old_model, str(old), target.where)
        number, follows = next_version(deltas, version, target.where)
        scratch = stack.enter_context(target.store.writing())
        writer = RecordWriter(scratch, f"{delta_name(number)}.safetensors")
        stack.callback(writer.close)
        with left.unchanged(), right.unchanged():
            _check_copies(left)
            _check_copies(right)
            before, after = _write_changes(left, right, tensors, writer, workers, progress)
        base = target.base if exists else Base(str(old), before, tensors, **recorded_of_source(left))
        _check_old(base, deltas, (before, after), (str(old), str(new)), target.where)
        file = writer.finish(number, follows)
        target.check_end(follows if exists else None)
        delta = Delta(number, follows, before, after, writer.changed, [file])
        with target.adding(delta, is_first=not exists):
            target.store.put(writer.path, file.name)
            if not exists:
                target.begin(base, scratch)
            target.append(delta, scratch)
        return DeltaReport.of(target, delta)


def _write_changes(
    left: Source,
    right: Source,
    tensors: dict[str, TensorInfo],
    writer: RecordWriter,
    workers: int | None,
    progress: Progress | None,
) -> tuple[str, str]:
    """Write what changed between two sources; return the digests of both. Raises ReshardError if a tensor does not have
    the checksum of its source's manifest."""
    checks = SourceChecks(left), SourceChecks(right)
    for check in checks:
        check_listed(check.source, workers=workers, names=check.unwatched() - check.source.copies.keys())

    def compare(name: str) -> tuple[int, int]:
        info, seed = tensors[name], seed_of(name, tensors[name])
        whole, change = start_of(seed), 0
        watches = [check.watch(name) for check in checks]
        for start, stop in info.slabs(RECORD_BYTES, max(left.row_multiple(name), right.row_multiple(name))):
            old, new = left.read_rows(name, start, stop), right.read_rows(name, start, stop)
            whole += sum_rows(seed, old, start)
            for watch, rows in zip(watches, (old, new), strict=True):
                if watch is not None:
                    watch.rows(rows, start, stop)
            change += writer.compare(name, info, row_box(info, start, stop), old, new)
        for watch in filter(None, watches):
            watch.end()
        return whole, change

    sizes = {name: info.size_bytes for name, info in tensors.items()}
    parts = run_jobs(sizes, compare, workers, progress).values()
    before = total_of(whole for whole, _ in parts)
    return text_of(before), text_of(before + total_of(change for _, change in parts))


def _check_copies(source: Source) -> None:
    """Raise ReshardError if two tensors of a source differ that a chain holds as one."""
    for copy, primary in source.copies.items():
        info = source.tensors[copy]
        same = info == source.tensors[primary]
        for start, stop in info.slabs(RECORD_BYTES, source.row_multiple(copy)) if same else ():
            held = source.read_rows(copy, start, stop).tobytes()
            same = same and held == source.read_rows(primary, start, stop).tobytes()
        if not same:
            hint = ': if they are two, say "tie_word_embeddings": false in config.json' * source.model.tied
            raise ReshardError(
                f"{source.path}: {copy} differs from {primary}, but a chain holds the two as one tensor{hint}"
            )


def _check_same_model(
    old: dict[str, TensorInfo], new: dict[str, TensorInfo], old_name: str, new_name: str
) -> None:
    """Raise ReshardError if two checkpoints have other tensors, by name, shape or dtype."""
    for name in sorted({*old, *new}):
        before, after = old.get(name), new.get(name)
        if before == after:
            continue
        cast = before is not None and after is not None and before.shape == after.shape
        raise ReshardError(
            f"{new_name} is not a new version of {old_name}: {name} is {in_words(after)}, and was {in_words(before)}"
            + "; convert one with --dtype" * cast
        )


def _check_old(
    base: Base, deltas: list[Delta], digests: tuple[str, str], places: tuple[str, str], chain: str
) -> None:
    """Raise ReshardError unless the first of two checkpoints has the weights of a chain's newest version; where the
    second has those of a version, the same delta was saved before."""
    (before, after), (old, new) = digests, places
    if not deltas:
        check_digest(base, before, old, chain)
        return
    newest = deltas[-1]
    if before == newest.after:
        return
    versions = {base.digest: 0} | {delta.after: delta.version for delta in deltas}
    if before in versions and versions.get(after, 0) > versions[before]:
        raise ReshardError(
            f"{chain} has these changes already: {old} is its version {versions[before]}, and {new} its version "
            f"{versions[after]}; the next delta is from the newest, {newest.version}, to a checkpoint after it"
        )
    what = f"version {versions[before]}" if before in versions else "no version"
    raise ReshardError(
        f"{old} is {what} of {chain}, and the next delta follows version {newest.version}: give the checkpoint of that "
        f"(reshard delta apply writes it), or begin a new chain"
    )


def apply(
    base: str | Path,
    chain: str | Path,
    destination: str | Path,
    *,
    version: int | None = None,
    hf_config: str | Path | None = None,
    max_shard_size: str | int | None = None,
    drafter: tuple[str | Path, str | Path] | None = None,
    overwrite: bool = False,
    resume: bool = False,
    sync: bool = True,
    workers: int | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> ConversionReport:
    """Write the weights of a version of a chain, by default the newest, as a Hugging Face directory.

    `base` is the checkpoint with which the chain was begun, of either format. Before anything is written all is
    read once, and has to have the digests that the chain says. The other options are those of `mcore_to_hf`.

    Of a chain with a drafter this writes the model, and says so. With `drafter`, the directory of the checkpoint with
    which the drafter began and one to write, it writes the drafter of the same version there too: both, or neither,
    but that a run which is killed as it ends may leave the model alone.

    Raises ReshardError, and leaves no destination, where a delta is missing, altered or out of order, or the
    base is another.
    """
    options = RunOptions(overwrite, resume, sync, workers, dry_run, progress).checked()
    shard_bytes = None if max_shard_size is None else parse_size(max_shard_size)
    with ExitStack() as stack:
        team = stack.enter_context(Team.from_environment())
        opened = stack.enter_context(Chain(chain))
        deltas = opened.deltas(version)
        directory = local_directory(str(base))
        check_config_is_read(hf_config, directory)
        config = None if hf_config is None else config_path(hf_config)
        base_source = stack.enter_context(closing(open_source(directory, config)))
        if isinstance(base_source, MegatronSource):
            check_towers(base_source)
        source = stack.enter_context(closing(DeltaSource(base_source, opened, deltas)))
        check_config_of_base(opened.base, with_larger_model(base_source), str(base), opened.where)
        if not dry_run:
            team.together(lambda: source.check(workers) if team.process == 0 else None)
        newest = deltas[-1].version if deltas else 0
        name = f"{base} + {opened.where} to version {newest}"
        publish: list[Callable[[], None]] = []

        def write_drafter() -> None:
            if drafter is not None and team.process == 0:
                reads = source.read_files()
                written = written_beside(drafter, destination, opened, source.deltas, reads, options)
                publish.append(stack.enter_context(written))

        team.together(write_drafter)
        report = to_hf("delta-apply", source, name, destination, None, shard_bytes, team, options)
        for each in publish:
            each()
        if drafter is not None and not dry_run:
            report.notices.append(f"wrote the drafter of the same version: {drafter[1]}")
        elif drafter is None and opened.base.drafter is not None:
            report.notices.append(
                f"the chain has a drafter ({opened.base.drafter.name}), which this does not write: --drafter BASE DST "
                f"writes it too, from the checkpoint with which it began"
            )
        return report
