"""Numbers of tensors, put together of what several ranks say of the boxes that they hold."""

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

from reshard.core.boxes import Box, first_overlap
from reshard.core.errors import ReshardError
from reshard.digests.numbers import Described, number_of, seed_of

# What a rank tells of a box: its tensor's name; first row, end of rows, first column and number of columns; its sum.
BoxSum = Sequence[Any]


def numbers_of(
    tensors: Mapping[str, Described], told: Iterable[Iterable[BoxSum]], holder: str, hint: str
) -> dict[str, int]:
    """Return the number of each tensor, of what all ranks say of their boxes: each element counts once, however many
    ranks hold it. Raises ReshardError, which names the `holder` and ends with the `hint`, if replicas differ, or all
    ranks together lack a part of a tensor or hold parts that overlap."""
    sums: dict[str, dict[tuple[int, ...], int]] = {name: {} for name in tensors}
    for name, rows, value in (part for of_rank in told for part in of_rank):
        of_name = sums.get(str(name))
        if of_name is None:
            raise ReshardError(f"{holder} holds {name}, which the model does not have: {hint}")
        box = tuple(rows)
        if of_name.setdefault(box, value) != value:
            raise ReshardError(f"ranks of {holder} hold different numbers of {name}: {hint}")
    for name, info in tensors.items():
        _check_cover(name, info, sums[name], holder, hint)
    return {name: number_of(seed_of(name, info), sums[name].values()) for name, info in tensors.items()}


def _check_cover(
    name: str, info: Described, boxes: Iterable[tuple[int, ...]], holder: str, hint: str
) -> None:
    rows, columns = matrix_of(info)
    placed = [Box((start, column), (stop - start, width)) for start, stop, column, width in boxes]
    held = sum(box.volume for box in placed)
    if held != rows * columns or first_overlap(placed) is not None:
        raise ReshardError(
            f"{holder} holds {held:,} of the {rows * columns:,} elements of {name}, or parts of it that overlap: {hint}"
        )


def matrix_of(info: Described) -> tuple[int, int]:
    """Return the rows and columns of a tensor.

    >>> from types import SimpleNamespace
    >>> matrix_of(SimpleNamespace(shape=(3, 4, 5))), matrix_of(SimpleNamespace(shape=()))
    ((3, 20), (1, 1))
    """
    return (info.shape[0] if info.shape else 1), prod(info.shape[1:])
