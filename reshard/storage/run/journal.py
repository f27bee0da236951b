"""The journal of a run, one for each of its processes: which tensors are written. It is believed
only as far as the files bear it out.

A file that is not the inode that was written, or not of its length, is written again before
anything else. The run itself reads the bytes of the others again, and compares their checksums.

Files may be as large as a sixteenth of the checkpoint, and all of them are written at the same
time: so what is done is kept by tensor, not by file.

A line is a JSON list, one of three kinds:

    ["file", NAME, INODE]                     NAME was created, as this inode: nothing in it is written yet
    ["done", TENSOR, CHECKSUM, COUNT, BOOT]   all bytes that this process writes of TENSOR are in their files
    ["lost", TENSOR]                          they are no longer what was written

`BOOT` is empty if the bytes were on the disk before the line was written. Without waiting for
the disk it is the id of the machine's boot: the page cache holds the bytes when the process dies,
not when the machine does. `COUNT` is how many numbers overflowed.
"""

import json
import os
import secrets
import stat
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from reshard.core.system import boot_id, sync_data, sync_file
from reshard.storage.io.files import write_error


class Done(NamedTuple):
    """A finished tensor: the checksum of its bytes, and how many numbers overflowed."""

    checksum: str
    overflowed: int


class Journal:
    """The journal of one process.

    `root` holds the files, and `files` names those that each tensor touches. With `synced`, tensors
    are recorded once their bytes are on the disk. Raises ReshardError if it cannot be written.
    """

    def __init__(
        self,
        path: Path,
        root: Path,
        sizes: Mapping[str, int],
        files: Mapping[str, Iterable[str]],
        synced: bool,
    ) -> None:
        self.path, self.root, self.sizes = path, root, sizes
        self.files = {tensor: set(names) for tensor, names in files.items()}
        self.synced = synced
        # Where nobody knows whether the machine was started anew since, what is not synced counts for this process.
        self.boot = boot_id() or secrets.token_hex(16)
        self.lock = threading.Lock()
        self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o644)
        self.inodes: dict[str, int] = {}
        self.finished: dict[str, Done] = {}
        try:
            self._read()
        except (ValueError, TypeError, RecursionError, KeyError):
            # It is damaged: a line that is lost could be the one that takes another back.
            os.ftruncate(self.descriptor, 0)
            self.inodes, self.finished = {}, {}

    def _read(self) -> None:
        with open(self.path, "rb") as file:
            data = file.read()
        end = data.rfind(b"\n") + 1
        if end < len(data):
            os.ftruncate(self.descriptor, end)  # a line that was being written when the process died
        unsynced: dict[str, Done] = {}
        for line in data[:end].split(b"\n")[:-1]:
            kind, name, *rest = json.loads(line)
            if not isinstance(name, str):
                raise ValueError("a name that is not text")
            if kind == "file":
                (inode,) = rest
                self.inodes[name] = int(inode)
                self._forget(name)
            elif kind == "done":
                checksum, overflowed, boot = rest
                if boot in ("", self.boot) and name in self.files:
                    self.finished[name] = Done(str(checksum), int(overflowed))
                    unsynced.pop(name, None)
                    if boot:
                        unsynced[name] = self.finished[name]
            elif kind == "lost":
                self.finished.pop(name, None)
            else:
                raise ValueError(f"a line of kind {kind}")
        for name in {name for tensor in unsynced if tensor in self.finished for name in self.files[tensor]}:
            # The process died before the disk could say that it is full.
            if self.intact(name) and not _reaches_the_disk(self.root / name):
                self.forget(name)

    def intact(self, name: str) -> bool:
        """Return True if a file is the one that was written, at its full length."""
        try:
            status = os.lstat(self.root / name)
        except OSError:
            return False
        return (
            stat.S_ISREG(status.st_mode)
            and status.st_ino == self.inodes.get(name)
            and status.st_size == self.sizes[name]
        )

    def create(self, names: Iterable[str]) -> None:
        """Create the files that are not intact, empty, and forget what was in them. Whatever is in
        their place is removed."""
        try:
            created = []
            for name in names:
                if not self.intact(name):
                    path = self.root / name
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.unlink(missing_ok=True)
                    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
                    self.inodes[name] = os.fstat(descriptor).st_ino
                    os.close(descriptor)
                    self._forget(name)
                    created.append(json.dumps(["file", name, self.inodes[name]]))
            # Before a file has its length, and with it looks like one that is written.
            self._append(created)
            if self.synced and created:
                sync_file(self.descriptor)
        except OSError as error:
            raise write_error(Path(error.filename or self.path), error) from error

    def record(self, tensors: Iterable[tuple[str, Done]]) -> None:
        """Note that tensors are finished; with `synced`, after the bytes of all files that they
        touch are on the disk."""
        boot = "" if self.synced else self.boot
        try:
            self._append(
                [json.dumps(["done", name, done.checksum, done.overflowed, boot]) for name, done in tensors]
            )
        except OSError as error:
            raise write_error(self.path, error) from error

    def forget(self, name: str) -> None:
        """Take a file for lost: its bytes have not reached the disk, and the kernel reports that
        only once. Never raises."""
        for step in (
            lambda: (self.root / name).unlink(),
            lambda: self._append([json.dumps(["file", name, 0])]),
        ):
            try:  # either is enough, and a full disk may refuse the second
                step()
            except OSError:
                continue
        self.inodes.pop(name, None)
        self._forget(name)

    def lose(self, path: Path) -> None:
        """Forget the file at this path, as `forget` does."""
        self.forget(str(path.relative_to(self.root)))

    def unfinish(self, tensors: Iterable[str]) -> None:
        """Note that tensors are to be written again: their bytes in the files are not those that were
        written."""
        try:
            self._append([json.dumps(["lost", name]) for name in sorted(tensors)])
        except OSError as error:
            raise write_error(self.path, error) from error
        for name in tensors:
            self.finished.pop(name, None)

    def _forget(self, name: str) -> None:
        for tensor in [tensor for tensor in self.finished if name in self.files[tensor]]:
            del self.finished[tensor]

    def _append(self, lines: list[str]) -> None:
        data = "".join(f"{line}\n" for line in lines).encode()
        with self.lock:
            before = os.fstat(self.descriptor).st_size
            try:
                while data:
                    data = data[os.write(self.descriptor, data) :]
            except OSError:
                os.ftruncate(self.descriptor, before)  # no half a line, to which the next one would be joined
                raise

    def close(self) -> None:
        """Close the file."""
        os.close(self.descriptor)


def _reaches_the_disk(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        sync_data(descriptor)
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
