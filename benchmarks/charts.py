"""Draw the charts of the pages from figures that stand in the records: python -m benchmarks.charts

Every figure names its record, and a test finds it there (tests/pages/test_site.py).
"""

import re
from math import log10
from pathlib import Path
from typing import NamedTuple

ASSETS = Path(__file__).resolve().parent.parent / "docs" / "assets"
RESULTS = Path(__file__).resolve().parent / "results"
OURS, RIVAL, FLOOR = "#0a7d55", "#b9bec6", "#7da7d9"
LEFT, WIDTH, ROW = 250, 760, 26
BINS_BEFORE = 10  # of 20 ms, before a sync


class Bar(NamedTuple):
    """One bar: its label, figure as the record has it, color."""

    label: str
    figure: str
    color: str


class Chart(NamedTuple):
    """A chart: file name, title, unit, record, logarithmic or not, and groups of bars."""

    name: str
    title: str
    unit: str
    record: str
    logarithmic: bool
    groups: dict[str, tuple[Bar, ...]]


class Strips(NamedTuple):
    """A chart of numbers over time, a strip for each row of a record's block of text: file name, title, record, and
    each row's name in the record, its label and color."""

    name: str
    title: str
    record: str
    rows: tuple[tuple[str, str, str], ...]

    def numbers(self, row: str) -> list[int]:
        """Return the numbers that the record has after a row's name."""
        record = (RESULTS / self.record).read_text(encoding="utf-8")
        [line] = re.findall(rf"^{row} +([\d ]+)$", record, re.MULTILINE)
        return [int(number) for number in line.split()]


CHARTS = (
    Chart(
        "refit-times",
        "A refit of a live vLLM from a live Megatron, 2 H200, logarithmic",
        "ms",
        "2026-11-21-refit.md",
        True,
        {
            "Llama-3.1-8B, PP2 to TP2": (
                Bar("reshard, in all", "13.0", OURS),
                Bar("mbridge and vLLM's loader", "497", RIVAL),
            ),
            "Qwen3-32B, PP2 to TP2": (
                Bar("reshard, in all", "49.3", OURS),
                Bar("mbridge and vLLM's loader", "1159", RIVAL),
            ),
            "Qwen3-30B-A3B, EP2 to TP2 EP": (
                Bar("reshard, in all", "18.2", OURS),
                Bar("mbridge and vLLM's loader", "11130", RIVAL),
            ),
        },
    ),
    Chart(
        "conversion-times",
        "A conversion of 2 GB in 1,182 tensors, two cores, synced to the disk",
        "s",
        "2026-11-25-one-of-each.md",
        False,
        {
            "": (
                Bar("cp -r", "0.94", FLOOR),
                Bar("hf-to-mcore", "0.96", OURS),
                Bar("mcore-to-hf", "0.95", OURS),
            )
        },
    ),
    Chart(
        "conversions-compared",
        "Qwen3-0.6B from Hugging Face to Megatron, two cores, with imports",
        "s",
        "2026-11-28-field.md",
        False,
        {
            "": (
                Bar("cp -r", "0.86", FLOOR),
                Bar("reshard", "0.92", OURS),
                Bar("mcore-bridge", "15.81", RIVAL),
                Bar("mbridge", "16.34", RIVAL),
                Bar("Megatron-Bridge", "26.46", RIVAL),
            )
        },
    ),
)

STRIPS = (
    Strips(
        "switching",
        "Tokens in each 20 ms around a sync that begins at 0; Qwen3-8B, 2 H200, 64 requests, 1 % changed",
        "2026-11-28-switching-served.md",
        (
            ("begun", "begun, and switched to", OURS),
            ("refit", "a refit in place, vLLM paused", FLOOR),
            ("vllm sparse", "vLLM's own, of changes", RIVAL),
            ("vllm", "vLLM's own, of all", RIVAL),
        ),
    ),
)


def draw_strips(chart: Strips) -> str:
    """Return the chart as SVG: each strip's full height is the mean before the sync."""
    body, height, bar, high = [], 40, 9.5, 56
    for row, label, color in chart.rows:
        numbers = chart.numbers(row)
        usual = sum(numbers[:BINS_BEFORE]) / BINS_BEFORE
        body.append(f'<text x="{LEFT - 10}" y="{height + high}" text-anchor="end">{label}</text>')
        for place, number in enumerate(numbers):
            tall = min(number / usual, 1.3) * high / 1.3
            body.append(
                f'<rect x="{LEFT + place * bar:.1f}" y="{height + high - tall:.1f}" width="{bar - 1.5}" '
                f'height="{tall:.1f}" fill="{color}"/>'
            )
        height += high + 14
    for place in range(0, len(numbers) + 1, BINS_BEFORE):
        x = LEFT + place * bar
        body.append(
            f'<text class="n" x="{x:.1f}" y="{height + 4}" text-anchor="middle">{20 * (place - BINS_BEFORE)} ms</text>'
        )
        body.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="36" y2="{height - 8}" stroke="#ddd"/>')
    return _page(chart.title, WIDTH, height + 16, body)


def _page(title: str, width: int, height: int, body: list[str]) -> str:
    """Return a drawing with its title as SVG."""
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{title}">',
        "<style>text{font:13px system-ui,sans-serif;fill:#222}.n{fill:#555}</style>",
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        f'<text x="16" y="24" font-weight="600">{title}</text>',
        *body,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def draw(chart: Chart) -> str:
    """Return the chart as SVG."""
    rows = [(group, bar) for group, bars in chart.groups.items() for bar in bars]
    largest = max(float(bar.figure) for _, bar in rows)
    height, body, group_before = 40, [], None

    def length(figure: float) -> float:
        share = log10(figure) / log10(largest) if chart.logarithmic else figure / largest
        return share * (WIDTH - LEFT - 90)

    for group, bar in rows:
        if group and group != group_before:
            height += 6
            body.append(f'<text x="16" y="{height + 16}" font-weight="600">{group}</text>')
            height += ROW - 2
            group_before = group
        end = LEFT + length(float(bar.figure))
        body += [
            f'<text x="{LEFT - 10}" y="{height + 16}" text-anchor="end">{bar.label}</text>',
            f'<rect x="{LEFT}" y="{height + 3}" width="{end - LEFT:.1f}" height="17" rx="2" fill="{bar.color}"/>',
            f'<text class="n" x="{end + 6:.1f}" y="{height + 16}">{bar.figure} {chart.unit}</text>',
        ]
        height += ROW
    return _page(chart.title, WIDTH, height + 12, body)


if __name__ == "__main__":
    for chart in CHARTS:
        (ASSETS / f"{chart.name}.svg").write_text(draw(chart), encoding="utf-8")
        print(chart.name)
    for strips in STRIPS:
        (ASSETS / f"{strips.name}.svg").write_text(draw_strips(strips), encoding="utf-8")
        print(strips.name)
