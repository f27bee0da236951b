"""One tensor of a conversion, streamed: read a slab, check it, cast it, hash it, write it."""

from collections.abc import Iterator

import numpy as np
import xxhash

from reshard.core.errors import ReshardError
from reshard.storage.io.casts import cast, overflow, overflow_notice
from reshard.storage.io.streams import SLAB_BYTES, StripWriter
from reshard.storage.run.job import ConversionJob
from reshard.storage.run.journal import Done


class TensorCopy:
    """The copy of one canonical tensor to its place in the destination's files."""

    def __init__(self, job: ConversionJob, name: str, writer: StripWriter) -> None:
        self.job, self.name, self.writer = job, name, writer
        self.info, self.source_dtype = job.tensors[name], job.source.held[name].dtype
        self.is_quantized = name in job.quantized.names
        same_bytes = self.source_dtype.published == self.info.dtype.published and not self.is_quantized
        # What is written as it was read is hashed once: the source's manifest has that checksum too.
        self.checks_what_is_written = same_bytes and job.checks.plain(name)
        self.watch = None if self.checks_what_is_written else job.checks.watch(name)
        self.overflowed = 0

    def run(self) -> dict[str, Done]:
        """Copy the tensor; return the checksums of the stored tensors that it becomes.

        Raises ReshardError if the source's manifest has another checksum, or if a cast makes
        numbers infinite and that is not allowed.
        """
        if self.is_quantized:
            checksums = self.job.quantized.copy(
                self.name, self.info, self._read, self.writer, self._slabs_of_other
            )
        else:
            checksums = {self.name: self._copy_rows()}
        if self.watch is not None:
            self.watch.end()
        elif self.checks_what_is_written:
            self.job.checks.compare(self.name, checksums[self.name])
        if self.overflowed and not self.job.options.allow_overflow:
            raise ReshardError(
                f"{overflow_notice(self.name, self.overflowed, self.info.dtype)}; choose another --dtype, "
                f"or pass --allow-overflow"
            )
        first = self.job.quantized.stored_names(self.name)[0]
        return {
            stored_name: Done(checksum, self.overflowed if stored_name == first else 0)
            for stored_name, checksum in checksums.items()
        }

    def _copy_rows(self) -> str:
        """Copy the rows as they are, or cast; return their checksum."""
        digest = xxhash.xxh3_128()
        for start, stop in self.info.slabs(SLAB_BYTES, self.job.source.row_multiple(self.name)):
            slab = self._read(start, stop)
            published = cast(slab, self.info.dtype, self.info.dtype.published)
            digest.update(memoryview(published.view(np.uint8).reshape(-1)))
            self.writer.write_rows(self.name, start, slab)
        return digest.hexdigest()

    def _read(self, start: int, stop: int) -> np.ndarray:
        rows = self.job.source.reader.rows(self.name, start, stop)
        if self.watch is not None:
            self.watch.rows(cast(rows, self.source_dtype, self.source_dtype.published), start, stop)
        slab = cast(rows, self.source_dtype, self.info.dtype, self.name)
        self.overflowed += overflow(rows, slab, self.source_dtype, self.info.dtype)
        return slab

    def _slabs_of_other(self, name: str) -> Iterator[np.ndarray]:
        """Yield the slabs of any tensor in its stored dtype, for a scheme that needs more than one
        weight."""
        source, info = self.job.source, self.job.tensors[name]
        for start, stop in info.slabs(SLAB_BYTES, source.row_multiple(name)):
            yield cast(source.read_rows(name, start, stop), source.tensors[name].dtype, info.dtype)
