"""Checking a checkpoint against the checksums in its manifest."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from reshard.core.errors import ReshardError, listed
from reshard.core.printed import NoTruthValue, Printed
from reshard.models.config_fields import allow_unmapped_configs, check_ignored
from reshard.storage.digest import digest_of_source
from reshard.storage.io.files import allow_many_files
from reshard.storage.manifest import CHECKSUM, NAME, read_manifest
from reshard.storage.opening import open_model_or_adapter
from reshard.storage.run.workers import Progress, run_jobs, worker_count
from reshard.storage.sources.base import Source, has_tokenizer, of_tokenizer
from reshard.storage.sources.megatron import MegatronSource
from reshard.storage.sources.paths import HF_FILES, iterations_in, tracked_iteration
from reshard.storage.sources.training import damaged_padding
from reshard.storage.sources.verify import (
    changed_files,
    checksum_of,
    differences,
    manifest_of,
)
from reshard.storage.stores.mirror import local_path

SHOWN = 20  # names of a kind


@dataclass
class Check(NoTruthValue, Printed):
    """The outcome of `check`.

    `bad` are the tensors whose bytes do not give the manifest's checksum, `changed`, `missing` and
    `added` the files that are not as they were written (of a file with weights, the bytes around
    its tensors), no longer there, or new. `notices` say what was not checked. `digest` is that of the weights, where it
    was asked for and all is intact.
    """

    path: str
    tensors: int
    bad: list[str]
    files: int = 0
    changed: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    added: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    digest: str | None = None

    @property
    def ok(self) -> bool:
        """True where every checksum holds, and all files are those that were written."""
        return not (self.bad or self.changed or self.missing or self.added)

    def to_dict(self) -> dict[str, Any]:
        """Return the outcome as the object that ``--json`` prints."""
        return {"ok": self.ok, **asdict(self)}

    def lines(self) -> Iterator[str]:
        if self.ok:
            yield f"intact: {self.tensors} tensors{f', {self.files} files' if self.files else ''}"
            if self.digest is not None:
                yield f"digest: {self.digest}"
            return
        for what, names in (
            ("does not match the manifest", self.bad),
            ("changed", self.changed),
            ("missing", self.missing),
            ("added", self.added),
        ):
            yield from (f"{what}: {name}" for name in names[:SHOWN])
            if len(names) > SHOWN:
                yield f"{what}: {len(names) - SHOWN} more (--json has all)"
        yield f"{len(self.bad)} of {self.tensors} tensors do not match"
        if self.changed or self.missing or self.added:
            yield (
                f"of {self.files} files {len(self.changed)} changed, {len(self.missing)} are missing, "
                f"{len(self.added)} were added"
            )


def check(
    path: str | Path, *, digest: bool = False, workers: int | None = None, progress: Progress | None = None
) -> Check:
    """Compute the checksum of every tensor and every file that the manifest lists, from the bytes
    as they are now.

    With `digest` the weights are read once more for theirs (`reshard.digest`), from the files that were checked.
    Hidden files that the manifest does not list are not looked at. Of an iteration's own directory, only what
    is in it and the Hugging Face files beside it are checked. Raises ReshardError if there is no
    manifest, or it is of another iteration.
    """
    allow_many_files()
    given, path = str(path), local_path(path)
    worker_count(workers)
    with closing(_open(path)) as source, source.unchanged():
        check_ignored(source.model)
        manifest = source.manifest()
        if manifest is None:
            raise ReshardError(
                f"{path} has no {NAME}: it was not written by reshard, so there are no checksums"
            )
        root, prefixes = _checked_part(path, source, manifest)
        bad = _changed_tensors(source, manifest["tensors"], workers, progress)
        bad += [f"{key} (its padding)" for key in damaged_padding(source)]
        result = Check(given, len(manifest["tensors"]), bad)
        result.notices += source.model.notices
        result.missing = _missing_iteration(path, source)
        if "files" in manifest:
            _check_files(result, root, prefixes, source, manifest, workers)
        else:
            result.notices.append(
                f"{NAME} lists no files (it is of an earlier version): only tensors were checked"
            )
        if digest and result.ok:
            result.digest = digest_of_source(source, given, workers=workers, progress=progress).text
        return result


def _open(path: Path) -> Source:
    """Open a checkpoint. Raises ReshardError, with the files that are not as they were written
    where its manifest names such."""
    try:
        with allow_unmapped_configs():  # bytes are compared, whatever model they make
            source = open_model_or_adapter(path, states="recorded")
        return _by_class(path, source) if source.model.objections else source
    except ReshardError as error:
        root = _root_of_damaged(path)
        changed, missing = changed_files(root, (read_manifest(root) or {}).get("files", {}))
        if not changed and not missing:
            raise
        raise ReshardError(f"{error} (not as it was written: {listed(changed + missing)})") from error


def _by_class(path: Path, source: Source) -> Source:
    """Return a source whose table refuses its config; where the manifest has other names than the table's, as of what
    was written without one, the same by transformers' class."""
    listed_names = (source.manifest() or {}).get("tensors", {}).keys()
    if listed_names <= source.stored_tensors().keys():
        return source
    try:
        by_class = open_model_or_adapter(path, states="recorded")
    except ReshardError:  # there is no such class
        return source
    source.close()
    return by_class


