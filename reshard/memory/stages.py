"""The memory of each pipeline stage of a training layout, as a report."""

from dataclasses import dataclass

from reshard.megatron.stages import Stage
from reshard.memory.activations import ChunkBytes, chunk_bytes, uncounted
from reshard.memory.options import TrainingSetup
from reshard.memory.outside import IMBALANCE, RESERVED, Band, outside
from reshard.memory.report import MemoryReport, StageMemory
from reshard.memory.schedule import Moment, moments
from reshard.memory.static import Static, static_bytes


def report_of(setup: TrainingSetup, gpu_bytes: int | None = None) -> MemoryReport:
    """Compute the report of a setup."""
    by_kind: dict[tuple, tuple[Static, list[ChunkBytes], list[ChunkBytes]]] = {}
    stages = []
    for rank, chunks in enumerate(setup.layout.stages(setup.model)):
        kinds = tuple(
            (tuple(setup.model.kinds[layer] for layer in chunk.layers), chunk.embedding, chunk.output, chunk.mtp,
             setup.model.num_layers - 1 in chunk.layers)
            for chunk in chunks
        )  # fmt: skip
        if kinds not in by_kind:
            by_kind[kinds] = _parts(setup, chunks)
        stages.append(_stage(setup, rank, chunks, *by_kind[kinds]))
    axes = f"{setup.layout} DP{setup.dp}" + (f" CP{setup.training.cp}" if setup.training.cp > 1 else "")
    return MemoryReport(
        f"{setup.model.family.name} ({setup.model.num_layers} layers)",
        axes,
        setup.ranks,
        setup.dp,
        setup.microbatches,
        setup.tokens,
        str(setup.recompute),
        stages,
        [*_notices(setup), *setup.model.notices],
        gpu_bytes,
        setup.training.gpus_per_host,
    )


@dataclass(frozen=True)
class Peak:
    """The fullest moment of a rank: bytes of activations, and of tensors that live for a moment only."""

    activations: float
    transient: float
    moment: Moment


def peak_of(setup: TrainingSetup, rank: int, chunks: list[ChunkBytes]) -> Peak:
    """Return the fullest moment of pipeline rank `rank` over the schedule."""
    t = setup.training
    group = t.microbatch_group_size or setup.layout.pp
    best: Peak | None = None
    for moment in moments(
        setup.layout.pp, rank, len(chunks), setup.microbatches, group, int(t.overlap_expert_comm)
    ):
        kept = sum(n * chunk.kept for n, chunk in zip(moment.alive, chunks, strict=True))
        current = chunks[moment.chunk]
        extra = current.forward if moment.forward else current.backward
        if best is None or kept + extra > best.activations + best.transient:
            best = Peak(kept, extra, moment)
    assert best is not None
    return best


def _parts(setup: TrainingSetup, stages: list[Stage]) -> tuple[Static, list[ChunkBytes], list[ChunkBytes]]:
    """Return what does not depend on the pipeline rank: static bytes, and a microbatch's bytes in
    each chunk, with the given routing and with that of the band's upper end."""
    t, static = setup.training, static_bytes(setup, stages)

    def chunks(imbalance: float) -> list[ChunkBytes]:
        sizes = [chunk_bytes(setup, chunk, imbalance) for chunk in stages]
        return [size._replace(backward=size.backward + static.largest) for size in sizes]

    usual = chunks(t.imbalance or 1.0)
    uneven = setup.model.num_experts and setup.layout.ep > 1 and t.imbalance is None
    return static, usual, chunks(IMBALANCE) if uneven else usual


