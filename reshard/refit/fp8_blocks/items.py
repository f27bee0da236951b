"""The tables by which blocks of fp8 are made of a trainer's bf16 or fp32, and what the host makes
of them. `reshard.refit.fp8_blocks.kernels` has the kernel.

A block of 128x128 elements of a local tensor may come in *fragments*, from several shards and
ranks. They are gathered, rounded to bf16 where they are wider, and encoded straight to where the
engine serves from, with no copy in between. An *item* is a strip of up to 8 blocks beside each
other, with its fragments.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from reshard.core.dtypes import DTYPES
from reshard.device.cuda import on_device
from reshard.quantization.fp8_blocks import BLOCK, ROUNDINGS, encode
from reshard.refit.codecs import BEFORE_BLOCKS, CODEC_ROUNDINGS, CODECS, SOURCE_SIZES, block_codec
from reshard.refit.copying.copies import host_bytes
from reshard.refit.copying.digests import mixed
from reshard.refit.copying.tables import ALIGNMENT, CODEC, ROWS, SRC, SRC_PITCH, WIDTH
from reshard.refit.fp8_blocks.tables import (
    CODES,
    CODES_PITCH,
    ELEMENT_BYTES,
    FIRST_FRAGMENT,
    FRAGMENT,
    FRAGMENT_COLUMNS,
    FRAGMENT_ROWS,
    FRAGMENTS,
    ITEM,
    ITEM_BLOCKS,
    ITEM_COLUMNS,
    ITEM_ROWS,
    LEFT,
    NO_PIECE,
    ROUNDING,
    SCALES,
    SOURCE,
    SOURCE_PITCH,
    SPAN,
    SPAN_ELEMENTS,
    SPAN_PIECE,
    SPAN_ROW_WORDS,
    SPAN_WORD,
    TOP,
    BlockKernel,
)

BF16 = DTYPES["bfloat16"]
TO_BF16 = CODECS[BEFORE_BLOCKS[block_codec("fp32", "float32")]]


class BlockItems(NamedTuple):
    """Items and their fragments, the owner of each fragment's source, and the index of each item's
    local tensor."""

    items: np.ndarray
    fragments: np.ndarray
    owners: np.ndarray
    tensors: np.ndarray


def items_of(
    table: np.ndarray, destinations: np.ndarray, owners: np.ndarray, places: np.ndarray
) -> BlockItems:
    """Cut pieces at the borders of blocks, and collect the fragments of each item. Blocks that no
    piece reaches are in no item: they come by another way.

    `table` has the source's end and the codec of each piece filled in, `destinations` are its local tensor's
    index, row and column, and `places` says where the local tensors lie (`codecs.places`).
    """
    items = cut(table, destinations, owners, places, ITEM_BLOCKS)
    return items if _all_reached(items) else cut(table, destinations, owners, places, 1)


def take_kernel_of_pieces(table: np.ndarray, padding: np.ndarray) -> None:
    """Give the rows of a table that are `padding`, zeros of whatever width, a codec that others
    have, for which there is a kernel already."""
    table[padding, CODEC] = table[~padding, CODEC].max(initial=block_codec("fp32"))


def _all_reached(blocks: BlockItems) -> bool:
    """Tell whether every block of every item has a fragment."""
    items, fragments = blocks.items, blocks.fragments
    if not len(items):
        return True
    first = fragments[:, LEFT] // BLOCK
    last = (fragments[:, LEFT] + fragments[:, FRAGMENT_COLUMNS] - 1) // BLOCK
    reached = np.bitwise_or.reduceat((2 << last) - (1 << first), items[:, FIRST_FRAGMENT])
    return bool((reached == (1 << -(-items[:, ITEM_COLUMNS] // BLOCK)) - 1).all())


def cut(
    table: np.ndarray, destinations: np.ndarray, owners: np.ndarray, places: np.ndarray, blocks: int
) -> BlockItems:
    """Return `items_of`, in items of so many blocks beside each other."""
    index, row, column = destinations.T
    rows, columns = table[:, ROWS], table[:, WIDTH]  # a code has one byte
    wide = blocks * BLOCK
    first_row, first_column = row // BLOCK, column // wide
    down = (row + rows - 1) // BLOCK - first_row + 1
    across = (column + columns - 1) // wide - first_column + 1
    counts = down * across
    piece = np.repeat(np.arange(len(table)), counts)
    within = np.arange(len(piece)) - np.repeat(np.cumsum(counts) - counts, counts)
    block_row = first_row[piece] + within // across[piece]
    strip = first_column[piece] + within % across[piece]
    top = np.maximum(row[piece], block_row * BLOCK)
    bottom = np.minimum(row[piece] + rows[piece], (block_row + 1) * BLOCK)
    left = np.maximum(column[piece], strip * wide)
    right = np.minimum(column[piece] + columns[piece], (strip + 1) * wide)
    pitch, size = table[piece, SRC_PITCH], SOURCE_SIZES[table[piece, CODEC]]
    fragments = np.empty((len(piece), FRAGMENT), np.int64)
    fragments[:, SOURCE] = table[piece, SRC] + (top - row[piece]) * pitch + (left - column[piece]) * size
    fragments[:, SOURCE_PITCH], fragments[:, ELEMENT_BYTES] = pitch // size, size
    fragments[:, TOP], fragments[:, LEFT] = top - block_row * BLOCK, left - strip * wide
    fragments[:, FRAGMENT_ROWS], fragments[:, FRAGMENT_COLUMNS] = bottom - top, right - left
    keys = np.stack([index[piece], block_row, strip], 1)
    order = np.lexsort(keys.T[::-1])
    keys = keys[order]
    starts = np.flatnonzero(np.concatenate([[True], (keys[1:] != keys[:-1]).any(1)]) if len(keys) else [])
    tensor, at_row, at_strip = keys[starts].T if len(starts) else np.zeros((3, 0), np.int64)
    codes, scales, codes_pitch, scales_pitch, height, width, codec = places[tensor].T
    items = np.empty((len(starts), ITEM), np.int64)
    items[:, CODES] = codes + at_row * BLOCK * codes_pitch + at_strip * wide
    items[:, CODES_PITCH] = codes_pitch
    items[:, SCALES] = scales + (at_row * scales_pitch + at_strip * blocks) * 4
    items[:, ITEM_ROWS] = np.minimum(BLOCK, height - at_row * BLOCK)
    items[:, ITEM_COLUMNS] = np.minimum(wide, width - at_strip * wide)
    items[:, FIRST_FRAGMENT] = starts
    items[:, FRAGMENTS] = np.diff(np.append(starts, len(keys)))
    items[:, ROUNDING] = CODEC_ROUNDINGS[codec]
    return BlockItems(items, fragments[order], owners[piece][order], tensor)


def is_aligned(blocks: BlockItems) -> bool:
    """Return True where all addresses and pitches are multiples of 16 bytes, and all columns of as many
    elements, so that the kernel's loads and stores are of 16 bytes."""
    items, fragments, size = blocks.items, blocks.fragments, blocks.fragments[:, ELEMENT_BYTES]
    bits = np.bitwise_or.reduce(items[:, [CODES, CODES_PITCH, ITEM_COLUMNS]].ravel(), initial=0)
    bits |= np.bitwise_or.reduce(fragments[:, [SOURCE, LEFT, FRAGMENT_COLUMNS]].ravel(), initial=0)
    bits |= np.bitwise_or.reduce(fragments[:, SOURCE_PITCH] * size, initial=0)
    return bool(bits % ALIGNMENT == 0)


