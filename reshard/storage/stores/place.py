"""A prefix in an object store, as fsspec reaches it: calls that are tried again, and errors that name the URL."""

import re
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from reshard.core.errors import OptionError, ReshardError, first_line
from reshard.core.extras import importing

T = TypeVar("T")

# Schemes that are no store of checkpoints: pages of the hub, and paths on this host.
NOT_STORES = ("http", "https", "hf", "file", "local")
# A call that fails is made so often in all, after waiting so long for the first time and twice as long each further
# time. The store's own client tries each several times, which may take a minute: after that long none is made again.
TRIES, FIRST_WAIT_SECONDS, MOST_SECONDS = 4, 0.5, 45.0
# What no further try changes, by the names of the classes, which are those of several clients.
FINAL = (
    "FileNotFoundError", "PermissionError", "NotImplementedError", "NoCredentialsError", "PartialCredentialsError",
    "CredentialRetrievalError", "ParamValidationError", "InvalidRegionError", "DefaultCredentialsError", "TypeError",
)  # fmt: skip
NO_CREDENTIALS = ("PermissionError", "NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError",
                  "DefaultCredentialsError")  # fmt: skip
# A file's parts that are sent at a time, each of which is held in memory. A client without parts sends it in a row.
PART_BYTES, PARTS_AT_ONCE = 16 << 20, 4
PUT_OPTIONS = {
    "s3": {"chunksize": PART_BYTES, "max_concurrency": PARTS_AT_ONCE},
    "gs": {"chunksize": PART_BYTES},
}
SMALL_AT_ONCE = 16


def is_store(place: object) -> bool:
    """Return True for a URL of an object store."""
    match = re.match(r"([A-Za-z][A-Za-z0-9+.-]*)://", place) if isinstance(place, str) else None
    return match is not None and match[1].lower() not in NOT_STORES


