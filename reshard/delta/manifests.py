"""The manifests of a chain of deltas: what they say, and how they are written and read.

A manifest is JSON with a checksum of its own. That of the base lists the tensors, that of a version says which one
it follows, the digest of all weights before and after it (`reshard.digests.numbers`), and size and checksum of its
files. A chain that has a drafter beside the model says so in all of them, which have a format of their own: whoever
does not know of drafters refuses it.
"""

import json
import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import xxhash

from reshard.core.dtypes import DTYPES
from reshard.core.errors import ReshardError, listed
from reshard.digests.numbers import text_of
from reshard.formats.small_files import a_name, whole_numbers
from reshard.models.drafters import DRAFTER
from reshard.storage.io.streams import TensorInfo
from reshard.storage.manifest import CHECKSUM, printable

FORMAT, WITH_DRAFTER = 4, 5  # of chains of a model alone, and of a model and its drafter
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
class BaseDrafter:
    """The drafter that a chain begins with: `name` is what it was called when the chain was begun, `digest` that of its
    tensors by their canonical names, `config` its ``config.json``, empty if the trainer has none."""

    name: str
    digest: str
    config: dict[str, Any]


@dataclass(frozen=True)
class Base:
    """The weights that a chain begins with: `name` is what it was called when the chain was begun, `tensors`
    are canonical ones that repeat no other. `chain` is drawn when a chain begins, and in each of its
    versions: two chains may agree in their first ones. Where there is a `drafter`, `tensors` and `digest` are of both,
    and the names of its tensors begin with `DRAFTER`. `config` is its ``config.json``, without what names places, and
    `ignored_config_fields` those of its fields that were ignored; None of a chain that does not say it."""

    name: str
    digest: str
    tensors: dict[str, TensorInfo]
    chain: str = field(default_factory=lambda: secrets.token_hex(16))
    drafter: BaseDrafter | None = None
    config: dict[str, Any] | None = None
    ignored_config_fields: list[str] = field(default_factory=list)

    def of_model(self) -> "Base":
        """Return the base of the model alone."""
        if self.drafter is None:
            return self
        tensors = {name: info for name, info in self.tensors.items() if not name.startswith(DRAFTER)}
        digest = without(self.digest, self.drafter.digest)
        return replace(self, digest=digest, tensors=tensors, drafter=None)

    def of_drafter(self) -> "Base | None":
        """Return the base of the drafter alone, whose tensors keep their canonical names; None without one."""
        if self.drafter is None:
            return None
        tensors = {name: info for name, info in self.tensors.items() if name.startswith(DRAFTER)}
        return Base(self.drafter.name, self.drafter.digest, tensors, self.chain)

    @property
    def elements(self) -> int:
        """Elements of all tensors."""
        return sum(info.size_bytes // info.dtype.size for info in self.tensors.values())


@dataclass(frozen=True)
class Delta:
    """One version of a chain, whose identity is `chain` once it is there: `before` and `after` are digests of
    all weights, `changed` counts elements. `drafter` is the digest of the drafter's tensors after it; empty in a chain
    without one."""

    version: int
    follows: int
    before: str
    after: str
    changed: int
    files: list[File] = field(default_factory=list)
    chain: str = ""
    drafter: str = ""

    @property
    def of_model(self) -> str:
        """The digest of the model's weights after it, without the drafter's."""
        return without(self.after, self.drafter) if self.drafter else self.after

    @property
    def bytes(self) -> int:
        """Bytes of its files."""
        return sum(file.bytes for file in self.files)


def without(digest: str, part: str) -> str:
    """Return the digest of what is left of weights without a part of their tensors.

    >>> without("0000000000000001", "0000000000000003")
    'fffffffffffffffe'
    """
    return text_of(int(digest, 16) - int(part, 16))


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
    if type(written) is not int or written not in (FORMAT, WITH_DRAFTER):
        is_older = type(written) is int and written < FORMAT
        hint = "begin a new chain with reshard delta save" if is_older else "update reshard"
        reads = f"{FORMAT} and {WITH_DRAFTER}"
        raise ReshardError(f"{place} has format {written!r:.40}, and this reshard reads {reads}: {hint}")
    if checksum != _checksum(fields):
        raise ReshardError(f"{place} was altered after it was written: bring it back, or begin a new chain")
    return fields


def _checksum(fields: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(fields, sort_keys=True).encode())


def fields_of_base(base: Base) -> dict[str, Any]:
    """Return the fields of a base's manifest."""
    tensors = {n: {"dtype": info.dtype.name, "shape": list(info.shape)} for n, info in base.tensors.items()}
    fields = {"name": printable(base.name), "chain": base.chain, "digest": base.digest, "tensors": tensors}
    if base.config is not None:  # what does not know of these leaves them unread
        fields |= {"config": base.config, "ignored_config_fields": base.ignored_config_fields}
    if base.drafter is None:
        return fields
    drafter = asdict(base.drafter) | {"name": printable(base.drafter.name)}
    return fields | {"format": WITH_DRAFTER, "drafter": drafter}


def base_of(fields: dict[str, Any], place: str) -> Base:
    """Return the base that a manifest describes. Raises ReshardError for fields that describe none."""
    listing, tensors = fields.get("tensors"), {}
    for name, entry in listing.items() if isinstance(listing, dict) else ():
        dtype = DTYPES.get(str(entry.get("dtype"))) if isinstance(entry, dict) else None
        if dtype is None or not whole_numbers(entry.get("shape")) or not a_name(name):
            raise ReshardError(f"{place} has a malformed entry for {name[:200]!a}")
        tensors[name] = TensorInfo(tuple(entry["shape"]), dtype)
    chain, config, ignored = (
        fields.get("chain"),
        fields.get("config"),
        fields.get("ignored_config_fields", []),
    )
    is_base = isinstance(fields.get("name"), str) and _is_digest(fields.get("digest")) and _is_identity(chain)
    has_config = isinstance(config, dict | None) and isinstance(ignored, list) and all(map(a_name, ignored))
    if not tensors or not is_base or not has_config:
        raise ReshardError(f"{place} is not the base of a chain of deltas")
    drafter = _drafter_of(fields, tensors, place)
    return Base(fields["name"], fields["digest"], tensors, str(chain), drafter, config, ignored)


def _drafter_of(fields: dict[str, Any], tensors: Mapping[str, TensorInfo], place: str) -> BaseDrafter | None:
    """Return the drafter of a base's manifest; None for the format without one."""
    if fields.get("format") != WITH_DRAFTER:
        return None
    of_drafter = [name.startswith(DRAFTER) for name in tensors]
    entry: Any = fields.get("drafter")
    sound = (
        isinstance(entry, dict)
        and entry.keys() == {"name", "digest", "config"}
        and isinstance(entry["name"], str)
        and _is_digest(entry["digest"])
        and isinstance(entry["config"], dict)
    )
    if not sound or not any(of_drafter) or all(of_drafter):
        raise ReshardError(f"{place} is not the base of a chain of deltas: its drafter is malformed")
    return BaseDrafter(entry["name"], entry["digest"], entry["config"])


def fields_of_delta(delta: Delta, chain: str) -> dict[str, Any]:
    """Return the fields of the manifest of a version of the chain with this identity."""
    fields = asdict(delta) | {"chain": chain}
    drafter = fields.pop("drafter")
    return fields | ({"format": WITH_DRAFTER, "drafter": drafter} if drafter else {})


def delta_of(fields: dict[str, Any], place: str) -> Delta:
    """Return the version that a manifest describes. Raises ReshardError for fields that describe none."""
    numbers = [fields.get(key) for key in ("version", "follows", "changed")]
    digests, files = [fields.get(key) for key in ("before", "after")], fields.get("files")
    with_drafter = fields.get("format") == WITH_DRAFTER
    drafter = fields.get("drafter") if with_drafter else ""
    are_right = all(map(_is_digest, digests)) and _is_identity(fields.get("chain"))
    are_right = are_right and (not with_drafter or _is_digest(drafter))
    if not whole_numbers(numbers) or not are_right or not isinstance(files, list):
        raise ReshardError(f"{place} is not the manifest of a delta")
    version, follows, changed = numbers
    before, after = map(str, digests)
    named = _files_of(files, place)
    return Delta(version, follows, before, after, changed, named, fields["chain"], str(drafter))


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
