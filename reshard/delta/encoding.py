"""Changes between two versions of one box of elements, encoded as the smallest of four forms (`reshard.delta.forms`).

Elements are compared and carried as bits: NaNs, their payloads and -0.0 count like any other value, so what
is decoded is the new version bit for bit. Elements are numbered in row-major order.
"""

import sys
from typing import NamedTuple

import torch

from reshard.core.errors import ReshardError
from reshard.delta.forms import BLOCK, BoxSize, Form, padded

if sys.byteorder != "little":
    raise ImportError("deltas are little-endian, and so must be the host")

# The signed integers as which elements of so many bytes are compared.
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Encoded(NamedTuple):
    """The changes of a box: their form, how many they are, and the `payload`, uint8 ``[BoxSize.size]``."""

    form: Form
    changed: int
    payload: torch.Tensor


class Decoded(NamedTuple):
    """Changes one by one: int64 `positions` ``[changed]`` in a box, and the bits of their `values`.

    `valid`, a bool without dims where they are, is False if a position lies outside of the box, or
    their numbers are not what they are said to be: nothing may be written by them then.
    """

    positions: torch.Tensor
    values: torch.Tensor
    valid: torch.Tensor


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's elements as integers of the same size, as a view of its memory in its shape."""
    return tensor.detach().view(BITS[tensor.element_size()])


