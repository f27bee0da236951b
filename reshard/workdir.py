"""A destination that appears whole or not at all.

Everything is written to a hidden directory beside the destination and renamed at the end. A journal in it lists the tensors that
are done, so that an interrupted run can go on; a lock keeps a second run away.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from pathlib import Path

from reshard.errors import ReshardError
from reshard.files import write_error

LOCK = ".lock"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Workdir:
    """The hidden directory of a run. Process 0 of a run that several processes share creates, locks and publishes it."""

    def __init__(self, source: Path, destination: Path, overwrite: bool, process: int = 0) -> None:
        self.source, self.destination = source, Path(os.path.abspath(destination))
        self.path = self.destination.with_name(f".{self.destination.name}.reshard-partial")
        self.overwrite, self.process = overwrite, process
        self.lock: int | None = None
        self.journal: int | None = None

    def check_destination(self) -> None:
        """Raise ReshardError where the destination is taken, overlaps the source or cannot be written."""
        source, destination = os.path.realpath(self.source), os.path.realpath(self.destination)
        if os.path.commonpath((source, destination)) in (source, destination):
            raise ReshardError(f"{self.destination} and the source {self.source} overlap; write to a directory beside it")
        if self.destination.is_symlink() and not self.destination.exists():
            raise ReshardError(f"{self.destination} is a symbolic link to nowhere")
        if self.destination.is_symlink() and self.overwrite:
            raise ReshardError(f"{self.destination} is a symbolic link; give the directory itself")
        if self.destination.exists() and not self.destination.is_dir():
            raise ReshardError(f"{self.destination} is a file, not a directory")
        if self.destination.exists() and not self.overwrite and any(self.destination.iterdir()):
            raise ReshardError(f"{self.destination} exists; pass --overwrite to replace it once the new one is complete")
        parent = self.destination.parent
        if not parent.is_dir():
            raise ReshardError(f"{parent} is not a directory; create it first")
        if not os.access(parent, os.W_OK | os.X_OK):
            raise ReshardError(f"cannot write in {parent}: permission denied or read-only")

    def open(self, fingerprint: str, resume: bool) -> None:
        """Create and lock the directory; with `resume`, keep what an interrupted run of the same fingerprint left."""
        self.check_destination()
        lock = -1
        try:
            self.path.mkdir(exist_ok=True)
            lock = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if lock >= 0:
                os.close(lock)
            if isinstance(error, BlockingIOError):
                raise ReshardError(f"another run is writing {self.destination}; wait for it to end") from error
            raise write_error(self.path, error) from error
        self.lock = lock  # from here on the directory is ours, to remove too
        with contextlib.suppress(FileNotFoundError):
            if os.fstat(self.lock).st_ino == os.stat(self.path / LOCK).st_ino:
                self._prepare(fingerprint, resume)
                return
        os.close(self.lock)
        self.lock = None
        raise ReshardError(f"another run has just finished {self.destination}")

    def _prepare(self, fingerprint: str, resume: bool) -> None:
        found = self.path / "fingerprint"
        if resume and found.is_file():
            if found.read_text() != fingerprint:
                raise ReshardError(
                    f"{self.path} is of a run with another source, layout, options or number of processes; give the same, or drop --resume",
                    resumable=True,
                )
            return
        for entry in self.path.iterdir():
            if entry.name != LOCK:
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        found.write_text(fingerprint)

    def done(self) -> dict[str, str]:
        """Checksums of the tensors that this process's journal lists as done; opens the journal for more.

        A journal of before a restart of the machine does not count: its data may not have reached the disk.
        """
        path = self.path / f"journal-{self.process}"
        boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
        finished: dict[str, str] = {}
        if path.is_file():
            lines = path.read_bytes().split(b"\n")
            if lines[0].decode(errors="replace") == boot:
                for line in lines[1:-1]:
                    name, _, checksum = line.decode().rpartition(" ")
                    finished[name] = checksum
            else:
                path.unlink()
        self.journal = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        if os.fstat(self.journal).st_size == 0:
            os.write(self.journal, f"{boot}\n".encode())
        return finished

    def record(self, name: str, checksum: str) -> None:
        """Note in the journal that all bytes of a canonical tensor are written."""
        assert self.journal is not None
        try:
            os.write(self.journal, f"{name} {checksum}\n".encode())
        except OSError as error:
            raise write_error(self.path, error) from error

    def write_file(self, relative: str, data: bytes | str, sync: bool = False) -> None:
        """Write a small file, with its directories."""
        path = self.path / relative
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "wb") as file:
                file.write(data.encode() if isinstance(data, str) else data)
                if sync:
                    file.flush()
                    os.fsync(file.fileno())
        except OSError as error:
            raise write_error(path, error) from error

    def publish(self) -> None:
        """Give the directory its final name. An old destination goes away only now."""
        for entry in (*self.path.glob("journal-*"), self.path / "fingerprint"):
            entry.unlink(missing_ok=True)
        replaced = self.destination.with_name(f".{self.destination.name}.reshard-replaced")
        try:
            if replaced.exists():
                shutil.rmtree(replaced)
            if self.destination.exists() and any(self.destination.iterdir()):
                self.check_destination()
                os.rename(self.destination, replaced)
            os.rename(self.path, self.destination)
        except OSError as error:
            raise ReshardError(f"cannot rename {self.path} to {self.destination}: {error.strerror}") from error
        (self.destination / LOCK).unlink(missing_ok=True)
        if replaced.exists():
            shutil.rmtree(replaced)
        descriptor = os.open(self.destination.parent, os.O_RDONLY)
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
        os.close(descriptor)

    def close(self, remove: bool = False) -> None:
        """Let go of lock and journal; with `remove`, delete what was written."""
        for descriptor in (self.journal, self.lock):
            if descriptor is not None:
                if remove and descriptor == self.lock:
                    shutil.rmtree(self.path, ignore_errors=True)
                os.close(descriptor)
        self.journal = self.lock = None


def fingerprint(*things: object) -> str:
    """A digest of what makes two runs the same."""
    return hashlib.sha256(json.dumps(things, sort_keys=True, default=str).encode()).hexdigest()
