"""The steps of a run that a `RolloutMonitor` has written, for people and for programs."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from reshard.core.errors import ReshardError, listed
from reshard.core.printed import NoTruthValue, Printed
from reshard.parity.rollout.monitor import FORMAT
from reshard.parity.rollout.parts import LAGS, Part, part_lines

# Figures that are means over a step's tokens: over a run each step counts as many times as it has tokens.
MEANS = (
    "mean_abs",
    "token_mult_prob_error",
    "kl_k1",
    "kl_estimate",
    "kl_estimate_reverse",
    "ratio_mean",
    "lag_mean",
)
# Figures of which the smallest is the worst; and where 0 or 1 is best, that of which is furthest from it.
SMALLEST = ("pearson", "ess", "sample_ess", "ratio_min", "sample_log_ratio_min")
BEST = {"kl_k1": 0.0, "ratio_mean": 1.0}
KINDS = {"ratio": ("below", "within", "above"), "experts": ("same", "differ"),
         "lag": (*map(str, range(LAGS)), f"{LAGS}_or_more")}  # fmt: skip
NOT_FIGURES = ("step", "time", "exceeded", "ok")
COUNTS = ("tokens", "samples")
# Steps beyond the limits that a table and a page name one by one.
NAMED = 20


@dataclass
class Figure:
    """A figure over a run: its first and last value, its worst, and the step of that; `mean` is over all tokens, None
    for a figure that is no mean."""

    first: float
    last: float
    mean: float | None
    worst: float
    worst_step: int


@dataclass
class Run(NoTruthValue, Printed):
    """The n steps of a run, ascending: `steps` ``[n]`` their numbers, `columns` each figure ``[n]``, NaN where a step
    does not have it; `failed`: the sentences of steps beyond the limits, by number."""

    path: str
    steps: np.ndarray
    columns: dict[str, np.ndarray] = field(repr=False)
    failed: dict[int, list[str]]
    limits: dict[str, float]
    bounds: list[float]
    notices: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """True if every step was within its limits."""
        return not self.failed

    @property
    def verdict(self) -> str:
        """The conclusion."""
        if self.ok:
            return "every step is within the limits"
        first, sentences = next(iter(self.failed.items()))
        return (
            f"{len(self.failed):,} of {len(self.steps):,} steps are beyond the limits, first step {first}: "
            + ("; ".join(sentences))
        )

    @property
    def tokens(self) -> np.ndarray:
        """``[n]``: how many tokens counted in each step."""
        return np.nan_to_num(self.columns["tokens"])

    def figures(self) -> dict[str, Figure]:
        """Return each figure over the run, but counts and parts."""
        names = [name for name in self.columns if "/" not in name and name not in COUNTS]
        return {name: self._figure(name) for name in names if np.isfinite(self.columns[name]).any()}

    def _figure(self, name: str) -> Figure:
        known = ~np.isnan(self.columns[name])
        values, steps, tokens = self.columns[name][known], self.steps[known], self.tokens[known]
        badness = -values if name in SMALLEST else np.abs(values - BEST[name]) if name in BEST else values
        worst = int(badness.argmax())
        mean = float((values * tokens).sum() / tokens.sum()) if name in MEANS and tokens.sum() else None
        return Figure(float(values[0]), float(values[-1]), mean, float(values[worst]), int(steps[worst]))

    def parts(self) -> dict[str, dict[str, Part]]:
        """Return the parts of groups of tokens, by kind and group, over all tokens of the steps that have them."""
        return {kind: groups for kind in KINDS if (groups := self._parts_of(kind))}

    def _parts_of(self, kind: str) -> dict[str, Part]:
        names = {group: [f"{kind}_{group}/{name}" for name in Part._fields] for group in KINDS[kind]}
        known = {
            group: [self.columns[column] for column in columns]
            for group, columns in names.items()
            if self.columns.keys() >= set(columns)
        }
        if not known:
            return {}
        # A step has a group's part unless none of its tokens is in the group: then it is 0. Steps without any group
        # do not know this kind.
        weights = self.tokens * np.any([~np.isnan(values[0]) for values in known.values()], axis=0)
        total = weights.sum()
        return {
            group: Part(*(float((np.nan_to_num(value) * weights).sum() / total) for value in values))
            for group, values in known.items()
        }

    def lines(self) -> Iterator[str]:
        """Return tables of the figures and of the parts, and the steps beyond the limits."""
        total = int(self.tokens.sum())
        yield f"{self.path}: {len(self.steps):,} steps, {self.steps[0]} to {self.steps[-1]}, {total:,} tokens"
        yield f"{'':<30}" + "".join(
            f"{head:>13}" for head in ("first", "last", "mean", "worst", "step", "limit")
        )
        for name, figure in self.figures().items():
            limit = self.limits.get(name)
            mean, most = ("-" if value is None else f"{value:.6g}" for value in (figure.mean, limit))
            cells = (
                f"{figure.first:.6g}",
                f"{figure.last:.6g}",
                mean,
                f"{figure.worst:.6g}",
                figure.worst_step,
                most,
            )
            yield f"  {name:<28}" + "".join(f"{cell:>13}" for cell in cells)
        for kind, groups in self.parts().items():
            yield from part_lines(kind, groups)
        for step, sentences in list(self.failed.items())[:NAMED]:
            yield f"step {step}: {'; '.join(sentences)}"
        if len(self.failed) > NAMED:
            yield f"and {len(self.failed) - NAMED:,} more steps beyond the limits"
        if self.ok:
            yield self.verdict

    def to_dict(self) -> dict[str, Any]:
        """Return the figures over the run, for ``--json``."""
        return {
            "path": self.path,
            "ok": self.ok,
            "steps": len(self.steps),
            "first_step": int(self.steps[0]),
            "last_step": int(self.steps[-1]),
            "tokens": int(self.tokens.sum()),
            "limits": self.limits,
            "bounds": self.bounds,
            "failed": {str(step): sentences for step, sentences in self.failed.items()},
            "figures": {name: vars(figure) for name, figure in self.figures().items()},
            "parts": {
                kind: {group: part._asdict() for group, part in groups.items()}
                for kind, groups in self.parts().items()
            },
            "notices": self.notices,
        }


def read_run(path: str | Path) -> Run:
    """Read the file of a run. A step that is there twice, since a run went on from an older checkpoint, counts as it
    was last; what came after it in the first run and not in the second stays.

    Raises ReshardError for a file without a step, or of another kind.
    """
    path = Path(path)
    known: dict[int, dict[str, Any]] = {}
    header: dict[str, Any] = {}
    bad: list[int] = []
    again = 0
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                entry = _entry(line)
                if entry is None:
                    bad += [number] if line.strip() else []
                elif "step" in entry:
                    again += entry["step"] in known
                    known[entry["step"]] = entry
                elif entry.get("monitor") != FORMAT:
                    raise ReshardError(
                        f"{path} is of a later reshard ({entry.get('reshard')}): read it with that one"
                    )
                else:
                    header = entry
    except OSError as error:
        raise ReshardError(f"{path} cannot be read: {error.strerror}") from error
    if not known:
        raise ReshardError(f"{path} has no step: give the file of a reshard.parity.RolloutMonitor")
    notices = []
    if bad:
        notices.append(f"lines that are not whole, as after a crash, are left out: {listed(bad, 3)}")
    if again:
        notices.append(f"{again:,} steps were run again: the last time counts")
    entries = [known[step] for step in sorted(known)]
    names = dict.fromkeys(name for entry in entries for name in entry if name not in NOT_FIGURES)
    columns = {name: np.array([_number(entry.get(name)) for entry in entries], np.float64) for name in names}
    columns.setdefault("tokens", np.zeros(len(entries)))
    failed = {entry["step"]: list(map(str, entry["exceeded"])) for entry in entries if entry.get("exceeded")}
    return Run(str(path), np.array(sorted(known), np.int64), columns, failed,
               dict(header.get("limits", {})), list(header.get("bounds", [])), notices)  # fmt: skip


def _entry(line: bytes) -> dict[str, Any] | None:
    """Return what a line says; None if it is torn, or of something else."""
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    if not isinstance(entry, dict) or not (isinstance(entry.get("step"), int) or "monitor" in entry):
        return None
    return entry


def _number(value: Any) -> float:
    """Return a figure; JSON has those that are not finite as text."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return float("nan")
