"""Weights of an output that are stored as codes with scales, each made of a slab of rows."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import xxhash

from reshard.core.dtypes import Dtype
from reshard.core.errors import ReshardError
from reshard.storage.io.streams import SLAB_BYTES, StripWriter, TensorInfo

# Reads rows `start` .. `stop` of a weight, in the dtype that is to be quantized; valid until the next call.
Reader = Callable[[int, int], np.ndarray]
# Reads the slabs of any weight of the source, by its name, in the dtype that it has in the output; each is valid until the next.
TensorReader = Callable[[str], Iterator[np.ndarray]]
# Makes codes and scales of rows.
Quantize = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]


class Quantized(ABC):
    """How the weights with these `names` are stored: their codes under the weight's name, with `codes_suffix` where that says
    more, with an end that says `suffix` their scales, of which there is a row for so many `rows` of the weight, and, with
    `more_ends`, small tensors."""

    suffix: str
    rows: int
    codes_suffix = ""
    more_ends: tuple[str, ...] = ()
    columns = 1  # which a weight has so many times, or cannot be stored so

    def __init__(self, names: Iterable[str]) -> None:
        self.names = frozenset(names)

    @abstractmethod
    def prepare(
        self, name: str, info: TensorInfo, look: TensorReader
    ) -> tuple[Quantize, dict[str, np.ndarray]]:
        """What quantizes the rows of a weight, a run of them that begins where a row of scales does, to codes of the shape that they
        are stored in and their scales; and what else is stored of it, by the ends `more_ends`. Who needs to know more of this weight,
        or of others, may `look`, as often as needed."""

    @abstractmethod
    def dtypes(self, info: TensorInfo) -> tuple[Dtype, Dtype]:
        """Of the codes of such a weight, and of its scales."""

    @abstractmethod
    def scale_shape(self, info: TensorInfo) -> tuple[int, ...]:
        """The shape of the scales of such a weight."""

    @abstractmethod
    def config(self, original: Any, kept: list[str]) -> dict[str, Any]:
        """The ``quantization_config`` of a checkpoint that had `original`, where the modules `kept` are as they were."""

    def codes_shape(self, info: TensorInfo) -> tuple[int, ...]:
        """The shape of the codes of such a weight, as they are stored."""
        return info.shape

    def more(self, info: TensorInfo) -> dict[str, tuple[Dtype, tuple[int, ...]]]:
        """The dtypes and shapes of what else is stored of such a weight, in one dim, by the ends `more_ends`."""
        return {}

    def parts(self, name: str) -> tuple[str, ...]:
        """The stored tensors that a canonical tensor becomes, its codes first."""
        ends = (self.codes_suffix, self.suffix, *self.more_ends)
        return tuple(name + end for end in ends) if name in self.names else (name,)

    def stored(self, name: str, info: TensorInfo) -> dict[str, tuple[Dtype, tuple[int, ...]]]:
        """Their dtypes and shapes."""
        if name not in self.names:
            return {name: (info.dtype, info.shape)}
        codes, scales = self.dtypes(info)
        found = {
            name + self.codes_suffix: (codes, self.codes_shape(info)),
            name + self.suffix: (scales, self.scale_shape(info)),
        }
        return found | {name + end: one for end, one in self.more(info).items()}

    def copy(
        self, name: str, info: TensorInfo, read: Reader, writer: StripWriter, look: TensorReader
    ) -> dict[str, str]:
        """Stream one quantized weight, each row of which `read` reads once and in order; the checksums of its parts."""
        quantize, more = self.prepare(name, info, look)
        weight_digest, scale_digest = xxhash.xxh3_128(), xxhash.xxh3_128()
        codes_name, scales_name = name + self.codes_suffix, name + self.suffix
        for start, stop in info.slabs(SLAB_BYTES, self.rows):
            weight, scales = quantize(read(start, stop))
            check_finite(name, scales, "; drop --quantize")
            for part, row, values, digest in (
                (codes_name, start, weight, weight_digest),
                (scales_name, start // self.rows, scales, scale_digest),
            ):
                digest.update(memoryview(np.ascontiguousarray(values).view(np.uint8).reshape(-1)))
                writer.write_rows(part, row, np.ascontiguousarray(values))
        checksums = {codes_name: weight_digest.hexdigest(), scales_name: scale_digest.hexdigest()}
        for end, numbers in more.items():
            writer.write_rows(name + end, 0, numbers[:, None])
            checksums[name + end] = xxhash.xxh3_128_hexdigest(numbers.tobytes())
        return checksums


def check_finite(name: str, scales: np.ndarray, advice: str = "") -> None:
    """Raise ReshardError where a weight has infinities or NaN, of which its scales tell."""
    if not np.isfinite(scales.astype(np.float32)).all():
        raise ReshardError(
            f"{name} holds infinities or NaN, and quantizing would make all that shares a scale with one NaN{advice}"
        )
