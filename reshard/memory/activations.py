"""Tensors that a layer keeps from its forward to its backward, in bytes for each token.

They are those of Megatron-Core 0.19 with Transformer Engine's layers and flash or cuDNN's fused
attention, in bf16 or with fp8 inputs of the linear layers. One row is one saved tensor: how many
elements of it a rank has for a token of its microbatch, and which of Megatron's
``--recompute-modules`` drop it.
"""

import re
from dataclasses import dataclass
from typing import NamedTuple

from reshard.core.errors import listed
from reshard.megatron.arguments import megatron_args
from reshard.megatron.stages import Stage
from reshard.memory.options import Recompute, TrainingSetup
from reshard.models.model import Model, has_experts

# Elements of a router's saved tensors for each expert: logits, scores and the map of chosen ones.
ROUTER = 3.5
# Bytes for a logit at the loss: bf16, fp32, and where torch.compile has made Megatron's own steps
# no longer write in place, or nothing is fused, their exponentials.
LOGIT = {"te": 6, "native": 10, "none": 10}


# Recomputed when nothing is left of what their layer's MLP or experts have kept, which is more.
OF_ATTENTION = ("core_attn", "mla_up_proj")
# Modules of a layer whose saved tensors have rows here, and arguments that add tensors without a module.
COUNTED = (
    "input_layernorm", "pre_mlp_layernorm", "self_attention.linear_qkv", "self_attention.linear_proj",
    "self_attention.linear_q_proj", "self_attention.linear_q_down_proj", "self_attention.linear_q_up_proj",
    "self_attention.linear_kv_down_proj", "self_attention.linear_kv_up_proj", "self_attention.q_layernorm",
    "self_attention.k_layernorm", "self_attention.kv_layernorm", "mlp.linear_fc1", "mlp.linear_fc2",
    "mlp.router", "mlp.experts", "mlp.shared_experts.linear_fc1", "mlp.shared_experts.linear_fc2",
)  # fmt: skip
UNCOUNTED_ARGS = ("attention_output_gate", "experimental_attention_variant", "window_size")


class Saved(NamedTuple):
    """A tensor that is kept: elements for a token, bytes of each, the modules whose recomputation drops it.
    `routed` is True where it grows with the rank's share of tokens."""

    name: str
    elements: float
    width: float
    dropped_by: tuple[str, ...] = ()
    routed: bool = False

    @property
    def bytes(self) -> float:
        """Bytes for each token."""
        return self.elements * self.width


@dataclass(frozen=True)
class Sizes:
    """The sizes that decide a layer's tensors."""

    tp: int
    ep: int
    etp: int
    sequence: int
    cp_a2a: bool
    dispatcher: str
    probs_after_experts: bool
    imbalance: float
    fp8: bool

    @staticmethod
    def of(setup: TrainingSetup, imbalance: float) -> "Sizes":
        layout, t = setup.layout, setup.training
        return Sizes(layout.tp, layout.ep, layout.expert_tp, layout.tp if setup.sequence_parallel else 1,
                     t.cp > 1 and t.cp_comm_type == "a2a", t.dispatcher, t.probs_after_experts, imbalance,
                     t.fp8 is not None)  # fmt: skip


def layer_tensors(model: Model, kind: str, z: Sizes) -> list[Saved]:
    """Return the rows of a decoder layer of this kind: of attention and an MLP or experts, or of one of
    them where each is a layer of its own."""
    if model.family.layer_letters:
        words = {"full": _attention, "dense": _mlp, "moe": _experts}
        return words[kind](model, z) if kind in words else []
    return _attention(model, z) + (_experts(model, z) if has_experts(kind) else _mlp(model, z))


def uncounted(model: Model) -> list[str]:
    """Return a sentence on the modules and arguments of a model's layers of whose activations nothing
    is known here, such as linear attention or an indexer; none if all are counted."""
    names = {row.megatron for kind in set(model.kinds) for row in model.rows("layer", kind) if row.megatron}
    counted = tuple(f"{module}." for module in COUNTED)
    modules = {
        re.split(r"\.(?:weight|bias|layer_norm)", name)[0] for name in names if not name.startswith(counted)
    }
    unknown = sorted(module.removeprefix("self_attention.") for module in modules)
    args = megatron_args(model)
    unknown += [name for name in UNCOUNTED_ARGS if args.get(name)]
    if not unknown:
        return []
    return [
        (
            "activations are those of ordinary attention and experts: what layers keep for "
            f"{listed(unknown, 4)} is not counted, so that more or less may be needed"
        )
    ]


def _linear(z: Sizes) -> float:
    """Return the bytes of an element that a linear layer keeps for its weight's gradient."""
    return 1.0 if z.fp8 else 2.0


