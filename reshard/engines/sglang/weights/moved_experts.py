"""Experts of which SGLang has copies, or which lie in another order, or move by their load (EPLB).

SGLang moves experts at the end of a step, whole layers at once, on all ranks; a call to a worker comes between steps.
"""

from typing import Any

import torch

from reshard.core.errors import ReshardError
from reshard.engines.placing.moved_experts import Held, MovedExperts
from reshard.engines.placing.rules import PlacedTensors
from reshard.engines.sglang import compat
from reshard.models.model import Model


class SglangExperts:
    """The layers of a model whose experts SGLang may have anywhere, given its ``ServerArgs``; `placed` has them in
    turn."""

    def __init__(self, module: torch.nn.Module, arguments: Any, placed: PlacedTensors, model: Model) -> None:
        self.layers = {
            name: (compat.layer_of(child), experts.places)
            for name, child in module.named_modules()
            if (experts := compat.experts_of(child)) is not None
        }
        self.arguments = arguments
        self.moved = MovedExperts("SGLang", placed, [*self.layers], model)

    def held(self) -> Held:
        """Return the experts that are in this rank's places now. Raises ReshardError if SGLang does not know."""
        table = compat.located_experts(self.arguments)
        if table is None:
            return {}
        layers, places = table.shape
        if any(layer >= layers or own.stop > places for layer, own in self.layers.values()):
            raise ReshardError(
                f"SGLang's table of where experts are (EPLB) has {layers} layers of {places} places, and the model has "
                f"others: start it again"
            )
        of_layers = table.tolist()
        return {
            name: tuple(of_layers[layer][own.start : own.stop]) for name, (layer, own) in self.layers.items()
        }
