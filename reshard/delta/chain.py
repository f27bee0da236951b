"""A chain of deltas: a base, and what each version changes of the one before it.

    base.json                   the base: its name, its tensors, and the digest of its weights
    delta-000001.safetensors    what version 1 changes of the base: records (`reshard.delta.records`)
    delta-000001.json           its manifest, published last: a version is there once its manifest is
    ...

A manifest says which version it is and which one it follows, the digest of all weights before and after it
(`reshard.delta.digest`), and size and checksum of its files. Several ranks may have written one file each.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from reshard.core.dtypes import DTYPES
from reshard.core.errors import ReshardError, listed
from reshard.core.limits import check_number
from reshard.delta.stores import Store, open_store, write_errors
from reshard.formats.small_files import a_name, whole_numbers
from reshard.storage.io.casts import EXACT
from reshard.storage.io.streams import TensorInfo
from reshard.storage.manifest import CHECKSUM, printable

FORMAT = 1
BASE, FIRST_VERSION, MOST_VERSION = "base.json", 1, 10**12
_MANIFEST = re.compile(r"delta-(\d{6,13})\.json")
_DIGEST = re.compile(r"[0-9a-f]{16}")
_READ_BYTES = 4 << 20
# A directory with one of these is a model, an adapter, or Megatron's.
CHECKPOINT_FILES = ("config.json", "adapter_config.json", "latest_checkpointed_iteration.txt", ".metadata")


def delta_name(version: int) -> str:
    """Return what the files of a version begin with."""
    return f"delta-{version:06d}"


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
    """The weights that a chain begins with: `name` is what it was called when the chain was begun, `tensors` are canonical
    ones that repeat no other."""

    name: str
    digest: str
    tensors: dict[str, TensorInfo]

    @property
    def elements(self) -> int:
        """Elements of all tensors."""
        return sum(info.size_bytes // info.dtype.size for info in self.tensors.values())


@dataclass(frozen=True)
class Delta:
    """One version of a chain: `before` and `after` are digests of all weights, `changed` counts elements."""

    version: int
    follows: int
    before: str
    after: str
    changed: int
    files: list[File] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """Bytes of its files."""
        return sum(file.bytes for file in self.files)


class Chain:
    """The chain at a path or URL; what was read of it is kept."""

    def __init__(self, place: str | Path) -> None:
        self.store: Store = open_store(place)
        self.where = self.store.where
        self._base: Base | None = None
        self._deltas: dict[int, Delta] = {}
        self._checked: set[str] = set()

    @property
    def base(self) -> Base:
        """The base. Raises ReshardError where there is none."""
        if self._base is None:
            names = self.store.names()
            if BASE not in names and _manifests(names):
                raise ReshardError(
                    f"{self.where} has versions, but has lost its {BASE}: bring it back, or begin a new chain"
                )
            if BASE not in names:
                raise ReshardError(
                    f"{self.where} is no chain of deltas, since it has no {BASE}: reshard delta save begins one"
                )
            self._base = _base_of(self._read(BASE), f"{self.where}/{BASE}")
        return self._base

    @property
    def exists(self) -> bool:
        """True where the chain was begun, though it may have lost its base since. Raises ReshardError where it was not,
        and a checkpoint lies there: what loads that would take the deltas for some of its weights."""
        if self._base is not None:
            return True
        names = self.store.names()
        if BASE in names or _manifests(names):
            return True
        of_checkpoint = sorted(name for name in names if name in CHECKPOINT_FILES)
        if of_checkpoint:
            raise ReshardError(
                f"{self.where} holds a checkpoint ({listed(of_checkpoint, 3)}): give a chain a directory of its own"
            )
        return False

    def deltas(self, version: int | None = None) -> list[Delta]:
        """Return the deltas from the base to a version, by default the newest, in order.

        Raises ReshardError, naming the file, where one is missing, is not what its name says, or does not
        follow the one before it.
        """
        deltas = [self._delta(name, number) for name, number in _manifests(self.store.names())]
        deltas.sort(key=lambda delta: delta.version)
        if version is not None:
            check_number(version, "version", MOST_VERSION, 0)
            if version and version not in {delta.version for delta in deltas}:
                newest = f"the newest is {deltas[-1].version}" if deltas else "it has none yet"
                raise ReshardError(f"{self.where} has no version {version}: {newest}")
            deltas = [delta for delta in deltas if delta.version <= version]
        self._check_order(deltas)
        return deltas

    def _check_order(self, deltas: list[Delta]) -> None:
        last, digest = 0, self.base.digest
        for delta in deltas:
            place = f"{self.where}/{delta_name(delta.version)}"
            if delta.follows < last:
                raise ReshardError(
                    f"{place} and {delta_name(last)} both follow {_called(delta.follows)}: two trainers have written "
                    f"to one chain; give each its own"
                )
            if delta.follows > last:
                raise ReshardError(
                    f"{self.where} lacks {delta_name(delta.follows)}, which {delta_name(delta.version)} follows: bring it "
                    f"back, or begin a new chain with reshard delta save"
                )
            if delta.before != digest:
                raise ReshardError(
                    f"{place} is of another chain: it changes weights with digest {delta.before}, and {_called(last)} "
                    f"has {digest}; bring the right one back, or begin a new chain with reshard delta save"
                )
            last, digest = delta.version, delta.after

    def _delta(self, name: str, version: int) -> Delta:
        if version not in self._deltas:
            place = f"{self.where}/{name}"
            if name != f"{delta_name(version)}.json":
                raise ReshardError(
                    f"{place} is not called {delta_name(version)}.json: it was renamed or copied; give it that name, or "
                    f"remove it if there is one"
                )
            delta = _delta_of(self._read(name), place)
            if delta.version != version:
                raise ReshardError(
                    f"{place} is version {delta.version}, not {version}: it was renamed or copied; bring version "
                    f"{version} back, or remove it if there is none"
                )
            self._deltas[version] = delta
        return self._deltas[version]

    def paths(self, delta: Delta) -> list[Path]:
        """Return the paths of a delta's files on this host, whose checksums are right. Raises ReshardError,
        naming the file, where one is not as it was written."""
        self.check_sizes([delta])
        paths = []
        for file in delta.files:
            path = self.store.local(file.name)
            if file.name not in self._checked:
                _check_file(File.of(path, file.name), file, f"{self.where}/{file.name}")
                self._checked.add(file.name)
            paths.append(path)
        return paths

    def check_sizes(self, deltas: Iterable[Delta]) -> None:
        """Raise ReshardError, naming the file, where one of these deltas' is not there, or has another size."""
        sizes = self.store.sizes()
        for file in (file for delta in deltas for file in delta.files):
            if file.name not in sizes:
                raise ReshardError(f"{self.where} lacks {file.name}: bring it back, or begin a new chain")
            if (size := sizes[file.name]) is not None:
                _check_size(size, file.bytes, f"{self.where}/{file.name}")

    def check_end(self, newest: int | None) -> None:
        """Raise ReshardError unless the chain still ends with this version, 0 for its base; None where it was not begun.

        Asked before a file gets its name: that of another process must not be replaced.
        """
        names = self.store.names()
        numbers = [number for _, number in _manifests(names)]
        last = max(numbers, default=0) if numbers or BASE in names else None
        if last != newest:
            has = f"has version {last}" if last else "was begun" if last == 0 else f"has lost its {BASE}"
            raise ReshardError(
                f"{self.where} {has} since this process read it: one process at a time may write to a chain; "
                f"reshard delta show says what it holds now"
            )

    @contextmanager
    def adding(self, delta: Delta, is_first: bool = False) -> Iterator[None]:
        """Publish the files of a delta inside, and its manifest last; where that fails, the files are removed again,
        and the base too of a chain whose first version this is. Once its manifest is there a version stays."""
        try:
            yield
        except BaseException:
            with suppress(ReshardError):  # such as of a store that is gone, which is what failed
                manifests = [name for name, _ in _manifests(self.store.names())]
                if f"{delta_name(delta.version)}.json" not in manifests:
                    begun = [BASE] if is_first and not manifests else []
                    for name in (*begun, *(file.name for file in delta.files)):
                        self.store.remove(name)
            raise

    def begin(self, base: Base, scratch: Path) -> None:
        """Publish the base of a new chain."""
        tensors = {
            n: {"dtype": info.dtype.name, "shape": list(info.shape)} for n, info in base.tensors.items()
        }
        name = printable(base.name)
        self._publish({"name": name, "digest": base.digest, "tensors": tensors}, BASE, scratch)
        self._base = base

    def append(self, delta: Delta, scratch: Path) -> None:
        """Publish the manifest of a delta, whose files are there."""
        name = f"{delta_name(delta.version)}.json"
        if name in self.store.names():
            raise ReshardError(f"{self.where} has version {delta.version} already: give a higher one")
        self._publish(asdict(delta), name, scratch)

    def _publish(self, fields: dict[str, Any], name: str, scratch: Path) -> None:
        fields = {"format": FORMAT, **fields}
        path = scratch / name
        with write_errors(path):
            path.write_text(
                json.dumps(fields | {CHECKSUM: _checksum(fields)}, indent=1) + "\n", encoding="utf-8"
            )
        self.store.put(path, name)

    def _read(self, name: str) -> dict[str, Any]:
        """Return the fields of a manifest. Raises ReshardError where it is not as it was written."""
        place = f"{self.where}/{name}"
        try:
            fields = json.loads(self.store.read(name).decode())
            checksum = fields.pop(CHECKSUM)
        except (ValueError, RecursionError, KeyError, AttributeError, TypeError) as error:
            raise ReshardError(f"{place} is truncated, or no manifest of a delta: bring it back") from error
        if fields.get("format") != FORMAT:
            raise ReshardError(
                f"{place} has format {fields.get('format')!r:.40}, and this reshard reads {FORMAT}: update reshard"
            )
        if checksum != _checksum(fields):
            raise ReshardError(
                f"{place} was altered after it was written: bring it back, or begin a new chain"
            )
        return fields

    def close(self) -> None:
        """Remove what was fetched."""
        self.store.close()

    def __enter__(self) -> "Chain":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def check_tensors(
    base: Base, tensors: Mapping[str, TensorInfo], where: str, chain: str, may_widen: bool = False
) -> None:
    """Raise ReshardError where a model has other tensors than a chain's base, by name, shape or dtype. Where
    it `may_widen` its own, they may have dtypes from which that changes no number."""
    for name in sorted({*base.tensors, *tensors}):
        held, wanted = tensors.get(name), base.tensors.get(name)
        if held == wanted:
            continue
        if (
            may_widen
            and held
            and wanted
            and held.shape == wanted.shape
            and (held.dtype.name, wanted.dtype.name) in EXACT
        ):
            continue
        raise ReshardError(
            f"{where} is another model than the base of {chain}: {name} is {in_words(held)}, and the base's "
            f"{in_words(wanted)}"
        )


