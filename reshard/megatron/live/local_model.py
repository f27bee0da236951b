"""The part of a live Megatron model that this rank holds, by published names."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from reshard.core.boxes import Box, whole
from reshard.core.dtypes import dtype_named
from reshard.core.errors import ReshardError
from reshard.core.extras import require
from reshard.core.limits import MAX_VOCAB_MULTIPLE, check_number
from reshard.device.live_boxes import LiveBox
from reshard.device.memory import Region, check_memory
from reshard.device.staging import check_one_device
from reshard.megatron.checkpoint import EMBEDDING, OUTPUT
from reshard.megatron.parameters import expand, padded_vocab_size
from reshard.models.model import Model
from reshard.storage.io.boxes import Rows
from reshard.trainers.megatron import MegatronModel

require("megatron", "torch", "megatron.core")

# The models of a trainer: what ``get_model`` returned, or a `MegatronModel` of them.
Models = Sequence[torch.nn.Module] | torch.nn.Module | MegatronModel
# A box as ranks send it to one another: its offsets, then its lengths.
HeldBoxes = list[Any]


class LocalModel:
    """This rank's part of a live model.

    After `find_boxes`, `boxes` are the published tensors' boxes that lie in its memory, `padding` the regions
    of vocabulary padding.
    """

    def __init__(self, models: Models, metadata: Mapping[str, Any] | None) -> None:
        if isinstance(models, MegatronModel):
            check_memory(models.models)  # it may have been made while they had some
            self.trainer = models
        else:
            self.trainer = MegatronModel(models, metadata)
        check_one_device(self.trainer.models)
        self.device = self.trainer.device or torch.device("cpu")
        self.boxes: list[LiveBox] = []
        self.padding: list[tuple[Region, Rows]] = []

    def find_boxes(self, model: Model, make_vocab_size_divisible_by: int) -> None:
        """Find the boxes of a model's tensors in this rank's memory. Raises ReshardError where the
        live model computes something else, or has parameters that are none of that model's."""
        check_number(make_vocab_size_divisible_by, "make_vocab_size_divisible_by", MAX_VOCAB_MULTIPLE)
        self.trainer.check_model(model)
        held, less_one = self.trainer.publish(model), expand(model).less_one
        self._check_padding(model, make_vocab_size_divisible_by)
        for tensor, region in zip(held, self.trainer.regions, strict=True):
            dtype = dtype_named(str(region.tensor.dtype))
            for part in tensor.parts:
                rows, held_less_one = Rows.of(part.local_box), part.name in less_one
                self.boxes.append(LiveBox(part.name, part.box, region, rows, dtype, held_less_one))
            self.padding += [(region, Rows.of(box)) for box in tensor.fills]

    def _check_padding(self, model: Model, make_vocab_size_divisible_by: int) -> None:
        """Raise ReshardError where the vocabulary is padded by more than the rule gives: it is another
        one."""
        rows = max(
            (shard.shape[0] for shard in self.trainer.shards if shard.key in (EMBEDDING, OUTPUT)), default=0
        )
        config: Any = self.trainer.config
        tp = config.tensor_model_parallel_size
        most = padded_vocab_size(model.symbols["V"], make_vocab_size_divisible_by, tp)
        if rows > most:
            raise ReshardError(
                f"the trainer's model has {rows} vocabulary rows, but vocab_size {model.symbols['V']} of "
                f"{model.where} is padded to at most {most} at TP {tp}: it is another vocabulary, or give "
                f"the make_vocab_size_divisible_by that the trainer has"
            )

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
