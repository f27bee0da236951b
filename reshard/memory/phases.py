"""The phases of an RL step: what a trainer and a vLLM hold in each, on the same GPUs or on others.

What an engine takes besides weights and keys and values is measured by vLLM itself when it starts, so it is a
band here; so is what a sleeping engine leaves on the GPU.
"""

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from reshard.core.errors import ReshardError, listed
from reshard.engines.vllm.layout import VllmLayout, vllm_placement
from reshard.memory.activations import Sizes, layer_tensors
from reshard.memory.options import GIB, Plan
from reshard.memory.outside import CONTEXT, Band
from reshard.memory.report import MemoryReport
from reshard.models.model import Model

MOVABLE = ("weights", "grads", "optimizer")
# Left by a sleeping vLLM: its context, communicators and CUDA graphs. Up to 25 GiB were reported.
RESIDUE = Band(1 * GIB, 4 * GIB)
# Of CUDA graphs and kernels of a running vLLM.
GRAPHS = Band(int(0.3 * GIB), int(2.5 * GIB))
# What a running vLLM takes that it did not foresee when it took its share of the GPU. Measured on an H200: 0.8 GiB
# when it had started, 3.1 when it had generated.
BEYOND = Band(int(0.5 * GIB), int(3.5 * GIB))
# A refit's staging, and its table of copies.
REFIT = Band(64 << 10, 64 << 20)


@dataclass(frozen=True)
class Engine:
    """A vLLM beside the trainer. `utilization` is its ``gpu_memory_utilization``; `colocated` None means on the
    trainer's GPUs where it has no more ranks. `offload` is what of the trainer is in host memory while the
    engine generates, and for gradients and optimizer whenever nothing is trained. `kv_width` is the bytes of
    an element of its cache, `batched_tokens` its ``max_num_batched_tokens``.
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
    """Bytes on the fullest GPU of a phase, by what they are; `gpus` says whose GPUs. `kv_tokens` are the tokens
    of keys and values that fit for each engine (of a data parallel engine: for each of its parts)."""

    name: str
    gpus: str
    parts: dict[str, int]
    total_band: Band
    kv_tokens: Band | None = None


def phases_of(plan: Plan, report: MemoryReport, engine: Engine) -> list[Phase]:
    """The phases generate, sync, logprob and train. Raises ReshardError where the GPU's memory is not known, or
    the engine cannot be laid out."""
    if report.gpu_bytes is None:
        raise ReshardError("--engine needs --gpu-memory: the engine takes a share of it")
    model, layout = plan.model, engine.layout
    layout.check(model)
    same = layout.world_size <= plan.ranks if engine.colocated is None else engine.colocated
    if same and layout.world_size > plan.ranks:
        raise ReshardError(
            f"the engine's {layout.world_size} ranks do not fit on the trainer's {plan.ranks} GPUs: --separate"
        )
    claim = int(engine.utilization * report.gpu_bytes)
    weights, per_token = _engine_bytes(model, engine)
    peak = _profiled(model, engine)
    taken = peak + GRAPHS + CONTEXT
    room = Band(max(0, claim - weights - taken.high), max(0, claim - weights - taken.low))
    tokens = Band(room.low // per_token, room.high // per_token)

    stage = max(report.stages, key=lambda each: each.static)
    parts = {"weights": stage.weights, "grads": stage.grads, "optimizer": stage.main_params + stage.moments}
    kept = {f"trainer's {name}": n for name, n in parts.items() if name not in engine.offload and n}
    idle = {name: n for name, n in kept.items() if name != "trainer's weights"}
    buffers = {"Transformer Engine's buffers": stage.engine_buffers} if stage.engine_buffers else {}
    nothing = Band(0, 0)
    outside = stage.outside + (_left_by_allocator(plan) if engine.offload else nothing)

    def phase(name: str, gpus: str, held: dict[str, int], beside: Band, kv: Band | None = None) -> Phase:
        total = sum(held.values())
        return Phase(name, gpus, held, Band(total + beside.low, total + beside.high), kv)

    served = {"engine: weights, keys and values, all else": claim}
    asleep = RESIDUE if same else nothing
    where = "both" if same else "trainer's"
    forward = (
        {"trainer's weights": stage.weights}
        | idle
        | buffers
        | {"one layer's forward, logits": _forward(plan)}
    )
    found = [
        phase("generate", "both", served | kept | buffers, outside + BEYOND, tokens)
        if same
        else phase("generate", "engine's", served, BEYOND, tokens)
    ]
    sync = {"trainer's weights": stage.weights} | idle | buffers
    found.append(
        phase("sync", where, sync | ({"engine: weights": weights} if same else {}), outside + asleep + REFIT)
    )
    if not same:
        found.append(phase("sync", "engine's", served, REFIT + BEYOND))
    found.append(phase("logprob", where, forward, outside + asleep))
    fullest = report.peak
    train = {
        "trainer's weights": fullest.weights,
        "trainer's grads": fullest.grads,
        "trainer's optimizer": fullest.main_params + fullest.moments,
        "Transformer Engine's buffers": fullest.engine_buffers,
        "activations and transients": fullest.activations + fullest.transient,
    }
    band = fullest.total_band
    held = sum(train.values())
    found.append(Phase("train", where, train, Band(band.low, band.high) + asleep))
    assert held <= band.high
    return found


def _engine_bytes(model: Model, engine: Engine) -> tuple[int, int]:
    """Of the fullest of an engine's ranks: bytes of weights, and of keys and values for each token.

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


def _profiled(model: Model, engine: Engine) -> Band:
    """What a forward of as many tokens as vLLM batches takes: a few hidden vectors, the widest product's, and
    logits of a batch of sequences."""
    s, t = model.symbols, engine.layout.tp
    width = 3 * s.get("F", 0) / t if "dense" in model.kinds else 0.0
    if model.num_experts:
        k = int(model.value_of("moe_router_topk"))
        width = max(width, k * (s["H"] + 3 * s["FE"] / (1 if engine.layout.expert_parallel else t)))
    tokens = 2 * engine.batched_tokens * (4 * s["H"] + width)
    logits = 256 * s["V"] * 4
    return Band(int(tokens / 2 + logits), int(1.5 * tokens + 4 * logits))


def _left_by_allocator(plan: Plan) -> Band:
    """What torch keeps of freed memory when the trainer offloads: segments of its logits, in bf16 and fp32, in which
    cuBLAS's workspaces of 32 MiB lie (measured: both); nothing with expandable segments."""
    return Band(0, int(plan.tokens * _logits(plan)))


def _forward(plan: Plan) -> int:
    """A forward without a backward: one layer's tensors, or the logits."""
    sizes = Sizes.of(plan, plan.training.imbalance or 1.0)
    layer = max(
        sum(row.bytes for row in layer_tensors(plan.model, kind, sizes))
        for kind in dict.fromkeys(plan.model.kinds)
    )
    return int(plan.tokens * max(layer, _logits(plan)))


def _logits(plan: Plan) -> float:
    """Bytes of a token's, in bf16 and fp32."""
    return 6 * plan.model.symbols["V"] / plan.layout.tp
