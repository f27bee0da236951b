"""Codecs: what the elements of a trainer's shard become in the engine, while they are copied.

A copy names its codec by its number in `CODECS`. Its widths are counted in bytes of the destination, from
which the codec tells those of the source. What is packed for another member is encoded on the side where it
is wider, so that the narrower form travels. Both ends digest what is in the engine's dtype, so that a check
compares the encoded elements bit for bit.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from reshard.core.dtypes import DTYPES, Dtype


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


PLAIN = 0
BYTES = Codec(DTYPES["uint8"], DTYPES["uint8"])
# Those that lose nothing, and the one that trainers with parameters in fp32 make for their own forward. Casts to
# fp16 are none of them, since they make large numbers infinite.
CODECS = (
    BYTES,
    Codec(DTYPES["float32"], DTYPES["bfloat16"]),
    Codec(DTYPES["bfloat16"], DTYPES["float32"]),
    Codec(DTYPES["float16"], DTYPES["float32"]),
)
SOURCE_SIZES = np.array([codec.source.size for codec in CODECS])
DESTINATION_SIZES = np.array([codec.destination.size for codec in CODECS])
WIDENS = DESTINATION_SIZES > SOURCE_SIZES


def codec_between(source: str, destination: str) -> int | None:
    """The number of the codec from one dtype to another; None where there is none."""
    if source == destination:
        return PLAIN
    pairs = [(codec.source.name, codec.destination.name) for codec in CODECS]
    return pairs.index((source, destination)) if (source, destination) in pairs else None


def bytes_in_source(count: Any, codec: Any) -> Any:
    """How many bytes of the source become so many of the destination.

    >>> bytes_in_source(np.array([8, 8]), np.array([PLAIN, codec_between("float32", "bfloat16")])).tolist()
    [8, 16]
    """
    return count // DESTINATION_SIZES[codec] * SOURCE_SIZES[codec]


def bytes_in_destination(count: Any, codec: Any) -> Any:
    """How many bytes of the destination so many of the source become."""
    return count // SOURCE_SIZES[codec] * DESTINATION_SIZES[codec]
