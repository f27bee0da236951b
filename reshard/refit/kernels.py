"""The Triton kernels of a refit: copies, digests, and what deltas write, each from a table
(`reshard.refit.tables`). Those of fp8 blocks are in `reshard.refit.fp8_blocks.kernels`.

They take raw addresses, so that one launch can read many tensors, and other GPUs' memory.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
import triton
import triton.language as tl
from triton import knobs

from reshard.refit import tables
from reshard.refit.codecs import CODECS, PLAIN
from reshard.refit.tables import (
    MIX_FINAL,
    MIX_FIRST_SHIFT,
    MIX_POSITION,
    MIX_SECOND_SHIFT,
    MIX_VALUE,
)

WORDS = {1: tl.uint8, 2: tl.int16, 4: tl.int32, 8: tl.int64, 16: tl.int64}
FLOATS = {"float32": tl.float32, "bfloat16": tl.bfloat16, "float16": tl.float16}
BLOCK = 2048
CHANGES = 512  # words of a program that writes them
_compiling = threading.Lock()  # one at a time: the hook that is replaced belongs to the process


def columns(names: str) -> list[tl.constexpr]:
    """Return columns of `reshard.refit.tables` as constants of Triton's, which a kernel may name."""
    return [tl.constexpr(getattr(tables, name)) for name in names.split()]


# Of copies, without the codec at their end, which is the same for all in a launch; of tiles of digests, and of
# buckets of which changes are written.
COPY, SRC, DST, ROWS, WIDTH, SRC_PITCH, DST_PITCH = columns("CODEC SRC DST ROWS WIDTH SRC_PITCH DST_PITCH")
TILE, ADDRESS, PIECE, TILE_ROWS, TILE_WORDS, TILE_PITCH, FIRST_WORD = columns(
    "TILE ADDRESS PIECE TILE_ROWS TILE_WORDS TILE_PITCH FIRST_WORD"
)
SERVED, SERVED_START, SERVED_BYTES, SERVED_WIDTH, SERVED_ADDRESS, SERVED_PITCH, SERVED_CODEC = columns(
    "SERVED SERVED_START SERVED_BYTES SERVED_WIDTH SERVED_ADDRESS SERVED_PITCH SERVED_CODEC"
)


