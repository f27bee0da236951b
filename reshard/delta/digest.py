"""A digest of a model's weights that does not depend on a layout, and that a change of a few elements
changes by what those elements give.

It is the sum over all elements of the element's bits, as a signed integer, times a key of its tensor,
row and column, modulo 2**64. Keys are odd, so a single change always shows. It guards against mistakes,
not against somebody who means to deceive.
"""

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import numpy as np
import xxhash

from reshard.storage.io.streams import TensorInfo

_GOLDEN, _FIRST, _SECOND = (
    np.uint64(0x9E3779B97F4A7C15),
    np.uint64(0xBF58476D1CE4E5B9),
    np.uint64(0x94D049BB133111EB),
)
_MASK = (1 << 64) - 1
_CHUNK_ELEMENTS = 1 << 16  # that stay in a core's cache as 8 bytes each


def seed_of(name: str, info: TensorInfo) -> int:
    """Return the seed of a tensor's row keys: its name, dtype and shape."""
    return xxhash.xxh3_64_intdigest(f"{name} {info.dtype.name} {list(info.shape)}".encode())


def row_keys(seed: int, start: int, stop: int) -> np.ndarray:
    """Return the keys of rows `start` .. `stop`, uint64."""
    return _keys(np.arange(start, stop, dtype=np.uint64) + np.uint64(seed))


@lru_cache(64)
def column_keys(columns: int) -> np.ndarray:
    """Return the keys of columns 0 .. `columns`, uint64."""
    return _keys(np.arange(columns, dtype=np.uint64))


def bits_of(numbers: np.ndarray) -> np.ndarray:
    """View numbers of any dtype as signed integers of their size."""
    return numbers.view(f"i{numbers.itemsize}")


def digest_rows(seed: int, rows: np.ndarray, row: int = 0, column: int = 0) -> int:
    """Return what an array ``[rows, columns]``, whose first element is at `row` and `column` of its tensor,
    adds to the digest."""
    bits = bits_of(rows)
    keys = row_keys(seed, row, row + len(bits))
    columns = column_keys(column + bits.shape[1])[column:]
    step = max(1, _CHUNK_ELEMENTS // max(1, bits.shape[1]))
    total = np.uint64(0)
    with np.errstate(over="ignore"):
        for start in range(0, len(bits), step):
            sums = bits[start : start + step].astype(np.uint64) @ columns
            total += (sums * keys[start : start + step]).sum(dtype=np.uint64)
    return int(total)


def digest_change(seed: int, old: np.ndarray, new: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> int:
    """Return what is added to the digest where the elements at these rows and columns change."""
    if not len(rows):
        return 0
    first = int(rows.min())
    keys = (
        row_keys(seed, first, int(rows.max()) + 1)[rows - first]
        * column_keys(int(columns.max()) + 1)[columns]
    )
    with np.errstate(over="ignore"):
        change = bits_of(new).astype(np.uint64) - bits_of(old).astype(np.uint64)
        return int((change * keys).sum(dtype=np.uint64))


def digest_total(parts: Iterable[int]) -> int:
    """Return the sum of parts of a digest."""
    return sum(parts) & _MASK


def digest_text(digest: int) -> str:
    """Return a digest as manifests have it."""
    return f"{digest & _MASK:016x}"


def _keys(counters: np.ndarray) -> Any:
    """Return an odd number for each counter, by splitmix64."""
    with np.errstate(over="ignore"):
        mixed = (counters + np.uint64(1)) * _GOLDEN
        mixed = (mixed ^ (mixed >> np.uint64(30))) * _FIRST
        mixed = (mixed ^ (mixed >> np.uint64(27))) * _SECOND
        return (mixed ^ (mixed >> np.uint64(31))) | np.uint64(1)
