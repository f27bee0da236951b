"""The Triton kernels of a refit: copies, blocks of fp8, and digests, each from a table
(`reshard.refit.tables`).

They take raw addresses, so that one launch can read many tensors, and other GPUs' memory.
"""

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache

import torch
import triton
import triton.language as tl
from triton import knobs

from reshard.quantization import fp8_blocks
from reshard.quantization.fp8_blocks_triton import encode_block
from reshard.refit import tables
from reshard.refit.codecs import CODECS, PLAIN
from reshard.refit.tables import (
    ITEM_BLOCKS,
    MIX_FINAL,
    MIX_FIRST_SHIFT,
    MIX_POSITION,
    MIX_SECOND_SHIFT,
    MIX_VALUE,
)

WORDS = {1: tl.uint8, 2: tl.int16, 4: tl.int32, 8: tl.int64, 16: tl.int64}
FLOATS = {"float32": tl.float32, "bfloat16": tl.bfloat16, "float16": tl.float16}
BLOCK = 2048
# Of the kernel that makes blocks: so that two of its programs run on a multiprocessor. A pull is as fast with
# one, which waits for the link; a check is slower.
QUANTIZE = {"num_warps": 8, "maxnreg": 128}
_compiling = threading.Lock()  # one at a time: the hook that is replaced belongs to the process


def _columns(names: str) -> list[tl.constexpr]:
    """Return columns of `reshard.refit.tables` as constants of Triton's, which a kernel may name."""
    return [tl.constexpr(getattr(tables, name)) for name in names.split()]


# Of copies, without the codec at their end, which is the same for all in a launch; of items and
# fragments; of tiles of digests.
COPY, SRC, DST, ROWS, WIDTH, SRC_PITCH, DST_PITCH = _columns("CODEC SRC DST ROWS WIDTH SRC_PITCH DST_PITCH")
ITEM, CODES, CODES_PITCH, SCALES, ITEM_ROWS, ITEM_COLUMNS, FIRST_FRAGMENT, FRAGMENTS = _columns(
    "ITEM CODES CODES_PITCH SCALES ITEM_ROWS ITEM_COLUMNS FIRST_FRAGMENT FRAGMENTS"
)
FRAGMENT, SOURCE, SOURCE_PITCH, TOP, LEFT, FRAGMENT_ROWS, FRAGMENT_COLUMNS, ELEMENT_BYTES = _columns(
    "FRAGMENT SOURCE SOURCE_PITCH TOP LEFT FRAGMENT_ROWS FRAGMENT_COLUMNS ELEMENT_BYTES"
)
TILE, ADDRESS, PIECE, TILE_ROWS, TILE_WORDS, TILE_PITCH, FIRST_WORD = _columns(
    "TILE ADDRESS PIECE TILE_ROWS TILE_WORDS TILE_PITCH FIRST_WORD"
)
SPAN, SPAN_PIECE, SPAN_WORD, SPAN_ROW_WORDS, SPAN_ELEMENTS = _columns(
    "SPAN SPAN_PIECE SPAN_WORD SPAN_ROW_WORDS SPAN_ELEMENTS"
)
EDGE = tl.constexpr(fp8_blocks.BLOCK)  # elements along an edge of a block with a scale


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
        begins = tl.load(tiles + middle * 6) <= where
        low = tl.where(begins, middle, low)
        high = tl.where(begins, high, middle)
    tile = tiles + low * 6
    within = where - tl.load(tile)
    inside = inside & (within >= 0) & (within < tl.load(tile + 1)) & (tl.load(tile + 5) == COPIED)
    width = tl.load(tile + 2)
    row = within // width
    address = tl.load(tile + 3) + row * tl.load(tile + 4) + (within - row * width) * RATIO
    word = tl.load(values + at, mask=inside, other=0)
    if RATIO > 1:
        word = word.to(SOURCE, bitcast=True).to(INTO).to(WORD, bitcast=True)
    tl.store(address.to(tl.pointer_type(WORD)), word, mask=inside)


