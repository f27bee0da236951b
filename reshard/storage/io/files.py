"""Open files by path, and whole reads and writes at offsets, with errors that name the file."""

import errno
import os
import threading
from pathlib import Path

from reshard.core.errors import ReshardError
from reshard.core.system import read_vectors, sync_file, write_vectors
from reshard.formats.ranges import ranged
from reshard.formats.small_files import read_at


class OpenFiles:
    """File descriptors by path, opened at first use and shared between threads: every access gives
    its own offset."""

    def __init__(self, flags: int = os.O_RDONLY) -> None:
        self.flags = flags
        self.descriptors: dict[Path, int] = {}
        self.lock = threading.Lock()

    @staticmethod
    def of_destination(write: bool) -> "OpenFiles":
        """Return the files of a destination, to be written or read. Links are not followed."""
        return OpenFiles((os.O_RDWR if write else os.O_RDONLY) | os.O_NOFOLLOW)

    def descriptor(self, path: Path) -> int:
        """Return the descriptor of a file. Raises ReshardError if it cannot be opened."""
        descriptor = self.descriptors.get(path)
        if descriptor is not None:
            return descriptor
        with self.lock:
            if path not in self.descriptors:
                try:
                    self.descriptors[path] = os.open(path, self.flags, 0o644)
                except OSError as error:
                    raise ReshardError(f"cannot open {path}: {error.strerror}") from error
            return self.descriptors[path]

    def read_into(self, path: Path, offset: int, *buffers: memoryview) -> None:
        """Fill buffers, one after the other, from a file. Raises ReshardError if the file ends
        before."""
        in_store = ranged(path)
        if in_store is not None:
            in_store.read_into(offset, buffers)
            return
        descriptor, left = self.descriptor(path), list(buffers)
        while left:
            try:
                n = read_vectors(descriptor, left, offset)
            except OSError as error:
                raise ReshardError(f"cannot read {path} at byte {offset}: {error.strerror}") from error
            offset += n
            if n == 0 and any(map(len, left)):
                raise ReshardError(
                    f"{path} ends at byte {offset}, {sum(map(len, left))} bytes too early: it is truncated"
                )
            left = _after(left, n)

    def read(self, path: Path, offset: int, length: int) -> bytes:
        """Return `length` bytes of a file, fewer at its end. Raises ReshardError if it cannot be
        read."""
        in_store = ranged(path)
        if in_store is not None:
            data = bytearray(max(0, min(length, in_store.size_bytes - offset)))
            in_store.read_into(offset, [memoryview(data)])
            return bytes(data)
        try:
            return read_at(self.descriptor(path), length, offset)
        except OSError as error:
            raise ReshardError(f"cannot read {path} at byte {offset}: {error.strerror}") from error

    def write(self, path: Path, offset: int, *data: memoryview | bytes) -> None:
        """Write all of `data`, one after the other, at an offset. Raises ReshardError if the
        disk is full or the file cannot be written."""
        descriptor, left = self.descriptor(path), [memoryview(piece) for piece in data if len(piece)]
        while left:
            try:
                n = write_vectors(descriptor, left, offset)
            except OSError as error:
                raise write_error(path, error) from error
            offset, left = offset + n, _after(left, n)

    def resize(self, path: Path, size_bytes: int) -> None:
        """Give a file its final length; new bytes are zero. Raises ReshardError if that is not
        allowed."""
        descriptor = self.descriptor(path)
        try:
            if os.fstat(descriptor).st_size != size_bytes:
                os.ftruncate(descriptor, size_bytes)
        except OSError as error:
            raise write_error(path, error) from error

    def sync(self, path: Path) -> None:
        """Wait until a file's bytes are on the disk. Raises OSError: only the caller knows what is
        lost then."""
        sync_file(self.descriptor(path))

    def replaced(self, path: Path) -> bool:
        """Return True if the path no longer leads to the file that is open: it was removed or
        replaced."""
        try:
            at_path, opened = os.lstat(path), os.fstat(self.descriptor(path))
        except (OSError, ReshardError):
            return True
        return (at_path.st_dev, at_path.st_ino, at_path.st_size) != (
            opened.st_dev,
            opened.st_ino,
            opened.st_size,
        )

    def close(self) -> dict[Path, OSError]:
        """Close all files. Return the errors of those that report only now that bytes were not
        written, as a file server may that is out of space."""
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


def _after(buffers: list[memoryview], count: int) -> list[memoryview]:
    """Return what is left of these buffers after `count` bytes."""
    for number, buffer in enumerate(buffers):
        if count < len(buffer):
            return [buffer[count:], *buffers[number + 1 :]]
        count -= len(buffer)
    return []


def write_error(path: Path, error: OSError) -> ReshardError:
    """Return the error for a failed write."""
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