def check_digest(base: Base, digest: str, where: str, chain: str) -> None:
    """Raise ReshardError where weights are not those of a chain's base."""
    if digest != base.digest:
        raise ReshardError(
            f"{where} is not the base of {chain}: its weights have digest {digest}, those of the base ({base.name}) "
            f"{base.digest}; give the checkpoint with which the chain was begun"
        )


def in_words(info: TensorInfo | None) -> str:
    """Return a tensor's dtype and shape as errors say them; ``missing`` for None."""
    return "missing" if info is None else f"{info.dtype.name} {list(info.shape)}"


def _manifests(names: Iterable[str]) -> list[tuple[str, int]]:
    """Return which of these names are of manifests, and of which version."""
    return [(match[0], int(match[1])) for match in map(_MANIFEST.fullmatch, names) if match]


def _called(version: int) -> str:
    return delta_name(version) if version else "the base"


def _checksum(fields: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(fields, sort_keys=True).encode())


def _check_size(size: int, expected: int, place: str) -> None:
    if size != expected:
        how = "truncated" if size < expected else "longer than it was written"
        raise ReshardError(
            f"{place} is {how}: it has {size:,} bytes of {expected:,}; bring it back, or begin a new chain"
        )


def _check_file(there: File, expected: File, place: str) -> None:
    _check_size(there.bytes, expected.bytes, place)
    if there != expected:
        raise ReshardError(f"{place} was altered after it was written: bring it back, or begin a new chain")


