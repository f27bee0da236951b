"""vLLM's side of the tables: what each of its ranks holds, as a placement. Pure arithmetic; a live vLLM is
asked in `reshard.engines.vllm.live`.

vLLM 0.26 fuses rows of a table that share a vLLM parameter (`reshard.engines.vllm.names`), in table order:
the rank's queries, its keys, its values; its gate rows, its up rows. Linear layers are split over TP as
Megatron's are; key and value heads are repeated where TP exceeds them; the vocabulary is padded to a multiple
of 64 and then split. Experts are one ``[experts, rows, columns]`` tensor, split over TP times DP, or, with
expert parallelism, handed out whole.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from reshard.core.boxes import Box, whole
from reshard.core.errors import ReshardError
from reshard.core.placement import LocalTensor, Part, Placement
from reshard.core.splits import split
from reshard.engines.vllm.names import on_every_stage, vllm_name
from reshard.models.model import Model
from reshard.models.tables import Row

VOCAB_MULTIPLE = 64
# Rows that vLLM has nothing of: it holds what is equal to another parameter once.
WITHOUT_PARAMETER = ("copy", "ignored")


@dataclass(frozen=True)
class VllmLayout:
    """vLLM's parallel sizes: its ``tensor_parallel_size``, ``pipeline_parallel_size``,
    ``data_parallel_size``, ``enable_expert_parallel`` and, with `round_robin`,
    ``expert_placement_strategy="round_robin"`` (with DP vLLM 0.26 heeds that only on the DeepEP low-latency
    and NIXL backends)."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    expert_parallel: bool = False
    round_robin: bool = False

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "dp"):
            if getattr(self, name) < 1:
                raise ReshardError(f"vLLM's {name} is {getattr(self, name)}; sizes start at 1")

    @property
    def world_size(self) -> int:
        """Ranks in all: DP times PP times TP."""
        return self.dp * self.pp * self.tp

    def __str__(self) -> str:
        experts = " EP" + " round-robin" * self.round_robin if self.expert_parallel else ""
        sizes = " ".join(
            f"{name}{n}" for name, n in (("TP", self.tp), ("PP", self.pp), ("DP", self.dp)) if n > 1
        )
        return (sizes or "TP1") + experts

    def check(self, model: Model) -> None:
        """Raise ReshardError where vLLM would not start at these sizes."""
        heads = model.symbols["NQ"]
        if heads % self.tp:
            fits = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
            raise ReshardError(
                f"vLLM's tp {self.tp} does not divide {heads} attention heads; sizes that do: {fits}"
            )
        if self.pp > model.num_layers:
            raise ReshardError(f"vLLM's pp {self.pp} is more than the model's {model.num_layers} layers")
        if self.expert_parallel and not model.num_experts:
            raise ReshardError(
                f"expert parallelism needs experts, which a {model.family.name} model "
                f"without them does not have"
            )
        if self.expert_parallel and self.tp * self.dp > model.num_experts:
            raise ReshardError(
                f"vLLM's tp {self.tp} x dp {self.dp} are more ranks than the model's "
                f"{model.num_experts} experts"
            )
        if self.round_robin and model.expert_groups[0] < 2:
            raise ReshardError(
                "vLLM places experts round-robin only where the model has expert groups; it "
                "would place them linearly"
            )

    def rank(self, model: Model, rank: int) -> "VllmRank":
        """What one rank holds; TP is the innermost axis, then PP, then DP. Raises ReshardError where a size
        does not divide."""
        tp_rank, pp_rank, dp_rank = rank % self.tp, rank // self.tp % self.pp, rank // (self.tp * self.pp)
        base, more = divmod(model.num_layers, self.pp)
        # What is left over goes to the stages before the last one.
        counts = [base + (self.pp - 1 - more <= stage < self.pp - 1) for stage in range(self.pp)]
        start = sum(counts[:pp_rank])
        ranks, index, experts = (
            self.tp * self.dp,
            dp_rank * self.tp + tp_rank,
            tuple(range(model.num_experts)),
        )
        if self.expert_parallel:
            if self.round_robin:
                experts = experts[index::ranks]
            else:
                few, extra = divmod(len(experts), ranks)
                first = index * few + min(index, extra)
                experts = experts[first : first + few + (index < extra)]
            ranks, index = 1, 0
        layers = tuple(range(start, start + counts[pp_rank]))
        everywhere = on_every_stage(model)
        first, last = everywhere or pp_rank == 0, everywhere or pp_rank == self.pp - 1
        # the embedding; the norm and the output layer after the layers
        held = {True: first or (last and model.tied), False: last}
        outer = frozenset(row.hf for row in outer_rows(model) if held[is_embedding(row)])
        sequence_parallel = self.expert_parallel and self.tp > 1 and self.dp > 1
        return VllmRank(self.tp, tp_rank, ranks, index, experts, layers, outer, sequence_parallel)


