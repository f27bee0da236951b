"""Changes between two versions of a box: encoded, decoded in place, bit for bit, at every density."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard.core.dtypes import DTYPES as DTYPES_BY_NAME
from reshard.core.errors import ReshardError
from reshard.delta import chunks
from reshard.delta.chunks import CHUNK, ChunkSizes, Comparison, decode_chunks, encode_chunks
from reshard.delta.encoding import apply, encode
from reshard.delta.forms import BLOCK, BoxSize, Form
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


FORMS = [(1, Form.OFFSETS), (4000, Form.OFFSETS), (40_000, Form.BITMAP), (BLOCK * 3, Form.PLAIN)]


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
    for spoil in (
        delta._replace(payload=delta.payload[:-8]),
        delta._replace(changed=delta.changed + 9),
        delta._replace(changed=-1),
        delta._replace(form=Form.NOTHING),
        spoiled(delta, counts, 5),  # of the first block
        spoiled(delta, counts + 1, -1),
        spoiled(delta, counts + 4 + 1, 0),  # the second offset is the first one's
    ):
        with pytest.raises(ReshardError, match="delta"):
            apply(spoil, old)
    assert torch.equal(old, before)
    apply(delta, old)
    assert not torch.equal(old, before)
    with pytest.raises(ReshardError, match="not a new version"):
        encode(old, old.to(torch.int32))


def run_of_chunks(changed):
    """Return two versions of a run of words in which so many of each chunk changed; the last chunk is short."""
    old = random_bits((CHUNK * (len(changed) - 1) + 1000,), torch.int16, 0)
    new, generator = old.clone(), torch.Generator().manual_seed(1)
    for chunk, count in zip(new.split(CHUNK), changed, strict=True):
        chunk[torch.randperm(len(chunk), generator=generator)[:count]] ^= 1
    return old, new


def encoded_at_once(old, new):
    compared = Comparison.of(old, new)
    sizes = ChunkSizes.of(len(new), compared.changed.numpy())
    payload = torch.zeros(sizes.total, dtype=torch.uint8)
    encode_chunks(compared, sizes, payload)
    return sizes, payload


RUNS = {
    "all forms": [5000, 0, 3, CHUNK, 200_000, 4000, 700],
    "offsets": [5000, 4999, 5001, 30],
    "bitmaps": [100_000, 60_000, 200],
    "plain": [CHUNK, CHUNK, 1000],
    "short": [1],
    "nothing": [0, 0],
}


@pytest.mark.parametrize("at_once", [chunks.AT_ONCE, 1])
@pytest.mark.parametrize("changed", RUNS.values(), ids=RUNS)
def test_many_chunks_at_once_are_encoded_as_each_by_itself_and_decoded(changed, at_once, monkeypatch):
    monkeypatch.setattr(chunks, "AT_ONCE", at_once)
    old, new = run_of_chunks(changed)
    sizes, payload = encoded_at_once(old, new)
    alone = [encode(*pair) for pair in zip(old.split(CHUNK), new.split(CHUNK), strict=True)]
    assert sizes.forms.tolist() == [delta.form for delta in alone]
    assert sizes.changed.tolist() == [delta.changed for delta in alone] == changed
    assert torch.equal(payload, torch.cat([delta.payload for delta in alone]))
    for group in decode_chunks(payload, sizes):
        for positions, values in group:
            old[positions] = values
    assert torch.equal(old, new)


def flipped(marks, start):
    """Turn the first mark that is set into one that is not."""
    bits = marks[start:]
    first = int((bits != 0).nonzero()[0])
    bits[first] &= bits[first] - 1


# Spoils the changes of the second of two chunks, of 1,000 words: its sections as they are typed.
SPOILS = {
    "more in a block": (40, lambda second, third: second.view(torch.int32)[:1].add_(1)),
    "fewer in a block": (40, lambda second, third: second.view(torch.int32)[:1].fill_(-1)),
    "an offset twice": (40, lambda second, third: third.view(torch.int16)[1].copy_(third.view(torch.int16)[0])),
    "an offset behind": (40, lambda second, third: third.view(torch.int16)[39:40].fill_(1000)),
    "a mark less": (900, lambda second, third: flipped(second, 0)),
    "a mark behind": (900, lambda second, third: (flipped(second, 0), second[125:126].fill_(1))),
}  # fmt: skip


@pytest.mark.parametrize(("changed", "spoil"), SPOILS.values(), ids=SPOILS)
def test_chunks_whose_positions_cannot_be_are_refused(changed, spoil):
    sizes, payload = encoded_at_once(*run_of_chunks([0, changed]))
    assert None not in list(decode_chunks(payload, sizes))
    second, third = (payload[start:] for start in sizes.starts[1, 1:])
    spoil(second, third)
    assert list(decode_chunks(payload, sizes)) == [None]


def test_a_bitmap_with_a_mark_of_another_one_is_refused():
    sizes, payload = encoded_at_once(*run_of_chunks([100_000, 900]))
    first, second = (payload[start:] for start in sizes.starts[:, 1])
    flipped(first, 0)
    free = int((second[:125] != 255).nonzero()[0])
    second[free] |= ~second[free] & -(~second[free])
    assert list(decode_chunks(payload, sizes)) == [None]


def test_a_tensor_without_dims_has_a_record_of_one_row():
    info = TensorInfo((), DTYPES_BY_NAME["float32"])
    old, new = np.float32([[1.0]]), np.float32([[2.0]])
    record, payload = encode_box("model.visual.scale", row_box(info, 0, 1), old, new)
    assert Record.parse(record.key, {record.name: info}) == record
    rows, columns, values = decode_box(record, info, payload)
    assert (rows.tolist(), columns.tolist()) == ([0], [0]) and values.view(np.float32).tolist() == [2.0]
