"""Tensors whose own memory a trainer has given away, while the host has a copy of their bytes."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch


@dataclass(eq=False)
class Away:
    """A storage without memory, its size, and its bytes in parts, which follow one another; None if it
    comes back as zeros."""

    storage: torch.UntypedStorage
    size: int
    host: list[torch.Tensor] | None


# By the identity of their storages, for as long as somebody keeps them.
_away: WeakValueDictionary[int, Away] = WeakValueDictionary()


def remember(away: Away) -> None:
    """Let `copy_of` find the bytes of a storage without memory."""
    _away[away.storage._cdata] = away


def forget(away: Away) -> None:
    """Undo `remember`: the storage has memory again."""
    _away.pop(away.storage._cdata, None)


def beside(buffers: Iterable[Any]) -> dict[int, torch.Tensor]:
    """Return the copies that verl and ms-swift leave beside DDP's buffers, by the identity of their
    storages."""
    return {
        buffer.param_data.untyped_storage()._cdata: buffer.param_data.cpu_data
        for buffer in buffers
        if getattr(getattr(buffer, "param_data", None), "cpu_data", None) is not None
    }


def place_of(
    storage: torch.UntypedStorage, others: Mapping[int, torch.Tensor]
) -> tuple[tuple[int, int], ...]:
    """Return the (address, bytes) of each part of the host's copy of a storage without memory; none if it
    has memory, or no copy is known. Known are those of `reshard.offload`, and `others` (`beside`)."""
    return () if storage.nbytes() else tuple((p.data_ptr(), p.numel()) for p in _parts(storage, others))


def _parts(storage: torch.UntypedStorage, others: Mapping[int, torch.Tensor]) -> list[torch.Tensor]:
    away = _away.get(storage._cdata)
    if away is not None:
        return away.host or []
    copy = others.get(storage._cdata)
    return [] if copy is None else [copy.view(-1).view(torch.uint8)]


def copy_of(tensor: torch.Tensor, others: Mapping[int, torch.Tensor]) -> torch.Tensor | None:
    """Return a view of the host's copy of a tensor without memory, in its shape and strides; None if
    it has memory, or no copy in one piece is known (`place_of`)."""
    storage = tensor.untyped_storage()
    if storage.nbytes() or not tensor.numel():
        return None
    size = tensor.element_size()
    first = tensor.storage_offset() * size
    end = first + size * (1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)))
    start = 0
    for part in _parts(storage, others):
        if start <= first and end <= start + part.numel():
            piece = part[first - start : end - start]
            if piece.storage_offset() % size or piece.data_ptr() % size:
                return None
            return piece.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
        start += part.numel()
    return None