@dataclass(frozen=True)
class VllmRank:
    """One rank: TP, the split of experts (`moe_tp`), the global ids of its experts in their order, its
    layers, the parameters outside the layers that it has, and whether its MoE layers split tokens over TP, so
    that every rank has all of the shared experts."""

    tp: int
    tp_rank: int
    moe_tp: int
    moe_tp_rank: int
    experts: tuple[int, ...]
    layers: tuple[int, ...]
    outer: frozenset[str]
    sequence_parallel: bool = False


def outer_rows(model: Model) -> list[Row]:
    """The rows outside the layers that vLLM has parameters for."""
    return [row for row in model.rows("model") if row.arrangement not in WITHOUT_PARAMETER]


def is_embedding(row: Row) -> bool:
    """Whether this is the embedding's row."""
    return row.arrangement == "vocab" and row.megatron.startswith("embedding.")


def vllm_placement(model: Model, rank: VllmRank) -> Placement:
    """The parameters of a vLLM rank. A local tensor's id is (parameter, local expert or None); an expert's is
    one matrix of it.

    Raises ReshardError where a size does not divide.
    """
    found = _Expansion(model, rank)
    for block in model.blocks():
        if block.mtp:
            continue  # a model of its own in vLLM
        groups: dict[str, list[Row]] = defaultdict(list)
        for row in block.rows:
            here = row.hf in rank.outer if block.layer is None else block.layer in found.layers
            if here and row.arrangement not in WITHOUT_PARAMETER:
                groups[vllm_name(model, row)].append(row)
        for name, rows in groups.items():
            found.group(block.published, name, rows)
    return Placement.of(found.shapes, found.tensors)


# vLLM keeps an MTP layer's transformer layer in a module of its own.
MTP_BLOCK = "mtp_block."


def drafter_placement(model: Model, rank: VllmRank, prefix: str) -> Placement:
    """The parameters of the transformer layers of the model that drafts tokens by MTP layers, as `vllm_placement` has those of
    the main model; their names begin with `prefix`. What is around these layers vLLM holds in ways of each model's own."""
    found = _Expansion(model, rank)
    for block in model.blocks():
        if not block.mtp or not block.megatron.endswith("transformer_layer."):
            continue
        groups: dict[str, list[Row]] = defaultdict(list)
        for row in block.rows:
            if row.arrangement not in WITHOUT_PARAMETER:
                groups[MTP_BLOCK + vllm_name(model, row)].append(row)
        for name, rows in groups.items():
            found.group(block.published, name, rows, prefix)
    return Placement.of(found.shapes, found.tensors)


def padded(tensor: LocalTensor, shape: tuple[int, ...], bands: int) -> LocalTensor:
    """A matrix of so many bands of rows, one below the other, in one of a larger shape: each band begins a band of
    that, and what is left of it is filled with zeros. Raises ReshardError where it does not fit in."""
    (rows, columns), (more_rows, more_columns) = tensor.shape, shape
    band, wide = rows // bands, more_rows // bands
    if rows % bands or more_rows % bands or wide < band or more_columns < columns or tensor.fills:
        raise ReshardError(
            f"{tensor.id[0]} has {list(shape)} for an expert, into which {list(tensor.shape)} do not go"
        )
    parts = []
    for part in tensor.parts:
        at, last = part.at[0] // band, (part.at[0] + part.box.lengths[0] - 1) // band
        if at != last:
            raise ReshardError(f"{tensor.id[0]} has a part of {part.name} in two of its bands")
        parts.append(part._replace(at=(part.at[0] + at * (wide - band), part.at[1])))
    fills = [Box((at * wide + band, 0), (wide - band, more_columns)) for at in range(bands) if wide > band]
    fills += [
        Box((at * wide, columns), (band, more_columns - columns))
        for at in range(bands)
        if more_columns > columns
    ]
    return tensor._replace(shape=shape, parts=tuple(parts), fills=tuple(fills))


