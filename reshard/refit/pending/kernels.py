"""The Triton kernels that swap the changes of a pending version with what an engine serves, in one launch.

Where each change goes is found beforehand, while the engine serves: as its distance from the first byte of its bucket,
in words, of 4 bytes each, or of 8 where the bucket is served far apart. Of changes in another form than a list, and of
what is not served as it travels, the kernel of `reshard.refit.changes.kernels` finds that when it writes.
"""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from reshard.delta.forms import Form
from reshard.refit.changes.buckets import ServedBucket
from reshard.refit.changes.kernels import (
    BLOCK_TILES,
    BLOCK_WORDS,
    CHANGED,
    CHUNK_WORDS,
    ELEMENTS,
    FORM,
    LISTED,
    OFFSETS,
    ROW,
    SERVED_ADDRESS,
    SERVED_BYTES,
    SERVED_PITCH,
    SERVED_ROW,
    SERVED_START,
    SERVED_WIDTH,
    START,
    TILES,
    ReceivedChanges,
    _block_tiles,
    _of_block,
    _second,
    _third,
    _tile_of,
)
from reshard.refit.codecs import PLAIN
from reshard.refit.copying.kernels import expected_compilation
from reshard.refit.copying.tables import CHANGES_CHANGED, CHANGES_FORM, CHANGES_START

SWAPPED_AT_ONCE = 2048
AT_ONCE = tl.constexpr(SWAPPED_AT_ONCE)
NOWHERE = tl.constexpr(-1)  # padding between what is served
REACH = 1 << 32  # bytes that a distance in words of 2 bytes, in int32, reaches


