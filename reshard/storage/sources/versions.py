"""The files of a source as they were before the first of them was read: what is made of them is
made of one version of each, or not at all."""

import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from reshard.core.errors import ReshardError, listed
from reshard.formats.ranges import forget_versions, ranged


class FileVersion(NamedTuple):
    """The size, times and inode of a file, also behind links: two versions differ in one of them.

    The time of the last change of any kind (ctime) is the one that nobody can set.
    """

    size_bytes: int
    mtime_ns: int
    ctime_ns: int
    inode: int


def version_of(path: Path) -> FileVersion | None:
    """Return the version of the file that a path leads to; None if it leads to none. Of an object in a store the tag
    stands for the time that nobody can set."""
    in_store = ranged(path)
    if in_store is not None:
        version = in_store.version()
        return None if version is None else FileVersion(*version)
    try:
        status = os.stat(path)
    except OSError:
        return None
    if stat.S_ISDIR(status.st_mode):
        return None
    return FileVersion(status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)


class FileVersions:
    """The versions of files, and of all in some directories, recorded before anything of them is
    read."""

    def __init__(self, *places: Path) -> None:
        self.recorded: dict[Path, FileVersion | None] = {}
        self.record(*places)

    def record(self, *places: Path) -> None:
        """Add further files and directories. What was recorded before stays. Raises ReshardError
        for a directory that may not be looked into."""
        try:
            for place in places:
                for path in place.iterdir() if place.is_dir() else (place,):
                    self.recorded.setdefault(path, version_of(path))
        except OSError as error:
            raise ReshardError(f"cannot look into {error.filename}: {error.strerror}") from error

    def __getitem__(self, path: Path) -> FileVersion | None:
        """Return the recorded version of a file; None if it was not there."""
        return self.recorded.get(path)

    @contextmanager
    def unchanged(self, paths: Callable[[], Iterable[Path]]) -> Iterator[None]:
        """Raise ReshardError at the end of the `with` block, naming them, where files are no longer
        those that were recorded. That is also why reading failed, if it did."""
        try:
            yield
        except ReshardError as error:
            try:
                self.check(paths())
            except ReshardError as reason:
                raise reason from error
            raise
        self.check(paths())

    def check(self, paths: Iterable[Path]) -> None:
        """Raise ReshardError, naming them, if files are no longer those that were recorded."""
        forget_versions()
        changed = sorted({path for path in paths if version_of(path) != self[path]})
        if changed:
            them = "it was" if len(changed) == 1 else "they were"
            raise ReshardError(
                f"{listed(changed, 3)} changed while {them} read, so what was read is not of one model: run again once "
                f"nothing writes there"
            )
