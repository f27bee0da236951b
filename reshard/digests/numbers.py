"""The digest of a model's weights: a number that no layout, file format, order or place of memory changes.

The number of a tensor is, modulo 2**64,

    start(name, dtype, shape) + sum over its elements of  row_key * column_key * mix(bits)

and that of a model the sum of its tensors' numbers. Elements count in canonical coordinates: rows are dim 0, columns
all other dims. Tied copies count once, vocabulary padding never, packed experts as the single ones.

Why a sum: ranks add numbers of 8 bytes, and nothing is gathered; a change of some elements changes the digest by what
those elements give, so that it is updated without reading the rest.

What it detects. A single changed element always shows: `mix` is injective, and keys are odd. Several changed elements
cancel out only if a sum with pseudo-random keys is 0. With a key for each element that has a chance of 1 in 2**64. Here
a key is the product of a row's and a column's, so that a kernel holds a column's in a register, and a product is 0 in
more ways: for two different tensors the chance is about 1 in 2**57, and 1 in 2**51 where rows and columns change places
at once, since the difference of two odd keys is even. A billion comparisons of different weights miss one with a chance
below one in a million. A second sum would double the arithmetic to improve on that.

Why bits are mixed: modulo 2**64 a sum forgets k bits where all differences are multiples of 2**k. Negated fp32 weights
differ by multiples of 2**31 and bf16 numbers held as fp32 by multiples of 2**16, which leaves too little of 64 bits.
Mixing brings high bits down. It is a multiplication and a shift, in 32 bits for elements of 8 and 16.

Why a start: elements with no bits set add nothing, so a missing tensor of zeros, or one of another name, shows by it.

It detects mistakes, not forgery: who knows the keys can find other weights with the same number. Signed checksums of
files are for that.
"""

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import xxhash

from reshard.core.dtypes import Dtype

MIX_32, MIX_64 = 0x9E3779B1, 0x9E3779B97F4A7C15  # odd: fractions of the golden ratio
SHIFT_32, SHIFT_64 = 16, 32
# splitmix64, which makes keys of counters
STEP, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
FIRST_SHIFT, SECOND_SHIFT, LAST_SHIFT = 30, 27, 31
MASK = (1 << 64) - 1
# What every NaN becomes where numbers are rounded to another dtype: casts agree on all other bits only.
NAN_BITS = {"float16": 0x7E00, "bfloat16": 0x7FC0, "float32": 0x7FC00000, "float64": 0x7FF8000000000000}
_CHUNK_ELEMENTS = 1 << 16  # that stay in a core's cache as 8 bytes each


class Described(Protocol):
    """Shape and dtype of a tensor."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> Dtype: ...


def seed_of(name: str, info: Described) -> int:
    """Return the seed of a tensor's row keys and start: its name, dtype and shape."""
    return xxhash.xxh3_64_intdigest(f"{name} {info.dtype.name} {list(info.shape)}".encode())


def start_of(seed: int) -> int:
    """Return what a tensor of this seed counts as if its elements add nothing."""
    return int(_keys(np.array([~seed & MASK], np.uint64))[0])


def row_keys(seed: int, start: int, stop: int) -> np.ndarray:
    """Return the keys of rows `start` .. `stop`, uint64."""
    with np.errstate(over="ignore"):
        return _keys(np.arange(start, stop, dtype=np.uint64) + np.uint64(seed))


@lru_cache(64)
def column_keys(columns: int) -> np.ndarray:
    """Return the keys of columns 0 .. `columns`, uint64."""
    return _keys(np.arange(columns, dtype=np.uint64))


def bits_of(numbers: np.ndarray) -> np.ndarray:
    """View numbers of any dtype as signed integers of their size."""
    return numbers.view(f"i{numbers.itemsize}")


def mix(numbers: np.ndarray) -> np.ndarray:
    """Return the mixed bits of elements, uint64."""
    bits = numbers.view(f"u{numbers.itemsize}")
    narrow = numbers.itemsize <= 2
    word: Any = np.uint32 if narrow else np.uint64
    factor, shift = (MIX_32, SHIFT_32) if narrow else (MIX_64, SHIFT_64)
    mixed = bits.astype(word)
    with np.errstate(over="ignore"):
        np.multiply(mixed, word(factor), out=mixed)
    np.bitwise_xor(mixed, mixed >> word(shift), out=mixed)
    return mixed.astype(np.uint64, copy=False)


def rounded(numbers: np.ndarray, dtype: Dtype) -> np.ndarray:
    """Return numbers as they count in another dtype: rounded to the nearest, and each NaN as one."""
    target = dtype.numpy()
    if numbers.dtype == target:
        return numbers
    with np.errstate(over="ignore", invalid="ignore"):
        cast: np.ndarray = numbers.astype(target)
    if dtype.name in NAN_BITS and (nan := np.isnan(cast)).any():
        cast.view(f"u{dtype.size}")[nan] = NAN_BITS[dtype.name]
    return cast


def sum_rows(seed: int, rows: np.ndarray, row: int = 0, column: int = 0) -> int:
    """Return what an array ``[rows, columns]``, whose first element is at `row` and `column` of its tensor, adds."""
    keys = row_keys(seed, row, row + len(rows))
    columns = column_keys(column + rows.shape[1])[column:]
    step = max(1, _CHUNK_ELEMENTS // max(1, rows.shape[1]))
    total = np.uint64(0)
    with np.errstate(over="ignore"):
        for start in range(0, len(rows), step):
            sums = np.einsum("ij,j->i", mix(rows[start : start + step]), columns)
            total += (sums * keys[start : start + step]).sum(dtype=np.uint64)
    return int(total)


def sum_change(seed: int, old: np.ndarray, new: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> int:
    """Return what is added where the elements at these rows and columns change."""
    if not len(rows):
        return 0
    first = int(rows.min())
    keys = (
        row_keys(seed, first, int(rows.max()) + 1)[rows - first]
        * column_keys(int(columns.max()) + 1)[columns]
    )
    with np.errstate(over="ignore"):
        return int(((mix(new) - mix(old)) * keys).sum(dtype=np.uint64))


def start_total(tensors: Mapping[str, Described]) -> int:
    """Return what tensors count as together if their elements add nothing."""
    return total_of(start_of(seed_of(name, info)) for name, info in tensors.items())


def number_of(seed: int, sums: Iterable[int]) -> int:
    """Return the number of a tensor whose elements, in parts that cover each once, add these sums."""
    return (start_of(seed) + sum(sums)) & MASK


def total_of(numbers: Iterable[int]) -> int:
    """Return the sum of numbers."""
    return sum(numbers) & MASK


def text_of(number: int) -> str:
    """Return a number as manifests and commands have it.

    >>> text_of(0x3F2A)
    '0000000000003f2a'
    """
    return f"{number & MASK:016x}"


def _keys(counters: np.ndarray) -> np.ndarray:
    """Return an odd number for each counter, by splitmix64."""
    with np.errstate(over="ignore"):
        mixed: np.ndarray = (counters + np.uint64(1)) * np.uint64(STEP)
        mixed = (mixed ^ (mixed >> np.uint64(FIRST_SHIFT))) * np.uint64(FIRST)
        mixed = (mixed ^ (mixed >> np.uint64(SECOND_SHIFT))) * np.uint64(SECOND)
        return (mixed ^ (mixed >> np.uint64(LAST_SHIFT))) | np.uint64(1)
