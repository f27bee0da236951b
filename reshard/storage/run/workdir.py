"""A destination that appears whole or not at all: it is written in a hidden directory beside it
(`reshard.storage.run.partial`), whose `tree` takes the destination's name at the end."""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from reshard.core.errors import ReshardError
from reshard.core.system import exchange, sync_file
from reshard.storage.io.directories import (
    current_directory,
    inode_of,
    make_parents,
    nearest_directory,
    remove_empty,
    remove_tree,
    sync_directory,
)
from reshard.storage.io.files import write_error
from reshard.storage.manifest import NAME as MANIFEST
from reshard.storage.run.partial import (
    FINGERPRINT,
    MARK,
    NEW_MODE,
    REPLACED,
    SAVE,
    TREE,
    belongs_to_user,
    is_new,
    is_ours,
    partial_directory,
    read_fingerprint,
)


class Workdir:
    """The hidden directory of a run. Process 0 of a run that several processes share creates, locks and
    publishes it."""

    def __init__(
        self,
        source: Path,
        reads: Iterable[Path],
        destination: Path,
        overwrite: bool,
        resume: bool,
        process: int = 0,
    ) -> None:
        self.source, self.reads, self.given = source, list(reads), destination
        self.destination = Path(os.path.abspath(destination))
        self.path = partial_directory(self.destination)
        self.tree = self.path / TREE
        self.holds_current_directory = _is_in(current_directory(), os.path.realpath(self.destination))
        self.overwrite, self.resume, self.process = overwrite, resume, process
        self.lock: int | None = None
        self.prepared = False
        self._made_parents: list[Path] = []

    @property
    def notices(self) -> list[str]:
        """Notices for the user about the place that is written."""
        return []

    def check_destination(self) -> None:
        """Raise ReshardError if the destination is taken, overlaps the source or cannot be written.

        Before that, what an interrupted run of --overwrite has moved aside is put back.
        """
        with self._write_errors():
            self._check_place()
            self._recover()
            self._check_free()

    def check_without_recovery(self) -> None:
        """Raise what `check_destination` raises, and change nothing."""
        with self._write_errors():
            self._check_place()
            self._check_free()

    @contextlib.contextmanager
    def _write_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ReshardError(f"cannot write to {self.destination}: {error.strerror}") from error

    def _check_place(self) -> None:
        """Raise ReshardError if the destination overlaps the source, or nothing can be made beside it."""
        destination = self.destination
        if not destination.name:
            raise ReshardError(f"{destination} is the root directory; name a directory in it")
        parent = nearest_directory(destination)
        source = os.path.realpath(self.source)
        if os.path.commonpath((source, os.path.realpath(destination))) in (
            source,
            os.path.realpath(destination),
        ):
            raise ReshardError(
                f"{destination} and the source {self.source} overlap; write to a directory beside it"
            )
        self._check_reads()
        if destination.is_symlink():
            where = "" if destination.exists() else " to nowhere"
            raise ReshardError(f"{destination} is a symbolic link{where}; give the directory itself")
        if str(*self.given.parts[:1]).endswith(":") and not destination.parent.is_dir():
            address = str(self.given).replace(":/", "://", 1)  # s3://bucket/run, as a path
            raise ReshardError(f"{address} is an address, and was given as a Path: give it as text")
        if not parent.is_dir():
            raise ReshardError(f"{parent} is a file, not a directory")
        if not os.access(parent, os.W_OK | os.X_OK):
            raise ReshardError(f"cannot write in {parent}: permission denied or read-only")

    def _check_free(self) -> None:
        """Raise ReshardError if something is at the destination that the run may not replace."""
        destination = self.destination
        if destination.exists() and not destination.is_dir():
            raise ReshardError(f"{destination} is a file, not a directory")
        if os.path.ismount(destination):
            raise ReshardError(
                f"{destination} is a mount point, which cannot be renamed; give a directory in it"
            )
        if (
            destination.exists()
            and not self.overwrite
            and any(destination.iterdir())
            and not (self.resume and self._published())
        ):
            hint = (
                "; no interrupted run of it is left: reshard check says whether it is whole"
                if self.resume
                else ""
            )
            raise ReshardError(
                f"{destination} exists; pass --overwrite to replace it once the new one is complete{hint}"
            )

    def _check_reads(self) -> None:
        """Raise ReshardError if a file that is to be read would be removed: it lies in the
        destination or in the working directory, or a link leads there."""
        for path in (self.source, *self.reads):
            real = os.path.realpath(path)
            for place in (os.path.realpath(self.path), os.path.realpath(self.destination)):
                if _is_in(real, place):
                    raise ReshardError(
                        f"{path} is in {place}, which this run would empty or replace: move "
                        f"it away, and read it from there"
                    )

    def _published(self) -> bool:
        """Return True if the destination is what an interrupted run published, which did not
        come to clean up."""
        tree = read_fingerprint(self.path).get("tree") if is_ours(self.path) else None
        return (
            tree is not None
            and tree == inode_of(self.destination)
            and (self.destination / MANIFEST).is_file()
        )

    def open(self, fingerprint: str, resume: bool) -> bool:
        """Create and lock the directory; with `resume`, keep what an interrupted run of the same
        fingerprint left.

        Return True if that run had published its destination: then nothing is left to do, and
        the directory is gone.
        """
        try:
            self._made_parents = make_parents(self.path)
            with contextlib.suppress(FileExistsError):
                os.mkdir(self.path, NEW_MODE)
            self._lock()
        except BlockingIOError as error:
            raise ReshardError(f"another run is writing {self.destination}; wait for it to end") from error
        except FileNotFoundError as error:
            raise ReshardError(f"another run has just finished {self.destination}") from error
        except OSError as error:
            raise write_error(self.path, error) from error
        self.check_destination()
        try:
            if resume and self._published():
                same = read_fingerprint(self.path).get("run") == fingerprint
                self._empty()
                if same:
                    shutil.rmtree(self.path)
                    return True
                self.check_destination()
            self._prepare(fingerprint, resume)
            return False
        except OSError as error:
            raise write_error(Path(error.filename or self.path), error) from error

    def _lock(self) -> None:
        """Take the lock. Raises BlockingIOError if another run has it, ReshardError where the
        directory is not ours."""
        status = os.lstat(self.path)
        if not belongs_to_user(self.path, status):
            raise ReshardError(
                f"{self.path} belongs to another user ({status.st_uid}), whose run may have left it: write "
                "to a directory of another name, or have it removed"
            )
        if not (is_ours(self.path) or is_new(self.path)):
            raise ReshardError(
                f"{self.path} is in the way, and was not made by this version of reshard: move or remove it"
            )
        lock = os.open(self.path / MARK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(lock).st_ino != os.stat(self.path / MARK).st_ino:
                raise FileNotFoundError(errno.ENOENT, "removed meanwhile", str(self.path))
        except BaseException:
            os.close(lock)
            raise
        self.lock = lock  # from here on the directory is ours, to remove too

    def _recover(self) -> None:
        """Finish what a run that was killed while it published left: an old destination is put
        back, a new one stays."""
        if not is_ours(self.path):
            if self.lock is None and is_new(self.path):
                with contextlib.suppress(OSError):
                    os.rmdir(self.path)  # its run was killed as it began or ended
            return
        locked_here = self.lock is None
        try:
            if locked_here:
                self._lock()
        except (BlockingIOError, FileNotFoundError):
            return  # another run holds it
        try:
            replaced = self.path / REPLACED
            if replaced.is_dir():
                if not self.destination.exists():
                    os.rename(replaced, self.destination)
                elif not self.tree.exists():
                    remove_tree(replaced)  # both renames were made
                else:
                    raise ReshardError(
                        f"{replaced} holds what {self.destination} was before an interrupted "
                        f"run: move one of them away"
                    )
            recorded = read_fingerprint(self.path)
            if self.resume and self._published():
                return  # for `open` to see whether that was the same run
            if not recorded or recorded.get("tree") != inode_of(self.tree):
                # Nothing to go on with, or published: with an exchange, what is there now is the old
                # destination.
                self._empty()
                if locked_here:
                    shutil.rmtree(self.path)
        finally:
            if locked_here:
                self.close()

    def space(self, sizes: Mapping[str, int]) -> tuple[int, int]:
        """Return how many bytes files of these sizes have yet to take on the disk, and how many are
        free there."""
        needed = 0
        for name, size in sizes.items():
            try:
                needed += max(0, size - os.lstat(self.tree / name).st_blocks * 512)
            except OSError:
                needed += size
        status = os.statvfs(nearest_directory(self.destination))
        return needed, status.f_bavail * status.f_frsize

    def _prepare(self, fingerprint: str, resume: bool) -> None:
        recorded, self.prepared = read_fingerprint(self.path), True
        if resume and recorded:
            if recorded.get("run") != fingerprint:
                raise ReshardError(
                    f"{self.path} is of a run with another source, layout, options or number of processes; "
                    f"give the same, or drop --resume",
                    resumable=True,
                )
            return
        self._empty()
        self.tree.mkdir()
        (self.path / FINGERPRINT).write_text(
            json.dumps({"run": fingerprint, "tree": inode_of(self.tree)}), encoding="utf-8"
        )

    def _empty(self) -> None:
        """Remove everything but the mark; the fingerprint first, without which the rest counts for
        nothing."""
        (self.path / FINGERPRINT).unlink(missing_ok=True)
        with os.scandir(self.path) as entries:
            for entry in list(entries):
                if entry.name != MARK:
                    remove_tree(entry.path) if entry.is_dir(follow_symlinks=False) else os.unlink(entry.path)

    def write_file(self, relative: str, data: bytes | str, sync: bool = False) -> None:
        """Write a small file, with its directories."""
        path = self.tree / relative
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            with open(path, "xb") as file:
                file.write(data.encode() if isinstance(data, str) else data)
                if sync:
                    file.flush()
                    sync_file(file.fileno())
        except OSError as error:
            raise write_error(path, error) from error

    def publish(self, sync: bool = True) -> None:
        """Give the tree its final name, in one step wherever the system can; an old destination
        goes away only after that.

        Raises ReshardError, with the old destination in its place, where a rename fails.
        """
        try:
            if sync:
                for folder, _, _ in os.walk(self.tree):
                    sync_directory(folder)
            if not self.destination.exists() or not any(self.destination.iterdir()):
                os.rename(self.tree, self.destination)
            elif self.overwrite and not self.destination.is_symlink():
                self._replace()
            else:
                raise ReshardError(
                    f"{self.destination} has appeared meanwhile: move it away and run again with --resume",
                    resumable=True,
                )
        except OSError as error:
            raise ReshardError(
                f"cannot rename {self.tree} to {self.destination}: {error.strerror}; everything is written, "
                f"run again with --resume",
                True,
            ) from error
        self._after_rename(sync)
        sync_directory(self.destination.parent)
        with contextlib.suppress(OSError):  # the next run removes the rest
            self._empty()
            shutil.rmtree(self.path)

    def _after_rename(self, sync: bool) -> None:
        """Put in its place what follows the tree: nothing here."""

    def _replace(self) -> None:
        if exchange(self.tree, self.destination):
            return
        replaced = self.path / REPLACED
        os.rename(self.destination, replaced)
        try:
            os.rename(self.tree, self.destination)
        except OSError:
            os.rename(replaced, self.destination)
            raise

    def clean(self) -> None:
        """Remove what a save that was killed has left, or put back what it had moved aside; nothing
        while it is at it, or of what was none."""
        if read_fingerprint(self.path).get("run") != SAVE and not (self.path / REPLACED).exists():
            return
        with contextlib.suppress(OSError, ReshardError):
            self._recover()
            if is_ours(self.path):
                self._lock()
                self._empty()
                shutil.rmtree(self.path)
        self.close()

    def close(self, remove: bool = False) -> None:
        """Let go of the lock; with `remove`, delete what was written."""
        if self.lock is not None:
            if remove and (self.prepared or os.listdir(self.path) == [MARK]):
                shutil.rmtree(self.path, ignore_errors=True)
            os.close(self.lock)
        self.lock = None
        if remove:
            remove_empty(self._made_parents)


def fingerprint(*identity: object) -> str:
    """Return a digest of what makes two runs the same."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()


def _is_in(path: str | None, directory: str) -> bool:
    return path is not None and (path == directory or path.startswith(directory + os.sep))
