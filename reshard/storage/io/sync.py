"""Bringing written files to the disk."""

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

from reshard.core.errors import ReshardError
from reshard.core.interrupts import wait_out
from reshard.core.system import sync_data
from reshard.storage.io.files import OpenFiles, write_error


class SyncRecord(Protocol):
    """A journal, as far as a sync writes to it."""

    def record(self, items: Iterable[Any]) -> None:
        """Note that the bytes of these items are on the disk."""

    def lose(self, path: Path) -> None:
        """Note that a file has lost bytes."""


class EarlySync:
    """Syncs files while they are being written, so that little is left to wait for at the end of
    the `with` block.

    The `record` gets what was passed to `written` once every file has been synced after it. It
    loses a file whose sync fails at once, since the kernel reports that once and a later sync would
    succeed. `check` raises the error of a failed sync, and so does the end of the block.
    """

    def __init__(self, files: OpenFiles, paths: list[Path], record: SyncRecord | None = None) -> None:
        self.files, self.paths, self.journal = files, paths, record
        self.waiting: list = []
        self.lock = threading.Lock()
        self.ended, self.has_ended = threading.Event(), threading.Event()
        self.error: ReshardError | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)

    def written(self, item: object) -> None:
        """Note that all bytes of an item are written, but not yet on the disk."""
        with self.lock:
            self.waiting.append(item)

    def check(self) -> None:
        """Raise ReshardError if a sync has failed."""
        if self.error is not None:
            raise self.error

    def _take(self) -> list:
        with self.lock:
            items, self.waiting = self.waiting, []
        return items

    def _run(self) -> None:
        try:
            self._sync_until_ended()
        finally:
            self.has_ended.set()

    def _sync_until_ended(self) -> None:
        while not self.ended.wait(0.02) and self.error is None:
            items = self._take()
            for path in self.paths:
                if self.ended.is_set() or not self._sync(
                    path, lambda path: sync_data(self.files.descriptor(path))
                ):
                    break
            else:
                self._confirm(items)
                continue
            with self.lock:
                self.waiting += items

    def _sync(self, path: Path, sync: Callable[[Path], None]) -> bool:
        try:
            sync(path)
        except OSError as error:
            if self.journal is not None:
                self.journal.lose(path)
            self.error = self.error or write_error(path, error)
        return self.error is None

    def _confirm(self, items: list) -> None:
        try:
            if self.journal is not None:
                self.journal.record(items)
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
        except BaseException:
            self.ended.set()
            raise
        return self

    def __exit__(self, kind: type | None, *exc: object) -> None:
        self.ended.set()
        # A thread whose join was interrupted counts as ended in Python up to 3.12.
        wait_out(self.has_ended.wait)
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
    """Stands in for `EarlySync` where nobody waits for the disk: what is written counts as done."""

    def __init__(self, files: OpenFiles, paths: list[Path], record: SyncRecord | None = None) -> None:
        self.journal = record

    def written(self, item: object) -> None:
        """Record an item, all bytes of which are written."""
        if self.journal is not None:
            self.journal.record([item])

    def check(self) -> None:
        """Do nothing: no sync could have failed."""

    def __enter__(self) -> "NoSync":
        return self

    def __exit__(self, *exc: object) -> None:
        pass
