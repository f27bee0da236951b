"""A destination that appears whole or not at all.

Everything is written to a hidden directory beside the destination, whose `tree` takes the destination's name
at the end:

    .DST.reshard-partial/
      reshard-run      marks the directory as ours; a lock on it keeps a second run away. An empty directory with the sticky bit is one of
                       ours that has no mark yet
      fingerprint      what the run makes of what, and the inode of its tree
      journal-0 ...    the tensors that each process has finished
      tree/            what becomes DST
      replaced/        the old DST, where the system cannot exchange the two at once

Only a directory with that mark, made by the user who runs this, is ever touched.
"""

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from reshard.core.errors import ReshardError
from reshard.formats.torch_dist import TRACKER
from reshard.storage.io.files import write_error
from reshard.storage.manifest import NAME as MANIFEST

MARK, FINGERPRINT, TREE, REPLACED = "reshard-run", "fingerprint", "tree", "replaced"
# What the fingerprint of a live model's save says, which nobody resumes.
SAVE = "a save of a live model"
_MAX_NAME_BYTES, _HIDDEN_END = 255, ".reshard-partial"
# How the directory is made: a bit that nobody else's empty directories have says that it is ours before there
# is a mark in it. Nobody else writes into it, whatever the umask.
_NEW = 0o1755
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
# How many files are removed at a time.
REMOVERS = 8


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
        self.source, self.reads, self.destination = source, list(reads), Path(os.path.abspath(destination))
        self.path = _hidden(self.destination)
        self.tree = self.path / TREE
        self.overwrite, self.resume, self.process = overwrite, resume, process
        self.lock: int | None = None
        self.prepared = False

    def check_destination(self) -> None:
        """Raise ReshardError where the destination is taken, overlaps the source or cannot be written.

        Before that, what an interrupted run of --overwrite has moved aside is put back.
        """
        destination, parent = self.destination, self.destination.parent
        if not destination.name:
            raise ReshardError(f"{destination} is the root directory; name a directory in it")
        source = os.path.realpath(self.source)
        if os.path.commonpath((source, os.path.realpath(destination))) in (
            source,
            os.path.realpath(destination),
        ):
            raise ReshardError(
                f"{destination} and the source {self.source} overlap; write to a directory beside it"
            )
        self._check_reads()
        try:
            if destination.is_symlink():
                where = "" if destination.exists() else " to nowhere"
                raise ReshardError(f"{destination} is a symbolic link{where}; give the directory itself")
            if not parent.is_dir():
                raise ReshardError(f"{parent} is not a directory; create it first")
            if not os.access(parent, os.W_OK | os.X_OK):
                raise ReshardError(f"cannot write in {parent}: permission denied or read-only")
            self._recover()
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
        except OSError as error:
            raise ReshardError(f"cannot write to {destination}: {error.strerror}") from error

    def _check_reads(self) -> None:
        """Raise ReshardError where a file that is to be read would be removed: it lies in the destination or
        in the working directory, or a link leads there."""
        for path in (self.source, *self.reads):
            real = os.path.realpath(path)
            for place in (os.path.realpath(self.path), os.path.realpath(self.destination)):
                if real == place or real.startswith(place + os.sep):
                    raise ReshardError(
                        f"{path} is in {place}, which this run would empty or replace: move "
                        f"it away, and read it from there"
                    )

    def _published(self) -> bool:
        """Whether the destination is what an interrupted run has published that did not come to clean up."""
        tree = self._recorded().get("tree") if _is_ours(self.path) else None
        return (
            tree is not None and tree == _inode(self.destination) and (self.destination / MANIFEST).is_file()
        )

    def open(self, fingerprint: str, resume: bool) -> bool:
        """Create and lock the directory; with `resume`, keep what an interrupted run of the same fingerprint
        left.

        True where that run had published its destination: then nothing is left to do, and the directory is
        gone.
        """
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(self.path, _NEW)
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
                same = self._recorded().get("run") == fingerprint
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
        """Take the lock. Raises BlockingIOError where another run has it, ReshardError where the directory is
        not ours."""
        status = os.lstat(self.path)
        if not _is_own(self.path, status):
            raise ReshardError(
                f"{self.path} belongs to another user ({status.st_uid}), whose run may have left it: write to a directory of "
                f"another name, or have it removed"
            )
        if not (_is_ours(self.path) or _is_new(self.path)):
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
        """Finish what a run that was killed while it published left: an old destination is put back, a new
        one stays."""
        if not _is_ours(self.path):
            if self.lock is None and _is_new(self.path):
                with contextlib.suppress(OSError):
                    os.rmdir(self.path)  # its run was killed as it began or ended
            return
        locked_here = self.lock is None
        try:
            if locked_here:
                self._lock()
        except (BlockingIOError, FileNotFoundError):
            return  # another run is at it
        try:
            replaced = self.path / REPLACED
            if replaced.is_dir():
                if not self.destination.exists():
                    os.rename(replaced, self.destination)
                elif not self.tree.exists():
                    _remove(replaced)  # both renames were made
                else:
                    raise ReshardError(
                        f"{replaced} holds what {self.destination} was before an interrupted "
                        f"run: move one of them away"
                    )
            recorded = self._recorded()
            if self.resume and self._published():
                return  # for `open` to see whether that was the same run
            if not recorded or recorded.get("tree") != _inode(self.tree):
                # Nothing to go on with, or published: with an exchange, what is there now is the old
                # destination.
                self._empty()
                if locked_here:
                    shutil.rmtree(self.path)
        finally:
            if locked_here:
                self.close()

    def _recorded(self) -> dict:
        return _recorded_in(self.path)

    def space(self, sizes: Mapping[str, int]) -> tuple[int, int]:
        """The bytes that files of these sizes have yet to take on the disk, and those that are free there."""
        needed = 0
        for name, size in sizes.items():
            try:
                needed += max(0, size - os.lstat(self.tree / name).st_blocks * 512)
            except OSError:
                needed += size
        folder = next(parent for parent in self.destination.parents if parent.is_dir())
        status = os.statvfs(folder)
        return needed, status.f_bavail * status.f_frsize

    def _prepare(self, fingerprint: str, resume: bool) -> None:
        recorded, self.prepared = self._recorded(), True
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
            json.dumps({"run": fingerprint, "tree": _inode(self.tree)}), encoding="utf-8"
        )

    def _empty(self) -> None:
        """Remove everything but the mark; the fingerprint first, without which the rest counts for
        nothing."""
        (self.path / FINGERPRINT).unlink(missing_ok=True)
        with os.scandir(self.path) as entries:
            for entry in list(entries):
                if entry.name != MARK:
                    _remove(entry.path) if entry.is_dir(follow_symlinks=False) else os.unlink(entry.path)

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
                    os.fsync(file.fileno())
        except OSError as error:
            raise write_error(path, error) from error

    def publish(self, sync: bool = True) -> None:
        """Give the tree its final name, in one step wherever the system can; an old destination goes away
        only after that.

        Raises ReshardError, with the old destination in its place, where a rename fails.
        """
        try:
            if sync:
                for folder, _, _ in os.walk(self.tree):
                    _sync_directory(folder)
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
        self._follow()
        _sync_directory(self.destination.parent)
        with contextlib.suppress(OSError):  # the next run removes the rest
            self._empty()
            shutil.rmtree(self.path)

    def _follow(self) -> None:
        """Put in its place what comes after the tree."""

    def _replace(self) -> None:
        if _exchange(self.tree, self.destination):
            return
        replaced = self.path / REPLACED
        os.rename(self.destination, replaced)
        try:
            os.rename(self.tree, self.destination)
        except OSError:
            os.rename(replaced, self.destination)
            raise

    def clean(self) -> None:
        """Remove what a save that was killed has left, or put back what it had moved aside; nothing while it is at it, or
        of what was none."""
        if self._recorded().get("run") != SAVE and not (self.path / REPLACED).exists():
            return
        with contextlib.suppress(OSError, ReshardError):
            self._recover()
            if _is_ours(self.path):
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


