"""Block-wise fp8 (e4m3) weights, as DeepSeek-V3 publishes them: one fp32 scale for each 128x128 block."""

from typing import Any

import numpy as np

from reshard.core.dtypes import DTYPES, Dtype
from reshard.storage.io.streams import TensorInfo
from reshard.storage.quantized import Quantize, Quantized, TensorReader

BLOCK = 128
SCALE_SUFFIX = "_scale_inv"
E4M3_MAX = 448.0
FP8, FP32 = DTYPES["float8_e4m3fn"], DTYPES["float32"]


def quantize(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Quantize rows that start at a block's border: fp8 of the same shape, and fp32 scales ``[rows / 128,
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
    with np.errstate(invalid="ignore"):  # of infinities and NaN, which the scales tell of
        scaled = (blocks / scales[:, None, :, None]).reshape(blocks.shape[0] * BLOCK, -1)[:n, :m]
        return scaled.astype(FP8.numpy()), scales


class Fp8Blocks(Quantized):
    """Weights that are stored as fp8, with a scale for each block."""

    suffix, rows = SCALE_SUFFIX, BLOCK

    def prepare(
        self, name: str, info: TensorInfo, look: TensorReader
    ) -> tuple[Quantize, dict[str, np.ndarray]]:
        return quantize, {}

    def dtypes(self, info: TensorInfo) -> tuple[Dtype, Dtype]:
        return FP8, FP32

    def scale_shape(self, info: TensorInfo) -> tuple[int, ...]:
        return tuple(-(-n // BLOCK) for n in info.shape)

    def config(self, original: Any, kept: list[str]) -> dict[str, Any]:
        """As Qwen3 is published in fp8: every matrix that stays as it is is named, for vLLM would take the weights of
        its routers for fp8 else, and transformers a tied output layer. Of the original's other fields what these
        blocks do not change is kept."""
        ours = {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "modules_to_not_convert": kept,
            "quant_method": "fp8",
            "weight_block_size": [BLOCK, BLOCK],
        }
        before = original if isinstance(original, dict) and original.get("quant_method") == "fp8" else {}
        return {name: value for name, value in before.items() if name != "ignored_layers"} | ours