def kernel_of(blocks: BlockItems) -> BlockKernel:
    """Return the variant of the kernels for these items: two, not one for each width."""
    of_item = 1 if (blocks.items[:, ITEM_COLUMNS] <= BLOCK).all() else ITEM_BLOCKS
    return BlockKernel(is_aligned(blocks), of_item, size_of(blocks.fragments[:, ELEMENT_BYTES]))


def spans_of(blocks: BlockItems, table: np.ndarray) -> np.ndarray:
    """Return where each fragment lies in the piece that owns it, as columns `tables.SPAN`; owner `NO_PIECE`
    is padding. `table` has the pieces, all of rows of whole words of `tables.SPAN_ELEMENTS` elements."""
    owners, fragments = blocks.owners, blocks.fragments
    pitch = np.maximum(1, table[owners, SRC_PITCH])
    row, byte = np.divmod(fragments[:, SOURCE] - table[owners, SRC], pitch)
    spans = np.empty((len(fragments), SPAN), np.int64)
    spans[:, SPAN_PIECE], spans[:, SPAN_ROW_WORDS] = owners, table[owners, WIDTH] // SPAN_ELEMENTS
    spans[:, SPAN_WORD] = (
        row * spans[:, SPAN_ROW_WORDS] + byte // fragments[:, ELEMENT_BYTES] // SPAN_ELEMENTS
    )
    return spans


