"""Comparing: two checkpoints with each other (`diff`), and one with its manifest (`check`)."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from reshard.dtypes import Dtype
from reshard.errors import ReshardError
from reshard.files import allow_many_files
from reshard.hub import local_directory
from reshard.manifest import CHECKSUM, NAME
from reshard.run import default_workers
from reshard.sources import HuggingFaceSource, Source, open_source
from reshard.streams import Progress, run_jobs


@dataclass(frozen=True)
class Difference:
    """How a tensor differs: `max_abs` and `max_rel` (to the larger of the two magnitudes) over the `unequal` elements."""

    name: str
    unequal: int
    elements: int
    max_abs: float
    max_rel: float
    note: str = ""


@dataclass
class Diff:
    """The outcome of a comparison; `names` are the tensors that both have, `differences` are sorted with the worst first."""

    a: str
    b: str
    names: list[str]
    differences: list[Difference] = field(default_factory=list)
    only_a: list[str] = field(default_factory=list)
    only_b: list[str] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        """Whether both hold the same tensors, bit for bit."""
        return not (self.differences or self.only_a or self.only_b)

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        values = asdict(self)
        del values["names"]
        return {"equal": self.equal, "tensors": self.tensors, **values}

    @property
    def tensors(self) -> int:
        """How many tensors were compared."""
        return len(self.names)


def diff(a: str | Path, b: str | Path, *, hf_config: str | Path | None = None, only: Callable[[str], bool] | None = None,
         workers: int | None = None, progress: Progress | None = None) -> Diff:  # fmt: skip
    """Compare two checkpoints of either format and any layout, tensor by tensor, as canonical tensors.

    `only` chooses tensors by their published names. A tensor of another dtype differs, and is compared by value. Raises ReshardError
    where one of them cannot be read.
    """
    allow_many_files()
    config = Path(hf_config) if hf_config is not None else None
    one = open_source(local_directory(str(a)), config)
    try:
        two = open_source(local_directory(str(b)), config or _config_of(one))
    except BaseException:
        one.close()
        raise
    try:
        chosen = only or (lambda name: True)
        common = [name for name in one.tensors if name in two.tensors and chosen(name)]
        # A copy that only one side keeps under a name of its own says nothing new.
        result = Diff(str(a), str(b), common)
        result.only_a = sorted(n for n in one.tensors if n not in two.tensors and n not in one.mapping.optional and chosen(n))
        result.only_b = sorted(n for n in two.tensors if n not in one.tensors and n not in two.mapping.optional and chosen(n))
        sizes = {name: one.tensors[name].size_bytes for name in common}
        found = run_jobs(sizes, lambda name: _compare(name, one, two), workers or default_workers(), progress)
        result.differences = sorted((d for d in found.values() if d is not None), key=lambda d: (-_order(d.max_abs), d.name))
        return result
    finally:
        one.close()
        two.close()


def _config_of(source: Source) -> Path | None:
    """A Hugging Face config that the other side may be read with, where it has none."""
    return None if not isinstance(source, HuggingFaceSource) else source.path / "config.json"


def _order(value: float) -> float:
    return float("inf") if value != value else value


def _compare(name: str, one: Source, two: Source) -> Difference | None:
    a, b = one.tensors[name], two.tensors[name]
    if a.shape != b.shape:
        return Difference(name, 0, 0, float("nan"), float("nan"), f"shape {list(a.shape)} and {list(b.shape)}")
    unequal, max_abs, max_rel, same = 0, 0.0, 0.0, a.dtype == b.dtype
    for start, stop in a.slabs(multiple=max(one.row_multiple(name), two.row_multiple(name))):
        left, right = one.read_rows(name, start, stop), two.read_rows(name, start, stop)
        if same and np.array_equal(left.view(np.uint8), right.view(np.uint8)):
            continue
        n, largest, relative = _distance(left, right, a.dtype, b.dtype)
        unequal, max_abs, max_rel = unequal + n, _max(max_abs, largest), _max(max_rel, relative)
    note = "" if same else f"{a.dtype.name} and {b.dtype.name}"
    return Difference(name, unequal, a.rows * a.columns, max_abs, max_rel, note) if unequal or not same else None


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
    """The outcome of `check`: `bad` are the names whose bytes do not give the manifest's checksum."""

    path: str
    tensors: int
    bad: list[str]

    @property
    def ok(self) -> bool:
        """Whether every checksum holds."""
        return not self.bad

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return {"ok": self.ok, **asdict(self)}


def check(path: str | Path, *, workers: int | None = None, progress: Progress | None = None) -> Check:
    """Compute the checksum of every tensor that the manifest lists, from the bytes as they are now.

    Raises ReshardError where there is no manifest, or the checkpoint holds other tensors than it lists.
    """
    allow_many_files()
    source = open_source(Path(path))
    try:
        manifest = source.manifest()
        if manifest is None:
            raise ReshardError(f"{path} has no {NAME}: it was not written by reshard, so there are no checksums")
        listed = manifest["tensors"]
        reader: Callable[[str, int, int], np.ndarray] = source.read_rows
        infos = dict(source.tensors)
        if isinstance(source, HuggingFaceSource):
            # fp8 weights and their scales are checked as they are stored.
            reader, infos = source.read_stored_rows, source.stored_tensors()
        bad = sorted(name for name in set(listed) ^ set(infos))
        bad += [n for n, entry in listed.items() if n in infos
                and (entry["dtype"], tuple(entry["shape"])) != (infos[n].dtype.name, infos[n].shape)]  # fmt: skip
        sizes = {name: infos[name].size_bytes for name in listed if name in infos and name not in bad}

        def job(name: str) -> bool:
            digest = xxhash.xxh3_128()
            for start, stop in infos[name].slabs():
                digest.update(memoryview(reader(name, start, stop).view(np.uint8).reshape(-1)))
            return digest.hexdigest() == listed[name][CHECKSUM]

        results = run_jobs(sizes, job, workers or default_workers(), progress)
        return Check(str(path), len(listed), sorted(bad + [name for name, good in results.items() if not good]))
    finally:
        source.close()
