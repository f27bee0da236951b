"""Codes of 4 or 8 bits in words of 32, as compressed-tensors packs them (``pack-quantized``).

The first code of a word is in its lowest bits, and each counts from the least number that is coded: for int4 the word's
lowest four bits are code + 8. Rows are packed on their own; what is left of the last word is 0. Zero points are packed so
along the rows instead, eight rows in a word.
"""

from functools import cache

import numpy as np

from reshard.storage.io.streams import Scratch

# What numpy looks up at once, so that it is fast: the numbers of a byte in fp32, one or a pair of them.
BITS = {4: np.complex64, 8: np.float32}
WORD = np.dtype("<i4")
_scratch = Scratch()


def words(columns: int, bits: int) -> int:
    """How many words a row of so many codes takes."""
    return -(-columns * bits // 32)


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """Signed codes ``[rows, columns]`` of 8 bits each as words ``[rows, words]``."""
    rows, columns = codes.shape
    each = 8 // bits
    unsigned = np.zeros((rows, words(columns, bits) * 4, each), np.uint8)
    unsigned.reshape(rows, -1)[:, :columns] = codes.view(np.uint8) + np.uint8(1 << (bits - 1))
    packed = unsigned[:, :, 0].copy()
    for n in range(1, each):
        packed |= unsigned[:, :, n] << np.uint8(n * bits)
    return packed.view(WORD)


@cache
def _numbers(bits: int) -> np.ndarray:
    """The codes that each byte stands for, as fp32: 256 items of ``8 / bits`` numbers."""
    each = 8 // bits
    codes = np.arange(256)[:, None] >> (np.arange(each) * bits) & ((1 << bits) - 1)
    return (codes - (1 << (bits - 1))).astype(np.float32).view(BITS[bits])[:, 0]


def unpack(packed: np.ndarray, bits: int) -> np.ndarray:
    """The codes of words ``[rows, words]``, as fp32 ``[rows, words * 32 / bits]``: all of a byte are looked up at once. Valid
    until the thread's next call."""
    rows, width = packed.shape[0], packed.shape[1] * 4
    item = np.dtype(BITS[bits])
    numbers = _scratch.array("numbers", rows, width * item.itemsize).view(item)
    np.take(_numbers(bits), packed.view(np.uint8), out=numbers, mode="clip")
    return numbers.view(np.float32)


def dequantize(
    packed: np.ndarray,
    scales: np.ndarray,
    bits: int,
    out: np.ndarray,
    zeros: np.ndarray | None = None,
    row: int = 0,
) -> None:
    """Write ``(code - zero) * scale``, rounded to the dtype of `scales` and then to that of `out`, to `out [rows, columns]`.

    `packed` are words ``[rows, words]``, `scales [rows, groups]` has one for each of as many groups of columns. `zeros` are
    words ``[words, groups]``, the first row's zero point being `row` rows into the first; without them it is 0.
    """
    rows, columns = out.shape
    points = None
    if zeros is not None:
        points = unpack(np.ascontiguousarray(zeros.T), bits)[:, row : row + rows].T.copy()
    numbers = unpack(packed, bits)
    if numbers.shape[1] != columns:
        numbers = np.ascontiguousarray(numbers[:, :columns])
    of_groups = numbers.reshape(rows, scales.shape[1], -1)
    if points is not None:
        of_groups -= points[:, :, None]
    with np.errstate(over="ignore", invalid="ignore"):
        of_groups *= scales.astype(np.float32)[:, :, None]
        out[:] = numbers if out.dtype == scales.dtype else numbers.astype(scales.dtype)