class BlockTable:
    """Items, ready to run, kept on the GPU. `order` is the order of items in which
    the links to all peers are busy at once. A check with `spans` (`spans_of`) takes digests too."""

    def __init__(
        self,
        blocks: BlockItems,
        device: torch.device,
        order: np.ndarray,
        spans: np.ndarray | None = None,
    ) -> None:
        self.device = device
        items, fragments = blocks.items[order], blocks.fragments
        self.kernel = kernel_of(blocks)
        self.items: torch.Tensor | np.ndarray = items
        self.fragments: torch.Tensor | np.ndarray = fragments.copy()
        self.owners: torch.Tensor | np.ndarray = blocks.owners
        self.tensors = blocks.tensors[order]
        self.spans = on_device(spans, device) if spans is not None else None
        # A mask of the items, of a check that was begun.
        self.differing: torch.Tensor | np.ndarray | None = None
        if device.type == "cpu":
            return
        from reshard.refit.fp8_blocks.kernels import compile_quantize

        self.items = on_device(items, device)
        self.fragments = on_device(fragments, device)
        self.owners = on_device(blocks.owners.astype(np.int32), device)
        compile_quantize(self.kernel, device)

    def shift(self, shifts: np.ndarray) -> None:
        """Add `shifts` bytes, multiples of 16, by owner, to the addresses of the sources."""
        if isinstance(self.fragments, torch.Tensor):
            self.fragments[:, SOURCE] += torch.from_numpy(shifts).to(self.device)[self.owners]
        else:
            self.fragments[:, SOURCE] += shifts[self.owners]

    def move(self, distance: int) -> None:
        """Add `distance` bytes, a multiple of 16, to the addresses of codes and scales."""
        for column in (CODES, SCALES):
            addresses = self.items[:, column]
            addresses += distance

    def run(self, tiles: torch.Tensor | None = None) -> None:
        """Make the blocks; on a GPU, enqueue it on the current stream, with `tiles` of copies between the blocks
        (`CopyTable.of_widest_words`)."""
        if isinstance(self.items, torch.Tensor) and isinstance(self.fragments, torch.Tensor):
            from reshard.refit.fp8_blocks.kernels import quantize_items

            quantize_items(self.items, self.fragments, self.kernel, tiles)
        elif isinstance(self.items, np.ndarray) and isinstance(self.fragments, np.ndarray):
            quantize_on_host(self.items, self.fragments)

    def begin_check(self, sums: torch.Tensor | None = None) -> None:
        """Compare with what `run` would write, and write nothing; on a GPU, enqueue it on the current
        stream. The digests of the pieces in `spans` are added to `sums`."""
        if isinstance(self.items, torch.Tensor) and isinstance(self.fragments, torch.Tensor):
            from reshard.refit.fp8_blocks.kernels import compare_items

            self.differing = compare_items(self.items, self.fragments, self.kernel, self.spans, sums)
        elif isinstance(self.items, np.ndarray) and isinstance(self.fragments, np.ndarray):
            self.differing = compare_on_host(self.items, self.fragments)
            if self.spans is not None and sums is not None:
                digest_on_host(self.fragments, self.spans.numpy(), sums.numpy().view(np.uint64))

    def mismatches(self) -> list[int]:
        """Return the indices of the local tensors that have a block with other bits than `run` would
        write, as the check that was begun has seen it; where none was, as it is now."""
        if self.differing is None:
            self.begin_check()
        differing, self.differing = self.differing, None
        assert differing is not None
        mask = differing.cpu().numpy() if isinstance(differing, torch.Tensor) else differing
        return [int(index) for index in np.unique(self.tensors[mask])]


def size_of(sizes: np.ndarray) -> int:
    """Return the bytes that the elements of all fragments have, for which there is a kernel of its
    own; 0 where they differ."""
    known = np.unique(sizes)
    return int(known[0]) if len(known) == 1 else 0


