"""fp8 (e4m3) with one scale for each block, as DeepSeek-V3 publishes it and vLLM serves it.

``weight = code * weight_scale_inv`` (the technical report of DeepSeek-V3, section 3.3;
``weight_dequant`` in its inference code). A checkpoint's blocks begin at its published tensors;
those that vLLM makes itself begin at a rank's fused tensor.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeGuard

import numpy as np

from reshard.core.dtypes import DTYPES, Dtype
from reshard.core.errors import ReshardError
from reshard.formats.small_files import whole_numbers
from reshard.quantization.scheme import Scheme, StoredTensor, StoredWeight

METHOD = "fp8"
BLOCK = 128
MAX_BLOCK = 1 << 20
SCALE_SUFFIX = "_scale_inv"
E4M3_MAX = 448.0
SMALLEST = 1e-4  # largest magnitude that vLLM takes a block to have at least
SCALE_DTYPES = ("float32", "bfloat16", "float16")  # of published scales
FP8, FP32 = DTYPES["float8_e4m3fn"], DTYPES["float32"]
# How an engine's scales are rounded: as they are; to powers of two (UE8M0), upwards; as vLLM
# leaves them where it makes the second of the first, whose numbers it quantizes again; and, on a GPU too,
# to the bits that files have, where the first differ from these in their last bit.
ROUNDINGS = {
    "fp32": "fp32 scales",
    "ue8m0": "power-of-two scales",
    "twice": "fp32 scales, then power-of-two scales",
    "stored": "fp32 scales",
}


@dataclass(frozen=True)
class Fp8Blocks(Scheme):
    """e4m3 codes with an fp32 scale for each `block` of rows and columns."""

    block: tuple[int, int] = (BLOCK, BLOCK)

    suffixes: ClassVar[tuple[str, ...]] = ("", SCALE_SUFFIX)

    def __str__(self) -> str:
        return f"fp8 in blocks of {self.block[0]}x{self.block[1]}"

    def scale_block(self, shape: tuple[int, ...]) -> tuple[int, int]:
        return self.block

    def decode(
        self, weight: StoredWeight, parts: Sequence[np.ndarray], start: int, out: np.ndarray, where: str
    ) -> None:
        codes, scales = parts
        weight.check_scales(scales, where)
        scales = scales.astype(np.float32)  # some are published in bf16 or fp16
        decode(codes, scales, self.block, start % self.block[0], out)
        weight.check_fp16(scales, out, where)

    def stored(self, shape: tuple[int, ...], dtype: Dtype) -> dict[str, tuple[Dtype, tuple[int, ...]]]:
        return {"": (FP8, shape), SCALE_SUFFIX: (FP32, self.scale_shape(shape))}

    def encode(self, rows: np.ndarray, small: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        return encode(rows)


def is_block(block: Any) -> TypeGuard[Sequence[int]]:
    """Tell whether a config says rows and columns of a block."""
    return whole_numbers(block, 2, 1) and len(block) == 2 and max(block) <= MAX_BLOCK


def has_blocks(config: Mapping[str, Any]) -> bool:
    """Return False for a config that says null for the size of blocks: each matrix has one scale then."""
    return config.get("weight_block_size", BLOCK) is not None


def find_weights(
    config: Mapping[str, Any], tensors: Mapping[str, StoredTensor], where: str
) -> dict[str, StoredWeight]:
    """Return the weights among a checkpoint's `tensors` that are stored in fp8 blocks, by name.

    There are none where the ``quantization_config`` says null for their size (`has_blocks`). Raises ReshardError
    if it and the scales do not add up.
    """
    if not has_blocks(config):
        return {}
    block = config.get("weight_block_size") or (BLOCK, BLOCK)
    if not is_block(block):
        raise ReshardError(f"{where}: weight_block_size is {block!r:.80}, not two positive whole numbers")
    scheme, weights = Fp8Blocks((block[0], block[1])), {}
    for scale in (name for name in tensors if name.endswith(SCALE_SUFFIX)):
        name = scale.removesuffix(SCALE_SUFFIX)
        codes, scales = tensors.get(name), tensors[scale]
        if (
            codes is None
            or codes.dtype != FP8
            or len(codes.shape) not in (2, 3)
            or scales.dtype.name not in SCALE_DTYPES
        ):
            raise ReshardError(
                f"{where}: {scale} does not belong to an fp8 (e4m3) weight, or is not one of {', '.join(SCALE_DTYPES)}"
            )
        *experts, rows, _ = codes.shape
        if experts and rows % block[0]:
            raise ReshardError(
                f"{where}: {name} has {rows} rows for each expert, in blocks of {block[0]}: reshard reads experts in "
                "one tensor where blocks divide their rows"
            )
        expected = (*experts, *scheme.scale_shape(codes.shape[-2:]))
        if scales.shape != expected:
            raise ReshardError(
                f"{where}: {scale} has shape {list(scales.shape)}, expected {list(expected)} for "
                f"blocks of {tuple(block)}"
            )
        weights[name] = StoredWeight(name, codes.shape, scheme, (name, scale))
    return weights


def config_of(scheme: Fp8Blocks, original: Any, unquantized: list[str]) -> dict[str, Any]:
    """Return a ``quantization_config`` as Qwen3 is published with in fp8.

    It names every matrix that stays as it is: else vLLM would take the weights of routers for fp8,
    and transformers a tied output layer. Of the fields of the `original` one, those that these
    blocks do not change are kept.
    """
    ours = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "modules_to_not_convert": unquantized,
        "quant_method": METHOD,
        "weight_block_size": list(scheme.block),
    }
    before = original if isinstance(original, dict) and original.get("quant_method") == METHOD else {}
    return {name: value for name, value in before.items() if name != "ignored_layers"} | ours


def encode(values: np.ndarray, rounding: str = "fp32", divide: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """Return e4m3 codes ``[rows, columns]`` and fp32 scales ``[rows / 128, columns / 128]`` of rows that begin
    where blocks do, bit for bit as vLLM's ``per_block_cast_to_fp8`` makes them on a CPU. What is written to a
    disk and what a refit writes are both this.

    A scale is the largest magnitude of its block, or 1e-4 where that is more, divided by 448, which becomes
    the largest e4m3 number; numbers are multiplied by its reciprocal.

    With `divide` false they are those that it makes on a GPU, where ``/ 448`` is compiled into a
    product. `rounding` is one of `ROUNDINGS`.
    """
    codes, scales = _encode_blocks(_blocks(values), rounding == "ue8m0", divide)
    if rounding == "twice":
        codes, scales = _encode_blocks(codes.astype(np.float32) * scales, True, divide)
    return _unblocked(codes, values.shape), scales[:, 0, :, 0]


def _blocks(values: np.ndarray) -> np.ndarray:
    """Return fp32 ``[rows / 128, 128, columns / 128, 128]``, filled up with zeros."""
    padding = [(0, -n % BLOCK) for n in values.shape]
    padded = np.pad(values.astype(np.float32), padding) if np.any(padding) else values.astype(np.float32)
    return padded.reshape(len(padded) // BLOCK, BLOCK, -1, BLOCK)


def _unblocked(blocks: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    return blocks.reshape(blocks.shape[0] * BLOCK, -1)[: shape[0], : shape[1]]


def _encode_blocks(blocks: np.ndarray, powers_of_two: bool, divide: bool) -> tuple[np.ndarray, np.ndarray]:
    largest = np.maximum(np.abs(blocks).max((1, 3), keepdims=True), np.float32(SMALLEST))
    scales = largest / np.float32(E4M3_MAX) if divide else largest * np.float32(1 / E4M3_MAX)
    if powers_of_two:
        scales = np.exp2(np.ceil(np.log2(scales)))
    with np.errstate(invalid="ignore"):  # of infinities and NaN, which the scales tell of
        scaled = blocks * (np.float32(1) / scales)
    return scaled.astype(FP8.numpy()), scales


def decode(codes: np.ndarray, scales: np.ndarray, block: tuple[int, int], row: int, out: np.ndarray) -> None:
    """Write ``code * scale``, a product in fp32 that is rounded to the dtype of `scales` and then
    to that of `out`.

    `codes` and `out` are ``[rows, columns]``, codes of 8 bits whose first row is `row` rows into
    its block; `scales` has one for each `block` (rows, columns). A block has 256 possible numbers,
    so each is computed once and looked up.
    """
    rows, columns = codes.shape
    height, width = block
    across = scales.shape[1]
    numbers = np.arange(256, dtype=np.uint8).view(codes.dtype).astype(np.float32)
    index_dtype = np.uint16 if across <= 256 else np.uint32
    first_entry: np.ndarray = (np.arange(columns) // width * 256).astype(index_dtype)
    # Blocks of a few rows are looked up in one table, as many as 16 bits can tell apart.
    together = 1 if height >= 32 else max(1, 256 // across)
    bits = np.dtype(f"u{out.itemsize}")
    for first in range(0, len(scales), together):
        factors = scales[first : first + together]
        covered = slice(max(0, first * height - row), min(rows, (first + len(factors)) * height - row))
        with np.errstate(over="ignore", invalid="ignore"):
            table = (factors.astype(np.float32)[:, :, None] * numbers).astype(scales.dtype).astype(out.dtype)
        entries = codes[covered].view(np.uint8) + first_entry
        if together > 1:
            below = (np.arange(covered.start, covered.stop) + row) // height - first
            entries += (below * across * 256).astype(index_dtype)[:, None]
        np.take(table.view(bits).reshape(-1), entries, out=out.view(bits)[covered], mode="clip")
