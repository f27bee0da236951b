"""The parity report as one HTML page without anything from elsewhere: figures, and three drawings as inline SVG."""

from collections.abc import Iterable, Sequence
from html import escape

import numpy as np

from reshard.parity.gate import ParityReport
from reshard.parity.metrics import Metrics

WIDTH, HEIGHT, MARGIN = 420, 300, 48
POINTS = 5000

STYLE = """body{font:15px/1.45 system-ui,sans-serif;margin:2rem auto;max-width:1340px;padding:0 1rem;color:#1b1f24;background:#fff}
table{border-collapse:collapse;margin:1rem 0}td,th{padding:.2rem .8rem;text-align:right;border-bottom:1px solid #d8dee4}
td:first-child,th:first-child{text-align:left}.charts{display:flex;flex-wrap:wrap;gap:1.5rem}figure{margin:0}figcaption{font-weight:600}
svg text{font-size:11px;fill:#57606a}.axis{stroke:#8c959f}.mark{fill:#0969da;fill-opacity:.45}.line{stroke:#cf222e;stroke-dasharray:4 3}
.ok{color:#1a7f37}.bad{color:#cf222e}@media(prefers-color-scheme:dark){body{color:#e6edf3;background:#0d1117}td,th{border-color:#30363d}
svg text{fill:#8d96a0}.mark{fill:#58a6ff}}"""


def html_report(report: ParityReport) -> str:
    """The page. Of more than `POINTS` tokens the drawings show an even selection, and say so."""
    one, two = (np.concatenate([s.logprobs for s in scores]) for scores in (report.scores_a, report.scores_b))
    position = np.concatenate([np.arange(1, len(s.logprobs) + 1) for s in report.scores_a])
    chosen = np.unique(np.linspace(0, len(one) - 1, min(len(one), POINTS)).astype(int))
    one, two, position = one[chosen], two[chosen], position[chosen]
    shown = "" if len(one) == report.overall.tokens else f"<p>The drawings show {len(one)} of {report.overall.tokens} tokens.</p>"
    verdict = '<span class="ok">within the limits</span>' if report.ok else '<span class="bad">beyond the limits</span>'
    reasons = "".join(f'<li class="bad">{escape(sentence)}</li>' for sentence in report.exceeded)
    routing = f"<p>Routing: {escape(report.routing.sentence)}.</p>" if report.routing is not None else ""
    columns = {"A to B": report.overall, **{f"A to {name}": metrics for name, metrics in report.noise.items()}}
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Logprob parity</title><style>{STYLE}</style></head><body>'
        f"<h1>Logprob parity: {verdict}</h1><ul>{reasons}</ul><p>A: {escape(report.a)}<br>B: {escape(report.b)}</p>"
        f"{_metrics_table(columns, report)}{routing}"
        f'<div class="charts">{_scatter(one, two)}{_histogram(one - two)}{_against_position(position, one - two)}</div>{shown}'
        f"<h2>Prompts</h2>{_prompts_table(report.prompts)}</body></html>\n"
    )


def _metrics_table(columns: dict[str, Metrics], report: ParityReport) -> str:
    rows = []
    for name, value in report.overall.to_dict().items():
        if value is not None:
            limit = getattr(report.limits, name, None)
            cells = [_number(getattr(metrics, name)) for metrics in columns.values()]
            rows.append([name, *cells, "" if limit is None else _number(limit)])
    return _table(["", *columns, "limit"], rows)


def _prompts_table(prompts: Sequence[Metrics]) -> str:
    rows = [
        [str(i), str(m.tokens), _number(m.mean_abs), _number(m.max_abs), _number(m.token_mult_prob_error)] for i, m in enumerate(prompts)
    ]
    return _table(["prompt", "tokens", "mean_abs", "max_abs", "token_mult_prob_error"], rows)


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return "<table><tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in head) + f"</tr>{body}</table>"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"


