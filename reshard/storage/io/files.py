"""Reading and writing at offsets: open files by path, whole reads, whole writes, with errors that name the
file."""

import errno
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from reshard.core.errors import ReshardError


class OpenFiles:
    """File descriptors by path, opened at the first use and shared between threads; every access gives its
    own offset."""

    def __init__(self, flags: int = os.O_RDONLY) -> None:
        self.flags = flags
        self.descriptors: dict[Path, int] = {}
        self.lock = threading.Lock()

    def descriptor(self, path: Path) -> int:
        """The descriptor of a file. Raises ReshardError where it cannot be opened."""
        found = self.descriptors.get(path)
        if found is not None:
            return found
        with self.lock:
            if path not in self.descriptors:
                try:
                    self.descriptors[path] = os.open(path, self.flags, 0o644)
                except OSError as error:
                    raise ReshardError(f"cannot open {path}: {error.strerror}") from error
            return self.descriptors[path]

    def read_into(self, path: Path, offset: int, *buffers: memoryview) -> None:
        """Fill buffers, one after the other, from a file. Raises ReshardError where the file ends before."""
        descriptor, left = self.descriptor(path), list(buffers)
        while left:
            try:
                n = os.preadv(descriptor, left, offset)
            except OSError as error:
                raise ReshardError(f"cannot read {path} at byte {offset}: {error.strerror}") from error
            offset += n
            if n == 0 and any(map(len, left)):
                raise ReshardError(
                    f"{path} ends at byte {offset}, {sum(map(len, left))} bytes too early: it is truncated"
                )
            left = _after(left, n)

    def read(self, path: Path, offset: int, length: int) -> bytes:
        """`length` bytes of a file, fewer at its end. Raises ReshardError where it cannot be read."""
        try:
            return os.pread(self.descriptor(path), length, offset)
        except OSError as error:
            raise ReshardError(f"cannot read {path} at byte {offset}: {error.strerror}") from error

    def write(self, path: Path, offset: int, *data: memoryview | bytes) -> None:
        """Write all of `data`, one after the other, at an offset. Raises ReshardError where the disk is full or the
        file cannot be written."""
        descriptor, left = self.descriptor(path), [memoryview(piece) for piece in data if len(piece)]
        while left:
            try:
                n = os.pwritev(descriptor, left, offset)
            except OSError as error:
                raise write_error(path, error) from error
            offset, left = offset + n, _after(left, n)

    def resize(self, path: Path, size_bytes: int) -> None:
        """Give a file its final length; new bytes are zero. Raises ReshardError where that is not allowed."""
        descriptor = self.descriptor(path)
        try:
            if os.fstat(descriptor).st_size != size_bytes:
                os.ftruncate(descriptor, size_bytes)
        except OSError as error:
            raise write_error(path, error) from error

    def sync(self, path: Path) -> None:
        """Wait until a file's bytes are on the disk. Raises OSError: what is lost then is the caller's to
        say."""
        os.fsync(self.descriptor(path))

    def replaced(self, path: Path) -> bool:
        """Whether the path no longer leads to the file that is open: it was removed, or another has taken its
        place."""
        try:
            found, opened = os.lstat(path), os.fstat(self.descriptor(path))
        except (OSError, ReshardError):
            return True
        return (found.st_dev, found.st_ino, found.st_size) != (opened.st_dev, opened.st_ino, opened.st_size)

    def close(self) -> dict[Path, OSError]:
        """Close all files; those that say only now that bytes were not written, as a server may that is out
        of space."""
        errors = {}
        with self.lock:
            for path, descriptor in self.descriptors.items():
                try:
                    os.close(descriptor)
                except OSError as error:
                    errors[path] = error
            self.descriptors.clear()
        return errors

    def __enter__(self) -> "OpenFiles":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class EarlySync:
    """Brings files to the disk while they are being written, so that little is left to wait for at the end of
    the `with` block.

    What is passed to `written` goes to `on_disk`, in lists, once every file has been synced after it; a file
    whose sync fails goes to `on_lost` at once, since the kernel tells it once and a later sync would succeed.
    `check` raises that error, and so does the end of the block.
    """

    def __init__(
        self,
        files: OpenFiles,
        paths: list[Path],
        on_disk: Callable[[list], None],
        on_lost: Callable[[Path], None],
    ) -> None:
        self.files, self.paths, self.on_disk, self.on_lost = files, paths, on_disk, on_lost
        self.waiting: list = []
        self.lock = threading.Lock()
        self.ended = threading.Event()
        self.error: ReshardError | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)

    def written(self, item: object) -> None:
        """All bytes of something are written, but not yet on the disk."""
        with self.lock:
            self.waiting.append(item)

    def check(self) -> None:
        """Raise ReshardError where a sync has failed."""
        if self.error is not None:
            raise self.error

    def _take(self) -> list:
        with self.lock:
            taken, self.waiting = self.waiting, []
        return taken

    def _run(self) -> None:
        while not self.ended.wait(0.02) and self.error is None:
            taken = self._take()
            for path in self.paths:
                if self.ended.is_set() or not self._sync(
                    path, lambda path: os.fdatasync(self.files.descriptor(path))
                ):
                    break
            else:
                self._confirm(taken)
                continue
            with self.lock:
                self.waiting += taken

    def _sync(self, path: Path, sync: Callable[[Path], None]) -> bool:
        try:
            sync(path)
        except OSError as error:
            self.on_lost(path)
            self.error = self.error or write_error(path, error)
        return self.error is None

    def _confirm(self, items: list) -> None:
        try:
            self.on_disk(items)
        except ReshardError as error:
            self.error = error

    def __enter__(self) -> "EarlySync":
        try:
            self.thread.start()
        except RuntimeError as error:
            raise ReshardError(
                f"the system has no thread left for this process ({error}); use fewer --workers",
                resumable=True,
            ) from error
        return self

    def __exit__(self, kind: type | None, *exc: object) -> None:
        self.ended.set()
        self.thread.join()
        if kind is not None:
            return
        if self.error is None:
            try:
                with ThreadPoolExecutor(4) as pool:
                    list(pool.map(lambda path: self._sync(path, self.files.sync), self.paths))
            except RuntimeError:  # the system has no threads left
                for path in self.paths:
                    self._sync(path, self.files.sync)
        self.check()
        self._confirm(self._take())
        self.check()


class NoSync:
    """Stands for `EarlySync` where nobody waits for the disk: what is written counts as done."""

    def __init__(
        self,
        files: OpenFiles,
        paths: list[Path],
        on_disk: Callable[[list], None],
        on_lost: Callable[[Path], None],
    ) -> None:
        self.on_disk = on_disk

    def written(self, item: object) -> None:
        """All bytes of something are written."""
        self.on_disk([item])

    def check(self) -> None:
        """There is nothing that could have failed."""

    def __enter__(self) -> "NoSync":
        return self

    def __exit__(self, *exc: object) -> None:
        pass


def _after(buffers: list[memoryview], count: int) -> list[memoryview]:
    """What is left of these after `count` bytes."""
    for number, buffer in enumerate(buffers):
        if count < len(buffer):
            return [buffer[count:], *buffers[number + 1 :]]
        count -= len(buffer)
    return []


def write_error(path: Path, error: OSError) -> ReshardError:
    """The sentence for a failed write."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ReshardError(
            f"the disk is full: {path} could not be written; free some space and run again with --resume",
            resumable=True,
        )
    return ReshardError(f"cannot write {path}: {error.strerror}")


def allow_many_files() -> None:
    """Raise the soft limit of open files to the hard one: a layout has a file for each rank."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
