"""Objects of a store, read by ranges: blocks that are read ahead where reads follow one another, and only what is asked
for where they do not."""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import datetime
from typing import Any

from reshard.core.errors import ReshardError
from reshard.formats.ranges import RangedFile
from reshard.storage.stores.place import StorePlace, version_in

# A block is one call. What this process holds of blocks, of all files together, and calls at a time.
BLOCK_BYTES, MOST_BLOCKS, READERS = 8 << 20, 24, 16


class Listing:
    """The objects of a place in a store, asked for again once they are forgotten."""

    def __init__(self, place: StorePlace) -> None:
        self.place, self.lock = place, threading.Lock()
        self.objects: dict[str, dict[str, Any]] | None = None

    def get(self) -> dict[str, dict[str, Any]]:
        """Return the objects by name."""
        with self.lock:
            if self.objects is None:
                self.objects = self.place.objects()
            return self.objects

    def forget(self) -> None:
        """Have the next look ask the store."""
        self.objects = None


class StoreFile(RangedFile):
    """An object, by its name in a listing, which gave this `info`; `recorded` is its version then."""

    def __init__(self, listing: Listing, name: str, info: dict[str, Any], blocks: "Blocks") -> None:
        self.listing, self.name, self.blocks = listing, name, blocks
        self.size_bytes, self.recorded = int(info["size"]), version_numbers(info)
        self.touched: set[int] = set()  # blocks in which something was read

    def read(self, offset: int, length: int) -> bytes:
        stop = min(offset + length, self.size_bytes)
        return self._fetch(offset, stop) if offset < stop else b""

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        for buffer in buffers:
            if offset + len(buffer) > self.size_bytes:
                raise ReshardError(
                    f"{self.listing.place.url}/{self.name} ends at byte {self.size_bytes}, "
                    f"{offset + len(buffer) - self.size_bytes} bytes too early: it is truncated"
                )
            position = 0
            while position < len(buffer):
                number, within = divmod(offset + position, BLOCK_BYTES)
                count = min(len(buffer) - position, BLOCK_BYTES - within)
                buffer[position : position + count] = self._piece(number, within, count)
                position += count
            offset += len(buffer)

    def _piece(self, number: int, within: int, count: int) -> bytes | memoryview:
        """Return bytes of a block: by themselves where nothing was read near them, since nothing more may be."""
        follows = number in self.touched or number - 1 in self.touched
        self.touched.add(number)
        start = number * BLOCK_BYTES
        if not follows and count < BLOCK_BYTES // 2:
            return self._fetch(start + within, start + within + count)
        if (number + 1) * BLOCK_BYTES < self.size_bytes:
            self.blocks.begin((self, number + 1), lambda: self._block(number + 1))
        block = self.blocks.begin((self, number), lambda: self._block(number)).result()
        return memoryview(block)[within : within + count]

    def _block(self, number: int) -> bytes:
        return self._fetch(number * BLOCK_BYTES, min((number + 1) * BLOCK_BYTES, self.size_bytes))

    def _fetch(self, start: int, stop: int) -> bytes:
        """Read a range. Raises ReshardError where the store gives another number of bytes: the object is another."""
        data = self.listing.place.read(self.name, start, stop)
        if len(data) != stop - start:
            raise ReshardError(
                f"{self.listing.place.url}/{self.name} gave {len(data)} bytes of {stop - start} at byte {start}: it "
                "has changed since it was opened"
            )
        return data

    def version(self) -> tuple[int, int, int, int] | None:
        info = self.listing.get().get(self.name)
        return None if info is None else version_numbers(info)

    def forget_version(self) -> None:
        self.listing.forget()


def version_numbers(info: dict[str, Any]) -> tuple[int, int, int, int]:
    """Return the version of an object in a listing, as `RangedFile.version` gives it."""
    written = next((value for value in info.values() if isinstance(value, datetime)), None)
    tag = hashlib.sha256(version_in(info).encode()).digest()[:7]
    return (
        int(info["size"]),
        0 if written is None else int(written.timestamp() * 1e9),
        int.from_bytes(tag, "big"),
        0,
    )


class Blocks:
    """The blocks that were read last, of all files; the oldest go first."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.futures: OrderedDict[Any, Future[bytes]] = OrderedDict()
        self.pool: ThreadPoolExecutor | None = None

    def begin(self, key: Any, fetch: Callable[[], bytes]) -> "Future[bytes]":
        """Return a block that is there or on its way, or begin to read it."""
        with self.lock:
            future = self.futures.get(key)
            if future is not None and not (future.done() and future.exception() is not None):
                self.futures.move_to_end(key)
                return future
            if self.pool is None:
                self.pool = ThreadPoolExecutor(READERS, "reshard-range")
            future = self.futures[key] = self.pool.submit(fetch)
            self.futures.move_to_end(key)
            for old in list(self.futures):
                if len(self.futures) <= MOST_BLOCKS:
                    break
                if self.futures[old].done():
                    del self.futures[old]
            return future


BLOCKS = Blocks()
