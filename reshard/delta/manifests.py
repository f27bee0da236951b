"""The manifests of a chain of deltas: what they say, and how they are written and read.

A manifest is JSON with a checksum of its own. That of the base lists the tensors, that of a version says which one
it follows, the digest of all weights before and after it (`reshard.digests.numbers`), and size and checksum of its
files.
"""

import json
import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from reshard.core.dtypes import DTYPES
from reshard.core.errors import ReshardError, listed
from reshard.formats.small_files import a_name, whole_numbers
from reshard.storage.io.streams import TensorInfo
from reshard.storage.manifest import CHECKSUM, printable

FORMAT = 4
BASE = "base.json"
_MANIFEST = re.compile(r"delta-(\d{6,13})\.json")
_DIGEST = re.compile(r"[0-9a-f]{16}")
_IDENTITY = re.compile(r"[0-9a-f]{32}")
_READ_BYTES = 4 << 20


def delta_name(version: int) -> str:
    """Return what the files of a version begin with."""
    return f"delta-{version:06d}"


def manifests_in(names: Iterable[str]) -> list[tuple[str, int]]:
    """Return the manifests among these names, with their versions."""
    return [(match[0], int(match[1])) for match in map(_MANIFEST.fullmatch, names) if match]


@dataclass(frozen=True)
class File:
    """A file of a delta: its size and checksum."""

    name: str
    bytes: int
    xxh3_128: str

    @staticmethod
    def of(path: Path, name: str) -> "File":
        """Read a file through, and return what it is under this name."""
        digest, size = xxhash.xxh3_128(), 0
        try:
            with open(path, "rb") as file:
                while data := file.read(_READ_BYTES):
                    digest.update(data)
                    size += len(data)
        except OSError as error:
            raise ReshardError(f"cannot read {path}: {error.strerror}") from error
        return File(name, size, digest.hexdigest())


@dataclass(frozen=True)
class Base:
    """The weights that a chain begins with: `name` is what it was called when the chain was begun, `tensors`
    are canonical ones that repeat no other. `chain` is drawn when a chain begins, and in each of its
    versions: two chains may agree in their first ones."""

    name: str
    digest: str
    tensors: dict[str, TensorInfo]
    chain: str = field(default_factory=lambda: secrets.token_hex(16))

    @property
    def elements(self) -> int:
        """Elements of all tensors."""
        return sum(info.size_bytes // info.dtype.size for info in self.tensors.values())


@dataclass(frozen=True)
class Delta:
    """One version of a chain, whose identity is `chain` once it is there: `before` and `after` are digests of
    all weights, `changed` counts elements."""

    version: int
    follows: int
    before: str
    after: str
    changed: int
    files: list[File] = field(default_factory=list)
    chain: str = ""

    @property
    def bytes(self) -> int:
        """Bytes of its files."""
        return sum(file.bytes for file in self.files)


def manifest_of(fields: Mapping[str, Any]) -> str:
    """Return the text of a manifest with these fields."""
    fields = {"format": FORMAT, **fields}
    return json.dumps(fields | {CHECKSUM: _checksum(fields)}, indent=1) + "\n"


def fields_of(manifest: bytes, place: str) -> dict[str, Any]:
    """Return the fields of the manifest at a place. Raises ReshardError if it is not as it was written."""
    try:
        fields: dict[str, Any] = json.loads(manifest.decode())
        checksum = fields.pop(CHECKSUM)
    except (ValueError, RecursionError, KeyError, AttributeError, TypeError) as error:
        raise ReshardError(f"{place} is truncated, or no manifest of a delta: bring it back") from error
    written = fields.get("format")
    if written != FORMAT:
        is_older = type(written) is int and written < FORMAT
        hint = "begin a new chain with reshard delta save" if is_older else "update reshard"
        raise ReshardError(f"{place} has format {written!r:.40}, and this reshard reads {FORMAT}: {hint}")
    if checksum != _checksum(fields):
        raise ReshardError(f"{place} was altered after it was written: bring it back, or begin a new chain")
    return fields


def _checksum(fields: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(fields, sort_keys=True).encode())


def fields_of_base(base: Base) -> dict[str, Any]:
    """Return the fields of a base's manifest."""
    tensors = {n: {"dtype": info.dtype.name, "shape": list(info.shape)} for n, info in base.tensors.items()}
    return {"name": printable(base.name), "chain": base.chain, "digest": base.digest, "tensors": tensors}


def base_of(fields: dict[str, Any], place: str) -> Base:
    """Return the base that a manifest describes. Raises ReshardError for fields that describe none."""
    listing, tensors = fields.get("tensors"), {}
    for name, entry in listing.items() if isinstance(listing, dict) else ():
        dtype = DTYPES.get(str(entry.get("dtype"))) if isinstance(entry, dict) else None
        if dtype is None or not whole_numbers(entry.get("shape")) or not a_name(name):
            raise ReshardError(f"{place} has a malformed entry for {name[:200]!a}")
        tensors[name] = TensorInfo(tuple(entry["shape"]), dtype)
    chain = fields.get("chain")
    is_base = isinstance(fields.get("name"), str) and _is_digest(fields.get("digest")) and _is_identity(chain)
    if not tensors or not is_base:
        raise ReshardError(f"{place} is not the base of a chain of deltas")
    return Base(fields["name"], fields["digest"], tensors, str(chain))


def delta_of(fields: dict[str, Any], place: str) -> Delta:
    """Return the version that a manifest describes. Raises ReshardError for fields that describe none."""
    numbers = [fields.get(key) for key in ("version", "follows", "changed")]
    digests, files = [fields.get(key) for key in ("before", "after")], fields.get("files")
    are_right = all(map(_is_digest, digests)) and _is_identity(fields.get("chain"))
    if not whole_numbers(numbers) or not are_right or not isinstance(files, list):
        raise ReshardError(f"{place} is not the manifest of a delta")
    version, follows, changed = numbers
    before, after = map(str, digests)
    return Delta(version, follows, before, after, changed, _files_of(files, place), fields["chain"])


def _files_of(entries: list[Any], place: str) -> list[File]:
    files = []
    for entry in entries:
        sound = isinstance(entry, dict) and entry.keys() == {"name", "bytes", CHECKSUM}
        if (
            not sound
            or not a_name(entry["name"])
            or "/" in entry["name"]
            or not whole_numbers([entry["bytes"]])
        ):
            raise ReshardError(f"{place} is not the manifest of a delta: its files are malformed")
        files.append(File(entry["name"], entry["bytes"], str(entry[CHECKSUM])))
    names = [file.name for file in files]
    if len(set(names)) != len(names):
        raise ReshardError(f"{place} names {listed(names, 3)}, one of them twice")
    return files


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and _DIGEST.fullmatch(value) is not None


def _is_identity(value: Any) -> bool:
    return isinstance(value, str) and _IDENTITY.fullmatch(value) is not None


def check_size(size: int, expected: int, place: str) -> None:
    """Raise ReshardError if a file has another size in bytes than its manifest says."""
    if size != expected:
        how = "truncated" if size < expected else "longer than it was written"
        raise ReshardError(
            f"{place} is {how}: it has {size:,} bytes of {expected:,}; bring it back, or begin a new chain"
        )


def check_file(there: File, expected: File, place: str) -> None:
    """Raise ReshardError if a file is another than its manifest says."""
    check_size(there.bytes, expected.bytes, place)
    if there != expected:
        raise ReshardError(f"{place} was altered after it was written: bring it back, or begin a new chain")
