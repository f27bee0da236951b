"""The memory that a trainer and an engine hold in each phase of an RL step, on the same GPUs or on others.

What an engine takes besides weights and keys and values it measures itself when it starts, so it is a band
here; so is what a sleeping engine leaves on the GPU.
"""

from dataclasses import dataclass
from math import prod

from reshard.core.errors import OptionError, listed
from reshard.core.limits import PENDING_BYTES
from reshard.engines.layout import EngineLayout, EngineRank, Split
from reshard.memory.activations import Sizes, layer_tensors
from reshard.memory.options import GIB, TrainingSetup
from reshard.memory.outside import CONTEXT, Band
from reshard.memory.report import KEPT, PENDING, MemoryReport, Phase, StageMemory
from reshard.models.model import Model

MOVABLE = ("weights", "grads", "optimizer")
DELTA_PLACES = ("gpu", "host")
# Left by a sleeping engine: its context, communicators and CUDA graphs. Up to 25 GiB were reported.
RESIDUE = Band(1 * GIB, 4 * GIB)
# Of CUDA graphs and kernels of a running engine.
GRAPHS = Band(int(0.3 * GIB), int(2.5 * GIB))
# What a running engine takes that it did not foresee when it took its share of the GPU. Measured with
# vLLM on an H200: 0.8 GiB when it had started, 3.1 when it had generated.
BEYOND = Band(int(0.5 * GIB), int(3.5 * GIB))
NOTHING = Band(0, 0)
# A refit's staging, and its table of copies.
REFIT = Band(64 << 10, 64 << 20)
# Filled from host memory for engines in other processes: `bucket_bytes` of `reshard.refit.connect`, unless it
# is given.
SLAB = 512 << 20


@dataclass(frozen=True)
class EngineSetup:
    """An engine beside the trainer. `utilization` is the share of a GPU that it is started with, vLLM's
    ``gpu_memory_utilization`` or SGLang's ``mem_fraction_static``; `colocated` None means on the
    trainer's GPUs where it has no more ranks. `offload` is what of the trainer is in host memory
    while the engine generates, and for gradients and optimizer whenever nothing is trained.
    `kv_width` is the bytes of an element of its cache, `batched_tokens` the most that it runs at
    once: ``max_num_batched_tokens``, ``chunked_prefill_size``. `delta` says where the trainer keeps
    what it sent, for refits that send what changed: on the ``gpu`` or on the ``host``. `changed` is the
    share of the elements that a step changes, for syncs that are begun and switched to: what then waits on
    each side is counted. With `from_host` refits read weights that are offloaded from host memory.
    """

    layout: EngineLayout
    utilization: float = 0.9
    colocated: bool | None = None
    offload: tuple[str, ...] = MOVABLE
    kv_width: int = 2
    batched_tokens: int = 8192
    delta: str | None = None
    from_host: bool = False
    changed: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.utilization <= 1:
            raise OptionError(
                f"the engine's share of a GPU is {self.utilization}; it is above 0 and at most 1"
            )
        unknown = [name for name in self.offload if name not in MOVABLE]
        if unknown:
            raise OptionError(f"--trainer-offload: {unknown[0]!r} is not one of {listed(MOVABLE)}")
        if self.delta is not None and self.delta not in DELTA_PLACES:
            raise OptionError(f"--delta: {self.delta!r} is not one of {listed(DELTA_PLACES)}")
        if self.changed is not None and not 0 < self.changed <= 1:
            raise OptionError(f"--changed: {self.changed} is not above 0 and at most 1")
        if self.changed is not None and self.delta is None:
            raise OptionError("--changed is of syncs that send what changed, which --delta asks for")
        if self.from_host and "weights" not in self.offload:
            raise OptionError("--refit-from-host: the weights are not offloaded, see --trainer-offload")


