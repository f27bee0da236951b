"""A destination in an object store: files are written in a spool on this host, sent, and removed from it.

A store cannot rename. So what says that a checkpoint is whole, the manifest, is sent last
(`reshard.storage.stores.marks`), and what was at the place before is removed before the first file is sent.
"""

import contextlib
import hashlib
import json
import os
import secrets
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from reshard.core.errors import SHOWN_AS, OptionError, ReshardError, listed, shown
from reshard.core.printed import size
from reshard.core.version import __version__
from reshard.formats.torch_dist import TRACKER
from reshard.storage.destinations.huggingface import parse_size
from reshard.storage.io.directories import nearest_directory
from reshard.storage.manifest import NAME as MANIFEST
from reshard.storage.run.workdir import Workdir
from reshard.storage.sources.paths import ITERATION
from reshard.storage.stores.marks import RECORDS, RUN_MARK, record_name
from reshard.storage.stores.place import StorePlace, version_in

# Where the spool is, by default the system's directory for temporary files, and how many bytes of it a process takes.
SPOOL, SPOOL_SIZE, SPOOL_BYTES = "RESHARD_SPOOL", "RESHARD_SPOOL_SIZE", 16 * 10**9


TOKEN = "token"  # in a spool
WEIGHTS = (".safetensors", ".distcp")  # end the names of files with weights
MARK = ("run", "token", "goes_on")  # in the mark