class StorePlace:
    """All objects whose names begin with a URL's.

    `hint` ends the errors of calls that fail. Raises ReshardError where fsspec or the client of the URL's store is
    not installed, and every call does where the store does not answer: with ``resumable``, since what was sent stays.
    """

    def __init__(self, url: str, hint: str = "") -> None:
        self.hint = hint
        with importing("store"):
            import fsspec
        self.url = url.rstrip("/")
        if not self.url.partition("://")[2]:
            raise OptionError(f"{url} names no bucket: give a URL such as s3://bucket/model")
        try:
            self.fs, root = fsspec.core.url_to_fs(self.url)
        except (ImportError, ValueError) as error:
            raise ReshardError(
                f"{url} cannot be reached: {first_line(error)}; pip install 'reshard[store]' brings S3 and "
                "Google Cloud Storage"
            ) from error
        except Exception as error:  # a client that asks for credentials at once
            raise self._error("opening it", error, 1) from error
        self.root = root.rstrip("/")

    def as_own(self, url: str) -> str:
        """Return a URL with this place's scheme, if it is another name of the same store."""
        scheme, separator, rest = url.partition("://")
        known = self.fs.protocol if isinstance(self.fs.protocol, tuple | list) else (self.fs.protocol,)
        own = self.url.partition("://")[0]
        return f"{own}{separator}{rest}" if separator and scheme.lower() in known else url

    def objects(self) -> dict[str, dict[str, Any]]:
        """Return what the store says of each object, by its name below the URL. Raises ReshardError where there is no
        such bucket."""

        def find() -> dict[str, dict[str, Any]]:
            self.fs.invalidate_cache()
            return dict(self.fs.find(self.root, detail=True))

        try:
            found = self.call("listing it", find)
        except FileNotFoundError as error:
            raise ReshardError(
                f"{self.url} is not there ({first_line(error)}): is its bucket's name right?"
            ) from error
        inside = f"{self.root}/"
        return {name.removeprefix(inside): info for name, info in found.items() if name.startswith(inside)}

    def has(self, name: str) -> bool:
        """Return True if there is an object of this name."""

        def exists() -> bool:
            self.fs.invalidate_cache()
            return bool(self.fs.exists(self._at(name)))

        return self.call(f"looking for {name}", exists)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Return bytes of an object. Raises ReshardError if it is not there."""
        try:
            return bytes(
                self.call(f"reading {name}", lambda: self.fs.cat_file(self._at(name), start=start, end=stop))
            )
        except FileNotFoundError as error:
            raise ReshardError(f"{self.url} lacks {name}") from error

    def put_file(self, name: str, path: Path) -> str:
        """Send a file, its parts at the same time where the store takes that; return the version of the object.
        Raises ReshardError if the object does not have the file's size then."""
        protocols = {self.fs.protocol} if isinstance(self.fs.protocol, str) else set(self.fs.protocol)
        options = next((PUT_OPTIONS[each] for each in PUT_OPTIONS if each in protocols), {})
        self._put(name, lambda: self.fs.put_file(str(path), self._at(name), **options))
        info = self.call(f"looking at {name}", lambda: self._info(name))
        there, size = info.get("size"), path.stat().st_size
        if there != size:
            raise ReshardError(
                f"{self.url}/{name} has {there} bytes in the store, and {size} were sent{self.hint}",
                resumable=True,
            )
        return version_in(info)

    def put(self, name: str, data: bytes) -> None:
        """Send a small object."""
        self._put(name, lambda: self.fs.pipe_file(self._at(name), data))

    def remove(self, names: Iterable[str]) -> None:
        """Remove objects, several at a time; those that are not there count as removed."""

        def remove(name: str) -> None:
            def remove_one() -> None:
                try:
                    self.fs.rm_file(self._at(name))
                except FileNotFoundError:
                    return

            self.call(f"removing {name}", remove_one)

        self.each(remove, names)

    def each(self, function: Callable[[str], T], names: Iterable[str]) -> list[T]:
        """Return what a function gives for each name, several at a time."""
        with ThreadPoolExecutor(SMALL_AT_ONCE) as pool:
            return list(pool.map(function, names))

    def call(self, what: str, function: Callable[[], T]) -> T:
        """Call the store, again where that may help. Raises FileNotFoundError as it is, and ReshardError for anything
        else."""
        began = time.monotonic()
        for attempt in range(1, TRIES + 1):
            try:
                return function()
            except FileNotFoundError:
                raise
            except Exception as error:  # each client has errors of its own
                spent = time.monotonic() - began
                if attempt == TRIES or spent > MOST_SECONDS or type(error).__name__ in FINAL:
                    raise self._error(what, error, attempt) from error
            time.sleep(FIRST_WAIT_SECONDS * 2 ** (attempt - 1))
        raise AssertionError

    def _put(self, name: str, put: Callable[[], Any]) -> None:
        try:
            self.call(f"sending {name}", put)
        except FileNotFoundError as error:
            raise ReshardError(f"{self.url} is not there: create its bucket first") from error

    def _info(self, name: str) -> dict[str, Any]:
        self.fs.invalidate_cache()
        return dict(self.fs.info(self._at(name)))

    def _at(self, name: str) -> str:
        return f"{self.root}/{name}"

    def _error(self, what: str, error: Exception, attempts: int) -> ReshardError:
        said = first_line(error).rstrip(".")
        if type(error).__name__ in NO_CREDENTIALS:
            return ReshardError(
                f"{self.url}: {what} is not allowed ({said}): check the credentials, which are those of the store's "
                "own tools (AWS_ACCESS_KEY_ID, AWS_PROFILE; GOOGLE_APPLICATION_CREDENTIALS)",
                resumable=True,
            )
        times = "" if attempts == 1 else f" {attempts} times"
        return ReshardError(f"{self.url}: {what} failed{times} ({said}){self.hint}", resumable=True)


def version_in(info: dict[str, Any]) -> str:
    """Return what says in a store's listing which bytes an object has: its tag, or else when it was written. Raises
    ReshardError where nothing does."""
    fields = (
        "ETag",
        "etag",
        "md5Hash",
        "mtime",
        "created",
        "LastModified",
        "last_modified",
        "modificationTime",
        "modify",
    )
    value = next((info[field] for field in fields if info.get(field) is not None), "")
    # A listing and a look at one object say the same time in two ways.
    version = str(value.timestamp() if isinstance(value, datetime) else value)
    if not version:
        raise ReshardError(
            f"the store does not say by a tag or a time which bytes {info.get('name', 'an object')} has: copy the "
            f"checkpoint to a directory, or to another store"
        )
    return version
