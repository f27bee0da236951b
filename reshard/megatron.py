"""Megatron's parameters, derived from a table and a model, and how a ``torch_dist`` checkpoint arranges them.

`parameters` expands a table's rows into Megatron parameters made of canonical pieces. `chunks_to_write` cuts them the way the
ranks of a layout would save them; `placement_of_keys` reads any checkpoint's chunks, or a live model's shards, as a placement.

Megatron has two schemes of keys. Layers of one kind are stacked, ``decoder.layers.mlp.linear_fc1.weight [layers, ...]``; where
kinds are mixed (and always for MTP) every layer has keys of its own, ``decoder.layers.3.mlp...``. Experts are stacked in both;
a third spelling, ``singleton_local_shards``, gives every expert and each half of SwiGLU its own key, and is only read.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from reshard.boxes import Box, whole
from reshard.errors import ReshardError, listed
from reshard.formats.torch_dist import Key
from reshard.layout import Layout
from reshard.model import Model
from reshard.placement import LocalTensor, Part, Placement
from reshard.tables import Row

Keys = dict[str, Key]

TRANSFORMER_IMPLS = ("transformer_engine", "local")

# What a training checkpoint holds besides weights; left alone, and said so.
NOT_WEIGHTS = {
    "optimizer state": ("optimizer.", "chained_", "param_groups", "shard_"),
    "RNG state": ("rng_state",),
    "rerun state": ("rerun_state_machine_state",),
    "common state": ("common_state",),
}


@dataclass(frozen=True, slots=True)
class Parameter:
    """One Megatron parameter of one layer (and one expert), whole, as if nothing were split.

    `parts` place canonical boxes in it, `halves` is 2 where gate and up are split apart, `padded` is the number of rows after
    the vocabulary that are zero.
    """

    prefix: str
    name: str
    local_name: str
    layer: int | None
    expert: int | None
    mtp: bool
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    split: tuple[str, int] | None
    halves: int = 1
    padded: int = 0
    fp32: bool = False


@dataclass(frozen=True)
class Mapping:
    """A model's table, expanded: canonical shapes, copies and Megatron parameters.

    `copies` maps a canonical name to the name that has the same bytes; `ignored` and `optional` are canonical names that may be
    present; `fp32` are those that are never cast down.
    """

    shapes: dict[str, tuple[int, ...]]
    parameters: list[Parameter]
    copies: dict[str, str]
    ignored: frozenset[str]
    optional: frozenset[str]
    fp32: frozenset[str]


def expand(model: Model, transformer_impl: str = "transformer_engine", padded_vocab: int | None = None) -> Mapping:
    """Expand a model's table. `padded_vocab` is Megatron's number of vocabulary rows (default: no padding)."""
    found = _Expansion(model, transformer_impl, padded_vocab)
    found.block("", "", model.rows("model"))
    for layer, kind in enumerate(model.kinds):
        found.block(f"model.layers.{layer}.", "decoder.layers.", model.rows("layer", kind), layer)
    for index in range(model.mtp_layers):
        layer = model.num_layers + index
        found.block(f"model.layers.{layer}.", f"mtp.layers.{index}.", model.rows("mtp", model.kinds[-1]), index, mtp=True)
        found.block(
            f"model.layers.{layer}.", f"mtp.layers.{index}.transformer_layer.", model.rows("layer", model.kinds[-1]), index, mtp=True
        )
    copies = {name: found.primary[megatron] for name, megatron in found.copies.items()}
    return Mapping(found.shapes, found.parameters, copies, frozenset(found.ignored), frozenset(found.optional), frozenset(found.fp32))


class _Expansion:
    def __init__(self, model: Model, transformer_impl: str, padded_vocab: int | None) -> None:
        self.model, self.impl, self.padded_vocab = model, transformer_impl, padded_vocab
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.parameters: list[Parameter] = []
        self.copies: dict[str, str] = {}
        self.primary: dict[str, str] = {}
        self.ignored: set[str] = set()
        self.optional: set[str] = set()
        self.fp32: set[str] = set()

    def block(self, hf_prefix: str, prefix: str, rows: list[Row], layer: int | None = None, mtp: bool = False) -> None:
        groups: dict[str, list[Row]] = defaultdict(list)
        for row in rows:
            if row.arrangement == "ignored":
                self.ignored.add(hf_prefix + row.hf)
            elif row.arrangement == "copy":
                self.copies[hf_prefix + row.hf] = row.megatron
                self.shapes[hf_prefix + row.hf] = self.model.shape(row.shape)
            else:
                groups[row.megatron].append(row)
            if row.optional:
                self.optional.add(hf_prefix + row.hf)
        for megatron, group in groups.items():
            experts = range(self.model.num_experts) if "{expert}" in group[0].hf else [None]
            shapes = [self.model.shape(row.shape) for row in group]
            for expert in experts:
                names = [hf_prefix + (row.hf if expert is None else row.hf.replace("{expert}", str(expert))) for row in group]
                self._parameter(prefix, megatron, group, names, shapes, layer, expert, mtp)

    def _parameter(self, prefix, megatron, rows, names, shapes, layer, expert, mtp) -> None:
        row, rest = rows[0], shapes[0][1:]
        length, padded, halves = sum(shape[0] for shape in shapes), 0, 1
        kinds = [r.arrangement for r in rows]
        if kinds == ["q", "k", "v"]:
            parts = _query_groups(names, shapes, self.model.symbols["NKV"])
        elif kinds == ["gate", "up"]:
            halves = 2
            parts = [Part(n, whole(s), (i * s[0], *(0,) * len(rest))) for i, (n, s) in enumerate(zip(names, shapes, strict=True))]
        elif kinds in (["plain"], ["vocab"]):
            parts = [Part(names[0], whole(shapes[0]), (0,) * len(shapes[0]))]
            if kinds == ["vocab"] and self.padded_vocab:
                padded = self.padded_vocab - length
                length = self.padded_vocab
        else:
            raise ValueError(f"{self.model.family.name}: {megatron} is made of {kinds}, which no rule arranges")
        local = megatron if row.local == "=" else row.local
        self.shapes.update(zip(names, shapes, strict=True))
        self.primary.setdefault(megatron, names[0])
        if row.fp32:
            self.fp32.update(names)
        split = row.split_of(self.impl)
        self.parameters.append(
            Parameter(prefix, megatron, local, layer, expert, mtp, (length, *rest), tuple(parts), split, halves, padded, row.fp32)
        )


def _query_groups(names: list[str], shapes: list[tuple[int, ...]], groups: int) -> list[Part]:
    """Rows of a fused QKV parameter: for each query group its queries, its key, its value."""
    rows = [shape[0] // groups for shape in shapes]
    rest, parts = shapes[0][1:], []
    for group in range(groups):
        at = group * sum(rows)
        for name, n in zip(names, rows, strict=True):
            parts.append(Part(name, Box((group * n, *(0,) * len(rest)), (n, *rest)), (at, *(0,) * len(rest))))
            at += n
    return parts


def padded_vocab_size(vocab: int, divisible_by: int, tp: int) -> int:
    """Vocabulary rows in Megatron: the next multiple of ``--make-vocab-size-divisible-by`` times TP."""
    multiple = divisible_by * tp
    return -(-vocab // multiple) * multiple


class Chunk(NamedTuple):
    """A chunk as one rank saves it. Its local tensor has the dims of the parameter; `offsets` and `sizes` are the key's."""

    key: str
    key_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    rank: int
    tensor: LocalTensor
    fp32: bool


