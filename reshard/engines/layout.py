"""The placement of a model on each rank of an engine, by arithmetic alone; `reshard.engines.placing.places` asks
a live one.

Engines fuse rows of a mapping table that share one of their parameters (`reshard.engines.placing.names`), in
table order: the rank's queries, its keys, its values; its gate rows, its up rows. Linear layers are
split over TP as Megatron's are; key and value heads are repeated if TP exceeds them; the vocabulary
is padded to a multiple of 64 and then split. Experts are one ``[experts, rows, columns]`` tensor.
"""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from math import prod
from typing import ClassVar, NamedTuple

from reshard.core.boxes import Box, whole
from reshard.core.errors import ReshardError
from reshard.core.limits import MAX_RANKS, check_number
from reshard.core.placement import LocalTensor, Part, Placement, as_matrix
from reshard.core.splits import split
from reshard.core.views import View
from reshard.engines.placing.names import EngineNames
from reshard.models.model import Model
from reshard.models.tables import HEADS, Row

VOCAB_MULTIPLE = 64
# Arrangements of rows without a parameter in an engine: it holds equal parameters once.
WITHOUT_PARAMETER = ("copy", "ignored")


class Split(NamedTuple):
    """The number of ranks that split a parameter, and which of them this is."""

    ranks: int
    rank: int


@dataclass(frozen=True)
class EngineRank:
    """One rank of an engine.

    `moe_tp` ranks split each expert; `experts` are the global ids of the rank's experts in their
    order; `outer` are the published names of its parameters outside the layers. `splits` says of
    parameters of a kind (`kind_of`) by how many ranks they are split, where it is not by TP.
    """

    tp: int
    tp_rank: int
    moe_tp: int
    moe_tp_rank: int
    experts: tuple[int, ...]
    layers: tuple[int, ...]
    outer: frozenset[str]
    splits: Mapping[str, Split] = field(default_factory=dict)

    def split_of(self, model: Model, row: Row, axis: str) -> Split:
        """Return how a row is split that the mapping table splits along a mesh axis."""
        if axis == "etp":
            return Split(self.moe_tp, self.moe_tp_rank)
        return self.splits.get(kind_of(model, row), Split(self.tp, self.tp_rank))


def kind_of(model: Model, row: Row) -> str:
    """Return what a row is a parameter of: ``embedding``, ``output``, ``attention``, ``shared_experts``
    or ``mlp``."""
    if row.arrangement == "vocab":
        return _outer_part(row)
    if row.megatron.startswith("self_attention."):
        return "attention"
    return "shared_experts" if model.family.shared_experts in row.conditions else "mlp"


@dataclass(frozen=True)
class EngineLayout(ABC):
    """The parallel sizes of an engine: `tp` and `pp`, its tensor and pipeline parallel sizes, and others
    that are its own. TP tells replicas apart, and ranks of a pipeline stage follow one another."""

    names: ClassVar[EngineNames]
    # True if the share of a GPU's memory that the engine is started with is for all that it holds; False if it is
    # for weights, keys and values alone.
    share_holds_all: ClassVar[bool]

    tp: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        for entry in fields(self):
            if entry.type is int:
                least = 0 if entry.default == 0 else 1
                check_number(getattr(self, entry.name), f"{self.engine}'s {entry.name}", MAX_RANKS, least)

    @property
    def engine(self) -> str:
        """The engine's name."""
        return self.names.engine

    @property
    @abstractmethod
    def world_size(self) -> int:
        """The number of ranks."""

    @abstractmethod
    def check(self, model: Model) -> None:
        """Raise ReshardError if the engine would not start at these sizes, or cannot be refitted with the model."""

    @abstractmethod
    def rank(self, model: Model, rank: int) -> EngineRank:
        """Return one rank. Raises ReshardError if a size does not divide."""

    def placement(self, model: Model, rank: int) -> Placement:
        """Return the parameters of one rank. Raises ReshardError if a size does not divide."""
        return place(self.names, model, self.rank(model, rank))


def layers_of_stage(counts: Sequence[int], stage: int) -> tuple[int, ...]:
    """Return the layers of a pipeline stage, given how many each stage has."""
    start = sum(counts[:stage])
    return tuple(range(start, start + counts[stage]))


def outer_of_stage(names: EngineNames, model: Model, is_first: bool, is_last: bool) -> frozenset[str]:
    """Return the published names of a pipeline stage's parameters outside the layers."""
    parts = set(names.family(model).on_every_stage)
    if is_first or (is_last and model.tied):
        parts.add("embedding")
    if is_last:
        parts |= {"norm", "output"}
    return frozenset(row.hf for row in outer_rows(model) if _outer_part(row) in parts)


def _outer_part(row: Row) -> str:
    """Return which of the parts outside the layers a row belongs to."""
    if row.arrangement != "vocab":
        return "norm"
    return "embedding" if is_embedding(row) else "output"