def quantize_on_host(items: np.ndarray, fragments: np.ndarray) -> None:
    """Make the blocks of items within this process's memory."""
    for served, made in zip(_served_on_host(items), _made_on_host(items, fragments), strict=True):
        for place, values in zip(served, made, strict=True):
            place[...] = values


def compare_on_host(items: np.ndarray, fragments: np.ndarray) -> np.ndarray:
    """Return a mask of the items within this process's memory of which codes or scales are others
    than `quantize_on_host` would make."""
    same = [
        all(np.array_equal(place, values) for place, values in zip(served, made, strict=True))
        for served, made in zip(_served_on_host(items), _made_on_host(items, fragments), strict=True)
    ]
    return ~np.array(same, bool)


def digest_items_on_host(items: np.ndarray, fragments: np.ndarray, served: bool) -> np.ndarray:
    """Return a digest of the codes and scales of each item within this process's memory, int64 ``[items]``.

    Its words are those of its codes, in rows of `ITEM_BLOCKS` blocks, with zeros up to where blocks end, and then
    its scales.
    """
    words = np.zeros((BLOCK, ITEM_BLOCKS * BLOCK), np.uint8)
    positions = np.arange(words.size // 8, dtype=np.uint64).reshape(BLOCK, -1)
    sums = np.zeros(len(items), np.uint64)
    pairs = _served_on_host(items) if served else _made_on_host(items, fragments)
    for index, (codes, scales) in enumerate(pairs):
        words[:] = 0
        words[: codes.shape[0], : codes.shape[1]] = codes
        blocks = scales.size // 4
        wide = slice(blocks * BLOCK // 8)
        scale_words = np.ascontiguousarray(scales).view(np.uint32).reshape(-1).astype(np.uint64)
        scale_positions = np.uint64(positions.size) + np.arange(blocks, dtype=np.uint64)
        with np.errstate(over="ignore"):
            sums[index] = mixed(words.view(np.uint64)[:, wide], positions[:, wide]).sum(dtype=np.uint64)
            sums[index] += mixed(scale_words, scale_positions).sum(dtype=np.uint64)
    return sums.view(np.int64)


def digest_on_host(fragments: np.ndarray, spans: np.ndarray, sums: np.ndarray) -> None:
    """Add the digests of fragments within this process's memory to the sums of their pieces."""
    for fragment, (piece, first, row_words) in zip(fragments, spans.tolist(), strict=True):
        if piece == NO_PIECE:
            continue
        words = _bf16_bytes(fragment).view(np.uint64)
        rows, columns = np.indices(words.shape, np.uint64)
        positions = np.uint64(first) + rows * np.uint64(row_words) + columns
        with np.errstate(over="ignore"):
            sums[piece] += mixed(words, positions).sum(dtype=np.uint64)


def _served_on_host(items: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield for each item the bytes of its codes and scales where they are served from."""
    for codes, codes_pitch, scales, height, length, *_ in items.tolist():
        yield (
            host_bytes(codes, height, length, codes_pitch),
            host_bytes(scales, 1, -(-length // BLOCK) * 4, 0),
        )


def _made_on_host(items: np.ndarray, fragments: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield for each item the bytes of the codes and scales that its fragments make."""
    roundings = [*ROUNDINGS]
    for *_, height, length, first, count, rounding in items.tolist():
        values = np.zeros((height, length), BF16.numpy())
        for fragment in fragments[first : first + count]:
            top, left, high, wide = fragment[[TOP, LEFT, FRAGMENT_ROWS, FRAGMENT_COLUMNS]]
            values[top : top + high, left : left + wide] = _bf16_bytes(fragment).view(BF16.numpy())
        codes, scales = encode(values, roundings[rounding])
        yield codes.view(np.uint8), scales.view(np.uint8).reshape(1, -1)


def _bf16_bytes(fragment: np.ndarray) -> np.ndarray:
    """Return the bytes ``[rows, width]`` of a fragment in bf16."""
    source, pitch, _, _, rows, columns, size = fragment.tolist()
    held = np.ascontiguousarray(host_bytes(source, rows, columns * size, pitch * size))
    return held if size == BF16.size else TO_BF16.encode(held)