def changed_mask(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Return which elements have other bits, as bools ``[elements]``; both have one shape, dtype and device."""
    if old.shape != new.shape or old.dtype != new.dtype:
        raise ReshardError(
            f"a {new.dtype} of shape {list(new.shape)} is not a new version of a {old.dtype} of shape {list(old.shape)}"
        )
    return (bits_of(old) != bits_of(new)).reshape(-1)


def encode(old: torch.Tensor, new: torch.Tensor) -> Encoded:
    """Return what turns `old` into `new`, which have one shape, dtype and device."""
    mask = changed_mask(old, new)
    return encode_changed(new, mask, int(torch.count_nonzero(mask)))


def encode_changed(new: torch.Tensor, mask: torch.Tensor, changed: int) -> Encoded:
    """Return the smallest encoding of the `changed` elements of `new` that `mask` ``[elements]`` marks."""
    box = BoxSize(new.numel(), new.element_size(), changed)
    form, bits = box.form, bits_of(new).reshape(-1)
    payload = torch.empty(box.size(form), dtype=torch.uint8, device=new.device)
    if form is Form.NOTHING:
        return Encoded(form, 0, payload)
    if form is Form.PLAIN:
        _fill(payload, box, form, [bits])
        return Encoded(form, changed, payload)
    positions = marked(mask, changed)
    values = bits.index_select(0, positions)
    if form is Form.OFFSETS:
        counts = torch.bincount(positions // BLOCK, minlength=-(-box.elements // BLOCK))
        places = [counts.to(torch.int32), as_uint16(positions % BLOCK)]
    else:
        places = [packed_bits(mask)]
    _fill(payload, box, form, [values, *places])
    return Encoded(form, changed, payload)


def decode(encoded: Encoded, elements: int, dtype: torch.dtype) -> Decoded:
    """Return the changes of a box of this many elements of `dtype`; only the dtype's size counts here.

    Raises ReshardError if the payload has another size than these changes take.
    """
    form, changed, payload = encoded
    box = BoxSize(elements, dtype.itemsize, changed)
    sizes = _checked_sections(encoded, box)
    bits, device = BITS[box.itemsize], payload.device
    valid = torch.ones((), dtype=torch.bool, device=device)
    if form is Form.NOTHING:
        return Decoded(torch.zeros(0, dtype=torch.int64, device=device), payload.view(bits), valid)
    parts, start = [], 0
    for size in sizes:
        parts.append(payload[start : start + size])
        start += padded(size)
    if form is Form.PLAIN:
        return Decoded(torch.arange(elements, device=device), parts[0].view(bits), valid)
    values = parts[0].view(bits)
    if form is Form.OFFSETS:
        ends = parts[1].view(torch.int32).to(torch.int64).cumsum(0)
        order = torch.arange(changed, device=device)
        # The block of each change: the first that ends after it. No count can make this read elsewhere.
        blocks = torch.searchsorted(ends, order, right=True)
        positions = blocks * BLOCK + (parts[2].view(torch.int16).to(torch.int64) & (BLOCK - 1))
        valid = (ends[-1] == changed) & (ends.diff() >= 0).all() & (ends[0] >= 0)
    else:
        positions = unpacked_bits(parts[1]).nonzero()[:, 0]
        if len(positions) != changed:
            return Decoded(positions, values, torch.zeros_like(valid))
    return Decoded(positions, values, valid & in_order(positions, elements))


def apply(encoded: Encoded, out: torch.Tensor) -> None:
    """Write the changes into `out`, which holds the old version, in place; it need not be contiguous.

    Raises ReshardError, before anything is written, where they are not those of such a box.
    """
    bits = bits_of(out)
    if encoded.form in (Form.NOTHING, Form.PLAIN):
        sizes = _checked_sections(encoded, BoxSize(out.numel(), out.element_size(), encoded.changed))
        if sizes:
            bits.copy_(encoded.payload[: sizes[0]].view(bits.dtype).view(bits.shape))
        return
    decoded = decode(encoded, out.numel(), out.dtype)
    if not bool(decoded.valid):
        raise ReshardError(
            f"a delta has changes outside of a box of {out.numel():,} elements, or not in order"
        )
    if out.is_contiguous():
        bits.view(-1).index_copy_(0, decoded.positions, decoded.values)
    else:
        bits[torch.unravel_index(decoded.positions, out.shape)] = decoded.values


def _checked_sections(encoded: Encoded, box: BoxSize) -> list[int]:
    """Return the bytes of each section. Raises ReshardError if the whole has another size."""
    fits = 0 <= encoded.changed <= box.elements and (encoded.form is not Form.NOTHING or not encoded.changed)
    if not fits or encoded.payload.numel() != box.size(encoded.form):
        raise ReshardError(
            f"a delta says that {encoded.changed:,} of {box.elements:,} elements of {box.itemsize} bytes changed, "
            f"as {encoded.form.name} in {encoded.payload.numel():,} bytes, which cannot be"
        )
    return box.sections(encoded.form)


def _fill(payload: torch.Tensor, box: BoxSize, form: Form, parts: list[torch.Tensor]) -> None:
    """Write the sections of a form, and zeros between them."""
    start = 0
    for size, part in zip(box.sections(form), parts, strict=True):
        payload[start : start + size] = part.contiguous().view(torch.uint8)
        payload[start + size : start + padded(size)] = 0
        start += padded(size)


def as_uint16(numbers: torch.Tensor) -> torch.Tensor:
    """Return numbers below 65,536 in 16 bits each, typed int16, for which torch has all operations."""
    return ((numbers ^ (BLOCK >> 1)) - (BLOCK >> 1)).to(torch.int16)


def marked(mask: torch.Tensor, count: int) -> torch.Tensor:
    """Return the `count` positions that a mask marks, in order; on a CPU, where they are few, by looking at eight
    at once."""
    if mask.is_cuda or len(mask) % 8 or count * 64 > len(mask):
        return mask.nonzero()[:, 0]
    eights = mask.view(torch.int64).nonzero()[:, 0]
    row, column = mask.view(-1, 8)[eights].nonzero(as_tuple=True)
    return eights[row] * 8 + column


def packed_bits(mask: torch.Tensor) -> torch.Tensor:
    """Return a bit for each bool of a mask, in uint8, lowest bit first."""
    eights = torch.nn.functional.pad(mask.view(torch.uint8), (0, -len(mask) % 8)).view(torch.int64)
    # Of the product only these reach the top byte: byte i, which is 0 or 1, by 1 << (56 - 7 * i), at its bit i.
    return ((eights * 0x0102040810204080) >> 56).to(torch.uint8)


def unpacked_bits(packed: torch.Tensor) -> torch.Tensor:
    """Return the bits of `packed_bits`, each in uint8."""
    return (packed[:, None] >> torch.arange(8, dtype=torch.uint8, device=packed.device) & 1).reshape(-1)


def in_order(positions: torch.Tensor, elements: int) -> torch.Tensor:
    """Return whether positions rise, so that none comes twice, and lie in a box; as a tensor where they are."""
    return (positions.diff() > 0).all() & (positions[0] >= 0) & (positions[-1] < elements)
