"""The kernels of deltas in Triton's interpreter, beside what the CPU does chunk by chunk; see
tests/refit/test_blocks.py."""

import numpy as np
import torch

from reshard.core.errors import ReshardError
from reshard.delta.chunks import CHUNK, Words
from reshard.delta.encoding import encode
from reshard.delta.forms import Form
from reshard.refit.changes.buckets import ServedBucket, check_status, header_bytes
from reshard.refit.changes.kernels import DeviceChanges, ReceivedChanges
from reshard.refit.codecs import codec_between
from reshard.refit.copying.tables import (
    CHANGES_FORM,
    CODEC,
    COLUMNS,
    DST,
    DST_PITCH,
    ROWS,
    SRC,
    STATUS,
    UNORDERED,
    WIDTH,
)
from reshard.refit.pending.kernels import Swap, place
from tests.delta.test_delta_encoding import SPOILS

SINCE, BUCKET = 7, 3


def versions(changed: list[int], last: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return bf16 numbers as words, and a version in which so many of each chunk have another bit; the last chunk has
    so many words."""
    generator = torch.Generator().manual_seed(0)
    old = torch.randn(CHUNK * (len(changed) - 1) + last, generator=generator).bfloat16().view(torch.int16)
    new = old.clone()
    for chunk, count in zip(new.split(CHUNK), changed, strict=True):
        chunk[torch.randperm(len(chunk), generator=generator)[:count]] ^= 8
    return old, new


def encoded(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Return the changes by the kernels: they are those of each chunk by itself, and what is kept follows."""
    kept, before = old.clone(), old.clone()
    DeviceChanges(kept.view(torch.uint8), new.view(torch.uint8), keep=True)
    assert torch.equal(kept, new)
    changes = DeviceChanges(old.view(torch.uint8), new.view(torch.uint8), keep=False)
    assert torch.equal(old, before)
    alone = [encode(*pair) for pair in zip(old.split(CHUNK), new.split(CHUNK), strict=True)]
    assert changes.changed.tolist() == [delta.changed for delta in alone]
    payload = torch.zeros(int(changes.total), dtype=torch.uint8)
    changes.encode(payload, SINCE, BUCKET)
    numbers = [SINCE, BUCKET, len(alone)]
    for delta in alone:
        numbers += [int(delta.form), delta.changed]
    header = torch.tensor(numbers).view(torch.uint8)
    assert torch.equal(payload, torch.cat([header, *(delta.payload for delta in alone)]))
    return payload


def served(memory: torch.Tensor, size: int, row: int, widened: bool = True) -> ServedBucket:
    """Return rows of `row` bytes in `memory` that a bucket of `size` bytes is served from, behind padding, in tiles of
    three rows and padding between; the last 1,600 bytes are served as fp32, or not at all."""
    pitch, (three, gap) = row + 13 * (row % 2) + 6, (3 * row, -3 * row % 16)
    starts = np.arange(16, size - 1600 - three, three + gap)
    table = np.zeros((len(starts) + 1, COLUMNS), np.int64)
    table[:-1, SRC], table[:-1, DST] = starts, memory.data_ptr() + 16 + 3 * pitch * np.arange(len(starts))
    table[:-1, [ROWS, WIDTH, DST_PITCH]] = 3, row, pitch
    table[-1, [SRC, DST, ROWS, WIDTH, DST_PITCH]] = (
        size - 1600,
        memory.data_ptr() + len(memory) - 4096,
        4,
        800,
        1000,
    )
    table[-1, CODEC] = codec_between("bfloat16", "float32")
    return ServedBucket(table if widened else table[:-1], torch.device("cpu"))


def status_of(payload: torch.Tensor, words: int, places: ServedBucket) -> list[int]:
    """Write changes by the kernels, and return what becomes of them."""
    status = torch.zeros(STATUS, dtype=torch.int64)
    places.write(ReceivedChanges(payload, 2 * words, SINCE, BUCKET, status))
    return status.tolist()


def written(old: torch.Tensor, new: torch.Tensor, payload: torch.Tensor, row: int) -> None:
    """Write changes by the kernels, and by torch: what lies around the rows stays, and so does what did not change.
    What is swapped is there afterward, and taken back by the same again."""
    positions, memories = (old != new).nonzero()[:, 0], []
    for by_kernels in (True, False):
        memory = torch.full((3 * len(new) + 8192,), 7, dtype=torch.uint8)
        places = served(memory, 2 * len(new), row)
        if by_kernels:
            assert status_of(payload, len(new), places) == [0, SINCE, BUCKET]
        else:
            places.write(Words(positions, new[positions]))
        memories.append(memory)
    assert torch.equal(*memories) and (memories[0] != 7).any() == bool(len(positions))
    for by_kernels in (True, False):
        memory = (torch.arange(len(memories[0])) % 251).to(torch.uint8)
        memory[-4096:].view(torch.float32)[:] = torch.arange(1024) % 256  # which bfloat16 has
        places, before = served(memory, 2 * len(new), row), memory.clone()
        changes = Words(positions, new[positions])
        if by_kernels:
            changes = ReceivedChanges(
                payload.clone(), 2 * len(new), SINCE, BUCKET, torch.zeros(STATUS).long()
            )
        places.write(changes, swap=True)
        assert torch.equal(memory[memories[0] != 7], memories[0][memories[0] != 7])
        places.write(changes, swap=True)
        assert torch.equal(memory, before)
        if by_kernels and row % 2 == 0:
            swapped_at_once(changes, memory, 2 * len(new), row)


def swapped_at_once(changes: ReceivedChanges, memory: torch.Tensor, size: int, row: int) -> None:
    """The kernel that knows the places swaps what the other one swaps, where changes are listed."""
    listed = set(changes.table[:, CHANGES_FORM].tolist()) <= {Form.NOTHING, Form.OFFSETS}
    places, before = served(memory, size, row, widened=False), memory.clone()
    swap = Swap([place(changes, places)])
    assert swap.is_listed == [listed] and bool(len(swap.items)) == (
        listed and bool(changes.table[:, 1].any())
    )
    if listed:
        swap.run()
        at_once = memory.clone()
        swap.run()
        assert torch.equal(memory, before)
        places.write(changes, swap=True)
        assert torch.equal(memory, at_once)


def refused(payload: torch.Tensor, words: int, code: int, message: str) -> None:
    """Nothing of what makes no sense is written."""
    memory = torch.full((3 * words + 8192,), 7, dtype=torch.uint8)
    status = status_of(payload, words, served(memory, 2 * words, 100))
    assert status[0] == code and (memory == 7).all(), status
    try:
        check_status(status, SINCE, BUCKET, "trainer rank 0")
    except ReshardError as error:
        assert message in str(error), error
    else:
        raise AssertionError(message)


def changes_by_the_kernels() -> None:
    """Encode and write changes in all forms, and refuse those that cannot be."""
    for changed in (0, 3, 40, 900, 1000):
        old, new = versions([changed], 1000)
        written(old, new, encoded(old, new), 99)
    # Several blocks, and several tiles with changes in each.
    for first, last in ((5000, 4000), (3, 20_000)):
        old, new = versions([first, last], 20_000)
        written(old, new, encoded(old, new), 640)
    for changed, spoil in SPOILS.values():
        payload = encoded(*versions([changed], 1000))
        second = header_bytes(2000) + 2 * changed + -2 * changed % 8
        spoil(payload[second:], payload[second + 8 :])  # counts of one block take 8 bytes
        refused(payload, 1000, UNORDERED, "positions outside of it, or not in order")
    payload = encoded(*versions([40], 1000))
    numbers = payload.view(torch.int64)
    for at, number, code, message in (
        (0, SINCE - 1, 1, f"since transaction {SINCE - 1}, where"),
        (1, BUCKET + 1, 1, f"changes of bucket {BUCKET + 1} since"),
        (2, 2, 1, "are due"),
        (3, 9, 2, "make no sense"),  # a form
        (3, 0, 2, "make no sense"),
        (4, 41, 2, "make no sense"),  # changes
        (4, -1, 2, "make no sense"),
        (4, 1001, 2, "make no sense"),
    ):
        before, numbers[at] = int(numbers[at]), number
        refused(payload, 1000, code, message)
        numbers[at] = before
    for size in (len(payload) - 8, len(payload) + 8):
        refused(torch.cat([payload, payload])[:size], 1000, 2, "make no sense")
    refused(torch.tensor([SINCE, BUCKET, 1, 9, 0]).view(torch.uint8), 1000, 2, "make no sense")
    payload = encoded(*versions([1000], 1000))
    payload.view(torch.int64)[4] = 1001  # of 1,000 words, all of which are there
    refused(payload, 1000, 2, "make no sense")
    print("changes equal")
