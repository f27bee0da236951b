"""The memory that a trainer and a vLLM hold in each phase of an RL step, on the same GPUs or on others.

What an engine takes besides weights and keys and values is measured by vLLM itself when it starts, so it is a
band here; so is what a sleeping engine leaves on the GPU.
"""

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from reshard.core.errors import ReshardError, listed
from reshard.engines.vllm.layout import VllmLayout, vllm_placement
from reshard.memory.activations import Sizes, layer_tensors
from reshard.memory.options import GIB, TrainingSetup
from reshard.memory.outside import CONTEXT, Band
from reshard.memory.report import MemoryReport, StageMemory
from reshard.models.model import Model

MOVABLE = ("weights", "grads", "optimizer")
# Left by a sleeping vLLM: its context, communicators and CUDA graphs. Up to 25 GiB were reported.
RESIDUE = Band(1 * GIB, 4 * GIB)
# Of CUDA graphs and kernels of a running vLLM.
GRAPHS = Band(int(0.3 * GIB), int(2.5 * GIB))
# What a running vLLM takes that it did not foresee when it took its share of the GPU. Measured on
# an H200: 0.8 GiB when it had started, 3.1 when it had generated.
BEYOND = Band(int(0.5 * GIB), int(3.5 * GIB))
NOTHING = Band(0, 0)
# A refit's staging, and its table of copies.
REFIT = Band(64 << 10, 64 << 20)


@dataclass(frozen=True)
class EngineSetup:
    """A vLLM beside the trainer. `utilization` is its ``gpu_memory_utilization``; `colocated` None
    means on the trainer's GPUs where it has no more ranks. `offload` is what of the trainer is in
    host memory while the engine generates, and for gradients and optimizer whenever nothing is
    trained. `kv_width` is the bytes of an element of its cache, `batched_tokens` its
    ``max_num_batched_tokens``.
    """

    layout: VllmLayout
    utilization: float = 0.9
    colocated: bool | None = None
    offload: tuple[str, ...] = MOVABLE
    kv_width: int = 2
    batched_tokens: int = 8192

    def __post_init__(self) -> None:
        if not 0 < self.utilization <= 1:
            raise ReshardError(f"--gpu-memory-utilization is {self.utilization}; it is above 0 and at most 1")
        unknown = [name for name in self.offload if name not in MOVABLE]
        if unknown:
            raise ReshardError(f"--trainer-offload: {unknown[0]!r} is none of {listed(MOVABLE)}")


class Phase(NamedTuple):
    """Bytes on the fullest GPU of a phase, by what they are; `gpus` says whose GPUs. `kv_tokens`
    are the tokens of keys and values that fit for each engine (of a data parallel engine: for each
    of its parts)."""

    name: str
    gpus: str
    parts: dict[str, int]
    total_band: Band
    kv_tokens: Band | None = None


def phases_of(setup: TrainingSetup, report: MemoryReport, engine: EngineSetup) -> list[Phase]:
    """Return the phases generate, sync, logprob and train. Raises ReshardError where the GPU's
    memory is not known, or the engine cannot be laid out."""
    if report.gpu_bytes is None:
        raise ReshardError("--engine needs --gpu-memory: the engine takes a share of it")
    layout = engine.layout
    layout.check(setup.model)
    colocated = layout.world_size <= setup.ranks if engine.colocated is None else engine.colocated
    if colocated and layout.world_size > setup.ranks:
        raise ReshardError(
            f"the engine's {layout.world_size} ranks do not fit on the trainer's {setup.ranks} GPUs: --separate"
        )
    claim = int(engine.utilization * report.gpu_bytes)
    weights, bytes_per_token = _engine_bytes(setup.model, engine)
    tokens = _kv_tokens(setup.model, engine, claim - weights, bytes_per_token)
    serving = {"engine: weights, keys and values, all else": claim}

    stage = max(report.stages, key=lambda each: each.static)
    buffers = {"Transformer Engine's buffers": stage.engine_buffers} if stage.engine_buffers else {}
    kept = _not_offloaded(stage, engine)
    # For a forward the weights are on the GPU, the rest stays offloaded.
    resident = {"trainer's weights": stage.weights} | kept | buffers
    outside = stage.outside + (_left_by_allocator(setup) if engine.offload else NOTHING)
    asleep, gpus = (RESIDUE, "both") if colocated else (NOTHING, "trainer's")
    forward = resident | {"one layer's forward, logits": _forward(setup)}
    if colocated:
        phases = [
            _phase("generate", "both", serving | kept | buffers, outside + BEYOND, tokens),
            _phase("sync", gpus, resident | {"engine: weights": weights}, outside + asleep + REFIT),
        ]
    else:
        phases = [
            _phase("generate", "engine's", serving, BEYOND, tokens),
            _phase("sync", gpus, resident, outside + asleep + REFIT),
            _phase("sync", "engine's", serving, REFIT + BEYOND),
        ]
    return [
        *phases,
        _phase("logprob", gpus, forward, outside + asleep),
        Phase("train", gpus, _training_parts(report.peak), report.peak.total_band + asleep),
    ]


def _phase(name: str, gpus: str, parts: dict[str, int], more: Band, kv_tokens: Band | None = None) -> Phase:
    total = sum(parts.values())
    return Phase(name, gpus, parts, Band(total + more.low, total + more.high), kv_tokens)


def _kv_tokens(model: Model, engine: EngineSetup, room: int, bytes_per_token: int) -> Band:
    """Return how many tokens of keys and values fit into `room` bytes beside what a running engine needs."""
    needed = _profiled(model, engine) + GRAPHS + CONTEXT
    low, high = max(0, room - needed.high), max(0, room - needed.low)
    return Band(low // bytes_per_token, high // bytes_per_token)


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
        rank = layout.rank(model, stage * layout.tp)
        placement = vllm_placement(model, rank)
        weights = max(weights, 2 * sum(prod(tensor.shape) for tensor in placement.tensors.values()))
        if model.family.latent:
            each = s["RKV"] + s["DR"]
        else:
            each = 2 * max(s["NKV"] // layout.tp, 1) * s["D"]
        per_token = max(per_token, len(rank.layers) * each * engine.kv_width)
    return weights, per_token


def _profiled(model: Model, engine: EngineSetup) -> Band:
    """Return the memory of a forward of as many tokens as vLLM batches: a few hidden vectors, the
    widest product's, and logits of a batch of sequences."""
    s, t = model.symbols, engine.layout.tp
    width = 3 * s.get("F", 0) / t if len(model.moe_layers) < model.num_layers else 0.0
    if model.num_experts:
        k = int(model.value_of("moe_router_topk"))
        width = max(width, k * (s["H"] + 3 * s["FE"] / (1 if engine.layout.expert_parallel else t)))
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