@triton.jit(do_not_specialize=["count", "number", "steps"])
def _write_changes(
    positions, values, count, tiles, number, steps, COPIED: tl.constexpr, SOURCE: tl.constexpr, INTO: tl.constexpr,
    WORD: tl.constexpr, RATIO: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    where = tl.load(positions + at, mask=inside, other=0) * 2
    # The last tile that begins at or before each word.
    low = tl.zeros([BLOCK], tl.int32)
    high = low + number
    for _ in range(steps):
        middle = (low + high) // 2
        begins = tl.load(tiles + middle * SERVED + SERVED_START) <= where
        low = tl.where(begins, middle, low)
        high = tl.where(begins, high, middle)
    tile = tiles + low * SERVED
    within = where - tl.load(tile + SERVED_START)
    inside = inside & (within >= 0) & (within < tl.load(tile + SERVED_BYTES))
    inside = inside & (tl.load(tile + SERVED_CODEC) == COPIED)
    width = tl.load(tile + SERVED_WIDTH)
    row = within // width
    column = (within - row * width) * RATIO
    address = tl.load(tile + SERVED_ADDRESS) + row * tl.load(tile + SERVED_PITCH) + column
    word = tl.load(values + at, mask=inside, other=0)
    if RATIO > 1:
        word = word.to(SOURCE, bitcast=True).to(INTO).to(WORD, bitcast=True)
    tl.store(address.to(tl.pointer_type(WORD)), word, mask=inside)


def write_changes(positions: torch.Tensor, values: torch.Tensor, tiles: torch.Tensor, codec: int) -> None:
    """Write words, int16 ``[n]``, which are at these int64 positions in a bucket, where they are served from.

    `tiles`, int64 ``[tiles, 6]``, has the columns `tables.SERVED`, in the order of the bucket; all are multiples of
    2 bytes. Only words of tiles with this `codec` are written.
    """
    steps = max(1, (len(tiles) - 1).bit_length())
    how: tuple = (tl.int16, tl.int16, tl.int16, 1)
    if codec != PLAIN:
        size = CODECS[codec].destination.size
        how = *_floats(codec), WORDS[size], size // 2
    with expected_compilation():
        _write_changes[(triton.cdiv(len(positions), CHANGES),)](
            positions, values, len(positions), tiles, len(tiles), steps, codec, *how, CHANGES
        )


@cache
def compile_changes(device: torch.device) -> None:
    """Compile the writing of changes now, of a word that is nowhere."""
    with torch.cuda.device(device):
        nowhere = torch.zeros((1, SERVED.value), dtype=torch.int64, device=device)
        nowhere[0, SERVED_WIDTH.value] = 2
        write_changes(nowhere[0, :1].clone(), nowhere[0, :1].to(torch.int16), nowhere, PLAIN)
        torch.cuda.synchronize(device)


def _signed(word: int) -> int:
    """Return the same 64 bits as a signed number.

    >>> _signed(0xFFFFFFFFFFFFFFFF), _signed(5)
    (-1, 5)
    """
    return word - (1 << 64) if word >> 63 else word


VALUE, POSITION, FINAL = (tl.constexpr(_signed(factor)) for factor in (MIX_VALUE, MIX_POSITION, MIX_FINAL))
# A shift of a signed number brings in its sign, which the masks take away.
FIRST, FIRST_MASK = tl.constexpr(MIX_FIRST_SHIFT), tl.constexpr((1 << (64 - MIX_FIRST_SHIFT)) - 1)
SECOND, SECOND_MASK = tl.constexpr(MIX_SECOND_SHIFT), tl.constexpr((1 << (64 - MIX_SECOND_SHIFT)) - 1)


@triton.jit
def mix(word, place):
    """Return the mix of words and their positions; `place` is the position times its factor."""
    mixed = (word + 1) * VALUE + place
    mixed = (mixed ^ ((mixed >> FIRST) & FIRST_MASK)) * FINAL
    return mixed ^ ((mixed >> SECOND) & SECOND_MASK)


@triton.jit
def copy_tile(row, FROM: tl.constexpr, INTO: tl.constexpr, PAIR: tl.constexpr, BLOCK: tl.constexpr):
    """Carry out one tile, of words of `PAIR` elements."""
    src = tl.load(row + SRC).to(tl.pointer_type(FROM))
    dst = tl.load(row + DST).to(tl.pointer_type(INTO))
    n_rows, width = tl.load(row + ROWS).to(tl.int32), tl.load(row + WIDTH).to(tl.int32)
    src_pitch, dst_pitch = tl.load(row + SRC_PITCH), tl.load(row + DST_PITCH)
    half = tl.arange(0, PAIR)[None, :]
    total = n_rows * width
    if n_rows == 1:
        for start in range(0, total, BLOCK):
            at = start + tl.arange(0, BLOCK)[:, None]
            inside = (at < total) & (half >= 0)
            where = at * PAIR + half
            tl.store(dst + where, tl.load(src + where, mask=inside).to(INTO), mask=inside)
    else:
        for start in range(0, total, BLOCK):
            at = start + tl.arange(0, BLOCK)[:, None]
            inside = (at < total) & (half >= 0)
            r, c = at // width, at % width
            value = tl.load(src + ((r * src_pitch + c) * PAIR + half), mask=inside)
            tl.store(dst + ((r * dst_pitch + c) * PAIR + half), value.to(INTO), mask=inside)


@triton.jit
def _copy(table, FROM: tl.constexpr, INTO: tl.constexpr, PAIR: tl.constexpr, BLOCK: tl.constexpr):
    copy_tile(table + tl.program_id(0).to(tl.int64) * COPY, FROM, INTO, PAIR, BLOCK)


@triton.jit(do_not_specialize=["tiles"])
def _copy_aside(
    table, tiles, FROM: tl.constexpr, INTO: tl.constexpr, PAIR: tl.constexpr, BLOCK: tl.constexpr
):
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        copy_tile(table + tile * COPY, FROM, INTO, PAIR, BLOCK)


def copy_tiles(tiles: torch.Tensor, unit: int, programs: int | None = None, codec: int = PLAIN) -> None:
    """Carry out a table of tiles whose lengths and pitches are in words of `unit` bytes (16: two
    words of 8 bytes at once), or with a `codec` in elements.

    `programs` limits the share of the GPU, for copies alongside something else that must go on.
    """
    pair = 2 if unit == 16 else 1
    read, written = (WORDS[unit],) * 2 if codec == PLAIN else _floats(codec)
    how = read, written, pair, BLOCK // pair
    if programs is None:
        _copy[(len(tiles),)](tiles, *how, num_warps=8)
    else:
        _copy_aside[(min(programs, len(tiles)),)](tiles, len(tiles), *how, num_warps=8)


def _floats(codec: int) -> tuple[tl.dtype, tl.dtype]:
    return FLOATS[CODECS[codec].source.name], FLOATS[CODECS[codec].destination.name]


@triton.jit
def _bits(value, INTO: tl.constexpr, UNIT: tl.constexpr):
    return value.to(INTO).to(UNIT, bitcast=True).to(tl.int64)


@triton.jit
def _digest(
    table,
    out,
    FROM: tl.constexpr,
    INTO: tl.constexpr,
    UNIT: tl.constexpr,
    PARTS: tl.constexpr,
    MASK: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
):
    row = table + tl.program_id(0).to(tl.int64) * TILE
    src = tl.load(row + ADDRESS).to(tl.pointer_type(FROM))
    piece = tl.load(row + PIECE)
    n_rows, width = tl.load(row + TILE_ROWS).to(tl.int32), tl.load(row + TILE_WORDS).to(tl.int32)
    pitch = tl.load(row + TILE_PITCH)
    place = (tl.load(row + FIRST_WORD) + tl.arange(0, BLOCK)) * POSITION
    total = n_rows * width
    sums = tl.zeros([BLOCK], tl.int64)
    for start in range(0, total, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < total
        where = at.to(tl.int64) * PARTS
        if n_rows > 1:
            where = (at // width) * pitch + (at % width) * PARTS
        word = _bits(tl.load(src + where, mask=inside, other=0), INTO, UNIT) & MASK
        for part in tl.static_range(1, PARTS):
            more = _bits(tl.load(src + where + part, mask=inside, other=0), INTO, UNIT) & MASK
            word |= more << (64 // PARTS * part)
        sums += tl.where(inside, mix(word, place), 0)
        place += STEP
    tl.atomic_add(out + piece, tl.sum(sums))


def digest_tiles(tiles: torch.Tensor, out: torch.Tensor, word: int, unit: int, codec: int = PLAIN) -> None:
    """Add the digests of tiles to `out`, by piece. A `word` is loaded in units of `unit` bytes, or
    put together of elements that have so many once they are encoded."""
    if not len(tiles):
        return
    block = 1024
    every_bit = (1 << (8 * unit)) - 1 if unit < 8 else -1
    step = _signed(block * MIX_POSITION % (1 << 64))
    read, encoded = (WORDS[unit],) * 2 if codec == PLAIN else _floats(codec)
    how = read, encoded, WORDS[unit], word // unit, every_bit, block, step
    _digest[(len(tiles),)](tiles, out, *how, num_warps=4)


@triton.jit
def _write_words(addresses, words, count, WORD: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    where = tl.load(addresses + at, mask=inside, other=0).to(tl.pointer_type(WORD))
    tl.store(where, tl.load(words + at, mask=inside), mask=inside)


def write_words(addresses: torch.Tensor, words: torch.Tensor) -> None:
    """Write words ``[n]``, integers of 1, 2 or 4 bytes, at as many int64 addresses."""
    with expected_compilation():
        how = WORDS[words.element_size()], BLOCK
        _write_words[(triton.cdiv(len(words), BLOCK),)](addresses, words, len(words), *how, num_warps=8)


@contextmanager
def expected_compilation() -> Iterator[None]:
    """Hide compilation at connect from a hook that watches for unexpected ones, as vLLM does once
    it serves (``--jit-monitor-mode``)."""
    with _compiling:
        hook, knobs.runtime.jit_post_compile_hook = knobs.runtime.jit_post_compile_hook, None
        try:
            yield
        finally:
            knobs.runtime.jit_post_compile_hook = hook


@cache
def compile_copy(unit: int, device: torch.device, programs: int | None = None, codec: int = PLAIN) -> None:
    """Compile the copies of this word size now, by copying nothing, so that the first refit does
    not wait for it; with `programs` those that use a part of the GPU."""
    with torch.cuda.device(device), expected_compilation():
        nothing = torch.zeros((1, COPY.value), dtype=torch.int64, device=device)
        nothing[0, [SRC.value, DST.value]] = nothing.data_ptr()
        copy_tiles(nothing.repeat(2, 1), unit, programs, codec)
        torch.cuda.synchronize(device)


@cache
def compile_digest(word: int, unit: int, device: torch.device, codec: int = PLAIN) -> None:
    """Compile the digests of words of this size, loaded in units of `unit` bytes, now, on an empty
    tile."""
    with torch.cuda.device(device), expected_compilation():
        nothing, out = (
            torch.zeros((1, TILE.value), dtype=torch.int64, device=device),
            torch.zeros(1, dtype=torch.int64, device=device),
        )
        nothing[0, ADDRESS.value] = nothing.data_ptr()
        digest_tiles(nothing, out, word, unit, codec)
        torch.cuda.synchronize(device)
