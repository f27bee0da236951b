"""A trainer of whose tensors some are read from copies plus 1: Megatron holds the weights of some
norms less 1."""

from collections.abc import Collection, Sequence

import torch

from reshard.core.placement import LocalTensor
from reshard.device.memory import Region
from reshard.device.stored import plus_one
from reshard.models.model import Model
from reshard.refit.trainer import Trainer


class PlusOne(Trainer):
    """The weights of `trainer` as they are published: local tensors that hold the published `names`
    less 1 are copied, plus 1, before every refit. They are vectors of a layer, so that the copies
    are small."""

    def __init__(self, trainer: Trainer, model: Model, names: Collection[str]) -> None:
        self.trainer, self.model = trainer, model
        self.held = trainer.publish(model)
        self.shapes = {
            index: tensor.shape
            for index, tensor in enumerate(self.held)
            if any(part.name in names for part in tensor.parts)
        }
        regions = trainer.memory
        # Where the trainer computes, also where it has its own parameters in host memory now.
        self.copies = {
            index: torch.empty_like(
                self._numbers(index, regions), memory_format=torch.contiguous_format, device=trainer.device
            )
            for index in self.shapes
        }

    def _numbers(self, index: int, regions: Sequence[Region]) -> torch.Tensor:
        """View a local tensor of the trainer's ``[rows, columns]``; a vector is one column."""
        tensor, offset, pitch = regions[index]
        rows, columns = (*self.shapes[index], 1)[:2]
        return (
            tensor.detach().view(-1).as_strided((rows, columns), (pitch, 1), tensor.storage_offset() + offset)
        )

    @property
    def memory(self) -> list[Region]:
        """The trainer's memory, and the copies."""
        regions = list(self.trainer.memory)
        for index, copy in self.copies.items():
            regions[index] = Region(copy, 0, copy.shape[1])
        return regions

    @property
    def device(self) -> torch.device | None:
        return self.trainer.device

    def publish(self, model: Model) -> list[LocalTensor]:
        return self.held if model == self.model else self.trainer.publish(model)

    def check_model(self, model: Model) -> None:
        self.trainer.check_model(model)

    def name_of(self, index: int) -> str:
        return self.trainer.name_of(index)

    def addresses(self) -> list[int]:
        return [*self.trainer.addresses(), *(copy.data_ptr() for copy in self.copies.values())]

    def check_memory(self, device: torch.device) -> None:
        self.trainer.check_memory(device)

    @property
    def has_pending_sync(self) -> bool:
        """True: the copies are made of what the trainer has at each refit, on a rank without any at no
        cost."""
        return True

    def sync_params(self) -> None:
        """Finish what training has put off; then make the copies, in the arithmetic of fp32."""
        if self.trainer.has_pending_sync:
            self.trainer.sync_params()
        regions = self.trainer.memory
        with torch.no_grad():
            for index, copy in self.copies.items():
                copy.copy_(plus_one(self._numbers(index, regions)))