class StoreWorkdir(Workdir):
    """The spool of a run, and the place in a store that it writes. Each process of a run has a spool of its own, unless
    they are `shared`: then the first one's holds all files at once.

    With `iteration`, the place is that of an iteration of a training run, whose tracker then names it. `reads` are
    other files than the source's that are read, and may not be at the place.
    """

    def __init__(
        self,
        source: Path,
        url: str,
        overwrite: bool,
        resume: bool,
        process: int = 0,
        shared: bool = False,
        iteration: int | None = None,
        reads: Iterable[Path] = (),
    ) -> None:
        self.place = StorePlace(url, "; run again with --resume")
        self.iteration, self.shared, self.spool_bytes = iteration, shared, spool_bytes()
        self.replaces, self.resumes, self.claimed, self.token = overwrite, resume, False, ""
        self.run, self.goes_on = "", False  # by which records are known that count; see `sent`
        self.sent_before = 0  # bytes
        digest = hashlib.sha256(self.place.url.encode()).hexdigest()[:16]
        name = digest if shared or not process else f"{digest}-{process}"
        super().__init__(source, reads, spool_directory() / name, True, False, process)
        self.holds_current_directory = False
        SHOWN_AS[str(self.destination)] = self.place.url

    @property
    def notices(self) -> list[str]:
        most = "all files" if self.shared else f"at most {size(self.spool_bytes)} or one file"
        told = [f"files go through {self.path.parent}, which holds {most} at a time ({SPOOL}, {SPOOL_SIZE})"]
        if self.sent_before:
            told.append(f"{size(self.sent_before)} had been sent before, and were not sent again")
        return told

    def check_destination(self) -> None:
        with self._write_errors():
            self._recover()
        self.check_without_recovery()

    def check_without_recovery(self) -> None:
        self._check_bucket()
        if self.iteration is not None and self.run_place.has(".metadata"):
            raise ReshardError(
                f"{self.run_place.url} is a checkpoint itself, to which no iteration can be added: give another place"
            )
        self._check_overlap()
        self._check_objects(self.place.objects())

    @property
    def run_place(self) -> StorePlace:
        """The place of the training run, in which the iteration's is."""
        return StorePlace(self.place.url.rpartition("/")[0], self.place.hint)

    def _check_bucket(self) -> None:
        if "/" not in self.place.url.partition("://")[2]:
            raise OptionError(
                f"{self.place.url} is a whole bucket: name a place in it, {self.place.url}/model"
            )

    def _check_overlap(self) -> None:
        """Raise ReshardError if the source lies in the place, or the place in the source."""
        own = f"{self.place.url}/"
        source, *others = (self.place.as_own(shown(f"{path}/")) for path in (self.source, *self.reads))
        if own.startswith(source) or any(path.startswith(own) for path in (source, *others)):
            raise ReshardError(
                f"{self.place.url} and the source {self.source}, or what is read beside it, overlap; write to a place "
                f"beside it"
            )

    def _check_objects(self, objects: Mapping[str, Any]) -> None:
        """Raise ReshardError if objects are at the place that the run may not remove."""
        if not objects or self.replaces or self.claimed:
            return
        unfinished = RUN_MARK in objects and MANIFEST not in objects
        if unfinished or (RUN_MARK in objects and self.resumes):
            return
        hint = (
            "; no interrupted run of it is left: reshard check says whether it is whole"
            if self.resumes
            else ""
        )
        raise ReshardError(
            f"{self.place.url} exists; pass --overwrite to remove what is there before the new one is sent{hint}"
        )

    def space(self, sizes: Mapping[str, int]) -> tuple[int, int]:
        """Return 0 and 1 where the spool has room. Raises ReshardError where it has not."""
        status = os.statvfs(nearest_directory(self.path))
        free = status.f_bavail * status.f_frsize
        needed = sum(sizes.values())
        if not self.shared:
            needed = min(needed, max(self.spool_bytes, max(sizes.values(), default=0)))
        if needed > free:
            raise ReshardError(
                f"the spool in {self.path.parent} needs {needed:,} bytes, but the disk has {free:,} free: set "
                f"{SPOOL} to a directory with more{'' if self.shared else f', or {SPOOL_SIZE} to less'}",
                resumable=True,
            )
        return 0, 1

    def open_spool(self) -> None:
        """Make and lock the spool of a process that is not the first, which has claimed the place."""
        super().open("", False)
        mark = _read_json(self.place, RUN_MARK)
        self.run, self.token = str(mark.get("run")), str(mark.get("token"))
        self.goes_on = mark.get("goes_on") is True

    def open(self, fingerprint: str, resume: bool) -> bool:
        """Make and lock the spool, and claim the place: what is there goes, but for what an interrupted run of the same
        fingerprint has sent. Return True if that run had sent everything."""
        super().open(fingerprint, False)
        fingerprint = f"{fingerprint} {__version__}"
        objects = self.place.objects()
        marked = RUN_MARK in objects
        recorded = _read_json(self.place, RUN_MARK).get("run") if marked else None
        if marked and MANIFEST in objects and resume and recorded == fingerprint:
            self._remove_marks(objects)
            return True
        goes_on = marked and MANIFEST not in objects and resume
        if goes_on and recorded != fingerprint:
            raise ReshardError(
                f"{self.place.url} is of a run with another source, layout, options or version of reshard; give the "
                f"same, or drop --resume",
                resumable=True,
            )
        self.claimed, self.token = True, secrets.token_hex(8)
        self.run, self.goes_on = fingerprint, goes_on
        # Without a manifest, what is there is no longer what anybody wrote down; then the mark, then the rest: at no
        # time is there a mixture of two checkpoints without the mark.
        if MANIFEST in objects:
            self.place.remove([MANIFEST])
        self.place.put(RUN_MARK, json.dumps({name: getattr(self, name) for name in MARK}).encode())
        (self.path / TOKEN).write_text(self.token, encoding="utf-8")
        if not goes_on:
            self.place.remove(sorted(name for name in objects if name not in (MANIFEST, RUN_MARK) and name))
        return False

    def check_shared(self, token: str) -> None:
        """Raise ReshardError if the spool here is not that of the first process, whose token this is."""
        try:
            same = (self.path / TOKEN).read_text(encoding="utf-8") == token
        except OSError:
            same = False
        if not same:
            raise ReshardError(
                f"rank {self.process} does not see {self.path}, which rank 0 has made for the files of "
                f"{self.place.url}: set {SPOOL} to a directory on a file system that all ranks share"
            )
        self.token = token

    def sent(self, sizes: Mapping[str, int]) -> dict[str, dict[str, Any]]:
        """Return the records of those files that are in the store as this run has sent them, or the one of the same
        fingerprint with which it goes on, by name."""
        objects = self.place.objects()
        names = [name for name in sizes if name in objects and record_name(name) in objects]
        records = self.place.each(lambda name: _read_json(self.place, record_name(name)), names)
        return {
            name: record
            for name, record in zip(names, records, strict=True)
            if (record.get("token") == self.token or (self.goes_on and record.get("run") == self.run))
            and record.get("version") == version_in(objects[name])
            and objects[name].get("size") == sizes[name]
            and isinstance(record.get("tensors"), dict)
        }

    def send(self, name: str, tensors: Mapping[str, list[Any]]) -> None:
        """Send a file of the spool, with a record of it and of its tensors, and remove it from the spool."""
        path = self.tree / name
        self._check_ours()
        version = self.place.put_file(name, path)
        self._check_not_late(name)
        record = {"version": version, "bytes": path.stat().st_size, "tensors": tensors}
        record |= {"run": self.run, "token": self.token}
        self.place.put(record_name(name), json.dumps(record).encode())
        path.unlink()

    def write_file(self, relative: str, data: bytes | str, sync: bool = False) -> None:
        """Send a small file; the manifest once all else is there (`publish`)."""
        content = data.encode() if isinstance(data, str) else data
        if relative == MANIFEST:
            self.manifest = content
        else:
            self._check_ours()
            self.place.put(relative, content)
            self._check_not_late(relative)

    def expect(self, sizes: Mapping[str, int]) -> None:
        """Say which files there have to be before the manifest is sent."""
        self.sizes = dict(sizes)

    def publish(self, sync: bool = True) -> None:
        """Send the manifest, where all files are as they were sent and no other run has come, and remove the marks.

        Raises ReshardError otherwise, and leaves no manifest.
        """
        lost = sorted(self.sizes.keys() - self.sent(self.sizes).keys())
        self._check_ours()
        if lost:
            raise ReshardError(
                f"{self.place.url}: {listed(lost, 3)} changed after being sent, so another run or program writes "
                "there; run again with --resume once it has ended",
                resumable=True,
            )
        self._remove_strays()
        self.place.put(MANIFEST, self.manifest)
        try:
            self._check_ours()  # whose files are there is not known, if another run has come meanwhile
        except ReshardError:
            self.place.remove([MANIFEST])
            raise
        self.claimed = False
        if self.iteration is not None:
            self.run_place.put(TRACKER, str(self.iteration).encode())
        self._remove_marks(self.place.objects())

    def _remove_strays(self) -> None:
        """Remove weights that a run which this one has replaced had on their way, and that are no part of this
        checkpoint."""
        own = {*self.sizes, *_files_of(json.loads(self.manifest))}
        strays = [name for name in self.place.objects() if name.endswith(WEIGHTS) and name not in own]
        self.place.remove(strays)

    def _check_ours(self) -> None:
        """Raise ReshardError if another run has claimed the place."""
        if not self._is_ours():
            self.claimed = False
            raise ReshardError(
                f"another run has begun to write {self.place.url}, and may have ended", resumable=True
            )

    def _check_not_late(self, name: str) -> None:
        """After an object was sent: raise ReshardError if another run has claimed the place meanwhile. Where that one
        has published, and the object is not as it has sent it, the place is marked as what it is, no whole
        checkpoint."""
        if self._is_ours():
            return
        self.claimed, is_published = False, self.place.has(MANIFEST)
        if is_published and name not in _files_of(_read_json(self.place, MANIFEST)):
            self.place.remove([name])  # of which the other run has none
        elif is_published and not _is_whole(self.place.url):
            self.place.put(RUN_MARK, b"{}")
            self.place.remove([MANIFEST])
            raise ReshardError(
                f"{name} came late to {self.place.url}, over that of another run, which has published: the checkpoint "
                f"there is no longer whole, and marked so; run one of the two again, with --overwrite"
            )
        self._check_ours()

    def _is_ours(self) -> bool:
        """Return True while no other run has claimed the place, and published there or not."""
        return self.place.has(RUN_MARK) and _read_json(self.place, RUN_MARK).get("token") == self.token

    def _remove_marks(self, objects: Iterable[str]) -> None:
        """Remove the records, and the run's own mark last."""
        self.place.remove([name for name in objects if name.startswith(f"{RECORDS}/") and name != RUN_MARK])
        self.place.remove([RUN_MARK])

    def close(self, remove: bool = False) -> None:
        """Remove the spool; with `remove`, also what was sent, the mark last."""
        super().close(remove=self.prepared)
        if remove and self.claimed:
            self.claimed = False
            with contextlib.suppress(ReshardError):  # then the mark stays, and nobody reads what does
                if not self._is_ours():
                    return  # what is there now is another run's
                self.place.remove(sorted(name for name in self.place.objects() if name not in ("", RUN_MARK)))
                self.place.remove([RUN_MARK])


