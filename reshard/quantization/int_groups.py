"""int4 or int8, packed into words of 32 bits, with a scale for each group of columns of a row, or
for all of them, as compressed-tensors stores them (``pack-quantized``).

The first code of a word is in its lowest bits, and each counts from the least number that is coded:
for int4 the word's lowest four bits are code + 8. Rows are packed on their own; what is left of the
last word is 0. Zero points are packed so along the rows instead, eight rows of int4 in a word. The
arithmetic is that of `reshard.quantization.channels`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import numpy as np

from reshard.core.dtypes import DTYPES, Dtype
from reshard.core.scratch import Scratch
from reshard.quantization import channels
from reshard.quantization.channels import SCALE_SUFFIX
from reshard.quantization.scheme import FindLargest, Scheme, StoredWeight

PACKED_SUFFIX, SHAPE_SUFFIX, ZERO_POINT_SUFFIX = "_packed", "_shape", "_zero_point"
CODES = {4: "int4", 8: "int8"}  # by their bits
WORD = np.dtype("<i4")
# What numpy looks up at once, so that it is fast: the numbers of a byte in fp32, one or a pair of
# them.
_NUMBERS_OF_BYTE = {4: np.complex64, 8: np.float32}
_scratch = Scratch()


@dataclass(frozen=True)
class IntGroups(Scheme):
    """Packed codes of so many `bits` with a scale for each `group` of columns, None for a whole
    row, and zero points unless they are `symmetric`."""

    bits: int
    group: int | None = None
    symmetric: bool = True

    suffixes: ClassVar[tuple[str, ...]] = (PACKED_SUFFIX, SCALE_SUFFIX, SHAPE_SUFFIX)

    def __str__(self) -> str:
        shared = "each channel" if self.group is None else f"groups of {self.group}"
        return f"{self.codes} by {shared}{'' if self.symmetric else ', asymmetric'}"

    @property
    def codes(self) -> str:
        """Return what codes are called."""
        return CODES[self.bits]

    @property
    def strategy(self) -> str:
        """Return what has a scale, as configs say it."""
        return "channel" if self.group is None else "group"

    @property
    def column_multiple(self) -> int:  # type: ignore[override]
        """Return what has to divide the columns of a weight."""
        return self.group or 1

    def scale_block(self, shape: tuple[int, ...]) -> tuple[int, int]:
        return 1, self.group or shape[1]

    def scale_shapes(self, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Return the shapes that a weight's scales may have."""
        return [self.scale_shape(shape)]

    def fits(self, shape: tuple[int, ...], packed: tuple[int, ...], zero_points: bool) -> bool:
        """Tell whether the codes of a weight may have the shape `packed`, with or without zero
        points."""
        divides = not shape[1] % self.column_multiple
        return divides and zero_points != self.symmetric and packed == (shape[0], words(shape[1], self.bits))

    def stored_rows(self, shape: tuple[int, ...], start: int, stop: int) -> list[tuple[int, int]]:
        per_word = 32 // self.bits
        zero_points = [] if self.symmetric else [(start // per_word, -(-stop // per_word))]
        return [(start, stop), (start, stop), *zero_points]

    def decode(
        self, weight: StoredWeight, parts: Sequence[np.ndarray], start: int, out: np.ndarray, where: str
    ) -> None:
        packed, scales = parts[:2]
        zero_points = None if self.symmetric else parts[2]
        weight.check_scales(scales, where)
        decode(packed, scales, self.bits, out, zero_points, start % (32 // self.bits))
        weight.check_fp16(scales, out, where)

    def stored(self, shape: tuple[int, ...], dtype: Dtype) -> dict[str, tuple[Dtype, tuple[int, ...]]]:
        return {
            PACKED_SUFFIX: (DTYPES["int32"], (shape[0], words(shape[1], self.bits))),
            SCALE_SUFFIX: (dtype, self.scale_shape(shape)),
            SHAPE_SUFFIX: (DTYPES["int64"], (len(shape),)),
        }

    def small_tensors(
        self, name: str, shape: tuple[int, ...], find_largest: FindLargest
    ) -> dict[str, np.ndarray]:
        return {SHAPE_SUFFIX: np.array(shape, np.int64)}

    def encode(self, rows: np.ndarray, small: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        codes, scales = channels.encode(rows, self.codes, self.group or rows.shape[1])
        return pack(codes, self.bits), scales


def words(columns: int, bits: int) -> int:
    """Return how many words a row of so many codes takes."""
    return -(-columns * bits // 32)


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """Return signed codes ``[rows, columns]`` of 8 bits each as words ``[rows, words]``."""
    rows, columns = codes.shape
    per_byte = 8 // bits
    unsigned = np.zeros((rows, words(columns, bits) * 4, per_byte), np.uint8)
    unsigned.reshape(rows, -1)[:, :columns] = codes.view(np.uint8) + np.uint8(1 << (bits - 1))
    packed = unsigned[:, :, 0].copy()
    for n in range(1, per_byte):
        packed |= unsigned[:, :, n] << np.uint8(n * bits)
    return packed.view(WORD)


@cache
def _numbers(bits: int) -> np.ndarray:
    """Return the codes that each byte stands for, as fp32: 256 items of ``8 / bits`` numbers."""
    per_byte = 8 // bits
    codes = np.arange(256)[:, None] >> (np.arange(per_byte) * bits) & ((1 << bits) - 1)
    return (codes - (1 << (bits - 1))).astype(np.float32).view(_NUMBERS_OF_BYTE[bits])[:, 0]


def unpack(packed: np.ndarray, bits: int) -> np.ndarray:
    """Return the codes of words ``[rows, words]`` as fp32 ``[rows, words * 32 / bits]``, valid
    until the thread's next call.

    All codes of a byte are looked up at once.
    """
    rows, width = packed.shape[0], packed.shape[1] * 4
    item = np.dtype(_NUMBERS_OF_BYTE[bits])
    numbers = _scratch.array("numbers", rows, width * item.itemsize).view(item)
    np.take(_numbers(bits), packed.view(np.uint8), out=numbers, mode="clip")
    return numbers.view(np.float32)


def decode(
    packed: np.ndarray,
    scales: np.ndarray,
    bits: int,
    out: np.ndarray,
    zero_points: np.ndarray | None = None,
    row: int = 0,
) -> None:
    """Write ``(code - zero point) * scale``, rounded to the dtype of `scales` and then to that of
    `out`, to `out` ``[rows, columns]``.

    `packed` are words ``[rows, words]``, `scales` ``[rows, groups]`` has one for each of as many
    groups of columns. `zero_points` are words ``[words, groups]``, the first row's zero point being
    `row` rows into the first; without them it is 0.
    """
    rows, columns = out.shape
    points = None
    if zero_points is not None:
        points = unpack(np.ascontiguousarray(zero_points.T), bits)[:, row : row + rows].T.copy()
    numbers = unpack(packed, bits)
    if numbers.shape[1] != columns:
        numbers = np.ascontiguousarray(numbers[:, :columns])
    grouped = numbers.reshape(rows, scales.shape[1], -1)
    if points is not None:
        grouped -= points[:, :, None]
    with np.errstate(over="ignore", invalid="ignore"):
        grouped *= scales.astype(np.float32)[:, :, None]
        out[:] = numbers if out.dtype == scales.dtype else numbers.astype(scales.dtype)