def phases_of(setup: TrainingSetup, report: MemoryReport, engine: EngineSetup) -> list[Phase]:
    """Return the phases generate, sync, logprob and train. Raises ReshardError if the GPU's
    memory is not known, or the engine cannot be laid out."""
    if report.gpu_bytes is None:
        raise OptionError("--engine needs --gpu-memory: the engine takes a share of it")
    layout = engine.layout
    layout.check(setup.model)
    colocated = layout.world_size <= setup.ranks if engine.colocated is None else engine.colocated
    if colocated and layout.world_size > setup.ranks:
        raise OptionError(
            f"the engine's {layout.world_size} ranks do not fit on the trainer's {setup.ranks} GPUs: --separate"
        )
    weights, bytes_per_token = _engine_bytes(setup.model, engine)
    serving, beyond, tokens = _serving(setup.model, engine, report.gpu_bytes, weights, bytes_per_token)

    stage = max(report.stages, key=lambda each: each.static)
    always = {"Transformer Engine's buffers": stage.engine_buffers} if stage.engine_buffers else {}
    kept_copy = kept_on("gpu", engine, stage)
    copy = {KEPT: kept_copy} if kept_copy else {}
    if engine.changed is not None:
        if colocated:
            raise OptionError(
                "--changed is of syncs that are begun, which need engines on GPUs of their own: --separate"
            )
        copy |= {PENDING: _changes(stage.weights, engine.changed)}
        arrived = _changes(weights, engine.changed)
        serving |= {PENDING: arrived, "where pending changes go": arrived}
        beyond += Band(0, arrived)  # where tensors of a bucket lie over 4 GiB apart
    always |= copy
    kept = _not_offloaded(stage, engine)
    # For a forward the weights are on the GPU, the rest stays offloaded.
    resident = {"trainer's weights": stage.weights} | kept | always
    syncing = {"the refit's slab": SLAB} | kept | always if engine.from_host else resident
    outside = stage.outside + (_left_by_allocator(setup) if engine.offload else NOTHING)
    asleep, gpus = (RESIDUE, "both") if colocated else (NOTHING, "trainer's")
    forward = resident | {"one layer's forward, logits": _forward(setup)}
    if colocated:
        phases = [
            _phase("generate", "both", serving | kept | always, outside + beyond, tokens),
            _phase("sync", gpus, syncing | {"engine: weights": weights}, outside + asleep + REFIT),
        ]
    else:
        phases = [
            _phase("generate", "engine's", serving, beyond, tokens),
            _phase("sync", gpus, syncing, outside + asleep + REFIT),
            _phase("sync", "engine's", serving, REFIT + beyond),
        ]
    return [
        *phases,
        _phase("logprob", gpus, forward, outside + asleep),
        Phase(
            "train",
            gpus,
            _training_parts(report.peak) | copy,
            report.peak.total_band + asleep + Band(*2 * (sum(copy.values()),)),
        ),
    ]


def kept_on(place: str, engine: EngineSetup, stage: StageMemory) -> int:
    """Return the most that a trainer's rank keeps of what it sent on the ``gpu`` or the ``host``: each of its elements
    once, as engines get them, where deltas are kept in this place. Replicas of an engine share what is kept; with data
    parallelism each copy of the trainer sends a part."""
    return stage.weights if engine.delta == place else 0


def _changes(weights: int, share: float) -> int:
    """Return the bytes of the packed changes of weights in bf16: a value and its position for each element."""
    return min(round(share * weights) * 2, PENDING_BYTES)


def _phase(name: str, gpus: str, parts: dict[str, int], more: Band, kv_tokens: Band | None = None) -> Phase:
    total = sum(parts.values())
    return Phase(name, gpus, parts, Band(total + more.low, total + more.high), kv_tokens)


