"""The tensors that a trainer's ranks hold (``held``, ``parts``): each local tensor as boxes of the
published ones."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from reshard.core.boxes import Box
from reshard.core.dtypes import DTYPES
from reshard.core.placement import LocalTensor, Part
from reshard.refit.copying.addresses import rows_and_columns
from reshard.refit.protocol.encoding import pack_array, pack_json, readable, unpack_array, unpack_json

MOST_ELEMENTS = 1 << 56  # of a dim, or a local tensor
DTYPE_NUMBERS = {name: number for number, name in enumerate(DTYPES)}


class HeldTensors(NamedTuple):
    """The local tensors of a trainer's rank without their padding, numbered from 0, and the dtype of each."""

    tensors: list[LocalTensor]
    dtypes: list[str]


def pack_held(tensors: Sequence[LocalTensor], dtypes: Sequence[str]) -> tuple[bytes, bytes]:
    """Return local tensors as JSON (names, dtypes, shapes) and a matrix of their parts.

    A row of the matrix is: local tensor, name, then offsets, lengths and place in the local tensor, each of
    as many columns as the tensor with the most dims needs.
    """
    names: dict[str, int] = {}
    dims = max((len(tensor.shape) for tensor in tensors), default=1)
    rows = []
    for index, tensor in enumerate(tensors):
        for part in tensor.parts:
            name = names.setdefault(part.name, len(names))
            missing = (0,) * (dims - len(part.at))
            rows.append(
                (index, name, *part.box.offsets, *missing, *part.box.lengths, *missing, *part.at, *missing)
            )
    header = {"names": list(names), "dtypes": list(dtypes), "shapes": [tensor.shape for tensor in tensors]}
    return pack_json(header), pack_array(np.array(rows, np.int64).reshape(-1, 2 + 3 * dims))


def unpack_held(header: bytes, matrix: bytes, who: str = "a member") -> HeldTensors:
    """Return what `pack_held` packed. Raises ReshardError where `who` cannot hold that."""
    what = f"what {who} says that it holds"
    shapes, names, dtypes = _unpack_header(header, what)
    dims = max(map(len, shapes), default=1)
    rows = unpack_array(matrix, what, [2 + 3 * dims])
    with readable(what):
        _check_parts(rows, shapes, names, dims)
    parts: list[list[Part]] = [[] for _ in shapes]
    for index, name, *numbers in rows.tolist():
        n = len(shapes[index])
        offsets, lengths, at = (tuple(numbers[start : start + n]) for start in (0, dims, 2 * dims))
        parts[index].append(Part(names[name], Box(offsets, lengths), at))
    tensors = [
        LocalTensor(index, shape, tuple(of_tensor))
        for index, (shape, of_tensor) in enumerate(zip(shapes, parts, strict=True))
    ]
    return HeldTensors(tensors, dtypes)


def names_held(header: bytes, who: str) -> set[str]:
    """Return the names of the published tensors of which a rank holds parts, by the header alone.
    Raises ReshardError as `unpack_held` does."""
    _, names, _ = _unpack_header(header, f"what {who} says that it holds")
    return {*names}


def _unpack_header(header: bytes, what: str) -> tuple[list[tuple[int, ...]], list[str], list[str]]:
    """Return the shapes of local tensors, the names of published ones, and the local ones' dtypes."""
    fields = unpack_json(header, what)
    with readable(what):
        shapes, names, dtypes = (
            [tuple(shape) for shape in fields["shapes"]],
            fields["names"],
            fields["dtypes"],
        )
        _check_header(shapes, names, dtypes)
    return shapes, names, dtypes


def _check_header(shapes: list[tuple], names: Any, dtypes: Any) -> None:
    """Raise ValueError where these are no shapes, names and dtypes."""
    if (
        not isinstance(names, list)
        or not all(type(name) is str for name in names)
        or len({*names}) != len(names)
    ):
        raise ValueError("names that are none, or that are there twice")
    if not isinstance(dtypes, list) or len(dtypes) != len(shapes) or not {*dtypes} <= DTYPES.keys():
        raise ValueError(f"dtypes {dtypes!r:.80} of {len(shapes)} tensors")
    for shape in {*shapes}:
        volume = 1
        for length in shape:
            if type(length) is not int or not 0 <= length <= MOST_ELEMENTS:
                raise ValueError(f"a tensor of shape {shape!r:.80}")
            volume *= length
        if len(shape) > 8 or volume > MOST_ELEMENTS:
            raise ValueError(f"a tensor of shape {shape!r:.80}")


def _check_parts(rows: np.ndarray, shapes: list[tuple], names: list[str], dims: int) -> None:
    """Raise ValueError for the first row whose part does not lie within its local tensor."""
    index, name, numbers = rows[:, 0], rows[:, 1], rows[:, 2:].reshape(len(rows), 3, dims)
    _raise_first((index < 0) | (index >= len(shapes)), index, f"a part of tensor {{}} of {len(shapes)}")
    _raise_first((name < 0) | (name >= len(names)), name, f"a part of name {{}} of {len(names)}")
    kinds = {shape: kind for kind, shape in enumerate(dict.fromkeys(shapes))}  # few, of many tensors
    of_kinds = np.zeros((len(kinds), 2, dims), np.int64)
    for known, kind in kinds.items():
        of_kinds[kind, 0, : len(known)], of_kinds[kind, 1, : len(known)] = known, 1
    kind_of = np.fromiter(map(kinds.__getitem__, shapes), np.int64, len(shapes))[index]
    shape, has = of_kinds[kind_of, 0], of_kinds[kind_of, 1].astype(bool)
    offsets, lengths, at = numbers[:, 0], numbers[:, 1], numbers[:, 2]
    wrong = (
        (offsets < 0)
        | (offsets > MOST_ELEMENTS)
        | (at < 0)
        | (at > shape)
        | (lengths > shape - at)
        | (lengths < has)
    )
    _raise_first((wrong | (~has & (numbers != 0).any(1))).any(1), index, "a part that leaves tensor {}")


def _raise_first(wrong: np.ndarray, values: np.ndarray, sentence: str) -> None:
    if wrong.any():
        raise ValueError(sentence.format(values[wrong.argmax()]))


class ShardSizes(NamedTuple):
    """The sizes of a trainer's rank's shards: rows and columns ``[shards, 2]``, and the number of
    each one's dtype in `DTYPES`."""

    shapes: np.ndarray
    dtypes: np.ndarray

    @staticmethod
    def of(tensors: Sequence[LocalTensor], dtypes: Sequence[str]) -> "ShardSizes":
        """Return those of local tensors; a vector is one column, and nothing can be asked of a
        tensor of more than two dims."""
        as_rows = {shape: _rows_and_columns(shape) for shape in {tensor.shape for tensor in tensors}}
        shapes = np.array([as_rows[tensor.shape] for tensor in tensors], np.int64).reshape(-1, 2)
        return ShardSizes(shapes, np.array([DTYPE_NUMBERS[name] for name in dtypes], np.int64))

    @property
    def itemsizes(self) -> np.ndarray:
        """Bytes of an element of each shard."""
        sizes: np.ndarray = np.array([dtype.size for dtype in DTYPES.values()])[self.dtypes]
        return sizes


def _rows_and_columns(shape: tuple[int, ...]) -> tuple[int, int]:
    return (0, 0) if len(shape) > 2 else rows_and_columns(shape, 1)