def key_of(parameter: Parameter, stacked: bool, transformer_impl: str) -> str:
    """The checkpoint key of a parameter; its index among the stacked ones is `index_of`."""
    name = parameter.local_name if transformer_impl == "local" else parameter.name
    if parameter.prefix == "decoder.layers." and not stacked:
        return f"{parameter.prefix}{parameter.layer}.{name}"
    return parameter.prefix + name


class NewObject(NamedTuple):
    """An object as one rank saves it: `key` with its position among the stacked layers and experts."""

    key: str
    rank: int


def chunks_to_write(model: Model, mapping: Mapping, layout: Layout, transformer_impl: str) -> Iterator[Chunk]:
    """Every chunk that the ranks of a layout save, the way Megatron's own ``dist_checkpointing.save`` cuts them.

    A parameter that several ranks hold alike is saved by the first of them; local tensors are named by (key, offsets).
    """
    first_rank = _first_ranks(model, layout)
    for p in mapping.parameters:
        key, base, stack = key_of(p, model.uniform, transformer_impl), first_rank(p), _stack(p, model)
        key_shape = (*(n for _, n in stack), *p.shape)
        for rank, box in _cuts(p, layout):
            tensor = LocalTensor((key, (*(i for i, _ in stack), *box.offsets)), box.lengths, *_inside(p, box), holder=base + rank)
            yield Chunk(key, key_shape, tensor.id[1], (*(1 for _ in stack), *box.lengths), base + rank, tensor, p.fp32)


