"""The placement of a model on each vLLM rank, by arithmetic alone;
`reshard.engines.vllm.weights.placing` asks a live vLLM.

vLLM 0.26 fuses rows of a mapping table that share a vLLM parameter (`reshard.engines.vllm.names`),
in table order: the rank's queries, its keys, its values; its gate rows, its up rows. Linear layers
are split over TP as Megatron's are; key and value heads are repeated if TP exceeds them; the
vocabulary is padded to a multiple of 64 and then split. Experts are one ``[experts, rows,
columns]`` tensor, split over TP times DP, or, with expert parallelism, distributed whole.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from reshard.core.boxes import Box, whole
from reshard.core.errors import ReshardError
from reshard.core.placement import LocalTensor, Part, Placement, as_matrix
from reshard.core.splits import split
from reshard.core.views import View
from reshard.engines.vllm.names import added_once, in_vllm, is_whole, on_every_stage, vllm_name
from reshard.models.model import Model
from reshard.models.tables import HEADS, Row

VOCAB_MULTIPLE = 64
# Arrangements of rows without a vLLM parameter: it holds equal parameters once.
WITHOUT_PARAMETER = ("copy", "ignored")


@dataclass(frozen=True)
class VllmLayout:
    """vLLM's parallel sizes: its ``tensor_parallel_size``, ``pipeline_parallel_size``,
    ``data_parallel_size``, ``enable_expert_parallel`` and, with `round_robin`,
    ``expert_placement_strategy="round_robin"`` (with DP vLLM 0.26 heeds that only on the DeepEP
    low-latency and NIXL backends)."""

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
        """Return how many ranks there are: DP times PP times TP."""
        return self.dp * self.pp * self.tp

    def __str__(self) -> str:
        experts = " EP" + " round-robin" * self.round_robin if self.expert_parallel else ""
        sizes = " ".join(
            f"{name}{n}" for name, n in (("TP", self.tp), ("PP", self.pp), ("DP", self.dp)) if n > 1
        )
        return (sizes or "TP1") + experts

    def check(self, model: Model) -> None:
        """Raise ReshardError if vLLM would not start at these sizes."""
        heads = model.symbols["NQ"]
        if heads % self.tp:
            divisors = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
            raise ReshardError(
                f"vLLM's tp {self.tp} does not divide {heads} attention heads; sizes that do: {divisors}"
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
        """Return one rank; TP is the innermost axis, then PP, then DP. Raises ReshardError if a
        size does not divide."""
        tp_rank, pp_rank, dp_rank = rank % self.tp, rank // self.tp % self.pp, rank // (self.tp * self.pp)
        base, remainder = divmod(model.num_layers, self.pp)
        # The remainder goes to the stages before the last one.
        counts = [base + (self.pp - 1 - remainder <= stage < self.pp - 1) for stage in range(self.pp)]
        start = sum(counts[:pp_rank])
        moe_tp, moe_tp_rank = self.tp * self.dp, dp_rank * self.tp + tp_rank
        experts = tuple(range(model.num_experts))
        if self.expert_parallel:
            experts = self._local_experts(experts, moe_tp, moe_tp_rank)
            moe_tp, moe_tp_rank = 1, 0
        layers = tuple(range(start, start + counts[pp_rank]))
        everywhere = on_every_stage(model)
        is_first, is_last = everywhere or pp_rank == 0, everywhere or pp_rank == self.pp - 1
        has_embedding, has_output = is_first or (is_last and model.tied), is_last
        outer = frozenset(
            row.hf for row in outer_rows(model) if (has_embedding if is_embedding(row) else has_output)
        )
        sequence_parallel = self.expert_parallel and self.tp > 1 and self.dp > 1
        return VllmRank(self.tp, tp_rank, moe_tp, moe_tp_rank, experts, layers, outer, sequence_parallel)

    def _local_experts(self, experts: tuple[int, ...], ranks: int, rank: int) -> tuple[int, ...]:
        """Return the experts of one of the ranks that they are distributed over."""
        if self.round_robin:
            return experts[rank::ranks]
        base, remainder = divmod(len(experts), ranks)
        first = rank * base + min(rank, remainder)
        return experts[first : first + base + (rank < remainder)]


@dataclass(frozen=True)
class VllmRank:
    """One rank of vLLM.

    `moe_tp` ranks split each expert; `experts` are the global ids of the rank's experts in their
    order; `outer` are the published names of its parameters outside the layers. With
    `sequence_parallel` its MoE layers split tokens over TP, so every rank has the whole shared
    experts.
    """

    tp: int
    tp_rank: int
    moe_tp: int
    moe_tp_rank: int
    experts: tuple[int, ...]
    layers: tuple[int, ...]
    outer: frozenset[str]
    sequence_parallel: bool = False


def outer_rows(model: Model) -> list[Row]:
    """Return the rows outside the layers that vLLM has parameters for."""
    return [row for row in model.rows("model") if row.arrangement not in WITHOUT_PARAMETER]


def published_tensors(model: Model, mtp: bool = False) -> Iterator[tuple[Row, str]]:
    """Yield row and name of every published tensor that vLLM has a place for; those of MTP layers,
    which its main model lacks, with `mtp`."""
    for block in model.blocks():
        for row in block.rows if mtp or not block.mtp else ():
            if row.arrangement not in WITHOUT_PARAMETER:
                for _, name in row.names(block.published, range(model.num_experts)):
                    yield row, name


def is_embedding(row: Row) -> bool:
    """Tell whether this is the embedding's row."""
    return row.arrangement == "vocab" and row.megatron.startswith("embedding.")


