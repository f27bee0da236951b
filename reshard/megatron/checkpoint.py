"""The keys and chunks of Megatron's parameters in a ``torch_dist`` checkpoint, and the ranks that save them.

`chunks_to_write` cuts parameters the way the ranks of a layout would save them; `placement_of_keys` reads any
checkpoint's chunks, or a live model's shards, as a placement.

A GPTModel has two schemes of keys. Layers of one kind are stacked, ``decoder.layers.mlp.linear_fc1.weight
[layers, ...]``; where kinds are mixed (and always for MTP) every layer has keys of its own,
``decoder.layers.3.mlp...``. Experts are stacked in both; a third spelling, ``singleton_local_shards``, gives
every expert and each half of SwiGLU its own key, and is only read. A HybridModel's are other keys
(`reshard.megatron.hybrid`).
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from reshard.core.boxes import Box, whole
from reshard.core.errors import ReshardError, listed
from reshard.core.placement import LocalTensor, Placement
from reshard.formats.torch_dist import Key
from reshard.megatron.gtp import (
    WITHOUT_GTP,
    Gtp,
    ShardedRows,
    elements_of,
    local_tensor_of_rows,
    rows_of_key,
    vocabulary_of,
)
from reshard.megatron.layout import MegatronLayout
from reshard.megatron.parameters import ModelParameters, Parameter, parts_inside
from reshard.megatron.ranks import Ranks, cuts
from reshard.models.model import Model

Keys = dict[str, Key]
# The (index, size) of a parameter in each stacked dim: the layer, the expert.
Stack = list[tuple[int, int]]

# Entries of a training checkpoint besides weights; they are left alone, with a notice.
NOT_WEIGHTS = {
    "optimizer state": ("optimizer.", "chained_", "param_groups", "shard_"),
    "RNG state": ("rng_state",),
    "rerun state": ("rerun_state_machine_state",),
    "common state": ("common_state",),
}
EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
VALUE_HEAD = re.compile(r"(?:^|\.)(?:v_head|value_head|score)\.")
# Modules with a weight and another rule than linear layers for ``_extra_state``.
NORMS = {
    "input_layernorm",
    "pre_mlp_layernorm",
    "q_layernorm",
    "k_layernorm",
    "final_layernorm",
    "final_norm",
    "enorm",
    "hnorm",
    "out_norm",
}
WITHOUT_STATE = {
    "embedding.word_embeddings",
    "output_layer",
    "mlp.router",
    "self_attention.conv1d",
    "mixer.conv1d",
    "mixer.norm",
}


class Chunk(NamedTuple):
    """A chunk as one rank saves it. Its local tensor has the dims of the parameter; `offsets` and `sizes` are
    the key's."""

    key: str
    key_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    rank: int
    tensor: LocalTensor
    fp32: bool


def key_of(parameter: Parameter, stacked: bool, transformer_impl: str) -> str:
    """Return the checkpoint key of a parameter, without its position among those that are stacked."""
    name = parameter.local_name if transformer_impl == "local" else parameter.name
    if parameter.prefix == "decoder.layers." and not stacked:
        return f"{parameter.prefix}{parameter.layer}.{name}"
    return parameter.prefix + name


class NewObject(NamedTuple):
    """An object as one rank saves it: `key` with its position among the stacked layers and experts."""

    key: str
    rank: int


def chunks_to_write(
    model: Model, mapping: ModelParameters, layout: MegatronLayout, transformer_impl: str
) -> Iterator[Chunk]:
    """Yield every chunk that the ranks of a layout save, as Megatron's own
    ``dist_checkpointing.save`` cuts them.

    A parameter that several ranks hold alike is saved by the first of them; local tensors are named by (key,
    offsets).
    """
    if layout.gtp > 1 and transformer_impl != "local" and "RKV" in model.symbols:
        raise ReshardError(
            f"--gtp {layout.gtp}: Transformer Engine's layers keep the down projections of multi-head latent attention "
            f"whole under GTP, which is not written: pass --transformer-impl local for a trainer with local layers"
        )
    ranks = Ranks(model, layout)
    for p in mapping.parameters:
        key, stack = key_of(p, model.uniform, transformer_impl), _stack(p, model)
        for cut in cuts(p, layout):
            rank, offsets = ranks.first(p, cut.at_axis, cut.shard), (*(i for i, _ in stack), *cut.box.offsets)
            key_shape, sizes = (*(n for _, n in stack), *cut.shape), (*(1 for _ in stack), *cut.box.lengths)
            yield Chunk(key, key_shape, offsets, sizes, rank, cut.tensor(p, (key, offsets), rank), p.fp32)


