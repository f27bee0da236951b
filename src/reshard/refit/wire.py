"""What members send each other, as bytes: JSON, integer matrices, and what ranks hold in canonical
coordinates. Nothing is unpickled."""

import json
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from reshard.core.boxes import Box
from reshard.core.placement import LocalTensor, Part


def pack_json(value: Any) -> bytes:
    """JSON, compressed."""
    return zlib.compress(json.dumps(value, separators=(",", ":")).encode(), 1)


def unpack_json(payload: bytes) -> Any:
    """The inverse of `pack_json`; tuples come back as lists."""
    return json.loads(zlib.decompress(payload))


def pack_array(array: np.ndarray) -> bytes:
    """An int64 matrix, compressed."""
    return np.int64(array.shape[1]).tobytes() + zlib.compress(
        np.ascontiguousarray(array, np.int64).tobytes(), 1
    )


def unpack_array(payload: bytes) -> np.ndarray:
    """The inverse of `pack_array`."""
    columns = int(np.frombuffer(payload[:8], np.int64)[0])
    return np.frombuffer(zlib.decompress(payload[8:]), np.int64).reshape(-1, columns)


class Held(NamedTuple):
    """What a trainer's rank holds: its local tensors without their padding, numbered from 0, and the dtype of
    each."""

    tensors: list[LocalTensor]
    dtypes: list[str]


def pack_held(tensors: Sequence[LocalTensor], dtypes: Sequence[str]) -> tuple[bytes, bytes]:
    """Local tensors as JSON (names, dtypes, shapes) and a matrix of their parts.

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


def unpack_held(header: bytes, matrix: bytes) -> Held:
    """The inverse of `pack_held`."""
    said, rows = unpack_json(header), unpack_array(matrix)
    dims = (rows.shape[1] - 2) // 3
    shapes, names = [tuple(shape) for shape in said["shapes"]], said["names"]
    parts: list[list[Part]] = [[] for _ in shapes]
    for index, name, *numbers in rows.tolist():
        n = len(shapes[index])
        offsets, lengths, at = (tuple(numbers[start : start + n]) for start in (0, dims, 2 * dims))
        parts[index].append(Part(names[name], Box(offsets, lengths), at))
    tensors = [
        LocalTensor(index, shape, tuple(some)) for index, (shape, some) in enumerate(zip(shapes, parts))
    ]
    return Held(tensors, said["dtypes"])