def _checked_part(path: Path, source: Source, manifest: dict[str, Any]) -> tuple[Path, tuple[str, ...]]:
    """Return the directory that the manifest's names count from, and the beginnings of the names
    that are checked.

    Raises ReshardError if the manifest is of another iteration.
    """
    if not isinstance(source, MegatronSource):
        return path, ("",)
    root, iteration = source.root, source.checkpoint.iteration
    if manifest_of(source) is None:
        raise ReshardError(
            f"{root / NAME} is of {manifest['iteration']}, not of {iteration}, which has none: check "
            f"{root / str(manifest['iteration'])}"
        )
    if path.resolve() == source.checkpoint.directory.resolve() and not source.alone:
        return root, (f"{iteration}/", f"{HF_FILES}/")
    return root, ("",)


def _changed_tensors(
    source: Source, entries: dict[str, dict[str, Any]], workers: int | None, progress: Progress | None
) -> list[str]:
    """Return the listed tensors whose bytes do not have their checksums, and those that only one
    side has. Codes and scales are checked as they are stored."""
    infos, read = source.stored_tensors(), source.read_stored_rows
    bad = differences(infos, entries)
    sizes = {name: infos[name].size_bytes for name in entries if name in infos and name not in bad}

    def is_intact(name: str) -> bool:
        return checksum_of(name, infos[name], read) == entries[name][CHECKSUM]

    intact = run_jobs(sizes, is_intact, workers, progress)
    return sorted(bad + [name for name in sizes if not intact[name]])


def _check_files(
    result: Check,
    root: Path,
    prefixes: tuple[str, ...],
    source: Source,
    manifest: dict[str, Any],
    workers: int | None,
) -> None:
    """Add to the result which files changed, are missing or were added."""
    entries = {name: entry for name, entry in manifest["files"].items() if name.startswith(prefixes)}
    result.files = len(entries)
    result.changed, missing = changed_files(root, entries, source, workers)
    result.missing += missing
    names = (str(file.relative_to(root)) for file in root.rglob("*") if file.is_file())
    # Other iterations beside it are none of its files.
    others = tuple(f"{name}/" for name in iterations_in(root) if name != manifest.get("iteration"))
    result.added = sorted(
        name
        for name in names
        if name.startswith(prefixes)
        and name not in entries
        and name != NAME
        and not name.startswith(others)
        and not _is_hidden(name)
    )
    _allow_tokenizer(result, entries)


def _allow_tokenizer(result: Check, entries: dict[str, Any]) -> None:
    """Say which added files are a tokenizer's, and take them for no fault, where none was written: who converts is
    asked to copy one there."""
    within = {name.removeprefix(f"{HF_FILES}/") for name in entries}
    if has_tokenizer(within):
        return
    tokenizer = [name for name in result.added if of_tokenizer(name.removeprefix(f"{HF_FILES}/"))]
    if tokenizer:
        result.added = [name for name in result.added if name not in tokenizer]
        result.notices.append(
            f"a tokenizer has been added since, which has no checksums: {listed(tokenizer, 3)}"
        )


def _missing_iteration(path: Path, source: Source) -> list[str]:
    """Return the file that is missing where the tracker names an iteration that is not complete,
    and another was taken."""
    tracked = tracked_iteration(path)
    if tracked is None or not isinstance(source, MegatronSource) or source.checkpoint.iteration == tracked:
        return []
    return [f"{tracked}/.metadata"]


def _root_of_damaged(path: Path) -> Path:
    """Return the directory with the manifest of a checkpoint that cannot be opened."""
    tracked = path / (tracked_iteration(path) or "")
    roots = (root for root in (tracked, path, path.parent) if (root / NAME).is_file())
    return next(roots, path)


def _is_hidden(name: str) -> bool:
    return any(part.startswith(".") for part in Path(name).parts)
