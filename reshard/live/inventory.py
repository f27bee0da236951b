"""The tensors that all ranks of a live model hold together, in which dtypes, and which rank writes which
box."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from reshard.comm.team import Team
from reshard.core.boxes import Box, whole
from reshard.core.dtypes import DTYPES
from reshard.core.errors import ReshardError, listed
from reshard.core.views import View
from reshard.live.collective import run_on_first
from reshard.live.local_boxes import HeldBoxes, LocalBoxes, box_of, uncovered_tensors
from reshard.live.published_model import PublishedModel
from reshard.megatron.parameters import ModelParameters, expand
from reshard.megatron.towers import with_tower_shapes
from reshard.models.model import Model
from reshard.storage.io.streams import TensorInfo


class WriteAssignment(NamedTuple):
    """A box that `rank` writes or sends; `number` is its index among the boxes of the tensor that
    the rank holds."""

    rank: int
    number: int
    box: Box


@dataclass(frozen=True)
class Inventory:
    """The published tensors of a live model.

    `model` has no MTP layers where no rank has them, and `with_tower` says whether the tensors are also those of the
    tower around a language model. `tensors` are in the order of the family's
    table. `copies` maps tensors that repeat another to that one, and `packed` those that a file has
    as parts of others to the parts. `assignments` says, in the first process only, which ranks
    write each tensor that is no copy.
    """

    model: Model
    with_tower: bool
    tensors: dict[str, TensorInfo]
    copies: dict[str, str]
    fp32: frozenset[str]
    packed: dict[str, str]
    assignments: dict[str, list[WriteAssignment]]

    def assigned_numbers(self, ranks: int) -> list[dict[str, list[int]]]:
        """Return for each of so many ranks the numbers of the boxes that it writes; in the first process only."""
        return assigned_numbers(self.assignments, ranks)


def assigned_numbers(
    assignments: Mapping[str, list[WriteAssignment]], ranks: int
) -> list[dict[str, list[int]]]:
    """Return for each of so many ranks the numbers of the boxes that it writes, by tensor."""
    shares: list[dict[str, list[int]]] = [{} for _ in range(ranks)]
    for name, of_tensor in assignments.items():
        for assignment in of_tensor:
            shares[assignment.rank].setdefault(name, []).append(assignment.number)
    return shares


def take_inventory(team: Team, local: LocalBoxes, published: PublishedModel) -> Inventory:
    """Gather what every rank holds. Raises ReshardError on every rank where all of them together
    lack a part of a tensor, hold one in two dtypes, or parts that overlap."""
    gathered = team.gather([local.held_boxes(), local.names_by_dtype()])
    assignments: dict[str, list[WriteAssignment]] = {}

    def decide() -> dict[str, Any]:
        boxes_of_ranks = [boxes for boxes, _ in gathered]
        dtypes = dtype_of_names([names for _, names in gathered])
        model = published.model
        mtp = any(name.startswith(model.mtp_prefixes(0)[1]) for name in dtypes)
        tower = published.model.wrapped and any(map(published.model.is_of_tower, dtypes))
        mapping = _mapping(published, mtp, tower)
        shapes = {name: shape for name, shape in mapping.shapes.items() if name not in mapping.copies}
        lacking = uncovered_tensors(boxes_of_ranks, shapes)
        if lacking:
            raise ReshardError(
                f"all ranks' models together lack elements of {len(lacking)} tensors of {model.where}: "
                f"{listed(lacking, 3)}"
            )
        assignments.update(assign_writers(boxes_of_ranks, shapes, _matrices(mapping.packed)))
        values = list(dtypes.values())
        usual = max(sorted(set(values)), key=values.count)
        return {
            "mtp": mtp,
            "tower": tower,
            "dtype": usual,
            "others": {n: d for n, d in dtypes.items() if d != usual},
        }

    decided = run_on_first(team, decide)
    model = _with_mtp(published, decided["mtp"])
    mapping = _mapping(published, decided["mtp"], decided["tower"])
    # As in the files that this model was started from, or else as in published ones.
    copies = {
        n: p
        for n, p in mapping.copies.items()
        if (n in published.stored if published.stored else n not in mapping.optional)
    }
    tensors = {
        name: TensorInfo(shape, DTYPES[decided["others"].get(copies.get(name, name), decided["dtype"])])
        for name, shape in mapping.shapes.items()
        if name not in mapping.copies or name in copies
    }
    # As in the files that this model was started from.
    each_alone = any(name in published.stored for name in mapping.packed)
    packed = {} if each_alone else mapping.packed
    return Inventory(model, decided["tower"], tensors, copies, mapping.fp32, packed, assignments)


def _with_mtp(published: PublishedModel, mtp: bool) -> Model:
    return published.model if mtp else replace(published.model, mtp_layers=0)


def _mapping(published: PublishedModel, mtp: bool, tower: bool) -> ModelParameters:
    model = _with_mtp(published, mtp)
    return with_tower_shapes(expand(model), model) if tower else expand(model)


def dtype_of_names(names_by_dtype: list[dict[str, list[str]]]) -> dict[str, str]:
    """Return the dtype of each name. Raises ReshardError for one that ranks hold in two."""
    dtypes: dict[str, str] = {}
    for names_of_rank in names_by_dtype:
        for dtype, names in names_of_rank.items():
            for name in names:
                if dtypes.setdefault(name, dtype) != dtype:
                    raise ReshardError(f"the ranks' models hold {name} as {dtypes[name]} and as {dtype}")
    return dtypes


def _matrices(packed: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Return, for each tensor that files hold transposed, where its matrix is: a stored tensor, and
    indexes."""
    views = {name: View.parse(place) for name, place in packed.items() if place.endswith(".T")}
    return {
        name: (view.tensor, *(str(selection.start) for selection in view.selections if selection.drops))
        for name, view in views.items()
    }


def assign_writers(
    boxes_of_ranks: list[dict[str, list[HeldBoxes]]],
    shapes: dict[str, tuple[int, ...]],
    matrices: dict[str, tuple[str, ...]],
) -> dict[str, list[WriteAssignment]]:
    """Choose one rank for each box that several hold, so that each writes about as many elements,
    and one for the tensors that are columns of one of the `matrices`."""
    writers: dict[tuple[str, ...], int] = {}
    assignments: dict[str, list[WriteAssignment]] = {}
    load = [0] * len(boxes_of_ranks)
    holders: dict[str, dict[tuple[int, ...], list[tuple[int, int]]]] = {name: {} for name in shapes}
    for rank, boxes_of_names in enumerate(boxes_of_ranks):
        for name, boxes in boxes_of_names.items():
            for number, box in enumerate(boxes):
                holders[name].setdefault(tuple(box), []).append((rank, number))
    for name, shape in shapes.items():
        if sum(box_of(box).volume for box in holders[name]) != whole(shape).volume:
            raise ReshardError(f"the ranks' models hold parts of {name} that overlap, which is not supported")
        assignments[name] = []
        for numbers, candidates in sorted(holders[name].items()):
            chosen = writers.get(matrices.get(name, ()))
            rank, number = min(candidates, key=lambda holder: (holder[0] != chosen, load[holder[0]], holder))
            if name in matrices:
                writers[matrices[name]] = rank
            load[rank] += box_of(numbers).volume
            assignments[name].append(WriteAssignment(rank, number, box_of(numbers)))
    return assignments
