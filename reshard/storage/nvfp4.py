"""nvfp4: codes of 4 bits (e2m1), two in a byte, an e4m3 scale for 16 columns of a row, and one number in fp32 for all of a weight, by
which those scales are divided, as compressed-tensors stores it (``nvfp4-pack-quantized``), or multiplied.

A code is a sign above the index of a magnitude; the first column of two is in the low half of their byte. The arithmetic of
quantizing is that of ``generate_gparam``, ``calculate_qparams`` and ``NVFP4PackedCompressor`` of compressed-tensors 0.17: the global
scale and the largest magnitude over 6 in the weights' own dtype, whose numbers each step rounds to, all else in fp32.

An engine has one matrix of what are several weights as they are published, and one global scale for it. So weights that are `fused`
share theirs, that of the largest magnitude of all of them, which is the least where each would have one of its own.
"""

from collections.abc import Iterable
from functools import lru_cache, partial
from typing import Any

import ml_dtypes
import numpy as np

from reshard.core.dtypes import DTYPES, Dtype
from reshard.core.errors import ReshardError
from reshard.storage.channels import GLOBAL_END, NVFP4, PACKED_END, SUFFIX, config_of
from reshard.storage.io.streams import Scratch, TensorInfo
from reshard.storage.quantized import Quantize, Quantized, TensorReader, check_finite

GROUP = 16
CODES, SCALES, FP32 = DTYPES["uint8"], DTYPES["float8_e4m3fn"], DTYPES["float32"]
MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
# Above which a magnitude is the next: halves go to the even index, so that every second border belongs to what is above.
BORDERS = (np.greater, 0.25), (np.greater_equal, 0.75), (np.greater, 1.25), (np.greater_equal, 1.75), \
          (np.greater, 2.5), (np.greater_equal, 3.5), (np.greater, 5.0)  # fmt: skip
LARGEST, LARGEST_SCALE = np.float32(6), np.float32(448)
NO_SCALE = np.float32(0.125)  # that of columns whose own would be 0
# The last parts of the names of layers that vLLM makes one of: q, k and v, the matrices before an activation, also of one expert, and
# those into latent attention.
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("q_a_proj", "kv_a_proj_with_mqa"))  # fmt: skip
_scratch = Scratch()


def fused(name: str) -> tuple[str, ...]:
    """The published names of the weights that share a global scale with this one, itself among them, always in the same order. Not all
    of them need exist: latent attention has a ``q_proj`` alone where its queries are not compressed."""
    layer, end = name.removesuffix(".weight"), ".weight" if name.endswith(".weight") else ""
    before, dot, last = layer.rpartition(".")
    for together in FUSED:
        if end and last in together:
            return tuple(f"{before}{dot}{one}{end}" for one in together)
    return (name,)


def global_scale(largest: np.float32, dtype: np.dtype) -> np.float32:
    """What scales are divided by, where this is the largest magnitude of all that shares it, a number of the weights' `dtype`; 1
    where that dtype holds none."""

    def rounded(number: Any) -> np.float32:
        return np.float32(np.float32(number).astype(dtype))

    with np.errstate(over="ignore"):
        # a quotient by way of the reciprocal, as torch divides a number by a tensor
        inverse = rounded(np.float32(1) / max(largest, np.float32(ml_dtypes.finfo(dtype).tiny)))
        found = rounded(inverse * (LARGEST_SCALE * LARGEST))
    return found if np.isfinite(found) else np.float32(1)


def quantize(weight: np.ndarray, divisor: np.float32) -> tuple[np.ndarray, np.ndarray]:
    """Codes ``[rows, columns / 2]`` and scales ``[rows, columns / 16]`` of rows that hold no infinities or NaN."""
    rows, columns = weight.shape
    wide = weight.astype(np.float32)
    magnitudes = np.abs(wide)
    largest = magnitudes
    for _ in range(4):  # 16 columns by halves: faster than a maximum along so short an axis
        largest = np.maximum(largest[:, ::2], largest[:, 1::2])
    shares = (largest / LARGEST).astype(weight.dtype).astype(np.float32)
    with np.errstate(over="ignore", under="ignore"):
        scales = np.minimum(shares * divisor, LARGEST_SCALE).astype(SCALES.numpy())
        scales[scales == 0] = NO_SCALE
        factors = scales.astype(np.float32) / divisor
        scaled = np.divide(magnitudes, np.repeat(factors, GROUP, axis=1), out=magnitudes)
    codes = np.zeros((rows, columns), np.uint8)
    for above, border in BORDERS:
        codes += above(scaled, np.float32(border))
    # What is too small for a sign once it is divided has none; what is rounded to 0 keeps its own.
    codes |= (np.less(wide, 0) & (scaled > 0)).view(np.uint8) << np.uint8(3)
    return codes[:, ::2] | codes[:, 1::2] << np.uint8(4), scales


