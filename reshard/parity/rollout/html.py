"""A run as one HTML page: figures along the steps, the parts of groups of tokens, and the steps beyond the limits."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from bokeh.models import ColumnDataSource
from bokeh.plotting import figure

from reshard.html import GUIDE, chart, describe, number, page
from reshard.parity.rollout.parts import Part
from reshard.parity.rollout.run import KINDS, NAMED, Run

TEMPLATE = Path(__file__).resolve().with_name("run.html")
# Steps that a chart shows at most, and how many of those are steps beyond the limits.
POINTS, KEPT = 2000, 500
COLORS = ("#3b82d6", "#d98032", "#6b9e46", "#b07cc6", "#5fb8b0", "#c05a7d", "#84653d", "#a0a7b0", "#f0a63c")
# Charts of figures along the steps: the title, what the axis is called, and the figures.
LINES = {
    "difference": ("Mean |difference of logprobs|", "nats", ("mean_abs",)),
    "kl": ("KL(engine to trainer), estimated", "nats", ("kl_estimate_reverse", "kl_k1")),
    "error": ("Mean of exp |difference|", "", ("token_mult_prob_error",)),
    "tails": (
        "Importance weights that few tokens exceed",
        "weight",
        ("ratio_max", "ratio_p999", "ratio_p99"),
    ),
    "sizes": ("Effective sample size", "share", ("ess", "sample_ess")),
    "lag": ("Staleness", "versions", ("lag_max", "lag_mean")),
}
# Charts of parts: the title, the kind of groups, and the part.
STACKS = {
    "by_ratio": ("KL (k3) of tokens by weight", "ratio", "kl_estimate_reverse"),
    "by_experts": ("KL (k3) of tokens by their experts", "experts", "kl_estimate_reverse"),
    "by_lag": ("KL (k3) of tokens by staleness", "lag", "kl_estimate_reverse"),
}


def html_run(run: Run) -> str:
    """Return a run as a page. Of more than `POINTS` steps the charts show those beyond the limits and an even
    selection, and say so."""
    shown = _shown(run)
    names = {name for _, _, names in LINES.values() for name in names}
    stacked = [f"{kind}_{group}/{part}" for _, kind, part in STACKS.values() for group in KINDS[kind]]
    columns = {name: run.columns[name][shown] for name in (*names, *stacked) if name in run.columns}
    source = ColumnDataSource({"step": run.steps[shown], **{_column(n): v for n, v in columns.items()}})
    charts = {
        name: _along(title, unit, [n for n in figures if n in columns], source, run.limits)
        for name, (title, unit, figures) in LINES.items()
        if any(figure in columns for figure in figures)
    }
    for name, (title, kind, part) in STACKS.items():
        groups = {group: f"{kind}_{group}/{part}" for group in KINDS[kind]}
        known = {group: column for group, column in groups.items() if column in columns}
        if known:
            charts[name] = _stacked(title, known, source)
    parts = [[kind, group.replace("_", " "), *_part_cells(part, groups)]
             for kind, groups in run.parts().items() for group, part in groups.items()]  # fmt: skip
    return page(
        TEMPLATE,
        charts,
        run=run,
        figures=_figures(run),
        parts=parts,
        failed=[[step, "; ".join(sentences)] for step, sentences in list(run.failed.items())[:NAMED]],
        shown=len(shown),
        kept=KEPT,
    )


def _shown(run: Run) -> np.ndarray:
    """Return the indices of the steps that the charts show, ascending."""
    count = len(run.steps)
    if count <= POINTS:
        return np.arange(count)
    failed = np.flatnonzero(np.isin(run.steps, list(run.failed)))[:KEPT]
    others = np.setdiff1d(np.arange(count), failed)
    even = np.linspace(0, len(others) - 1, POINTS - len(failed)).astype(int)
    return np.sort(np.concatenate([failed, others[even]]))


def _column(name: str) -> str:
    """Return a figure's name as Bokeh's pointer can name a column."""
    return name.replace("/", "_of_")


def _along(
    title: str, unit: str, names: Sequence[str], source: ColumnDataSource, limits: Mapping[str, float]
) -> figure:
    """Chart figures along the steps, each with its limit if that is near enough to be seen."""
    drawn = chart(title, "step", unit)
    for name, color in zip(names, COLORS, strict=False):
        drawn.line("step", name, source=source, line_color=color, line_width=1.5, legend_label=name)
        marks = drawn.scatter("step", name, source=source, size=4, color=color, alpha=0.6)
        describe(drawn, marks, {"step": "@step", name: f"@{name}{{%.6g}}"})
        values = np.asarray(source.data[name])
        limit = limits.get(name)
        if limit is not None and values[np.isfinite(values)].max(initial=0) > limit / 10:
            drawn.hspan(y=[limit], line_color=GUIDE, line_dash="dashed")
    _quiet_legend(drawn)
    drawn.legend[0].visible = len(names) > 1
    return drawn


def _stacked(title: str, groups: Mapping[str, str], source: ColumnDataSource) -> figure:
    """Chart the parts of groups, one on the other: their height is that of all tokens."""
    drawn = chart(title, "step", "nats")
    base = np.zeros(len(source.data["step"]))
    for (group, column), color in zip(groups.items(), COLORS, strict=False):
        top = base + np.nan_to_num(source.data[_column(column)])
        low, high = f"low_{_column(column)}", f"high_{_column(column)}"
        source.data[low], source.data[high] = base, top
        label = group.replace("_", " ")
        drawn.varea("step", low, high, source=source, fill_color=color, fill_alpha=0.5, legend_label=label)
        marks = drawn.scatter("step", high, source=source, size=3, color=color, alpha=0.7)
        describe(drawn, marks, {"step": "@step", label: f"@{_column(column)}{{%.6g}}"})
        base = top
    _quiet_legend(drawn)
    return drawn


def _quiet_legend(drawn: figure) -> None:
    legend = drawn.legend[0]
    legend.location, legend.background_fill_alpha, legend.border_line_alpha = "top_left", 0.4, 0
    legend.label_text_color = "gray"
    legend.background_fill_color = None
    legend.click_policy = "hide"


def _figures(run: Run) -> list[list[object]]:
    return [
        [name, number(f.first), number(f.last), number(f.mean) if f.mean is not None else "", number(f.worst),
         f.worst_step, number(run.limits[name]) if name in run.limits else ""]
        for name, f in run.figures().items()
    ]  # fmt: skip


def _part_cells(part: Part, groups: Mapping[str, Part]) -> list[str]:
    """Return a group's share of the tokens, and its parts with their shares of the whole."""

    def share(value: float, values: list[float]) -> str:
        total = sum(values)
        return f"{100 * value / total:.1f} %" if total else "-"

    of = list(groups.values())
    return [
        f"{100 * part.share:.3g} %",
        number(part.mean_abs), share(part.mean_abs, [p.mean_abs for p in of]),
        number(part.kl_k1),
        number(part.kl_estimate_reverse), share(part.kl_estimate_reverse, [p.kl_estimate_reverse for p in of]),
    ]  # fmt: skip
