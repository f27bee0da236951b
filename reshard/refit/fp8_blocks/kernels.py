"""The Triton kernels that make fp8 blocks, compare them with those that an engine serves, and digest either, from
tables of items and their fragments (`reshard.refit.fp8_blocks.tables`). Between blocks that it makes one carries out
copies."""

from functools import cache

import torch
import triton
import triton.language as tl

from reshard.quantization import fp8_blocks
from reshard.quantization.fp8_blocks_triton import encode_block
from reshard.refit.copying.kernels import BLOCK, COPY, POSITION, columns, copy_tile, expected_compilation, mix
from reshard.refit.fp8_blocks import tables
from reshard.refit.fp8_blocks.tables import ITEM_BLOCKS, BlockKernel

# So that two programs run on a multiprocessor. In a pull more warps, of which each has less under way, wait for the
# links a little better; where NCCL's kernels run beside them, for buckets, they leave these less room.
PULL_LAUNCH = {"num_warps": 16, "maxnreg": 64}
LAUNCH = {"num_warps": 8, "maxnreg": 128}

ITEM, CODES, CODES_PITCH, SCALES, ITEM_ROWS, ITEM_COLUMNS, FIRST_FRAGMENT, FRAGMENTS, ROUNDING = columns(
    "ITEM CODES CODES_PITCH SCALES ITEM_ROWS ITEM_COLUMNS FIRST_FRAGMENT FRAGMENTS ROUNDING", tables
)
FRAGMENT, SOURCE, SOURCE_PITCH, TOP, LEFT, FRAGMENT_ROWS, FRAGMENT_COLUMNS, ELEMENT_BYTES = columns(
    "FRAGMENT SOURCE SOURCE_PITCH TOP LEFT FRAGMENT_ROWS FRAGMENT_COLUMNS ELEMENT_BYTES", tables
)
SPAN, SPAN_PIECE, SPAN_WORD, SPAN_ROW_WORDS, SPAN_ELEMENTS = columns(
    "SPAN SPAN_PIECE SPAN_WORD SPAN_ROW_WORDS SPAN_ELEMENTS", tables
)
EDGE = tl.constexpr(fp8_blocks.BLOCK)  # elements along an edge of a block with a scale
ITEM_WORDS = tl.constexpr(ITEM_BLOCKS * fp8_blocks.BLOCK // 8)  # of codes, in a row of the widest item
LOW_HALF = tl.constexpr((1 << 32) - 1)
UE8M0, TWICE, STORED = (
    tl.constexpr([*fp8_blocks.ROUNDINGS].index(name)) for name in ("ue8m0", "twice", "stored")
)


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
    words = (low.to(tl.int64) & LOW_HALF) | (high.to(tl.int64) << 32)
    r = tl.arange(0, EDGE)[:, None]
    c = block + tl.arange(0, EDGE // SPAN_ELEMENTS)[None, :] * SPAN_ELEMENTS
    for number in range(count):
        fragment, span = fragments + number * FRAGMENT, spans + number * SPAN
        piece = tl.load(span + SPAN_PIECE)
        if piece >= 0:
            down, along = r - tl.load(fragment + TOP), (c - tl.load(fragment + LEFT)) // SPAN_ELEMENTS
            position = tl.load(span + SPAN_WORD) + down * tl.load(span + SPAN_ROW_WORDS) + along
            mixed = tl.where(_inside(fragment, r, c), mix(words, position * POSITION), 0)
            tl.atomic_add(sums + piece, tl.sum(mixed))


@triton.jit
def _make(item, gathered):
    """Return the codes of an item's block of these elements, and its scale."""
    rounding = tl.load(item + ROUNDING)
    codes, scale = encode_block(gathered.to(tl.float32), rounding == UE8M0, rounding == STORED)
    if rounding == TWICE:
        codes, scale = encode_block(codes.to(tl.float32) * scale, True, False)
    return codes, scale


@triton.jit
def _places(item, block, ALIGNED: tl.constexpr):
    """Return where the codes of an item's block are served from, a mask of those that the item has, and whether
    it has all; and where its scale is."""
    n_rows, n_columns = tl.load(item + ITEM_ROWS).to(tl.int32), tl.load(item + ITEM_COLUMNS).to(tl.int32)
    r, c = tl.arange(0, EDGE)[:, None], block + tl.arange(0, EDGE)[None, :]
    where = tl.load(item + CODES).to(tl.pointer_type(tl.float8e4nv)) + (r * tl.load(item + CODES_PITCH) + c)
    inside = (r < n_rows) & (c < n_columns)
    if ALIGNED:
        where = tl.multiple_of(tl.max_contiguous(where, [1, 16]), [1, 16])
        inside = tl.max_constancy(inside, [1, 16])
    whole = (n_rows == EDGE) & (n_columns >= block + EDGE)  # no mask then, which would split loads and stores
    return where, inside, whole, tl.load(item + SCALES).to(tl.pointer_type(tl.float32)) + block // EDGE


@triton.jit
def _served(where, inside, whole):
    """Return the codes of a block as they are served, and zeros outside of its item."""
    if whole:
        codes = tl.load(where)
    else:
        codes = tl.load(where, mask=inside, other=0.0)
    return codes


@triton.jit
def _encode(
    number, items, fragments, wrong, spans, sums, ALIGNED: tl.constexpr, ITEM_BLOCKS: tl.constexpr,
    SIZE: tl.constexpr, COMPARE: tl.constexpr, DIGEST: tl.constexpr,
):  # fmt: skip
    """Make the block of this number, or compare it; each item has `ITEM_BLOCKS` numbers."""
    item = items + (number // ITEM_BLOCKS).to(tl.int64) * ITEM
    block = (number % ITEM_BLOCKS).to(tl.int32) * EDGE
    if block < tl.load(item + ITEM_COLUMNS).to(tl.int32):
        count, first = tl.load(item + FRAGMENTS).to(tl.int32), tl.load(item + FIRST_FRAGMENT)
        gathered = _gather(fragments + first * FRAGMENT, count, block, SIZE, ALIGNED)
        if DIGEST:
            _add_digests(gathered, fragments + first * FRAGMENT, spans + first * SPAN, count, block, sums)
        codes, scale = _make(item, gathered)
        where, inside, whole, scale_at = _places(item, block, ALIGNED)
        if COMPARE:
            served = _served(where, inside, whole)
            unlike = served.to(tl.uint8, bitcast=True) != codes.to(tl.uint8, bitcast=True)
            differing = tl.sum((unlike & inside).to(tl.int32))
            differing += (
                tl.load(scale_at).to(tl.int32, bitcast=True) != scale.to(tl.int32, bitcast=True)
            ).to(tl.int32)
            if differing > 0:
                tl.atomic_add(wrong + number // ITEM_BLOCKS, differing)
        else:
            if whole:
                tl.store(where, codes)
            else:
                tl.store(where, codes, mask=inside)
            tl.store(scale_at, scale)


@triton.jit(do_not_specialize=["count"])
def _quantize(
    tiles, count, items, fragments, wrong, spans, sums, ALIGNED: tl.constexpr, ITEM_BLOCKS: tl.constexpr,
    SIZE: tl.constexpr, COMPARE: tl.constexpr, DIGEST: tl.constexpr, COPIED: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    if COMPARE:
        _encode(program, items, fragments, wrong, spans, sums, ALIGNED, ITEM_BLOCKS, SIZE, COMPARE, DIGEST)
    else:
        # Of `count` tiles and the blocks each takes its turn, evenly.
        programs = tl.num_programs(0)
        before = program * count // programs  # tiles that were others' turns
        if (program + 1) * count // programs > before:
            copy_tile(tiles + before * COPY, tl.int64, tl.int64, 2, COPIED)
        else:
            _encode(
                program - before, items, fragments, wrong, spans, sums, ALIGNED, ITEM_BLOCKS, SIZE, COMPARE,
                DIGEST,
            )  # fmt: skip


@triton.jit
def _digest_blocks(
    items, fragments, sums, ALIGNED: tl.constexpr, ITEM_BLOCKS: tl.constexpr, SIZE: tl.constexpr,
    SERVED: tl.constexpr,
):  # fmt: skip
    """Add the digest of a block's codes and scale, as they are made or `SERVED`, to its item's."""
    number = tl.program_id(0).to(tl.int64)
    item, block = items + number // ITEM_BLOCKS * ITEM, (number % ITEM_BLOCKS).to(tl.int32) * EDGE
    if block < tl.load(item + ITEM_COLUMNS).to(tl.int32):
        if SERVED:
            where, inside, whole, scale_at = _places(item, block, ALIGNED)
            codes, scale = _served(where, inside, whole), tl.load(scale_at)
        else:
            count, first = tl.load(item + FRAGMENTS).to(tl.int32), tl.load(item + FIRST_FRAGMENT)
            codes, scale = _make(item, _gather(fragments + first * FRAGMENT, count, block, SIZE, ALIGNED))
        # Eight codes are a word.
        bits = tl.reshape(codes.to(tl.uint8, bitcast=True).to(tl.int32), [EDGE, EDGE // 8, 2, 2, 2])
        even, odd = tl.split(bits)
        even, odd = tl.split(even | (odd << 8))
        low, high = tl.split(even | (odd << 16))
        words = (low.to(tl.int64) & LOW_HALF) | (high.to(tl.int64) << 32)
        r, w = tl.arange(0, EDGE)[:, None], block // 8 + tl.arange(0, EDGE // 8)[None, :]
        place = r.to(tl.int64) * ITEM_WORDS + w
        scale_word = scale.to(tl.int32, bitcast=True).to(tl.int64) & LOW_HALF
        scale_place = (block // EDGE).to(tl.int64) + EDGE * ITEM_WORDS
        total = tl.sum(mix(words, place * POSITION)) + mix(scale_word, scale_place * POSITION)
        tl.atomic_add(sums + number // ITEM_BLOCKS, total)


def quantize_items(
    items: torch.Tensor, fragments: torch.Tensor, kernel: BlockKernel, tiles: torch.Tensor | None = None
) -> None:
    """Gather the blocks of a table of items, and write their codes and scales; between them carry out `tiles`,
    plain copies in words of 16 bytes."""
    count = 0 if tiles is None else len(tiles)
    programs = count + len(items) * kernel.blocks
    how = *kernel, False, False, BLOCK // 2
    options = PULL_LAUNCH if kernel.blocks > 1 else LAUNCH  # one by one they are packed
    _quantize[(programs,)](
        items if tiles is None else tiles, count, items, fragments, items, items, items, *how, **options
    )


def compare_items(
    items: torch.Tensor,
    fragments: torch.Tensor,
    kernel: BlockKernel,
    spans: torch.Tensor | None = None,
    sums: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return a mask of the items of which codes or scales have other bits than `quantize_items` would
    write. With `spans` of the fragments, the digests of their pieces are added to
    `sums`, from the same reads; all has to be `aligned` then."""
    wrong = torch.zeros(len(items), dtype=torch.int32, device=items.device)
    digest = spans is not None and sums is not None
    how = *kernel, True, digest, BLOCK // 2
    if len(items):
        added = (spans, sums) if digest else (items, items)
        with expected_compilation():
            programs = len(items) * kernel.blocks
            _quantize[(programs,)](items, 0, items, fragments, wrong, *added, *how, **LAUNCH)
    return wrong != 0


def digest_items(
    items: torch.Tensor, fragments: torch.Tensor, kernel: BlockKernel, served: bool
) -> torch.Tensor:
    """Return a digest of the codes and scales of each item, int64 ``[items]``: as they are `served`, or as
    `quantize_items` would make them."""
    sums = torch.zeros(len(items), dtype=torch.int64, device=items.device)
    if len(items):
        with expected_compilation():
            _digest_blocks[(len(items) * kernel.blocks,)](items, fragments, sums, *kernel, served, **LAUNCH)
    return sums


@cache
def compile_quantize(kernel: BlockKernel, device: torch.device) -> None:
    """Compile this variant of `quantize_items` now, on an empty item."""
    with torch.cuda.device(device), expected_compilation():
        items = torch.zeros((1, ITEM.value), dtype=torch.int64, device=device)
        fragments = torch.zeros((1, FRAGMENT.value), dtype=torch.int64, device=device)
        quantize_items(items, fragments, kernel)
        torch.cuda.synchronize(device)