def extra_states_to_write(
    model: Model, mapping: ModelParameters, layout: MegatronLayout, transformer_impl: str
) -> Iterator[NewObject]:
    """Yield the ``_extra_state`` objects that a model of these layers asks for when it loads; they
    hold nothing without fp8.

    Every linear layer has one, whatever its implementation; Transformer Engine's norms have one too, and in
    some of its releases (not in 2.16) the core attention.
    """
    ranks = Ranks(model, layout)
    if mapping.model_class == "hybrid":  # a GPTModel leaves it out
        yield NewObject("output_layer._extra_state/shard_0_1", ranks.output * ranks.per_stage)
    engine = transformer_impl == "transformer_engine"
    written: set[str] = set()
    for p in mapping.parameters:
        # Megatron saves some weights in sections, such as ``in_proj.weight.key``, of one module.
        module, weight, _ = f"{p.name}.".partition(".weight.")
        norm = module.rpartition(".")[2] in NORMS
        own = engine and not _of_all_heads(p, model)
        if not weight or module in WITHOUT_STATE or (norm and not own):
            continue
        modules = [module]
        if engine and module == "self_attention.linear_proj":
            modules.append("self_attention.core_attention")
        stack = _stack(p, model) or [(0, 1)]
        place = "shard_" + ".".join(str(i) for i, _ in stack) + "_" + ".".join(str(n) for _, n in stack)
        prefix = key_of(p, model.uniform, "transformer_engine").removesuffix(p.name)
        for key in (f"{prefix}{name}._extra_state/{place}" for name in modules):
            if key not in written:
                written.add(key)
                yield NewObject(key, ranks.first(p))


def _of_all_heads(p: Parameter, model: Model) -> bool:
    """Return True for a norm over all heads, where Transformer Engine's normalizes each by itself."""
    norms = ("self_attention.q_layernorm.weight", "self_attention.k_layernorm.weight")
    return p.name in norms and not model.family.latent and p.shape != (model.symbols["D"],)


def _stack(p: Parameter, model: Model) -> Stack:
    """Return a parameter's (index, size) in the stacked dims that come before its own."""
    layers = [(p.layer or 0, model.num_layers)] if p.prefix == "decoder.layers." and model.uniform else []
    return layers + ([] if p.expert is None else [(p.expert, model.num_experts)])


@dataclass(frozen=True)
class KeyPlacement:
    """A checkpoint's weights as a placement, and what a user should know of the rest. A local
    tensor's id is (key, chunk offsets, chunk sizes, elements before it)."""

    placement: Placement
    notices: list[str]


def check_language_model(keys: Keys, where: object) -> None:
    """Raise ReshardError if a checkpoint does not hold a language model, and say what it holds."""
    published = next((key for key in sorted(keys) if key.endswith(".embed_tokens.weight")), None)
    if EMBEDDING not in keys and published is not None:
        raise ReshardError(
            f"{where} is a checkpoint of torch.distributed.checkpoint that a trainer under FSDP has saved "
            f"({published}), not Megatron's: convert it with reshard fsdp-to-hf {where} DIRECTORY"
        )
    head = keys.get(OUTPUT)
    value_heads = [key for key in keys if VALUE_HEAD.search(key)]
    if value_heads or (head is not None and head.shape[:1] == (1,)):
        raise ReshardError(
            f"{where} is a value or reward model's: {listed(value_heads, 1) or OUTPUT} is a value head, of "
            f"{list(keys[value_heads[0]].shape if value_heads else head.shape)}, "  # type: ignore[union-attr]
            "and no output over a vocabulary"
        )


def vocab_rows(keys: Keys, where: object, model: Model, gtp: int = 1, padded_vocab: object = None) -> int:
    """Return the vocabulary rows of a checkpoint, padding included but that of GTP, which the trainer's argument
    `padded_vocab` tells apart. Raises ReshardError if they are fewer than the vocabulary."""
    key = keys.get(EMBEDDING)
    vocab = model.symbols["V"]
    if key is None or not key.shape:
        raise ReshardError(
            f"{where} has no embedding.word_embeddings.weight: it is not a GPT model's checkpoint"
        )
    if key.shape[0] < vocab:
        raise ReshardError(
            f"{where} has {key.shape[0]} vocabulary rows, fewer than vocab_size {vocab} of {model.where}"
        )
    chunk = next((sizes[0] for _, sizes in key.chunks if all(sizes)), key.shape[0])
    return vocabulary_of(key.shape[0], chunk, gtp, padded_vocab, where)


