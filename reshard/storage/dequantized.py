"""Weights of a Hugging Face directory that are stored as codes with scales: where those are, and what they stand for.

Block-wise fp8 (e4m3) as DeepSeek-V3 publishes it: ``weight = fp8 * weight_scale_inv`` (its technical report, section 3.3;
``weight_dequant`` in its inference code). What other packages write is found by
`reshard.storage.compressed` and `reshard.storage.modelopt`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

import numpy as np

from reshard.core.dtypes import Dtype
from reshard.core.errors import ReshardError
from reshard.formats.safetensors import Tensor
from reshard.formats.small_files import whole_numbers
from reshard.storage import fp8, nvfp4

MAX_BLOCK = 1 << 20


class Words(NamedTuple):
    """How the codes of a weight are packed: the bits of each, the weight's shape, and where its zero points are stored, which
    are all 0 where that is None."""

    bits: int
    shape: tuple[int, int]
    zeros: str | None


class Fp4(NamedTuple):
    """That the codes of a weight are nvfp4, whose third tensor is one number: the weight's shape, and whether scales are divided or
    multiplied by that."""

    shape: tuple[int, int]
    divides: bool


class Codes(NamedTuple):
    """Where a weight lies that is stored as codes: the tensors that belong to it, its codes and their scales first; how many
    rows and columns of it share a scale; and how its codes are packed, if they are."""

    stored: tuple[str, ...]
    block: tuple[int, int]
    packed: Words | Fp4 | None = None

    def columns(self, columns: int) -> int:
        """How many scales there are for rows of so many `columns`."""
        return -(-columns // self.block[1])


def fp8_blocks(config: Mapping[str, Any], stored: Mapping[str, Tensor], where: str) -> dict[str, Codes]:
    """The weights among `stored` that are fp8 blocks, by name. Raises ReshardError where the ``quantization_config`` or their
    scales do not add up."""
    block = config.get("weight_block_size") or (fp8.BLOCK, fp8.BLOCK)
    if not is_block(block):
        raise ReshardError(f"{where}: weight_block_size is {block!r:.80}, not two positive whole numbers")
    found = {}
    for scale in (name for name in stored if name.endswith(fp8.SCALE_SUFFIX)):
        name = scale.removesuffix(fp8.SCALE_SUFFIX)
        weight, scales = stored.get(name), stored[scale]
        if (
            weight is None
            or weight.dtype != fp8.FP8
            or len(weight.shape) != 2
            or scales.dtype.name != "float32"
        ):
            raise ReshardError(f"{where}: {scale} does not belong to an fp8 (e4m3) weight, or is not float32")
        blocks = tuple(-(-n // b) for n, b in zip(weight.shape, block, strict=True))
        if scales.shape != blocks:
            raise ReshardError(
                f"{where}: {scale} has shape {list(scales.shape)}, expected {list(blocks)} for "
                f"blocks of {tuple(block)}"
            )
        found[name] = Codes((name, scale), (block[0], block[1]))
    return found


def fp4_codes(parts: tuple[str, str, str], stored: Mapping[str, Tensor], where: str, divides: bool) -> Codes:
    """The nvfp4 weight of these stored tensors: its codes, their scales, and the number that those are divided or multiplied by.
    Raises ReshardError where one is missing, or they do not add up."""
    for part in parts[1:]:
        if part not in stored:
            raise ReshardError(f"{where} holds {parts[0]} without {part}, and nvfp4 weights need both")
    codes, scales, number = (stored[part] for part in parts)
    if codes.dtype.name != "uint8" or len(codes.shape) != 2 or codes.shape[1] % (nvfp4.GROUP // 2):
        raise ReshardError(
            f"{where}: {parts[0]} is {codes.dtype.name} {list(codes.shape)}, which are no codes of nvfp4: those are uint8 with two "
            f"columns in a byte, and a scale is for {nvfp4.GROUP} columns, {nvfp4.GROUP // 2} bytes"
        )
    rows, columns = codes.shape[0], codes.shape[1] * 2
    expected = (rows, columns // nvfp4.GROUP)
    if scales.dtype != nvfp4.SCALES or scales.shape != expected:
        raise ReshardError(
            f"{where}: {parts[1]} is {scales.dtype.name} {list(scales.shape)}, expected {nvfp4.SCALES.name} {list(expected)} for nvfp4 "
            f"weights of [{rows}, {columns}]"
        )
    if number.dtype.name != "float32" or number.shape not in ((1,), ()):
        raise ReshardError(
            f"{where}: {parts[2]} is {number.dtype.name} {list(number.shape)}, not one number in float32"
        )
    return Codes(parts, (1, nvfp4.GROUP), Fp4((rows, columns), divides))


def is_block(block: Any) -> TypeGuard[Sequence[int]]:
    """Whether a config says rows and columns of a block."""
    return whole_numbers(block, 2, 1) and len(block) == 2 and max(block) <= MAX_BLOCK


def dequantize(
    quantized: np.ndarray,
    scales: np.ndarray,
    block: tuple[int, int],
    row: int,
    out: np.ndarray,
    codes: Dtype = fp8.FP8,
) -> None:
    """Write ``code * scale``, a product in fp32 that is rounded to the dtype of `scales` and then to that of `out`, to `out
    [rows, columns]`.

    `quantized [rows, columns]` are the bytes of `codes`, fp8 or int8, the first of which are `row` rows into their
    block; `scales` has one for each `block` (rows, columns). A block has 256 possible numbers, so each
    is computed once and looked up.
    """
    rows, columns = quantized.shape
    height, width = block
    across = scales.shape[1]
    numbers = np.arange(256, dtype=np.uint8).view(codes.numpy()).astype(np.float32)
    index_dtype = np.uint16 if across <= 256 else np.uint32
    first_entry = (np.arange(columns) // width * 256).astype(index_dtype)
    # Blocks of a few rows are looked up in one table, as many as 16 bits can tell apart.
    together = 1 if height >= 32 else max(1, 256 // across)
    bits = np.dtype(f"u{out.itemsize}")
    for first in range(0, len(scales), together):
        factors = scales[first : first + together]
        here = slice(max(0, first * height - row), min(rows, (first + len(factors)) * height - row))
        with np.errstate(over="ignore", invalid="ignore"):
            table = (factors.astype(np.float32)[:, :, None] * numbers).astype(scales.dtype).astype(out.dtype)
        entries = quantized[here] + first_entry
        if together > 1:
            below = (np.arange(here.start, here.stop) + row) // height - first
            entries += (below * across * 256).astype(index_dtype)[:, None]
        np.take(table.view(bits).reshape(-1), entries, out=out.view(bits)[here], mode="clip")
