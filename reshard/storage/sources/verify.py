"""A source against its own manifest: what was changed after it was written is named before anything
is made of it."""

from collections.abc import Callable, Container, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from reshard.core.errors import ReshardError, listed
from reshard.formats.torch_dist import TRACKER
from reshard.megatron.flags import FLAGS_FILE
from reshard.storage.io.files import OpenFiles
from reshard.storage.io.streams import TensorInfo
from reshard.storage.manifest import CHECKSUM, file_entry
from reshard.storage.manifest import NAME as MANIFEST
from reshard.storage.run.workers import BATCH_BYTES, run_jobs
from reshard.storage.sources.base import Source
from reshard.storage.sources.huggingface import HuggingFaceSource
from reshard.storage.sources.megatron import MegatronSource
from reshard.storage.sources.paths import HF_FILES

ON_PURPOSE = f"if that was meant, remove its {MANIFEST} and convert again"


def manifest_of(source: Source) -> dict[str, Any] | None:
    """Return the manifest of this source: not one of another iteration in the same directory, which
    training has left behind."""
    manifest = source.manifest()
    if manifest is None or not isinstance(source, MegatronSource):
        return manifest
    return manifest if source.is_of(manifest) else None


def differences(infos: Mapping[str, TensorInfo], entries: dict[str, dict[str, Any]]) -> list[str]:
    """Return the names that only one of the two has, or that have another dtype or shape."""
    bad = sorted(set(entries) ^ set(infos))
    return bad + [
        n
        for n, e in entries.items()
        if n in infos and (e["dtype"], tuple(e["shape"])) != (infos[n].dtype.name, infos[n].shape)
    ]


def changed_files(
    root: Path, entries: dict[str, dict[str, Any]], source: Source | None = None, workers: int | None = None
) -> tuple[list[str], list[str]]:
    """Return which of a manifest's files below `root` are not as they were written, and which are
    missing.

    Files with weights are compared by size, and with `source` also by the bytes around its tensors,
    by `workers`.
    """
    changed, missing, small, large = [], [], [], []
    for name, entry in sorted(entries.items()):
        path = root / name
        if not path.is_file():
            missing.append(name)
        elif path.stat().st_size != entry["bytes"]:
            changed.append(name)
        elif not entry.get("around_tensors"):
            small.append(name)
        elif source is not None:
            large.append(name)
    with OpenFiles() as files:

        def differs(name: str) -> bool:
            entry = entries[name]
            around_tensors = bool(entry.get("around_tensors"))
            spans = source.spans(name) if around_tensors and source is not None else []
            around = _around(files, root / name, entry["bytes"], spans)
            return file_entry(entry["bytes"], around, around_tensors) != entry

        changed += [name for name in small if differs(name)]
        outcomes = run_jobs(dict.fromkeys(large, BATCH_BYTES), differs, workers)
    return sorted(changed + [name for name in large if outcomes[name]]), missing


def _around(files: OpenFiles, path: Path, size: int, spans: list[tuple[int, int]]) -> Iterator[bytes]:
    position = 0
    for start, end in (*spans, (size, size)):
        for at in range(position, start, 1 << 20):
            yield files.read(path, at, min(start - at, 1 << 20))
        position = max(position, end)


