"""Codecs: what the elements of a trainer's shard become in the engine, while they are copied.

A copy names its codec by its number in `CODECS`. Its widths are bytes of the destination; the codec
gives those of the source. Copies that are packed for another member are encoded on the side where
they are wider, so that the narrower form travels.

A check compares bit for bit. Both ends digest elements in the engine's dtype. Blocks that travel
are digested as codes and scales; of blocks that the engine's side makes, both ends digest the bf16
that they are made of, since a trainer's rank may not have all of a block.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import numpy as np

from reshard.core.dtypes import DTYPES, Dtype
from reshard.quantization.fp8_blocks import BLOCK, ROUNDINGS


@dataclass(frozen=True)
class Codec:
    """A cast of each element to the nearest one of another dtype, ties to even, as torch's
    ``copy_`` and with it the engines' loaders make it."""

    source: Dtype
    destination: Dtype

    def encode(self, rows: np.ndarray) -> np.ndarray:
        """Return what bytes ``[rows, width]`` of the source become."""
        values = np.ascontiguousarray(rows).view(self.source.numpy())
        with np.errstate(over="ignore", invalid="ignore"):  # inf and NaN are weights like any other
            encoded: np.ndarray = values.astype(self.destination.numpy()).view(np.uint8)
        return encoded

    def __str__(self) -> str:
        return f"{self.source.name} to {self.destination.name}"


@dataclass(frozen=True)
class BlockCodec(Codec):
    """Codes with a scale for each block of a rank's local tensor, made of the block's elements in bf16.

    `rounding` names how a scale is rounded. A block may come in pieces, so a table of copies does not carry this
    codec out: its maker does (`reshard.refit.codecs.makers`). A block has `side` rows and columns.
    """

    rounding: str
    side: ClassVar[int]

    def encode(self, rows: np.ndarray) -> np.ndarray:
        """Raise NotImplementedError: whole blocks are encoded, not elements."""
        raise NotImplementedError(f"{self} is made of whole blocks")


@dataclass(frozen=True)
class Fp8BlockCodec(BlockCodec):
    """fp8 with an fp32 scale for each 128x128 block of a rank's local tensor, cut off at its end.

    The codes and scales are those that vLLM's ``per_block_cast_to_fp8``
    (``vllm/utils/deep_gemm.py``) makes of bf16; fp32 is rounded to bf16 first, as vLLM's loader
    does. `rounding`, one of `ROUNDINGS`, says how a block's largest magnitude / 448 becomes its
    scale. `reshard.refit.fp8_blocks` makes them.
    """

    side = BLOCK

    def __str__(self) -> str:
        return f"{super().__str__()} blocks, {ROUNDINGS[self.rounding]}"


PLAIN = 0
BYTES = Codec(DTYPES["uint8"], DTYPES["uint8"])
# Casts that lose nothing, and the one that trainers with parameters in fp32 make for their own
# forward. Casts to fp16 are left out: they make large numbers infinite.
CODECS = (
    BYTES,
    Codec(DTYPES["float32"], DTYPES["bfloat16"]),
    Codec(DTYPES["bfloat16"], DTYPES["float32"]),
    Codec(DTYPES["float16"], DTYPES["float32"]),
    *(
        Fp8BlockCodec(DTYPES[source], DTYPES["float8_e4m3fn"], rounding)
        for source in ("bfloat16", "float32")
        for rounding in ROUNDINGS
    ),
)
IN_BLOCKS = np.array([isinstance(codec, BlockCodec) for codec in CODECS])
# Rows and columns of the blocks of each codec; others make each element by itself.
SIDES = np.array([codec.side if isinstance(codec, BlockCodec) else 1 for codec in CODECS])
SOURCE_SIZES = np.array([codec.source.size for codec in CODECS])
DESTINATION_SIZES = np.array([codec.destination.size for codec in CODECS])
WIDENS = DESTINATION_SIZES > SOURCE_SIZES


def codec_between(source: str, destination: str, rounding: str | None = None) -> int | None:
    """Return the number of the codec from one dtype to another, with a `rounding` into blocks with
    scales; None where there is none, as for codes that come without their scales."""
    if source == destination and rounding is None:
        return PLAIN
    for number, codec in enumerate(CODECS):
        between = codec.source.name, codec.destination.name
        if between == (source, destination) and getattr(codec, "rounding", None) == rounding:
            return number
    return None


@cache
def block_codec(rounding: str, source: str = "bfloat16") -> int:
    """Return the number of the codec from bf16, or fp32, to blocks with a rounding. Raises ValueError for an unknown
    one."""
    for number, codec in enumerate(CODECS):
        if isinstance(codec, BlockCodec) and (codec.source.name, codec.rounding) == (source, rounding):
            return number
    raise ValueError(f"{rounding} is none of {sorted(ROUNDINGS)}, or {source} no source of blocks")


# The number of each codec's rounding among those of all codecs of blocks, those of fp8 first and in the order of
# `ROUNDINGS`; of codecs that make no blocks, one that is past the end. The fragments of a block may have several source
# dtypes, but one rounding.
_ROUNDINGS = [*dict.fromkeys(codec.rounding for codec in CODECS if isinstance(codec, BlockCodec)), None]
CODEC_ROUNDINGS = np.array([_ROUNDINGS.index(getattr(codec, "rounding", None)) for codec in CODECS])
# For each codec of blocks the number of the codec that makes the bf16 that blocks are made of;
# other codecs stand for themselves.
BEFORE_BLOCKS = np.array(
    [
        codec_between(codec.source.name, "bfloat16") if isinstance(codec, BlockCodec) else number
        for number, codec in enumerate(CODECS)
    ]
)


def bytes_in_source(count: Any, codec: Any) -> Any:
    """Return how many bytes of the source become `count` bytes of the destination.

    >>> bytes_in_source(np.array([8, 8]), np.array([PLAIN, codec_between("float32", "bfloat16")])).tolist()
    [8, 16]
    """
    return count // DESTINATION_SIZES[codec] * SOURCE_SIZES[codec]


def bytes_in_destination(count: Any, codec: Any) -> Any:
    """Return how many bytes of the destination `count` bytes of the source become."""
    return count // SOURCE_SIZES[codec] * DESTINATION_SIZES[codec]
