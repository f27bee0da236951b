"""fp8 (e4m3) or int8 with a scale for each row (an output channel), for all of a matrix, or for
each block, as compressed-tensors stores them.

The arithmetic is that of ``calculate_qparams`` and ``quantize`` of compressed-tensors 0.17: in the
weights' own dtype, whose numbers each step rounds to. Decoding is that of its ``dequantize``, a
product in the scales' dtype.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from reshard.core.dtypes import DTYPES, Dtype
from reshard.quantization import fp8_blocks
from reshard.quantization.scheme import Scheme, StoredWeight

SCALE_SUFFIX = "_scale"
STRATEGIES = ("channel", "tensor", "block")
# By the kind of codes the least and largest number that is coded, and what the largest magnitude is
# divided by.
RANGES = {
    "float8_e4m3fn": (-448.0, 448.0, 448.0),
    "int8": (-128.0, 127.0, 127.5),
    "int4": (-8.0, 7.0, 7.5),
}
TYPES = {"float8_e4m3fn": "float", "int8": "int", "int4": "int"}  # as configs call them


@dataclass(frozen=True)
class Channels(Scheme):
    """Codes of 8 bits (`codes` is their dtype) with a scale for each ``channel`` or ``block`` or
    the whole ``tensor`` (`strategy`)."""

    codes: str
    strategy: str = "channel"
    block: tuple[int, int] | None = None

    suffixes: ClassVar[tuple[str, ...]] = ("", SCALE_SUFFIX)

    def __str__(self) -> str:
        return f"{self.codes} by {self.strategy}"

    def scale_block(self, shape: tuple[int, ...]) -> tuple[int, int]:
        if self.block is not None:
            return self.block
        return (1, shape[1]) if self.strategy == "channel" else (shape[0], shape[1])

    def scale_shapes(self, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Return the shapes that a weight's scales may have, the usual one first."""
        if self.strategy == "tensor":
            return [(1,), (), (1, 1)]
        usual = self.scale_shape(shape)
        return [usual, usual[:1]] if self.strategy == "channel" else [usual]

    def decode(
        self, weight: StoredWeight, parts: Sequence[np.ndarray], start: int, out: np.ndarray, where: str
    ) -> None:
        codes, scales = parts
        weight.check_scales(scales, where)
        block = self.scale_block(weight.shape)
        fp8_blocks.decode(codes, scales, block, start % block[0], out)
        weight.check_fp16(scales, out, where)

    def stored(self, shape: tuple[int, ...], dtype: Dtype) -> dict[str, tuple[Dtype, tuple[int, ...]]]:
        return {"": (DTYPES[self.codes], shape), SCALE_SUFFIX: (dtype, self.scale_shape(shape))}

    def encode(self, rows: np.ndarray, small: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        if self.strategy != "channel":
            raise NotImplementedError(f"{self} is not written")
        return encode(rows, self.codes, rows.shape[1])


def encode(rows: np.ndarray, codes: str, group: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the codes ``[rows, columns]`` of rows, and a scale for each `group` of columns,
    ``[rows, groups]`` in their dtype.

    Codes of 4 bits have a byte each. Infinities and NaN show in the scales.
    """
    import ml_dtypes

    groups = rows.astype(np.float32).reshape(len(rows), -1, group)
    least, most, divisor = map(np.float32, RANGES[codes])
    scales = (np.abs(groups).max(2) / divisor).astype(rows.dtype)
    scales = np.where(scales == 0, ml_dtypes.finfo(rows.dtype).eps, scales).astype(rows.dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = (groups / scales.astype(np.float32)[:, :, None]).astype(rows.dtype).astype(np.float32)
        scaled = (scaled + np.float32(0)).clip(least, most)  # the zero point, which makes 0 of -0
        coded = (
            np.rint(scaled).astype(np.int8) if TYPES[codes] == "int" else scaled.astype(DTYPES[codes].numpy())
        )
    return coded.reshape(rows.shape), scales
