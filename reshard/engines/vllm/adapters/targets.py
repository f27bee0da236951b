"""Where the adapter of each published weight goes on a rank of vLLM: from the weight's own place there.

A row-parallel weight's columns are those of A, a column-parallel weight's rows those of B; heads that
several ranks repeat, and experts, are where the weights are. What vLLM splits besides
(``fully_sharded_loras``), it splits evenly.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from reshard.core.extras import importing

with importing("vllm"):
    import torch

from reshard.core.boxes import Box, whole
from reshard.core.errors import ReshardError
from reshard.core.placement import Part, Placement
from reshard.core.views import tensor_of
from reshard.device.memory import Region
from reshard.engines.vllm.adapters.compat import Buffers, buffers_of, rank_of

OUTPUT_LAYER, LOGITS = "lm_head", "logits_processor"


class Target(NamedTuple):
    """The place of one published weight's adapter: `box` is what the rank has of the weight, of `shape`,
    `expert` the index in the first dim of the buffers of a slot.

    Several weights may have one A: `part` counts them. The rows ``[first, first + count)`` of a weight's B
    (`rows`) lie from row `at` on in the buffer; A has those of its rows that are among `ranks`, likewise.
    """

    layer: str
    buffers: Buffers
    expert: int
    part: int
    box: Box
    shape: tuple[int, ...]
    rows: tuple[int, int]
    at: int
    ranks: tuple[int, int]

    def rows_of_a(self, rank: int) -> tuple[int, int]:
        """Return the first row of an A of this rank that is here, and how many are."""
        first = min(self.ranks[0], rank)
        return first, min(sum(self.ranks), rank) - first


def find_targets(
    placement: Placement,
    regions: Mapping[Any, Region],
    wrappers: Mapping[str, torch.nn.Module],
    turned: Collection[Any] = (),
) -> tuple[dict[str, Target], dict[str, str]]:
    """Return the place of each published weight's adapter on this rank, for those in layers that vLLM has
    wrapped, whose `wrappers` are given by the layers' names; and why there is none, by the weights of
    layers whose buffers are not of the shapes that they call for. The weights' own places are their
    `placement` and `regions`; those with an id that is `turned` are served transposed.
    """
    reasons: dict[str, str] = {}
    parts_of: dict[tuple[str, str], list[tuple[int, Part]]] = defaultdict(list)
    for identity, tensor in placement.tensors.items():
        layer, _, key = tensor_of(identity[0]).rpartition(".")
        wrapped = _wrapped_around(layer, wrappers)
        if wrapped is None:
            continue
        if identity in turned:
            why = f"vLLM serves {layer} transposed to what is published, whose adapters are not refitted"
            reasons.update(dict.fromkeys((part.name for part in tensor.parts), why))
            continue
        region = regions[identity]
        for part in tensor.parts:
            if len(part.box.lengths) == 2:
                start = region.offset + part.at[0] * region.pitch + part.at[1]
                parts_of[wrapped, key].append((start, part))
    targets: dict[str, Target] = {}
    for (layer, key), parts in parts_of.items():
        try:
            slices = buffers_of(layer, wrappers[layer]).get(key)
            if slices is not None:
                tp_rank = rank_of(wrappers[layer])
                targets.update(_of_layer(layer, slices, parts, placement.shapes, tp_rank))
        except ReshardError as error:
            reasons.update(dict.fromkeys((part.name for _, part in parts), str(error)))
    return targets, reasons


def _wrapped_around(layer: str, wrappers: Mapping[str, torch.nn.Module]) -> str | None:
    """Return the wrapped layer that a parameter's module is, or is inside of; of an output layer what makes
    logits with it."""
    parent, _, own = layer.rpartition(".")
    for name in (layer, parent, *([f"{parent}.{LOGITS}".lstrip(".")] if own == OUTPUT_LAYER else [])):
        if name in wrappers:
            return name
    return None


def _of_layer(
    layer: str,
    slices: list[Buffers],
    parts: list[tuple[int, Part]],
    shapes: Mapping[str, tuple[int, ...]],
    tp_rank: int,
) -> dict[str, Target]:
    boxes: dict[str, list[Box]] = defaultdict(list)
    last = ""
    for _, part in sorted(parts, key=lambda start_and_part: start_and_part[0]):
        if part.name in boxes and part.name != last:
            raise ReshardError(
                f"vLLM has rows of {part.name} and {last} in turn in {layer}, whose adapters are not refitted"
            )
        boxes[part.name].append(part.box)
        last = part.name
    experts = slices[0].a.shape[1]
    together = len(boxes) // (experts * len(slices))  # weights with one A
    if not together or len(boxes) != experts * len(slices) * together:
        raise ReshardError(
            f"vLLM holds adapters of {layer} for {experts * len(slices)} weights, and this rank has "
            f"{len(boxes)} published ones in it, which is not refitted"
        )
    joined = [(name, _joined(name, pieces)) for name, pieces in boxes.items()]
    targets = {}
    for start in range(0, len(joined), together):
        group = joined[start : start + together]
        expert, buffers = divmod(start // together, len(slices))
        if slices[buffers].whole:  # of which the weight is split
            group = [(name, whole(shapes[name])) for name, _ in group]
        for index, (name, rows, at) in enumerate(_rows_in(layer, slices[buffers], group, tp_rank)):
            share = slices[buffers].a.shape[2]
            box, ranks = group[index][1], (tp_rank * share, share)
            if share == slices[buffers].b.shape[3]:  # the largest rank: not split
                ranks = 0, share
            targets[name] = Target(layer, slices[buffers], expert, index, box, shapes[name], rows, at, ranks)
    return targets


def _rows_in(
    layer: str, buffers: Buffers, group: list[tuple[str, Box]], tp_rank: int
) -> list[tuple[str, tuple[int, int], int]]:
    """Return, for the weights of a slice and what this rank has of them, which rows of its B are in the buffer,
    and from which row of that on.

    Raises ReshardError if the buffer has another shape than the weights call for.
    """
    has, total = buffers.b.shape[2], sum(box.lengths[0] for _, box in group)
    (name, box), split = group[0], total // has if has else 0
    fits = all(box.lengths[1] == buffers.a.shape[3] for _, box in group)
    if not fits or not split or split * has != total or (split > 1 and len(group) > 1):
        raise ReshardError(
            f"vLLM's adapters of {layer} are for {[has, buffers.a.shape[3]]} of {name}, of which this rank has "
            f"{[total, box.lengths[1]]}"
        )
    if split > 1:
        return [(name, (box.offsets[0] + tp_rank * has, has), 0)]
    rows, at = [], 0
    for name, box in group:
        rows.append((name, (box.offsets[0], box.lengths[0]), at))
        at += box.lengths[0]
    return rows


def _joined(name: str, boxes: list[Box]) -> Box:
    """Return the one box that these boxes of rows make up, in the order in which they lie. Raises ReshardError for rows
    in another order than the published ones, as of heads that an engine's loader turns."""
    first, rows = boxes[0], sum(box.lengths[0] for box in boxes)
    ends = [box.offsets[0] + box.lengths[0] for box in boxes]
    if any(box.offsets[0] != end for box, end in zip(boxes[1:], ends[:-1], strict=True)) or any(
        (box.offsets[1], box.lengths[1]) != (first.offsets[1], first.lengths[1]) for box in boxes
    ):
        raise ReshardError(f"this rank of vLLM has rows of {name} that do not follow each other")
    return Box(first.offsets, (rows, first.lengths[1]))
