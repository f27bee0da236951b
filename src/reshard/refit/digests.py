"""Digests of pieces where they lie: a sum over elements of a mix of value and position, so that any two
layouts give the same.

The sum is taken modulo 2**64; bits are compared, so NaNs count like any other value.
"""

import numpy as np
import torch

from reshard.refit import mix
from reshard.refit.copies import host_bytes
from reshard.refit.tables import DST, DST_PITCH, ROWS, SRC, SRC_PITCH, WIDTH, tiles_of


def digests(table: np.ndarray, columns: np.ndarray, device: torch.device) -> np.ndarray:
    """An int64 for each row of a table of copies, of what lies at its source end; `columns` are elements in a
    row."""
    if not len(table):
        return np.zeros(0, np.int64)
    packed = table.copy()
    packed[:, DST_PITCH] = packed[:, WIDTH]
    packed[:, DST] = 0
    tiles, origin = tiles_of(packed)
    size = (table[:, WIDTH] // columns)[origin]
    rows = np.stack(
        [
            tiles[:, SRC],
            origin,
            tiles[:, ROWS],
            tiles[:, WIDTH] // size,
            tiles[:, SRC_PITCH] // size,
            tiles[:, DST] // size,
        ],
        1,
    )
    if device.type == "cpu":
        return _on_host(rows, size, len(table))
    from reshard.refit.kernels import digest_tiles

    out = torch.zeros(len(table), dtype=torch.int64, device=device)
    for unit in np.unique(size).tolist():
        digest_tiles(torch.from_numpy(rows[size == unit]).to(device), out, unit)
    return out.cpu().numpy()


def _on_host(tiles: np.ndarray, sizes: np.ndarray, pieces: int) -> np.ndarray:
    out = np.zeros(pieces, np.uint64)
    for (address, piece, n_rows, width, pitch, first), size in zip(
        tiles.tolist(), sizes.tolist(), strict=True
    ):
        held = np.ascontiguousarray(host_bytes(address, n_rows, width * size, pitch * size))
        values = held.view(f"u{size}").astype(np.uint64).reshape(-1)
        positions = np.uint64(first) + np.arange(len(values), dtype=np.uint64)
        with np.errstate(over="ignore"):
            out[piece] += _mixed(values, positions).sum(dtype=np.uint64)
    return out.view(np.int64)


def _mixed(values: np.ndarray, positions: np.ndarray) -> np.ndarray:
    mixed: np.ndarray = (values + np.uint64(1)) * np.uint64(mix.VALUE) + positions * np.uint64(mix.POSITION)
    mixed = (mixed ^ (mixed >> np.uint64(mix.FIRST))) * np.uint64(mix.FINAL)
    return mixed ^ (mixed >> np.uint64(mix.SECOND))
