"""The factor before ``B @ A``: alpha over the rank, or over its square root (rsLoRA)."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from math import isfinite, sqrt
from typing import Any

from reshard.core.errors import ReshardError


@dataclass(frozen=True)
class Scale:
    """The scale of one layer's adapter."""

    rank: int
    alpha: float
    rslora: bool = False

    @property
    def factor(self) -> float:
        """The factor of ``B @ A``."""
        return self.alpha / (sqrt(self.rank) if self.rslora else self.rank)


def most_common(values: Iterable[float]) -> float:
    """Return the value that occurs most often, the smallest of several such."""
    counts = Counter(values)
    return min(counts, key=lambda value: (-counts[value], value))


def as_number(value: Any, name: str, where: object) -> float:
    """Return a positive number of a config. Raises ReshardError for anything else."""
    number = value if type(value) in (int, float) else float("nan")
    if not isfinite(number) or number <= 0:
        raise ReshardError(f"{where}: {name} is {value!r:.80}, not a positive number")
    return number