def extra_states_to_write(model: Model, mapping: Mapping, layout: Layout, transformer_impl: str) -> Iterator[NewObject]:
    """The ``_extra_state`` objects that a model of these layers asks for when it loads; they hold nothing without fp8.

    Every linear layer has one, whatever its implementation; Transformer Engine's norms have one too, and in some of its releases
    (not in 2.16) the core attention.
    """
    first_rank = _first_ranks(model, layout)
    engine = transformer_impl == "transformer_engine"
    for p in mapping.parameters:
        module, _, kind = p.name.rpartition(".")
        norm = module.rpartition(".")[2] in NORMS
        if kind != "weight" or module in WITHOUT_STATE or (norm and not engine):
            continue
        modules = [module]
        if engine and module == "self_attention.linear_proj":
            modules.append("self_attention.core_attention")
        stack = _stack(p, model) or [(0, 1)]
        place = "shard_" + ".".join(str(i) for i, _ in stack) + "_" + ".".join(str(n) for _, n in stack)
        prefix = key_of(p, model.uniform, "transformer_engine").removesuffix(p.name)
        for name in modules:
            yield NewObject(f"{prefix}{name}._extra_state/{place}", first_rank(p))


NORMS = {"input_layernorm", "pre_mlp_layernorm", "q_layernorm", "k_layernorm", "final_layernorm", "enorm", "hnorm"}
WITHOUT_STATE = {"embedding.word_embeddings", "output_layer", "mlp.router"}


def _stack(p: Parameter, model: Model) -> list[tuple[int, int]]:
    """A parameter's (index, size) in the stacked dims that come before its own."""
    layers = [(p.layer or 0, model.num_layers)] if p.prefix == "decoder.layers." and model.uniform else []
    return layers + ([] if p.expert is None else [(p.expert, model.num_experts)])


