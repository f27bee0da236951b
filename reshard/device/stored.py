"""Tensors as files have them: put together of their views, and as they are published."""

from collections import Counter
from collections.abc import Iterator, Mapping

import torch

from reshard.core.dtypes import Dtype
from reshard.core.views import View, tensor_of, tensor_shapes


def plus_one(numbers: torch.Tensor) -> torch.Tensor:
    """Return numbers that Megatron holds less 1 as they are published, as
    `reshard.storage.io.casts.cast` does of arrays: in the arithmetic of fp32."""
    return (numbers.float() + 1).to(numbers.dtype)


def write_plus_one(
    numbers: list[torch.Tensor], copies: list[torch.Tensor], in_fp32: list[torch.Tensor]
) -> None:
    """Write `plus_one` of several tensors into others of the same shapes, through fp32 ones that are given: on a GPU by
    three launches, however many tensors there are."""
    if not numbers:
        return
    with torch.no_grad():
        torch._foreach_copy_(in_fp32, numbers)
        torch._foreach_add_(in_fp32, 1)
        torch._foreach_copy_(copies, in_fp32)


def published(numbers: torch.Tensor, dtype: Dtype) -> torch.Tensor:
    """Return numbers that are held in a dtype as they are published."""
    return plus_one(numbers) if dtype.less_1 else numbers


def stored_tensors(
    stream: Iterator[tuple[str, torch.Tensor]],
    shapes: Mapping[str, tuple[int, ...]],
    packed: Mapping[str, str],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield stored tensors by name, given a stream of all canonical ones of these `shapes`. Views
    of one are put together; they follow one another.

    `packed` has the views that some canonical tensors are, which have other names.
    """
    places = {name: packed.get(name, name) for name in shapes}
    stored_shapes = tensor_shapes({places[name]: shape for name, shape in shapes.items()})
    left = Counter(tensor_of(place) for place in places.values())
    unfinished: dict[str, torch.Tensor] = {}
    for name, part in stream:
        place = places.get(name, name)
        tensor = tensor_of(place)
        if tensor == name:
            yield name, part
            continue
        shape = stored_shapes[tensor]
        if tensor not in unfinished:
            unfinished[tensor] = torch.empty(shape, dtype=part.dtype, device=part.device)
        view = View.parse(place)
        elements = view.elements_of(unfinished[tensor])
        elements.copy_((part.mT if view.transposed else part).reshape(elements.shape))
        left[tensor] -= 1
        if not left[tensor]:
            yield tensor, unfinished.pop(tensor)