def vllm_placement(model: Model, rank: VllmRank) -> Placement:
    """Return the parameters of a vLLM rank. A local tensor's id is (parameter, local expert or
    None); an expert's is one matrix of the parameter, or those rows of it that brackets after the
    parameter say.

    Raises ReshardError if a size does not divide.
    """
    expansion = _Expansion(model, rank)
    for block in model.blocks():
        if block.mtp:
            continue  # a model of its own in vLLM
        groups: dict[str, list[Row]] = defaultdict(list)
        for row in block.rows:
            is_local = row.hf in rank.outer if block.layer is None else block.layer in expansion.layers
            if is_local and row.arrangement not in WITHOUT_PARAMETER:
                groups[vllm_name(model, row)].append(row)
        for name, rows in groups.items():
            expansion.add(block.published, name, rows)
    return Placement.of(expansion.shapes, expansion.tensors)


# vLLM keeps an MTP layer's transformer layer in a module of its own.
MTP_BLOCK = "mtp_block."


def drafter_placement(model: Model, rank: VllmRank, prefix: str) -> Placement:
    """Return the parameters of the transformer layers of a drafter made of MTP layers, as
    `vllm_placement` does for the main model; their names begin with `prefix`. What is around these
    layers, each of vLLM's models holds in its own way."""
    expansion = _Expansion(model, rank)
    for block in model.blocks():
        if not block.mtp or not block.megatron.endswith("transformer_layer."):
            continue
        groups: dict[str, list[Row]] = defaultdict(list)
        for row in block.rows:
            if row.arrangement not in WITHOUT_PARAMETER:
                groups[MTP_BLOCK + vllm_name(model, row)].append(row)
        for name, rows in groups.items():
            expansion.add(block.published, name, rows, prefix)
    return Placement.of(expansion.shapes, expansion.tensors)


def padded(tensor: LocalTensor, shape: tuple[int, ...], bands: int) -> LocalTensor:
    """Return a matrix padded with zeros to a larger `shape`, after each of its `bands` of rows, and
    to the right.

    Raises ReshardError if it does not fit in.
    """
    (rows, columns), (padded_rows, padded_columns) = tensor.shape, shape
    band, padded_band = rows // bands, padded_rows // bands
    if rows % bands or padded_rows % bands or padded_band < band or padded_columns < columns or tensor.fills:
        raise ReshardError(
            f"{tensor.id[0]} has {list(shape)} for an expert, into which {list(tensor.shape)} do not go"
        )
    parts = []
    for part in tensor.parts:
        index, last = part.at[0] // band, (part.at[0] + part.box.lengths[0] - 1) // band
        if index != last:
            raise ReshardError(f"{tensor.id[0]} has a part of {part.name} in two of its bands")
        parts.append(part._replace(at=(part.at[0] + index * (padded_band - band), part.at[1])))
    fills: list[Box] = []
    if padded_band > band:
        fills += [
            Box((index * padded_band + band, 0), (padded_band - band, padded_columns))
            for index in range(bands)
        ]
    if padded_columns > columns:
        fills += [
            Box((index * padded_band, columns), (band, padded_columns - columns)) for index in range(bands)
        ]
    return tensor._replace(shape=shape, parts=tuple(parts), fills=tuple(fills))


class _Turns(NamedTuple):
    """The rows of one canonical tensor among others of the same stored one: so many in each turn,
    where each turn lies, and how many rows all of them fill together, said by the last of them."""

    rows: int
    places: range
    whole: int


