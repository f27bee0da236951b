"""The common interface of trainers and engines: which canonical boxes a rank holds, and where they lie."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from reshard.core.errors import ReshardError
from reshard.core.placement import LocalTensor
from reshard.device.memory import Region, is_readable
from reshard.models.model import Model


class Holder(ABC):
    """The weights of one rank, wherever they came from and however they are split; any holder can be the source
    of a refit.

    `memory` says where each local tensor of this rank lies; these have one or two dims, and rows that are
    contiguous. `publish` says once what they are, in canonical names and coordinates: a holder's own names
    stay with it. Addresses are looked up before every refit, since holders move tensors away and back.
    """

    @property
    @abstractmethod
    def memory(self) -> Sequence[Region]:
        """The memory of each local tensor, as it is now; looked up when something has moved."""

    @abstractmethod
    def publish(self, model: Model) -> list[LocalTensor]:
        """Return what each region of `memory` holds of the canonical tensors of `model`, in the same order,
        each with its index there as its id.

        Raises ReshardError if this rank holds a parameter that the model does not have, or one of another
        shape.
        """

    @abstractmethod
    def check_model(self, model: Model) -> None:
        """Raise ReshardError, with both values, if this rank's model computes something else from the
        same weights than `model`."""

    @abstractmethod
    def name_of(self, index: int) -> str:
        """Return the holder's own name of a region, for errors."""

    @property
    def device(self) -> torch.device | None:
        """The device on which this rank computes, and should have its tensors; None if it has none. A holder
        whose tensors may be in pinned memory of the host says it itself: by default it is where the first lies."""
        return next((region.tensor.device for region in self.memory), None)

    def as_published(self, model: Model) -> "Holder":
        """Return a holder whose local tensors have the numbers of the published ones: this one, or
        one with copies of what this one holds in another form."""
        return self

    def facts(self) -> bytes | None:
        """Return what engines have to know of the published weights beside them (`Engine.take_facts`); None for
        nothing."""
        return None

    def check_current(self) -> None:
        """Raise ReshardError if what this rank holds is not whole, or no longer what it has published.
        Called before every refit."""
        return

    def addresses(self) -> list[int]:
        """Return the addresses now: one for each tensor that a region of `memory` looks into."""
        return [
            tensor.data_ptr()
            for tensor in {id(region.tensor): region.tensor for region in self.memory}.values()
        ]

    def check_memory(self, device: torch.device) -> None:
        """Raise ReshardError, naming one, if tensors are not in memory that this device reads: its own,
        or pinned memory of the host."""
        for index, (tensor, _, _) in enumerate(self.memory):
            if not is_readable(tensor, device):
                where = f"is on {tensor.device}" if tensor.device != device else "has no memory"
                if tensor.data_ptr() and (tensor.device.type, device.type) == ("cpu", "cuda"):
                    where = "lies in host memory that is not pinned"
                raise ReshardError(
                    f"the trainer's {self.name_of(index)} {where}, and a refit reads from {device}: move "
                    f"the whole model there first"
                )
