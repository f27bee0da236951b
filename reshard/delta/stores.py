"""The place of a chain: a directory, or a place that fsspec reaches (``s3://``, ``gs://``, ``memory://``).

A file appears whole in both: in a directory by a rename of what is on the disk already, in an object store
since that shows an object when all of it has arrived.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from reshard.core.errors import OptionError, ReshardError, first_line
from reshard.core.extras import importing
from reshard.core.system import sync_file
from reshard.formats.small_files import MAX_INDEX_BYTES, read_file
from reshard.storage.io.directories import make_parents, remove_empty, sync_directory
from reshard.storage.io.files import write_error

WRITING = ".writing"  # of a directory: what is not there yet
# Protocols of object stores, whose URLs begin with a bucket. They have no directories to make.
BUCKETS = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "cos", "obs"}


class Store(ABC):
    """A flat place of named files; `where` is what it is called in errors."""

    where: str

    def names(self) -> list[str]:
        """Return the names of the files; none if the place does not exist yet."""
        return sorted(self.sizes())

    @abstractmethod
    def sizes(self) -> dict[str, int | None]:
        """Return the bytes of the files by name; None if that is not known."""

    @abstractmethod
    def read(self, name: str) -> bytes:
        """Return the bytes of a small file."""

    @abstractmethod
    def local(self, name: str) -> Path:
        """Return the path on this host of a file, which is fetched once where it lies elsewhere."""

    @abstractmethod
    def writing(self, is_first: bool = True) -> contextlib.AbstractContextManager[Path]:
        """Return a context with a directory for files that are not whole yet. The first of the ranks that
        write a delta together enters it before the others do.

        Raises ReshardError if others write here, as far as that can be seen.
        """

    @abstractmethod
    def put(self, path: Path, name: str) -> None:
        """Publish a file, which is moved away from `path`, under a name."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""

    @abstractmethod
    def close(self) -> None:
        """Remove what was fetched."""


def open_store(place: str | Path) -> Store:
    """Return the store at a path or URL. Raises OptionError for an empty one, such as of a variable that is not set:
    it would be the current directory."""
    if not isinstance(place, str | Path) or not str(place).strip():
        raise OptionError(
            f"the chain is {place!r:.80}; it is a directory or a URL, . for the current directory"
        )
    return RemoteStore(str(place)) if "://" in str(place) else LocalStore(Path(place))


class LocalStore(Store):
    """A directory."""

    def __init__(self, path: Path) -> None:
        self.path, self.where = path, str(path)

    def sizes(self) -> dict[str, int | None]:
        if not self.path.exists():
            return {}
        if not self.path.is_dir():
            raise ReshardError(f"{self.path} is a file, and a chain of deltas is a directory or a URL")
        try:
            return {entry.name: entry.stat().st_size for entry in self.path.iterdir() if entry.is_file()}
        except OSError as error:
            raise ReshardError(f"cannot read {self.path}: {error.strerror}") from error

    def read(self, name: str) -> bytes:
        return read_file(self.path / name, MAX_INDEX_BYTES)

    def local(self, name: str) -> Path:
        return self.path / name

    @contextlib.contextmanager
    def writing(self, is_first: bool = True) -> Iterator[Path]:
        scratch = self.path / WRITING
        if not is_first:
            yield scratch
            return
        made, lock = self._lock()
        try:
            with write_errors(scratch):
                shutil.rmtree(scratch, ignore_errors=True)  # of a process that was killed
                scratch.mkdir()
            yield scratch
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
            self._leave(made, lock)

    def _lock(self) -> tuple[list[Path], int]:
        """Make the directory, if it is not there, and lock it; return the directories that were made, and the lock."""
        with write_errors(self.path):
            made = make_parents(self.path / WRITING)
            lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._leave(made, lock)
            if not isinstance(error, BlockingIOError):  # a file system without locks
                raise write_error(self.path, error) from error
            raise ReshardError(f"another process writes a delta to {self.path}: wait for it") from error
        return made, lock

    def _leave(self, made: list[Path], lock: int) -> None:
        """Give the lock back, and remove the directories that were made if nothing was published in them."""
        remove_empty(made)
        os.close(lock)

    def put(self, path: Path, name: str) -> None:
        with write_errors(self.path / name):
            with open(path, "rb") as file:
                sync_file(file.fileno())
            os.replace(path, self.path / name)
            sync_directory(self.path)

    def remove(self, name: str) -> None:
        with write_errors(self.path / name):
            (self.path / name).unlink(missing_ok=True)

    def close(self) -> None:
        pass


