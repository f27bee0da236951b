"""Deltas of buckets: what a trainer's rank packs is compared with what it packed and sent last, and only what
changed travels; an inference rank writes it where its tensors lie.

A bucket is compared in words of 2 bytes, in chunks of 1 MiB, each in the smallest form of
`reshard.delta.encoding`. What travels of a bucket, in int64 and then bytes:

    since, bucket, chunks    the transaction on which it builds, the bucket's number, and how many chunks
    form, changed            of each chunk
    payload                  of each chunk in turn

An inference rank knows since when it expects changes, and which bucket is next: others are refused before a
byte is written.
"""

from collections.abc import Mapping, Sequence
from hashlib import blake2b

import numpy as np
import torch

from reshard.core.errors import ReshardError
from reshard.delta.encoding import BoxSize, Decoded, Encoded, Form, changed_mask, decode, encode_changed
from reshard.refit.codecs import CODECS, PLAIN, bytes_in_source
from reshard.refit.copies import host_bytes
from reshard.refit.tables import CODEC, DST, DST_PITCH, ROWS, SRC, WIDTH
from reshard.refit.transports.base import Measured
from reshard.refit.transports.packing import PackedPair

WORD = 2
CHUNK = 1 << 19  # words
PRELUDE = 3  # numbers ahead of those of the chunks
FORMS = {int(form): form for form in Form}


class SentBuckets:
    """The bytes of the buckets that this trainer's rank sent last, in its device's memory or pinned in the
    host's.

    Inference ranks that get the same bytes, as replicas do, share what is kept.
    """

    def __init__(self, device: torch.device, on_host: bool) -> None:
        self.device, self.on_host = device, on_host and device.type != "cpu"
        self.first: dict[int, int] = {}  # by inference rank: the first that gets the same bytes
        self.sizes: dict[int, list[int]] = {}  # of buckets, by such a first rank
        self.buckets: dict[tuple[int, int], torch.Tensor] = {}  # by such a first rank and the bucket's number
        self.whole = self._were_whole = False  # all of what was last sent is kept
        # Of each bucket that was compared: the words of its chunks, and how many of each changed.
        self._comparisons: list[tuple[list[int], torch.Tensor]] = []

    def arrange(self, pairs: Mapping[int, PackedPair]) -> None:
        """Take what goes out, by inference rank."""
        by_contents: dict[bytes, int] = {}
        self.first = {rank: by_contents.setdefault(_contents(pair), rank) for rank, pair in pairs.items()}
        sizes = {
            rank: [pairs[rank].bytes_of_round(index) for index in range(pairs[rank].rounds)]
            for rank in by_contents.values()
        }
        if sizes != self.sizes:
            self.sizes, self.buckets, self.whole = sizes, {}, False

    @property
    def bytes(self) -> int:
        """The bytes of memory that this takes once all is kept."""
        return sum(map(sum, self.sizes.values()))

    def begin(self) -> None:
        """Begin to measure anew; `whole` is False until `end`."""
        self._comparisons, self._were_whole, self.whole = [], self.whole, False

    def end(self) -> None:
        """Note that all buckets have been sent."""
        self.whole = True

    @property
    def measured(self) -> Measured:
        """The changes that comparisons have found since `begin`; waits for the device."""
        measured = Measured()
        for words, counts in self._comparisons:
            boxes = [BoxSize(*box) for box in zip(words, [WORD] * len(words), counts.tolist(), strict=True)]
            size = header_bytes(WORD * sum(words)) + sum(box.size(box.form) for box in boxes)
            changed = sum(box.changed for box in boxes)
            measured = measured.plus(Measured(changed, sum(words), size, WORD * sum(words)))
        return measured

    def keep(self, index: int, segments: Mapping[int, torch.Tensor]) -> None:
        """Keep what is sent whole, and measure what changed, where that can be told; on a GPU, enqueue it."""
        for rank, segment in segments.items():
            if self.first[rank] != rank or not len(segment):
                continue
            bucket = self.buckets.get((rank, index))
            if bucket is None:
                where = torch.device("cpu") if self.on_host else self.device
                bucket = torch.empty(len(segment), dtype=torch.uint8, device=where, pin_memory=self.on_host)
                self.buckets[rank, index] = bucket
            elif self._were_whole:
                self._compared(bucket, segment)
            bucket.copy_(segment, non_blocking=True)

    def changes(self, index: int, segments: Mapping[int, torch.Tensor], since: int) -> list[torch.Tensor]:
        """Return what travels of a bucket to each inference rank: what changed since it was last kept."""
        made: dict[int, torch.Tensor] = {}
        for rank, segment in segments.items():
            if self.first[rank] == rank and len(segment):
                made[rank] = self._encoded(index, rank, segment, since)
        nothing = torch.empty(0, dtype=torch.uint8, device=self.device)
        return [made.get(self.first[rank], nothing) for rank in segments]

    def _encoded(self, index: int, rank: int, segment: torch.Tensor, since: int) -> torch.Tensor:
        bucket = self.buckets[rank, index]
        words, masks, device_counts = self._compared(bucket, segment)
        counts = device_counts.tolist()
        chunks = [encode_changed(*chunk) for chunk in zip(words, masks, counts, strict=True)]
        header = [since, index, len(chunks)]
        for encoded in chunks:
            header += [int(encoded.form), encoded.changed]
        head = torch.tensor(header, dtype=torch.int64).to(self.device).view(torch.uint8)
        if any(counts):
            bucket.copy_(segment, non_blocking=True)
        return torch.cat([head, *(encoded.payload for encoded in chunks)])

    def _compared(
        self, bucket: torch.Tensor, segment: torch.Tensor
    ) -> tuple[Sequence[torch.Tensor], list[torch.Tensor], torch.Tensor]:
        """Return the words of each chunk as they are now, which of them changed, and how many."""
        words = segment.view(torch.int16).split(CHUNK)
        before = bucket.to(self.device, non_blocking=True).view(torch.int16).split(CHUNK)
        masks, counts = [], []
        for old, new in zip(before, words, strict=True):
            masks.append(changed_mask(old, new))
            counts.append(torch.count_nonzero(masks[-1]))
        stacked = torch.stack(counts)
        self._comparisons.append((list(map(len, words)), stacked))
        return words, masks, stacked


