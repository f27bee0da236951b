"""Views of published tensors without memory, as boxes and rows of these: their offsets and strides say which elements
they have."""

from math import prod
from typing import NamedTuple

import torch

from reshard.core.boxes import Box


class Place(NamedTuple):
    """The `box` of a published tensor that is copied, and how it lies in the parameter: see
    `reshard.engines.tracing.trace.TracedCopy`."""

    box: Box
    pitch: int
    strides: tuple[int, ...] = ()


def place_of(shape: tuple[int, ...], src: torch.Tensor, dst: torch.Tensor) -> Place | None:
    """Return the place of a copy between views of one shape, `src` of a published tensor of `shape`; None if `src` is
    no box of it."""
    width = shape[-1] if shape else 1
    view = _view(shape, src, dst)
    in_rows = len(view.lengths) == 2
    if view.src_strides != ((width, 1) if in_rows else (1,)) or view.dst_strides[-1] != 1:
        return _box_of(shape, src, dst)
    start = int(src.storage_offset())
    if not in_rows:
        return Place(Box((start,), view.lengths), 0)
    offsets = start // width, start % width
    if offsets[1] + view.lengths[1] > width:  # from one row into the next
        return None
    return Place(Box(offsets, view.lengths), view.dst_strides[0] if view.lengths[0] > 1 else 0)


def _box_of(shape: tuple[int, ...], src: torch.Tensor, dst: torch.Tensor) -> Place | None:
    """Return the box of a published tensor of `shape` that `src` is, in any order of its dims, with the strides of the
    same dims in `dst`; None if it is not a box."""
    offsets, rest = [], int(src.storage_offset())
    dims: dict[int, int] = {}
    for dim, size in enumerate(shape):
        stride = prod(shape[dim + 1 :])
        if size != 1:
            dims[stride] = dim
        offsets.append(rest // stride)
        rest %= stride
    lengths, strides = [1] * len(shape), [0] * len(shape)
    for length, src_stride, dst_stride in zip(src.shape, src.stride(), dst.stride(), strict=True):
        if length == 1:
            continue
        stored = dims.pop(src_stride, None)
        if stored is None or offsets[stored] + length > shape[stored]:
            return None
        lengths[stored], strides[stored] = length, dst_stride
    return Place(Box(tuple(offsets), tuple(lengths)), 0, tuple(strides))


class _View(NamedTuple):
    """The elements of a copy, as a run or as rows: lengths, and strides on both sides, in
    elements."""

    lengths: tuple[int, ...]
    src_strides: tuple[int, ...]
    dst_strides: tuple[int, ...]


def _view(shape: tuple[int, ...], src: torch.Tensor, dst: torch.Tensor) -> _View:
    """Return a copy between views of one shape, `src` of a canonical tensor of `shape`.

    All of a tensor with three dims or more is a run, a part of a matrix is rows, and other parts
    have the dims that are longer than one.
    """
    is_whole = src.numel() == torch.Size(shape).numel() and src.is_contiguous() and dst.is_contiguous()
    if len(shape) > 2 and is_whole:
        return _View((src.numel(),), (1,), (1,))
    long = _long_dims(src, dst)
    if len(shape) != 2 or len(long.lengths) != 1:
        return long
    [length], [src_stride], [dst_stride] = long
    if src_stride == 1 and (shape[-1] > 1 or length == 1):  # a part of one row
        return _View((1, length), (shape[-1], 1), (0, dst_stride))
    return _View((length, 1), (src_stride, 1), (dst_stride, 1))  # a part of one column


def _long_dims(src: torch.Tensor, dst: torch.Tensor) -> _View:
    """Return the dims that are longer than one; the first of all if none is."""
    dims = [dim for dim, length in enumerate(src.shape) if length != 1]
    if not dims and src.ndim:
        dims = [0]
    if not dims:
        return _View((1,), (1,), (1,))
    lengths = tuple(src.shape[dim] for dim in dims)
    return _View(lengths, tuple(src.stride(dim) for dim in dims), tuple(dst.stride(dim) for dim in dims))