def _base_of(fields: dict[str, Any], place: str) -> Base:
    listing, tensors = fields.get("tensors"), {}
    for name, entry in listing.items() if isinstance(listing, dict) else ():
        dtype = DTYPES.get(str(entry.get("dtype"))) if isinstance(entry, dict) else None
        if dtype is None or not whole_numbers(entry.get("shape")) or not a_name(name):
            raise ReshardError(f"{place} has a malformed entry for {name[:200]!a}")
        tensors[name] = TensorInfo(tuple(entry["shape"]), dtype)
    if not tensors or not isinstance(fields.get("name"), str) or not _is_digest(fields.get("digest")):
        raise ReshardError(f"{place} is no base of a chain of deltas")
    return Base(fields["name"], fields["digest"], tensors)


def _delta_of(fields: dict[str, Any], place: str) -> Delta:
    numbers = [fields.get(key) for key in ("version", "follows", "changed")]
    digests, files = [fields.get(key) for key in ("before", "after")], fields.get("files")
    if not whole_numbers(numbers) or not all(map(_is_digest, digests)) or not isinstance(files, list):
        raise ReshardError(f"{place} is no manifest of a delta")
    version, follows, changed = numbers
    before, after = map(str, digests)
    return Delta(version, follows, before, after, changed, _files_of(files, place))


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
            raise ReshardError(f"{place} is no manifest of a delta: its files are malformed")
        files.append(File(entry["name"], entry["bytes"], str(entry[CHECKSUM])))
    names = [file.name for file in files]
    if len(set(names)) != len(names):
        raise ReshardError(f"{place} names {listed(names, 3)}, one of them twice")
    return files


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and _DIGEST.fullmatch(value) is not None


