"""What a source of a LoRA adapter has besides the matrices: the layers, and their scales."""

from abc import ABC
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from reshard.core.errors import ReshardError
from reshard.lora.names import B, peft_name
from reshard.lora.parameters import Adapter
from reshard.lora.scale import Scale
from reshard.megatron.parameters import ModelParameters
from reshard.storage.sources.base import Source


class AdapterSource(Source, ABC):
    """A LoRA adapter, whose tensors have PEFT's names.

    `base` is the expanded table of the model that it belongs to, `adapters` are its layers, and
    `scales` the ranks and alphas by published weight. `base_name` is the model's name, where it is said.
    `parameters` are the scales of parameters, by name, that PEFT has one adapter for as a whole: those
    with all experts of a layer. `copies_of_base` are the tensors, by published weight, that should be the model's own.
    """

    is_model = False
    base: ModelParameters
    adapters: list[Adapter]
    scales: dict[str, Scale]
    base_name: str | None = None
    parameters: Mapping[str, Scale] = MappingProxyType({})
    copies_of_base: Mapping[str, str] = MappingProxyType({})

    def read_copy_of_base(self, weight: str, start: int, stop: int) -> np.ndarray:
        """Read rows of the copy of a weight in `copies_of_base`."""
        raise NotImplementedError

    def note_untrained(self) -> None:
        """Note an adapter whose every B is zero, as PEFT begins; of any other, no more is read than the first rows that
        are not."""
        if not any(matrix.astype(np.float32).any() for matrix in self.every_b()):
            self.notices.append("the adapter adds nothing: every lora_B is zero, as before training")

    def every_b(self) -> Iterator[np.ndarray]:
        """Read the B of each layer, one after the other."""
        for name in (peft_name(weight, B) for adapter in self.adapters for weight in adapter.ranks):
            yield self.read_rows(name, 0, self.tensors[name].shape[0])

    def factors(self) -> Mapping[str, float]:
        return {f"scale of {weight}": scale.factor for weight, scale in self.scales.items()}

    def described_adapter(self) -> dict[str, Any]:
        """Return what `inspect` shows of any adapter."""
        ranks = {name: rank for adapter in self.adapters for name, rank in adapter.ranks.items()}
        try:
            alphas = [scale.alpha for scale in self.scales.values()]
        except ReshardError:
            alphas = []
        return {
            "adapter": "LoRA",
            "adapted_weights": len(ranks),
            "rank": _one_or_all(ranks.values()),
            "alpha": _one_or_all(alphas) if alphas else "not said",
        }


def _one_or_all(values: Iterable[float]) -> Any:
    """Return the only value of all, or the values in order."""
    different = sorted(set(values))
    return different[0] if len(different) == 1 else different
