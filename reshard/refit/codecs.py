"""Codecs: what the elements of a trainer's shard become in the engine, while they are copied.

A copy names its codec by its number in `CODECS`. Its widths are counted in bytes of the destination, from
which the codec tells those of the source. What is packed for another member is encoded on the side where it
is wider, so that the narrower form travels. Both ends digest what is in the engine's dtype, so that a check
compares the encoded elements bit for bit; of blocks that the engine's side makes both digest the bf16 that they are made
of, since the trainer's may not have them whole, and of blocks that travel what was made.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from reshard.core.dtypes import DTYPES, Dtype
from reshard.quantization.fp8_blocks import ROUNDINGS


@dataclass(frozen=True)
class Codec:
    """Elements of one dtype, each rounded to the nearest of another, ties to even, as torch's ``copy_`` and
    with it the engines' own loaders do."""

    source: Dtype
    destination: Dtype

    def encode(self, rows: np.ndarray) -> np.ndarray:
        """What bytes ``[rows, width]`` of the source become."""
        values = np.ascontiguousarray(rows).view(self.source.numpy())
        with np.errstate(over="ignore", invalid="ignore"):  # inf and NaN are weights like any other
            encoded: np.ndarray = values.astype(self.destination.numpy()).view(np.uint8)
        return encoded

    def __str__(self) -> str:
        return f"{self.source.name} to {self.destination.name}"


@dataclass(frozen=True)
class BlockCodec(Codec):
    """fp8 with an fp32 scale for each block of 128x128 elements of a rank's local tensor, cut off at its end:
    what vLLM's ``per_block_cast_to_fp8`` makes (``vllm/utils/deep_gemm.py``) of bf16. fp32 is rounded to that first, as
    vLLM's loader does. `reshard.refit.fp8_blocks.strips` carries it out, since a block may come in pieces.

    `rounding` says how a block's largest magnitude / 448 becomes its scale: one of `ROUNDINGS`.
    """

    rounding: str

    def encode(self, rows: np.ndarray) -> np.ndarray:
        """Not by the element."""
        raise NotImplementedError(f"{self} is made of whole blocks")

    def __str__(self) -> str:
        return f"{super().__str__()} blocks, {ROUNDINGS[self.rounding]}"


PLAIN = 0
BYTES = Codec(DTYPES["uint8"], DTYPES["uint8"])
# Those that lose nothing, and the one that trainers with parameters in fp32 make for their own forward. Casts to
# fp16 are none of them, since they make large numbers infinite.
CODECS = (
    BYTES,
    Codec(DTYPES["float32"], DTYPES["bfloat16"]),
    Codec(DTYPES["bfloat16"], DTYPES["float32"]),
    Codec(DTYPES["float16"], DTYPES["float32"]),
    *(
        BlockCodec(DTYPES[source], DTYPES["float8_e4m3fn"], rounding)
        for source in ("bfloat16", "float32")
        for rounding in ROUNDINGS
    ),
)
BLOCKWISE = np.array([isinstance(codec, BlockCodec) for codec in CODECS])
SOURCE_SIZES = np.array([codec.source.size for codec in CODECS])
DESTINATION_SIZES = np.array([codec.destination.size for codec in CODECS])
WIDENS = DESTINATION_SIZES > SOURCE_SIZES


def codec_between(source: str, destination: str, rounding: str | None = None) -> int | None:
    """The number of the codec from one dtype to another, with a `rounding` into blocks with scales; None where
    there is none."""
    if source == destination:
        return PLAIN
    for number, codec in enumerate(CODECS):
        between = codec.source.name, codec.destination.name
        if between == (source, destination) and getattr(codec, "rounding", None) == rounding:
            return number
    return None


def block_codec(rounding: str, source: str = "bfloat16") -> int:
    """The number of the codec from bf16, or fp32, to blocks of fp8 with this rounding."""
    number = codec_between(source, "float8_e4m3fn", rounding)
    if number is None:
        raise ValueError(f"{rounding} is none of {sorted(ROUNDINGS)}, or {source} no source of blocks")
    return number


def by_rounding(codecs: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """The roundings of codecs of blocks, and the mask of those that have each: a block's fragments may have several
    sources, but one rounding.

    >>> [(name, some.tolist()) for name, some in by_rounding(np.array([PLAIN, block_codec("fp32", "float32")]))]
    [('fp32', [False, True])]
    """
    for rounding in ROUNDINGS:
        numbers = [n for n, codec in enumerate(CODECS) if getattr(codec, "rounding", None) == rounding]
        these = np.isin(codecs, numbers)
        if these.any():
            yield rounding, these


# By the number of a codec of blocks that of what makes of its source the bf16 that blocks are made of; others as they are.
BEFORE_BLOCKS = np.array(
    [
        codec_between(codec.source.name, "bfloat16") if isinstance(codec, BlockCodec) else number
        for number, codec in enumerate(CODECS)
    ]
)


def bytes_in_source(count: Any, codec: Any) -> Any:
    """How many bytes of the source become so many of the destination.

    >>> bytes_in_source(np.array([8, 8]), np.array([PLAIN, codec_between("float32", "bfloat16")])).tolist()
    [8, 16]
    """
    return count // DESTINATION_SIZES[codec] * SOURCE_SIZES[codec]


def bytes_in_destination(count: Any, codec: Any) -> Any:
    """How many bytes of the destination so many of the source become."""
    return count // SOURCE_SIZES[codec] * DESTINATION_SIZES[codec]