class AddedIteration(Workdir):
    """The hidden directory of an iteration in the directory of a training run, which is made where there is none. What
    belongs to it (config, tokenizer, flags, manifest) is in its own directory; nothing else there is touched. The run's
    tracker names it once it is there: whatever happens between, that names an iteration that is whole."""

    made_run = False

    def check_destination(self) -> None:
        """See `Workdir`; removes what saves of other iterations have left that were killed."""
        run = self.destination.parent
        if (run / ".metadata").exists() or any(run.glob("*.safetensors")):
            raise ReshardError(
                f"{run} is a checkpoint itself, to which no iteration can be added: give another directory"
            )
        if not run.exists() and run.parent.is_dir():
            try:
                run.mkdir()
            except OSError as error:
                raise write_error(run, error) from error
            self.made_run = True
        for path in run.glob(".iter_*.reshard-partial"):
            name = path.name.removeprefix(".").removesuffix(".reshard-partial")
            if path != self.path and name.removeprefix("iter_").isdecimal():
                Workdir(self.source, (), run / name, False, False).clean()
        super().check_destination()

    def close(self, remove: bool = False) -> None:
        """See `Workdir`."""
        super().close(remove)
        if remove and self.made_run:
            with contextlib.suppress(OSError):  # somebody has put something there
                self.destination.parent.rmdir()

    def _follow(self) -> None:
        tracker, new = self.destination.parent / TRACKER, self.path / TRACKER
        number = str(int(self.destination.name.removeprefix("iter_")))
        try:
            new.write_text(number, encoding="utf-8")
            os.replace(new, tracker)
        except OSError as error:
            raise ReshardError(
                f"{self.destination} is whole, but {tracker} could not be replaced ({error.strerror}): write {number} into it"
            ) from error


