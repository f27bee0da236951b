"""The numbers of each scheme, in numpy and torch, are those of the package that defines it, bit for
bit."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard.core.dtypes import dtype_named
from reshard.engines.vllm.quantized.compressed import stored_as
from reshard.engines.vllm.quantized.layers import Compressed, Packed
from reshard.quantization import channels_torch, fp8_blocks, int_groups
from reshard.quantization.channels import Channels
from reshard.quantization.channels_torch import encode_blocks, encode_rows, scales_of
from reshard.quantization.int_groups import IntGroups
from reshard.quantization.int_groups_torch import encode_words
from tests.tools.by_compressed_tensors import (
    CODES,
    DTYPES,
    arguments,
    block_of,
    hard,
    in_numpy,
    is_packed,
    magnitudes,
    of_package,
    packed_by_package,
    quantized,
    unpacked_by_package,
)

FLOATS = [torch.bfloat16, torch.float16, torch.float32]
WAYS = [
    *[(kind, strategy) for kind in ("float", "int") for strategy in ("channel", "tensor")],
    ("float", "block 16 32"),
    ("float", "block 24 40"),
    ("int4", "channel"),
    ("int4", "group 32"),
    ("int4", "group 4"),
    ("packed int8", "channel"),
    ("packed int8", "group 16"),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind, strategy", WAYS)
def test_codes_and_scales_are_those_of_the_package(kind, strategy, dtype):
    values, how = hard(dtype), arguments(kind, strategy)
    size, block, words = how.group_size, block_of(how), is_packed(kind)
    cases = [
        values,
        values[44:],
        values[8:16] * 1e-3,
        values[:1],
        values[3:4],
        values[:, : size or 1],
        values[:, : size or 13],
        0 * values,
    ]

    def codes_by(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        if words:
            return encode_words(weight, scales, CODES[kind], how.num_bits)
        if how.strategy == "block":
            return encode_blocks(weight, scales, block, CODES[kind]).view(torch.uint8)
        return encode_rows(weight, scales.expand(len(weight), -1), CODES[kind]).view(torch.uint8)

    for number, weight in enumerate(cases):
        weight = weight.contiguous()
        stored = quantized(weight, kind, strategy)
        codes, scales, *_ = stored.values()
        least, most = magnitudes(weight, how)
        ours = scales_of(torch.maximum(-least, most).reshape(scales.shape), CODES[kind])
        assert ours.dtype == scales.dtype == dtype and torch.equal(ours, scales), number
        assert torch.equal(codes_by(weight, ours), codes if words else codes.view(torch.uint8)), number
        # As a conversion makes them, in numpy.
        plain = weight.view(torch.int32 if dtype == torch.float32 else torch.int16)
        scheme = (
            IntGroups(how.num_bits, how.group_size) if words else Channels(CODES[kind], how.strategy, block)
        )
        in_numpy = plain.numpy().view(dtype_named(str(dtype)).numpy())
        if how.strategy in ("channel", "group"):
            written = scheme.encode(in_numpy, {})
        else:  # of these schemes reshard only reads what is stored
            with pytest.raises(NotImplementedError):
                scheme.encode(in_numpy, {})
            written = ()
        for ours_too, theirs in zip(written, (codes, scales), strict=bool(written)):
            assert ours_too.shape == tuple(theirs.shape)
            assert ours_too.tobytes() == theirs.contiguous().view(torch.uint8).numpy().tobytes(), number
        # As vLLM is given them.
        compressed = Compressed(
            (), CODES[kind], how.strategy, (), "", block, Packed(how.num_bits, False, ()) if words else None
        )
        in_checkpoint = stored_as(weight, compressed)
        assert in_checkpoint.keys() == stored.keys()
        for end, theirs in stored.items():
            assert in_checkpoint[end].dtype == theirs.dtype and in_checkpoint[end].shape == theirs.shape
            assert torch.equal(in_checkpoint[end].view(torch.uint8), theirs.view(torch.uint8)), number
    # The next scale of that dtype makes other codes, but in fp32, where the one after some does.
    weight = values[44:]
    codes, scales, *_ = quantized(weight, kind, strategy).values()
    other = scales.reshape(-1, scales.shape[-1]) * (1.01 if dtype == torch.float32 else 1)
    other = torch.nextafter(other, 2 * other)
    assert not torch.equal(codes_by(weight, other), codes if words else codes.view(torch.uint8))


def test_many_rows_are_divided_a_few_at_a_time(monkeypatch):
    values = hard(torch.bfloat16)
    scales = scales_of(values.abs().amax(1), "int8")[:, None]
    at_once = encode_rows(values, scales, "int8"), encode_words(values, scales, "int8", 8)
    monkeypatch.setattr(channels_torch, "ELEMENTS_AT_ONCE", 96 * 5)
    assert torch.equal(encode_rows(values, scales, "int8"), at_once[0])
    assert torch.equal(encode_words(values, scales, "int8", 8), at_once[1])


@settings(max_examples=80, deadline=None)
@given(
    kind=st.sampled_from(["float", "int"]), strategy=st.sampled_from(["channel", "tensor", "block"]),
    to=st.sampled_from(FLOATS), stored=st.sampled_from(FLOATS),
    block=st.sampled_from([(128, 128), (1, 32), (3, 5), (40, 8)]), rows=st.integers(1, 300),
    columns=st.integers(1, 300), start=st.integers(0, 299), magnitude=st.integers(-7, 1), seed=st.integers(0, 99),
)  # fmt: skip
def test_every_number_is_that_of_the_package(
    kind, strategy, to, stored, block, rows, columns, start, magnitude, seed
):
    torch.manual_seed(seed)
    codes = torch.randint(0, 256, (rows, columns), dtype=torch.uint8).view(DTYPES[kind])
    shared = {"channel": (1, columns), "tensor": (rows, columns), "block": block}[strategy]
    grid = [math.ceil(n / b) for n, b in zip((rows, columns), shared, strict=True)]
    scales = (torch.randn(grid) * 10.0**magnitude).to(stored)
    start = min(start, rows - 1)
    first, out = start // shared[0], np.empty((rows - start, columns), dtype_named(str(to)).numpy())
    fp8_blocks.decode(
        in_numpy(codes[start:]), in_numpy(scales[first:]), shared, start - first * shared[0], out
    )
    expected = of_package(codes, scales, strategy, block).to(to)[start:]
    assert expected.dtype == to and torch.equal(
        torch.from_numpy(np.isnan(out.astype(np.float32))), expected.isnan()
    )
    same_bits = in_numpy(expected).view(f"u{to.itemsize}") == out.view(f"u{to.itemsize}")
    assert same_bits[~expected.isnan().numpy()].all()


@settings(max_examples=80, deadline=None)
@given(
    bits=st.sampled_from([4, 8]), symmetric=st.booleans(), size=st.sampled_from([None, 2, 32, 128]),
    groups=st.integers(1, 5), columns=st.integers(1, 300), rows=st.integers(1, 70), start=st.integers(0, 69),
    stored=st.sampled_from(FLOATS), to=st.sampled_from(FLOATS), magnitude=st.integers(-7, 1), seed=st.integers(0, 99),
)  # fmt: skip
def test_every_number_of_packed_codes_is_that_of_the_package(
    bits, symmetric, size, groups, columns, rows, start, stored, to, magnitude, seed
):
    torch.manual_seed(seed)
    how = dict(num_bits=bits, symmetric=symmetric, strategy="group" if size else "channel", group_size=size)
    weight = torch.randn(rows, size * groups if size else columns).to(stored)
    whole = packed_by_package(weight, **how)
    if symmetric:
        written, _ = IntGroups(bits, size).encode(in_numpy(weight), {})
        assert written.tobytes() == in_numpy(whole["_packed"]).tobytes()
    whole["_scale"] = (torch.randn(whole["_scale"].shape) * 10.0**magnitude).to(stored)
    start, together = min(start, rows - 1), 32 // bits
    zeros = None if symmetric else in_numpy(whole["_zero_point"][start // together :])
    out = np.empty((rows - start, weight.shape[1]), dtype_named(str(to)).numpy())
    words, scales = in_numpy(whole["_packed"][start:]), in_numpy(whole["_scale"][start:])
    int_groups.decode(words, scales, bits, out, zeros, start % together)
    expected = in_numpy(unpacked_by_package(whole, **how).to(to)[start:])
    assert (expected.view(f"u{to.itemsize}") == out.view(f"u{to.itemsize}")).all()


def test_a_product_that_is_not_rounded_to_the_scales_dtype_is_another():
    """The control: in fp32 the same codes and scales are other numbers."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.int8)[None]
    scales = torch.tensor([[0.0123]], dtype=torch.bfloat16)
    assert not torch.equal(of_package(codes, scales, "channel").float(), codes.float() * scales.float())