class SourceChecks:
    """The checksums that a source's manifest has for its tensors, if there is one.

    Raises ReshardError if a file that a conversion reads (config, tokenizer, ``.metadata``) or a
    tensor's dtype or shape is not as the manifest has it.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        manifest = manifest_of(source)
        entries: dict[str, dict[str, Any]] = {} if manifest is None else manifest["tensors"]
        self.entries = {n: e for n, e in entries.items() if not source.leaves_out(n)}
        if manifest is None:
            return
        root = source.root if isinstance(source, MegatronSource) else source.path
        wanted = {name: entry for name, entry in manifest.get("files", {}).items() if self._reads(name)}
        changed, missing = changed_files(root, wanted)
        if changed or missing:
            what = f"{listed(changed or missing)} {'was changed' if changed else 'is missing'}"
            hint = (
                ", or pass --hf-config with the config that you mean"
                if (changed or missing)[0].startswith(f"{HF_FILES}/")
                else ""
            )
            raise ReshardError(f"{root}: {what} since {MANIFEST} was written; {ON_PURPOSE}{hint}")
        bad = differences(source.stored_tensors(), self.entries)
        if bad:
            raise ReshardError(
                f"{root}: {listed(bad)} do not have the dtype and shape of {MANIFEST}, or "
                f"only one of the two has them; {ON_PURPOSE}"
            )

    def _reads(self, name: str) -> bool:
        """Return True if a conversion of this source reads the file."""
        if not isinstance(self.source, MegatronSource):
            return True
        if name.startswith(f"{HF_FILES}/"):
            return self.source.hf_config is None
        within = "" if self.source.alone else f"{self.source.checkpoint.iteration}/"
        return name not in (TRACKER, FLAGS_FILE) and name.startswith(within)

    def names(self, name: str) -> list[str]:
        """Return the listed tensors that a canonical tensor is read from: itself, or its codes and
        what belongs to them."""
        if not self.plain(name) and name not in self.source.codes:  # type: ignore[attr-defined]
            return []  # rows of codes are not those of a view
        codes = self.source.codes.get(name) if isinstance(self.source, HuggingFaceSource) else None
        return [n for n in ((name,) if codes is None else codes.tensors) if n in self.entries]

    def unwatched(self) -> set[str]:
        """Return the listed tensors that no canonical one is compared with while it is read, such as experts in one."""
        watched = {listed for name in self.source.tensors for listed in self.names(name)}
        return self.entries.keys() - watched

    def compare(self, name: str, checksum: str) -> None:
        """Raise ReshardError if a tensor's checksum is not the listed one."""
        if name in self.entries and checksum != self.entries[name][CHECKSUM]:
            raise ReshardError(
                f"{self.source.path}: {name} does not have the checksum of {MANIFEST}: it is "
                f"damaged or was changed (reshard check names all such tensors); {ON_PURPOSE}"
            )

    def plain(self, name: str) -> bool:
        """Return True if a tensor is listed with the bytes that are read of it, not as codes."""
        return not (isinstance(self.source, HuggingFaceSource) and self.source.is_coded(name))

    def watch(self, name: str) -> "Watch | None":
        """Return what checks a tensor while it is read, None if nothing is listed."""
        return Watch(self, name) if self.names(name) else None


class Watch:
    """Checks the stored bytes of a tensor whose rows are read in order."""

    def __init__(self, checks: SourceChecks, name: str) -> None:
        self.checks = checks
        self.name, *self.others = checks.names(name)
        self.coded = not checks.plain(name)
        self.digest = xxhash.xxh3_128()

    def rows(self, rows: np.ndarray, start: int, stop: int) -> None:
        """Note that rows `start` .. `stop` were read. Of codes, the stored ones are read again,
        from the page cache."""
        if self.coded:
            assert isinstance(self.checks.source, HuggingFaceSource)
            rows = self.checks.source.read_stored_rows(self.name, start, stop)
        self.digest.update(memoryview(rows.view(np.uint8).reshape(-1)))

    def end(self) -> None:
        """Note that all rows were read. Raises ReshardError if the bytes are not those of the
        manifest."""
        self.checks.compare(self.name, self.digest.hexdigest())
        for name in self.others:
            info = self.checks.source.stored_tensors()[name]
            self.checks.compare(name, checksum_of(name, info, self.checks.source.read_stored_rows))


def check_listed(
    source: Source,
    part: int = 0,
    parts: int = 1,
    workers: int | None = None,
    names: Container[str] | None = None,
) -> None:
    """Read the tensors that a source's manifest lists, by default all, and compare their checksums; of
    several processes each does a part of them.

    Raises ReshardError for one that is not as it was written, and where there is no manifest, unless only
    some are asked for by `names`.
    """
    checks = SourceChecks(source)
    if not checks.entries and names is None:
        raise ReshardError(
            f"{source.path} has no {MANIFEST} with checksums of its tensors, so they cannot be verified: "
            "convert it with reshard, or do not ask for that"
        )
    infos, read = source.stored_tensors(), source.read_stored_rows
    wanted = sorted(name for name in checks.entries if names is None or name in names)[part::parts]
    sizes = {name: infos[name].size_bytes for name in wanted}
    run_jobs(sizes, lambda name: checks.compare(name, checksum_of(name, infos[name], read)), workers)


def checksum_of(name: str, info: TensorInfo, read: Callable[[str, int, int], np.ndarray]) -> str:
    """Return the checksum of a tensor, read a slab at a time."""
    digest = xxhash.xxh3_128()
    for start, stop in info.slabs():
        digest.update(memoryview(read(name, start, stop).view(np.uint8).reshape(-1)))
    return digest.hexdigest()