def write_changes(positions: torch.Tensor, values: torch.Tensor, tiles: torch.Tensor, codec: int) -> None:
    """Write words, int16 ``[n]``, which are at these int64 positions in a bucket, where they are served from.

    `tiles`, int64 ``[tiles, 6]``, says of each tile, in their order: where it begins in the bucket, its bytes, those
    of a row, its address and pitch there, and its codec: only words of tiles with this `codec` are written. All
    of these are multiples of 2 bytes.
    """
    source, into = CODECS[codec].source, CODECS[codec].destination
    steps = max(1, (len(tiles) - 1).bit_length())
    plain = codec == PLAIN
    types = (
        (tl.int16, tl.int16, tl.int16)
        if plain
        else (FLOATS[source.name], FLOATS[into.name], WORDS[into.size])
    )
    with expected_compilation():
        _write_changes[(triton.cdiv(len(positions), 512),)](
            positions,
            values,
            len(positions),
            tiles,
            len(tiles),
            steps,
            codec,
            *types,
            1 if plain else into.size // 2,
            512,
        )


@cache
def compile_changes(device: torch.device) -> None:
    """Compile the writing of changes now, of a word that is nowhere."""
    with torch.cuda.device(device):
        nowhere = torch.zeros((1, 6), dtype=torch.int64, device=device)
        nowhere[0, 2] = 2
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
def _mixed(word, place):
    """Return the mix of words and their positions; `place` is the position times its factor."""
    mixed = (word + 1) * VALUE + place
    mixed = (mixed ^ ((mixed >> FIRST) & FIRST_MASK)) * FINAL
    return mixed ^ ((mixed >> SECOND) & SECOND_MASK)


@triton.jit
def _copy_tile(row, FROM: tl.constexpr, INTO: tl.constexpr, PAIR: tl.constexpr, BLOCK: tl.constexpr):
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
    _copy_tile(table + tl.program_id(0).to(tl.int64) * COPY, FROM, INTO, PAIR, BLOCK)


@triton.jit(do_not_specialize=["tiles"])
def _copy_aside(
    table, tiles, FROM: tl.constexpr, INTO: tl.constexpr, PAIR: tl.constexpr, BLOCK: tl.constexpr
):
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        _copy_tile(table + tile * COPY, FROM, INTO, PAIR, BLOCK)


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
def _inside(row, r, c):
    """Return the mask of the elements at rows `r` and columns `c` of an item that are in a
    fragment."""
    top, left = tl.load(row + TOP).to(tl.int32), tl.load(row + LEFT).to(tl.int32)
    below, right = (
        top + tl.load(row + FRAGMENT_ROWS).to(tl.int32),
        left + tl.load(row + FRAGMENT_COLUMNS).to(tl.int32),
    )
    return (r >= top) & (r < below) & (c >= left) & (c < right)


@triton.jit
def _read(row, r, c, FROM: tl.constexpr, ALIGNED: tl.constexpr, WHOLE: tl.constexpr):
    """Return these elements of a fragment as bf16. Where it does not have the `WHOLE` of them, the
    others are zeros."""
    src = tl.load(row + SOURCE).to(tl.pointer_type(FROM))
    top, left = tl.load(row + TOP).to(tl.int32), tl.load(row + LEFT).to(tl.int32)
    where = src + ((r - top) * tl.load(row + SOURCE_PITCH) + (c - left))
    if ALIGNED:
        where = tl.multiple_of(tl.max_contiguous(where, [1, 8]), [1, 16])
    if WHOLE:
        value = tl.load(where)  # no mask, which would split it into many small loads
    else:
        inside = _inside(row, r, c)
        if ALIGNED:
            inside = tl.max_constancy(inside, [1, 16])
        value = tl.load(where, mask=inside, other=0.0)
    return value.to(tl.bfloat16)


@triton.jit
def _read_any(row, r, c, SIZE: tl.constexpr, ALIGNED: tl.constexpr, WHOLE: tl.constexpr):
    """Return `_read` for elements of `SIZE` bytes; where that is 0, of this fragment's bytes."""
    if SIZE == 2:
        value = _read(row, r, c, tl.bfloat16, ALIGNED, WHOLE)
    elif SIZE == 4:
        value = _read(row, r, c, tl.float32, ALIGNED, WHOLE)
    else:
        if tl.load(row + ELEMENT_BYTES) == 4:
            value = _read(row, r, c, tl.float32, ALIGNED, WHOLE)
        else:
            value = _read(row, r, c, tl.bfloat16, ALIGNED, WHOLE)
    return value