class RemoteStore(Store):
    """A place of fsspec's."""

    def __init__(self, url: str) -> None:
        with importing("store"):
            import fsspec
        self.where = url.rstrip("/")
        try:
            self.fs, self.root = fsspec.core.url_to_fs(self.where)
        except (ImportError, ValueError) as error:
            raise ReshardError(
                f"{url} cannot be reached: {first_line(error)}; pip install 'reshard[store]' brings S3 and "
                "Google Cloud Storage"
            ) from error
        self.fetched: tempfile.TemporaryDirectory | None = None

    def sizes(self) -> dict[str, int | None]:
        self.fs.invalidate_cache()
        try:
            entries: list[Any] = self._call("list", self.fs.ls, self.root, detail=True)
        except FileNotFoundError:
            return {}
        return {str(e["name"]).rpartition("/")[2]: e.get("size") for e in entries if e.get("type") == "file"}

    def read(self, name: str) -> bytes:
        size = self._call(name, self.fs.size, self._at(name))
        if size is None or size > MAX_INDEX_BYTES:
            raise ReshardError(f"{self.where}/{name} has {size} bytes, more than such a file can need")
        data: bytes = self._call(name, self.fs.cat_file, self._at(name))
        return data

    def local(self, name: str) -> Path:
        if self.fetched is None:
            self.fetched = tempfile.TemporaryDirectory(prefix="reshard-delta-")
        path = Path(self.fetched.name) / name
        if not path.exists():
            part = path.with_name(f"{name}.part")
            self._call(name, self.fs.get_file, self._at(name), str(part))
            part.rename(path)
        return path

    @contextlib.contextmanager
    def writing(self, is_first: bool = True) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix="reshard-delta-") as scratch:
            yield Path(scratch)

    def put(self, path: Path, name: str) -> None:
        protocols = {self.fs.protocol} if isinstance(self.fs.protocol, str) else set(self.fs.protocol)
        if not protocols & BUCKETS:  # there it would make a bucket of a name that is misspelled
            self._call("create", self.fs.makedirs, self.root, exist_ok=True)
        absent = f"{self.where} is not there: create its bucket first"
        self._call(name, self.fs.put_file, str(path), self._at(name), absent=absent)
        path.unlink()

    def remove(self, name: str) -> None:
        if name in self.names():
            self._call(name, self.fs.rm_file, self._at(name))

    def close(self) -> None:
        if self.fetched is not None:
            self.fetched.cleanup()
            self.fetched = None

    def _at(self, name: str) -> str:
        return f"{self.root}/{name}"

    def _call(self, what: str, call: Any, *arguments: Any, absent: str = "", **options: Any) -> Any:
        """Call the file system. Raises ReshardError for what it raises, `absent` for FileNotFoundError, which
        is passed on of a list."""
        try:
            return call(*arguments, **options)
        except FileNotFoundError as error:
            if what == "list":
                raise
            raise ReshardError(absent or f"{self.where} lacks {what}") from error
        except Exception as error:  # a store's client has errors of its own
            raise ReshardError(f"{self.where}: {what} failed ({first_line(error)})") from error


@contextlib.contextmanager
def write_errors(path: Path) -> Iterator[None]:
    """Have what the system says of a write inside be a ReshardError with the file's name."""
    try:
        yield
    except OSError as error:
        raise write_error(path, error) from error
