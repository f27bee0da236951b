"""Bytes that a rank holds from start to end: weights, gradients, main parameters, moments.

Shapes come from the table rows that convert the weights, so each matrix has the shape that it has
on the rank. Buffers are padded as Megatron-Core's distributed optimizer pads them
(`optimizer/param_layout.py`): each parameter starts at a multiple of 64 elements, a bucket ends at
one of lcm(data parallel ranks, 128); a tied embedding is in a bucket of its own. With
``--overlap-grad-reduce`` there are more buckets, which end so too: some KB more.
"""

import re
from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache
from math import lcm, prod

from reshard.core.errors import ReshardError
from reshard.megatron.parameters import padded_vocab_size
from reshard.megatron.stages import Stage
from reshard.memory.options import WIDTHS, TrainingSetup
from reshard.models.model import Model
from reshard.models.tables import Row

START, END = 64, 128
# What a checkpoint has in sections, such as ``in_proj.weight.query``, is one parameter of a live model.
SECTION = re.compile(r"(\.(?:weight|bias))\.\w+$")


@dataclass(frozen=True)
class Weight:
    """A parameter of a block as one rank holds it: `count` of them, one for each local expert. `trained` is
    False for a router's bias, which is a buffer."""

    name: str
    shape: tuple[int, ...]
    count: int
    expert: bool
    trained: bool

    @property
    def linear(self) -> bool:
        """True where Transformer Engine multiplies by it; the router and the ends of the model are
        Megatron's."""
        return len(self.shape) == 2 and "router" not in self.name

    @property
    def elements(self) -> int:
        """Elements of all of them together."""
        return self.count * prod(self.shape)


@dataclass(frozen=True)
class Static:
    """Bytes on one rank; `host` is what of the optimizer lies in the memory of the host instead. `linear` are
    elements of Transformer Engine's weights, `largest` bytes of a gradient that is made apart and then added,
    where products do not add to gradients themselves (a layer's local experts have theirs together). `step`
    is what a step of the optimizer needs for its time."""

    weights: int = 0
    grads: int = 0
    main_params: int = 0
    moments: int = 0
    engine_buffers: int = 0
    host: int = 0
    linear: int = 0
    largest: int = 0
    step: int = 0

    @property
    def total(self) -> int:
        """Bytes on the GPU."""
        return self.weights + self.grads + self.main_params + self.moments + self.engine_buffers


def static_bytes(setup: TrainingSetup, chunks: list[Stage]) -> Static:
    """Return the bytes that a rank of the pipeline stage with these chunks (virtual stages) holds."""
    t = setup.training
    weights = elements_main = linear = fixed = largest = 0
    grads = main = moments = host = step = 0
    shapes: set[tuple[int, ...]] = set()
    for chunk in chunks:
        held, tied = chunk_weights(setup, chunk)
        for expert, shards in ((False, setup.dense_shards), (True, setup.expert_shards)):
            trained = [(weight, n) for weight, n in held if weight.expert == expert and weight.trained]
            elements = _buffer(trained, tied if not expert else (), t.distributed_optimizer, shards)
            share = elements // shards  # a buffer's end is a multiple of the shards
            weights += 2 * elements
            grads += WIDTHS[t.grads] * elements
            elements_main += share
        fixed += sum(4 * weight.elements * n for weight, n in held if not weight.trained)
        linear += sum(
            weight.elements * n for weight, n in held if weight.linear and not weight.name.startswith(ENDS)
        )
        if not t.gradient_accumulation_fusion:
            largest = max([largest, *(2 * weight.elements for weight, _ in held if len(weight.shape) == 2)])
        shapes |= {weight.shape for weight, _ in held if weight.linear and not weight.name.startswith(ENDS)}
    kept = 1 - t.optimizer_offload
    main = round(elements_main * t.main_width * kept)
    moments = round(elements_main * (WIDTHS[t.exp_avg] + WIDTHS[t.exp_avg_sq]) * kept)
    whole = elements_main * (t.main_width + WIDTHS[t.exp_avg] + WIDTHS[t.exp_avg_sq])
    host = whole - main - moments
    if t.grads != "fp32" and not t.precision_aware:
        step = round(4 * elements_main * kept)  # the shard's gradients in fp32
    buffers = 2 * sum(map(prod, shapes)) if t.gradient_accumulation_fusion else 0
    return Static(weights + fixed, grads, main, moments, buffers, host, linear, largest, step)