def check_redundant(engine: str, model: Model, redundant: int, ranks: int) -> None:
    """Raise ReshardError unless an engine that distributes experts over this many ranks would start with so many
    redundant ones."""
    if not redundant:
        return
    if ranks < 2:
        raise ReshardError(f"{engine}'s redundant_experts {redundant} need expert parallelism")
    if (model.num_experts + redundant) % ranks:
        raise ReshardError(
            f"{engine}'s redundant_experts {redundant} make {model.num_experts + redundant} of {model.num_experts} "
            f"experts, which {ranks} ranks cannot hold evenly; use {-model.num_experts % ranks or ranks}"
        )


def experts_of_rank(experts: int, ranks: int, rank: int, redundant: int = 0) -> tuple[int, ...]:
    """Return the experts of one of the ranks that they are distributed over, in order; after the last expert the
    `redundant` ones follow, from the first on, as an engine loads them.

    >>> experts_of_rank(4, 2, 1, redundant=2)
    (3, 0, 1)
    """
    places = _places_of_rank(experts + redundant, ranks, rank)
    return tuple(place % experts for place in places)


def _places_of_rank(places: int, ranks: int, rank: int) -> range:
    base, remainder = divmod(places, ranks)
    first = rank * base + min(rank, remainder)
    return range(first, first + base + (rank < remainder))


def outer_rows(model: Model) -> list[Row]:
    """Return the rows outside the layers that engines have parameters for."""
    return [row for row in model.rows("model") if row.arrangement not in WITHOUT_PARAMETER]


def published_tensors(model: Model, mtp: bool = False) -> Iterator[tuple[Row, str]]:
    """Yield row and name of every published tensor that engines have a place for; those of MTP layers,
    which the main model lacks, with `mtp`."""
    for block in model.blocks():
        for row in block.rows if mtp or not block.mtp else ():
            if row.arrangement not in WITHOUT_PARAMETER:
                for _, name in row.names(block.published, range(model.num_experts)):
                    yield row, name


def is_embedding(row: Row) -> bool:
    """Tell whether this is the embedding's row."""
    return row.arrangement == "vocab" and row.megatron.startswith("embedding.")


def place(names: EngineNames, model: Model, rank: EngineRank) -> Placement:
    """Return the parameters of a rank of an engine with these names. A local tensor's id is (parameter,
    local expert or None); an expert's is one matrix of the parameter, or those rows of it that
    brackets after the parameter say.

    Raises ReshardError if a size does not divide.
    """
    expansion = Expansion(names, model, rank)
    for block in model.blocks():
        if block.mtp:
            continue  # a model of its own in an engine
        groups: dict[str, list[Row]] = defaultdict(list)
        for row in block.rows:
            is_local = row.hf in rank.outer if block.layer is None else block.layer in expansion.layers
            if is_local and row.arrangement not in WITHOUT_PARAMETER:
                groups[names.parameter(model, row)].append(row)
        for name, rows in groups.items():
            expansion.add(block.published, name, rows)
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
    """Return where the view of a row's tensor takes rows, for a rank with this many of them: once, or some of
    every period."""
    selections = View.parse(row.hf).selections
    if not selections or not selections[0].period:
        return _Turns(rows, range(1), rows)
    start, length, period, _ = selections[0]
    end = rows // length * period
    return _Turns(length, range(start, end, period), end if start + length == period else 0)


class Expansion:
    """The local tensors of one rank, and the canonical shapes that they are made of, as rows are
    added."""

    def __init__(self, names: EngineNames, model: Model, rank: EngineRank) -> None:
        self.names, self.model, self.rank, self.layers = names, model, rank, set(rank.layers)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.tensors: list[LocalTensor] = []

    def add(self, prefix: str, name: str, rows: Sequence[Row], draft_prefix: str = "") -> None:
        """Add the rows of one parameter; of routed experts, it has one matrix for each expert,
        all arranged alike."""
        shape, places, fills = self._arrange(prefix, rows)
        by_expert = zip(*(row.names(prefix, self.rank.experts) for row in rows), strict=True)
        for local_expert, names in enumerate(by_expert):
            matrix = None if names[0][0] is None else local_expert
            parts = tuple([Part(names[row][1], box, at) for row, box, at in places if prod(box.lengths)])
            self.shapes.update(
                (hf, as_matrix(self.model.shape(row.shape))) for (_, hf), row in zip(names, rows, strict=True)
            )
            parameter = draft_prefix + self.names.prefixed(self.model, prefix + name)
            if self.rank.moe_tp_rank and rows[0].hf in self.names.family(self.model).added_once:
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
        if axis_and_dim is None or row.hf in self.names.family(self.model).whole:
            return whole(shape), 0
        axis, dim = axis_and_dim
        ranks, index = self.rank.split_of(self.model, row, axis)
        engine = self.names.engine
        what = f"{engine}'s expert tp" if axis == "etp" else f"{engine}'s tp"
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
                        f"{what} {ranks} is not a multiple of the {heads} key and value heads of {hf}"
                    )
                ranks, index = heads, index // (ranks // heads)
        return split(whole(shape), dim, ranks, index, what, hf), 0