def _files_of(manifest: Mapping[str, Any]) -> Iterable[str]:
    """Return the names of the files that a manifest lists."""
    files = manifest.get("files")
    return files if isinstance(files, dict) else ()


def _is_whole(url: str) -> bool:
    """Return True if what is at a URL is as its manifest says."""
    from reshard.storage.check import check

    try:
        return check(url).ok
    except ReshardError:
        return False


def spool_directory() -> Path:
    """Return the directory with the spools of this user."""
    return Path(os.environ.get(SPOOL) or tempfile.gettempdir()) / f"reshard-spool-{os.geteuid()}"


def spool_bytes() -> int:
    """Return how many bytes of a spool a process takes."""
    text = os.environ.get(SPOOL_SIZE)
    try:
        return parse_size(text) if text else SPOOL_BYTES
    except OptionError as error:
        raise OptionError(f"{SPOOL_SIZE}={text:.40} is not a size such as 16GB") from error


def iterations_in_store(url: str) -> list[str]:
    """Return the names of a training run's iterations at a URL."""
    names = {name.partition("/")[0] for name in StorePlace(url).objects() if "/" in name}
    return sorted(name for name in names if ITERATION.fullmatch(name))


def _read_json(place: StorePlace, name: str) -> dict[str, Any]:
    """Return a small JSON object; nothing of what is no such thing."""
    try:
        value = json.loads(place.read(name))
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
