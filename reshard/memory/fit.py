"""Search the layouts that fit: all that divide, from the least recomputation up, ranked by what costs speed.

Memory is predicted, time is not: the order says which layouts recompute less, move less to the
host, wait less in the pipeline and split layers within hosts, not which is faster.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from reshard.core.errors import OptionError, ReshardError
from reshard.megatron.layout import MegatronLayout
from reshard.memory.options import Training, TrainingSetup
from reshard.memory.outside import Band
from reshard.memory.stages import report_of
from reshard.memory.text import band_text, gib, table
from reshard.models.model import Model

LADDER_DENSE = ("none", "mlp", "full")
LADDER_EXPERTS = (
    "none",
    "moe_act,layernorm",
    "moe_act,layernorm,mlp",
    "moe_act,layernorm,mlp,shared_experts",
    "full",
)
LADDER_LATENT = (
    "none",
    "moe_act,layernorm",
    "moe_act,layernorm,mla_up_proj",
    "moe_act,layernorm,mla_up_proj,mlp",
    "full",
)
OFFLOADS = (0.0, 1.0)
BATCH = 4  # microbatches times ranks of a model's copy, where no batch is given


@dataclass(frozen=True)
class SearchSpace:
    """The sizes that a search tries; a fixed size has one value."""

    tp: tuple[int, ...] | None = None
    pp: tuple[int, ...] | None = None
    ep: tuple[int, ...] | None = None
    cp: tuple[int, ...] = (1,)
    vpp: tuple[int, ...] = (1, 2, 4)
    at_most_tp: int | None = None
    at_most_pp: int | None = None
    at_most_ep: int | None = None
    offload: bool = True


@dataclass(frozen=True)
class FittingLayout:
    """A layout that fits with this recomputation and offload. `surely` is True where the upper end
    of its band is within the GPU's memory; otherwise only the lower end is. `bubble` is the share
    of a pipeline's time that waits."""

    layout: MegatronLayout
    cp: int
    dp: int
    recompute: str
    offload: float
    allocated: int
    low: int
    high: int
    headroom: int
    bubble: float
    microbatches: int
    tp_within_host: bool
    ep_within_host: bool
    surely: bool
    cost: tuple[float, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values, for ``--json``."""
        return asdict(self) | {"text": str(self.layout)}


def fit(
    model: Model, training: Training, gpu_bytes: int, space: SearchSpace | None = None, count: int = 10
) -> tuple[list[FittingLayout], int]:
    """The `count` best layouts of ``training.gpus`` GPUs with `gpu_bytes` each, and how many were tried at.

    Raises ReshardError without a number of GPUs.
    """
    space = space or SearchSpace()
    if training.gpus is None:
        raise OptionError("--fit needs --gpus: how many GPUs there are")
    ladder = LADDER_LATENT if model.family.latent else LADDER_EXPERTS if model.num_experts else LADDER_DENSE
    fitting, tried = [], 0
    if training.num_microbatches is None and training.global_batch_size is None:
        training = replace(training, global_batch_size=BATCH * training.gpus * training.micro_batch_size)
    for layout, cp in _layouts(model, training, space):
        tried += 1
        best = _least(model, layout, replace(training, cp=cp, dp=None), gpu_bytes, ladder, space.offload)
        if best is not None:
            fitting.append(best)
    fitting.sort(key=lambda each: each.cost)
    return fitting[:count], tried


def _least(
    model: Model,
    layout: MegatronLayout,
    training: Training,
    gpu_bytes: int,
    ladder: tuple[str, ...],
    offload: bool,
) -> FittingLayout | None:
    """Return the least recomputation and offload with which a layout fits surely, else with which it may."""
    maybe = None
    shares = sorted({max(share, training.optimizer_offload) for share in (OFFLOADS if offload else (0.0,))})
    for share in shares:
        # the last rung first: where that does not fit, hardly anything above it does
        for level in (len(ladder) - 1, *range(len(ladder))):
            t = replace(training, recompute=ladder[level], optimizer_offload=share)
            try:
                setup = TrainingSetup.of(model, layout, t)
                report = report_of(setup, gpu_bytes)
            except ReshardError:
                return None  # this layout does not divide
            if report.fits is False:
                if level == len(ladder) - 1:
                    break
                continue
            this = _fitting(setup, layout, report.peak, gpu_bytes, level, bool(report.fits))
            if report.fits and level < len(ladder) - 1:
                return this
            if report.fits and maybe is not None and maybe.surely:
                return maybe  # the last rung, for the second time
            maybe = this if maybe is None or this.surely > maybe.surely else maybe
        if maybe is not None and maybe.surely:
            return maybe
    return maybe


def _fitting(
    setup: TrainingSetup, layout: MegatronLayout, peak: Any, gpu_bytes: int, level: int, surely: bool
) -> FittingLayout:
    t = setup.training
    bubble = (layout.pp - 1) / (layout.virtual_stages * setup.microbatches)
    bubble /= 1 + bubble
    tp_inside = layout.tp * t.cp <= t.gpus_per_host
    ep_inside = layout.ep * layout.expert_tp <= t.gpus_per_host
    cost = (not surely, not tp_inside, level, t.optimizer_offload, round(bubble, 2), layout.tp * t.cp,
            not ep_inside, layout.ep, peak.total_band.high)  # fmt: skip
    return FittingLayout(
        layout,
        t.cp,
        setup.dp,
        t.recompute,
        t.optimizer_offload,
        peak.allocated,
        peak.total_band.low,
        peak.total_band.high,
        gpu_bytes - peak.total_band.high,
        bubble,
        setup.microbatches,
        tp_inside,
        ep_inside,
        surely,
        cost,
    )


def _layouts(model: Model, t: Training, space: SearchSpace) -> Iterator[tuple[MegatronLayout, int]]:
    """Yield every layout of that many GPUs that divides the model."""
    gpus = t.gpus or 1
    sizes = _divisors(gpus)
    at_most_tp = space.at_most_tp or t.gpus_per_host
    for tp in space.tp or [n for n in sizes if n <= at_most_tp]:
        for pp in space.pp or [n for n in sizes if n <= min(space.at_most_pp or gpus, model.num_layers)]:
            for cp in space.cp:
                if gpus % (tp * pp * cp):
                    continue
                experts: list[int] = [1]
                if model.num_experts:
                    most = min(space.at_most_ep or gpus, gpus // pp)
                    experts = [n for n in _divisors(model.num_experts) if n <= most and gpus // pp % n == 0]
                for ep in space.ep or experts:
                    for vpp in space.vpp if pp > 1 else (1,):
                        layout = _staged(model, tp, pp, vpp, ep)
                        if layout is not None:
                            yield layout, cp


def _staged(model: Model, tp: int, pp: int, vpp: int, ep: int) -> MegatronLayout | None:
    """Return a layout with even stages, or with stages as even as a layout string makes them; None if no such
    layout exists."""
    etp = 1 if model.num_experts else None
    even = MegatronLayout(tp=tp, pp=pp, vpp=vpp, ep=ep, etp=etp)
    layouts = [even]
    if pp > 1 and (model.mtp_layers or model.num_layers % (pp * vpp)):
        text = even_stages(model.num_layers, model.mtp_layers, pp * vpp)
        layouts = (
            [replace(even, vpp=1 if vpp == 1 else vpp, pipeline_model_parallel_layout=text)] if text else []
        )
    for layout in layouts:
        try:
            layout.check(model)
        except ReshardError:
            continue
        return layout
    return None


def even_stages(layers: int, mtp: int, stages: int) -> str | None:
    """Return Megatron's layout string with the embedding, the loss and each MTP layer counted as a
    layer; None if a stage would be without a layer.

    >>> even_stages(61, 1, 16)
    'Et*3|t*4|t*4|t*4|t*4|t*4|t*4|t*4|t*4|t*4|t*4|t*4|t*4|t*4|t*4|t*2mL'
    """
    base, more = divmod(layers + mtp + 2, stages)
    # The stages in the middle get one layer more.
    first = (stages - more) // 2
    counts = [base + (first <= stage < first + more) for stage in range(stages)]
    counts[0] -= 1
    counts[-1] -= 1 + mtp
    if min(counts[:-1]) < 1 or counts[-1] < 0:
        return None
    texts = [f"t*{n}" if n > 1 else "t" * n for n in counts]
    return "|".join(["E" + texts[0], *texts[1:-1], texts[-1] + "m" * mtp + "L"])


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def fit_lines(layouts: Sequence[FittingLayout], tried: int, gpus: int, gpu_bytes: int) -> Iterator[str]:
    """Yield the lines of a search for layouts that fit, of how many `tried`."""
    if not layouts:
        yield f"none of {tried} layouts of {gpus} GPUs fits into {gib(gpu_bytes)} GiB"
        return
    yield f"{tried} layouts of {gpus} GPUs tried; the best that fit into {gib(gpu_bytes)} GiB:"
    rows = [
        (
            f"{layout.layout} DP{layout.dp}" + f" CP{layout.cp}" * (layout.cp > 1),
            layout.recompute,
            f"{layout.offload:g}",
            gib(layout.allocated),
            band_text(Band(layout.low, layout.high)),
            f"{layout.bubble:.0%}",
            str(layout.microbatches),
            "yes" if layout.surely else "maybe",
        )
        for layout in layouts
    ]
    yield from table(
        ("layout", "recompute", "offload", "allocated", "in all", "bubble", "microbatches", "fits"), rows
    )