def _attention(model: Model, z: Sizes) -> list[Saved]:
    s, t, p, linear = model.symbols, z.tp, z.sequence, _linear(z)
    hidden, heads = s["H"], s["NQ"] / t
    rows = [Saved("attention norm, in", hidden / p, 2)]
    if model.family.latent:
        q, kv, dn, dr, dv = s.get("RQ", 0), s["RKV"], s["DN"], s["DR"], s["DV"]
        rows += [
            Saved("attention norm, out", hidden / p, linear, ("layernorm",)),
            Saved("latents", (2 * q + 2 * kv + dr) / p, 2),
            Saved("queries, keys, values", heads * (2 * dn + 2 * dr + dv), 2, ("mla_up_proj",)),
        ]
        out = heads * dv
    else:
        d, groups = s["D"], max(s["NKV"] / t, 1)
        rows += [
            Saved("attention norm, out", hidden / p, linear),
            Saved("queries, keys, values", (heads + 2 * groups) * d, 2),
        ]
        if megatron_args(model).get("qk_layernorm"):
            # A norm over all heads keeps them in fp32, and normalized in bf16.
            width = 2 if _norms_each_head(model) else 6
            rows.append(Saved("norms of queries and keys, in", (heads + groups) * d, width))
        out = heads * d
    rows += [Saved("attention, out", out, 2), Saved("attention, logsumexp", heads, 4)]
    if z.fp8:
        rows.append(Saved("attention, out in fp8", out, 1))
    if z.cp_a2a:
        rows.append(Saved("attention, out before all-to-all", out, 2))
    return rows


def _norms_each_head(model: Model) -> bool:
    """Return True if queries are normalized head by head, as Transformer Engine's norm does."""
    norms = (row for row in model.family.rows["layer"] if row.megatron == "self_attention.q_layernorm.weight")
    return all(row.shape == "D" for row in norms)


def _products(model: Model) -> int:
    """Return the widths that the first product of an MLP or an expert has: 2 of gate and up, 1 without a
    gate."""
    return 1 if megatron_args(model).get("squared_relu") else 2


def _mlp(model: Model, z: Sizes) -> list[Saved]:
    hidden, wide, linear = model.symbols["H"] / z.sequence, model.symbols["F"] / z.tp, _linear(z)
    return [
        Saved("MLP norm, in", hidden, 2),
        Saved("MLP norm, out", hidden, linear, ("mlp",)),
        Saved("gate and up", _products(model) * wide, 2, ("mlp",)),
        Saved("activation", wide, linear, ("mlp",)),
    ]


def _experts(model: Model, z: Sizes) -> list[Saved]:
    s, linear = model.symbols, _linear(z)
    hidden, wide = s["H"], s["FE"] / z.etp
    share = routed_share(model, z)
    rows = [
        Saved("MLP norm, in", hidden / z.sequence, 2),
        Saved("MLP norm, out", hidden / z.sequence, 2, ("layernorm",)),
        Saved("router", ROUTER * s["E"] / z.tp, 2, ("moe",)),
        Saved("experts, in", share * hidden, linear, ("moe",), True),
        Saved("experts, gate and up", _products(model) * share * wide, 2, ("moe",), True),
        Saved("experts, activation", share * wide, linear, ("moe", "moe_act"), True),
    ]
    if z.probs_after_experts:
        rows.append(Saved("experts, out", share * hidden, 2, ("moe",), True))
    if z.dispatcher == "allgather":
        rows.append(Saved("gathered tokens", z.ep * z.etp / z.tp * hidden, 2, ("moe",)))
    if model.shared_width:
        shared = model.shared_width / z.tp
        drop = ("moe", "shared_experts")
        if z.fp8:
            rows.append(Saved("shared experts, in", hidden / z.sequence, 1, drop))
        rows += [
            Saved("shared experts, gate and up", _products(model) * shared, 2, drop),
            Saved("shared experts, activation", shared, linear, drop),
        ]
    return rows


def routed_share(model: Model, z: Sizes) -> float:
    """Return the rows that a rank's experts get for each token of its microbatch."""
    k = int(model.value_of("moe_router_topk"))
    return z.imbalance * k * z.etp / z.tp


def extra_rows(model: Model, chunk: Stage, z: Sizes) -> list[Saved]:
    """Return the rows of a virtual stage besides its decoder layers: the last norm, and what only
    MTP layers have."""
    hidden = model.symbols["H"] / z.sequence
    rows = [Saved("final norm", 2 * hidden, 2)] if chunk.output else []
    if chunk.mtp:
        each = "embedding, hidden, both joined, final norm"
        rows.append(Saved(f"MTP: {each}", 6 * hidden * model.mtp_layers, 2))
    return rows


class ChunkBytes(NamedTuple):
    """Bytes of a virtual stage on a rank for one microbatch: what it keeps until its backward, and what its
    forward and its backward need besides for their time. `tensors` is `kept` by name."""

    kept: float
    forward: float
    backward: float
    tensors: dict[str, float]


