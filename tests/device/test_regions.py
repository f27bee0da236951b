"""Where views of a model's parameters lie in its memory."""

import time

import pytest
import torch

from reshard.core.errors import ReshardError
from reshard.device.memory import Finder


def test_a_view_is_found_among_ten_thousands_in_one_buffer():
    """As DDP has them with an adapter of every expert: in a moment, where a look at each took minutes."""
    count, size = 20_000, 48
    buffer = torch.zeros(count * size)
    named = [(f"p{i}", buffer[i * size : (i + 1) * size].view(6, 8)) for i in range(count)]
    other = torch.zeros(6, 8)
    start = time.perf_counter()
    finder = Finder([*named, ("other", other), ("codes", buffer.view(torch.int32))])
    halves = [finder.region(tensor[3:], name) for name, tensor in named]
    assert time.perf_counter() - start < 10
    assert all(region.tensor is tensor for region, (_, tensor) in zip(halves, named, strict=True))
    assert {(region.offset, region.pitch) for region in halves} == {(24, 8)}
    assert finder.region(other[:, 2:5], "other")[1:] == (2, 8)
    for wrong in (other + 1, buffer.view(torch.bfloat16)[:8]):
        with pytest.raises(ReshardError, match="is a copy of the model's parameter"):
            finder.region(wrong, "wrong")
    with pytest.raises(ReshardError, match="rows are not contiguous"):
        finder.region(other.T, "turned")
