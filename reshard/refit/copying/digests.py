"""Digests of pieces of tensors where they lie: sums over words of a mix of value and position,
which do not depend on a layout.

A word is 8 bytes where the rows of a piece are made of such, else an element; both sides know
which. The sum is taken modulo 2**64. Bits are compared, so NaNs count like any other value.
`reshard.refit.copying.tables` has the mix.
"""

import numpy as np
import torch

from reshard.device.cuda import on_device
from reshard.refit.codecs import CODECS, PLAIN, SOURCE_SIZES
from reshard.refit.copying.copies import host_bytes
from reshard.refit.copying.tables import (
    ADDRESS,
    CODEC,
    DST,
    DST_PITCH,
    FIRST_WORD,
    MIX_FINAL,
    MIX_FIRST_SHIFT,
    MIX_POSITION,
    MIX_SECOND_SHIFT,
    MIX_VALUE,
    PIECE,
    ROWS,
    SRC,
    SRC_PITCH,
    TILE,
    TILE_PITCH,
    TILE_ROWS,
    TILE_WORDS,
    WIDTH,
    tiles_of,
)

WORD = 8
# Tiles are larger than those of copies: the table is made anew at each check, and nothing waits for
# a link.
TILE_BYTES = 1 << 20


class Digests:
    """An int64 for each row of a table of copies, of its source as its codec encodes it; `columns`
    are the elements in a row. The tiles stay on the GPU, for who takes the same digests again.
    """

    def __init__(self, table: np.ndarray, columns: np.ndarray, device: torch.device) -> None:
        self.rows, self.device = len(table), device
        self.sums: torch.Tensor | None = None  # of what was begun, and not asked for yet
        self.tiles: list[tuple[tuple[int, int, int], torch.Tensor | np.ndarray]] = []
        for kind, tiles in word_tiles(table, columns).items():
            if device.type == "cpu":
                self.tiles.append((kind, tiles))
                continue
            from reshard.refit.copying.kernels import compile_digest

            word, unit, codec = kind
            compile_digest(word, unit, device, codec)
            self.tiles.append((kind, on_device(tiles, device)))

    def begin(self) -> None:
        """Take the digests; on a GPU, enqueue it on the current stream."""
        self.sums = torch.zeros(self.rows, dtype=torch.int64, device=self.device)
        for (word, unit, codec), tiles in self.tiles:
            if isinstance(tiles, torch.Tensor):
                from reshard.refit.copying.kernels import digest_tiles

                digest_tiles(tiles, self.sums, word, unit, codec)
            else:
                _add_on_host(tiles, self.sums.numpy().view(np.uint64), word, unit, codec)

    def result(self) -> np.ndarray:
        """Return the digests ``[rows of the table]`` that were begun; of now, where none were."""
        if self.sums is None:
            self.begin()
        assert self.sums is not None
        sums: np.ndarray = self.sums.cpu().numpy()
        self.sums = None
        return sums


def word_tiles(
    table: np.ndarray, columns: np.ndarray, tile_bytes: int = TILE_BYTES
) -> dict[tuple[int, int, int], np.ndarray]:
    """Cut the source end of a table of copies into tiles; return these by bytes of a word, bytes of
    it that are loaded at once, which depend on the addresses, and codec, which loads an element at
    once."""
    packed = table.copy()
    packed[:, DST_PITCH] = packed[:, WIDTH]
    packed[:, DST] = 0
    tiles, origin = tiles_of(packed, tile_bytes)
    itemsize = (table[:, WIDTH] // np.maximum(1, columns))[origin]
    word = np.where(table[origin, WIDTH] % WORD == 0, WORD, itemsize)
    codec = tiles[:, CODEC]
    aligned = (codec == PLAIN) & ((tiles[:, SRC] | tiles[:, SRC_PITCH]) % WORD == 0)
    unit = np.where(aligned, word, itemsize)
    loaded = np.where(codec == PLAIN, unit, SOURCE_SIZES[codec])
    digested = np.empty((len(tiles), TILE), np.int64)
    digested[:, ADDRESS], digested[:, PIECE], digested[:, TILE_ROWS] = tiles[:, SRC], origin, tiles[:, ROWS]
    digested[:, TILE_WORDS], digested[:, TILE_PITCH] = tiles[:, WIDTH] // word, tiles[:, SRC_PITCH] // loaded
    digested[:, FIRST_WORD] = tiles[:, DST] // word
    kinds = np.stack([word, unit, codec], 1)
    return {
        (kind[0], kind[1], kind[2]): digested[(kinds == kind).all(1)]
        for kind in np.unique(kinds, axis=0).tolist()
    }


def _add_on_host(tiles: np.ndarray, sums: np.ndarray, word: int, unit: int, codec: int) -> None:
    loaded = unit if codec == PLAIN else int(SOURCE_SIZES[codec])
    for address, piece, n_rows, width, pitch, first in tiles.tolist():
        elements = width * (word // unit)
        source = np.ascontiguousarray(host_bytes(address, n_rows, elements * loaded, pitch * loaded))
        if codec != PLAIN:
            source = CODECS[codec].encode(source)
        values = source.view(f"u{word}").astype(np.uint64).reshape(-1)
        positions = np.uint64(first) + np.arange(len(values), dtype=np.uint64)
        with np.errstate(over="ignore"):
            sums[piece] += mixed(values, positions).sum(dtype=np.uint64)


def mixed(words: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return the mix of words and their positions, all uint64."""
    mix: np.ndarray = (words + np.uint64(1)) * np.uint64(MIX_VALUE) + positions * np.uint64(MIX_POSITION)
    mix = (mix ^ (mix >> np.uint64(MIX_FIRST_SHIFT))) * np.uint64(MIX_FINAL)
    return mix ^ (mix >> np.uint64(MIX_SECOND_SHIFT))
