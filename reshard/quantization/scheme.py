"""The interface of a quantization scheme, and a weight that is stored by one."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, NamedTuple, NoReturn, Protocol

import numpy as np

from reshard.core.dtypes import Dtype
from reshard.core.errors import ReshardError


class StoredTensor(Protocol):
    """A tensor of a checkpoint, as far as schemes need to know it."""

    @property
    def dtype(self) -> Dtype:
        """Its dtype."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""


class StoredWeight(NamedTuple):
    """A weight matrix that a checkpoint stores as codes: its `name`, its `shape` once it is
    decoded, its `scheme`, and the names of its `tensors`: codes, scales, and whatever else belongs
    to it."""

    name: str
    shape: tuple[int, ...]
    scheme: "Scheme"
    tensors: tuple[str, ...]

    def decode(self, parts: Sequence[np.ndarray], start: int, out: np.ndarray, where: str) -> None:
        """Write the rows from `start` on to `out` ``[rows, columns]``, in its dtype.

        `parts` are the rows of `tensors` that `Scheme.stored_rows` names, ``[rows, columns]`` each;
        `where` begins an error message. Raises ReshardError for scales that are no numbers, and
        where the dtype of `out` cannot hold the weights.
        """
        self.scheme.decode(self, parts, start, out, where)

    def check_scales(self, scales: np.ndarray, where: str) -> None:
        """Raise ReshardError unless all scales are finite."""
        if not np.isfinite(scales.astype(np.float32)).all():
            raise ReshardError(f"{where}: {self.tensors[1]} holds infinities or NaN, which are not scales")

    def check_fp16(self, scales: np.ndarray, out: np.ndarray, where: str) -> None:
        """Raise ReshardError if fp16, which alone has less room than the products, has made
        infinities of them."""
        if np.float16 in (scales.dtype, out.dtype) and np.isinf(out).any():
            self.too_large("float16", where)

    def too_large(self, dtype: str, where: str) -> NoReturn:
        """Raise ReshardError for numbers that `dtype` cannot hold."""
        raise ReshardError(
            f"{where}: {self.name} has numbers that are too large for {dtype} once dequantized"
        )


# Finds the largest magnitude among some weights of a checkpoint, by their names, and their dtype.
FindLargest = Callable[[Sequence[str]], tuple[np.float32, np.dtype]]


class Scheme(ABC):
    """A way to store a weight matrix ``[rows, columns]`` as codes with scales.

    A scheme is a value: two that are equal mean the same. What a conversion writes also has
    `suffixes`, `stored` and `encode`; a scheme that is only read leaves them out.
    """

    # The ends of the names of what is written of a weight: codes, scales, and whatever else.
    suffixes: ClassVar[tuple[str, ...]] = ()
    column_multiple: ClassVar[int] = 1  # which has to divide the columns of a weight

    @abstractmethod
    def scale_block(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return how many rows and columns of a weight share a scale."""

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of a weight's scales."""
        return tuple(-(-n // block) for n, block in zip(shape, self.scale_block(shape), strict=True))

    def stored_rows(self, shape: tuple[int, ...], start: int, stop: int) -> list[tuple[int, int]]:
        """Return the rows of each stored tensor that are needed to decode rows `start` to `stop` of
        a weight."""
        rows, _ = self.scale_block(shape)
        return [(start, stop), (start // rows, -(-stop // rows))]

    @abstractmethod
    def decode(
        self, weight: StoredWeight, parts: Sequence[np.ndarray], start: int, out: np.ndarray, where: str
    ) -> None:
        """Decode rows (`StoredWeight.decode`)."""

    def names_sharing_scale(self, name: str) -> tuple[str, ...]:
        """Return the names of the weights that share a scale with this one, itself among them."""
        return (name,)

    def stored(self, shape: tuple[int, ...], dtype: Dtype) -> dict[str, tuple[Dtype, tuple[int, ...]]]:
        """Return the dtype and shape of what is written of a weight in `dtype`, by `suffixes`."""
        raise NotImplementedError(f"{self} is not written")

    def small_tensors(
        self, name: str, shape: tuple[int, ...], find_largest: FindLargest
    ) -> dict[str, np.ndarray]:
        """Return what is written of a weight besides codes and scales, by the end of its name."""
        return {}

    def encode(self, rows: np.ndarray, small: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Return the codes and scales of rows that begin where a row of scales does; `small` are
        `small_tensors`."""
        raise NotImplementedError(f"{self} is not written")


def check_finite(name: str, scales: np.ndarray, advice: str = "") -> None:
    """Raise ReshardError if a weight holds infinities or NaN, which its scales show."""
    if not np.isfinite(scales.astype(np.float32)).all():
        raise ReshardError(
            f"{name} holds infinities or NaN, and quantizing would make all that shares a scale with one "
            f"NaN{advice}"
        )
