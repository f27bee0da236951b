"""Experts that an engine copies, and moves by their load (EPLB): which of them lies in each place of a rank.

An engine's loader puts experts into the places of all ranks in turn, and begins again after the last expert. From then
on the engine exchanges whole experts among these places, layer by layer: what a place is made of stays, and whose it is
changes.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from reshard.core.errors import ReshardError
from reshard.core.placement import LocalTensor, Placement
from reshard.engines.layout import WITHOUT_PARAMETER
from reshard.engines.placing.rules import PlacedTensors
from reshard.models.model import Model

# The experts in the places of all ranks, by layer, which is the name of the module that has their matrices.
Held = Mapping[str, tuple[int, ...]]


class MovedExperts:
    """The experts of a rank whose places the engine's loader has filled as `placed` says; `layers` has, by layer, which
    of the places of all ranks are this one's.

    Raises ReshardError if a layer has something else than experts.
    """

    def __init__(
        self, engine: str, placed: PlacedTensors, layers: Mapping[str, Sequence[int]], model: Model
    ) -> None:
        self.as_loaded, self.experts = placed.placement, model.num_experts
        self._names = _names_by_expert(model)
        self._places: dict[Any, tuple[str, int]] = {}  # by local tensor: its layer, and its place among all
        for identity, region in placed.regions.items():
            layer = str(identity[0]).rpartition(".")[0]
            if layer not in layers:
                continue
            for part in self.as_loaded.tensors[identity].parts:
                if part.name not in self._names:
                    raise ReshardError(
                        f"{engine} moves experts by their load, and {part.name} in {identity[0]} is not of one: start "
                        f"it without EPLB"
                    )
            own = region.offset // (region.tensor.numel() // region.tensor.shape[0])
            self._places[identity] = layer, layers[layer][own]
        self._held: Held = {}
        self.placement = self.as_loaded

    def follow(self, held: Held) -> Placement:
        """Return the placement with these experts in the places: the same one as long as all ranks have the same, and
        `as_loaded` where all are where the loader has put them."""
        if held != self._held:
            self.placement, self._held = self._with(held), dict(held)
        return self.placement

    def _with(self, held: Held) -> Placement:
        if all(experts == in_turn(self.experts, len(experts)) for experts in held.values()):
            return self.as_loaded
        shapes, tensors = dict(self.as_loaded.shapes), []
        for tensor in self.as_loaded.tensors.values():
            layer, place = self._places.get(tensor.id, ("", 0))
            if layer in held:
                tensor = self._of_expert(tensor, held[layer][place], shapes)
            tensors.append(tensor)
        return Placement.of(shapes, tensors)

    def _of_expert(self, tensor: LocalTensor, expert: int, shapes: dict[str, tuple[int, ...]]) -> LocalTensor:
        """Return a local tensor with the same boxes of an expert's tensors; note the shapes of these."""
        parts = []
        for part in tensor.parts:
            name = self._names[part.name][expert]
            shapes[name] = shapes[part.name]
            parts.append(part._replace(name=name))
        return tensor._replace(parts=tuple(parts))


def in_turn(experts: int, places: int) -> tuple[int, ...]:
    """Return the experts in so many places as a loader fills them.

    >>> in_turn(4, 6)
    (0, 1, 2, 3, 0, 1)
    """
    return tuple(place % experts for place in range(places))


def experts_in_places(engine: str, layer: str, copies: np.ndarray, places: int) -> tuple[int, ...]:
    """Return the experts in all `places`, given the places of each expert's `copies` ``[experts, most copies]``, with
    -1 for none.

    >>> experts_in_places("vLLM", "layer", np.array([[0, 4], [3, -1], [1, -1], [2, 5]]), 6)
    (0, 2, 3, 1, 0, 3)

    Raises ReshardError, naming the layer, unless each place holds one expert.
    """
    experts, _ = np.nonzero(copies != -1)
    filled = copies[copies != -1]
    if not np.array_equal(np.sort(filled), np.arange(places)):
        raise ReshardError(
            f"{engine}'s table of where experts are (EPLB) is not whole in {layer}, as after a sleep that discards it "
            f"(level 2), or while it changes how many ranks it has: start the engine again"
        )
    held = np.empty(places, np.int64)
    held[filled] = experts
    return tuple(held.tolist())


def _names_by_expert(model: Model) -> dict[str, list[str]]:
    """Return, for each published tensor of an expert, the names of the same tensor of all experts, in order."""
    by_name: dict[str, list[str]] = {}
    for block in model.blocks():
        for row in block.rows:
            if row.of_experts and row.arrangement not in WITHOUT_PARAMETER:
                names = [name for _, name in row.names(block.published, range(model.num_experts))]
                by_name |= dict.fromkeys(names, names)
    return by_name