def placement_of_keys(
    keys: Keys,
    objects: Iterable[str],
    where: object,
    model: Model,
    parameters: ModelParameters,
    complete: bool = True,
    gtp: Gtp = WITHOUT_GTP,
) -> KeyPlacement:
    """Find every parameter of a model among global tensors by key, in whichever scheme and spelling they
    have.

    Without `complete`, keys are those of one rank, which has some parameters only, and some chunks of them. `gtp` are
    the sizes that the keys were saved at.
    Raises ReshardError with the names where a parameter is missing or of the wrong shape, or where a key is
    left over, and under GTP where a layer's rows are not those of one weight.
    """
    if gtp != WITHOUT_GTP and {"NK", "NM"} & model.symbols.keys():
        raise ReshardError(
            f"{where} was saved under GTP, of a {model.family.name} model with layers of linear attention or Mamba, "
            f"whose rows GTP arranges in another way, which is not supported: train and save it without GTP"
        )
    chunks_at = {
        key: _by_stack((chunk for chunk in entry.chunks if all(chunk[1])), len(entry.shape))
        for key, entry in keys.items()
    }
    used: set[str] = set()
    missing: list[str] = []
    tensors: dict = {}
    for p in parameters.parameters:
        for key, stack, box in possible_keys(p, model, keys):
            if key not in keys:
                continue
            chunks, depth = chunks_at[key](tuple(i for i, _ in stack)), len(stack)
            rows = _sharded_rows(p, keys[key], chunks, depth, box, gtp, f"{where}: {key}")
            if rows is not None and p.halves == 2:
                _check_slices(rows, key, keys, where)
            if rows is not None:
                box = Box(box.offsets, (keys[key].shape[depth], *box.lengths[1:]))
            if key not in used or keys[key].shape != (*(n for _, n in stack), *box.lengths):
                _check_key(key, keys[key], stack, box, where, model, complete)
            used.add(key)
            for offsets, sizes in chunks:
                tensor = _local_tensor(p, key, stack, box, offsets, sizes, rows)
                tensors[tensor.id] = tensor
            is_first_half = (
                rows.half == 0 if rows is not None else box.lengths != p.shape and not box.offsets[0]
            )
            if not is_first_half:
                break
        else:
            expert = "" if p.expert is None else f" (expert {p.expert})"
            missing.append(key_of(p, model.uniform, "transformer_engine") + expert)
    if missing and complete:
        raise ReshardError(
            f"{where} lacks {len(missing)} parameters that {model.where} calls for: {listed(missing)}"
        )
    notices = _notices_of_rest([key for key in (*keys, *objects) if key not in used], where, model)
    return KeyPlacement(Placement(parameters.shapes, tensors), notices)


def _check_key(
    key: str, entry: Key, stack: Stack, box: Box, where: object, model: Model, complete: bool
) -> None:
    """Raise ReshardError if a key's shape, dtype or chunks are not those of a weight of the model."""
    shape = (*(n for _, n in stack), *box.lengths)
    if entry.shape != shape:
        raise ReshardError(
            f"{where}: {key} has shape {list(entry.shape)}, expected {list(shape)} for {model.where}"
        )
    if not entry.dtype.floating:
        raise ReshardError(f"{where}: {key} has dtype {entry.dtype.name}, which is not a weight's")
    held = elements_of(entry)
    if complete and held != prod(shape):
        problem = "lacks chunks" if held < prod(shape) else "has chunks that overlap"
        raise ReshardError(
            f"{where}: {key} {problem}: they hold {held:,} elements, its shape {list(shape)} has {prod(shape):,}"
        )


def _sharded_rows(
    p: Parameter, entry: Key, chunks: list, depth: int, box: Box, gtp: Gtp, where: str
) -> ShardedRows | None:
    """Return how the rows of a key are those of a parameter, where it was saved under GTP (`rows_of_key`)."""
    if gtp.of(p) == 1 or not chunks or len(entry.shape) != depth + len(p.shape):
        return None
    rows = rows_of_key(p, box, entry.shape[depth], chunks[0][1][depth:], gtp.of(p), where)
    if rows is not None and any(
        sizes[depth] != rows.chunk_rows or offsets[depth] % rows.chunk_rows for offsets, sizes in chunks
    ):
        raise ReshardError(f"{where} has chunks of several sizes, as GTP {gtp.of(p)} saves none")
    return rows


