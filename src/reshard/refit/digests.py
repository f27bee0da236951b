"""Digests of pieces where they lie: a sum over words of a mix of value and position, so that any two layouts
give the same.

A word is 8 bytes where the rows of a piece are made of such, else an element; both sides know which. The sum
is taken modulo 2**64; bits are compared, so NaNs count like any other value.
"""

import numpy as np
import torch

from reshard.refit import mix
from reshard.refit.copies import host_bytes
from reshard.refit.tables import DST, DST_PITCH, ROWS, SRC, SRC_PITCH, WIDTH, tiles_of

WORD = 8
# Larger than those of copies: the table is made anew at each check, and nothing waits for a link.
TILE_BYTES = 1 << 20


class Digests:
    """An int64 for each row of a table of copies, of what lies at its source end; `columns` are elements in a
    row. On a GPU they are enqueued, and waited for by `result`."""

    def __init__(self, table: np.ndarray, columns: np.ndarray, device: torch.device) -> None:
        self.sums = torch.zeros(len(table), dtype=torch.int64, device=device)
        for (word, unit), tiles in word_tiles(table, columns).items():
            if device.type == "cpu":
                _add_on_host(tiles, self.sums.numpy().view(np.uint64), word, unit)
                continue
            from reshard.refit.kernels import compile_digest, digest_tiles

            compile_digest(word, unit, device)
            digest_tiles(torch.from_numpy(tiles).to(device), self.sums, word, unit)

    def result(self) -> np.ndarray:
        """The digests ``[rows of the table]``."""
        found: np.ndarray = self.sums.cpu().numpy()
        return found


def word_tiles(
    table: np.ndarray, columns: np.ndarray, tile_bytes: int = TILE_BYTES
) -> dict[tuple[int, int], np.ndarray]:
    """What lies at a table's source end, cut into tiles: by the bytes of a word and those that it is loaded
    in at once, which the addresses decide.

    A tile is (address, row of the table, rows, words in a row, pitch in loads, index of its first word).
    """
    packed = table.copy()
    packed[:, DST_PITCH] = packed[:, WIDTH]
    packed[:, DST] = 0
    tiles, origin = tiles_of(packed, tile_bytes)
    itemsize = (table[:, WIDTH] // np.maximum(1, columns))[origin]
    word = np.where(table[origin, WIDTH] % WORD == 0, WORD, itemsize)
    unit = np.where((tiles[:, SRC] | tiles[:, SRC_PITCH]) % WORD == 0, word, itemsize)
    rows = [tiles[:, SRC], origin, tiles[:, ROWS], tiles[:, WIDTH] // word, tiles[:, SRC_PITCH] // unit,
            tiles[:, DST] // word]  # fmt: skip
    found = np.stack(rows, 1)
    kinds = np.unique(word << 8 | unit).tolist()
    return {(kind >> 8, kind & 0xFF): found[(word << 8 | unit) == kind] for kind in kinds}


def _add_on_host(tiles: np.ndarray, sums: np.ndarray, word: int, unit: int) -> None:
    for address, piece, n_rows, width, pitch, first in tiles.tolist():
        held = np.ascontiguousarray(host_bytes(address, n_rows, width * word, pitch * unit))
        values = held.view(f"u{word}").astype(np.uint64).reshape(-1)
        positions = np.uint64(first) + np.arange(len(values), dtype=np.uint64)
        with np.errstate(over="ignore"):
            sums[piece] += _mixed(values, positions).sum(dtype=np.uint64)


def _mixed(values: np.ndarray, positions: np.ndarray) -> np.ndarray:
    mixed: np.ndarray = (values + np.uint64(1)) * np.uint64(mix.VALUE) + positions * np.uint64(mix.POSITION)
    mixed = (mixed ^ (mixed >> np.uint64(mix.FIRST))) * np.uint64(mix.FINAL)
    return mixed ^ (mixed >> np.uint64(mix.SECOND))