class _Expansion:
    def __init__(self, model: Model, rank: VllmRank) -> None:
        self.model, self.rank, self.layers = model, rank, set(rank.layers)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.tensors: list[LocalTensor] = []

    def group(self, prefix: str, name: str, rows: Sequence[Row], before: str = "") -> None:
        """The rows of one vLLM parameter, whose name has `before` in front; of routed experts it is one for all, in which each expert has a
        matrix, all arranged alike."""
        shape, places, fills = self.arranged(prefix, rows)
        for local, named in enumerate(
            zip(*(row.names(prefix, self.rank.experts) for row in rows), strict=True)
        ):
            matrix = None if named[0][0] is None else local
            parts = tuple(
                [
                    Part(hf, box, at)
                    for (_, hf), (box, at) in zip(named, places, strict=True)
                    if prod(box.lengths)
                ]
            )
            self.shapes.update(
                (hf, self.model.shape(row.shape)) for (_, hf), row in zip(named, rows, strict=True)
            )
            self.tensors.append(LocalTensor((before + prefix + name, matrix), shape, parts, fills))

    def arranged(
        self, prefix: str, rows: Sequence[Row]
    ) -> tuple[tuple[int, ...], list[tuple[Box, tuple[int, ...]]], tuple[Box, ...]]:
        """One matrix, or vector, that the rows fill one below the other: its shape, the box of each row's
        tensor and where it goes, and the padding."""
        places: list[tuple[Box, tuple[int, ...]]] = []
        fills: tuple[Box, ...] = ()
        columns: tuple[int, ...] = ()
        at = 0
        for row in rows:
            shape = self.model.shape(row.shape)
            box, padding = self.box(row, prefix + row.hf, shape)
            places.append((box, (at, *(0,) * (len(shape) - 1))))
            at, columns = at + box.lengths[0], box.lengths[1:]
            if padding:
                fills = (Box((at, *(0,) * (len(shape) - 1)), (padding, *shape[1:])),)
                at += padding
        return (at, *columns), places, fills

    def box(self, row: Row, hf: str, shape: tuple[int, ...]) -> tuple[Box, int]:
        """The part of a canonical tensor that this rank has, and the rows of padding after it."""
        axis_and_dim = row.split_of("transformer_engine")
        replicated = self.rank.sequence_parallel and self.model.family.shared_experts in row.conditions
        if axis_and_dim is None or replicated:
            return whole(shape), 0
        axis, dim = axis_and_dim
        ranks, index = (
            (self.rank.moe_tp, self.rank.moe_tp_rank) if axis == "etp" else (self.rank.tp, self.rank.tp_rank)
        )
        what = "vLLM's expert tp" if axis == "etp" else "vLLM's tp"
        if row.arrangement == "vocab":
            padded = -(-shape[0] // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
            mine = split(whole((padded, *shape[1:])), dim, ranks, index, what, f"{hf} with its padding")
            start, length = mine.offsets[0], mine.lengths[0]
            kept = min(max(shape[0] - start, 0), length)
            return Box((min(start, shape[0]), 0), (kept, shape[1])), length - kept
        if row.arrangement in ("k", "v"):
            heads = self.model.symbols["NKV"]
            if ranks > heads:
                if ranks % heads:
                    raise ReshardError(
                        f"vLLM's tp {ranks} is no multiple of the {heads} key and value heads of {hf}"
                    )
                ranks, index = heads, index // (ranks // heads)
        return split(whole(shape), dim, ranks, index, what, hf), 0
