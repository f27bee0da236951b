"""A trainer of whose tensors some are read from copies plus 1: Megatron holds the weights of some
norms less 1."""

from collections.abc import Collection, Sequence

import torch

from reshard.core.placement import LocalTensor
from reshard.device.memory import Region
from reshard.device.stored import write_plus_one
from reshard.models.model import Model
from reshard.refit.trainer import Trainer


class PlusOne(Trainer):
    """The weights of `trainer` as they are published: local tensors that hold the published `names`
    less 1 are copied, plus 1, whenever somebody asks where the memory is, as before every refit. They
    are vectors of a layer, so that the copies are small."""

    def __init__(self, trainer: Trainer, model: Model, names: Collection[str]) -> None:
        self.trainer, self.model = trainer, model
        self.held = trainer.publish(model)
        self.shapes = {
            index: tensor.shape
            for index, tensor in enumerate(self.held)
            if any(part.name in names for part in tensor.parts)
        }
        regions = trainer.memory
        self._regions, self._addresses = regions, list[int]()  # of the trainer, when it was last asked
        # Where the trainer computes, also where it has its own parameters in host memory now.
        self.copies = {
            index: torch.empty_like(
                self._numbers(index, regions), memory_format=torch.contiguous_format, device=trainer.device
            )
            for index in self.shapes
        }
        self._in_fp32 = {
            index: torch.empty_like(copy, dtype=torch.float32) for index, copy in self.copies.items()
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
        """Return the addresses now, and make the copies of what the trainer has now."""
        addresses = self.trainer.addresses()
        if addresses != self._addresses:  # looking into each of ten thousand regions takes longer
            self._regions, self._addresses = list(self.trainer.memory), addresses
        self._copy()
        return [*addresses, *(copy.data_ptr() for copy in self.copies.values())]

    def _copy(self) -> None:
        """Make the copies, in the arithmetic of fp32, of what has memory: `check_memory` names what has none."""
        # These views are not kept: one would hold the memory of all that the trainer moves elsewhere.
        held = {
            index: self._numbers(index, self._regions)
            for index in self.copies
            if self._regions[index].tensor.data_ptr()
        }
        copies, in_fp32 = ([copies[index] for index in held] for copies in (self.copies, self._in_fp32))
        write_plus_one([*held.values()], copies, in_fp32)

    def check_memory(self, device: torch.device) -> None:
        self.trainer.check_memory(device)

    @property
    def has_pending_sync(self) -> bool:
        return self.trainer.has_pending_sync

    def sync_params(self) -> None:
        self.trainer.sync_params()