def chunk_bytes(setup: TrainingSetup, chunk: Stage, imbalance: float) -> ChunkBytes:
    """Return the activations of a virtual stage for a microbatch, in bytes.

    Full recomputation keeps the input of each group of layers, and has one group whole in its backward;
    selective recomputation has what it drops back for one layer at a time.
    """
    z, tokens, r = Sizes.of(setup, imbalance), setup.tokens, setup.recompute
    kinds = [setup.model.kinds[layer] for layer in chunk.layers]
    mtp = [*setup.model.mtp_kinds] * setup.model.mtp_layers if chunk.mtp else []
    tensors: dict[str, float] = {}

    def keep(name: str, amount: float) -> None:
        tensors[name] = tensors.get(name, 0.0) + amount * tokens

    # What the backward of one layer, or group, makes: again, and as gradients.
    backward = 0.0
    gradients = {kind: _gradients(setup.model, kind, z) for kind in {*kinds, *mtp}}
    whole, whole_layers = _recomputed(r, kinds)
    if r.method == "uniform":  # Megatron recomputes MTP layers one by one, and not at all by block
        whole, mtp = whole + [[kind] for kind in mtp], []
    for layers in whole:
        keep("inputs of recomputed layers", 2 * setup.model.symbols["H"] / z.sequence)
        again = sum(_layer(setup.model, kind, z)[0] for kind in layers)
        backward = max(backward, again + max(gradients[kind] for kind in layers))
    modules = r.modules if r.method == "selective" else frozenset()
    rest = kinds[whole_layers:] + mtp
    of_rest = of_rest_gradients = 0.0
    for kind in dict.fromkeys(rest):
        n, dropped = rest.count(kind), dict[str, float]()
        for row in _layer(setup.model, kind, z)[1]:
            module = next((name for name in row.dropped_by if name in modules), None)
            if module is None:
                keep(row.name, n * row.bytes)
                of_rest += n * row.bytes
            elif module not in OF_ATTENTION:
                dropped[module] = dropped.get(module, 0.0) + row.bytes
        # Each module is recomputed when its own backward comes.
        of_rest_gradients = max(of_rest_gradients, gradients[kind] + max(dropped.values(), default=0.0))
    # Layers that are recomputed by block come last, when nothing is left of the others.
    backward = max(backward - of_rest, of_rest_gradients)
    for row in extra_rows(setup.model, chunk, z):
        keep(row.name, row.bytes)
    loss = _loss(setup, chunk)
    if chunk.mtp:
        keep("MTP: logits", 4 * setup.model.mtp_layers * _vocab(setup))
    # Of the last norm nothing is left when the layers' backward begins.
    head = tensors.get("final norm", 0.0)
    return ChunkBytes(sum(tensors.values()), loss, max(tokens * backward - head, loss), tensors)


def _recomputed(r: Recompute, kinds: list[str]) -> tuple[list[list[str]], int]:
    """Return the groups of layers that are recomputed whole, and how many layers they have."""
    if r.method == "uniform":
        return [kinds[i : i + r.layers] for i in range(0, len(kinds), r.layers)], len(kinds)
    if r.method == "block":
        return [[kind] for kind in kinds[: r.layers]], min(r.layers, len(kinds))
    return [], 0


_LAYERS: dict[tuple, tuple[Model, float, list[Saved]]] = {}


def _layer(model: Model, kind: str, z: Sizes) -> tuple[float, list[Saved]]:
    """Return the bytes for a token of a layer with nothing dropped, and its rows."""
    cached = _LAYERS.get((id(model), kind, z))
    if cached is None or cached[0] is not model:
        if len(_LAYERS) > 4096:
            _LAYERS.clear()
        rows = layer_tensors(model, kind, z)
        cached = _LAYERS[id(model), kind, z] = (model, sum(row.bytes for row in rows), rows)
    return cached[1], cached[2]


def _gradients(model: Model, kind: str, z: Sizes) -> float:
    """Return the bytes for a token that a layer's backward has at once besides what was saved:
    gradients into and out of its widest pair of products; of experts that of their tokens three
    times, before and after the two permutations."""
    s = model.symbols
    if has_experts(kind):
        return 6 * routed_share(model, z) * s["H"]
    return 2 * (2 * s["H"] + 2 * s["F"] / z.tp)


def _vocab(setup: TrainingSetup) -> float:
    """Return the rows of the vocabulary on a rank."""
    return setup.model.symbols["V"] / setup.layout.tp


def _loss(setup: TrainingSetup, chunk: Stage) -> float:
    """Return the bytes of logits and their gradients: all that the cross entropy makes of them, or
    bf16 gradients and those of the output layer's weight."""
    if not chunk.output:
        return 0.0
    vocab, hidden = _vocab(setup), setup.model.symbols["H"]
    return max(
        LOGIT[setup.training.cross_entropy] * setup.tokens * vocab,
        2 * setup.tokens * vocab + 2 * vocab * hidden,
    )