@triton.jit(do_not_specialize=["number", "base"], do_not_specialize_on_alignment=["payload", "status"])
def _place(payload, table, status, tiles, number, base, places):
    program = tl.program_id(0).to(tl.int64)
    chunk, tile = program // TILES, program % TILES
    row = table + chunk * ROW
    start, changed = tl.load(row + START), tl.load(row + CHANGED)
    form, elements = tl.load(row + FORM), tl.load(row + ELEMENTS)
    if (tl.load(status) == 0) & (form == OFFSETS):
        block = tile // BLOCK_TILES
        offsets = payload.to(tl.pointer_type(tl.uint16)) + _third(start, changed, elements) // 2
        counts = payload.to(tl.pointer_type(tl.int32)) + _second(start, changed) // 4
        _, before, count = _of_block(counts, block, elements)
        begin = chunk * CHUNK_WORDS + block * BLOCK_WORDS
        for first in range(tile % BLOCK_TILES * LISTED, count, _block_tiles(block, elements) * LISTED):
            at, end = first + tl.arange(0, LISTED), tl.minimum(count, first + LISTED) - 1
            inside = at < count
            where = (begin + tl.load(offsets + before + at, mask=inside, other=0).to(tl.int64)) * 2
            from_byte = (begin + tl.load(offsets + before + first).to(tl.int64)) * 2
            to_byte = (begin + tl.load(offsets + before + end).to(tl.int64)) * 2
            low = _tile_of(tiles, from_byte, 0 * number, number)
            span = _tile_of(tiles, to_byte + 1, low, number - low) - low + 1
            served = tiles + _tile_of(tiles, where, low + (0 * where).to(tl.int32), span) * SERVED_ROW
            within = where - tl.load(served + SERVED_START)
            is_served = inside & (within >= 0) & (within < tl.load(served + SERVED_BYTES))
            within = tl.where(is_served, within, 0).to(tl.int32)
            width = tl.load(served + SERVED_WIDTH).to(tl.int32)
            line = within // width
            address = tl.load(served + SERVED_ADDRESS) + line * tl.load(served + SERVED_PITCH)
            distance = tl.where(is_served, (address + (within - line * width) - base) // 2, NOWHERE)
            tl.store(places + start // 4 + before + at, distance.to(places.dtype.element_ty), mask=inside)


@triton.jit
def _swap(items):
    item = items + tl.program_id(0).to(tl.int64) * 5
    values = tl.load(item).to(tl.pointer_type(tl.int16))
    places, bytes_of_place = tl.load(item + 1), tl.load(item + 4)
    base, count = tl.load(item + 2), tl.load(item + 3)
    at = tl.arange(0, AT_ONCE)
    inside = at < count
    if bytes_of_place == 8:
        place = tl.load(places.to(tl.pointer_type(tl.int64)) + at, mask=inside, other=NOWHERE)
    else:
        place = tl.load(places.to(tl.pointer_type(tl.int32)) + at, mask=inside, other=NOWHERE).to(tl.int64)
    is_served = inside & (place != NOWHERE)
    served = (base + place * 2).to(tl.pointer_type(tl.int16))
    new = tl.load(values + at, mask=is_served, other=0)
    old = tl.load(served, mask=is_served, other=0)
    tl.store(served, new, mask=is_served)
    tl.store(values + at, old, mask=is_served)


class PlacedChanges(NamedTuple):
    """The changes of a bucket, whose values go to `places`, int32 or int64 ``[payload / 4]``: words from the address
    `base` on, in the order in which they lie in the payload; -1 for those that go nowhere."""

    received: ReceivedChanges
    places: torch.Tensor
    base: int


def place(received: ReceivedChanges, served: ServedBucket) -> PlacedChanges | None:
    """Find where the listed changes of a bucket go; enqueued. None where the bucket is not served as it travels."""
    if served.codecs != [PLAIN] or served.has_odd:
        return None
    dtype = torch.int32 if served.reach < REACH else torch.int64
    nowhere = int(NOWHERE.value)
    places = torch.full((len(received.payload) // 4,), nowhere, dtype=dtype, device=received.payload.device)
    with expected_compilation():
        _place[(received.programs,)](
            received.payload, received.table, received.status, served.tiles, len(served.tiles), served.base, places,
            num_warps=8,
        )  # fmt: skip
    return PlacedChanges(received, places, served.base)


class Swap:
    """The swap of all changes of which the places are known, by one kernel. `is_listed` says of each of the buckets
    whether it is one of these: the changes of others have forms that are not listed."""

    def __init__(self, placed: Sequence[PlacedChanges]) -> None:
        tables = [one.received.table for one in placed]
        rows = torch.cat(tables).cpu().numpy() if tables else np.zeros((0, 1), np.int64)
        by_bucket = np.split(rows, np.cumsum([len(table) for table in tables])[:-1]) if tables else []
        self.is_listed = [
            bool(np.isin(of_bucket[:, CHANGES_FORM], (Form.NOTHING, Form.OFFSETS)).all())
            for of_bucket in by_bucket
        ]
        listed = [
            (one, rows)
            for one, rows, is_listed in zip(placed, by_bucket, self.is_listed, strict=True)
            if is_listed
        ]
        # The memory that the kernel reads and writes, which nobody else keeps.
        self.held = [(one.received.payload, one.places) for one, _ in listed]
        items = np.concatenate([np.zeros((0, 5), np.int64), *(_items(*one) for one in listed)])
        device = placed[0].places.device if placed else torch.device("cpu")
        self.items = torch.from_numpy(items).to(device)
        if device.type == "cuda":
            compile_swap(device)

    @property
    def size(self) -> int:
        """The bytes of memory that the places take."""
        return sum(places.nbytes for _, places in self.held)

    def run(self) -> None:
        """Swap them; enqueued."""
        if len(self.items):
            with expected_compilation():
                _swap[(len(self.items),)](self.items, num_warps=4)


def _items(placed: PlacedChanges, rows: np.ndarray) -> np.ndarray:
    """Return the work on a bucket, by the rows of its chunks: values, places, base, how many, and the bytes of a place,
    of each program."""
    rows = rows[rows[:, CHANGES_CHANGED] > 0]
    changed = rows[:, CHANGES_CHANGED]
    programs = -(-changed // SWAPPED_AT_ONCE)
    chunk = np.repeat(np.arange(len(rows)), programs)
    first = SWAPPED_AT_ONCE * (np.arange(len(chunk)) - np.repeat(programs.cumsum() - programs, programs))
    start = rows[chunk, CHANGES_START]
    values = placed.received.payload.data_ptr() + start + 2 * first
    itemsize = placed.places.element_size()
    places = placed.places.data_ptr() + (start // 4 + first) * itemsize
    base, sizes = np.full(len(chunk), placed.base), np.full(len(chunk), itemsize)
    return np.stack([values, places, base, np.minimum(changed[chunk] - first, SWAPPED_AT_ONCE), sizes], 1)


@cache
def compile_swap(device: torch.device) -> None:
    """Compile the kernel now, with nothing to swap."""
    with torch.cuda.device(device):
        _swap[(1,)](torch.zeros((1, 5), dtype=torch.int64, device=device), num_warps=4)
        torch.cuda.synchronize(device)