def _remove(tree: str | Path) -> None:
    """Remove a directory and all in it, several files at a time: a system frees the memory or the blocks of a large
    one for as long as it takes."""
    files = [os.path.join(folder, name) for folder, _, names in os.walk(tree) for name in names]
    with contextlib.suppress(OSError, RuntimeError), ThreadPoolExecutor(REMOVERS) as pool:
        list(pool.map(os.unlink, files))  # what is left, and why, is said next
    shutil.rmtree(tree)


def unfinished(path: Path) -> str | None:
    """What a path is, or the destination of, that a run has not finished, and how to go on, as a sentence; None where there is
    no such run."""
    for folder in (_hidden(Path(os.path.abspath(path))), path, path.parent):
        if not folder.name.endswith(_HIDDEN_END) or not _is_ours(folder) or not _recorded_in(folder):
            continue
        name = folder.name.removeprefix(".").removesuffix(_HIDDEN_END)
        what = folder.with_name(name)
        if _hidden(what) != folder:  # of a name that is too long
            what = path
        if _is_locked(folder):
            return f"a run is writing {what}, in {folder}: wait for it to end"
        if _recorded_in(folder).get("run") == SAVE:
            return f"{folder} is what a save of {what} has left that did not end: save again"
        return (
            f"{folder} is what an interrupted run has left of {what}: the same command with --resume goes on with it, and without "
            f"begins anew"
        )
    return None


def _hidden(destination: Path) -> Path:
    """The hidden directory of a destination."""
    name = f".{destination.name}{_HIDDEN_END}"
    if len(os.fsencode(name)) > _MAX_NAME_BYTES:
        name = f".{hashlib.sha256(os.fsencode(destination.name)).hexdigest()}{_HIDDEN_END}"
    return destination.parent / name


def _recorded_in(folder: Path) -> dict:
    """What a run says of itself in its hidden directory; nothing where it has not come to that."""
    try:
        recorded = json.loads((folder / FINGERPRINT).read_text(encoding="utf-8"))
        return recorded if isinstance(recorded, dict) else {}
    except (OSError, ValueError, RecursionError):
        return {}


def _is_locked(folder: Path) -> bool:
    """Whether a run is at it."""
    try:
        with open(folder / MARK, "rb") as mark:
            fcntl.flock(mark, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def _is_ours(path: Path) -> bool:
    """Whether a path is a directory of this user's, no link to one, that bears the mark."""
    try:
        status = os.lstat(path)
        marked = stat.S_ISDIR(status.st_mode) and stat.S_ISREG(os.lstat(path / MARK).st_mode)
        return marked and _is_own(path, status)
    except (OSError, ValueError):  # of a name that can be no file's, too
        return False


def _is_own(path: Path, status: os.stat_result) -> bool:
    """Whether a path belongs to the user who runs this, by the name that its file system has for him: a server may have
    another, or one for all."""
    if status.st_uid == os.geteuid():
        return True
    try:
        with tempfile.TemporaryFile(dir=path.parent) as probe:
            return os.fstat(probe.fileno()).st_uid == status.st_uid
    except OSError:
        return False


def _is_new(path: Path) -> bool:
    """Whether a path is a directory as `open` makes it, without its mark yet, or without it again: empty,
    with the bit that says so."""
    try:
        status = os.lstat(path)
        new = stat.S_ISDIR(status.st_mode) and bool(status.st_mode & stat.S_ISVTX)
        return new and _is_own(path, status) and not os.listdir(path)
    except OSError:
        return False


def _inode(path: Path) -> int | None:
    try:
        return os.lstat(path).st_ino
    except OSError:
        return None


def _sync_directory(path: str | Path) -> None:
    # not every file system takes it, and a directory may be writable but not readable
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _exchange(a: Path, b: Path) -> bool:
    """Exchange two directories' names in one step; False where the system or the file system cannot. Raises
    OSError."""
    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if function is None:
        return False
    if function(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EPERM):
        return False
    raise OSError(number, os.strerror(number), str(a))


def fingerprint(*things: object) -> str:
    """A digest of what makes two runs the same."""
    return hashlib.sha256(json.dumps(things, sort_keys=True, default=str).encode()).hexdigest()
