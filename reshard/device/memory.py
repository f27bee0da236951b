"""Local tensors in the memory of a live model."""

from bisect import bisect_right
from collections.abc import Iterable
from operator import itemgetter
from typing import NamedTuple

import torch

from reshard.core.errors import ReshardError

ADDRESS = itemgetter(0)  # of an address and a tensor
ALIGNMENT = 256  # bytes at which tensors start in a slab or a pinned buffer, as in torch's allocator


def aligned(size: int) -> int:
    """Return a size in bytes up to where the next tensor may start."""
    return -(-size // ALIGNMENT) * ALIGNMENT


class Region(NamedTuple):
    """Rows of a live tensor: the first element is `offset` elements after the tensor's first, rows follow
    every `pitch` elements. A vector has rows of one element.

    The address is looked up each time, since trainers move parameters away and back.
    """

    tensor: torch.Tensor
    offset: int
    pitch: int

    @property
    def address(self) -> int:
        """The first element's address, as it is now."""
        return self.tensor.data_ptr() + self.offset * self.tensor.element_size()


def is_readable(tensor: torch.Tensor, device: torch.device) -> bool:
    """Return True if kernels on a device can read a tensor: in its memory, or in the host's, pinned."""
    if not tensor.data_ptr():
        return not tensor.numel() and tensor.device == device
    return tensor.device == device or (
        device.type == "cuda" and tensor.device.type == "cpu" and tensor.is_pinned()
    )


def check_memory(models: Iterable[torch.nn.Module]) -> None:
    """Raise ReshardError if a parameter has no memory, since it is on the meta device or was offloaded."""
    for model in models:
        for name, parameter in model.named_parameters():
            if parameter.device.type == "meta":
                raise ReshardError(f"the trainer's {name} is on the meta device: give the model memory first")
            if parameter.numel() and not parameter.untyped_storage().size():
                raise ReshardError(
                    f"the trainer's {name} has no memory, as after an offload: bring the parameters back first "
                    f"(reshard.onload, where reshard.offload has moved them)"
                )


class Finder:
    """Finds the parameter or buffer that a view looks into."""

    def __init__(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        held: dict[tuple[int, torch.dtype], list[tuple[int, torch.Tensor]]] = {}
        for _, tensor in named:
            if tensor.device.type != "meta" and tensor.numel():
                key = tensor.untyped_storage().data_ptr(), tensor.dtype
                held.setdefault(key, []).append((tensor.data_ptr(), tensor))
        # By address: DDP has ten thousands in one storage.
        self._held = {key: sorted(tensors, key=ADDRESS) for key, tensors in held.items()}

    def region(self, view: torch.Tensor, what: str) -> Region:
        """Return the region of a view; of more than two dims all but the first make up a row.
        Raises ReshardError if it is a copy, or its rows are not contiguous."""
        if view.ndim > 2 and view[0].is_contiguous():
            view = view.flatten(1)
        if view.ndim > 2 or (view.ndim and view.shape[-1] > 1 and view.stride(-1) != 1):
            raise ReshardError(
                f"{what} has shape {list(view.shape)} and strides {list(view.stride())}: its "
                f"rows are not contiguous"
            )
        start, size = view.data_ptr(), view.element_size()
        tensors = self._held.get((view.untyped_storage().data_ptr(), view.dtype), [])
        for index in reversed(range(bisect_right(tensors, start, key=ADDRESS))):
            first, tensor = tensors[index]
            if start < first + tensor.numel() * size:
                pitch = view.stride(0) if view.ndim == 2 else 1
                return Region(tensor, (start - first) // size, pitch)
        raise ReshardError(
            f"{what} is a copy of the model's parameter, not a view of it, so that a refit "
            f"would read an old state"
        )


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if two tensors of one shape and dtype have the same bits."""
    return torch.equal(*(tensor.contiguous().view(-1).view(torch.uint8) for tensor in (one, other)))
