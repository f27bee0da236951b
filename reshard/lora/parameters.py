"""The matrices of an adapter as Megatron's parameters, derived from those of the base model.

Each linear layer of a table gives A ``[rank, in]`` and B ``[out, rank]``. B's rows lie as the base's: q, k and v
by query group, gate above up. The published layers that Megatron fuses (q, k and v, or gate and up) have one A in
Megatron, and each a copy of it in PEFT's files, unless the adapter has a pair for each of them (`canonical`).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from reshard.core.boxes import Box, whole
from reshard.core.errors import ReshardError
from reshard.core.placement import Part
from reshard.lora.names import CANONICAL, A, B, megatron_name, module_of, peft_name
from reshard.megatron.parameters import ModelParameters, Parameter
from reshard.models.tables import HEADS

WEIGHT = ".weight"
OUTPUT_LAYER = "output_layer"
FORMATS = ("bridge", "mcore-bridge")


@dataclass(frozen=True)
class AdapterForm:
    """The form in which a Megatron checkpoint has an adapter.

    `canonical`: each published part of a fused layer has a pair of its own, as CanonicalLoRA of
    Megatron-Bridge has them, but for experts. `adapter` is mcore-bridge's name of the adapter, None for
    Megatron-Bridge. `swiglu_ranks` is the tensor-parallel size of the trainer, on which the order of
    B's rows depends: mcore-bridge's B of gate and up has gate above up for each rank, and CanonicalLoRA's
    B of gate has the first halves of all ranks' rows above the second halves, and so has that of up.
    """

    canonical: bool = False
    adapter: str | None = None
    swiglu_ranks: int = 1

    @property
    def by_rank(self) -> bool:
        """True where `swiglu_ranks` decides the order of rows."""
        return self.canonical or self.adapter is not None

    @property
    def name(self) -> str:
        """The form's name on the command line."""
        return "bridge" if self.adapter is None else "mcore-bridge"


class LinearLayer(NamedTuple):
    """A linear layer of Megatron's: its `weight`, of each expert where it has some, and the part of its
    name in keys."""

    module: str
    weights: tuple[Parameter, ...]

    @property
    def first(self) -> Parameter:
        """The weight, of the first expert where there are some."""
        return self.weights[0]

    @property
    def of_experts(self) -> bool:
        """True for the layer of routed experts."""
        return self.first.expert is not None

    def published(self, expert: int = 0) -> list[str]:
        """Return the published weights that it is made of, in their order."""
        return list(dict.fromkeys(part.name for part in self.weights[expert].parts))


def linear_layers(base: ModelParameters) -> list[LinearLayer]:
    """Return the linear layers of a model's decoder and MTP layers, in the order of the table."""
    layers: dict[tuple[str, str, int | None], list[Parameter]] = {}
    for p in base.parameters:
        if p.layer is not None and p.name.endswith(WEIGHT) and len(p.shape) == 2 and len(p.parts):
            layers.setdefault((p.prefix, p.name, p.layer), []).append(p)
    return [LinearLayer(name.removesuffix(WEIGHT), tuple(ps)) for (_, name, _), ps in layers.items()]


def other_layers(base: ModelParameters) -> list[LinearLayer]:
    """Return the matrices of a model's decoder and MTP layers that no trainer's adapter is of: the parts of a state
    space's or linear attention's projection, and the gate of a shared expert."""
    return [
        LinearLayer(p.name, (p,))
        for p in base.parameters
        if p.layer is not None and p.expert is None and not p.name.endswith(WEIGHT) and len(p.shape) == 2
        if len(p.parts) and all(len(base.shapes.get(part.name, ())) == 2 for part in p.parts)
    ]


def output_layers(base: ModelParameters) -> list[LinearLayer]:
    """Return the output layer of a model; none of one that shares the embedding's weight."""
    return [LinearLayer(OUTPUT_LAYER, (p,)) for p in base.parameters if p.name == f"{OUTPUT_LAYER}{WEIGHT}"]


def published_layers(shapes: Mapping[str, tuple[int, ...]]) -> list[LinearLayer]:
    """Return each published matrix, of these shapes by name, as a layer of its own: for a model that has no names in
    Megatron."""
    return [
        LinearLayer(
            module_of(name),
            (Parameter("", name, name, None, None, False, shape, (Part(name, whole(shape), (0, 0)),), None),),
        )
        for name, shape in shapes.items()
        if name.endswith(WEIGHT) and len(shape) == 2
    ]