def _contents(pair: PackedPair) -> bytes:
    """Return a digest of what a pair's buckets hold: where from, and as what."""
    contents = blake2b(digest_size=16)
    for array in (pair.tiles, pair.block_items.items, pair.block_items.fragments, pair.places, pair.sizes):
        contents.update(str(array.shape).encode() + np.ascontiguousarray(array).tobytes())
    return contents.digest()


def header_bytes(size: int) -> int:
    """Return the bytes ahead of the payloads of a bucket of `size` bytes."""
    return 8 * (PRELUDE + 2 * _chunks(size))


def most_bytes(size: int) -> int:
    """Return the most that the changes of a bucket of `size` bytes take; 0 of an empty one."""
    return header_bytes(size) + size + 8 if size else 0


def _chunks(size: int) -> int:
    return -(-size // (WORD * CHUNK))


def read_changes(
    payload: torch.Tensor, size: int, since: int, index: int, who: str
) -> list[tuple[int, Decoded]]:
    """Return the changes of a bucket of `size` bytes in what `who` has sent, for each chunk that has any with
    the position of its first word.

    Raises ReshardError where they are not of this bucket, build on another transaction than `since`, or make no
    sense.
    """
    broken = f"{who} sends changes of bucket {index} that make no sense"
    if len(payload) < header_bytes(size):
        raise ReshardError(f"{broken}: {len(payload):,} bytes")
    header = payload[: header_bytes(size)].view(torch.int64).tolist()
    if header[:PRELUDE] != [since, index, _chunks(size)]:
        raise ReshardError(
            f"{who} sends changes of bucket {header[1]} since transaction {header[0]}, where those of bucket "
            f"{index} since transaction {since} are due: the next refit sends all"
        )
    start, changes = header_bytes(size), []
    for chunk in range(_chunks(size)):
        form, changed = header[PRELUDE + 2 * chunk : PRELUDE + 2 * chunk + 2]
        elements = min(CHUNK, size // WORD - chunk * CHUNK)
        if form not in FORMS or not 0 <= changed <= elements:
            raise ReshardError(f"{broken}: {changed:,} changes in form {form}")
        end = start + BoxSize(elements, WORD, changed).size(FORMS[form])
        if end > len(payload):
            raise ReshardError(f"{broken}: {len(payload):,} bytes")
        if changed:
            decoded = decode(Encoded(FORMS[form], changed, payload[start:end]), elements, torch.int16)
            changes.append((chunk * CHUNK, decoded))
        start = end
    if start != len(payload):
        raise ReshardError(f"{broken}: {len(payload):,} bytes")
    if changes and not bool(torch.stack([decoded.valid for _, decoded in changes]).all()):
        raise ReshardError(f"{broken}: positions outside of it, or not in order")
    return changes


class ServedBucket:
    """The places that the words of a bucket are served from, given the copies out of it (`PackedPair.copies`)."""

    def __init__(self, table: np.ndarray, device: torch.device) -> None:
        table = table[np.argsort(table[:, SRC], kind="stable")]
        width = bytes_in_source(table[:, WIDTH], table[:, CODEC])  # of a row while it travels
        odd = (
            table[:, SRC] | table[:, DST] | np.where(table[:, ROWS] > 1, table[:, DST_PITCH] | width, width)
        ) % WORD
        self.codecs = np.unique(table[:, CODEC]).tolist()
        self.has_odd = bool(odd.any())

        def on_device(column: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(column, np.int64)).to(device)

        self.starts, self.sizes, self.widths = map(on_device, (table[:, SRC], table[:, ROWS] * width, width))
        self.addresses, self.pitches = on_device(table[:, DST]), on_device(table[:, DST_PITCH])
        self.odd, self.codec = on_device(odd), on_device(table[:, CODEC])

    def write(self, positions: torch.Tensor, values: torch.Tensor) -> None:
        """Write words, int16 ``[n]``, which are at these positions in the bucket, where they are served from."""
        if not len(self.starts):
            return
        where = positions * WORD
        tile = torch.searchsorted(self.starts, where, right=True) - 1
        if self.has_odd:
            as_bytes = self.odd[tile] != 0
            self._write_bytes(where[as_bytes], values[as_bytes])
            where, tile, values = where[~as_bytes], tile[~as_bytes], values[~as_bytes]
        for codec in self.codecs:
            inside = where - self.starts[tile] < self.sizes[tile]  # and not in the padding behind
            if len(self.codecs) > 1:
                inside &= self.codec[tile] == codec
            chosen = tile[inside]
            write_words(self._addresses(where[inside], chosen, codec), _converted(values[inside], codec))

    def _write_bytes(self, where: torch.Tensor, values: torch.Tensor) -> None:
        """Write words byte by byte, where a row has an odd number of bytes, or begins at an odd address."""
        where = (where[:, None] + torch.arange(WORD, device=where.device)).reshape(-1)
        tile = torch.searchsorted(self.starts, where, right=True) - 1
        inside = where - self.starts[tile] < self.sizes[tile]
        write_words(self._addresses(where[inside], tile[inside], PLAIN), values.view(torch.uint8)[inside])

    def _addresses(self, where: torch.Tensor, tile: torch.Tensor, codec: int) -> torch.Tensor:
        """Return the addresses of what is at these bytes of the bucket, within these tiles."""
        within, width = where - self.starts[tile], self.widths[tile]
        row = within // width
        column = (within - row * width) * CODECS[codec].destination.size // CODECS[codec].source.size
        return self.addresses[tile] + row * self.pitches[tile] + column


def _converted(values: torch.Tensor, codec: int) -> torch.Tensor:
    """Return words as the engine has them; a codec of a bucket that arrives makes 2 bytes 4."""
    if codec == PLAIN:
        return values
    source, destination = (
        getattr(torch, dtype.name) for dtype in (CODECS[codec].source, CODECS[codec].destination)
    )
    return values.view(source).to(destination).view(torch.int32)


def write_words(addresses: torch.Tensor, words: torch.Tensor) -> None:
    """Write words of 1, 2 or 4 bytes at addresses of this device's memory, which are multiples of as many."""
    if not len(addresses):
        return
    if words.is_cuda:
        from reshard.refit.kernels import write_words as write_on_gpu

        write_on_gpu(addresses, words)
        return
    at, size = addresses.numpy(), words.element_size()
    first = int(at.min())
    extent = int(at.max()) - first + size
    memory = host_bytes(first, 1, extent, extent)[0].view(words.numpy().dtype)
    memory[(at - first) // size] = words.numpy()