ENDS = ("embedding.", "output_layer.")


@lru_cache(maxsize=4096)
def _block(
    model: "_Key", block: str, kind: str, tp: int, ep: int, etp: int, vocab: int, impl: str
) -> tuple[Weight, ...]:
    """Return the parameters of a block as every rank holds them."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in model.model.rows(block, kind):
        if row.arrangement not in ("ignored", "copy"):
            groups[SECTION.sub(r"\1", row.megatron)].append(row)
    weights = []
    for name, rows in groups.items():
        shapes = [model.model.shape(row.shape) for row in rows]
        first = sum(shape[0] for shape in shapes)
        if rows[0].arrangement == "vocab":
            first = padded_vocab_size(first, vocab, tp)
        shape = [first, *shapes[0][1:]]
        split = rows[0].split_of(impl)
        if split is not None:
            size = {"tp": tp, "etp": etp}[split[0]]
            if shape[split[1]] % size:
                raise ReshardError(f"--{split[0]} {size} does not divide the {shape[split[1]]} of {name}")
            shape[split[1]] //= size
        experts = model.model.num_experts // ep if rows[0].of_experts else 1
        trained = not rows[0].fp32  # the router's bias is a buffer
        # With a count of tokens beside it, where Megatron updates it.
        buffers = 1 + bool(model.model.family.megatron.get("moe_router_enable_expert_bias"))
        count = experts if trained else buffers
        weights.append(Weight(name, tuple(shape), count, rows[0].of_experts, trained))
    return tuple(weights)


class _Key:
    """A model as a key of the cache: by identity, since its config is a dict."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and other.model is self.model

    def __hash__(self) -> int:
        return id(self.model)


def chunk_weights(setup: TrainingSetup, chunk: Stage) -> tuple[list[tuple[Weight, int]], tuple[Weight, ...]]:
    """Return (parameter, times) of a virtual stage on one rank, and the parameters tied to another
    stage's."""
    model, layout, t = setup.model, setup.layout, setup.training
    key, sizes = (
        _Key(model),
        (layout.tp, layout.ep, layout.expert_tp, t.make_vocab_size_divisible_by, t.transformer_impl),
    )

    def block(name: str, kind: str = "") -> tuple[Weight, ...]:
        return _block(key, name, kind, *sizes)

    held: list[tuple[Weight, int]] = []
    for kind in dict.fromkeys(model.kinds[layer] for layer in chunk.layers):
        n = sum(model.kinds[layer] == kind for layer in chunk.layers)
        held += [(weight, n) for weight in block("layer", kind)]
    outside = block("model")
    embedding = next(weight for weight in outside if weight.name.startswith("embedding."))
    tied: list[Weight] = []
    if chunk.embedding or chunk.mtp:
        held.append((embedding, 1))
        if layout.pp > 1 and (model.tied or model.mtp_layers):
            tied.append(embedding)
    if chunk.mtp:
        layers = (weight for kind in model.mtp_kinds for weight in block("layer", kind))
        for weight in (*block("mtp", model.mtp_kinds[-1]), *layers):
            held.append((weight, model.mtp_layers))
    if chunk.output:
        held += [(weight, 1) for weight in outside if weight.name.startswith("output_layer.")]
        if model.tied and not chunk.embedding:
            held.append((embedding, 1))
            tied.append(embedding)
    # With MTP layers the last norm is where the last decoder layer is (`has_final_layernorm_in_this_stage`).
    if model.num_layers - 1 in chunk.layers if model.mtp_layers else chunk.output:
        held += [(weight, 1) for weight in outside if not weight.name.startswith(ENDS)]
    return held, tuple(tied)


def _buffer(held: list[tuple[Weight, int]], tied: tuple[Weight, ...], padded: bool, shards: int) -> int:
    """Return the elements of a buffer of parameters."""
    if not padded:
        return sum(weight.elements * n for weight, n in held)
    end = lcm(shards, END)
    rest = sum(_up(prod(weight.shape), START) * weight.count * n for weight, n in held)
    own = [_up(prod(weight.shape), START) for weight in tied]
    return sum(_up(n, end) for n in (rest - sum(own), *own))


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
