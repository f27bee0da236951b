"""Tensors without memory as runs of rows of others: their offsets and strides say which rows they have."""

from collections.abc import Sequence

import torch


def storage_id(tensor: torch.Tensor) -> int:
    """Return what identifies a tensor's storage: equal for a tensor and its views."""
    return tensor.untyped_storage()._cdata


def runs_of_rows(tensor: torch.Tensor, shape: tuple[int, ...], size: Sequence[int]) -> list[torch.Tensor]:
    """Return the runs of rows, or of elements of a vector, that a tensor of `size` consists of: rows of another tensor
    of `shape` in a new order; none if they are not whole rows of it.

    `tensor` has the elements in their new order, and strides as they lie in the other.
    """
    if len(shape) not in (1, 2) or len(size) != len(shape) or tuple(size[1:]) != shape[1:]:
        return []
    width, dims = 1, tensor.ndim
    if len(shape) == 2:
        width, dims = shape[1], tensor.ndim - 1
        if tensor.shape[-1] != width or tensor.stride(-1) != 1:
            return []
    starts = torch.tensor([tensor.storage_offset()])
    for dim in range(dims):
        steps = torch.arange(tensor.shape[dim]) * tensor.stride(dim)
        starts = (starts[:, None] + steps).flatten()
    if bool((starts % width).any()):
        return []
    rows = starts // width
    breaks = (torch.nonzero(rows.diff() != 1).flatten() + 1).tolist()
    runs = []
    for first, end in zip([0, *breaks], [*breaks, len(rows)], strict=True):
        start = int(rows[first]) * width
        if len(shape) == 2:
            runs.append(tensor.as_strided((end - first, width), (width, 1), start))
        else:
            runs.append(tensor.as_strided((end - first,), (1,), start))
    return runs
