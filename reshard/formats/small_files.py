"""The small files of a checkpoint, read with a limit: configs, indexes, manifests, metadata.

Whatever such a file holds, reading it takes no more memory than its kind can need, and what is
wrong with it is one sentence.
"""

import json
import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeGuard

from reshard.core.errors import ReshardError
from reshard.formats.ranges import ranged

# More than the largest models need (an index of 140,000 tensors has 28 MB), and little enough to be
# held in memory once parsed.
MAX_JSON_BYTES = 16 << 20
MAX_INDEX_BYTES = 48 << 20
MAX_TRACKER_BYTES = 4096
MAX_METADATA_BYTES = 1 << 30
MAX_COPIED_BYTES = 256 << 20

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def read_file(path: Path, limit: int) -> bytes:
    """Return the bytes of a regular file. Raises ReshardError if it cannot be read or has more
    than `limit` bytes."""
    in_store = ranged(path)
    if in_store is not None:
        _check_size(path, in_store.size_bytes, limit)
        return in_store.read(0, in_store.size_bytes)
    try:
        # A pipe that somebody put there would block at `open`.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise ReshardError(f"{path} is not a regular file")
            data = b"" if status.st_size > limit else file.read(limit + 1)
            size = max(status.st_size, len(data))
    except OSError as error:
        raise ReshardError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:  # a name with a null character
        raise ReshardError(f"cannot read {str(path)!r}: {error}") from error
    _check_size(path, size, limit)
    return data


def _check_size(path: Path, size: int, limit: int) -> None:
    if size > limit:
        raise ReshardError(f"{path} has {size:,} bytes, more than the {limit:,} that such a file can need")


def read_at(descriptor: int, length: int, offset: int) -> bytes:
    """Return `length` bytes of an open file, fewer only at its end: a system may give fewer at a time.
    Raises OSError."""
    pieces = []
    while length and (piece := os.pread(descriptor, length, offset)):
        pieces.append(piece)
        length, offset = length - len(piece), offset + len(piece)
    return b"".join(pieces)


def read_json(path: Path, what: str = "JSON", limit: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Read a JSON file that holds an object; in errors it is called `what`.

    Raises ReshardError if it cannot be read, is larger than `limit` bytes, is no UTF-8 or no
    JSON, is nested deeper than any checkpoint's, or holds something else than an object.
    """
    data = read_file(path, limit)
    try:
        value = json.loads(data.decode("utf-8"))
    except RecursionError as error:
        raise ReshardError(f"{path} is not {what}: it is nested too deeply") from error
    except ValueError as error:
        raise ReshardError(f"{path} is not {what}: {error}") from error
    if not isinstance(value, dict):
        raise ReshardError(f"{path} is not {what}: it is not a JSON object")
    if _SURROGATE.search(data):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except (UnicodeEncodeError, RecursionError) as error:
            raise ReshardError(
                f"{path} is not {what}: it has half of a surrogate pair, which is not a character"
            ) from error
    return value


def a_name(value: Any) -> TypeGuard[str]:
    """Return True for text that a tensor or a file may be called by: printable, and of no absurd
    length."""
    return type(value) is str and len(value) <= 1000 and value.isprintable()


def whole_numbers(value: Any, most: int = 32, least: int = 0) -> TypeGuard[Sequence[int]]:
    """Return True for a list or tuple of at most `most` whole numbers from `least` up to what a
    file offset can be."""
    return (
        type(value) in (list, tuple)
        and len(value) <= most
        and all(type(n) is int and least <= n < 1 << 63 for n in value)
    )
