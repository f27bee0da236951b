"""Reading and writing at offsets: open files by path, whole reads, whole writes, with errors that name the file."""

import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from reshard.errors import ReshardError


class OpenFiles:
    """File descriptors by path, opened at the first use and shared between threads; every access gives its own offset."""

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

    def read_into(self, path: Path, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from a file. Raises ReshardError where the file ends before."""
        descriptor, done = self.descriptor(path), 0
        while done < len(buffer):
            try:
                n = os.preadv(descriptor, [buffer[done:]], offset + done)
            except OSError as error:
                raise ReshardError(f"cannot read {path} at byte {offset + done}: {error.strerror}") from error
            if n == 0:
                raise ReshardError(f"{path} ends at byte {offset + done}, {len(buffer) - done} bytes too early: it is truncated")
            done += n

    def read(self, path: Path, offset: int, length: int) -> bytes:
        """`length` bytes of a file, fewer at its end."""
        return os.pread(self.descriptor(path), length, offset)

    def write(self, path: Path, offset: int, data: memoryview | bytes) -> None:
        """Write all of `data` at an offset. Raises ReshardError where the disk is full or the file cannot be written."""
        descriptor, done, view = self.descriptor(path), 0, memoryview(data)
        while done < len(view):
            try:
                done += os.pwrite(descriptor, view[done:], offset + done)
            except OSError as error:
                raise write_error(path, error) from error

    def resize(self, path: Path, size_bytes: int) -> None:
        """Give a file its final length; new bytes are zero. Raises ReshardError where that is not allowed."""
        descriptor = self.descriptor(path)
        try:
            if os.fstat(descriptor).st_size != size_bytes:
                os.ftruncate(descriptor, size_bytes)
        except OSError as error:
            raise write_error(path, error) from error

    def sync(self, path: Path) -> None:
        """Wait until a file's bytes are on the disk."""
        try:
            os.fsync(self.descriptor(path))
        except OSError as error:
            raise write_error(path, error) from error

    def close(self) -> None:
        """Close all files."""
        with self.lock:
            for descriptor in self.descriptors.values():
                os.close(descriptor)
            self.descriptors.clear()

    def __enter__(self) -> "OpenFiles":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class EarlySync:
    """Brings files to the disk while they are being written, so that little is left to wait for at the end of the `with` block."""

    def __init__(self, files: OpenFiles, paths: list[Path]) -> None:
        self.files, self.paths = files, paths
        self.ended = threading.Event()
        self.error: ReshardError | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while not self.ended.wait(0.02):
            for path in self.paths:
                if self.ended.is_set():
                    return
                try:
                    os.fdatasync(self.files.descriptor(path))
                except OSError as error:
                    self.error = write_error(path, error)  # the kernel tells it once: a later sync would succeed
                    return

    def __enter__(self) -> None:
        self.thread.start()

    def __exit__(self, kind: type | None, *exc: object) -> None:
        self.ended.set()
        self.thread.join()
        if self.error is not None and kind is None:
            raise self.error
        if kind is None:
            with ThreadPoolExecutor(4) as pool:
                list(pool.map(self.files.sync, self.paths))


def write_error(path: Path, error: OSError) -> ReshardError:
    """The sentence for a failed write."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ReshardError(f"the disk is full: {path} could not be written; free some space and run again with --resume", resumable=True)
    return ReshardError(f"cannot write {path}: {error.strerror}")


def allow_many_files() -> None:
    """Raise the soft limit of open files to the hard one: a layout has a file for each rank."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
