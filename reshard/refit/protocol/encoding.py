"""Messages as bytes: JSON and integer matrices, compressed, and digests of them.

Nothing is unpickled, and no message takes more memory than `MOST_TEXT` or `MOST_MATRIX`, whatever it says.
"""

import json
import zlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any

import numpy as np

from reshard.comm.group import RefitGroup
from reshard.core.errors import ReshardError, first_line

MOST_TEXT = 32 << 20  # bytes of JSON: ten times what a rank of the largest models publishes
MOST_MATRIX = 512 << 20
MOST_COLUMNS = 1 << 10
MOST_ADDRESS = 1 << 62
MOST_WORD = 200  # characters of a name
DIGEST_BYTES = 8


@contextmanager
def readable(what: str) -> Iterator[None]:
    """Raise a ReshardError, saying `what` it is, for what makes no sense in a message that is read inside."""
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
    """Return a digest by which these messages are told from others."""
    digest = blake2b(digest_size=DIGEST_BYTES)
    for payload in payloads:
        digest.update(len(payload).to_bytes(8, "little") + payload)
    return digest.digest()


def pack_json(value: Any) -> bytes:
    """Return JSON, compressed."""
    return zlib.compress(json.dumps(value, separators=(",", ":")).encode(), 1)


def unpack_json(payload: bytes, what: str = "a message") -> Any:
    """Return what `pack_json` packed; tuples come back as lists. Raises ReshardError, saying `what`
    it is, where it is no JSON."""
    with readable(what):
        return json.loads(inflated(payload, MOST_TEXT), parse_constant=_refused)


def _refused(constant: str) -> None:
    raise ValueError(f"{constant} is no number")


def inflated(payload: bytes, most: int) -> bytes:
    """Return what zlib compressed. Raises ValueError, or zlib.error, where that is not whole, or more than so many
    bytes."""
    unpacker = zlib.decompressobj()
    data = unpacker.decompress(payload, most + 1)
    if len(data) > most:
        raise ValueError(f"more than {most:,} bytes")
    if not unpacker.eof or unpacker.unused_data:
        raise ValueError(f"{len(payload):,} bytes that end in its middle, or go on behind it")
    return data


def pack_array(array: np.ndarray) -> bytes:
    """Return an int64 matrix, compressed, behind its number of columns."""
    return np.int64(array.shape[1]).tobytes() + zlib.compress(
        np.ascontiguousarray(array, np.int64).tobytes(), 1
    )


def unpack_array(payload: bytes, what: str = "a message", widths: Collection[int] = ()) -> np.ndarray:
    """Return what `pack_array` packed. Raises ReshardError, saying `what` it is, where it is no
    matrix, or has a number of columns that is none of `widths`."""
    with readable(what):
        columns = int.from_bytes(payload[:8], "little", signed=True)
        data = inflated(payload[8:], MOST_MATRIX)
        if not 0 < columns <= MOST_COLUMNS or len(data) % (8 * columns) or (widths and columns not in widths):
            raise ValueError(f"{len(data):,} bytes in {columns} columns")
        return np.frombuffer(data, np.int64).reshape(-1, columns)


def exchange_json(group: RefitGroup, key: str, value: Any) -> list[Any]:
    """Post JSON, and return what all members posted, by rank. Raises ReshardError where this
    member's own did not arrive as it was sent, since the others then go by something else."""
    own = pack_json(value)
    payloads = group.gather(key, own)
    check_own(group, key, own, payloads[group.rank])
    names = group.names
    return [unpack_json(payload, f"'{key}' of {names[rank]}") for rank, payload in enumerate(payloads)]


def check_own(group: RefitGroup, key: str, sent: bytes, arrived: bytes) -> None:
    """Raise ReshardError where what others read of this member is not what it sent."""
    if sent != arrived:
        name = group.names[group.rank]
        raise ReshardError(f"'{key}' of {name} did not arrive as it was sent: connect again")


def is_word(value: Any) -> bool:
    """Return True for a printable text of at most `MOST_WORD` characters."""
    return isinstance(value, str) and len(value) <= MOST_WORD and (value.isprintable() or not value)


def is_number(value: Any, least: int, most: int) -> bool:
    """Return True for a whole number within these bounds."""
    return type(value) is int and least <= value <= most
