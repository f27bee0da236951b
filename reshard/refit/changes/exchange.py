"""The exchange of what changed in buckets (`reshard.refit.changes.buckets`) among all ranks that have a side.

A bucket takes three steps: what changed is found, and all learn how many bytes it takes; it is sent; it is written.
Each step of a bucket is enqueued before the next one of the bucket ahead, so that a GPU has work while its host waits,
which it does once a bucket, for the sizes.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from reshard.comm.group import RefitGroup
from reshard.core.errors import ReshardError
from reshard.delta.forms import SECTION
from reshard.refit.changes.buckets import (
    Received,
    SentBuckets,
    ServedBucket,
    check_status,
    header_bytes,
    most_bytes,
    read_changes,
    received_on_gpu,
)
from reshard.refit.copying.copies import event_now, wait_for_exchange, wait_for_partners
from reshard.refit.copying.legs import Leg, Legs, splits
from reshard.refit.copying.tables import STATUS
from reshard.refit.relays import Line


class Announced(NamedTuple):
    """A bucket of which the sizes are on their way: its number, what it holds for each of this rank's lines, and an
    event after which the sizes are there."""

    bucket: int
    segments: Mapping[Line, torch.Tensor]
    event: torch.cuda.Event | None


class Travelling(NamedTuple):
    """The changes that travel in a step: the exchange, its buffers, and what arrives, with the bytes of changes."""

    work: Any
    leaving: torch.Tensor
    arriving: torch.Tensor
    legs: list[tuple[Leg, int]]


class ChangesExchange:
    """One exchange of the changes since a transaction.

    `all_to_all` begins an exchange among all ranks, given the bytes that arrive, those that leave, and how many of each
    by rank. It belongs to the transport, which may give up its communicator: what a failure leaves of this exchange
    must not keep that. `pack` packs a bucket, and returns what it holds for each line of this rank's; `legs` are those
    of the whole buckets in so many `steps`, and `served` returns the places of a bucket that comes in a line.
    """

    def __init__(
        self,
        group: RefitGroup,
        all_to_all: Callable[[torch.Tensor, torch.Tensor, list[int], list[int]], Any],
        ranks: Sequence[int],
        sent: SentBuckets,
        since: int,
        pack: Callable[[int], Mapping[Line, torch.Tensor]],
        steps: int,
        legs: Legs,
        served: Callable[[Line, int], ServedBucket],
    ) -> None:
        self.group, self.all_to_all, self.ranks, self.sent = group, all_to_all, ranks, sent
        self.since, self.pack, self.steps, self.legs, self.served = since, pack, steps, legs, served
        self.device, on_gpu = sent.device, sent.device.type == "cuda"
        # Lines of which this rank is the trainer's, by the rank that is told the size of their changes, and lines in
        # which some come here, by the rank that tells it.
        self.told = [(rank, line) for rank in ranks for line in legs.own if rank in line.ranks]
        lines = sorted(way.line for way in legs.ins)
        self.heard = [(rank, line) for rank in ranks for line in lines if line.trainer == rank]
        self.place = {line: place for place, (_, line) in enumerate(self.heard)}
        heard_of, told_to = (Counter(rank for rank, _ in those) for those in (self.heard, self.told))
        self.heard_counts, self.told_counts = (
            [counts[rank] for rank in ranks] for counts in (heard_of, told_to)
        )
        # The sizes by bucket and of these, and what a GPU says of what arrived.
        self.told_sizes = torch.empty((steps, len(self.told)), dtype=torch.int64, pin_memory=on_gpu)
        self.heard_sizes = torch.empty((steps, len(self.heard)), dtype=torch.int64, pin_memory=on_gpu)
        shape = (steps, len(self.heard), STATUS)
        self.statuses = torch.zeros(shape, dtype=torch.int64, device=self.device)
        self.nothing = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.passing: dict[tuple[Line, int], torch.Tensor] = {}  # what arrived, by line and bucket
        self.failure: ReshardError | None = None
        self.received = 0

    def run(self) -> int:
        """Exchange all buckets; return the bytes that arrived.

        Where what came cannot be written, the rest is exchanged all the same, since others wait for it; the
        first failure is raised at the end.
        """
        ahead: Announced | None = None
        behind: Travelling | None = None
        for index in range(self.steps + 2):
            announced, ahead = ahead, self._announce(index) if index < self.steps else None
            travelling, behind = behind, self._send(announced) if announced is not None else None
            if travelling is not None:
                self._write(travelling)
        self._end()
        return self.received

    def _end(self) -> None:
        """Wait for all that was begun, and raise what failed of it."""
        wait_for_partners(self.device, self.group)
        if self.failure is not None:
            try:
                raise self.failure
            finally:
                self.failure = None  # else it and its traceback keep this exchange, and its buffers
        if self.device.type == "cuda":
            for index, of_lines in enumerate(self.statuses.tolist()):
                for (rank, _), status in zip(self.heard, of_lines, strict=True):
                    check_status(status, self.since, index, self.group.names[rank])

    def _announce(self, index: int) -> Announced:
        """Find what changed in a bucket, and tell all that get some of it how many bytes that is."""
        segments, leaving = self._find(index)
        arriving = torch.empty(len(self.heard), dtype=torch.int64, device=self.device)
        sizes_work = self.all_to_all(arriving, leaving, self.heard_counts, self.told_counts)
        wait_for_exchange(sizes_work, self.device, self.group)
        for sizes, known in ((self.told_sizes, leaving), (self.heard_sizes, arriving)):
            sizes[index].copy_(known, non_blocking=True)
        return Announced(index, segments, event_now(self.device))

    def _find(self, index: int) -> tuple[Mapping[Line, torch.Tensor], torch.Tensor]:
        """Pack a bucket, and find what changed in it. Return what it holds by line, and how many bytes the changes take
        for each of `told`."""
        segments = self.pack(index)
        totals = self.sent.find(index, segments)
        return segments, torch.cat(
            [self.nothing[:0], *(totals.get(line, self.nothing) for _, line in self.told)]
        )

    def _send(self, announced: Announced) -> Travelling:
        """Send what changed in a bucket, and pass on what changed in others."""
        step, segments, event = announced
        wait_for_partners(self.device, self.group, event)
        self._check_sizes(step)
        return self._exchange(step, self._encoded(step, segments))

    def _encoded(self, step: int, segments: Mapping[Line, torch.Tensor]) -> dict[Line, torch.Tensor]:
        """Return what travels of a bucket by line, once its sizes are there."""
        sizes = zip(self.told, self.told_sizes[step].tolist(), strict=True)
        return self.sent.changes(step, segments, self.since, {line: size for (_, line), size in sizes})

    def _exchange(self, step: int, own: Mapping[Line, torch.Tensor]) -> Travelling:
        """Begin to send the changes of a bucket, and to pass on those of others."""
        parts = {}
        for leg in self.legs.leaving(step):
            is_own, key = leg.line.trainer == self.group.rank, (leg.line, leg.bucket)
            part = own.get(leg.line) if is_own else self.passing.pop(key, None)
            if part is not None:
                parts[leg] = part
        arriving_legs = [(leg, self._heard(leg)) for leg in self.legs.arriving(step)]
        arriving = torch.empty(sum(size for _, size in arriving_legs), dtype=torch.uint8, device=self.device)
        joined = [*parts.values()]
        leaving = joined[0] if len(joined) == 1 else torch.cat([arriving[:0], *joined])
        sizes_in = splits([leg._replace(size=size) for leg, size in arriving_legs], self.ranks)
        sizes_out = splits([leg._replace(size=len(part)) for leg, part in parts.items()], self.ranks)
        work = self.all_to_all(arriving, leaving, sizes_in, sizes_out)
        self.received += len(arriving)
        return Travelling(work, leaving, arriving, arriving_legs)

    def _heard(self, leg: Leg) -> int:
        """Return the bytes that its trainer's rank has said that the changes of a bucket take."""
        return int(self.heard_sizes[leg.bucket, self.place[leg.line]]) if leg.size else 0

    def _check_sizes(self, step: int) -> None:
        """Raise ReshardError where a rank says more of a bucket's changes than a bucket of its size can take."""
        whole = {way.line: way.pair.bytes_of_round(step) for way in self.legs.ins}
        for (rank, line), size in zip(self.heard, self.heard_sizes[step].tolist(), strict=True):
            bucket = whole[line]
            if not 0 <= size <= most_bytes(bucket) or size % SECTION:
                raise ReshardError(
                    f"{self.group.names[rank]} announces {size:,} bytes of changes in a bucket of {bucket:,} bytes"
                )

    def _write(self, travelling: Travelling) -> None:
        """Take what has arrived of a bucket, by trainer's rank; on a GPU, enqueue that."""
        wait_for_exchange(travelling.work, self.device, self.group)
        parts = travelling.arriving.split([size for _, size in travelling.legs])
        for (leg, _), part in zip(travelling.legs, parts, strict=True):
            line, index, size = leg.line, leg.bucket, leg.size
            if not size:
                continue
            if line in self.legs.passed:
                self.passing[line, index] = part
            try:
                self._take(line, index, size, part)
            except ReshardError as error:
                self.failure = self.failure or error

    def _take(self, line: Line, index: int, size: int, part: torch.Tensor) -> None:
        """Write what changed in a bucket of `size` bytes where it is served from."""
        served = self.served(line, index)
        for changes in self._read(line, index, size, part):
            served.write(changes)

    def _read(self, line: Line, index: int, size: int, part: torch.Tensor) -> Iterable[Received]:
        """Return the changes of a bucket, as `ServedBucket.write` takes them. Raises ReshardError where they make no
        sense; of those on a GPU `run` says so at its end."""
        if self.device.type == "cpu" or len(part) < header_bytes(size):
            return read_changes(part, size, self.since, index, self.group.names[line.trainer])
        return [received_on_gpu(part, size, self.since, index, self.statuses[index, self.place[line]])]
