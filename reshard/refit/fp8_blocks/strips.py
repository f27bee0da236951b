"""Blocks of fp8 with a scale each, made of a trainer's bf16 or fp32 on the way into an engine: the tables, and what the
host makes of them. `reshard.refit.kernels` has the kernel.

A block of 128x128 elements of a local tensor may come in fragments, from several shards and ranks. Each is
gathered, rounded to bf16 where it is wider, its largest magnitude found, and codes and scale are written where the engine
serves from; there is no copy in between. An *item* is a strip of up to 8 blocks beside each other, with its fragments.
"""

from typing import NamedTuple

import numpy as np
import torch

from reshard.core.dtypes import DTYPES
from reshard.engines.base import Engine
from reshard.quantization.fp8_blocks import BLOCK, encode_as_vllm
from reshard.refit.codecs import BEFORE_BLOCKS, CODECS, SOURCE_SIZES, block_codec
from reshard.refit.copies import host_bytes
from reshard.refit.tables import (
    CODEC,
    CODES,
    CODES_PITCH,
    ELEMENT_BYTES,
    FIRST_FRAGMENT,
    FRAGMENT,
    FRAGMENTS,
    HEIGHT,
    HIGH,
    ITEM,
    LEFT,
    LENGTH,
    ROWS,
    SCALES,
    SOURCE,
    SOURCE_PITCH,
    SRC,
    SRC_PITCH,
    STRIP,
    TOP,
    WIDE,
    WIDTH,
)

# Columns of where quantized tensors lie (`places_of`): of codes and of scales the addresses, then the pitches in
# elements; rows and columns; the codec that bf16 would have.
PLACES = 7
PLACE, PITCH, SHAPE, ENCODING = slice(0, 2), slice(2, 4), slice(4, 6), 6
BF16 = DTYPES["bfloat16"]
TO_BF16 = CODECS[BEFORE_BLOCKS[block_codec("fp32", "float32")]]


def places_of(engine: Engine) -> np.ndarray:
    """Where the engine's quantized local tensors lie now, by their index among its regions: addresses and pitches of
    codes and of scales, rows, columns, and codec; zeros for all others."""
    matrix = np.zeros((len(engine.regions), PLACES), np.int64)
    for index, (identity, codes) in enumerate(engine.regions.items()):
        scales = engine.scales.get(identity)
        if scales is not None:
            shape = engine.placement.tensors[identity].shape
            where = codes.address, scales.region.address, codes.pitch, scales.region.pitch
            matrix[index] = (*where, *shape, block_codec(scales.rounding))
    return matrix


class Strips(NamedTuple):
    """Items and their fragments, the owner of each fragment's source, and the index of each item's local tensor."""

    items: np.ndarray
    fragments: np.ndarray
    owners: np.ndarray
    tensors: np.ndarray


def strips_of(table: np.ndarray, into: np.ndarray, owners: np.ndarray, places: np.ndarray) -> Strips:
    """Cut pieces at the borders of blocks, and put together what belongs to an item. Blocks that no piece reaches
    are in none: they come by another way.

    `table` has the source's end and the codec filled in; `into` are the local tensor's index, row and column of each piece, `places` where
    the local tensors lie (`places_of`).
    """
    strips = cut(table, into, owners, places, STRIP)
    return strips if _reached(strips) else cut(table, into, owners, places, 1)


