"""The part of a live trainer's model that this rank holds, by published names; of any trainer."""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch

from reshard.core.boxes import Box, whole
from reshard.core.dtypes import DTYPES, Dtype, dtype_named
from reshard.core.placement import LocalTensor
from reshard.device.live_boxes import LiveBox
from reshard.device.memory import Region
from reshard.device.table_form import TableForm
from reshard.megatron.parameters import expand
from reshard.megatron.towers import with_tower_shapes
from reshard.models.model import Model
from reshard.models.towers import TAKES_TOWER
from reshard.refit.trainer import Trainer
from reshard.storage.io.boxes import Rows
from reshard.storage.io.casts import stored_dtype

# A box as ranks send it to one another: its offsets, then its lengths.
HeldBoxes = list[Any]


class LocalBoxes:
    """This rank's part of a live model.

    After `find_boxes`, `boxes` are the published tensors' boxes that lie in its memory, `padding` the regions
    of vocabulary padding.
    """

    holds_less_1 = False  # norms that Megatron holds minus 1

    def __init__(self, trainer: Trainer, turned_too: bool = False) -> None:
        self._turned_too = turned_too  # what transformers holds transposed, of a table, is read, too
        self._table: TableForm | None = None  # of a trainer that has some of it
        self.trainer, self.device = trainer, trainer.device or torch.device("cpu")
        self.boxes: list[LiveBox] = []
        self.padding: list[tuple[Region, Rows]] = []
        self._held: list[LocalTensor] = []
        self._less_1: frozenset[str] = frozenset()
        self._fp32: frozenset[str] = frozenset()  # never cast down
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._dtype: str | None = None

    def find_boxes(
        self, model: Model, make_vocab_size_divisible_by: int = 128, dtype: str | None = None
    ) -> None:
        """Find the boxes of a model's tensors in this rank's memory, to be published in `dtype`, by default
        in their own. Raises ReshardError if the live model computes something else, or has parameters that
        the model does not have."""
        self.trainer.check_model(model)
        as_saved = self.trainer.as_published(model) if self._turned_too else self.trainer
        self._table = TableForm(model) if as_saved is not self.trainer else None
        self._held, self._dtype = as_saved.publish(model), dtype
        mapping = expand(model)
        if TAKES_TOWER in model.config and model.family.tower:
            mapping = with_tower_shapes(mapping, model)
        self._shapes = dict(mapping.shapes)
        self._less_1 = mapping.less_1 if self.holds_less_1 else frozenset()
        self._fp32 = mapping.fp32
        self.find_regions()

    def find_regions(self) -> None:
        """Find the boxes where they lie now: a trainer may have moved them."""
        self.boxes, self.padding = [], []
        for tensor, region in zip(self._held, self.trainer.memory, strict=True):
            for part in tensor.parts:
                dtype = self._dtype_of(region.tensor, part.name)
                rows, held = Rows.of(part.local_box), dtype.held(part.name in self._less_1)
                box = _in_all_dims(part.box, self._shapes.get(part.name, ()))
                live = LiveBox(part.name, box, region, rows, held)
                self.boxes.extend([live] if self._table is None else self._table.boxes(live))
            self.padding += [(region, Rows.of(box)) for box in tensor.fills]

    def _dtype_of(self, tensor: torch.Tensor, name: str) -> Dtype:
        """Return the dtype in which a tensor of this rank's memory is published by a name: in its own if it has whole
        numbers, or is never cast down."""
        target = DTYPES[self._dtype] if self._dtype else None
        return stored_dtype(dtype_named(str(tensor.dtype)), target, name in self._fp32)

    def names_by_dtype(self) -> dict[str, list[str]]:
        """Return the names of this rank's tensors, by dtype."""
        names: dict[str, set[str]] = {}
        for box in self.boxes:
            names.setdefault(box.dtype.name, set()).add(box.name)
        return {dtype: sorted(of_dtype) for dtype, of_dtype in names.items()}

    def by_name(self) -> dict[str, list[LiveBox]]:
        """Return the boxes of each tensor, in the order of `held_boxes`."""
        boxes: dict[str, list[LiveBox]] = {}
        for box in self.boxes:
            boxes.setdefault(box.name, []).append(box)
        return boxes

    def numbered(self, numbers: dict[str, list[int]]) -> list[LiveBox]:
        """Return the boxes with these numbers among those of each tensor."""
        boxes = self.by_name()
        return [boxes[name][number] for name, of_tensor in numbers.items() for number in of_tensor]

    def held_boxes(self) -> dict[str, list[HeldBoxes]]:
        """Return the boxes by name, as this rank sends them to the others."""
        boxes: dict[str, list[HeldBoxes]] = {}
        for live in self.boxes:
            boxes.setdefault(live.name, []).append([*live.box.offsets, *live.box.lengths])
        return boxes


def _in_all_dims(box: Box, shape: tuple[int, ...]) -> Box:
    """Return a box of whole rows of a tensor of more than two dims, which a trainer has as a matrix, in all of them."""
    if len(shape) <= len(box.lengths) or box.lengths[1:] != (prod(shape[1:]),):
        return box
    return Box((box.offsets[0], *(0 for _ in shape[1:])), (box.lengths[0], *shape[1:]))


def box_of(numbers: Sequence[int]) -> Box:
    """Return the box that a rank sent."""
    dims = len(numbers) // 2
    return Box(tuple(numbers[:dims]), tuple(numbers[dims:]))


def uncovered_tensors(
    boxes_of_ranks: list[dict[str, list[HeldBoxes]]], shapes: Mapping[str, tuple[int, ...]]
) -> list[str]:
    """Return the canonical tensors that have an element which no rank holds."""
    boxes: dict[str, set[tuple[int, ...]]] = {}
    for boxes_of_names in boxes_of_ranks:
        for name, sent in boxes_of_names.items():
            boxes.setdefault(name, set()).update(map(tuple, sent))
    uncovered = []
    for name, shape in shapes.items():
        rest = [whole(shape)]
        for box in sorted(boxes.get(name, ())):
            rest = [left for piece in rest for left in piece.minus(box_of(box))]
        if rest:
            uncovered.append(name)
    return uncovered
