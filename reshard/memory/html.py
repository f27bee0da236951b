"""A `MemoryReport` as one page: a bar of parts for each pipeline stage and for each phase of an RL step."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from bokeh.models import ColumnDataSource, DataRange1d
from bokeh.plotting import figure

from reshard.html import GUIDE, chart, describe, page
from reshard.memory.options import GIB
from reshard.memory.report import MemoryReport

TEMPLATE = Path(__file__).resolve().with_name("memory.html")
COLORS = (
    "#3b82d6", "#6aa5e3", "#2f5f96", "#8fbf6b", "#c9c9c9", "#f0a63c", "#d98032", "#b07cc6", "#5fb8b0", "#a0a7b0",
    "#84653d", "#c05a7d",
)  # fmt: skip
PARTS = {
    "weights": "weights", "gradients": "grads", "main parameters": "main_params", "moments": "moments",
    "Transformer Engine's buffers": "engine_buffers", "activations": "activations", "transients": "transient",
}  # fmt: skip


def html_report(report: MemoryReport, name: str = "") -> str:
    """The page. `name` is what the model is called, where that is known. Sizes are GiB of one GPU."""
    stages = {
        str(stage.stage): {name: getattr(stage, part) for name, part in PARTS.items()}
        | {"outside torch, at most": stage.outside.high}
        for stage in report.stages
    }
    charts = {"stages": _stacked("A GPU of each pipeline stage", "stage", stages, report.gpu_bytes)}
    if report.phases:
        phases = {f"{phase.name} ({phase.gpus})": dict(phase.parts) for phase in report.phases}
        charts["phases"] = _stacked("The phases of an RL step", "phase", phases, report.gpu_bytes)
    tensors = sorted(report.peak.tensors.items(), key=lambda each: -each[1])
    return page(
        TEMPLATE,
        charts,
        report=report,
        name=name,
        peak=report.peak,
        stages=[_row(stage) for stage in report.stages],
        phases=[
            [
                p.name,
                p.gpus,
                _gib(sum(p.parts.values())),
                _band(p.total_band),
                f"{p.kv_tokens.low:,} to {p.kv_tokens.high:,}" if p.kv_tokens else "",
            ]
            for p in report.phases
        ],
        tensors=[[name, _gib(n)] for name, n in tensors],
        verdict={
            True: "It fits.",
            False: "It does not fit.",
            None: "It may fit: the size is within the range.",
        }[report.fits]
        if report.gpu_bytes is not None
        else "",
        size="" if report.gpu_bytes is None else _gib(report.gpu_bytes),
    )


def _row(stage) -> list[str]:
    parts = [_gib(getattr(stage, part)) for part in PARTS.values()]
    return [
        str(stage.stage),
        stage.layers,
        *parts,
        _gib(stage.allocated),
        _band(stage.total_band),
        stage.moment,
    ]


def _gib(n: float) -> str:
    return f"{n / GIB:.2f}"


def _band(band: Sequence[int]) -> str:
    return f"{band[0] / GIB:.1f} to {band[1] / GIB:.1f}"


def _stacked(title: str, x: str, bars: Mapping[str, Mapping[str, int]], limit: int | None) -> figure:
    """A bar for each key, of parts one upon another; the GPU's size as a line."""
    drawn = chart(title, x, "GiB", x_range=list(bars), y_range=DataRange1d(start=0))
    names = list(dict.fromkeys(name for parts in bars.values() for name in parts))
    bottom = dict.fromkeys(bars, 0.0)
    for index, name in enumerate(names):
        tops = {bar: bottom[bar] + parts.get(name, 0) / GIB for bar, parts in bars.items()}
        source = ColumnDataSource(
            {"bar": list(bars), "part": [name] * len(bars), "bottom": list(bottom.values()), "top": list(tops.values()),
             "gib": [parts.get(name, 0) / GIB for parts in bars.values()]}
        )  # fmt: skip
        marks = drawn.vbar(
            x="bar",
            bottom="bottom",
            top="top",
            width=0.8,
            source=source,
            color=COLORS[index % len(COLORS)],
            legend_label=name,
        )
        describe(drawn, marks, {x: "@bar", "part": "@part", "GiB": "@gib{%.2f}"})
        bottom = tops
    if limit is not None:
        drawn.hspan(y=[limit / GIB], line_color=GUIDE, line_dash="dashed")
    drawn.add_layout(drawn.legend[0], "right")
    return drawn
