"""This rank's part of a live model, Megatron's or one under FSDP2."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from reshard.live.local_boxes import LocalBoxes
from reshard.trainers.fsdp import FsdpModel

if TYPE_CHECKING:
    from reshard.live.local_model import Models


def local_boxes(models: "Models | FsdpModel", metadata: Mapping[str, Any] | None) -> LocalBoxes:
    """Return this rank's part of a live model of either kind."""
    if isinstance(models, FsdpModel):
        return LocalBoxes(models)
    from reshard.live.local_model import LocalModel

    return LocalModel(models, metadata)
