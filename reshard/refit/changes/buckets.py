"""Deltas of buckets: what a trainer's rank packs is compared with what it packed and sent last, and only what
changed travels; an inference rank writes it where its tensors lie.

A bucket is compared in words of 2 bytes, in chunks of 1 MiB (`reshard.delta.chunks`). What travels of a bucket,
in int64 and then bytes:

    since, bucket, chunks    the transaction on which it builds, the bucket's number, and how many chunks
    form, changed            of each chunk
    payload                  of each chunk in turn

An inference rank knows since when it expects changes, and which bucket is next: others are refused before a
byte is written, and positions outside of the bucket before any of as many chunks as are written at once.

On a GPU kernels do all of it (`reshard.refit.changes.kernels`) without a wait: the host learns the sizes when it needs
them, and whether all made sense at the end.
"""

from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Union

import numpy as np
import torch

from reshard.core.errors import ReshardError
from reshard.delta.chunks import WORD, ChunkSizes, Comparison, Words, chunks_of, decode_chunks, encode_chunks
from reshard.delta.forms import Form
from reshard.refit.changes.sent import WHOLE, Measured
from reshard.refit.codecs import CODECS, PLAIN, bytes_in_source
from reshard.refit.copying.copies import host_bytes
from reshard.refit.copying.packing import PackedPair
from reshard.refit.copying.tables import (
    CODEC,
    DST,
    DST_PITCH,
    NOT_DUE,
    PRELUDE,
    ROWS,
    SRC,
    STATUS_BUCKET,
    STATUS_CODE,
    STATUS_SINCE,
    UNORDERED,
    WIDTH,
)
from reshard.refit.relays import Line

if TYPE_CHECKING:
    from reshard.refit.changes.kernels import DeviceChanges, ReceivedChanges

# Changes that have arrived: those of some chunks on a CPU, or of a whole bucket on a GPU.
Received = Union[Words, "ReceivedChanges"]


