"""nvfp4: codes of 4 bits (e2m1), two in a byte, an e4m3 scale for 16 columns of a row, and one fp32
number for all of a weight, by which those scales are divided, as compressed-tensors stores it
(``nvfp4-pack-quantized``), or multiplied, as ModelOpt does.

A code is a sign above the index of a magnitude; the first column of two is in the low half of their
byte. Encoding is that of ``generate_gparam``, ``calculate_qparams`` and ``NVFP4PackedCompressor``
of compressed-tensors 0.17: the global scale and the largest magnitude over 6 in the weights' own
dtype, whose numbers each step rounds to, all else in fp32.

An engine has one matrix of what are several weights as they are published, and one global scale for
it. So weights that are `fused` share theirs, that of the largest magnitude of all of them, which is
the least where each would have one of its own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np

from reshard.core.dtypes import DTYPES, Dtype
from reshard.core.errors import ReshardError
from reshard.core.scratch import Scratch
from reshard.quantization.channels import SCALE_SUFFIX
from reshard.quantization.fp8_blocks import E4M3_MAX
from reshard.quantization.int_groups import PACKED_SUFFIX
from reshard.quantization.scheme import FindLargest, Scheme, StoredTensor, StoredWeight

GROUP = 16  # columns that share a scale
GLOBAL_SCALE_SUFFIX = "_global_scale"
CODES, SCALES, FP32 = DTYPES["uint8"], DTYPES["float8_e4m3fn"], DTYPES["float32"]
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_MAX = MAGNITUDES[-1]
# What a magnitude has to be above to have the second code, the third and so on. Ties go to the even
# code, so that every second of these edges belongs to the code above it.
EDGES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
NO_SCALE = 0.125  # in place of a scale that would be 0
# The last parts of the names of layers that vLLM makes one of: q, k and v, the matrices before an
# activation, also of one expert, and those into latent attention.
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("q_a_proj", "kv_a_proj_with_mqa"))  # fmt: skip
_scratch = Scratch()


@dataclass(frozen=True)
class Nvfp4(Scheme):
    """e2m1 codes with e4m3 scales, and a global scale that `divides` them, or multiplies them."""

    divides: bool = True

    suffixes: ClassVar[tuple[str, ...]] = (PACKED_SUFFIX, SCALE_SUFFIX, GLOBAL_SCALE_SUFFIX)
    column_multiple: ClassVar[int] = GROUP

    def __str__(self) -> str:
        return "nvfp4"

    def scale_block(self, shape: tuple[int, ...]) -> tuple[int, int]:
        return 1, GROUP

    def stored_rows(self, shape: tuple[int, ...], start: int, stop: int) -> list[tuple[int, int]]:
        return [(start, stop), (start, stop), (0, 1)]

    def decode(
        self, weight: StoredWeight, parts: Sequence[np.ndarray], start: int, out: np.ndarray, where: str
    ) -> None:
        codes, scales, global_scales = parts
        largest, global_scale = largest_of(scales), global_scales[0, 0]
        weight.check_scales(np.asarray(largest), where)
        if not (np.isfinite(global_scale) and global_scale > 0):
            raise ReshardError(
                f"{where}: {weight.tensors[2]} is {global_scale}, and what "
                f"{'divides' if self.divides else 'multiplies'} all scales of a weight is a positive number: "
                "take the checkpoint from where it came once more"
            )
        decode(codes, scales, global_scale, self.divides, out)
        with np.errstate(over="ignore"):
            largest = (largest / global_scale if self.divides else largest * global_scale) * np.float32(
                E2M1_MAX
            )
        if not np.isfinite(largest.astype(out.dtype)) and not np.isfinite(out).all():
            weight.too_large(out.dtype.name, where)

    def names_sharing_scale(self, name: str) -> tuple[str, ...]:
        return fused(name)

    def stored(self, shape: tuple[int, ...], dtype: Dtype) -> dict[str, tuple[Dtype, tuple[int, ...]]]:
        return {
            PACKED_SUFFIX: (CODES, (shape[0], shape[1] // 2)),
            SCALE_SUFFIX: (SCALES, self.scale_shape(shape)),
            GLOBAL_SCALE_SUFFIX: (FP32, (1,)),
        }

    def small_tensors(
        self, name: str, shape: tuple[int, ...], find_largest: FindLargest
    ) -> dict[str, np.ndarray]:
        largest, dtype = find_largest(fused(name))
        divisor = global_scale(largest, dtype)
        if dtype == np.float16 and largest > 0 and largest * divisor < 1:
            raise ReshardError(
                f"{name} and what is fused with it are {largest:.3g} at most, for which float16 holds no "
                "global scale of nvfp4: add --dtype bf16"
            )
        return {GLOBAL_SCALE_SUFFIX: np.array([divisor], np.float32)}

    def encode(self, rows: np.ndarray, small: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        return encode(rows, small[GLOBAL_SCALE_SUFFIX][0])


def fused(name: str) -> tuple[str, ...]:
    """Return the published names of the weights that share a global scale with this one, itself
    among them, always in the same order.

    Not all of them need exist: latent attention has a ``q_proj`` alone where its queries are not
    compressed.
    """
    layer, end = name.removesuffix(".weight"), ".weight" if name.endswith(".weight") else ""
    before, dot, last = layer.rpartition(".")
    for together in FUSED:
        if end and last in together:
            return tuple(f"{before}{dot}{other}{end}" for other in together)
    return (name,)


def stored_weight(
    name: str, parts: tuple[str, str, str], tensors: Mapping[str, StoredTensor], divides: bool, where: str
) -> StoredWeight:
    """Return the weight of these stored tensors: its codes, their scales, and its global scale.

    Raises ReshardError if one is missing, or they do not add up.
    """
    for part in parts[1:]:
        if part not in tensors:
            raise ReshardError(f"{where} holds {parts[0]} without {part}, and nvfp4 weights need both")
    codes, scales, global_scale = (tensors[part] for part in parts)
    if codes.dtype != CODES or len(codes.shape) != 2 or codes.shape[1] % (GROUP // 2):
        raise ReshardError(
            f"{where}: {parts[0]} is {codes.dtype.name} {list(codes.shape)}, which are not codes of nvfp4: "
            f"those are uint8 with two columns in a byte, and a scale is for {GROUP} columns, {GROUP // 2} "
            "bytes"
        )
    rows, columns = codes.shape[0], codes.shape[1] * 2
    expected = (rows, columns // GROUP)
    if scales.dtype != SCALES or scales.shape != expected:
        raise ReshardError(
            f"{where}: {parts[1]} is {scales.dtype.name} {list(scales.shape)}, expected {SCALES.name} "
            f"{list(expected)} for nvfp4 weights of [{rows}, {columns}]"
        )
    if global_scale.dtype != FP32 or global_scale.shape not in ((1,), ()):
        raise ReshardError(
            f"{where}: {parts[2]} is {global_scale.dtype.name} {list(global_scale.shape)}, not one number in "
            "float32"
        )
    return StoredWeight(name, (rows, columns), Nvfp4(divides), parts)


def global_scale(largest: np.float32, dtype: np.dtype) -> np.float32:
    """Return what scales are divided by, where `largest` is the largest magnitude of all weights
    that share it, in `dtype`.

    It is a number of that dtype; 1 where the dtype holds none.
    """

    import ml_dtypes

    def rounded(number: Any) -> np.float32:
        return np.float32(np.float32(number).astype(dtype))

    with np.errstate(over="ignore"):
        # a quotient by way of the reciprocal, as torch divides a number by a tensor
        inverse = rounded(np.float32(1) / max(largest, np.float32(ml_dtypes.finfo(dtype).tiny)))
        scale = rounded(inverse * np.float32(E4M3_MAX * E2M1_MAX))
    return scale if np.isfinite(scale) else np.float32(1)


def encode(weight: np.ndarray, global_scale: np.float32) -> tuple[np.ndarray, np.ndarray]:
    """Return codes ``[rows, columns / 2]`` and scales ``[rows, columns / 16]`` of rows that hold no
    infinities or NaN."""
    rows, columns = weight.shape
    wide = weight.astype(np.float32)
    magnitudes = np.abs(wide)
    largest = magnitudes
    for _ in range(4):  # 16 columns by halves: faster than a maximum along so short an axis
        largest = np.maximum(largest[:, ::2], largest[:, 1::2])
    shares = (largest / np.float32(E2M1_MAX)).astype(weight.dtype).astype(np.float32)
    with np.errstate(over="ignore", under="ignore"):
        scales = np.minimum(shares * global_scale, np.float32(E4M3_MAX)).astype(SCALES.numpy())
        scales[scales == 0] = NO_SCALE
        factors = scales.astype(np.float32) / global_scale
        scaled = np.divide(magnitudes, np.repeat(factors, GROUP, axis=1), out=magnitudes)
    codes = np.zeros((rows, columns), np.uint8)
    for number, edge in enumerate(EDGES):
        above = np.greater_equal if number % 2 else np.greater
        codes += above(scaled, np.float32(edge))
    # What is too small for a sign once it is divided has none; what is rounded to 0 keeps its own.
    codes |= (np.less(wide, 0) & (scaled > 0)).view(np.uint8) << np.uint8(3)
    return codes[:, ::2] | codes[:, 1::2] << np.uint8(4), scales


@lru_cache(8)
def _pairs(global_scale: np.float32, divides: bool, dtype: np.dtype) -> np.ndarray:
    """Return the two numbers that a byte of codes stands for with each scale, by the bytes of both:
    ``[256 * 256]`` items."""
    scales = np.arange(256, dtype=np.uint8).view(SCALES.numpy()).astype(np.float32)[:, None]
    magnitudes = np.array(MAGNITUDES, np.float32)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):  # of scales that no weight has
        factors = scales / global_scale if divides else scales * global_scale
        numbers = (factors * np.concatenate([magnitudes, -magnitudes])).astype(dtype)
    pairs = np.empty((256, 16, 16, 2), dtype)
    pairs[..., 0], pairs[..., 1] = numbers[:, None, :], numbers[:, :, None]
    return pairs.view(f"u{2 * dtype.itemsize}").reshape(-1)


def decode(
    codes: np.ndarray, scales: np.ndarray, global_scale: np.float32, divides: bool, out: np.ndarray
) -> None:
    """Write ``code * scale``, a product in fp32 that is rounded to the dtype of `out`, to `out`
    ``[rows, columns]``.

    There are 65536 pairs of numbers that a byte of codes and its scale may stand for: they are
    computed once for a weight and looked up.
    """
    rows, groups = scales.shape
    entries = _scratch.array("entries", rows, groups * GROUP).view(np.uint16)
    scale_bytes = scales.view(np.uint8).astype(np.uint16) << np.uint16(8)
    np.add(codes.reshape(rows, groups, -1), scale_bytes[:, :, None], out=entries.reshape(rows, groups, -1))
    pairs = _pairs(global_scale, divides, out.dtype)
    np.take(pairs, entries, out=out.view(pairs.dtype), mode="clip")


def largest_of(scales: np.ndarray) -> np.float32:
    """Return the largest magnitude among e4m3 scales; NaN where one is that.

    The bits of magnitudes have the order of their numbers.
    """
    bits = (scales.view(np.uint8) & np.uint8(0x7F)).max(initial=0)
    return np.float32(np.uint8(bits).view(SCALES.numpy()))
