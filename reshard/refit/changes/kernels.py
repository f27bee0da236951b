"""The Triton kernels of deltas: one compares a bucket, one lays out its changes, one encodes them; three read,
check and write those that arrive. None waits for the host, which needs to know how many bytes travel alone.

Each has a program for every tile of 8,192 words, but for the two that lay chunks out, one behind the other. The
bytes are those of `reshard.delta.chunks`, which does the same on a CPU.
"""

from functools import cache

import torch
import triton
import triton.language as tl

from reshard.delta.chunks import CHUNK, chunks_of
from reshard.delta.forms import BLOCK, SECTION, Form
from reshard.refit.codecs import CODECS, PLAIN
from reshard.refit.copying.kernels import FLOATS, WORDS, columns, expected_compilation
from reshard.refit.copying.tables import (
    CHANGES,
    CHANGES_CHANGED,
    NOT_DUE,
    PRELUDE,
    SENSELESS,
    SERVED,
    STATUS,
    UNORDERED,
)

WORDS_OF_TILE = 8192
TILES_OF_CHUNK = CHUNK // WORDS_OF_TILE

# What a kernel may name.
NOTHING, OFFSETS, BITMAP, WHOLE = (tl.constexpr(int(form)) for form in Form)
CHUNK_WORDS, BLOCK_WORDS, TILE_WORDS = map(tl.constexpr, (CHUNK, BLOCK, WORDS_OF_TILE))
TILES, TILE_BYTES = tl.constexpr(TILES_OF_CHUNK), tl.constexpr(WORDS_OF_TILE // 8)  # bytes: of marks
BLOCKS, BLOCK_TILES = tl.constexpr(CHUNK // BLOCK), tl.constexpr(BLOCK // WORDS_OF_TILE)
ALIGNED, HEAD = tl.constexpr(SECTION), tl.constexpr(PRELUDE)
CHUNKS_AT_ONCE = tl.constexpr(32)  # that are laid out
LISTED = tl.constexpr(1024)  # changes that a program reads at once
DENSE = tl.constexpr(2048)  # words that a program writes at once where most of them may have changed
CODE_NOT_DUE, CODE_SENSELESS, CODE_UNORDERED = map(tl.constexpr, (NOT_DUE, SENSELESS, UNORDERED))
ROW, START, CHANGED, FORM, ELEMENTS = columns(
    "CHANGES CHANGES_START CHANGES_CHANGED CHANGES_FORM CHANGES_ELEMENTS"
)
SERVED_ROW, SERVED_START, SERVED_BYTES, SERVED_WIDTH, SERVED_ADDRESS, SERVED_PITCH, SERVED_CODEC = columns(
    "SERVED SERVED_START SERVED_BYTES SERVED_WIDTH SERVED_ADDRESS SERVED_PITCH SERVED_CODEC"
)


@triton.jit
def _set_bits(byte):
    """Return how many bits of a byte are set; all are in int32."""
    pairs = byte - ((byte >> 1) & 0x55)
    fours = (pairs & 0x33) + ((pairs >> 2) & 0x33)
    return (fours + (fours >> 4)) & 0x0F


@triton.jit
def _padded(size):
    return (size + (ALIGNED - 1)) // ALIGNED * ALIGNED


@triton.jit
def _second(start, changed):
    """Return where the section behind the values begins."""
    return start + _padded(2 * changed)


@triton.jit
def _third(start, changed, elements):
    """Return where the section behind the counts of blocks begins."""
    return _second(start, changed) + _padded(4 * ((elements + (BLOCK_WORDS - 1)) // BLOCK_WORDS))


@triton.jit
def _size(form, elements, changed):
    """Return the bytes of a form of changes (`BoxSize.size`)."""
    values = _padded(2 * changed)
    size = tl.where(form == OFFSETS, _third(0, changed, elements) + values, 0 * changed)
    size = tl.where(form == BITMAP, values + _padded((elements + 7) // 8), size)
    return tl.where(form == WHOLE, _padded(2 * elements), size)


@triton.jit
def _smallest(elements, changed):
    """Return the smallest form of changes, the first of them where several are."""
    best = 0 * changed + OFFSETS
    for form in tl.static_range(OFFSETS + 1, WHOLE + 1):
        is_smaller = _size(0 * changed + form, elements, changed) < _size(best, elements, changed)
        best = tl.where(is_smaller, form, best)
    return tl.where(changed > 0, best, NOTHING)


@triton.jit(do_not_specialize=["words"])
def _compare(old, new, words, marks, counts, KEEP: tl.constexpr):
    tile = tl.program_id(0).to(tl.int64)
    byte, half = tl.arange(0, TILE_BYTES)[:, None], tl.arange(0, 2)[None, :]
    at = tile * (TILE_WORDS // 4) + byte * 2 + half  # of four words each
    inside = (tile * TILE_BYTES + byte) * 8 < words
    now = tl.load(new + at, mask=inside, other=0)
    differs = tl.load(old + at, mask=inside, other=0) ^ now
    four = ((differs & 0xFFFF) != 0).to(tl.int32)
    four |= (((differs >> 16) & 0xFFFF) != 0).to(tl.int32) << 1
    four |= (((differs >> 32) & 0xFFFF) != 0).to(tl.int32) << 2
    four |= (((differs >> 48) & 0xFFFF) != 0).to(tl.int32) << 3
    of_byte = tl.sum(four << (half * 4), 1)
    tl.store(marks + tile * TILE_BYTES + tl.arange(0, TILE_BYTES), of_byte.to(tl.uint8))
    tl.store(counts + tile, tl.sum(_set_bits(of_byte)))
    if KEEP:
        tl.store(old + at, now, mask=inside & (differs != 0))


@triton.jit
def _store_layout(table, chunk, exists, start, changed, form, elements):
    row = table + chunk * ROW
    tl.store(row + START, start, mask=exists)
    tl.store(row + CHANGED, changed, mask=exists)
    tl.store(row + FORM, form, mask=exists)
    tl.store(row + ELEMENTS, elements, mask=exists)


@triton.jit
def _tiles(elements):
    """Return the tiles of so many words."""
    return (elements + (TILE_WORDS - 1)) // TILE_WORDS


@triton.jit(do_not_specialize=["words", "chunks"])
def _lay_out(counts, words, chunks, table, total):
    """Replace the counts of tiles by those ahead of them in their chunk."""
    end = 8 * (HEAD + 2 * chunks.to(tl.int64))
    for first in range(0, chunks, CHUNKS_AT_ONCE):
        chunk = (first + tl.arange(0, CHUNKS_AT_ONCE)).to(tl.int64)
        exists = chunk < chunks
        tile = chunk[:, None] * TILES + tl.arange(0, TILES)[None, :]
        place = counts + tile
        of_tile = tl.load(place, mask=tile < _tiles(words), other=0)
        tl.store(place, tl.cumsum(of_tile, 1) - of_tile, mask=exists[:, None])
        changed = tl.sum(of_tile, 1).to(tl.int64)
        elements = tl.minimum(words - chunk * CHUNK_WORDS, CHUNK_WORDS)
        form = _smallest(elements, changed)
        size = _size(form, elements, changed)
        _store_layout(table, chunk, exists, end + tl.cumsum(size, 0) - size, changed, form, elements)
        end += tl.sum(size)
    tl.store(total, end)


@triton.jit
def _encode_listed(words, chunk, tile, marks, counts, payload, start, changed, form, elements):
    """Write the changes of a tile of a chunk whose values come one by one."""
    program = chunk * TILES + tile
    at = tl.arange(0, TILE_BYTES)
    byte = tl.load(marks + program * TILE_BYTES + at).to(tl.int32)
    ahead, of_byte = tl.load(counts + program), _set_bits(byte)
    second, third = _second(start, changed), _third(start, changed, elements)
    values = payload.to(tl.pointer_type(tl.int16)) + start // 2
    of_blocks = payload.to(tl.pointer_type(tl.int32)) + second // 4
    offsets = payload.to(tl.pointer_type(tl.uint16)) + third // 2
    order, left = ahead + tl.cumsum(of_byte, 0) - of_byte, byte
    while tl.max(left, 0) > 0:  # of each byte, the next bit that is set
        word, is_marked = tile * TILE_WORDS + at * 8 + _set_bits((left & -left) - 1), left != 0
        value = tl.load(words + chunk * CHUNK_WORDS + word, mask=is_marked, other=0)
        tl.store(values + order, value, mask=is_marked)
        if form == OFFSETS:
            tl.store(offsets + order, (word % BLOCK_WORDS).to(tl.uint16), mask=is_marked)
        order += is_marked.to(tl.int32)
        left &= left - 1
    if (form == OFFSETS) & (tile % BLOCK_TILES == 0):
        end = tl.load(counts + program + BLOCK_TILES, mask=tile + BLOCK_TILES < TILES, other=0)
        count = tl.where(tile + BLOCK_TILES < TILES, end, changed.to(tl.int32)) - ahead
        tl.store(of_blocks + tile // BLOCK_TILES, count)
    if form == BITMAP:
        inside = tile * TILE_BYTES + at < _padded((elements + 7) // 8)
        tl.store(payload + second + tile * TILE_BYTES + at, byte.to(tl.uint8), mask=inside)


@triton.jit(do_not_specialize=["chunks", "since", "index"])
def _encode(fours, words, marks, counts, table, chunks, since, index, payload):
    chunk, tile = (tl.program_id(0) // TILES).to(tl.int64), tl.program_id(0) % TILES
    row = table + chunk * ROW
    start, changed = tl.load(row + START), tl.load(row + CHANGED)
    form, elements = tl.load(row + FORM), tl.load(row + ELEMENTS)
    numbers = payload.to(tl.pointer_type(tl.int64))
    if tile == 0:
        tl.store(numbers + HEAD + 2 * chunk, form)
        tl.store(numbers + HEAD + 2 * chunk + 1, changed)
        if chunk == 0:
            tl.store(numbers, since.to(tl.int64))
            tl.store(numbers + 1, index.to(tl.int64))
            tl.store(numbers + 2, chunks.to(tl.int64))
    if form == WHOLE:
        at = tile * (TILE_WORDS // 4) + tl.arange(0, TILE_WORDS // 4)
        inside = at * 4 < elements
        four = tl.load(fours + chunk * (CHUNK_WORDS // 4) + at, mask=inside, other=0)
        tl.store(numbers + start // 8 + at, four, mask=inside)
    elif form != NOTHING:
        _encode_listed(words, chunk, tile, marks, counts, payload, start, changed, form, elements)


@triton.jit(do_not_specialize=["length", "words", "chunks", "since", "index"],
            do_not_specialize_on_alignment=["payload", "status"])  # fmt: skip
def _read(payload, length, words, chunks, since, index, table, status):
    numbers = payload.to(tl.pointer_type(tl.int64))
    said_since, said_index = tl.load(numbers), tl.load(numbers + 1)
    is_due = (said_since == since) & (said_index == index) & (tl.load(numbers + 2) == chunks)
    end = 8 * (HEAD + 2 * chunks.to(tl.int64))
    senseless = 0
    for first in range(0, chunks, CHUNKS_AT_ONCE):
        chunk = (first + tl.arange(0, CHUNKS_AT_ONCE)).to(tl.int64)
        exists = chunk < chunks
        form = tl.load(numbers + HEAD + 2 * chunk, mask=exists, other=0)
        changed = tl.load(numbers + HEAD + 2 * chunk + 1, mask=exists, other=0)
        elements = tl.minimum(words - chunk * CHUNK_WORDS, CHUNK_WORDS)
        fits = (form >= NOTHING) & (form <= WHOLE) & (changed >= 0) & (changed <= elements)
        fits = fits & ((form != NOTHING) | (changed == 0))
        senseless += tl.sum((exists & (fits == 0)).to(tl.int32))
        size = tl.where(exists & fits, _size(form, elements, changed), 0)
        _store_layout(table, chunk, exists, end + tl.cumsum(size, 0) - size, changed, form, elements)
        end += tl.sum(size)
    code = tl.where((senseless > 0) | (end != length), CODE_SENSELESS, 0)
    tl.store(status, tl.where(is_due, code, CODE_NOT_DUE).to(tl.int64))
    tl.store(status + 1, said_since)
    tl.store(status + 2, said_index)


@triton.jit
def _of_block(counts, block, elements):
    """Return the changes in a chunk, those ahead of a block, and those in it; -1 in all where a count is negative."""
    number = tl.arange(0, BLOCKS)
    count = tl.load(counts + number, mask=number * BLOCK_WORDS < elements, other=0).to(tl.int64)
    total = tl.where(tl.min(count) < 0, -1, tl.sum(count))
    return total, tl.sum(tl.where(number < block, count, 0)), tl.sum(tl.where(number == block, count, 0))


@triton.jit
def _block_tiles(block, elements):
    """Return the tiles of a block of a chunk."""
    return tl.minimum(_tiles(elements - block * BLOCK_WORDS), BLOCK_TILES)


@triton.jit
def _check_offsets(counts, offsets, tile, changed, elements):
    """Return how many offsets that a program looks at do not rise, or lie behind the chunk; 1 where the counts of
    blocks are not those of the chunk."""
    block = tile // BLOCK_TILES
    total, ahead, count = _of_block(counts, block, elements)
    wrong = (total != changed).to(tl.int32)
    if total == changed:
        for first in range(tile % BLOCK_TILES * LISTED, count, _block_tiles(block, elements) * LISTED):
            at = first + tl.arange(0, LISTED)
            inside = at < count
            offset = tl.load(offsets + ahead + at, mask=inside, other=0).to(tl.int32)
            before = tl.load(offsets + ahead + at - 1, mask=inside & (at > 0), other=0).to(tl.int32)
            before = tl.where(at > 0, before, -1)
            is_wrong = (offset <= before) | (block * BLOCK_WORDS + offset >= elements)
            wrong += tl.sum((inside & is_wrong).to(tl.int32))
    return wrong


@triton.jit
def _check_bitmap(marks, counts, changed, elements):
    """Store the changes ahead of each tile of a chunk; return whether they are not as many as is said, or behind it."""
    wrong, total = 0, 0
    for first in range(0, TILES, BLOCK_TILES):
        tile = first + tl.arange(0, BLOCK_TILES)
        at = tile[:, None] * TILE_BYTES + tl.arange(0, TILE_BYTES)[None, :]
        byte = tl.load(marks + at, mask=at < _padded((elements + 7) // 8), other=0).to(tl.int32)
        bits = tl.minimum(tl.maximum(elements - at * 8, 0), 8).to(tl.int32)
        wrong += tl.sum(tl.sum(((byte >> bits) != 0).to(tl.int32), 1))
        count = tl.sum(_set_bits(byte), 1)
        tl.store(counts + tile, total + tl.cumsum(count, 0) - count)
        total += tl.sum(count)
    return wrong + (total != changed).to(tl.int32)


@triton.jit(do_not_specialize_on_alignment=["payload", "status"])
def _check(payload, table, counts, status):
    program = tl.program_id(0).to(tl.int64)
    chunk, tile = program // TILES, program % TILES
    code = tl.load(status)
    if (code != CODE_NOT_DUE) & (code != CODE_SENSELESS):
        row = table + chunk * ROW
        start, changed = tl.load(row + START), tl.load(row + CHANGED)
        form, elements = tl.load(row + FORM), tl.load(row + ELEMENTS)
        second, wrong = _second(start, changed), 0
        if form == OFFSETS:
            offsets = payload.to(tl.pointer_type(tl.uint16)) + _third(start, changed, elements) // 2
            of_blocks = payload.to(tl.pointer_type(tl.int32)) + second // 4
            wrong = _check_offsets(of_blocks, offsets, tile, changed, elements)
        if (form == BITMAP) & (tile == 0):
            wrong = _check_bitmap(payload + second, counts + chunk * TILES, changed, elements)
        if wrong > 0:
            tl.store(status, CODE_UNORDERED)


@triton.jit
def _tile_of(tiles, where, low, span):
    """Return the last of `span` served tiles from `low` on that begins at or before each byte, or the first."""
    high = low + span
    while span > 1:
        middle = (low + high) // 2
        begins = tl.load(tiles + middle * SERVED_ROW + SERVED_START) <= where
        low = tl.where(begins, middle, low)
        high = tl.where(begins, high, middle)
        span = (span + 1) // 2
    return low


@triton.jit
def _serve(
    position, value, inside, first, last, tiles, number, COPIED: tl.constexpr, SOURCE: tl.constexpr, INTO: tl.constexpr,
    WORD: tl.constexpr, RATIO: tl.constexpr, STEP: tl.constexpr, SWAP: tl.constexpr,
):  # fmt: skip
    """Write words, all of which lie from word `first` to word `last`, in halves of 1 byte where `STEP` is 1. Return
    what is to be kept of each: with `SWAP` what was there before, where it was written."""
    kept = value
    low = _tile_of(tiles, first * 2, 0 * number, number)
    span = _tile_of(tiles, last * 2 + 1, low, number - low) - low + 1
    for byte in tl.static_range(0, 2, STEP):
        where = position * 2 + byte
        tile = tiles + _tile_of(tiles, where, low + (0 * position).to(tl.int32), span) * SERVED_ROW
        within = where - tl.load(tile + SERVED_START)
        is_written = inside & (within >= 0) & (within < tl.load(tile + SERVED_BYTES))
        is_written = is_written & (tl.load(tile + SERVED_CODEC) == COPIED)
        within, width = (
            tl.where(is_written, within, 0).to(tl.int32),
            tl.load(tile + SERVED_WIDTH).to(tl.int32),
        )
        row = within // width
        column = (within - row * width) * RATIO
        address = tl.load(tile + SERVED_ADDRESS) + row * tl.load(tile + SERVED_PITCH) + column
        place = address.to(tl.pointer_type(WORD))
        if SWAP:
            before = tl.load(place, mask=is_written, other=0)
            if STEP == 1:
                half = (before.to(tl.int32) & 0xFF) << (8 * byte)
                before = ((kept.to(tl.int32) & (0xFF00 >> (8 * byte))) | half).to(tl.int16)
            elif RATIO > 1:
                before = before.to(INTO, bitcast=True).to(SOURCE).to(tl.int16, bitcast=True)
            kept = tl.where(is_written, before, kept)
        if STEP == 1:
            word = (value >> (8 * byte)).to(tl.int8)
        elif RATIO > 1:
            word = value.to(SOURCE, bitcast=True).to(INTO).to(WORD, bitcast=True)
        else:
            word = value
        tl.store(place, word, mask=is_written)
    return kept


@triton.jit(do_not_specialize=["number"], do_not_specialize_on_alignment=["payload", "status"])
def _write(
    payload, table, counts, status, tiles, number, COPIED: tl.constexpr, SOURCE: tl.constexpr, INTO: tl.constexpr,
    WORD: tl.constexpr, RATIO: tl.constexpr, STEP: tl.constexpr, SWAP: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    chunk, tile = program // TILES, program % TILES
    row = table + chunk * ROW
    if tl.load(status) == 0:
        start, changed = tl.load(row + START), tl.load(row + CHANGED)
        form, elements = tl.load(row + FORM), tl.load(row + ELEMENTS)
        values = payload.to(tl.pointer_type(tl.int16)) + start // 2
        second, ahead_of_chunk = _second(start, changed), chunk * CHUNK_WORDS
        if form == OFFSETS:
            block = tile // BLOCK_TILES
            offsets = payload.to(tl.pointer_type(tl.uint16)) + _third(start, changed, elements) // 2
            _, before, count = _of_block(payload.to(tl.pointer_type(tl.int32)) + second // 4, block, elements)
            begin = ahead_of_chunk + block * BLOCK_WORDS
            for first in range(tile % BLOCK_TILES * LISTED, count, _block_tiles(block, elements) * LISTED):
                at, end = first + tl.arange(0, LISTED), tl.minimum(count, first + LISTED) - 1
                position = begin + tl.load(offsets + before + at, mask=at < count, other=0).to(tl.int64)
                value = tl.load(values + before + at, mask=at < count, other=0)
                kept = _serve(position, value, at < count, begin + tl.load(offsets + before + first).to(tl.int64),
                              begin + tl.load(offsets + before + end).to(tl.int64), tiles, number,
                              COPIED, SOURCE, INTO, WORD, RATIO, STEP, SWAP)  # fmt: skip
                if SWAP:
                    tl.store(values + before + at, kept, mask=at < count)
        if (form == BITMAP) | (form == WHOLE):
            ahead = 0
            if form == BITMAP:
                ahead = tl.load(counts + program)
            for first in range(tile * TILE_WORDS, tl.minimum(elements, (tile + 1) * TILE_WORDS), DENSE):
                at, bit = first // 8 + tl.arange(0, DENSE // 8)[:, None], tl.arange(0, 8)[None, :]
                word = at * 8 + bit
                inside, order = word < elements, word
                if form == BITMAP:
                    byte = tl.load(payload + second + at, mask=at * 8 < elements, other=0).to(tl.int32)
                    of_byte = _set_bits(byte)
                    within = _set_bits(byte & ((1 << bit) - 1))
                    order = (ahead + tl.cumsum(of_byte, 0) - of_byte + within).to(tl.int64)
                    inside = inside & (((byte >> bit) & 1) != 0)
                    ahead += tl.sum(of_byte)
                value = tl.load(values + order, mask=inside, other=0)
                kept = _serve(ahead_of_chunk + word, value, inside, ahead_of_chunk + first,
                              ahead_of_chunk + first + DENSE - 1, tiles, number,
                              COPIED, SOURCE, INTO, WORD, RATIO, STEP, SWAP)  # fmt: skip
                if SWAP:
                    tl.store(values + order, kept, mask=inside)


class DeviceChanges:
    """The changes of a bucket on a GPU since `old`, found by two kernels, which are enqueued.

    Both are bytes, of one size, a multiple of 16, at addresses that are such multiples. With `keep` the changes are
    written into `old`. `changed`, int64 ``[chunks]``, are the words that did, and `total`, int64 ``[1]``, the bytes
    that `encode` writes.
    """

    def __init__(self, old: torch.Tensor, new: torch.Tensor, keep: bool) -> None:
        self.new, self.words, device = new, len(new) // 2, new.device
        self.chunks = chunks_of(self.words)
        self.tiles = -(-self.words // WORDS_OF_TILE)
        self.marks = torch.empty(self.tiles * TILE_BYTES.value, dtype=torch.uint8, device=device)
        self.counts = torch.empty(self.chunks * TILES_OF_CHUNK, dtype=torch.int32, device=device)
        self.table = torch.empty((self.chunks, CHANGES), dtype=torch.int64, device=device)
        self.total = torch.empty(1, dtype=torch.int64, device=device)
        with expected_compilation():
            as_fours = (whole.view(torch.int64) for whole in (old, new))
            _compare[(self.tiles,)](*as_fours, self.words, self.marks, self.counts, keep, num_warps=8)
            _lay_out[(1,)](self.counts, self.words, self.chunks, self.table, self.total, num_warps=8)

    @property
    def changed(self) -> torch.Tensor:
        """The words that changed in each chunk."""
        return self.table[:, CHANGES_CHANGED]

    def encode(self, payload: torch.Tensor, since: int, index: int) -> None:
        """Write what travels into `payload`, zeros in uint8 ``[total]``; enqueued."""
        fours, words = self.new.view(torch.int64), self.new.view(torch.int16)
        with expected_compilation():
            _encode[(self.tiles,)](
                fours,
                words,
                self.marks,
                self.counts,
                self.table,
                self.chunks,
                since,
                index,
                payload,
                num_warps=8,
            )


class ReceivedChanges:
    """The changes of a bucket of `size` bytes that have arrived on a GPU as `payload`, which are read and checked;
    enqueued.

    `status`, zeros in int64 ``[3]``, gets the columns `tables.STATUS`.
    """

    def __init__(
        self, payload: torch.Tensor, size: int, since: int, index: int, status: torch.Tensor
    ) -> None:
        self.payload, self.status, device = payload, status, payload.device
        words = size // 2
        chunks, self.programs = chunks_of(words), -(-words // WORDS_OF_TILE)
        self.table = torch.empty((chunks, CHANGES), dtype=torch.int64, device=device)
        self.counts = torch.empty(chunks * TILES_OF_CHUNK, dtype=torch.int32, device=device)
        with expected_compilation():
            _read[(1,)](payload, len(payload), words, chunks, since, index, self.table, status, num_warps=4)
            _check[(self.programs,)](payload, self.table, self.counts, status, num_warps=8)

    def write(self, tiles: torch.Tensor, codecs: list[int], by_bytes: bool, swap: bool = False) -> None:
        """Write them where the bucket is served from, if all of them make sense; enqueued.

        `tiles`, int64 ``[tiles, 6]`` of less than 2 GiB each, has the columns `tables.SERVED` in the order of the
        bucket, and these `codecs`; with `by_bytes` not all plain ones are multiples of 2 bytes. With `swap` the payload
        has afterward what was there before, so that the same call again takes the changes back.
        """
        with expected_compilation():
            for codec in codecs if len(tiles) else ():
                how: tuple = (
                    (tl.int8, tl.int8, tl.int8, 1, 1) if by_bytes else (tl.int16, tl.int16, tl.int16, 1, 2)
                )
                if codec != PLAIN:
                    source, destination = CODECS[codec].source, CODECS[codec].destination
                    into = WORDS[destination.size]
                    how = FLOATS[source.name], FLOATS[destination.name], into, destination.size // 2, 2
                _write[(self.programs,)](
                    self.payload, self.table, self.counts, self.status, tiles, len(tiles), codec, *how, swap,
                    num_warps=8,
                )  # fmt: skip


@cache
def compile_finding(device: torch.device, keep: bool) -> None:
    """Compile what finds and encodes changes now, in a bucket of 16 bytes."""
    with torch.cuda.device(device):
        old = torch.zeros(16, dtype=torch.uint8, device=device)
        DeviceChanges(old, old.clone(), keep).encode(_no_changes(device), 0, 0)
        torch.cuda.synchronize(device)


@cache
def compile_writing(device: torch.device) -> None:
    """Compile what writes changes, and what swaps them, now, of a bucket of 16 bytes that is served nowhere."""
    with torch.cuda.device(device):
        nowhere = torch.zeros((1, SERVED), dtype=torch.int64, device=device)
        nowhere[0, SERVED_WIDTH.value] = 2
        status = torch.zeros(STATUS, dtype=torch.int64, device=device)
        changes = ReceivedChanges(_no_changes(device), 16, 0, 0, status)
        for swap in (False, True):
            changes.write(nowhere, [PLAIN], False, swap)
        torch.cuda.synchronize(device)


def _no_changes(device: torch.device) -> torch.Tensor:
    """Return memory for the changes of a bucket of one chunk that did not change."""
    return torch.zeros(8 * (PRELUDE + 2), dtype=torch.uint8, device=device)