def _turns_of(row: Row, rows: int) -> _Turns:
    """Return the turns of a row's tensor of which a rank has so many rows; one, unless its view
    takes some of every period."""
    selections = View.parse(row.hf).selections
    if not selections or not selections[0].period:
        return _Turns(rows, range(1), rows)
    start, length, period, _ = selections[0]
    end = rows // length * period
    return _Turns(length, range(start, end, period), end if start + length == period else 0)


class _Expansion:
    """The local tensors of one rank, and the canonical shapes that they are made of, as rows are
    added."""

    def __init__(self, model: Model, rank: VllmRank) -> None:
        self.model, self.rank, self.layers = model, rank, set(rank.layers)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.tensors: list[LocalTensor] = []

    def add(self, prefix: str, name: str, rows: Sequence[Row], draft_prefix: str = "") -> None:
        """Add the rows of one vLLM parameter; of routed experts, it has one matrix for each expert,
        all arranged alike."""
        shape, places, fills = self._arrange(prefix, rows)
        by_expert = zip(*(row.names(prefix, self.rank.experts) for row in rows), strict=True)
        for local_expert, names in enumerate(by_expert):
            matrix = None if names[0][0] is None else local_expert
            parts = tuple([Part(names[row][1], box, at) for row, box, at in places if prod(box.lengths)])
            self.shapes.update(
                (hf, as_matrix(self.model.shape(row.shape))) for (_, hf), row in zip(names, rows, strict=True)
            )
            parameter = draft_prefix + in_vllm(self.model, prefix + name)
            if self.rank.moe_tp_rank and added_once(self.model, rows[0]):
                parts, fills = (), (whole(shape),)
            self.tensors.append(LocalTensor((parameter, matrix), shape, parts, fills))

    def _arrange(
        self, prefix: str, rows: Sequence[Row]
    ) -> tuple[tuple[int, ...], list[tuple[int, Box, tuple[int, ...]]], tuple[Box, ...]]:
        """Return the matrix, or vector, that the rows fill one below the other; views that take
        turns in a stored tensor, as queries and their gates do, in these turns.

        That is its shape, the boxes of the rows' tensors, each with the row's index and its place,
        and the boxes of padding.
        """
        places: list[tuple[int, Box, tuple[int, ...]]] = []
        fills: tuple[Box, ...] = ()
        columns: tuple[int, ...] = ()
        at = 0
        for index, row in enumerate(rows):
            shape = as_matrix(self.model.shape(row.shape))
            box, padding = self._box(row, prefix + row.hf, shape)
            (first, *others), columns = box.offsets, box.lengths[1:]
            turns = _turns_of(row, box.lengths[0])
            places += [
                (
                    index,
                    Box((first + n * turns.rows, *others), (turns.rows, *columns)),
                    (at + place, *(0 for _ in others)),
                )
                for n, place in enumerate(turns.places)
            ]
            at += turns.whole
            if padding:
                fills = (Box((at, *(0,) * (len(shape) - 1)), (padding, *shape[1:])),)
                at += padding
        return (at, *columns), places, fills

    def _box(self, row: Row, hf: str, shape: tuple[int, ...]) -> tuple[Box, int]:
        """Return the box of a canonical tensor that this rank has, and the rows of padding after
        it."""
        axis_and_dim = ("tp", 0) if row.arrangement in HEADS else row.split_of("transformer_engine")
        replicated = self.rank.sequence_parallel and self.model.family.shared_experts in row.conditions
        if axis_and_dim is None or replicated or is_whole(self.model, row):
            return whole(shape), 0
        axis, dim = axis_and_dim
        ranks, index = (
            (self.rank.moe_tp, self.rank.moe_tp_rank) if axis == "etp" else (self.rank.tp, self.rank.tp_rank)
        )
        what = "vLLM's expert tp" if axis == "etp" else "vLLM's tp"
        if row.arrangement == "vocab":
            rows = -(-shape[0] // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
            shard = split(whole((rows, *shape[1:])), dim, ranks, index, what, f"{hf} with its padding")
            start, length = shard.offsets[0], shard.lengths[0]
            vocab_rows = min(max(shape[0] - start, 0), length)
            return Box((min(start, shape[0]), 0), (vocab_rows, shape[1])), length - vocab_rows
        if row.arrangement in HEADS[1:]:  # keys and values
            heads = self.model.symbols["NKV"]
            if ranks > heads:
                if ranks % heads:
                    raise ReshardError(
                        f"vLLM's tp {ranks} is no multiple of the {heads} key and value heads of {hf}"
                    )
                ranks, index = heads, index // (ranks // heads)
        return split(whole(shape), dim, ranks, index, what, hf), 0
