"""Changes between two versions of a box: encoded, decoded in place, bit for bit, at every density."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard.core.dtypes import DTYPES as DTYPES_BY_NAME
from reshard.core.errors import ReshardError
from reshard.delta.encoding import BLOCK, BoxSize, Encoded, Form, apply, encode
from reshard.delta.records import Record, decode_box, encode_box, row_box
from reshard.storage.io.streams import TensorInfo

DTYPES = [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int64]


def random_bits(shape, dtype, seed):
    """Return elements of random bits, among which are NaNs and both zeros."""
    generator = torch.Generator().manual_seed(seed)
    size = (math.prod(shape) * dtype.itemsize,)
    return torch.randint(0, 256, size, dtype=torch.uint8, generator=generator).view(dtype).view(shape)


def changed_at(old, share, seed):
    """Return a new version in which about this share of the elements has other bits, chosen one by one."""
    chosen = torch.rand(old.shape, generator=torch.Generator().manual_seed(seed)) < share
    flipped = old.clone().view(-1).view(torch.uint8).view(-1, old.element_size())
    flipped[chosen.view(-1)] ^= 1 << (seed % 8)
    return flipped.view(-1).view(old.dtype).view(old.shape), int(chosen.sum())


def same(one, other):
    return torch.equal(*(tensor.reshape(-1).view(torch.uint8) for tensor in (one, other)))


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 5),
    columns=st.sampled_from([0, 1, 7, 64, 1000]),
    dtype=st.sampled_from(DTYPES),
    share=st.sampled_from([0.0, 0.01, 0.1, 0.5, 0.95, 1.0]),
    seed=st.integers(0, 1000),
)
def test_what_is_applied_is_the_new_version_bit_for_bit(rows, columns, dtype, share, seed):
    old = random_bits((rows, columns), dtype, seed)
    new, changed = changed_at(old, share, seed)
    delta = encode(old, new)
    box = BoxSize(old.numel(), dtype.itemsize, changed)
    assert (delta.changed, delta.form) == (changed, box.form)
    assert (
        delta.payload.numel()
        == box.size(box.form)
        == min(box.size(form) for form in Form if form or not changed)
    )
    # Into rows of a larger tensor, as where a rank holds a shard of a fused parameter.
    wide = random_bits((rows, columns + 3), dtype, seed + 1)
    around = wide.clone()
    wide[:, 1 : columns + 1], around[:, 1 : columns + 1] = old, new
    apply(delta, wide[:, 1 : columns + 1])
    assert same(wide, around)
    apply(delta, old)
    assert same(old, new)


FORMS = [(1, Form.INDICES), (4000, Form.OFFSETS), (40_000, Form.BITMAP), (BLOCK * 3, Form.PLAIN)]


@pytest.mark.parametrize(("changed", "form"), FORMS)
def test_each_form_is_exact_over_several_blocks(changed, form):
    old = torch.zeros(BLOCK * 3 + 5, dtype=torch.bfloat16)
    new = old.clone()
    new[torch.randperm(len(old), generator=torch.Generator().manual_seed(0))[:changed]] = -0.0
    delta = encode(old, new)
    assert (delta.form, delta.changed) == (form, changed)
    apply(delta, old)
    assert same(old, new)


def test_a_zero_of_the_other_sign_and_another_nan_are_changes():
    old = torch.tensor([0, 0x7FC0, 0x3F80], dtype=torch.int16).view(torch.bfloat16)
    new = torch.tensor([-0x8000, 0x7FC1, 0x3F80], dtype=torch.int16).view(torch.bfloat16)
    assert encode(old, new).changed == 2
    assert encode(new, new.clone())[:2] == (Form.NOTHING, 0)  # though a NaN is not equal to itself


def few_changes():
    old = torch.arange(2 * BLOCK, dtype=torch.int16)
    new = old.clone()
    new[::100] += 1
    return old, encode(old, new)


def spoiled(delta, where, value):
    payload = delta.payload.clone()
    payload.view(torch.int16)[where] = value
    return delta._replace(payload=payload)


def test_changes_that_cannot_be_are_refused_before_anything_is_written():
    old, delta = few_changes()
    assert delta.form is Form.OFFSETS
    before = old.clone()
    counts = (2 * delta.changed + -2 * delta.changed % 8) // 2  # where those of the blocks begin, in words
    one = Encoded(
        Form.INDICES, 1, torch.tensor([7, 0, 0, 0, 3, 0, 0, 0], dtype=torch.int16).view(torch.uint8)
    )
    for spoil in (
        delta._replace(payload=delta.payload[:-8]),
        delta._replace(changed=delta.changed + 9),
        delta._replace(changed=-1),
        delta._replace(form=Form.NOTHING),
        spoiled(delta, counts, 5),  # of the first block
        spoiled(delta, counts + 1, -1),
        spoiled(delta, counts + 4 + 1, 0),  # the second offset is the first one's
        spoiled(one, 5, 2),  # an index right after the last
        spoiled(one, 5, -1),
    ):
        with pytest.raises(ReshardError, match="delta"):
            apply(spoil, old)
    assert torch.equal(old, before)
    for fine in (delta, one):
        apply(fine, old)
        assert not torch.equal(old, before)
    with pytest.raises(ReshardError, match="no new version"):
        encode(old, old.to(torch.int32))


def test_a_tensor_without_dims_has_a_record_of_one_row():
    info = TensorInfo((), DTYPES_BY_NAME["float32"])
    old, new = np.float32([[1.0]]), np.float32([[2.0]])
    record, payload = encode_box("model.visual.scale", row_box(info, 0, 1), old, new)
    assert Record.parse(record.key, {record.name: info}) == record
    rows, columns, values = decode_box(record, info, payload)
    assert (rows.tolist(), columns.tolist()) == ([0], [0]) and values.view(np.float32).tolist() == [2.0]
