"""Blocks of fp8 that travel: made where all of a block lies, on a trainer's rank, for half the bytes.

Both ends cut the pieces of a pair alike into blocks, each a *parcel*: its codes, row after row, then its scale. The trainer's
rank makes it in the bucket or slab, and the inference rank copies it from there to where it serves from. What no piece
reaches of a block is padding, and zero. Blocks of which several ranks hold parts travel otherwise: `parts`.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch

from reshard.core.errors import ReshardError
from reshard.quantization.fp8_blocks import BLOCK
from reshard.refit.codecs import SOURCE_SIZES, by_rounding
from reshard.refit.digests import Digests
from reshard.refit.fp8_blocks.strips import (
    ENCODING,
    PITCH,
    PLACE,
    PLACES,
    SHAPE,
    BlockTable,
    Strips,
    cut,
    size_of,
)
from reshard.refit.tables import (
    ALIGNMENT,
    CODES,
    CODES_PITCH,
    DST,
    DST_PITCH,
    FIRST_FRAGMENT,
    FRAGMENTS,
    HEIGHT,
    HIGH,
    LEFT,
    LENGTH,
    ROWS,
    SCALES,
    SRC,
    SRC_PITCH,
    TOP,
    WIDE,
    WIDTH,
    empty_table,
)

SCALE = 4  # bytes
FP8 = (8, 9)  # the compute capability from which on a GPU converts to fp8
BATCH = 4096  # parcels at a time, for a check: 64 MiB


class Placed(NamedTuple):
    """Copies, and where each goes (`addresses.Pieces.into`)."""

    table: np.ndarray
    into: np.ndarray


def compile_block_kernels(codecs: np.ndarray, making_them: bool, device: torch.device) -> None:
    """Compile now what the first refit would wait for, where parcels of these codecs are made, or unpacked.
    Raises ReshardError where this GPU cannot make them."""
    if device.type != "cuda" or not len(codecs):
        return
    from reshard.refit.kernels import compile_copy, compile_quantize

    if not making_them:
        compile_copy(SCALE, device, 1)
        return
    if torch.cuda.get_device_capability(device) < FP8:
        raise ReshardError(
            f"this trainer's rank has to make the fp8 blocks that it sends, which {torch.cuda.get_device_name(device)} "
            f"cannot: put trainer and engine on one host, or serve in bf16"
        )
    for rounding, these in by_rounding(codecs):
        compile_quantize(rounding, True, device, 1, size_of(SOURCE_SIZES[codecs[these]]))


def cut_into_blocks(table: np.ndarray, into: np.ndarray, places: np.ndarray) -> Strips:
    """The blocks that pieces make up, one an item, on whichever end of them `table` and `places` know."""
    return cut(table, into, np.zeros(len(table), np.int64), places, 1)


def places_of_requests(where: np.ndarray, extents: np.ndarray, codecs: np.ndarray) -> np.ndarray:
    """An engine's local tensors as a trainer's rank knows them: their shapes and codecs (`blocks.places_of`), by
    their index in `where`."""
    places = np.zeros((int(where[:, 0].max(initial=-1)) + 1, PLACES), np.int64)
    places[where[:, 0], SHAPE], places[where[:, 0], ENCODING] = extents, codecs
    return places


def padding_outside(padding: Placed, sent: Iterable[Strips], places: np.ndarray) -> Placed:
    """Of rows of padding what lies in no block that is sent, which brings its own."""
    blocks = cut(padding.table, padding.into, np.arange(len(padding.table)), places, 1)
    taken = np.concatenate([*(some.items[:, CODES] for some in sent), np.zeros(0, np.int64)])
    item = np.repeat(np.arange(len(blocks.items)), blocks.items[:, FRAGMENTS])
    kept = ~np.isin(blocks.items[:, CODES], taken)[item]
    fragments, tensor, row = blocks.fragments[kept], blocks.tensors[item[kept]], blocks.owners[kept]
    at = blocks.items[item[kept], CODES] - places[tensor, PLACE.start]
    pitch = places[tensor, PITCH.start]
    table = padding.table[row].copy()
    table[:, ROWS], table[:, WIDTH] = fragments[:, HIGH], fragments[:, WIDE]
    into = np.stack([tensor, at // pitch + fragments[:, TOP], at % pitch + fragments[:, LEFT]], 1)
    return Placed(table, into)


def _elements(items: np.ndarray) -> np.ndarray:
    found: np.ndarray = items[:, HEIGHT] * items[:, LENGTH]
    return found


def scale_at(items: np.ndarray) -> np.ndarray:
    """Where a parcel's scale is, in bytes from its begin."""
    elements = _elements(items)
    return elements + -elements % ALIGNMENT


