"""Which multimodal models that a framework trains under Megatron are refitted with their towers."""

from collections.abc import Mapping
from typing import Any

from reshard.core.errors import ReshardError
from reshard.models.model import Model
from reshard.models.published import published
from reshard.models.towers import TOWERS


def left_with_its_tower(config: Mapping[str, Any], of_layers: bool = False) -> str:
    """Return why a multimodal model of a whole ``config.json`` is not refitted with its tower; empty if it may be.
    `of_layers` if the trainer makes every tower of Megatron's layers."""
    where = "the trainer's config"
    try:
        model = Model.from_hf(published(dict(config), where), where)
    except ReshardError as error:
        return f"the model is multimodal, and {error}"
    if not model.wrapped or not model.family.tower:
        return f"the model is multimodal, and no table has the tower of {model.family.name}"
    if of_layers and not any(block.megatron for block in TOWERS[model.family.tower].blocks):
        return (
            f"the model is multimodal, and no table has the tower of {model.family.name} as mbridge makes it, of "
            "Megatron's layers (vanilla_mbridge)"
        )
    return ""