def next_version(deltas: Iterable[Delta], version: int | None, chain: str) -> tuple[int, int]:
    """Return the version to write, by default the one after the newest, and the one that it follows. Raises
    ReshardError for one that is not higher."""
    newest = max((delta.version for delta in deltas), default=0)
    if version is None:
        return newest + 1, newest
    check_number(version, "version", MOST_VERSION, FIRST_VERSION)
    if version <= newest:
        raise ReshardError(
            f"{chain} has version {newest}, so the next cannot be {version}: give a higher one"
        )
    return version, newest


def show(chain: str | Path) -> dict[str, Any]:
    """Return what a chain holds: its base, and its deltas in order. Raises ReshardError as `apply` does for what
    the manifests and the sizes of files say; checksums are of `apply`."""
    with Chain(chain) as opened:
        deltas, base = opened.deltas(), opened.base
        opened.check_sizes(deltas)
        return {
            "chain": opened.where,
            "base": base.name,
            "digest": base.digest,
            "tensors": len(base.tensors),
            "elements": base.elements,
            "weights_bytes": sum(info.size_bytes for info in base.tensors.values()),
            "deltas": [
                {
                    "version": delta.version,
                    "follows": delta.follows,
                    "changed": delta.changed,
                    "density": delta.changed / max(1, base.elements),
                    "bytes": delta.bytes,
                    "files": len(delta.files),
                    "digest": delta.after,
                }
                for delta in deltas
            ],
        }
