"""Digests of pieces where they lie: a sum over elements of a mix of value and position, so that any two layouts give the same.

The sum is taken modulo 2**64; bits are compared, so NaNs count like any other value.
"""

import numpy as np
import torch

from reshard.refit.copies import DST, DST_PITCH, ROWS, SRC, SRC_PITCH, WIDTH, host_bytes, tiles_of

VALUE, POSITION, FINAL = (np.uint64(n) for n in (0x9E3779B97F4A7C15 - 0, 0xC2B2AE3D27D4EB4F, 0xBF58476D1CE4E5B9))


def digests(table: np.ndarray, columns: np.ndarray, device: torch.device) -> np.ndarray:
    """An int64 for each row of a table of copies, of what lies at its source end; `columns` are elements in a row."""
    if not len(table):
        return np.zeros(0, np.int64)
    packed = table.copy()
    packed[:, DST_PITCH] = packed[:, WIDTH]
    packed[:, DST] = 0
    tiles, origin = tiles_of(packed)
    size = (table[:, WIDTH] // columns)[origin]
    rows = np.stack([tiles[:, SRC], origin, tiles[:, ROWS], tiles[:, WIDTH] // size, tiles[:, SRC_PITCH] // size, tiles[:, DST] // size], 1)
    if device.type == "cpu":
        return _on_host(rows, size, len(table))
    from reshard.refit.kernels import digest_tiles

    out = torch.zeros(len(table), dtype=torch.int64, device=device)
    for unit in np.unique(size).tolist():
        digest_tiles(torch.from_numpy(rows[size == unit]).to(device), out, unit)
    return out.cpu().numpy()


def _on_host(tiles: np.ndarray, sizes: np.ndarray, pieces: int) -> np.ndarray:
    out = np.zeros(pieces, np.uint64)
    for (address, piece, n_rows, width, pitch, first), size in zip(tiles.tolist(), sizes.tolist(), strict=True):
        words = np.ascontiguousarray(host_bytes(address, n_rows, width * size, pitch * size)).view(f"u{size}").astype(np.uint64).reshape(-1)
        with np.errstate(over="ignore"):
            mixed = (words + np.uint64(1)) * VALUE + (np.uint64(first) + np.arange(len(words), dtype=np.uint64)) * POSITION
            mixed = (mixed ^ (mixed >> np.uint64(29))) * FINAL
            out[piece] += (mixed ^ (mixed >> np.uint64(32))).sum(dtype=np.uint64)
    return out.view(np.int64)
