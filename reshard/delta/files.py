"""The files of a delta: written record by record, and read by tensor."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash

from reshard.core.boxes import Box
from reshard.core.dtypes import DTYPES
from reshard.core.errors import ReshardError
from reshard.delta.chain import Chain
from reshard.delta.manifests import FORMAT, Delta, File
from reshard.delta.records import Change, Record, decode_box, encode_box
from reshard.digests.numbers import seed_of, sum_change
from reshard.formats import safetensors
from reshard.storage.io.files import OpenFiles, write_error
from reshard.storage.io.streams import TensorInfo

_COPY_BYTES = 4 << 20


class RecordWriter:
    """Writes one file of a delta. Records come in any order, from several threads; their bytes wait in a file
    beside it, since the header, which comes first, lists them all."""

    def __init__(self, scratch: Path, name: str) -> None:
        self.path, self.name = scratch / name, name
        self.waiting = self.path.with_name(f"{name}.records")
        self.places: dict[str, tuple[int, int]] = {}  # offset and bytes
        self.changed, self.size = 0, 0
        self.lock = threading.Lock()
        self.files = OpenFiles.of_destination(write=True)
        self.waiting.touch()

    def add(self, record: Record, payload: np.ndarray) -> None:
        """Add a record."""
        with self.lock:
            offset, self.size = self.size, self.size + len(payload)
            self.places[record.key] = offset, len(payload)
            self.changed += record.changed
        self.files.write(self.waiting, offset, memoryview(payload))

    def compare(self, name: str, info: TensorInfo, box: Box, old: np.ndarray, new: np.ndarray) -> int:
        """Add the record of what changed in a box, given as arrays ``[rows, columns]`` of one dtype, if anything did;
        return by how much that changes the digest."""
        encoded = encode_box(name, box, old, new)
        return 0 if encoded is None else self.add_change(*encoded, info, old)

    def add_change(self, record: Record, payload: np.ndarray, info: TensorInfo, old: np.ndarray) -> int:
        """Add the record of what changes in a box that is now `old`; return by how much that changes the digest."""
        self.add(record, payload)
        rows, columns, values = decode_box(record, info, payload)
        at = rows - record.rows.start, columns - record.rows.column
        return sum_change(seed_of(record.name, info), old[at], values, rows, columns)

    def finish(self, version: int, follows: int) -> File:
        """Write the file, with its records by name, and return what it is."""
        u8, keys = DTYPES["uint8"], sorted(self.places)
        metadata = {"reshard_delta": str(FORMAT), "version": str(version), "follows": str(follows)}
        planned = safetensors.plan_file(
            {key: (u8, (self.places[key][1],)) for key in keys}, self.name, metadata
        )
        digest, position = xxhash.xxh3_128(planned.head), len(planned.head)
        self.path.touch()
        self.files.write(self.path, 0, planned.head)
        for key in keys:
            offset, size = self.places[key]
            for start in range(offset, offset + size, _COPY_BYTES):
                data = memoryview(bytearray(min(_COPY_BYTES, offset + size - start)))
                self.files.read_into(self.waiting, start, data)
                self.files.write(self.path, position, data)
                digest.update(data)
                position += len(data)
        for path, error in self.files.close().items():  # what a file server says only now
            raise write_error(path, error)
        self.close()
        return File(self.name, position, digest.hexdigest())

    def close(self) -> None:
        """Close the files, and remove the one in which records waited."""
        self.files.close()
        self.waiting.unlink(missing_ok=True)


class StoredRecord(NamedTuple):
    """A record, and where its bytes lie in a file."""

    record: Record
    path: Path
    offset: int
    size: int


class DeltaFiles:
    """The records of a delta, by tensor. Raises ReshardError for a file that is not as it was written, or
    that holds anything other than changes of the base's tensors."""

    def __init__(self, chain: Chain, delta: Delta, files: OpenFiles) -> None:
        self.delta, self.tensors, self.files, self.where = delta, chain.base.tensors, files, chain.where
        self.paths = chain.paths(delta)
        self.records: dict[str, list[StoredRecord]] = {}
        for path in self.paths:
            for key, tensor in safetensors.read_header(path).items():
                try:
                    record = Record.parse(key, self.tensors)
                except ReshardError as error:
                    raise ReshardError(f"{self.where}/{path.name}: {error}") from error
                if tensor.dtype != DTYPES["uint8"]:
                    raise ReshardError(
                        f"{self.where}/{path.name}: {key[:200]} is {tensor.dtype.name}, and records are uint8"
                    )
                stored = StoredRecord(record, path, tensor.offset, tensor.size_bytes)
                self.records.setdefault(record.name, []).append(stored)

    def changes(self, name: str, start: int = 0, stop: int | None = None) -> Iterator[Change]:
        """Yield what changed in rows `start` .. `stop` of a tensor, by default in all."""
        info = self.tensors[name]
        stop = info.rows if stop is None else stop
        for stored in self.records.get(name, ()):
            rows = stored.record.rows
            if rows.start < stop and start < rows.stop:
                with self.errors_of(stored):
                    change = decode_box(stored.record, info, self.read(stored))
                yield change.within(start, stop)

    def read(self, stored: StoredRecord) -> np.ndarray:
        """Read the bytes of a record."""
        payload = np.empty(stored.size, np.uint8)
        self.files.read_into(stored.path, stored.offset, memoryview(payload))
        return payload

    @contextmanager
    def errors_of(self, stored: StoredRecord) -> Iterator[None]:
        """Have errors inside name the file of a record."""
        try:
            yield
        except ReshardError as error:
            raise ReshardError(f"{self.where}/{stored.path.name}: {error}") from error