class HostChanges:
    """The changes of a bucket on a CPU since `old`, as `reshard.refit.changes.kernels.DeviceChanges` has it of a GPU;
    both are bytes of one size."""

    def __init__(self, old: torch.Tensor, new: torch.Tensor) -> None:
        self.compared = Comparison.of(old.view(torch.int16), new.view(torch.int16))
        self.changed = self.compared.changed
        self.sizes = ChunkSizes.of(len(new) // WORD, self.changed.numpy())
        self.total = torch.tensor([header_bytes(len(new)) + self.sizes.total])

    def encode(self, payload: torch.Tensor, since: int, index: int) -> None:
        """Write what travels into `payload`, zeros in uint8 ``[total]``."""
        chunks = np.stack([self.sizes.forms, self.sizes.changed], 1)
        header = np.array([since, index, len(chunks), *chunks.flat])
        payload[: header.nbytes] = torch.from_numpy(header.view(np.uint8))
        encode_chunks(self.compared, self.sizes, payload[header.nbytes :])


class SentBuckets:
    """The bytes of the buckets that this trainer's rank sent last, in its device's memory or pinned in the
    host's.

    Lines of inference ranks that get the same bytes, as replicas do, share what is kept.
    """

    def __init__(self, device: torch.device, on_host: bool) -> None:
        self.device, self.on_host = device, on_host and device.type != "cpu"
        self.first: dict[Line, Line] = {}  # by line: the first that gets the same bytes
        self.sizes: dict[Line, list[int]] = {}  # of buckets, by such a first line
        self.buckets: dict[
            tuple[Line, int], torch.Tensor
        ] = {}  # by such a first line and the bucket's number
        self.whole = self._were_whole = False  # all of what was last sent is kept
        self.carries = False  # see `Changes`
        self.since: int | None = None  # the transaction on which changes build; None where all is sent
        # Of what is kept on the host: streams to there and from there, beside that which packs, so that both
        # directions of PCIe run at once; what has been fetched ahead; and when each bucket had been stored.
        self.storing, self.fetching = (torch.cuda.Stream(device) if self.on_host else None for _ in range(2))
        self._fetched: dict[tuple[Line, int], torch.Tensor] = {}
        self._stored: dict[int, torch.cuda.Event] = {}
        # Of each bucket that was compared: its words, how many of each chunk changed, and the bytes that these take.
        self._comparisons: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        # By bucket and first line: what changed, until it is encoded.
        self._found: dict[tuple[int, Line], HostChanges | DeviceChanges] = {}
        self._measured: Measured | None = None  # by these, once somebody has asked

    def arrange(self, pairs: Mapping[Line, PackedPair]) -> None:
        """Take what goes out, by line."""
        by_contents: dict[bytes, Line] = {}
        self.first = {line: by_contents.setdefault(_contents(pair), line) for line, pair in pairs.items()}
        sizes = {
            line: [pairs[line].bytes_of_round(index) for index in range(pairs[line].rounds)]
            for line in by_contents.values()
        }
        if sizes != self.sizes:
            self.sizes, self.buckets, self.whole = sizes, {}, False

    def drop(self) -> None:
        """Give back what is kept."""
        self.begin(None)
        self.buckets = {}

    @property
    def bytes(self) -> int:
        """The bytes of memory that this takes once all is kept."""
        return sum(map(sum, self.sizes.values()))

    @property
    def keeps_sent(self) -> bool:
        """True if what was last sent is kept, as far as there is anything."""
        return self.whole or not self.bytes

    def begin(self, since: int | None) -> None:
        """Begin a refit that sends what changed since a transaction, or all, and measure anew; `whole` is False until
        `end`."""
        self.since = since
        self._comparisons, self._measured, self._were_whole, self.whole = [], None, self.whole, False
        self._fetched, self._stored, self._found = {}, {}, {}

    def end(self) -> None:
        """Note that all buckets have been sent; the current stream waits for what is still being stored."""
        if self.storing is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.storing)
        self.whole = True

    @property
    def measured(self) -> Measured:
        """The changes that comparisons have found since `begin`, once all has been sent; waits for the device."""
        if self._measured is None and self._comparisons and self.whole:
            counts = torch.cat([changed for _, changed, _ in self._comparisons])
            sizes = torch.cat([total for *_, total in self._comparisons])
            changed, encoded = torch.stack([counts.sum(), sizes.sum()]).tolist()
            words = sum(words for words, *_ in self._comparisons)
            self._measured = Measured(changed, words, encoded, WORD * words)
        return self._measured or Measured()

    def keep(self, index: int, segments: Mapping[Line, torch.Tensor]) -> None:
        """Keep what is sent whole, and measure what changed, where that can be told; on a GPU, enqueue it."""
        for line, segment in segments.items():
            if self.first[line] != line or not len(segment):
                continue
            is_new = self._make_room((line, index), segment)
            if self._were_whole and not is_new:
                self._compared((line, index), segment)
                if self.keeps_by_comparing:
                    continue
            self._store((line, index), segment)

    def _make_room(self, key: tuple[Line, int], segment: torch.Tensor) -> bool:
        """Take memory to keep a bucket of this size; return False where it has some."""
        if key in self.buckets:
            return False
        where = torch.device("cpu") if self.on_host else self.device
        self.buckets[key] = torch.empty(
            len(segment), dtype=torch.uint8, device=where, pin_memory=self.on_host
        )
        return True

    def find(self, index: int, segments: Mapping[Line, torch.Tensor]) -> dict[Line, torch.Tensor]:
        """Find what changed in a bucket since it was last kept; on a GPU, enqueue that. Return the bytes in which it
        travels in each line, int64 ``[1]``."""
        for line, segment in segments.items():
            if self.first[line] == line and len(segment):
                self._found[index, line] = self._compared((line, index), segment)
        found = {line: self._found.get((index, self.first[line])) for line in segments}
        return {line: changes.total for line, changes in found.items() if changes is not None}

    def changes(
        self, index: int, segments: Mapping[Line, torch.Tensor], since: int, sizes: Mapping[Line, int]
    ) -> dict[Line, torch.Tensor]:
        """Return what travels of a bucket by line: what `find` found, in so many bytes by line."""
        made: dict[Line, torch.Tensor] = {}
        for line, segment in segments.items():
            changes = self._found.pop((index, line), None)
            if changes is not None:
                made[line] = torch.zeros(sizes[line], dtype=torch.uint8, device=self.device)
                changes.encode(made[line], since, index)
                if sizes[line] > header_bytes(len(segment)) and not self.keeps_by_comparing:
                    self._store((line, index), segment)
        return {line: made[self.first[line]] for line in segments}

    @property
    def keeps_by_comparing(self) -> bool:
        """True where what is kept becomes what is sent while both are compared."""
        return self.device.type == "cuda" and not self.on_host

    def _compared(self, key: tuple[Line, int], segment: torch.Tensor) -> "HostChanges | DeviceChanges":
        """Compare what is sent with what is kept, and return what changed: all for `WHOLE`."""
        before = self._all_other(key, segment) if self.since == WHOLE else self._kept(key)
        changes: HostChanges | DeviceChanges
        if self.device.type == "cuda":
            from reshard.refit.changes import kernels as change_kernels

            changes = change_kernels.DeviceChanges(before, segment, self.keeps_by_comparing)
        else:
            changes = HostChanges(before, segment)
        if self.since != WHOLE:
            self._comparisons.append((len(segment) // WORD, changes.changed, changes.total))
        self._measured = None
        return changes

    def _all_other(self, key: tuple[Line, int], segment: torch.Tensor) -> torch.Tensor:
        """Return a bucket in which each word is another one than in `segment`: in the memory in which that is kept,
        where comparing keeps it."""
        self._make_room(key, segment)
        if self.keeps_by_comparing:
            return torch.bitwise_not(segment, out=self.buckets[key])
        return torch.bitwise_not(segment)

    def _kept(self, key: tuple[Line, int]) -> torch.Tensor:
        """Return what is kept of a bucket on the device, and begin to fetch the next one's."""
        if self.fetching is None:
            return self.buckets[key]
        line, index = key
        current = torch.cuda.current_stream(self.device)
        if key not in self._fetched:
            self._fetch(key)
        current.wait_stream(self.fetching)
        kept = self._fetched.pop(key)
        kept.record_stream(current)
        self._fetch((line, index + 1))
        return kept

    def _fetch(self, key: tuple[Line, int]) -> None:
        if self.fetching is not None and key in self.buckets:
            with torch.cuda.stream(self.fetching):
                self._fetched[key] = self.buckets[key].to(self.device, non_blocking=True)

    def _store(self, key: tuple[Line, int], segment: torch.Tensor) -> None:
        """Keep what is sent of a bucket; see `wait_until_stored`."""
        if self.storing is None:
            self.buckets[key].copy_(segment, non_blocking=True)
            return
        self.storing.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.storing):
            self.buckets[key].copy_(segment, non_blocking=True)
            self._stored[key[1]] = self.storing.record_event()

    def wait_until_stored(self, index: int) -> None:
        """Let the current stream wait until a bucket is kept, before its memory is packed anew."""
        if index in self._stored:
            torch.cuda.current_stream(self.device).wait_event(self._stored[index])


def _contents(pair: PackedPair) -> bytes:
    """Return a digest of what a pair's buckets hold: where from, and as what."""
    contents = blake2b(digest_size=16)
    for array in (pair.tiles, *pair.packed_blocks.facts, pair.places, pair.sizes):
        contents.update(str(array.shape).encode() + np.ascontiguousarray(array).tobytes())
    return contents.digest()


def header_bytes(size: int) -> int:
    """Return the bytes ahead of the payloads of a bucket of `size` bytes."""
    return 8 * (PRELUDE + 2 * chunks_of(size // WORD))


def most_bytes(size: int) -> int:
    """Return the most that the changes of a bucket of `size` bytes take; 0 of an empty one."""
    return header_bytes(size) + size + 8 if size else 0


def read_changes(payload: torch.Tensor, size: int, since: int, index: int, who: str) -> Iterator[Words]:
    """Yield the changes of a bucket of `size` bytes in what `who` has sent.

    Raises ReshardError where they are not of this bucket, build on another transaction than `since`, or make no
    sense: before the first, but where positions are outside of it, or not in order.
    """
    broken, head = f"{who} sends changes of bucket {index} that make no sense", header_bytes(size)
    if len(payload) < head:
        raise ReshardError(f"{broken}: {len(payload):,} bytes")
    header = payload[:head].view(torch.int64).cpu().numpy()
    if header[:PRELUDE].tolist() != [since, index, chunks_of(size // WORD)]:
        raise _not_due(who, int(header[0]), int(header[1]), since, index)
    forms, changed = header[PRELUDE:].reshape(-1, 2).T
    elements = ChunkSizes.of(size // WORD, np.zeros_like(changed)).elements
    fits = (changed >= 0) & (changed <= elements) & ((forms != Form.NOTHING) | (changed == 0))
    if not (fits & np.isin(forms, list(Form))).all():
        raise ReshardError(f"{broken}: {changed.tolist()} changes in forms {forms.tolist()}")
    sizes = ChunkSizes.of(size // WORD, changed, forms)
    if sizes.total != len(payload) - head:
        raise ReshardError(f"{broken}: {len(payload):,} bytes")
    for group in decode_chunks(payload[head:], sizes):
        if group is None:
            raise ReshardError(f"{broken}: positions outside of it, or not in order")
        yield from group


def _not_due(who: str, said_since: int, said_index: int, since: int, index: int) -> ReshardError:
    return ReshardError(
        f"{who} sends changes of bucket {said_index} since transaction {said_since}, where those of bucket {index} "
        f"since transaction {since} are due: the next refit sends all"
    )


def check_status(status: Sequence[int], since: int, index: int, who: str) -> None:
    """Raise ReshardError where a GPU has written nothing of the changes of a bucket that `who` has sent, which it has
    a `status` of (`tables.STATUS`)."""
    code = status[STATUS_CODE]
    if code == NOT_DUE:
        raise _not_due(who, status[STATUS_SINCE], status[STATUS_BUCKET], since, index)
    if code:
        what = "positions outside of it, or not in order" if code == UNORDERED else "its sizes"
        raise ReshardError(f"{who} sends changes of bucket {index} that make no sense: {what}")


def received_on_gpu(
    payload: torch.Tensor, size: int, since: int, index: int, status: torch.Tensor
) -> "ReceivedChanges":
    """Return the changes of a bucket of `size` bytes that have arrived on a GPU; enqueued. What `check_status` needs
    comes into `status`, zeros in int64 ``[3]``."""
    from reshard.refit.changes.kernels import ReceivedChanges

    return ReceivedChanges(payload, size, since, index, status)


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
        # The first address, and the bytes from there to the last.
        self.base = int(table[:, DST].min()) if len(table) else 0
        ends = table[:, DST] + (table[:, ROWS] - 1) * table[:, DST_PITCH] + table[:, WIDTH]
        self.reach = int(ends.max()) - self.base if len(table) else 0
        columns = (self.starts, self.sizes, self.widths, self.addresses, self.pitches, self.codec)
        self.tiles = torch.stack(columns, 1).contiguous()  # of `tables.SERVED`

    def write(self, changes: Received, swap: bool = False) -> None:
        """Write changes where they are served from; on a GPU, enqueue that. With `swap` they become what was there, so
        that the same call again takes them back."""
        if not isinstance(changes, Words):
            changes.write(self.tiles, self.codecs, self.has_odd, swap)
            return
        for units, chosen, addresses, codec in self._written(*changes):
            before = read_words(addresses, _converted(units[:0], codec).dtype) if swap else None
            write_words(addresses, _converted(units[chosen], codec))
            if before is not None:
                units[chosen] = _restored(before, codec)

    def _written(
        self, positions: torch.Tensor, values: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]]:
        """Yield words, or their bytes where a row has an odd number of these, or begins at an odd address; and which of
        them are written at which addresses, by which codec."""
        if not len(self.starts) or not len(positions):
            return
        where = positions * WORD
        tile, order = self._tile(where), torch.arange(len(where))
        if self.has_odd:
            as_bytes = self.odd[tile] != 0
            of_bytes = (where[as_bytes][:, None] + torch.arange(WORD)).reshape(-1)
            bytes_order = (order[as_bytes][:, None] * WORD + torch.arange(WORD)).reshape(-1)
            of_tile = self._tile(of_bytes)
            inside = self._inside(of_bytes, of_tile)
            addresses = self._addresses(of_bytes[inside], of_tile[inside], PLAIN)
            yield values.view(torch.uint8), bytes_order[inside], addresses, PLAIN
            where, tile, order = where[~as_bytes], tile[~as_bytes], order[~as_bytes]
        for codec in self.codecs:
            inside = self._inside(where, tile)
            if len(self.codecs) > 1:
                inside &= self.codec[tile] == codec
            yield values, order[inside], self._addresses(where[inside], tile[inside], codec), codec

    def _tile(self, where: torch.Tensor) -> torch.Tensor:
        """Return the last tile that begins at or before these bytes of the bucket, or the first one."""
        return (torch.searchsorted(self.starts, where, right=True) - 1).clamp_(min=0)

    def _inside(self, where: torch.Tensor, tile: torch.Tensor) -> torch.Tensor:
        """Return the mask of the bytes that are in these tiles, and not in the padding ahead or behind."""
        within = where - self.starts[tile]
        return (within >= 0) & (within < self.sizes[tile])

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
    source, destination = _dtypes(codec)
    return values.view(source).to(destination).view(torch.int32)


def _restored(words: torch.Tensor, codec: int) -> torch.Tensor:
    """Return what `_converted` has made such words of."""
    if codec == PLAIN:
        return words
    source, destination = _dtypes(codec)
    return words.view(destination).to(source).view(torch.int16)


def _dtypes(codec: int) -> tuple[torch.dtype, torch.dtype]:
    return getattr(torch, CODECS[codec].source.name), getattr(torch, CODECS[codec].destination.name)


def read_words(addresses: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the words of 1, 2 or 4 bytes at addresses of this process's memory, which are multiples of as many."""
    if not len(addresses):
        return torch.empty(0, dtype=dtype)
    memory, index = _memory_around(addresses, dtype)
    return memory[index]


def write_words(addresses: torch.Tensor, words: torch.Tensor) -> None:
    """Write words of 1, 2 or 4 bytes at such addresses."""
    if len(addresses):
        memory, index = _memory_around(addresses, words.dtype)
        memory[index] = words


def _memory_around(addresses: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this process's memory from the first to the last of these addresses as words, and the index of each."""
    first = int(addresses.min())
    extent = int(addresses.max()) - first + dtype.itemsize
    memory = torch.from_numpy(host_bytes(first, 1, extent, extent)[0]).view(dtype)
    return memory, (addresses - first) // dtype.itemsize
