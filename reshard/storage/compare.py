"""Comparing: two checkpoints with each other (`diff`), and one with its manifest (`check`)."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from reshard.core.dtypes import Dtype
from reshard.core.errors import ReshardError, listed
from reshard.models.config_fields import allow_unmapped_configs, check_ignored
from reshard.models.model import different_fields
from reshard.storage.io.files import allow_many_files
from reshard.storage.manifest import CHECKSUM, NAME, read_manifest
from reshard.storage.run.workers import Progress, run_jobs, worker_count
from reshard.storage.sources.base import Source
from reshard.storage.sources.hf_hub import local_directory
from reshard.storage.sources.huggingface import HuggingFaceSource
from reshard.storage.sources.megatron import MegatronSource
from reshard.storage.sources.opening import open_source
from reshard.storage.sources.paths import HF_FILES, config_beside, iterations_in, locate, tracked_iteration
from reshard.storage.sources.verify import (
    changed_files,
    checksum_of,
    differences,
    manifest_of,
    stored_tensors,
)


@dataclass(frozen=True)
class Difference:
    """A tensor that differs: `max_abs` and `max_rel` (relative to the larger of the two magnitudes)
    are over the `unequal` elements."""

    name: str
    unequal: int
    elements: int
    max_abs: float
    max_rel: float
    note: str = ""

    @property
    def values_equal(self) -> bool:
        """True where only the dtype differs: every value is equal."""
        return self.unequal == 0 and self.elements > 0

    @property
    def sentence(self) -> str:
        """The difference as text."""
        if not self.elements:
            return self.note
        if self.values_equal:
            return f"{self.note}, all {self.elements:,} values are equal"
        note = f" ({self.note})" if self.note else ""
        worst = f"max abs {self.max_abs:.3g}, max rel {self.max_rel:.3g}"
        return f"{self.unequal:,} of {self.elements:,} differ, {worst}{note}"


@dataclass
class Diff:
    """The outcome of a comparison.

    `names` are the tensors that both have, `differences` are sorted with the worst first, and
    `fields` are those of the configs by which the same weights make two models, with both values.
    """

    a: str
    b: str
    names: list[str]
    differences: list[Difference] = field(default_factory=list)
    only_a: list[str] = field(default_factory=list)
    only_b: list[str] = field(default_factory=list)
    fields: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        """True where both hold the same tensors, bit for bit, and their configs make the same model
        of them."""
        return not (self.differences or self.only_a or self.only_b or self.fields)

    def to_dict(self) -> dict[str, Any]:
        """Return the outcome as the object that ``--json`` prints."""
        values = asdict(self)
        del values["names"]
        return {"equal": self.equal, "tensors": self.tensors, **values}

    @property
    def tensors(self) -> int:
        """Number of tensors that were compared."""
        return len(self.names)


def diff(
    a: str | Path,
    b: str | Path,
    *,
    hf_config: str | Path | None = None,
    only: Callable[[str], bool] | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
) -> Diff:
    """Compare two checkpoints of either format and any layout, tensor by tensor, as canonical tensors; and
    their configs, by what they make of the tensors.

    `only` chooses tensors by their published names. A tensor of another dtype differs, and is compared by
    value. Raises ReshardError where one of them cannot be read, or `only` chooses nothing.
    """
    allow_many_files()
    config = Path(hf_config) if hf_config is not None else None
    left = open_source(local_directory(str(a)), config)
    try:
        right_directory = local_directory(str(b))
        right = open_source(right_directory, config or _config_for(right_directory, left))
    except BaseException:
        left.close()
        raise
    try:
        check_ignored(left.model, right.model)
        chosen = only or (lambda name: True)
        common = [name for name in left.tensors if name in right.tensors and chosen(name)]
        # A copy that only one side keeps under a name of its own says nothing new.
        result = Diff(str(a), str(b), common)
        result.notices = [*left.model.notices, *right.model.notices]
        result.only_a = sorted(
            n for n in left.tensors if n not in right.tensors and n not in left.mapping.optional and chosen(n)
        )
        result.only_b = sorted(
            n
            for n in right.tensors
            if n not in left.tensors and n not in right.mapping.optional and chosen(n)
        )
        if not (common or result.only_a or result.only_b):
            raise ReshardError(
                f"there is nothing to compare: `only` chooses none of the {len(left.tensors)} tensors of {a}"
            )
        result.fields = different_fields(left.model, right.model)
        sizes = {name: left.tensors[name].size_bytes for name in common}
        with left.unchanged(), right.unchanged():
            outcomes = run_jobs(sizes, lambda name: _compare(name, left, right), workers, progress)
        result.differences = sorted(
            (difference for difference in outcomes.values() if difference is not None),
            key=lambda difference: (-_order(difference.max_abs), difference.name),
        )
        return result
    finally:
        left.close()
        right.close()


def _config_for(path: Path, source: Source) -> Path | None:
    """Return the other side's Hugging Face config, for a Megatron checkpoint that has none of its
    own."""
    if not isinstance(source, HuggingFaceSource):
        return None
    located = locate(path)
    if located is None or config_beside(located) is not None:
        return None
    return source.path / "config.json"


def _order(value: float) -> float:
    return float("inf") if value != value else value


def _compare(name: str, left: Source, right: Source) -> Difference | None:
    a, b = left.tensors[name], right.tensors[name]
    if a.shape != b.shape:
        return Difference(
            name, 0, 0, float("nan"), float("nan"), f"shape {list(a.shape)} and {list(b.shape)}"
        )
    unequal, max_abs, max_rel, same = 0, 0.0, 0.0, a.dtype == b.dtype
    for start, stop in a.slabs(multiple=max(left.row_multiple(name), right.row_multiple(name))):
        left_rows, right_rows = left.read_rows(name, start, stop), right.read_rows(name, start, stop)
        if same and np.array_equal(left_rows.view(np.uint8), right_rows.view(np.uint8)):
            continue
        n, largest, relative = _distance(left_rows, right_rows, a.dtype, b.dtype)
        unequal, max_abs, max_rel = unequal + n, _max(max_abs, largest), _max(max_rel, relative)
    note = "" if same else f"{a.dtype.name} and {b.dtype.name}"
    return (
        Difference(name, unequal, a.rows * a.columns, max_abs, max_rel, note) if unequal or not same else None
    )


def _distance(left: np.ndarray, right: np.ndarray, a: Dtype, b: Dtype) -> tuple[int, float, float]:
    wide = np.float64 if "float64" in (a.name, b.name) else np.float32
    with np.errstate(all="ignore"):
        x, y = left.astype(wide), right.astype(wide)
        if a == b:
            bits = np.dtype(f"u{left.itemsize}")
            differs = left.view(bits) != right.view(bits)
        else:
            differs = ~((x == y) | (np.isnan(x) & np.isnan(y)))
        x, y = x[differs], y[differs]
        if not len(x):
            return 0, 0.0, 0.0
        distance = np.abs(x - y)
        scale = np.maximum(np.abs(x), np.abs(y))
        relative = np.divide(distance, scale, out=np.zeros_like(distance), where=scale != 0)
        return len(x), float(distance.max()), float(relative.max())


def _max(a: float, b: float) -> float:
    return float("nan") if a != a or b != b else max(a, b)


@dataclass
class Check:
    """The outcome of `check`.

    `bad` are the tensors whose bytes do not give the manifest's checksum, `changed`, `missing` and `added`
    the files that are not as they were written (of a file with weights, the bytes around its tensors), no
    longer there, or new. `notices` say what was not checked.
    """

    path: str
    tensors: int
    bad: list[str]
    files: int = 0
    changed: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    added: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """True where every checksum holds, and all files are those that were written."""
        return not (self.bad or self.changed or self.missing or self.added)

    def to_dict(self) -> dict[str, Any]:
        """Return the outcome as the object that ``--json`` prints."""
        return {"ok": self.ok, **asdict(self)}


def check(path: str | Path, *, workers: int | None = None, progress: Progress | None = None) -> Check:
    """Compute the checksum of every tensor and every file that the manifest lists, from the bytes as they are
    now.

    Hidden files that it does not list are not looked at. Of an iteration's own directory, only what is in it
    and the Hugging Face files beside it are checked. Raises ReshardError where there is no manifest, or it is
    of another iteration.
    """
    allow_many_files()
    path = Path(path)
    worker_count(workers)
    try:
        with allow_unmapped_configs():  # bytes are compared, whatever they mean
            source = open_source(path)
    except ReshardError as error:
        root = _root_of_what_is_damaged(path)
        changed, missing = changed_files(root, (read_manifest(root) or {}).get("files", {}))
        if not changed and not missing:
            raise
        raise ReshardError(f"{error} (not as it was written: {listed(changed + missing)})") from error
    with closing(source), source.unchanged():
        check_ignored(source.model)
        manifest = source.manifest()
        if manifest is None:
            raise ReshardError(
                f"{path} has no {NAME}: it was not written by reshard, so there are no checksums"
            )
        root, only = path, [""]
        if isinstance(source, MegatronSource):
            root, iteration = source.root, source.checkpoint.iteration
            if path.resolve() == source.checkpoint.directory.resolve() and not source.alone:
                only = [f"{iteration}/", f"{HF_FILES}/"]
            if manifest_of(source) is None:
                raise ReshardError(
                    f"{root / NAME} is of {manifest['iteration']}, not of {iteration}, which has none: check "
                    f"{root / str(manifest['iteration'])}"
                )
        entries = manifest["tensors"]
        # fp8 weights and their scales are checked as they are stored.
        infos, read = stored_tensors(source)
        bad = differences(infos, entries)
        sizes = {name: infos[name].size_bytes for name in entries if name in infos and name not in bad}

        def job(name: str) -> bool:
            return checksum_of(name, infos[name], read) == entries[name][CHECKSUM]

        results = run_jobs(sizes, job, workers, progress)
        result = Check(
            str(path), len(entries), sorted(bad + [name for name, good in results.items() if not good])
        )
        result.notices += source.model.notices
        result.missing = _missing_iteration(path, source)
        if "files" not in manifest:
            result.notices.append(
                f"{NAME} lists no files (it is of an earlier version): only tensors were checked"
            )
            return result
        here = {name: entry for name, entry in manifest["files"].items() if name.startswith(tuple(only))}
        result.files = len(here)
        result.changed, missing = changed_files(root, here, source, workers)
        result.missing += missing
        names = (str(p.relative_to(root)) for p in root.rglob("*") if p.is_file())
        # Other iterations beside it are none of its files.
        others = tuple(f"{name}/" for name in iterations_in(root) if name != manifest.get("iteration"))
        result.added = sorted(
            n
            for n in names
            if n.startswith(tuple(only))
            and n not in {*here, NAME}
            and not n.startswith(others)
            and not _hidden(n)
        )
        return result


def _missing_iteration(path: Path, source: Source) -> list[str]:
    """Return the file that is missing where the tracker names an iteration that is not complete,
    and another was taken."""
    tracked = tracked_iteration(path)
    if tracked is None or not isinstance(source, MegatronSource) or source.checkpoint.iteration == tracked:
        return []
    return [f"{tracked}/.metadata"]


def _root_of_what_is_damaged(path: Path) -> Path:
    """Return the directory with the manifest of a checkpoint that cannot be opened."""
    tracked = path / (tracked_iteration(path) or "")
    roots = (root for root in (tracked, path, path.parent) if (root / NAME).is_file())
    return next(roots, path)


def _hidden(name: str) -> bool:
    return any(part.startswith(".") for part in Path(name).parts)
