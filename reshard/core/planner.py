"""The planner: a pure function from two placements to the exact list of copies between them.

It knows no file, no process and no tensor. For every element of every destination tensor it finds one place
to read it from, merges neighboring copies, and `prove` shows that the result is right before anything runs.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import lru_cache
from operator import add, sub
from typing import Any, NamedTuple

from reshard.core.boxes import Box, first_overlap, whole
from reshard.core.placement import LocalTensor, Placement


class PlanError(Exception):
    """A placement or a plan that would not write every destination element exactly once from where it
    lies."""


class Transfer(NamedTuple):
    """Copy `box` of canonical tensor `name` from `src` at `src_at` to `dst` at `dst_at`; offsets in
    elements."""

    name: str
    box: Box
    src: Any
    src_at: tuple[int, ...]
    dst: Any
    dst_at: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """The transfers from one placement to another, in the order of the destination's tensors."""

    src: Placement
    dst: Placement
    transfers: tuple[Transfer, ...]

    def by_canonical_tensor(self) -> dict[str, list[Transfer]]:
        """The transfers of each canonical tensor."""
        groups: dict[str, list[Transfer]] = defaultdict(list)
        for transfer in self.transfers:
            groups[transfer.name].append(transfer)
        return dict(groups)


def make_plan(
    src: Placement, dst: Placement, distance: Callable[[Hashable, Hashable], int] | None = None
) -> Plan:
    """Plan the copies that fill every tensor of `dst` from `src`, and prove them.

    `distance(src holder, dst holder)` orders replicas: the nearest one is read. Raises PlanError if an
    element has no source, lies outside its tensor or would be written twice.

    Two ranks that hold four rows each, to one tensor of eight:

    >>> from reshard.core.placement import LocalTensor, Part
    >>> halves = [LocalTensor(r, (4,), (Part("w", Box((4 * r,), (4,)), (0,)),), holder=r) for r in (0, 1)]
    >>> plan = make_plan(Placement.of({"w": (8,)}, halves), Placement.canonical({"w": (8,)}))
    >>> [(t.src, t.dst_at, t.box.lengths) for t in plan.transfers]
    [(0, (0,), (4,)), (1, (4,), (4,))]
    """
    sources: dict[str, list[tuple[Place, Hashable, Hashable]]] = defaultdict(list)
    for tensor in src.tensors.values():
        for part in tensor.parts:
            sources[part.name].append((Place(part.box, part.at), tensor.id, tensor.holder))
    transfers: list[Transfer] = []
    for tensor in dst.tensors.values():
        for name, box, at in tensor.parts:
            candidates = sources.get(name, [])
            if distance is not None:
                candidates = sorted(candidates, key=lambda c: distance(c[2], tensor.holder))
            cuts, missing = _cut(Place(box, at), tuple([place for place, _, _ in candidates]))
            if missing is not None:
                raise PlanError(
                    f"no source holds {name} at offsets {missing.offsets}, lengths {missing.lengths}"
                )
            copies = [
                Transfer(name, common, candidates[index][1], src_at, tensor.id, dst_at)
                for index, common, src_at, dst_at in cuts
            ]
            transfers += _merged(copies)
    plan = Plan(src, dst, tuple(transfers))
    prove(plan)
    return plan


class Place(NamedTuple):
    """A box of a canonical tensor, and where its first element lies in a local tensor."""

    box: Box
    at: tuple[int, ...]


class Cut(NamedTuple):
    """A box of a part that one of several candidates holds: the candidate's index, the box, and
    where it lies on both sides."""

    candidate: int
    box: Box
    src_at: tuple[int, ...]
    dst_at: tuple[int, ...]


@lru_cache(1 << 12)  # the layers of a model, and their experts, are all alike
def _cut(part: Place, candidates: tuple[Place, ...]) -> tuple[tuple[Cut, ...], Box | None]:
    """Cut a part into the boxes that candidates hold, each taken from the first one that has it.
    Return the cuts, and a box that none holds, or None."""
    missing, cuts = [part.box], []
    for index, (box, at) in enumerate(candidates):
        rest = []
        for piece in missing:
            common = piece.intersect(box)
            if common is None:
                rest.append(piece)
                continue
            src_at = tuple(map(add, at, common.relative_to(box.offsets)))
            dst_at = tuple(map(add, part.at, common.relative_to(part.box.offsets)))
            cuts.append(Cut(index, common, src_at, dst_at))
            rest += piece.minus(common)
        missing = rest
        if not missing:
            break
    return tuple(cuts), missing[0] if missing else None