def _reached(strips: Strips) -> bool:
    """Whether every block of every item has a fragment."""
    items, fragments = strips.items, strips.fragments
    if not len(items):
        return True
    first, last = fragments[:, LEFT] // BLOCK, (fragments[:, LEFT] + fragments[:, WIDE] - 1) // BLOCK
    blocks = np.bitwise_or.reduceat((2 << last) - (1 << first), items[:, FIRST_FRAGMENT])
    return bool((blocks == (1 << -(-items[:, LENGTH] // BLOCK)) - 1).all())


def cut(table: np.ndarray, into: np.ndarray, owners: np.ndarray, places: np.ndarray, blocks: int) -> Strips:
    """As `strips_of`, in items of so many blocks beside each other."""
    index, row, column = into.T
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
    fragments[:, HIGH], fragments[:, WIDE] = bottom - top, right - left
    keys = np.stack([index[piece], block_row, strip], 1)
    order = np.lexsort(keys.T[::-1])
    keys = keys[order]
    starts = np.flatnonzero(np.concatenate([[True], (keys[1:] != keys[:-1]).any(1)]) if len(keys) else [])
    tensor, at_row, at_strip = keys[starts].T if len(starts) else np.zeros((3, 0), np.int64)
    codes, scales, codes_pitch, scales_pitch, height, width, _ = places[tensor].T
    items = np.empty((len(starts), ITEM), np.int64)
    items[:, CODES] = codes + at_row * BLOCK * codes_pitch + at_strip * wide
    items[:, CODES_PITCH] = codes_pitch
    items[:, SCALES] = scales + (at_row * scales_pitch + at_strip * blocks) * 4
    items[:, HEIGHT] = np.minimum(BLOCK, height - at_row * BLOCK)
    items[:, LENGTH] = np.minimum(wide, width - at_strip * wide)
    items[:, FIRST_FRAGMENT] = starts
    items[:, FRAGMENTS] = np.diff(np.append(starts, len(keys)))
    return Strips(items, fragments[order], owners[piece][order], tensor)


class BlockTable:
    """Strips ready to run, of one rounding; kept on the GPU. `order` are the items' in which all peers' links are
    busy at once."""

    def __init__(self, strips: Strips, rounding: str, device: torch.device, order: np.ndarray) -> None:
        self.rounding, self.device = rounding, device
        items = strips.items[order]
        bits = np.bitwise_or.reduce(items[:, [CODES, CODES_PITCH]].ravel(), initial=0)
        sources = strips.fragments
        size = sources[:, ELEMENT_BYTES]
        moved = sources[:, SOURCE] | sources[:, SOURCE_PITCH] * size | sources[:, LEFT] * size
        self.aligned = bool((bits | np.bitwise_or.reduce(moved, initial=0)) % 16 == 0)
        self.size = size_of(size)
        # Programs for an item; two kernels, not one for each width.
        self.blocks = 1 if (items[:, LENGTH] <= BLOCK).all() else STRIP
        self.items: torch.Tensor | np.ndarray = items
        self.fragments: torch.Tensor | np.ndarray = sources.copy()
        self.owners: torch.Tensor | np.ndarray = strips.owners
        if device.type == "cpu":
            return
        from reshard.refit.kernels import compile_quantize

        self.items = torch.from_numpy(items).to(device)
        self.fragments = torch.from_numpy(sources).to(device)
        self.owners = torch.from_numpy(strips.owners.astype(np.int32)).to(device)
        compile_quantize(self.rounding, self.aligned, device, self.blocks, self.size)

    def shift(self, deltas: np.ndarray) -> None:
        """Add `deltas` bytes, multiples of 16, by owner, to where the sources are."""
        if isinstance(self.fragments, torch.Tensor):
            self.fragments[:, SOURCE] += torch.from_numpy(deltas).to(self.device)[self.owners]
        else:
            self.fragments[:, SOURCE] += deltas[self.owners]

    def run(self) -> None:
        """Quantize all; on a GPU, enqueue it on the current stream."""
        if isinstance(self.items, torch.Tensor) and isinstance(self.fragments, torch.Tensor):
            from reshard.refit.kernels import quantize_strips

            how = self.rounding, self.aligned, self.blocks, self.size
            quantize_strips(self.items, self.fragments, *how)
        elif isinstance(self.items, np.ndarray) and isinstance(self.fragments, np.ndarray):
            quantize_on_host(self.items, self.fragments, self.rounding)


def size_of(sizes: np.ndarray) -> int:
    """The bytes that elements of all fragments have, for which there is a kernel of its own; 0 where they differ."""
    known = np.unique(sizes)
    return int(known[0]) if len(known) == 1 else 0


def quantize_on_host(items: np.ndarray, fragments: np.ndarray, rounding: str) -> None:
    """Carry out items whose addresses are this process's memory."""
    for codes, codes_pitch, scales, height, length, first, count in items.tolist():
        values = np.zeros((height, length), BF16.numpy())
        for source, pitch, top, left, high, wide, size in fragments[first : first + count].tolist():
            held = np.ascontiguousarray(host_bytes(source, high, wide * size, pitch * size))
            if size != BF16.size:
                held = TO_BF16.encode(held)
            values[top : top + high, left : left + wide] = held.view(BF16.numpy())
        quantized, factors = encode_as_vllm(values, rounding)
        host_bytes(codes, height, length, codes_pitch)[...] = quantized.view(np.uint8)
        host_bytes(scales, 1, factors.size * 4, 0)[...] = factors.view(np.uint8).reshape(1, -1)