def packed_bytes(items: np.ndarray) -> np.ndarray:
    """Bytes of each parcel."""
    return scale_at(items) + SCALE


def packed(items: np.ndarray, begins: np.ndarray) -> np.ndarray:
    """The items of parcels that lie each from its address in `begins` on."""
    items = items.copy()
    items[:, CODES], items[:, CODES_PITCH] = begins, items[:, LENGTH]
    items[:, SCALES] = begins + scale_at(items)
    return items


def encode_tables(
    parcels: Strips, places: np.ndarray, begins: np.ndarray, device: torch.device
) -> list[BlockTable]:
    """What makes these parcels, by rounding, each from its address in `begins` on."""
    items = packed(parcels.items, begins)
    codecs = places[parcels.tensors, ENCODING]
    found = []
    for rounding, these in by_rounding(codecs):
        some = parcels._replace(items=items[these])
        found.append(BlockTable(some, rounding, device, np.arange(len(some.items))))
    return found


def unpack_copies(parcels: Strips, begins: np.ndarray) -> np.ndarray:
    """The table of plain copies that puts parcels, each from its address in `begins` on, where they are served from."""
    items, codes, scales = parcels.items, empty_table(len(parcels.items)), empty_table(len(parcels.items))
    codes[:, SRC], codes[:, DST] = begins, items[:, CODES]
    codes[:, ROWS], codes[:, WIDTH] = items[:, HEIGHT], items[:, LENGTH]
    codes[:, SRC_PITCH], codes[:, DST_PITCH] = items[:, LENGTH], items[:, CODES_PITCH]
    scales[:, SRC], scales[:, DST] = begins + scale_at(items), items[:, SCALES]
    scales[:, ROWS], scales[:, WIDTH] = 1, SCALE
    return np.concatenate([codes, scales])


def slice_blocks(parcels: Strips, first: int, last: int) -> Strips:
    """The parcels from one to before another, which follow each other."""
    items = parcels.items[first:last].copy()
    if not len(items):
        return Strips(items, parcels.fragments[:0], parcels.owners[:0], parcels.tensors[:0])
    start, end = items[0, FIRST_FRAGMENT], items[-1, FIRST_FRAGMENT] + items[-1, FRAGMENTS]
    items[:, FIRST_FRAGMENT] -= start
    return Strips(items, parcels.fragments[start:end], parcels.owners[start:end], parcels.tensors[first:last])


def digest_requantized(parcels: Strips, places: np.ndarray, device: torch.device) -> np.ndarray:
    """A digest of each parcel's codes and scale, made anew on the trainer's rank."""
    found = [np.zeros(0, np.int64)]
    for some in _batches(parcels):
        slot = BLOCK * BLOCK + ALIGNMENT
        memory = torch.empty(len(some.items) * slot, dtype=torch.uint8, device=device)
        begins = memory.data_ptr() + np.arange(len(some.items), dtype=np.int64) * slot
        for table in encode_tables(some, places, begins, device):
            table.run()
        found.append(_digests(packed(some.items, begins), device))
    return np.concatenate(found)


def digest_served(parcels: Strips, device: torch.device) -> np.ndarray:
    """The same of what an inference rank has where it serves from."""
    return _digests(parcels.items, device)


def _batches(parcels: Strips) -> Iterator[Strips]:
    for first in range(0, len(parcels.items), BATCH):
        yield slice_blocks(parcels, first, min(first + BATCH, len(parcels.items)))


def _digests(items: np.ndarray, device: torch.device) -> np.ndarray:
    both = []
    for address, pitch, rows, width, size in (
        (items[:, CODES], items[:, CODES_PITCH], items[:, HEIGHT], items[:, LENGTH], 1),
        (items[:, SCALES], np.full(len(items), SCALE), np.ones(len(items), np.int64), np.full(len(items), SCALE), SCALE),
    ):  # fmt: skip
        table = empty_table(len(items))
        table[:, SRC], table[:, SRC_PITCH], table[:, ROWS], table[:, WIDTH] = address, pitch, rows, width
        both.append(Digests(table, width // size, device).result())
    found: np.ndarray = both[0] * 31 + both[1]
    return found
