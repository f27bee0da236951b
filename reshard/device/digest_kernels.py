"""The Triton kernel of digests, as `reshard.digests.numbers` defines them: sums over tiles.

A program keeps a sum for each of its elements, and multiplies by the keys of columns once at the end: an element costs
its mixing and one multiplication by the key of its row.
"""

from collections.abc import Sequence
from contextlib import nullcontext

import torch
import triton
import triton.language as tl

from reshard.core.dtypes import DTYPES
from reshard.core.errors import ReshardError
from reshard.device import digest_tiles
from reshard.device.cuda import on_device
from reshard.device.live_boxes import LiveBox
from reshard.digests import numbers

INTEGERS = {1: tl.uint8, 2: tl.uint16, 4: tl.uint32, 8: tl.uint64}
# Tiles on a GPU, by what `digest_tiles.tiles_of` has them by.
Tiles = dict[tuple[str, str, int], torch.Tensor]
FLOATS = {"float32": tl.float32, "bfloat16": tl.bfloat16, "float16": tl.float16}  # that are cast

TILE, ADDRESS, BOX, TILE_ROWS, TILE_COLUMNS, PITCH, ROW_COUNTER, COLUMN = (
    tl.constexpr(getattr(digest_tiles, name))
    for name in "TILE ADDRESS BOX TILE_ROWS TILE_COLUMNS PITCH ROW_COUNTER COLUMN".split()
)
MIX_32, SHIFT_32, MIX_64, SHIFT_64, STEP, FIRST, SECOND, FIRST_SHIFT, SECOND_SHIFT, LAST_SHIFT = (
    tl.constexpr(getattr(numbers, name))
    for name in "MIX_32 SHIFT_32 MIX_64 SHIFT_64 STEP FIRST SECOND FIRST_SHIFT SECOND_SHIFT LAST_SHIFT".split()
)


@triton.jit
def _keys(counters):
    """Return an odd number for each counter, by splitmix64."""
    mixed = (counters + 1) * STEP
    mixed = (mixed ^ (mixed >> FIRST_SHIFT)) * FIRST
    mixed = (mixed ^ (mixed >> SECOND_SHIFT)) * SECOND
    return (mixed ^ (mixed >> LAST_SHIFT)) | 1


@triton.jit
def _sum(
    table,
    out,
    FROM: tl.constexpr,
    INTO: tl.constexpr,
    BITS: tl.constexpr,
    NAN: tl.constexpr,
    NARROW: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = table + tl.program_id(0).to(tl.int64) * TILE
    src = tl.load(row + ADDRESS).to(tl.pointer_type(FROM))
    box, pitch = tl.load(row + BOX), tl.load(row + PITCH)
    n_rows, n_columns = tl.load(row + TILE_ROWS).to(tl.int32), tl.load(row + TILE_COLUMNS).to(tl.int32)
    counter, column = tl.load(row + ROW_COUNTER).to(tl.uint64), tl.load(row + COLUMN)
    columns, lanes = tl.arange(0, COLUMNS), tl.arange(0, ROWS)
    sums = tl.zeros([ROWS, COLUMNS], tl.uint64)
    for start in range(0, n_rows, ROWS):
        rows = start + lanes
        inside = (rows < n_rows)[:, None] & (columns < n_columns)[None, :]
        value = tl.load(src + (rows.to(tl.int64) * pitch)[:, None] + columns[None, :], mask=inside, other=0)
        if NAN >= 0:
            cast = value.to(INTO)
            bits = cast.to(BITS, bitcast=True)
            number = value.to(tl.float32)
            bits = tl.where(number == number, bits, tl.full(bits.shape, NAN, BITS))
        else:
            bits = value
        if NARROW:
            mixed = bits.to(tl.uint32) * MIX_32
            mixed = (mixed ^ (mixed >> SHIFT_32)).to(tl.uint64)
        else:
            mixed = bits.to(tl.uint64) * MIX_64
            mixed = mixed ^ (mixed >> SHIFT_64)
        sums += mixed * _keys(rows.to(tl.uint64) + counter)[:, None]
    keys = _keys((column + columns).to(tl.uint64))
    tl.atomic_add(out + box, tl.sum(sums * keys[None, :]).to(tl.int64))


def tiles_on_gpu(boxes: Sequence[LiveBox], seeds: Sequence[int], device: torch.device) -> Tiles:
    """Return the tiles of boxes, for `sums_of_tiles`: as long as the boxes lie where they do now."""
    return {kind: on_device(tiles, device) for kind, tiles in digest_tiles.tiles_of(boxes, seeds).items()}


def sums_of_tiles(tiles: Tiles, boxes: int, device: torch.device) -> list[int]:
    """Return what each of so many boxes, of which these are the tiles, adds to the number of its tensor."""
    sums = torch.zeros(boxes, dtype=torch.int64, device=device)
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        for kind, of_kind in tiles.items():
            _launch(of_kind, sums, *kind)
    return [value & numbers.MASK for value in sums.tolist()]


def _launch(tiles: torch.Tensor, sums: torch.Tensor, held: str, counted: str, columns: int) -> None:
    size, target = DTYPES[held].size, DTYPES[counted].size
    rows = digest_tiles.BLOCK // columns
    if held == counted:
        word = INTEGERS[size]
        how = word, word, word, -1, size <= 2
    elif held in FLOATS and counted in FLOATS:
        how = FLOATS[held], FLOATS[counted], INTEGERS[target], numbers.NAN_BITS[counted], target <= 2
    else:
        raise ReshardError(f"a GPU takes no digest of {held} as {counted}: leave out the dtype")
    _sum[(len(tiles),)](tiles, sums, *how, rows, columns, num_warps=4)