@lru_cache(8)
def _pairs(number: np.float32, divides: bool, dtype: np.dtype) -> np.ndarray:
    """The two numbers that a byte of codes stands for with each scale, by the bytes of both: ``[256 * 256]`` items."""
    scales = np.arange(256, dtype=np.uint8).view(SCALES.numpy()).astype(np.float32)[:, None]
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):  # of scales that no weight has
        factors = scales / number if divides else scales * number
        numbers = (factors * np.concatenate([MAGNITUDES, -MAGNITUDES])).astype(dtype)
    pairs = np.empty((256, 16, 16, 2), dtype)
    pairs[..., 0], pairs[..., 1] = numbers[:, None, :], numbers[:, :, None]
    return pairs.view(f"u{2 * dtype.itemsize}").reshape(-1)


def dequantize(codes: np.ndarray, scales: np.ndarray, number: np.float32, divides: bool, out: np.ndarray) -> None:  # fmt: skip
    """Write ``code * scale``, a product in fp32 that is rounded to the dtype of `out`, to `out [rows, columns]`; `number` is the one
    by which all `scales` are divided, or multiplied.

    There are 65536 pairs of numbers that a byte of codes and its scale may stand for: they are computed once for a weight and looked up.
    """
    rows, groups = scales.shape
    entries = _scratch.array("entries", rows, groups * GROUP).view(np.uint16)
    of_scales = scales.view(np.uint8).astype(np.uint16) << np.uint16(8)
    np.add(codes.reshape(rows, groups, -1), of_scales[:, :, None], out=entries.reshape(rows, groups, -1))
    pairs = _pairs(number, divides, out.dtype)
    np.take(pairs, entries, out=out.view(pairs.dtype), mode="clip")


def largest(scales: np.ndarray) -> np.float32:
    """The largest magnitude among scales; NaN where one is that. The bits of magnitudes have the order of their numbers."""
    bits = (scales.view(np.uint8) & np.uint8(0x7F)).max(initial=0)
    return np.float32(np.uint8(bits).view(SCALES.numpy()))


class Nvfp4(Quantized):
    """Weights that are stored so, by compressed-tensors, with activations as they are: those that are fused are looked at first, all
    of them for each, but for what this process has seen before."""

    suffix, rows, columns = SUFFIX, 1, GROUP
    codes_suffix = PACKED_END
    more_ends = (GLOBAL_END,)

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__(names)
        self.seen: dict[str, tuple[np.float32, np.dtype]] = {}

    def dtypes(self, info: TensorInfo) -> tuple[Dtype, Dtype]:
        return CODES, SCALES

    def codes_shape(self, info: TensorInfo) -> tuple[int, ...]:
        return info.rows, info.columns // 2

    def scale_shape(self, info: TensorInfo) -> tuple[int, ...]:
        return info.rows, info.columns // GROUP

    def more(self, info: TensorInfo) -> dict[str, tuple[Dtype, tuple[int, ...]]]:
        return {GLOBAL_END: (FP32, (1,))}

    def prepare(
        self, name: str, info: TensorInfo, look: TensorReader
    ) -> tuple[Quantize, dict[str, np.ndarray]]:
        found = [self._largest(other, look) for other in fused(name) if other in self.names]
        largest, dtype = max(number for number, _ in found), found[0][1]
        divisor = global_scale(largest, dtype)
        if dtype == np.float16 and largest > 0 and largest * divisor < 1:
            raise ReshardError(
                f"{name} and what is fused with it are {largest:.3g} at most, for which float16 holds no global scale of nvfp4: add "
                f"--dtype bf16"
            )
        return partial(quantize, divisor=divisor), {GLOBAL_END: np.array([divisor], np.float32)}

    def _largest(self, name: str, look: TensorReader) -> tuple[np.float32, np.dtype]:
        """The largest magnitude of a weight, and its dtype."""
        if name not in self.seen:
            largest, dtype = np.float32(0), np.dtype(np.float32)
            for slab in look(name):
                # not Python's max, which may pass over NaN
                largest, dtype = np.maximum(largest, np.abs(slab.astype(np.float32)).max()), slab.dtype
            check_finite(name, np.asarray(largest), "; drop --quantize")
            self.seen[name] = largest, dtype
        return self.seen[name]

    def config(self, original: Any, kept: list[str]) -> dict[str, Any]:
        """That of llm-compressor's ``NVFP4A16``."""
        weights = {
            "num_bits": 4,
            "type": "float",
            "strategy": "tensor_group",
            "symmetric": True,
            "dynamic": False,
            "group_size": GROUP,
            "scale_dtype": f"torch.{SCALES.name}",
        }
        return config_of(weights, None, NVFP4, kept)