def _stage(
    setup: TrainingSetup,
    rank: int,
    stages: list[Stage],
    static: Static,
    chunks: list[ChunkBytes],
    fuller: list[ChunkBytes],
) -> StageMemory:
    peak = peak_of(setup, rank, chunks)
    busy = static.total + round(peak.activations + peak.transient)
    step = static.total + static.step
    least = high = max(busy, step)
    if fuller is not chunks:
        fuller_peak = peak_of(setup, rank, fuller)
        high = max(high, static.total + round(fuller_peak.activations + fuller_peak.transient))
    copies, copies_band = _fp8_copies(setup, static)
    allocated, band = least + copies, Band(least + copies_band.low, high + copies_band.high)
    outside_torch = outside(setup)
    total = Band(
        round(band.low * RESERVED[0]) + outside_torch.low, round(band.high * RESERVED[1]) + outside_torch.high
    )
    in_step = step > busy
    tensors: dict[str, float] = {}
    for n, chunk in zip(peak.moment.alive, chunks, strict=True):
        for name, amount in chunk.tensors.items():
            tensors[name] = tensors.get(name, 0) + n * amount
    return StageMemory(
        rank, _layers(stages), static.weights, static.grads, static.main_params, static.moments,
        static.engine_buffers + copies, 0 if in_step else round(peak.activations),
        static.step if in_step else round(peak.transient),
        "the optimizer's step" if in_step else _words(peak.moment, len(chunks)),
        (0,) * len(chunks) if in_step else peak.moment.alive, allocated, band, outside_torch, total, static.host,
        {} if in_step else {name: round(amount) for name, amount in tensors.items()},
    )  # fmt: skip


def _fp8_copies(setup: TrainingSetup, static: Static) -> tuple[int, Band]:
    """Return the bytes of the weights' fp8 copies, and a band around them.

    Beside bf16 weights there is a copy by rows and one by columns, which stay until the next step
    (measured: 1.9 to 2.1 bytes for a number, of blockwise and of tensorwise scaling); mxfp8 has a
    scale for every 32 numbers. With fp8 parameters the copies replace the two bytes of bf16.
    """
    if not setup.training.fp8:
        return 0, Band(0, 0)
    if setup.training.fp8_params:
        return 0, Band(-static.linear, static.linear // 8)
    return 2 * static.linear, Band(static.linear, static.linear * 17 // 8)


def _words(moment: Moment, chunks: int) -> str:
    n = sum(moment.alive)
    which = f" of chunk {moment.chunk}" if chunks > 1 else ""
    what = "forward" if moment.forward else "backward"
    kind, plural = ("microbatch", "microbatches") if chunks == 1 else ("chunk", "chunks")
    return f"{what}{which}, {n} {kind if n == 1 else plural} alive"


def _layers(stages: list[Stage]) -> str:
    """Describe the layers of a stage's chunks, such as ``E 0-3, 16-19``."""
    texts = []
    for chunk in stages:
        layers = (
            f"{chunk.layers[0]}-{chunk.layers[-1]}"
            if len(chunk.layers) > 1
            else "".join(map(str, chunk.layers))
        )
        parts = ["E" * chunk.embedding, layers, "MTP" * chunk.mtp, "L" * chunk.output]
        texts.append(" ".join(part for part in parts if part) or "-")
    return ", ".join(texts)


def _notices(setup: TrainingSetup) -> list[str]:
    """Return a sentence for each assumption, and for what the figures leave open."""
    t = setup.training
    notices = [
        "static bytes are exact; activations are those of Transformer Engine's layers with fused attention, without "
        f"dropout, and the loss that of --cross-entropy-fusion-impl {t.cross_entropy}"
    ]
    notices += uncounted(setup.model)
    if t.num_microbatches is None and t.global_batch_size is None and setup.layout.pp > 1:
        notices.append(
            f"{setup.microbatches} microbatches are assumed: --num-microbatches or --global-batch-size says"
        )
    if setup.model.num_experts and setup.layout.ep > 1 and t.imbalance is None:
        notices.append(
            f"routing is taken as even; the upper end of a band is with {IMBALANCE:g} times the even share on the "
            f"fullest rank: --imbalance says otherwise"
        )
    if t.fp8:
        notices.append(
            "fp8: the weights' copies are taken as two, as measured for blockwise and tensorwise scaling; "
            "the band has one to two and their scales"
        )
    if t.optimizer_offload:
        notices.append(
            "offload: the host needs buffers for transfers besides, up to 4 bytes for each parameter moved"
        )
    if setup.recompute.modules & {"core_attn"}:
        notices.append("core_attn saves nothing where attention is fused")
    return notices