def _merged(transfers: list[Transfer]) -> list[Transfer]:
    """Join transfers that follow each other along dim 0 in the canonical tensor, in the source and in the
    destination."""
    if len(transfers) == 1:
        return transfers
    merged: list[Transfer] = []
    for t in sorted(transfers, key=lambda t: (t.box.offsets[1:], t.box.offsets)):
        if merged:
            last = merged[-1]
            rows = last.box.lengths[0]
            if (
                last.src == t.src
                and last.box.lengths[1:] == t.box.lengths[1:]
                and all(
                    b == (a[0] + rows, *a[1:])
                    for a, b in (
                        (last.box.offsets, t.box.offsets),
                        (last.src_at, t.src_at),
                        (last.dst_at, t.dst_at),
                    )
                )
            ):
                joined = Box(last.box.offsets, (rows + t.box.lengths[0], *t.box.lengths[1:]))
                merged[-1] = last._replace(box=joined)
                continue
        merged.append(t)
    return merged


def prove(plan: Plan) -> None:
    """Raise PlanError unless the plan writes every destination element exactly once, from the place where it
    lies.

    Checked for each destination tensor: parts and fills cover it without overlap; each transfer lies inside
    both tensors; its elements are the ones that the source's and the destination's parts say; and the
    transfers cover all parts exactly once.
    """
    written: dict[Hashable, list[Box]] = defaultdict(list)
    for t in plan.transfers:
        for side, placement, tensor_id, at in (
            ("source", plan.src, t.src, t.src_at),
            ("destination", plan.dst, t.dst, t.dst_at),
        ):
            tensor = placement.tensors.get(tensor_id)
            if tensor is None:
                raise PlanError(
                    f"a transfer of {t.name} names {side} tensor {tensor_id}, which does not exist"
                )
            if not len(t.box.offsets) == len(t.box.lengths) == len(at) or min(t.box.lengths, default=1) < 1:
                raise PlanError(
                    f"a transfer of {t.name} at {at} moves {t.box}, which is not a box of elements"
                )
            if not _lies_in(tensor.shape, at, t.box.lengths):
                raise PlanError(
                    f"a transfer of {t.name} leaves {side} tensor {tensor_id} of shape "
                    f"{tensor.shape}: {Box(at, t.box.lengths)}"
                )
            if not _holds(tensor, t.name, t.box, at):
                raise PlanError(
                    f"{side} tensor {tensor_id} does not hold {t.name} at {t.box.offsets} where "
                    f"the transfer says"
                )
        written[t.dst].append(Box(t.dst_at, t.box.lengths))
    for tensor in plan.dst.tensors.values():
        for what, boxes in (
            ("the placement of", [part.local_box for part in tensor.parts]),
            ("the transfers into", written[tensor.id]),
        ):
            wrong = _uncovered(tensor.shape, (*boxes, *tensor.fills))
            if wrong:
                raise PlanError(f"{what} {tensor.id} {wrong}")
        for part in tensor.parts:
            shape = plan.dst.shapes.get(part.name)
            if shape is None or not _lies_in(shape, *part.box):
                raise PlanError(f"{tensor.id} holds a box outside {part.name} of shape {shape}: {part.box}")


@lru_cache(1 << 12)
def _uncovered(shape: tuple[int, ...], boxes: tuple[Box, ...]) -> str:
    """Say how boxes fail to cover a tensor of this shape exactly once; empty if they cover it."""
    outside = [box for box in boxes if not whole(shape).contains(box)]
    if outside:
        return f"leave its shape {shape}: {outside[0]}"
    overlap = first_overlap(boxes)
    if overlap:
        return f"write elements twice: {overlap[0]} and {overlap[1]}"
    covered, size = sum(box.volume for box in boxes), whole(shape).volume
    return f"cover {covered} of its {size} elements" if covered != size else ""


@lru_cache(1 << 12)
def _lies_in(shape: tuple[int, ...], offsets: tuple[int, ...], lengths: tuple[int, ...]) -> bool:
    return len(offsets) == len(shape) and whole(shape).contains(Box(offsets, lengths))


def _holds(tensor: LocalTensor, name: str, box: Box, at: tuple[int, ...]) -> bool:
    """Return True if a local tensor holds every element of `box`, the first one at `at`."""
    return _covers(tuple([Place(part.box, part.at) for part in tensor.parts if part.name == name]), box, at)


@lru_cache(1 << 12)
def _covers(parts: tuple[Place, ...], box: Box, at: tuple[int, ...]) -> bool:
    """Return True if every element of `box` lies in one of the parts, the first one at `at`."""
    shift = tuple(map(sub, at, box.offsets))
    rest = [box]
    for part in parts:
        if shift == tuple(map(sub, part.at, part.box.offsets)):
            # parts may overlap: what one holds counts once
            rest = [left for piece in rest for left in piece.minus(part.box)]
    return not rest
