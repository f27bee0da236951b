"""Megatron's parameters, derived from a table and a model: each whole, made of canonical pieces."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from reshard.core.boxes import Box, whole
from reshard.core.placement import Part
from reshard.core.views import tensor_shapes
from reshard.megatron import hybrid
from reshard.models.family import Family, no_table
from reshard.models.model import Block, Model
from reshard.models.tables import HEADS, Row

TRANSFORMER_IMPLS = ("transformer_engine", "local")
# Before the canonical name of a tensor: the rows of Megatron's padding of it, which training has written.
PADDING = "padding."


@dataclass(frozen=True, slots=True)
class Parameter:
    """One Megatron parameter of one layer (and one expert), whole, as if nothing were split.

    `parts` place canonical boxes in it, `halves` is 2 where gate and up are split apart, `padded` is the
    number of last rows that are zero. `layers` is how many blocks of a tower may be stacked under one key.
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
    layers: int | None = None


@dataclass(frozen=True)
class ModelParameters:
    """A model's table, expanded: canonical shapes, copies and Megatron parameters.

    `copies` maps a canonical name to the name that has the same bytes; `ignored` and `optional` are
    canonical names that may be present; `fp32` are those that are never cast down, `less_1` those
    of which Megatron holds the value less 1. `packed` has the parts of tensors that files may hold
    in place of canonical ones, `packed_otherwise` those of files in which these tensors have other
    shapes, and `packed_codes` those of quantized files, where they are others.
    `model_class` is the class of Megatron's model, ``gpt`` or ``hybrid``.
    """

    shapes: dict[str, tuple[int, ...]]
    parameters: Sequence[Parameter]
    copies: dict[str, str]
    ignored: frozenset[str]
    optional: frozenset[str]
    fp32: frozenset[str]
    less_1: frozenset[str] = frozenset()
    packed: dict[str, str] = field(default_factory=dict)
    model_class: str = "gpt"
    packed_codes: dict[str, str] = field(default_factory=dict)
    packed_otherwise: dict[str, str] = field(default_factory=dict)

    @property
    def dispensable(self) -> frozenset[str]:
        """The names that a checkpoint may lack: optional ones, and copies of what it has."""
        return self.optional | self.copies.keys()

    def stored_shapes(self, places: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the published tensors, each whole, where canonical ones have these
        `places` in them.

        Raises ReshardError for one that its views do not cover exactly once.
        """
        return tensor_shapes({places.get(name, name): shape for name, shape in self.shapes.items()})


def expand(
    model: Model,
    transformer_impl: str = "transformer_engine",
    padded_vocab: int | None = None,
    model_class: str | None = None,
    kept_padding: int = 0,
) -> ModelParameters:
    """Expand a model's table into its parameters, as Megatron's `model_class` (``gpt`` or
    ``hybrid``; default: `hybrid.class_of`) names them.

    `padded_vocab` is Megatron's number of vocabulary rows (default: no padding). Of the padding, the first
    `kept_padding` rows are canonical tensors, named by `PADDING`; the others are zero.
    """
    model_class = hybrid.class_of(model, model_class)
    expansion = _Expansion(model, transformer_impl, padded_vocab, model_class, kept_padding)
    for block in model.blocks():
        expansion.block(block)
    parameters: Sequence[Parameter] = expansion.parameters
    if not model.family.has_megatron_names:
        parameters = _NotKnown(model.family)
    copies = {name: expansion.primary[megatron] for name, megatron in expansion.copies.items()}
    return ModelParameters(
        expansion.shapes,
        parameters,
        copies,
        frozenset(expansion.ignored),
        frozenset(expansion.optional),
        frozenset(expansion.fp32) | model.family.kept_in_fp32,
        frozenset(expansion.less_1),
        expansion.packed,
        model_class,
        expansion.packed_codes,
        expansion.packed_otherwise,
    )


class _NotKnown(Sequence[Parameter]):
    """The parameters in Megatron of a model without a mapping table. Whoever looks at them raises ReshardError."""

    def __init__(self, family: Family) -> None:
        self.error = no_table(family)

    def __iter__(self) -> Iterator[Parameter]:
        raise self.error

    def __len__(self) -> int:
        raise self.error

    def __getitem__(self, index: Any) -> Any:
        raise self.error


class _Expansion:
    def __init__(
        self,
        model: Model,
        transformer_impl: str,
        padded_vocab: int | None,
        model_class: str,
        kept_padding: int,
    ) -> None:
        self.model, self.impl, self.padded_vocab = model, transformer_impl, padded_vocab
        self.kept_padding = kept_padding
        self.hybrid = model_class == "hybrid"
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.parameters: list[Parameter] = []
        self.copies: dict[str, str] = {}
        self.primary: dict[str, str] = {}
        self.ignored: set[str] = set()
        self.optional: set[str] = set()
        self.fp32: set[str] = set()
        self.less_1: set[str] = set()
        self.packed: dict[str, str] = {}
        self.packed_codes: dict[str, str] = {}
        self.packed_otherwise: dict[str, str] = {}

    def block(self, block: Block) -> None:
        groups: dict[str, list[Row]] = defaultdict(list)
        experts = range(self.model.num_experts)
        for row in block.rows:
            name = block.published + row.hf
            if not self.model.family.has_megatron_names:
                shape = self.model.shape(row.shape)
                self.shapes |= {name: shape for _, name in row.names(block.published, experts)}
                continue
            if row.arrangement == "ignored":
                self.ignored.add(name)
            elif row.arrangement == "copy":
                self.copies[name] = row.megatron
                self.shapes[name] = self.model.shape(row.shape)
            else:
                groups[row.megatron].append(row)
            if row.optional:
                self.optional.add(name)
            self.packed |= self._places(block, row, self.model.family.packed)
            self.packed_codes |= self._places(block, row, self.model.family.packed_codes)
            self.packed_otherwise |= self._places(block, row, self.model.family.packed_otherwise)
        for megatron, rows in groups.items():
            shapes = [self.model.shape(row.shape) for row in rows]
            for named in zip(*(row.names(block.published, experts) for row in rows), strict=True):
                self._parameter(block, megatron, rows, [name for _, name in named], shapes, named[0][0])

    def _places(self, block: Block, row: Row, table: tuple[tuple[str, str], ...]) -> dict[str, str]:
        """Return the parts of tensors that a family's table names for a row, by canonical name."""
        place = dict(table).get(row.hf)
        if place is None:
            return {}
        part = replace(row, hf=place).in_numbers(self.model.symbols)
        experts = range(self.model.num_experts)
        names = zip(row.names(block.published, experts), part.names(block.published, experts), strict=True)
        return {name: place for (_, name), (_, place) in names}

    def _parameter(
        self,
        block: Block,
        megatron: str,
        rows: list[Row],
        names: list[str],
        shapes: list[tuple[int, ...]],
        expert: int | None,
    ) -> None:
        """One Megatron parameter, which these rows fill with the published tensors `names`."""
        row, rest = rows[0], shapes[0][1:]
        length, padded, halves = sum(shape[0] for shape in shapes), 0, 1
        kinds = [r.arrangement for r in rows]
        if kinds in (["q", "k", "v"], ["q", "q", "k", "v"]):
            parts = _query_groups(names, shapes, self.model.symbols["NKV"])
        elif kinds == ["gate", "up"]:
            halves = 2
            parts = [
                Part(n, whole(s), (i * s[0], *(0,) * len(rest)))
                for i, (n, s) in enumerate(zip(names, shapes, strict=True))
            ]
        elif len(kinds) == 1 and kinds[0] in ("plain", "vocab", *HEADS):
            parts = [Part(names[0], whole(shapes[0]), (0,) * len(shapes[0]))]
            if kinds == ["vocab"] and self.padded_vocab:
                parts += self._kept_padding(names[0], shapes[0])
                padded = self.padded_vocab - length - self.kept_padding
                length = self.padded_vocab
        else:
            raise ValueError(
                f"{self.model.family.name}: {megatron} is made of {kinds}, which no rule arranges"
            )
        local = self.model.family.local_names.get(megatron, megatron)
        self.shapes.update(zip(names, shapes, strict=True))
        self.primary.setdefault(megatron, names[0])
        if row.fp32:
            self.fp32.update(names)
        if row.less_1:
            self.less_1.update(names)
        split, prefix = row.split_of(self.impl), block.megatron
        if self.hybrid:
            (prefix, megatron), (_, local) = (
                hybrid.hybrid_name(block.megatron, block.layer, name, not self.model.family.layer_letters)
                for name in (megatron, local)
            )
        self.parameters.append(
            Parameter(
                prefix,
                megatron,
                local,
                block.layer,
                expert,
                block.mtp,
                (length, *rest),
                tuple(parts),
                split,
                halves,
                padded,
                row.fp32,
            )
        )

    def _kept_padding(self, name: str, shape: tuple[int, ...]) -> list[Part]:
        """Return the padding of a vocabulary tensor that is kept, as a canonical tensor after it."""
        if not self.kept_padding:
            return []
        kept = (self.kept_padding, *shape[1:])
        self.shapes[PADDING + name] = kept
        return [Part(PADDING + name, whole(kept), (shape[0], *(0,) * len(shape[1:])))]


def _query_groups(names: list[str], shapes: list[tuple[int, ...]], groups: int) -> list[Part]:
    """Arrange the rows of a fused QKV parameter: for each query group its queries, its key, its value."""
    rows = [shape[0] // groups for shape in shapes]
    rest, parts = shapes[0][1:], []
    for group in range(groups):
        at = group * sum(rows)
        for name, n in zip(names, rows, strict=True):
            parts.append(Part(name, Box((group * n, *(0,) * len(rest)), (n, *rest)), (at, *(0,) * len(rest))))
            at += n
    return parts


def padded_vocab_size(vocab: int, make_vocab_size_divisible_by: int, tp: int) -> int:
    """Return the vocabulary rows in Megatron: the next multiple of
    ``--make-vocab-size-divisible-by`` times TP."""
    multiple = make_vocab_size_divisible_by * tp
    return -(-vocab // multiple) * multiple


def parts_inside(p: Parameter, box: Box) -> tuple[tuple[Part, ...], tuple[Box, ...]]:
    """Return the parts and the padding of a parameter that lie in a box of it, in the box's own
    coordinates."""
    parts = []
    for part in p.parts:
        if part.at == box.offsets and part.box.lengths == box.lengths:  # as for most experts
            parts.append(Part(part.name, part.box, (0,) * len(part.at)))
            continue
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
