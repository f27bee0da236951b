"""mxfp4, as gpt-oss is published: codes of 4 bits (e2m1), two in a byte, and one exponent for 32
columns of a row.

``weight = code * 2**(scale - 127)`` (OCP Microscaling Formats 1.0, section 5.2); the first column of two is
in the low half of their byte. All experts are in one tensor: ``name_blocks [experts, rows, groups, 16]`` and
``name_scales [experts, rows, groups]``, uint8. It is only read.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import numpy as np

from reshard.core.dtypes import DTYPES
from reshard.core.errors import ReshardError
from reshard.quantization.nvfp4 import MAGNITUDES
from reshard.quantization.scheme import Scheme, StoredTensor, StoredWeight

METHOD = "mxfp4"
GROUP = 32  # columns that share a scale
BYTES = GROUP // 2
CODES_SUFFIX, SCALES_SUFFIX = "_blocks", "_scales"
BIAS = 127  # of exponents
NAN = 255  # the one scale that is no power of two
CODES = DTYPES["uint8"]


@dataclass(frozen=True)
class Mxfp4(Scheme):
    """e2m1 codes with a power of two for each 32 columns of a row."""

    def __str__(self) -> str:
        return METHOD

    def scale_block(self, shape: tuple[int, ...]) -> tuple[int, int]:
        return 1, GROUP

    def decode(
        self, weight: StoredWeight, parts: Sequence[np.ndarray], start: int, out: np.ndarray, where: str
    ) -> None:
        codes, scales = parts
        largest = int(scales.max(initial=0))
        if largest == NAN:
            raise ReshardError(f"{where}: {weight.tensors[1]} holds 255, which is NaN and no scale")
        numbers = _numbers(out.dtype)
        entries = scales.astype(np.uint16)[:, :, None] * np.uint16(256) + codes.reshape(*scales.shape, BYTES)
        np.take(numbers, entries.reshape(len(out), -1), out=out.view(numbers.dtype), mode="clip")
        # The largest code is 6, which the largest scales make too large for some dtypes.
        if not np.isfinite(np.ldexp(6.0, largest - BIAS).astype(out.dtype)) and not np.isfinite(out).all():
            weight.too_large(str(out.dtype), where)


def find_weights(tensors: Mapping[str, StoredTensor], where: str) -> dict[str, StoredWeight]:
    """Return the weights among a checkpoint's `tensors` that are stored as blocks and scales, by
    the names of their blocks. Raises ReshardError if the two do not belong together."""
    weights: dict[str, StoredWeight] = {}
    for name in (name for name in tensors if name.endswith(SCALES_SUFFIX)):
        if name.removesuffix(SCALES_SUFFIX) + CODES_SUFFIX not in tensors:
            raise ReshardError(f"{where}: {name} has no {CODES_SUFFIX} beside it")
    for name in (name for name in tensors if name.endswith(CODES_SUFFIX)):
        scales_name = name.removesuffix(CODES_SUFFIX) + SCALES_SUFFIX
        codes, scales = tensors[name], tensors.get(scales_name)
        if scales is None:
            raise ReshardError(f"{where}: {name} has no {SCALES_SUFFIX} beside it")
        if not codes.dtype == scales.dtype == CODES or codes.shape != (*scales.shape, BYTES):
            raise ReshardError(
                f"{where}: {name} {list(codes.shape)} and {scales_name} {list(scales.shape)} are not the uint8 "
                f"codes of {GROUP} columns and one scale for them"
            )
        shape = (*scales.shape[:-1], scales.shape[-1] * GROUP)
        if len(shape) != 3 or not prod(shape):
            raise ReshardError(f"{where}: {name} {list(codes.shape)} holds no experts' matrices")
        weights[name] = StoredWeight(name, shape, Mxfp4(), (name, scales_name))
    return weights


@lru_cache(maxsize=4)
def _numbers(dtype: np.dtype) -> np.ndarray:
    """Return the two numbers that a byte of codes stands for, as one, at ``scale * 256 + byte``."""
    magnitudes = np.array(MAGNITUDES, np.float64)
    values = np.concatenate([magnitudes, -magnitudes])
    byte = np.arange(256)
    pairs = np.stack([values[byte & 15], values[byte >> 4]], axis=-1)
    powers = np.ldexp(1.0, np.arange(256) - BIAS)
    with np.errstate(over="ignore"):  # of scales that are too large for the dtype, which are refused
        numbers = (powers[:, None, None] * pairs).astype(np.float32).astype(dtype)
    return numbers.view(f"u{2 * dtype.itemsize}").reshape(-1)
