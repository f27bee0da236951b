"""Block-wise fp8 (e4m3) weights, as DeepSeek-V3 publishes them: one fp32 scale for each 128x128 block.

``weight = fp8 * weight_scale_inv`` (DeepSeek-V3 technical report, section 3.3; ``weight_dequant`` in its
inference code).
"""

from collections.abc import Callable, Iterable

import numpy as np
import xxhash

from reshard.core.dtypes import DTYPES, Dtype
from reshard.core.errors import ReshardError
from reshard.disk.streams import SLAB_BYTES, StripWriter, TensorInfo

BLOCK = 128
SCALE_SUFFIX = "_scale_inv"
E4M3_MAX = 448.0
FP8, FP32 = DTYPES["float8_e4m3fn"], DTYPES["float32"]

# Matrices that published fp8 checkpoints keep in high precision.
HIGH_PRECISION = (
    "embed_tokens.weight",
    "lm_head.weight",
    "shared_head.head.weight",
    "mlp.gate.weight",
    "eh_proj.weight",
)


def quantizable(name: str, info: TensorInfo) -> bool:
    """Whether a weight is one of those that published fp8 checkpoints quantise."""
    return len(info.shape) == 2 and name.endswith(".weight") and not name.endswith(HIGH_PRECISION)


def quantize(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Quantise rows that start at a block's border: fp8 of the same shape, and fp32 scales ``[rows / 128,
    columns / 128]``.

    A block's scale is its largest magnitude / 448, so that this element becomes the largest e4m3 number;
    blocks of zeros get scale 1.
    """
    n, m = rows.shape
    blocks = np.zeros((-(-n // BLOCK) * BLOCK, -(-m // BLOCK) * BLOCK), np.float32)
    blocks[:n, :m] = rows.astype(np.float32)
    blocks = blocks.reshape(blocks.shape[0] // BLOCK, BLOCK, -1, BLOCK)
    largest = np.abs(blocks).max((1, 3))
    scales = largest / np.float32(E4M3_MAX)
    # zeros, and what is too small for a scale of its own
    scales = np.where(scales == 0, np.float32(1), scales).astype(np.float32)
    scaled = (blocks / scales[:, None, :, None]).reshape(blocks.shape[0] * BLOCK, -1)[:n, :m]
    return scaled.astype(FP8.numpy()), scales


def dequantise(
    quantised: np.ndarray, scales: np.ndarray, block: tuple[int, int], row: int, out: np.ndarray
) -> None:
    """Write ``e4m3 * scale``, a product in fp32 that is then rounded to the dtype of `out`, to `out [rows,
    columns]`.

    `quantised [rows, columns]` are the e4m3 numbers' bytes, the first of which are `row` rows into their
    block; `scales` are fp32, one for each `block` (rows, columns). A block has 256 possible numbers, so each
    is computed once and looked up.
    """
    rows, columns = quantised.shape
    height, width = block
    numbers = np.arange(256, dtype=np.uint8).view(FP8.numpy()).astype(np.float32)
    index_dtype = np.uint16 if scales.shape[1] <= 256 else np.uint32
    first_entry = (np.arange(columns) // width * 256).astype(index_dtype)
    bits = np.dtype(f"u{out.itemsize}")
    for factors in scales:
        here = slice(max(0, -row), min(rows, height - row))
        with np.errstate(over="ignore", invalid="ignore"):
            table = (factors[:, None] * numbers).astype(out.dtype)
        entries = quantised[here] + first_entry
        np.take(table.view(bits).reshape(-1), entries, out=out.view(bits)[here], mode="clip")
        row -= height


class Fp8Blocks:
    """The weights of an output that are stored as fp8 with scales; `names` are theirs."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = frozenset(names)

    def parts(self, name: str) -> tuple[str, ...]:
        """The stored tensors that a canonical tensor becomes."""
        return (name, name + SCALE_SUFFIX) if name in self.names else (name,)

    def stored(self, name: str, info: TensorInfo) -> dict[str, tuple[Dtype, tuple[int, ...]]]:
        """Their dtypes and shapes."""
        if name not in self.names:
            return {name: (info.dtype, info.shape)}
        return {
            name: (FP8, info.shape),
            name + SCALE_SUFFIX: (FP32, tuple(-(-n // BLOCK) for n in info.shape)),
        }

    def copy(
        self, name: str, info: TensorInfo, read: Callable[[int, int], np.ndarray], writer: StripWriter
    ) -> dict[str, str]:
        """Stream one quantised weight from `read(start, stop)`; the checksums of its parts."""
        weight_digest, scale_digest = xxhash.xxh3_128(), xxhash.xxh3_128()
        for start, stop in info.slabs(SLAB_BYTES, BLOCK):
            weight, scales = quantize(read(start, stop))
            if not np.isfinite(scales).all():
                raise ReshardError(
                    f"{name} holds infinities or NaN, and fp8 would make the whole block of "
                    f"each NaN; drop --quantize"
                )
            for part, row, values, digest in (
                (name, start, weight, weight_digest),
                (name + SCALE_SUFFIX, start // BLOCK, scales, scale_digest),
            ):
                digest.update(memoryview(np.ascontiguousarray(values).view(np.uint8).reshape(-1)))
                writer.write_rows(part, row, np.ascontiguousarray(values))
        return {name: weight_digest.hexdigest(), name + SCALE_SUFFIX: scale_digest.hexdigest()}
