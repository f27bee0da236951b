"""This rank's part of a live model, Megatron's or one under FSDP2."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from reshard.core.errors import ReshardError
from reshard.live.local_boxes import LocalBoxes
from reshard.trainers.drafter import WithDrafter
from reshard.trainers.fsdp import FsdpModel

if TYPE_CHECKING:
    from reshard.live.local_model import Models


def local_boxes(
    models: "Models | FsdpModel", metadata: Mapping[str, Any] | None, turned_too: bool = False
) -> LocalBoxes:
    """Return this rank's part of a live model of either kind; with `turned_too` also, to be read alone, what
    transformers holds transposed of a model that has a table. Raises ReshardError for a model with its drafter: who
    takes both asks for each."""
    if isinstance(models, WithDrafter):
        raise ReshardError(
            "models is a WithDrafter, and this takes the model alone: give that, as the WithDrafter has it (.trainer)"
        )
    if isinstance(models, FsdpModel):
        return LocalBoxes(models, turned_too)
    from reshard.live.local_model import LocalModel

    return LocalModel(models, metadata)