@dataclass(frozen=True)
class Adapter:
    """The adapter of one layer. `ranks` are those of its published weights, by name. Those without an entry
    have no adapter, and zeros of `missing_rank` in Megatron, if it is given. `shared` are the matrices that
    all experts have in common, and that are there once."""

    layer: LinearLayer
    ranks: Mapping[str, int]
    shared: frozenset[str] = frozenset()
    missing_rank: int | None = None


def adapter_parameters(adapters: Iterable[Adapter], form: AdapterForm) -> ModelParameters:
    """Return the matrices of these adapters as Megatron's parameters in this `form`, made of
    canonical tensors that have PEFT's names.

    Raises ReshardError if a form has no place for an adapter: fused layers of which some have
    one, or of different ranks.
    """
    expansion = _Matrices(form)
    for adapter in adapters:
        expansion.add(adapter)
    return ModelParameters(
        expansion.shapes, expansion.parameters, expansion.copies, frozenset(), frozenset(), frozenset()
    )


class _Matrices:
    def __init__(self, form: AdapterForm) -> None:
        self.form = form
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.parameters: list[Parameter] = []
        self.copies: dict[str, str] = {}

    def add(self, adapter: Adapter) -> None:
        layer, parts = adapter.layer, adapter.layer.published()
        if self.form.canonical and len(parts) > 1 and not layer.of_experts:
            for name, part in zip(parts, part_names(layer), strict=True):
                if name in adapter.ranks:
                    self._part(layer.first, layer.module, name, part, adapter.ranks[name])
                elif adapter.missing_rank is not None:
                    self._part(layer.first, layer.module, name, part, adapter.missing_rank, zeros=True)
            return
        for weight in layer.weights:
            self._fused(adapter, weight)

    def _part(self, p: Parameter, module: str, name: str, part: str, rank: int, zeros: bool = False) -> None:
        """Add the pair of a published part of a fused layer, which is whole and in its own order."""
        rows = sum(piece.box.lengths[0] for piece in p.parts if piece.name == name)
        for matrix, shape in ((A, (rank, p.shape[1])), (B, (rows, rank))):
            tensor, parts = peft_name(name, matrix), [Part(peft_name(name, matrix), whole(shape), (0, 0))]
            if matrix == B and p.halves == 2 and self.form.swiglu_ranks > 1:
                _check_divides(rows, 2 * self.form.swiglu_ranks, name)
                parts = _halves_by_rank(tensor, rows, rank, self.form.swiglu_ranks)
            self._parameter(p, megatron_name(module, matrix, part), shape, [] if zeros else parts)

    def _fused(self, adapter: Adapter, p: Parameter) -> None:
        """Add the pair of a layer, or of one expert in it. Of what is shared the first expert's is added,
        and the others' are copies."""
        names = list(dict.fromkeys(part.name for part in p.parts))
        ranks = {adapter.ranks.get(name) for name in names}
        name_of_a, name_of_b = (
            megatron_name(adapter.layer.module, m, adapter=self.form.adapter) for m in (A, B)
        )
        if ranks == {None} and adapter.missing_rank is not None:
            self._parameter(p, name_of_a, (adapter.missing_rank, p.shape[1]), [])
            self._parameter(p, name_of_b, (p.shape[0], adapter.missing_rank), [])
            return
        if len(ranks) > 1 or None in ranks:
            raise ReshardError(
                f"{self.form.name} has one adapter for {', '.join(names)}, of which {_difference(adapter, names)}"
            )
        [rank] = ranks
        assert rank is not None
        first = adapter.layer.first
        with_a, with_b = (first if matrix in adapter.shared else p for matrix in (A, B))
        shape_of_a = (rank, p.shape[1])
        primary = peft_name(with_a.parts[0].name, A)
        for name in names:
            self._copy(peft_name(name, A), primary, shape_of_a)
        if with_a is p:
            parts = [Part(primary, whole(shape_of_a), (0, 0))]
            self._parameter(self._once(p, A, adapter), name_of_a, shape_of_a, parts)
        if with_b is p:
            halves = p.halves if self.form.adapter is None else 1
            shape_of_b = (p.shape[0], rank)
            self._parameter(
                self._once(p, B, adapter), name_of_b, shape_of_b, self._rows_of_b(p, rank), halves
            )
        else:
            for own, shared in zip(p.parts, first.parts, strict=True):
                shape = (own.box.lengths[0], rank)
                self._copy(peft_name(own.name, B), peft_name(shared.name, B), shape)

    @staticmethod
    def _once(p: Parameter, matrix: str, adapter: Adapter) -> Parameter:
        """Return the weight to which a matrix belongs: none of an expert's where all share it."""
        return replace(p, expert=None) if matrix in adapter.shared else p

    def _rows_of_b(self, p: Parameter, rank: int) -> list[Part]:
        """Return where the rows of each published B lie in Megatron's: as those of the base."""
        by_rank = p.halves == 2 and p.expert is None and self.form.adapter is not None
        ranks = self.form.swiglu_ranks if by_rank else 1
        if ranks > 1:
            _check_divides(p.shape[0] // 2, ranks, p.parts[0].name)
        rows = p.shape[0] // 2 // ranks
        parts = []
        for piece in p.parts:
            name, start, length, at = (
                peft_name(piece.name, B),
                piece.box.offsets[0],
                piece.box.lengths[0],
                piece.at[0],
            )
            if ranks == 1:
                parts.append(Part(name, Box((start, 0), (length, rank)), (at, 0)))
                continue
            half = at // (p.shape[0] // 2)
            parts += [
                Part(name, Box((i * rows, 0), (rows, rank)), ((2 * i + half) * rows, 0)) for i in range(ranks)
            ]
        return parts

    def _copy(self, name: str, primary: str, shape: tuple[int, ...]) -> None:
        self.shapes[name] = shape
        if name != primary:
            self.copies[name] = primary

    def _parameter(
        self, p: Parameter, name: str, shape: tuple[int, ...], parts: list[Part], halves: int = 1
    ) -> None:
        """Add a matrix that belongs to the weight `p`; zeros where it has no parts."""
        for part in parts:
            rows = max(part.box.ends[0], self.shapes.get(part.name, (0,))[0])
            self.shapes[part.name] = (rows, shape[1])
        padded = 0 if parts else shape[0]
        self.parameters.append(
            Parameter(
                p.prefix, name, name, p.layer, p.expert, p.mtp, shape, tuple(parts), None, halves, padded
            )
        )


def _halves_by_rank(name: str, rows: int, rank: int, ranks: int) -> list[Part]:
    """Return where the rows of gate's or up's B lie in CanonicalLoRA's: Megatron-Bridge cuts the rows of
    each tensor-parallel rank in two, as if they were gate and up."""
    half = rows // ranks // 2
    return [
        Part(name, Box(((2 * i + second) * half, 0), (half, rank)), ((second * ranks + i) * half, 0))
        for i in range(ranks)
        for second in (0, 1)
    ]


def _check_divides(rows: int, parts: int, name: str) -> None:
    """Raise ReshardError if the rows of a published B cannot lie by tensor-parallel rank."""
    if rows % parts:
        raise ReshardError(
            f"--tp: the {rows} rows of {name} cannot be cut into {parts} parts: give another size"
        )


def part_names(layer: LinearLayer) -> list[str]:
    """Return CanonicalLoRA's names of the published parts of a fused layer. Raises ReshardError for
    one that it has no names for, or of which parts are one published tensor."""
    names = layer.published()
    kinds = ["gate", "up"] if layer.first.halves == 2 else list(HEADS)
    if len(kinds) != len(names):
        raise ReshardError(
            f"Megatron-Bridge's canonical LoRA has no adapters for the parts of {layer.module}, {', '.join(names)}"
        )
    if len({module_of(name) for name in names}) < len(names):
        raise ReshardError(
            f"canonical LoRA has an A for each of {', '.join(names)}, which are published as one tensor, and PEFT "
            "has one A for it: train LoRA that is not canonical"
        )
    return [CANONICAL[kind] for kind in kinds]


def _difference(adapter: Adapter, names: list[str]) -> str:
    without = [name for name in names if name not in adapter.ranks]
    if without:
        return f"{', '.join(without)} has none"
    ranks = ", ".join(f"{adapter.ranks[name]}" for name in names)
    return f"the ranks are {ranks}"
