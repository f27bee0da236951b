"""What all ranks of a live model go by: which tensors it has, in which dtypes, and who gives which box."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from reshard.core.boxes import Box, whole
from reshard.core.dtypes import DTYPES
from reshard.core.errors import ReshardError, listed
from reshard.megatron.live.config import Published
from reshard.megatron.live.ranks import HeldBoxes, Rank, box_of, decide, not_covered
from reshard.megatron.parameters import expand
from reshard.models.model import Model
from reshard.storage.io.streams import TensorInfo
from reshard.storage.run.team import Team


class WriteAssignment(NamedTuple):
    """A box that `rank` gives; `number` is the box's among those that it holds of the tensor."""

    rank: int
    number: int
    box: Box


@dataclass(frozen=True)
class Agreed:
    """`model` has no MTP layers where no rank has them; `tensors` are the published ones, in the order of the
    table, and `copies` those of them that repeat another; `given` says, in the first process only, which ranks
    give each of the others."""

    model: Model
    tensors: dict[str, TensorInfo]
    copies: dict[str, str]
    fp32: frozenset[str]
    given: dict[str, list[WriteAssignment]]


def agree(team: Team, rank: Rank, published: Published) -> Agreed:
    """Meet, and agree. Raises ReshardError everywhere where all ranks together lack a part of a tensor, hold one
    in two dtypes, or parts that overlap."""
    held = team.gather([rank.told(), rank.dtypes()])
    given: dict[str, list[WriteAssignment]] = {}

    def verdict() -> dict[str, Any]:
        dtypes = _dtypes([told for _, told in held])
        model = published.model
        mtp = any(name.startswith(f"model.layers.{model.num_layers}.") for name in dtypes)
        shapes = _shapes(_model(published, mtp))
        boxes = [told for told, _ in held]
        left = not_covered(boxes, shapes)
        if left:
            raise ReshardError(
                f"all ranks' models together lack elements of {len(left)} tensors of {model.where}: {listed(left, 3)}"
            )
        given.update(_givers(boxes, shapes))
        names = list(dtypes.values())
        most = max(sorted(set(names)), key=names.count)
        return {"mtp": mtp, "dtype": most, "others": {n: d for n, d in dtypes.items() if d != most}}

    found = decide(team, verdict)
    model = _model(published, found["mtp"])
    mapping = expand(model)
    # Those that may be absent are there where the model that was started from had them.
    copies = {n: p for n, p in mapping.copies.items() if n not in mapping.optional or n in published.stored}
    tensors = {
        name: TensorInfo(shape, DTYPES[found["others"].get(copies.get(name, name), found["dtype"])])
        for name, shape in mapping.shapes.items()
        if name not in mapping.copies or name in copies
    }
    return Agreed(model, tensors, copies, mapping.fp32, given)


def _model(published: Published, mtp: bool) -> Model:
    return published.model if mtp else replace(published.model, mtp_layers=0)


def _shapes(model: Model) -> dict[str, tuple[int, ...]]:
    """The canonical tensors that are no copies."""
    mapping = expand(model)
    return {name: shape for name, shape in mapping.shapes.items() if name not in mapping.copies}


def _dtypes(told: list[dict[str, list[str]]]) -> dict[str, str]:
    dtypes: dict[str, str] = {}
    for one in told:
        for dtype, names in one.items():
            for name in names:
                if dtypes.setdefault(name, dtype) != dtype:
                    raise ReshardError(f"the ranks' models hold {name} as {dtypes[name]} and as {dtype}")
    return dtypes


def _givers(
    held: list[dict[str, list[HeldBoxes]]], shapes: dict[str, tuple[int, ...]]
) -> dict[str, list[WriteAssignment]]:
    """Of boxes that several ranks hold alike one, so that each rank gives about as many elements."""
    given: dict[str, list[WriteAssignment]] = {}
    load = [0] * len(held)
    holders: dict[str, dict[tuple[int, ...], list[tuple[int, int]]]] = {name: {} for name in shapes}
    for rank, one in enumerate(held):
        for name, boxes in one.items():
            for number, told in enumerate(boxes):
                holders[name].setdefault(tuple(told), []).append((rank, number))
    for name, shape in shapes.items():
        if sum(box_of(box).volume for box in holders[name]) != whole(shape).volume:
            raise ReshardError(f"the ranks' models hold parts of {name} that overlap, which is not supported")
        given[name] = []
        for box, several in sorted(holders[name].items()):
            rank, number = min(several, key=lambda holder: (load[holder[0]], holder))
            load[rank] += box_of(box).volume
            given[name].append(WriteAssignment(rank, number, box_of(box)))
    return given
