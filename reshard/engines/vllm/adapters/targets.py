"""Where the adapter of each published weight goes on a rank of vLLM: from the weight's own place there.

A row-parallel weight's columns are those of A, a column-parallel weight's rows those of B; heads that
several ranks repeat, and experts, are where the weights are.
"""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

from reshard.core.extras import importing

with importing("vllm"):
    import torch

from reshard.core.boxes import Box
from reshard.core.errors import ReshardError
from reshard.core.placement import Part, Placement
from reshard.core.views import tensor_of
from reshard.device.memory import Region
from reshard.engines.vllm.adapters.compat import Buffers, buffers_of


class Target(NamedTuple):
    """The place of one published weight's adapter: `box` is what the rank has of the weight, of `shape`,
    `expert` the index in the first dim of the buffers of a slot."""

    layer: str
    buffers: Buffers
    expert: int
    box: Box
    shape: tuple[int, ...]


def find_targets(
    placement: Placement, regions: Mapping[Any, Region], wrappers: Mapping[str, torch.nn.Module]
) -> dict[str, Target]:
    """Return the place of each published weight's adapter on this rank, for those in layers that vLLM has
    wrapped, whose `wrappers` are given by the layers' names. The weights' own places are their
    `placement` and `regions`.

    Raises ReshardError where a wrapper's buffers are not of the shapes that the weights call for.
    """
    parts_of: dict[tuple[str, str], list[tuple[int, Part]]] = defaultdict(list)
    for identity, tensor in placement.tensors.items():
        layer, _, key = tensor_of(identity[0]).rpartition(".")
        wrapped = _wrapped_around(layer, wrappers)
        if wrapped is None:
            continue
        region = regions[identity]
        for part in tensor.parts:
            if len(part.box.lengths) == 2:
                start = region.offset + part.at[0] * region.pitch + part.at[1]
                parts_of[wrapped, key].append((start, part))
    targets = {}
    for (layer, key), parts in parts_of.items():
        slices = buffers_of(layer, wrappers[layer]).get(key)
        if slices is not None:
            targets.update(_of_layer(layer, slices, parts, placement.shapes))
    return targets


def _wrapped_around(layer: str, wrappers: Mapping[str, torch.nn.Module]) -> str | None:
    """Return the wrapped layer that a parameter's module is, or is inside of."""
    for name in (layer, layer.rpartition(".")[0]):
        if name in wrappers:
            return name
    return None


def _of_layer(
    layer: str,
    slices: list[Buffers],
    parts: list[tuple[int, Part]],
    shapes: Mapping[str, tuple[int, ...]],
) -> dict[str, Target]:
    boxes: dict[str, list[Box]] = defaultdict(list)
    for _, part in sorted(parts, key=lambda start_and_part: start_and_part[0]):
        boxes[part.name].append(part.box)
    experts = slices[0].a.shape[1]
    if len(boxes) != experts * len(slices):
        raise ReshardError(
            f"vLLM holds adapters of {layer} for {experts * len(slices)} weights, and this rank has {len(boxes)} published "
            f"ones in it, which is not refitted"
        )
    targets = {}
    for index, (name, pieces) in enumerate(boxes.items()):
        expert, buffers = index // len(slices), slices[index % len(slices)]
        box = _joined(name, pieces)
        has = buffers.b.shape[2], buffers.a.shape[3]
        if has != box.lengths:
            raise ReshardError(
                f"vLLM's adapters of {layer} are for {list(has)} of {name}, of which this rank has {list(box.lengths)}"
            )
        targets[name] = Target(layer, buffers, expert, box, shapes[name])
    return targets


def _joined(name: str, boxes: list[Box]) -> Box:
    """Return the one box that these boxes of rows make up."""
    boxes = sorted(boxes, key=lambda box: box.offsets[0])
    first, rows = boxes[0], sum(box.lengths[0] for box in boxes)
    ends = [box.offsets[0] + box.lengths[0] for box in boxes]
    if any(box.offsets[0] != end for box, end in zip(boxes[1:], ends[:-1], strict=True)) or any(
        (box.offsets[1], box.lengths[1]) != (first.offsets[1], first.lengths[1]) for box in boxes
    ):
        raise ReshardError(f"this rank of vLLM has rows of {name} that do not follow each other")
    return Box(first.offsets, (rows, first.lengths[1]))