def _serving(
    model: Model, engine: EngineSetup, gpu_bytes: int, weights: int, bytes_per_token: int
) -> tuple[dict[str, int], Band, Band]:
    """Return what a running engine holds, what it takes beyond that, and how many tokens of keys and
    values fit for it."""
    needed = _profiled(model, engine) + GRAPHS
    if engine.layout.share_holds_all:
        claim = int(engine.utilization * gpu_bytes)
        held, beyond, needed = "weights, keys and values, all else", BEYOND, needed + CONTEXT
        rooms = [claim - weights - size for size in (needed.high, needed.low)]
    else:  # a share of what is free before it loads its weights
        claim = int(engine.utilization * (gpu_bytes - CONTEXT.low))
        held, beyond = "weights, keys and values", needed + CONTEXT
        rooms = [
            int(engine.utilization * (gpu_bytes - size)) - weights for size in (CONTEXT.high, CONTEXT.low)
        ]
    low, high = (max(0, room) // bytes_per_token for room in rooms)
    return {f"engine: {held}": claim}, beyond, Band(low, high)


def _not_offloaded(stage: StageMemory, engine: EngineSetup) -> dict[str, int]:
    """Return what of the trainer stays on the GPU while the engine generates."""
    parts = {"weights": stage.weights, "grads": stage.grads, "optimizer": stage.main_params + stage.moments}
    return {f"trainer's {name}": size for name, size in parts.items() if name not in engine.offload and size}


def _training_parts(stage: StageMemory) -> dict[str, int]:
    """Return what a stage holds at the fullest moment of a training step."""
    return {
        "trainer's weights": stage.weights,
        "trainer's grads": stage.grads,
        "trainer's optimizer": stage.main_params + stage.moments,
        "Transformer Engine's buffers": stage.engine_buffers,
        "activations and transients": stage.activations + stage.transient,
    }


def _engine_bytes(model: Model, engine: EngineSetup) -> tuple[int, int]:
    """Return the bytes of weights, and of keys and values for each token, on the fullest of an
    engine's ranks.

    A token has 2 heads of D elements in each layer, of each key head that the rank has; with latent attention
    one vector, on every rank the same.
    """
    s, layout = model.symbols, engine.layout
    weights = per_token = 0
    for stage in range(layout.pp):
        first = stage * layout.tp
        rank, placement = layout.rank(model, first), layout.placement(model, first)
        weights = max(weights, 2 * sum(prod(tensor.shape) for tensor in placement.tensors.values()))
        if model.family.latent:
            each = s["RKV"] + s["DR"]
        else:
            each = 2 * max(s["NKV"] // _attention(rank).ranks, 1) * s["D"]
        per_token = max(per_token, len(rank.layers) * each * engine.kv_width)
    return weights, per_token


def _attention(rank: EngineRank) -> Split:
    """Return by how many ranks attention is split."""
    return rank.splits.get("attention", Split(rank.tp, rank.tp_rank))


def _profiled(model: Model, engine: EngineSetup) -> Band:
    """Return the memory of a forward of as many tokens as the engine batches: a few hidden vectors, the
    widest product's, and logits of a batch of sequences."""
    s, rank = model.symbols, engine.layout.rank(model, 0)
    width = 3 * s.get("F", 0) / rank.tp if len(model.moe_layers) < model.num_layers else 0.0
    if model.num_experts:
        k = int(model.value_of("moe_router_topk"))
        width = max(width, k * (s["H"] + 3 * s["FE"] / min(rank.moe_tp, rank.tp)))
    tokens = 2 * engine.batched_tokens * (4 * s["H"] + width)
    logits = 256 * s["V"] * 4
    return Band(int(tokens / 2 + logits), int(1.5 * tokens + 4 * logits))


def _left_by_allocator(setup: TrainingSetup) -> Band:
    """Return the freed memory that torch keeps when the trainer offloads: segments of its logits,
    in bf16 and fp32, in which cuBLAS's workspaces of 32 MiB lie (measured: both); nothing with
    expandable segments."""
    return Band(0, int(setup.tokens * _logits(setup)))


def _forward(setup: TrainingSetup) -> int:
    """Return the memory of a forward without a backward: one layer's tensors, or the logits."""
    sizes = Sizes.of(setup, setup.training.imbalance or 1.0)
    layer = max(
        sum(row.bytes for row in layer_tensors(setup.model, kind, sizes))
        for kind in dict.fromkeys(setup.model.kinds)
    )
    return int(setup.tokens * max(layer, _logits(setup)))


def _logits(setup: TrainingSetup) -> float:
    """Return the bytes of a token's logits, in bf16 and fp32."""
    return 6 * setup.model.symbols["V"] / setup.layout.tp