def _first_ranks(model: Model, layout: Layout) -> Callable[[Parameter], int]:
    """The first of the ranks that hold a parameter, in Megatron's order of ranks."""
    stages_of, per_stage, local_experts = _stages_of(model, layout), layout.ranks_per_stage(model), model.num_experts // layout.ep

    def first_rank(p: Parameter) -> int:
        return stages_of(p)[0] * per_stage + (layout.expert_tp * (p.expert // local_experts) if p.expert is not None else 0)

    return first_rank


def _stages_of(model: Model, layout: Layout) -> Callable[[Parameter], list[int]]:
    """The pipeline ranks that hold a parameter; the one that saves it comes first."""
    stages = layout.stages(model)
    stage_of_layer = {layer: rank for rank, virtual in enumerate(stages) for stage in virtual for layer in stage.layers}
    first, last, mtp = (
        next((rank for rank, virtual in enumerate(stages) for stage in virtual if getattr(stage, what)), 0)
        for what in ("embedding", "output", "mtp")
    )
    # A tied output layer and MTP layers have a copy of the embedding with them.
    copies = ([last] if "tied" in model.flags else []) + ([mtp] if model.mtp_layers else [])

    def stages_of(p: Parameter) -> list[int]:
        if p.mtp:
            return [mtp]
        if p.layer is not None:
            return [stage_of_layer[p.layer]]
        return list(dict.fromkeys([first, *copies])) if p.name.startswith("embedding.") else [last]

    return stages_of


class LiveShard(NamedTuple):
    """A shard as a trainer's ranks hold it in memory: the local tensor, and all ranks that have the same one."""

    tensor: LocalTensor
    ranks: tuple[int, ...]


def live_shards(model: Model, layout: Layout, ranks_per_stage: int) -> Callable[[Parameter], list[LiveShard]]:
    """The shards of a parameter on a trainer whose pipeline stages have `ranks_per_stage` ranks each; simulated, nothing is asked.

    Within a stage, ranks that differ in data parallelism only follow each other every TP ranks, for experts every ETP times EP.
    """
    stages_of, local_experts, etp = _stages_of(model, layout), model.num_experts // layout.ep, layout.expert_tp

    def shards(p: Parameter) -> list[LiveShard]:
        found = []
        for index, box in _cuts(p, layout):
            if p.expert is not None:
                within: Iterable[int] = range(p.expert // local_experts * etp + index, ranks_per_stage, etp * layout.ep)
            else:
                within = range(index, ranks_per_stage, layout.tp if p.split else 1)
            ranks = tuple(stage * ranks_per_stage + rank for stage in stages_of(p) for rank in within)
            tensor = LocalTensor((p.prefix, p.name, p.layer, p.expert, box), box.lengths, *_inside(p, box))
            found.append(LiveShard(tensor, ranks))
        return found

    return shards


def _cuts(p: Parameter, layout: Layout) -> Iterator[tuple[int, Box]]:
    """(rank along the splitting axis, box of the parameter) for each chunk."""
    axis, dim = p.split or ("tp", 0)
    n = 1 if p.split is None else {"tp": layout.tp, "etp": layout.expert_tp}[axis]
    size = p.shape[dim] // p.halves
    if size % n:
        raise ReshardError(f"--{axis} {n} does not divide dim {dim} of {p.prefix}{p.name}, which is {size}")
    for rank in range(n):
        for half in range(p.halves):
            offsets, lengths = [0] * len(p.shape), list(p.shape)
            offsets[dim], lengths[dim] = half * size + rank * (size // n), size // n
            yield rank, Box(tuple(offsets), tuple(lengths))


def _inside(p: Parameter, box: Box) -> tuple[tuple[Part, ...], tuple[Box, ...]]:
    """The parts and the padding of a parameter that lie in a box of it, in the box's own coordinates."""
    parts = []
    for part in p.parts:
        common = part.local_box.intersect(box)
        if common is not None:
            start = tuple(o + d for o, d in zip(part.box.offsets, common.relative_to(part.at), strict=True))
            parts.append(Part(part.name, Box(start, common.lengths), common.relative_to(box.offsets)))
    fills: tuple[Box, ...] = ()
    if p.padded:
        padding = Box((p.shape[0] - p.padded, *(0,) * (len(p.shape) - 1)), (p.padded, *p.shape[1:]))
        common = padding.intersect(box)
        if common is not None:
            fills = (Box(common.relative_to(box.offsets), common.lengths),)
    return tuple(parts), fills


@dataclass(frozen=True)
class Found:
    """A checkpoint's weights as a placement. A local tensor's id is (key, chunk offsets, chunk sizes, elements before it)."""

    placement: Placement
    notices: list[str]


def vocab_rows(keys: Keys, where: object, model: Model) -> int:
    """Vocabulary rows of a checkpoint, padding included. Raises ReshardError where they are fewer than the vocabulary."""
    key = keys.get("embedding.word_embeddings.weight")
    vocab = model.symbols["V"]
    if key is None:
        raise ReshardError(f"{where} has no embedding.word_embeddings.weight: it is not a GPT model's checkpoint")
    if key.shape[0] < vocab:
        raise ReshardError(f"{where} has {key.shape[0]} vocabulary rows, fewer than vocab_size {vocab} of {model.where}")
    return key.shape[0]


def placement_of_keys(keys: Keys, objects: Iterable[str], where: object, model: Model, mapping: Mapping) -> Found:
    """Find every parameter of a model among global tensors by key, in whichever scheme and spelling they have.

    Raises ReshardError with the names where a parameter is missing or of the wrong shape, or where a key is left over.
    """
    index = {key: _by_stack(entry.chunks, len(entry.shape)) for key, entry in keys.items()}
    used: set[str] = set()
    missing: list[str] = []
    tensors: dict = {}
    for p in mapping.parameters:
        for key, stack, box in _spellings(p, model, keys):
            if key not in keys:
                continue
            entry = keys[key]
            shape = (*(n for _, n in stack), *box.lengths)
            if entry.shape != shape:
                raise ReshardError(f"{where}: {key} has shape {list(entry.shape)}, expected {list(shape)} for {model.where}")
            if not entry.dtype.floating:
                raise ReshardError(f"{where}: {key} has dtype {entry.dtype.name}, which is not a weight's")
            used.add(key)
            for offsets, sizes in index[key](tuple(i for i, _ in stack)):
                depth = len(stack)
                local = Box(tuple(o + d for o, d in zip(offsets[depth:], box.offsets, strict=True)), sizes[depth:])
                before = 0
                for (i, _), start, size in zip(stack, offsets, sizes, strict=False):
                    before = before * size + (i - start)
                before *= prod(sizes[depth:])
                parts, fills = _inside(p, local)
                tensor = LocalTensor((key, offsets, sizes, before), sizes[depth:], parts, fills)
                tensors[tensor.id] = tensor
            if box.lengths == p.shape or box.offsets[0]:
                break
        else:
            missing.append(key_of(p, model.uniform, "transformer_engine") + ("" if p.expert is None else f" (expert {p.expert})"))
    if missing:
        raise ReshardError(f"{where} lacks {len(missing)} parameters that {model.where} calls for: {listed(missing)}")
    notices, unknown = [], []
    left_over: dict[str, int] = defaultdict(int)
    for key in (*keys, *objects):
        if key in used:
            continue
        what = "Transformer Engine state" if "._extra_state" in key else next(
            (name for name, starts in NOT_WEIGHTS.items() if key.startswith(starts)), None)  # fmt: skip
        if what is None:
            unknown.append(key)
        elif what != "common state":
            left_over[what] += 1
    if unknown:
        raise ReshardError(f"{where} holds {len(unknown)} parameters that {model.family.name} does not have: {listed(sorted(unknown))}")
    notices += [f"ignored {n} entries of {what}" for what, n in sorted(left_over.items())]
    return Found(Placement(mapping.shapes, tensors), notices)


def _by_stack(chunks: Iterable, dims: int) -> Callable[[tuple[int, ...]], list]:
    """Look chunks up by their position in the first `len(stack)` dims.

    Megatron saves one layer and one expert a chunk, which is found directly; chunks that span several are searched.
    """
    exact: dict[tuple[int, ...], list] = defaultdict(list)
    spanning: dict[int, list] = defaultdict(list)
    for offsets, sizes in chunks:
        for depth in range(min(3, dims + 1)):
            if all(n == 1 for n in sizes[:depth]):
                exact[offsets[:depth]].append((offsets, sizes))
            else:
                spanning[depth].append((offsets, sizes))

    def at(stack: tuple[int, ...]) -> list:
        around = [c for c in spanning[len(stack)] if all(o <= i < o + n for i, o, n in zip(stack, *c, strict=False))]
        return exact.get(stack, []) + around

    return at


def _spellings(p: Parameter, model: Model, keys: Keys) -> Iterator[tuple[str, list[tuple[int, int]], Box]]:
    """Where a parameter may be: key, its (index, size) in the stacked dims, and the box of the parameter that the key holds.

    A key that holds the first half only (`singleton_local_shards`) is followed by the one with the second.
    """
    experts = [] if p.expert is None else [(p.expert, model.num_experts)]
    for name in dict.fromkeys((p.name, p.local_name)):
        if p.prefix == "decoder.layers.":
            yield p.prefix + name, [(p.layer or 0, model.num_layers), *experts], whole(p.shape)
            prefix = f"{p.prefix}{p.layer}."
        else:
            prefix = p.prefix
        yield prefix + name, experts, whole(p.shape)
        single = name if p.expert is None else name.replace(".experts.experts.", f".experts.experts.{p.expert}.")
        if p.expert is not None:
            yield prefix + single, [], whole(p.shape)
        if p.halves == 2:
            half = (p.shape[0] // 2, *p.shape[1:])
            if f"{prefix}{single}_w" in keys and f"{prefix}{single}_v" in keys:
                for suffix, start in (("_w", 0), ("_v", half[0])):
                    yield f"{prefix}{single}{suffix}", [], Box((start, *(0,) * (len(half) - 1)), half)
