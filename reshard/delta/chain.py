"""A chain of deltas: a base, and what each version changes of the one before it.

    base.json                   the base: its name, its tensors, and the digest of its weights
    delta-000001.safetensors    what version 1 changes of the base: records (`reshard.delta.records`)
    delta-000001.json           its manifest, published last: a version is there once its manifest is
    ...

Several ranks may have written one file each of a version.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

from reshard.core.errors import ReshardError, listed
from reshard.core.limits import check_number
from reshard.delta.manifests import (
    BASE,
    Base,
    Delta,
    File,
    base_of,
    check_file,
    check_size,
    delta_name,
    delta_of,
    fields_of,
    fields_of_base,
    fields_of_delta,
    manifest_of,
    manifests_in,
)
from reshard.delta.stores import Store, open_store, write_errors
from reshard.models.config_fields import ignore_hint, ignored
from reshard.storage.io.casts import EXACT
from reshard.storage.io.streams import TensorInfo
from reshard.storage.sources.versions import FileVersions

FIRST_VERSION, MOST_VERSION = 1, 10**12
# A directory with one of these is a model, an adapter, or Megatron's.
CHECKPOINT_FILES = ("config.json", "adapter_config.json", "latest_checkpointed_iteration.txt", ".metadata")


class Chain:
    """The chain at a path or URL; what was read of it is kept."""

    def __init__(self, place: str | Path) -> None:
        self.store: Store = open_store(place)
        self.where = self.store.where
        self._base: Base | None = None
        self._deltas: dict[int, Delta] = {}
        self._checked: set[str] = set()
        self._versions = FileVersions()  # of files on this host, from before their checksums were compared

    @property
    def base(self) -> Base:
        """The base. Raises ReshardError if there is none."""
        if self._base is None:
            names = self.store.names()
            if BASE not in names and manifests_in(names):
                raise ReshardError(
                    f"{self.where} has versions, but has lost its {BASE}: bring it back, or begin a new chain"
                )
            if BASE not in names:
                raise ReshardError(
                    f"{self.where} is not a chain of deltas, since it has no {BASE}: reshard delta save begins one"
                )
            self._base = base_of(self._read(BASE), f"{self.where}/{BASE}")
        return self._base

    @property
    def exists(self) -> bool:
        """True where the chain was begun, though it may have lost its base since. Raises ReshardError if it was not,
        and a checkpoint lies there: what loads that would take the deltas for some of its weights."""
        if self._base is not None:
            return True
        names = self.store.names()
        if BASE in names or manifests_in(names):
            return True
        of_checkpoint = sorted(name for name in names if name in CHECKPOINT_FILES)
        if of_checkpoint:
            raise ReshardError(
                f"{self.where} holds a checkpoint ({listed(of_checkpoint, 3)}): give a chain a directory of its own"
            )
        return False

    def deltas(self, version: int | None = None) -> list[Delta]:
        """Return the deltas from the base to a version, by default the newest, in order.

        Raises ReshardError, naming the file, if one is missing, is not what its name says, or does not
        follow the one before it.
        """
        names = self.store.names()
        if BASE not in names:  # it may have been read before somebody removed it
            self._base = None
        deltas = [self._delta(name, number) for name, number in manifests_in(names)]
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
                    f"{self.where} lacks {delta_name(delta.follows)}, which {delta_name(delta.version)} "
                    "follows: bring it back, or begin a new chain with reshard delta save"
                )
            if delta.chain != self.base.chain or bool(delta.drafter) != (self.base.drafter is not None):
                raise ReshardError(
                    f"{place} is of another chain ({delta.chain}, not {self.base.chain}): bring the right "
                    "one back, or begin a new chain with reshard delta save"
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
                    f"{place} is not called {delta_name(version)}.json: it was renamed or copied; give it "
                    "that name, or remove it if there is one"
                )
            delta = delta_of(self._read(name), place)
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
            self._versions.record(path)
            if file.name not in self._checked:
                check_file(File.of(path, file.name), file, f"{self.where}/{file.name}")
                self._checked.add(file.name)
            paths.append(path)
        return paths

    def check_unchanged(self) -> None:
        """Raise ReshardError, naming them, if files of deltas are no longer those whose checksums were right."""
        self._versions.check(self._versions.recorded)

    def unchanged(self) -> AbstractContextManager[None]:
        """Do the same at the end of a `with` block."""
        return self._versions.unchanged(lambda: self._versions.recorded)

    def check_sizes(self, deltas: Iterable[Delta]) -> None:
        """Raise ReshardError, naming the file, if one of these deltas' is not there, or has another size."""
        sizes = self.store.sizes()
        for file in (file for delta in deltas for file in delta.files):
            if file.name not in sizes:
                raise ReshardError(f"{self.where} lacks {file.name}: bring it back, or begin a new chain")
            if (size := sizes[file.name]) is not None:
                check_size(size, file.bytes, f"{self.where}/{file.name}")

    def check_end(self, newest: int | None) -> None:
        """Raise ReshardError unless the chain still ends with this version, 0 for its base; None if it was not begun.

        Asked before a file gets its name: that of another process must not be replaced.
        """
        names = self.store.names()
        numbers = [number for _, number in manifests_in(names)]
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
                manifests = [name for name, _ in manifests_in(self.store.names())]
                if f"{delta_name(delta.version)}.json" not in manifests:
                    begun = [BASE] if is_first and not manifests else []
                    for name in (*begun, *(file.name for file in delta.files)):
                        self.store.remove(name)
            raise

    def begin(self, base: Base, scratch: Path) -> None:
        """Publish the base of a new chain."""
        self._publish(fields_of_base(base), BASE, scratch)
        self._base = base

    def append(self, delta: Delta, scratch: Path) -> None:
        """Publish the manifest of a delta, whose files are there."""
        name = f"{delta_name(delta.version)}.json"
        if name in self.store.names():
            raise ReshardError(f"{self.where} has version {delta.version} already: give a higher one")
        self._publish(fields_of_delta(delta, self.base.chain), name, scratch)

    def _publish(self, fields: dict[str, Any], name: str, scratch: Path) -> None:
        path = scratch / name
        with write_errors(path):
            path.write_text(manifest_of(fields), encoding="utf-8")
        self.store.put(path, name)

    def _read(self, name: str) -> dict[str, Any]:
        """Return the fields of a manifest. Raises ReshardError if it is not as it was written."""
        return fields_of(self.store.read(name), f"{self.where}/{name}")

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
    """Raise ReshardError if a model has other tensors than a chain's base, by name, shape or dtype. Where
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
            f"{in_words(wanted)}{_on_ignored(base) if held is None or wanted is None else ''}"
        )


def _on_ignored(base: Base) -> str:
    """Return what a reader is told of config fields that are ignored where the chain was begun, or here, and not in
    both: without them tensors may have other names. Empty without any, or of a chain that does not say it."""
    theirs, own = {*base.ignored_config_fields}, ignored()
    fields = sorted(theirs - own or own - theirs)
    if base.config is None or not fields:
        return ""
    begun, here = ("without", "with") if theirs - own else ("with", "without")
    return (
        f"; the chain was begun {begun} the config's {listed(fields)}, and this is read {here}, by which tensors may "
        f"have other names: ignore the same in both places, by {ignore_hint(fields)}"
    )


def check_digest(base: Base, digest: str, where: str, chain: str) -> None:
    """Raise ReshardError if weights are not those of a chain's base."""
    if digest != base.digest:
        raise ReshardError(
            f"{where} is not the base of {chain}: its weights have digest {digest}, those of the base ({base.name}) "
            f"{base.digest}; give the checkpoint with which the chain was begun"
        )


def in_words(info: TensorInfo | None) -> str:
    """Return a tensor's dtype and shape as errors say them; ``missing`` for None."""
    return "missing" if info is None else f"{info.dtype.name} {list(info.shape)}"


def _called(version: int) -> str:
    return delta_name(version) if version else "the base"


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
            "digest_of_model": base.of_model().digest,
            "drafter": None if base.drafter is None else base.drafter.name,
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
                    "digest_of_model": delta.of_model,
                }
                for delta in deltas
            ],
        }


def target_of(chain: Chain, version: int | None) -> tuple[int, str]:
    """Return the version that is asked for, by default the newest, 0 for the base, and the digest of its weights."""
    deltas = chain.deltas(version)
    return (deltas[-1].version, deltas[-1].after) if deltas else (0, chain.base.digest)
