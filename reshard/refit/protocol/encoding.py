"""What members send each other, as bytes: JSON, integer matrices, and what ranks hold in canonical
coordinates. Nothing is unpickled, and no message takes more memory than `MOST_TEXT` or `MOST_MATRIX`, whatever it says.
"""

import json
import zlib
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np

from reshard.core.boxes import Box
from reshard.core.dtypes import DTYPES
from reshard.core.errors import ReshardError, first_line
from reshard.core.placement import LocalTensor, Part

MOST_TEXT = 32 << 20  # bytes of JSON: ten times what a rank of the largest models publishes
MOST_MATRIX = 512 << 20
MOST_COLUMNS = 1 << 10
MOST_ELEMENTS = 1 << 56  # of a dim, or a local tensor
DIGEST_BYTES = 8


@contextmanager
def readable(what: str) -> Iterator[None]:
    """Inside, what was said by another member is looked at: where that is something else than it should be, a sentence."""
    try:
        yield
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        RecursionError,
        TypeError,
        ValueError,
        zlib.error,
    ) as error:
        raise ReshardError(
            f"{what} cannot be read ({first_line(error)}): give all members the same reshard"
        ) from error


def digest(*payloads: bytes) -> bytes:
    """What tells these messages from others."""
    found = blake2b(digest_size=DIGEST_BYTES)
    for payload in payloads:
        found.update(len(payload).to_bytes(8, "little") + payload)
    return found.digest()


def pack_digests(digests: Sequence[bytes]) -> bytes:
    """Digests one after the other."""
    return b"".join(digests)


def unpack_digests(payload: bytes, count: int, what: str) -> list[bytes]:
    """The inverse of `pack_digests`. Raises ReshardError, saying `what` it is, where it is not so many."""
    if len(payload) != count * DIGEST_BYTES:
        raise ReshardError(
            f"{what} has {len(payload):,} bytes, and not {count * DIGEST_BYTES:,}: give all members the same reshard"
        )
    return [payload[start : start + DIGEST_BYTES] for start in range(0, len(payload), DIGEST_BYTES)]


def pack_json(value: Any) -> bytes:
    """JSON, compressed."""
    return zlib.compress(json.dumps(value, separators=(",", ":")).encode(), 1)


def unpack_json(payload: bytes, what: str = "a message") -> Any:
    """The inverse of `pack_json`; tuples come back as lists. Raises ReshardError, saying `what` it is, where it is none."""
    with readable(what):
        return json.loads(_inflated(payload, MOST_TEXT), parse_constant=_refused)


def _refused(constant: str) -> None:
    raise ValueError(f"{constant} is no number")


def _inflated(payload: bytes, most: int) -> bytes:
    unpacker = zlib.decompressobj()
    data = unpacker.decompress(payload, most + 1)
    if len(data) > most:
        raise ValueError(f"more than {most:,} bytes")
    if not unpacker.eof or unpacker.unused_data:
        raise ValueError(f"{len(payload):,} bytes that end in its middle, or go on behind it")
    return data


def pack_array(array: np.ndarray) -> bytes:
    """An int64 matrix, compressed."""
    return np.int64(array.shape[1]).tobytes() + zlib.compress(
        np.ascontiguousarray(array, np.int64).tobytes(), 1
    )


def unpack_array(payload: bytes, what: str = "a message", widths: Collection[int] = ()) -> np.ndarray:
    """The inverse of `pack_array`. Raises ReshardError, saying `what` it is, where it is none, or has another number of columns
    than one of `widths`."""
    with readable(what):
        columns = int.from_bytes(payload[:8], "little", signed=True)
        data = _inflated(payload[8:], MOST_MATRIX)
        if not 0 < columns <= MOST_COLUMNS or len(data) % (8 * columns) or (widths and columns not in widths):
            raise ValueError(f"{len(data):,} bytes in {columns} columns")
        return np.frombuffer(data, np.int64).reshape(-1, columns)


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


def unpack_held(header: bytes, matrix: bytes, who: str = "a member") -> Held:
    """The inverse of `pack_held`. Raises ReshardError where that is not what `who` can hold."""
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
        LocalTensor(index, shape, tuple(some)) for index, (shape, some) in enumerate(zip(shapes, parts))
    ]
    return Held(tensors, dtypes)


def names_held(header: bytes, who: str) -> set[str]:
    """Return the names of the published tensors of which a rank holds parts, by the header alone. Raises ReshardError as
    `unpack_held` does."""
    _, names, _ = _unpack_header(header, f"what {who} says that it holds")
    return {*names}


def _unpack_header(header: bytes, what: str) -> tuple[list[tuple[int, ...]], list[str], list[str]]:
    """Return the shapes of local tensors, the names of published ones, and the local ones' dtypes."""
    said = unpack_json(header, what)
    with readable(what):
        shapes, names, dtypes = [tuple(shape) for shape in said["shapes"]], said["names"], said["dtypes"]
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
    """Raise ValueError where a row is none of a part that lies within its local tensor."""
    index, name, numbers = rows[:, 0], rows[:, 1], rows[:, 2:].reshape(len(rows), 3, dims)
    _say_first((index < 0) | (index >= len(shapes)), index, f"a part of tensor {{}} of {len(shapes)}")
    _say_first((name < 0) | (name >= len(names)), name, f"a part of name {{}} of {len(names)}")
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
    _say_first((wrong | (~has & (numbers != 0).any(1))).any(1), index, "a part that leaves tensor {}")


def _say_first(wrong: np.ndarray, values: np.ndarray, sentence: str) -> None:
    if wrong.any():
        raise ValueError(sentence.format(values[wrong.argmax()]))
