"""The source of a refit: what a trainer's rank says of itself."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from reshard.core.errors import ReshardError
from reshard.core.placement import LocalTensor
from reshard.device.memory import Region
from reshard.models.model import Model


class Trainer(ABC):
    """The weights of one rank of a trainer, wherever they came from and however they are split.

    `regions` say where each local tensor of this rank lies in memory; these have one or two dims, and rows
    that are contiguous. What the local tensors are is told once, in canonical names and coordinates, by
    `publish`: a trainer's own names stay with it. Where they lie is asked before every refit, since trainers
    move parameters away and back.
    """

    @property
    @abstractmethod
    def regions(self) -> Sequence[Region]:
        """Where each local tensor lies now; looked at when something has moved."""

    @abstractmethod
    def publish(self, model: Model) -> list[LocalTensor]:
        """What each region holds of the canonical tensors of `model`, in the order of `regions`, each with
        its index there as its id.

        Raises ReshardError where this rank holds a parameter that is none of the model's, or one of another
        shape.
        """

    @abstractmethod
    def check_model(self, model: Model) -> None:
        """Raise ReshardError, with both values, where the trainer's model computes something else from the
        same weights than `model`."""

    @abstractmethod
    def name_of(self, index: int) -> str:
        """The trainer's own name of a region, for errors."""

    @property
    def device(self) -> torch.device | None:
        """Where the trainer computes, and should have its parameters; None where this rank has none."""
        return next((region.tensor.device for region in self.regions), None)

    def addresses(self) -> list[int]:
        """Where the parameters are now: one address for each tensor that a region looks into."""
        return [
            tensor.data_ptr()
            for tensor in {id(region.tensor): region.tensor for region in self.regions}.values()
        ]

    @property
    def has_pending_sync(self) -> bool:
        """Whether training may have left something to `sync_params`; the same on all ranks."""
        return False

    def sync_params(self) -> None:
        """Before anything is read: finish what training has put off. All ranks of the trainer call it, and some may wait
        for others. Raises ReshardError where it fails. Most put nothing off."""
        return

    def check_memory(self, device: torch.device) -> None:
        """Raise ReshardError, naming one, where parameters are not in this device's memory: offloaded, or
        never moved there."""
        for index, (tensor, _, _) in enumerate(self.regions):
            if tensor.device != device or not tensor.data_ptr():
                where = f"is on {tensor.device}" if tensor.device != device else "has no memory"
                raise ReshardError(
                    f"the trainer's {self.name_of(index)} {where}, and a refit reads from {device}: move "
                    f"the whole model there first"
                )
