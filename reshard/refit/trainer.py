"""The source of a refit: the interface of a trainer's rank."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from reshard.core.errors import ReshardError
from reshard.core.placement import LocalTensor
from reshard.device.memory import Region, is_readable
from reshard.lora.scale import Scale
from reshard.models.model import Model


class Trainer(ABC):
    """The weights of one rank of a trainer, wherever they came from and however they are split.

    `regions` say where each local tensor of this rank lies in memory; these have one or two dims, and rows
    that are contiguous. `publish` says once what the local tensors are, in canonical names and coordinates: a
    trainer's own names stay with it. Their addresses are looked up before every refit, since trainers move
    parameters away and back.
    """

    @property
    @abstractmethod
    def regions(self) -> Sequence[Region]:
        """The memory of each local tensor, as it is now; looked up when something has moved."""

    @abstractmethod
    def publish(self, model: Model) -> list[LocalTensor]:
        """Return what each region holds of the canonical tensors of `model`, in the order of
        `regions`, each with its index there as its id.

        Raises ReshardError if this rank holds a parameter that the model does not have, or one of another
        shape.
        """

    @abstractmethod
    def check_model(self, model: Model) -> None:
        """Raise ReshardError, with both values, if the trainer's model computes something else from the
        same weights than `model`."""

    @abstractmethod
    def name_of(self, index: int) -> str:
        """Return the trainer's own name of a region, for errors."""

    @property
    def device(self) -> torch.device | None:
        """The device on which the trainer computes, and should have its parameters; None if this
        rank has none."""
        return next((region.tensor.device for region in self.regions), None)

    def as_published(self, model: Model) -> "Trainer":
        """Return a trainer whose local tensors have the numbers of the published ones: this one, or
        one with copies of what this one holds in another form."""
        return self

    def adapter(self) -> "Trainer":
        """Return the LoRA adapter of this trainer's model as a source of its own; from then on this one
        publishes the weights without it.

        Raises ReshardError if the model has none, or one that is not refitted.
        """
        raise ReshardError(f"{type(self).__name__} has no LoRA adapter that a refit can take")

    def scales(self) -> dict[str, Scale] | None:
        """For an adapter that has been published, return the scale of each published weight that has one on
        this rank; None for anything else."""
        return None

    def check_adapter(self) -> None:
        """For an adapter, raise ReshardError if it is now more than its ``B @ A``, or has other scales than
        were published. Called before every refit."""
        return

    def addresses(self) -> list[int]:
        """Return the parameters' addresses now: one for each tensor that a region looks into."""
        return [
            tensor.data_ptr()
            for tensor in {id(region.tensor): region.tensor for region in self.regions}.values()
        ]

    @property
    def has_pending_sync(self) -> bool:
        """True where training may have left something to `sync_params`; the same on all ranks."""
        return False

    def is_readable_from_host(self) -> bool:
        """Return True if a refit could read all parameters if those that were moved to host memory stayed
        there; False if a trainer does not say."""
        return False

    def sync_params(self) -> None:
        """Finish what training has put off, before anything is read. All ranks of the trainer call
        it, and some may wait for others. Raises ReshardError if it fails."""
        return

    def check_memory(self, device: torch.device) -> None:
        """Raise ReshardError, naming one, if parameters are not in memory that this device reads: its own,
        or pinned memory of the host."""
        for index, (tensor, _, _) in enumerate(self.regions):
            if not is_readable(tensor, device):
                where = f"is on {tensor.device}" if tensor.device != device else "has no memory"
                if tensor.data_ptr() and (tensor.device.type, device.type) == ("cpu", "cuda"):
                    where = "lies in host memory that is not pinned"
                raise ReshardError(
                    f"the trainer's {self.name_of(index)} {where}, and a refit reads from {device}: move "
                    f"the whole model there first"
                )