@triton.jit
def _gather(fragments, count, block, SIZE: tl.constexpr, ALIGNED: tl.constexpr):
    """Return the elements ``[128, 128]`` of an item's block that starts at a column, in bf16, and
    zeros outside of the item."""
    r, c = tl.arange(0, EDGE)[:, None], block + tl.arange(0, EDGE)[None, :]
    top, left = tl.load(fragments + TOP), tl.load(fragments + LEFT)
    rows, right = tl.load(fragments + FRAGMENT_ROWS), left + tl.load(fragments + FRAGMENT_COLUMNS)
    if (top == 0) & (rows == EDGE) & (left <= block) & (right >= block + EDGE):
        value = _read_any(fragments, r, c, SIZE, ALIGNED, True)
    else:
        value = _read_any(fragments, r, c, SIZE, ALIGNED, False)
        for more in range(1, count):
            row = fragments + more * FRAGMENT
            value = tl.where(_inside(row, r, c), _read_any(row, r, c, SIZE, ALIGNED, False), value)
    return value


@triton.jit
def _add_digests(value, fragments, spans, count, block, sums):
    """Add the digests of the bf16 ``[128, 128]`` of an item's block, by the pieces that its fragments are of."""
    bits = value.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    even, odd = tl.split(tl.reshape(bits, [EDGE, EDGE // SPAN_ELEMENTS, 2, 2]))
    low, high = tl.split(even | (odd << 16))
    words = (low.to(tl.int64) & ((1 << 32) - 1)) | (high.to(tl.int64) << 32)
    r = tl.arange(0, EDGE)[:, None]
    c = block + tl.arange(0, EDGE // SPAN_ELEMENTS)[None, :] * SPAN_ELEMENTS
    for number in range(count):
        fragment, span = fragments + number * FRAGMENT, spans + number * SPAN
        piece = tl.load(span + SPAN_PIECE)
        if piece >= 0:
            down, along = r - tl.load(fragment + TOP), (c - tl.load(fragment + LEFT)) // SPAN_ELEMENTS
            position = tl.load(span + SPAN_WORD) + down * tl.load(span + SPAN_ROW_WORDS) + along
            mixed = tl.where(_inside(fragment, r, c), _mixed(words, position * POSITION), 0)
            tl.atomic_add(sums + piece, tl.sum(mixed))


@triton.jit
def _quantize(
    items,
    fragments,
    wrong,
    spans,
    sums,
    POWER: tl.constexpr,
    TWICE: tl.constexpr,
    DIVIDE: tl.constexpr,
    ALIGNED: tl.constexpr,
    ITEM_BLOCKS: tl.constexpr,
    SIZE: tl.constexpr,
    COMPARE: tl.constexpr,
    DIGEST: tl.constexpr,
):
    item = items + (tl.program_id(0) // ITEM_BLOCKS).to(tl.int64) * ITEM
    block = (tl.program_id(0) % ITEM_BLOCKS) * EDGE
    n_rows, n_columns = tl.load(item + ITEM_ROWS).to(tl.int32), tl.load(item + ITEM_COLUMNS).to(tl.int32)
    if block < n_columns:
        count, first = tl.load(item + FRAGMENTS).to(tl.int32), tl.load(item + FIRST_FRAGMENT)
        gathered = _gather(fragments + first * FRAGMENT, count, block, SIZE, ALIGNED)
        if DIGEST:
            _add_digests(gathered, fragments + first * FRAGMENT, spans + first * SPAN, count, block, sums)
        codes, scale = encode_block(gathered.to(tl.float32), POWER and not TWICE, DIVIDE)
        if TWICE:
            codes, scale = encode_block(codes.to(tl.float32) * scale, True, False)
        r, c = tl.arange(0, EDGE)[:, None], block + tl.arange(0, EDGE)[None, :]
        where = tl.load(item + CODES).to(tl.pointer_type(tl.float8e4nv)) + (
            r * tl.load(item + CODES_PITCH) + c
        )
        if ALIGNED:
            where = tl.multiple_of(tl.max_contiguous(where, [1, 16]), [1, 16])
        scale_at = tl.load(item + SCALES).to(tl.pointer_type(tl.float32)) + block // EDGE
        inside = (r < n_rows) & (c < n_columns)
        if ALIGNED:
            inside = tl.max_constancy(inside, [1, 16])
        whole = (n_rows == EDGE) & (n_columns >= block + EDGE)  # no mask, which would split loads and stores
        if COMPARE:
            if whole:
                served = tl.load(where)
            else:
                served = tl.load(where, mask=inside, other=0.0)
            unlike = served.to(tl.uint8, bitcast=True) != codes.to(tl.uint8, bitcast=True)
            differing = tl.sum((unlike & inside).to(tl.int32))
            differing += (
                tl.load(scale_at).to(tl.int32, bitcast=True) != scale.to(tl.int32, bitcast=True)
            ).to(tl.int32)
            if differing > 0:
                tl.atomic_add(wrong + tl.program_id(0) // ITEM_BLOCKS, differing)
        else:
            if whole:
                tl.store(where, codes)
            else:
                tl.store(where, codes, mask=inside)
            tl.store(scale_at, scale)


def _scaling(rounding: str) -> tuple[bool, bool, bool]:
    """Return POWER, TWICE and DIVIDE of `_quantize`."""
    return rounding in ("ue8m0", "twice"), rounding == "twice", rounding == "stored"


def quantize_items(
    items: torch.Tensor,
    fragments: torch.Tensor,
    rounding: str,
    aligned: bool,
    blocks: int = ITEM_BLOCKS,
    size: int = 2,
) -> None:
    """Gather the blocks of a table of items, each of at most `blocks` of them, and write their
    codes and scales.

    `aligned` says that all addresses and pitches are multiples of 16 bytes, and all columns of 16
    elements; `size` is the bytes of an element of the source: 2 (bf16), 4 (fp32), or 0 where fragments
    differ.
    """
    how = *_scaling(rounding), aligned, blocks, size, False, False
    _quantize[(len(items) * blocks,)](items, fragments, items, items, items, *how, **QUANTIZE)


def compare_items(
    items: torch.Tensor,
    fragments: torch.Tensor,
    rounding: str,
    aligned: bool,
    blocks: int = ITEM_BLOCKS,
    size: int = 2,
    spans: torch.Tensor | None = None,
    sums: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return a mask of the items of which codes or scales have other bits than `quantize_items` would
    write; it takes the same. With `spans` of the fragments, the digests of their pieces are added to
    `sums`, from the same reads; all has to be `aligned` then."""
    wrong = torch.zeros(len(items), dtype=torch.int32, device=items.device)
    digest = spans is not None and sums is not None
    how = *_scaling(rounding), aligned, blocks, size, True, digest
    if len(items):
        added = (spans, sums) if digest else (items, items)
        with expected_compilation():
            _quantize[(len(items) * blocks,)](items, fragments, wrong, *added, *how, **QUANTIZE)
    return wrong != 0


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
        sums += tl.where(inside, _mixed(word, place), 0)
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
def compile_quantize(
    rounding: str, aligned: bool, device: torch.device, blocks: int = ITEM_BLOCKS, size: int = 2
) -> None:
    """Compile the quantizing of items of so many blocks, from elements of `size` bytes, now, on an
    empty item."""
    with torch.cuda.device(device), expected_compilation():
        items = torch.zeros((1, ITEM.value), dtype=torch.int64, device=device)
        fragments = torch.zeros((1, FRAGMENT.value), dtype=torch.int64, device=device)
        quantize_items(items, fragments, rounding, aligned, blocks, size)
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


def compile_ahead(
    device: torch.device, sizes: Iterable[int], roundings: Iterable[str], size: int
) -> threading.Thread:
    """Begin to compile what nearly every refit launches, in a thread, since planning takes as long.

    `sizes` are the bytes of elements that are copied, `roundings` those of blocks, which are made
    of elements of `size` bytes. A kernel that is needed before it is compiled is waited for.
    """

    def compile_all() -> None:
        for rounding in roundings:  # first, since a look at vLLM's arithmetic waits for them
            compile_quantize(rounding, True, device, ITEM_BLOCKS, size)
        compile_copy(16, device)
        for word, unit in ((8, 8), *((size, size) for size in sizes)):
            compile_digest(word, unit, device)

    thread = threading.Thread(target=compile_all, name="reshard compiles")
    thread.start()
    return thread
