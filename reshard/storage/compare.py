"""Comparing two checkpoints of either format, tensor by tensor."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from reshard.core.dtypes import Dtype
from reshard.core.errors import ReshardError
from reshard.core.printed import NoTruthValue, Printed
from reshard.models.config_fields import check_ignored
from reshard.models.model import different_fields, why_named_otherwise
from reshard.models.without_table import different_beside
from reshard.storage.io.files import allow_many_files
from reshard.storage.opening import check_same_kind, open_model_or_adapter
from reshard.storage.run.workers import Progress, run_jobs
from reshard.storage.sources.base import Source
from reshard.storage.sources.hf_hub import config_path, source_directory
from reshard.storage.sources.opening import check_config_is_read, with_larger_model
from reshard.storage.sources.paths import config_beside, locate
from reshard.storage.sources.training import has_states, is_of_training, is_padding, notices_on_training

WORST = 10  # differences that are shown


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
class Diff(NoTruthValue, Printed):
    """The outcome of a comparison.

    `names` are the tensors that both have, `differences` are sorted with the worst first, and
    `fields` are those of the configs by which the same weights make two models, with both values.
    """

    a: str
    b: str
    names: list[str] = field(repr=False)
    differences: list[Difference] = field(default_factory=list)
    only_a: list[str] = field(default_factory=list)
    only_b: list[str] = field(default_factory=list)
    fields: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)
    question = "equal"

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

    def lines(self, worst: int = WORST) -> Iterator[str]:
        """Return the lines of text, with the `worst` differences and as many names that one side lacks."""
        if self.equal:
            yield f"equal: {self.tensors} tensors, bit for bit"
            return
        for name, (left, right) in self.fields.items():
            yield (
                f"the configs make two models of the same weights: {name} is {left} in {self.a}, {right} in {self.b}"
            )
        for side, names in ((self.a, self.only_a), (self.b, self.only_b)):
            yield from (f"only in {side}: {name}" for name in names[:worst])
        yield from (f"{each.name}: {each.sentence}" for each in self.differences[:worst])
        count, retyped = len(self.differences), sum(each.values_equal for each in self.differences)
        which = f", {'all' if retyped == count else retyped} of them in dtype only" if retyped else ""
        lone = len(self.only_a) + len(self.only_b)
        yield f"{count} of {self.tensors} tensors differ{which}, {lone} are on one side only"


def diff(
    a: str | Path,
    b: str | Path,
    *,
    hf_config: str | Path | None = None,
    only: Callable[[str], bool] | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
) -> Diff:
    """Compare two checkpoints of either format and any layout, tensor by tensor, as canonical
    tensors; and their configs, by what they make of the tensors.

    `only` chooses tensors by their published names. A tensor of another dtype differs, and is
    compared by value. Raises ReshardError if one of them cannot be read, `only` chooses nothing, or
    fields of the config are ignored on one side, and name its tensors otherwise.
    """
    allow_many_files()
    left_directory, right_directory = source_directory(str(a)), source_directory(str(b))
    check_config_is_read(hf_config, left_directory, right_directory)
    config = config_path(hf_config) if hf_config is not None else None
    left = open_model_or_adapter(left_directory, config, states="movable")
    try:
        right_config = config or _config_for(right_directory, left)
        right = open_model_or_adapter(right_directory, right_config, states="movable")
    except BaseException:
        left.close()
        raise
    try:
        check_same_kind(left, right)
        check_ignored(left.model, right.model)
        left_out = _outside_comparison(left, right)

        def chosen(name: str) -> bool:
            return name not in left_out and (only is None or only(name))

        common = [name for name in left.tensors if name in right.tensors and chosen(name)]
        # A copy that only one side keeps under a name of its own says nothing new.
        result = Diff(str(a), str(b), common, fields=different_fields(left.model, right.model))
        result.fields |= different_beside(with_larger_model(left), with_larger_model(right))
        result.notices = [*left.model.notices, *right.model.notices, *left.assumed, *right.assumed]
        result.notices += notices_on_training(left, right)
        _compare_factors(left, right, result)
        result.only_a = sorted(filter(chosen, _tensors_without(left, right)))
        result.only_b = sorted(filter(chosen, _tensors_without(right, left)))
        why = why_named_otherwise(left.model, right.model)
        if why and (result.only_a or result.only_b):
            raise ReshardError(f"{a} and {b} cannot be compared: {why}")
        if not (common or result.only_a or result.only_b):
            raise ReshardError(
                f"there is nothing to compare: `only` chooses none of the {len(left.tensors)} tensors of {a}"
            )
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


def _tensors_without(own: Source, other: Source) -> list[str]:
    """Return the tensors that a source has to have, and the other has not."""
    return [n for n in own.tensors if n not in other.tensors and n not in own.mapping.dispensable]


def _outside_comparison(left: Source, right: Source) -> set[str]:
    """Return the optimizer states, and the padding beside them, that only one of two sources has, or that they have in
    different sizes, since that of the vocabulary is a layout's."""
    if not (has_states(left) and has_states(right)):
        return {name for source in (left, right) for name in source.tensors if is_of_training(name)}
    shapes = [{name: info.shape for name, info in source.tensors.items()} for source in (left, right)]
    names = {name for of_source in shapes for name in of_source if is_padding(name)}
    return {name for name in names if shapes[0].get(name) != shapes[1].get(name)}


def _compare_factors(left: Source, right: Source, result: Diff) -> None:
    """Add the first number by which two sources multiply a tensor that is not the same, or a notice where one of them
    does not say it."""
    try:
        a, b = left.factors(), right.factors()
    except ReshardError as error:
        result.notices.append(f"the adapters' scales were not compared: {error}")
        return
    for name in a:
        if name in b and a[name] != b[name]:
            result.fields[name] = a[name], b[name]
            return


def _config_for(path: Path, source: Source) -> Path | None:
    """Return the other side's Hugging Face config, for a Megatron checkpoint that has none of its
    own."""
    if source.kind != "huggingface":
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