def _check_slices(rows: ShardedRows, key: str, keys: Keys, where: object) -> None:
    """Raise ReshardError if gate and up are cut for another number of tensor parallel ranks than the columns of the
    layer after them: then GTP's shards of them are not in the order in which 0.19 saves them."""
    after = key.removesuffix("_w").removesuffix("_v").replace(".linear_fc1.", ".linear_fc2.")
    chunk = next((sizes for _, sizes in keys[after].chunks if all(sizes)), None) if after in keys else None
    if chunk is not None and rows.slices * chunk[-1] != keys[after].shape[-1]:
        raise ReshardError(
            f"{where}: {key} is cut as for {rows.slices} tensor parallel ranks, and {after} as for "
            f"{keys[after].shape[-1] // chunk[-1]}: this Megatron-Core arranges gate and up under GTP in a way that "
            "reshard does not know; save it without GTP, or with 0.19 or 0.20"
        )


def _local_tensor(
    p: Parameter,
    key: str,
    stack: Stack,
    box: Box,
    offsets: tuple[int, ...],
    sizes: tuple[int, ...],
    rows: ShardedRows | None,
) -> LocalTensor:
    """Return the part of a chunk that belongs to a parameter, as a local tensor with the parameter's dims."""
    depth = len(stack)
    start = tuple(o + d for o, d in zip(offsets[depth:], box.offsets, strict=True))
    before = 0
    for (index, _), first, size in zip(stack, offsets, sizes, strict=False):
        before = before * size + (index - first)
    before *= prod(sizes[depth:])
    id = (key, offsets, sizes, before)
    if rows is not None:
        return local_tensor_of_rows(p, id, rows, offsets[depth:], sizes[depth:])
    parts, fills = parts_inside(p, Box(start, sizes[depth:]))
    return LocalTensor(id, sizes[depth:], parts, fills)


def _notices_of_rest(rest: list[str], where: object, model: Model) -> list[str]:
    """Return a notice for each kind of entry that is not a weight. Raises ReshardError for unknown
    parameters."""
    unknown: list[str] = []
    counts: dict[str, int] = defaultdict(int)
    for key in rest:
        if "._extra_state" in key:
            kind: str | None = "Transformer Engine state"
        else:
            kind = next((name for name, starts in NOT_WEIGHTS.items() if key.startswith(starts)), None)
        if kind is None:
            unknown.append(key)
        elif kind != "common state":
            counts[kind] += 1
    if unknown:
        raise ReshardError(
            f"{where} holds {len(unknown)} parameters that {model.family.name} does not "
            f"have: {listed(sorted(unknown))}"
        )
    return [f"ignored {count} entries of {kind}" for kind, count in sorted(counts.items())]


def _by_stack(chunks: Iterable, dims: int) -> Callable[[tuple[int, ...]], list]:
    """Return a function that looks chunks up by their position in the first `len(stack)` dims.

    Megatron saves one layer and one expert a chunk, which is found directly; chunks that span several are
    searched.
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
        around = [
            c for c in spanning[len(stack)] if all(o <= i < o + n for i, o, n in zip(stack, *c, strict=False))
        ]
        return exact.get(stack, []) + around

    return at


def possible_keys(p: Parameter, model: Model, keys: Mapping[str, Key]) -> Iterator[tuple[str, Stack, Box]]:
    """Yield where a parameter may be: key, its (index, size) in the stacked dims, and the box of
    the parameter that the key holds.

    A key that holds the first half only (`singleton_local_shards`) is followed by the one with the second.
    """
    experts = [] if p.expert is None else [(p.expert, model.num_experts)]
    for name in dict.fromkeys((p.name, p.local_name)):
        layers = model.num_layers if p.prefix == "decoder.layers." else p.layers
        if layers is not None:
            yield p.prefix + name, [(p.layer or 0, layers), *experts], whole(p.shape)
            prefix = f"{p.prefix}{p.layer}."
        else:
            prefix = p.prefix
        yield prefix + name, experts, whole(p.shape)
        single = (
            name if p.expert is None else name.replace(".experts.experts.", f".experts.experts.{p.expert}.")
        )
        if p.expert is not None:
            yield prefix + single, [], whole(p.shape)
        if p.halves == 2:
            half = (p.shape[0] // 2, *p.shape[1:])
            if f"{prefix}{single}_w" in keys and f"{prefix}{single}_v" in keys:
                for suffix, start in (("_w", 0), ("_v", half[0])):
                    yield f"{prefix}{single}{suffix}", [], Box((start, *(0,) * (len(half) - 1)), half)
