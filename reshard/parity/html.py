"""The parity report as one HTML page: the figures, every token of A against B, and which differ
most."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from bokeh.models import ColumnDataSource
from bokeh.plotting import figure

from reshard.core.errors import ReshardError
from reshard.html import GUIDE, MARK, chart, describe, number, page
from reshard.parity.prompts import token_texts
from reshard.parity.report import ParityReport

TEMPLATE = Path(__file__).resolve().with_name("report.html")
# Points that a chart shows at most, and how many of those are the tokens that differ most.
POINTS, KEPT = 5000, 500
# Rows of the table of tokens that differ most, bars of the histogram, characters that are shown of
# a token and of a prompt.
WORST, BINS, TEXT, BEGINNING = 20, 40, 40, 300
POINTER = {
    "prompt": "@prompt",
    "token": "@token",
    "text": "@text",
    "id": "@id",
    "A": "@a{%.6g}",
    "B": "@b{%.6g}",
    "A - B": "@difference{%.6g}",
}


def html_report(report: ParityReport, systems: Sequence[str] = (), located: str | None = None) -> str:
    """Return a report as a page. `located` is a sentence on where the two systems diverge.
    `systems` are directories or hub ids whose tokenizer gives the tokens' texts; without one tokens
    are shown by number, and the page says so where a tokenizer cannot be used.

    Of more than `POINTS` tokens the charts show those that differ most and an even selection, and
    say so.
    """
    notes = list(report.unmeasured)
    texts = None
    try:
        texts = token_texts(systems, report.tokens)
    except ReshardError as error:
        notes.append(f"tokens are shown by number alone: {error}")
    tokens = _tokens(report, texts)
    difference = tokens["difference"]
    order = np.argsort(-np.abs(difference), kind="stable")
    chosen = _chosen(order)
    source = ColumnDataSource({name: values[chosen] for name, values in tokens.items()})
    charts = {
        "tokens": _scatter(source),
        "differences": _histogram(difference),
        "positions": _along_the_prompt(source),
    }
    return page(
        TEMPLATE,
        charts,
        report=report,
        located=located,
        notes=notes,
        figures=_figures(report),
        worst=_rows(tokens, order[:WORST]),
        prompts=_prompts(report, texts),
        shown=len(chosen),
        kept=KEPT,
    )


def _tokens(report: ParityReport, texts: list[list[str]] | None) -> dict[str, np.ndarray]:
    """Return columns with a row for each predicted token, which is each but the first of a prompt."""
    counts = [len(scores.logprobs) for scores in report.scores_a]
    a = np.concatenate([scores.logprobs for scores in report.scores_a]).astype(np.float64)
    b = np.concatenate([scores.logprobs for scores in report.scores_b]).astype(np.float64)
    if texts is None:
        words = ["-"] * sum(counts)
    else:
        words = [_quoted(word) for prompt in texts for word in prompt[1:]]
    return {
        "prompt": np.repeat(np.arange(len(counts), dtype=np.int32), counts),
        "token": np.concatenate([np.arange(1, count + 1, dtype=np.int32) for count in counts]),
        "id": np.concatenate([np.asarray(prompt[1:], np.int32) for prompt in report.tokens]),
        "text": np.array(words, dtype=object),
        "a": a,
        "b": b,
        "difference": a - b,
    }


def _quoted(text: str, characters: int = TEXT) -> str:
    """Quote a text, so that spaces and line breaks are seen; a long one is cut."""
    short = text if len(text) <= characters else text[:characters] + "..."
    return json.dumps(short, ensure_ascii=False)


def _chosen(order: np.ndarray) -> np.ndarray:
    """Return the tokens that the charts show, ascending. `order` has all tokens, those that differ
    most first."""
    if len(order) <= POINTS:
        return np.sort(order)
    others = np.sort(order[KEPT:])
    even = np.linspace(0, len(others) - 1, POINTS - KEPT).astype(int)
    return np.sort(np.concatenate([order[:KEPT], others[even]]))


def _figures(report: ParityReport) -> dict[str, list[Any]]:
    """Return the table of figures over all tokens: its heading and its rows."""
    rows = []
    for name, value in report.overall.to_dict().items():
        if value is not None:
            limit = getattr(report.limits, name, None)
            _, *other_columns = report.columns.values()
            shown = [number(getattr(metrics, name)) for metrics in other_columns]
            rows.append([name, number(value), "" if limit is None else number(limit), *shown])
    first, *others = report.columns
    return {"head": ["", first, "limit", *others], "rows": rows}


def _rows(tokens: dict[str, np.ndarray], selected: np.ndarray) -> list[list[Any]]:
    """Return the rows of selected tokens."""
    rows = []
    for i in selected:
        a, b, difference = (number(tokens[name][i]) for name in ("a", "b", "difference"))
        rows.append(
            [tokens["prompt"][i], tokens["token"][i], difference, tokens["text"][i], tokens["id"][i], a, b]
        )
    return rows


def _prompts(report: ParityReport, texts: list[list[str]] | None) -> list[list[Any]]:
    rows = []
    for prompt, metrics in enumerate(report.prompts):
        figures = (
            number(value) for value in (metrics.mean_abs, metrics.max_abs, metrics.token_mult_prob_error)
        )
        text = "-" if texts is None else _quoted("".join(texts[prompt]), BEGINNING)
        rows.append([prompt, metrics.tokens, *figures, text])
    return rows


def _scatter(source: ColumnDataSource) -> figure:
    drawn = chart("Logprobs of the same tokens", "A, nats", "B, nats")
    ends = [min(*source.data["a"], *source.data["b"]), 0.0]
    drawn.line(ends, ends, line_color=GUIDE, line_dash="dashed")
    points = drawn.scatter("a", "b", source=source, size=5, color=MARK, alpha=0.5)
    describe(drawn, points, POINTER)
    return drawn


def _histogram(difference: np.ndarray) -> figure:
    """Chart the differences of all tokens, including those that the other charts leave out."""
    counts, edges = np.histogram(difference, bins=BINS)
    bins = ColumnDataSource({"tokens": counts.astype(np.int32), "from": edges[:-1], "to": edges[1:]})
    drawn = chart("How the differences are spread", "A - B, nats", "tokens")
    bars = drawn.quad(left="from", right="to", bottom=0, top="tokens", source=bins, color=MARK, alpha=0.7)
    describe(drawn, bars, {"tokens": "@tokens", "from": "@from{%.6g}", "to": "@to{%.6g}"})
    return drawn


def _along_the_prompt(source: ColumnDataSource) -> figure:
    drawn = chart("Differences along the prompt", "token", "A - B, nats")
    drawn.hspan(y=[0.0], line_color=GUIDE, line_dash="dashed")
    points = drawn.scatter("token", "difference", source=source, size=5, color=MARK, alpha=0.5)
    describe(drawn, points, POINTER)
    return drawn
