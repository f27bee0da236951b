"""Experts of which SGLang has copies, or which lie in another order, or move by their load (EPLB).

SGLang moves experts at the end of a step, whole layers at once, on all ranks; a call to a worker comes between steps.
"""

from typing import Any

import torch

from reshard.engines.placing.moved_experts import Held, MovedExperts
from reshard.engines.placing.rules import PlacedTensors
from reshard.engines.sglang import compat
from reshard.models.model import Model


class SglangExperts:
    """The layers of a model whose experts SGLang may have anywhere, given its ``ServerArgs``; `placed` has them in
    turn."""

    def __init__(self, module: torch.nn.Module, arguments: Any, placed: PlacedTensors, model: Model) -> None:
        found = [(name, child, compat.experts_of(child)) for name, child in module.named_modules()]
        places = {name: experts.places for name, _, experts in found if experts is not None}
        self.layers = {name: compat.layer_of(child) for name, child, _ in found if name in places}
        self.arguments = arguments
        self.moved = MovedExperts("SGLang", placed, places, model)

    def held(self) -> Held:
        """Return the experts that are in the places of all ranks now."""
        table = compat.located_experts(self.arguments)
        of_layers = [] if table is None else table.tolist()
        return {name: tuple(of_layers[layer]) for name, layer in self.layers.items() if of_layers}