class _Chart:
    """Marks in the coordinates of the values."""

    def __init__(self, title: str, x: tuple[float, float], y: tuple[float, float], names: tuple[str, str]) -> None:
        self.title, self.names = title, names
        self.x, self.y = _widened(*x), _widened(*y)
        self.marks: list[str] = []

    def at(self, x: float, y: float) -> tuple[float, float]:
        left = MARGIN + (x - self.x[0]) / (self.x[1] - self.x[0]) * (WIDTH - MARGIN - 10)
        top = HEIGHT - MARGIN - (y - self.y[0]) / (self.y[1] - self.y[0]) * (HEIGHT - MARGIN - 10)
        return round(left, 1), round(top, 1)

    def points(self, xs: np.ndarray, ys: np.ndarray) -> None:
        for x, y in zip(xs.tolist(), ys.tolist(), strict=True):
            left, top = self.at(x, y)
            self.marks.append(f'<circle class="mark" cx="{left}" cy="{top}" r="2"/>')

    def line(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        (x1, y1), (x2, y2) = self.at(*start), self.at(*end)
        self.marks.append(f'<line class="line" x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}"/>')

    def svg(self) -> str:
        base, right = HEIGHT - MARGIN, WIDTH - 10
        labels = [
            f'<text x="{MARGIN}" y="{base + 16}">{self.x[0]:.3g}</text>',
            f'<text x="{right}" y="{base + 16}" text-anchor="end">{self.x[1]:.3g}</text>',
            f'<text x="{(MARGIN + right) / 2}" y="{base + 34}" text-anchor="middle">{escape(self.names[0])}</text>',
            f'<text x="{MARGIN - 5}" y="{base}" text-anchor="end">{self.y[0]:.3g}</text>',
            f'<text x="{MARGIN - 5}" y="18" text-anchor="end">{self.y[1]:.3g}</text>',
            f'<text x="12" y="{base / 2}" text-anchor="middle" transform="rotate(-90 12 {base / 2})">{escape(self.names[1])}</text>',
        ]
        axes = f'<path class="axis" fill="none" d="M{MARGIN} 10V{base}H{right}"/>'
        inside = axes + "".join(labels) + "".join(self.marks)
        drawing = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img">{inside}</svg>'
        return f"<figure><figcaption>{escape(self.title)}</figcaption>{drawing}</figure>"


def _widened(low: float, high: float) -> tuple[float, float]:
    """A range that is not empty."""
    low, high = float(low), float(high)
    return (low, high) if high > low else (low - 0.5 * (abs(low) or 1), high + 0.5 * (abs(high) or 1))


def _scatter(one: np.ndarray, two: np.ndarray) -> str:
    low, high = min(one.min(), two.min()), max(one.max(), two.max())
    chart = _Chart("Logprobs of the same tokens", (low, high), (low, high), ("A, nats", "B, nats"))
    chart.points(one, two)
    chart.line((low, low), (high, high))
    return chart.svg()


def _histogram(difference: np.ndarray) -> str:
    spread = _widened(difference.min(), difference.max())
    counts, edges = np.histogram(difference, bins=40, range=spread)
    chart = _Chart("How the differences are spread", spread, (0, max(1, int(counts.max()))), ("A - B, nats", "tokens"))
    for count, start, end in zip(counts.tolist(), edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        (x1, y1), (x2, y2) = chart.at(start, count), chart.at(end, 0)
        chart.marks.append(f'<rect class="mark" x="{x1}" y="{y1}" width="{max(0.5, x2 - x1 - 0.5):.1f}" height="{max(0.0, y2 - y1):.1f}"/>')
    return chart.svg()


def _against_position(position: np.ndarray, difference: np.ndarray) -> str:
    chart = _Chart("Differences along the prompt", (0, position.max()), (difference.min(), difference.max()), ("token", "A - B, nats"))
    chart.points(position, difference)
    if difference.min() < 0 < difference.max():
        chart.line((0, 0), (float(position.max()), 0))
    return chart.svg()
