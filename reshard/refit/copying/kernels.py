"""The Triton kernels of a refit: copies and digests, each from a table (`reshard.refit.copying.tables`). Those that
make blocks, and that find changes, are built on them, in folders of their own.

They take raw addresses, so that one launch can read many tensors, and other GPUs' memory.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType

import torch
import triton
import triton.language as tl
from triton import knobs

from reshard.refit.codecs import CODECS, PLAIN
from reshard.refit.copying import tables
from reshard.refit.copying.tables import MIX_FINAL, MIX_FIRST_SHIFT, MIX_POSITION, MIX_SECOND_SHIFT, MIX_VALUE

WORDS = {1: tl.uint8, 2: tl.int16, 4: tl.int32, 8: tl.int64, 16: tl.int64}
FLOATS = {"float32": tl.float32, "bfloat16": tl.bfloat16, "float16": tl.float16}
BLOCK = 2048
_compiling = threading.Lock()  # one at a time: the hook that is replaced belongs to the process


def columns(names: str, of: ModuleType = tables) -> list[tl.constexpr]:
    """Return columns of a module of tables as constants of Triton's, which a kernel may name."""
    return [tl.constexpr(getattr(of, name)) for name in names.split()]


# Of copies, without the codec at their end, which is the same for all in a launch; of tiles of digests.
COPY, SRC, DST, ROWS, WIDTH, SRC_PITCH, DST_PITCH = columns("CODEC SRC DST ROWS WIDTH SRC_PITCH DST_PITCH")
TILE, ADDRESS, PIECE, TILE_ROWS, TILE_WORDS, TILE_PITCH, FIRST_WORD = columns(
    "TILE ADDRESS PIECE TILE_ROWS TILE_WORDS TILE_PITCH FIRST_WORD"
)


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
