"""The exchange of what changed in buckets (`reshard.refit.changes.buckets`) among all ranks that have a side.

A bucket takes three steps: what changed is found, and all learn how many bytes it takes; it is sent; it is written.
Each step of a bucket is enqueued before the next one of the bucket ahead, so that a GPU has work while its host waits,
which it does once a bucket, for the sizes.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from reshard.comm.group import RefitGroup
from reshard.core.errors import ReshardError
from reshard.delta.forms import SECTION
from reshard.refit.changes.buckets import (
    SentBuckets,
    ServedBucket,
    check_status,
    header_bytes,
    most_bytes,
    read_changes,
)
from reshard.refit.copying.copies import event_now, wait_for_exchange, wait_for_partners
from reshard.refit.copying.tables import STATUS


class Announced(NamedTuple):
    """A bucket of which the sizes are on their way: its number, what it holds for each inference rank, and an event
    after which the sizes are there."""

    bucket: int
    segments: Mapping[int, torch.Tensor]
    event: torch.cuda.Event | None


class Travelling(NamedTuple):
    """A bucket's changes on their way: its number, the exchange, and its buffers; the bytes by rank that arrive."""

    bucket: int
    work: Any
    leaving: torch.Tensor
    arriving: torch.Tensor
    splits: list[int]


class ChangesExchange:
    """One exchange of the changes since a transaction.

    `all_to_all` begins an exchange among all ranks, given the bytes that arrive, those that leave, and how many of each
    by rank. It belongs to the transport, which may give up its communicator: what a failure leaves of this exchange
    must not keep that. `pack` packs a bucket, and returns what it holds for each inference rank; `buckets` are the
    bytes of each that come from each rank; `served` returns the places of those that come from a rank.
    """

    def __init__(
        self,
        group: RefitGroup,
        all_to_all: Callable[[torch.Tensor, torch.Tensor, list[int], list[int]], Any],
        ranks: Sequence[int],
        sent: SentBuckets,
        since: int,
        pack: Callable[[int], Mapping[int, torch.Tensor]],
        buckets: Sequence[Sequence[int]],
        served: Callable[[int, int], ServedBucket],
    ) -> None:
        self.group, self.all_to_all, self.ranks, self.sent = group, all_to_all, ranks, sent
        self.since, self.pack, self.buckets, self.served = since, pack, buckets, served
        self.device, on_gpu = sent.device, sent.device.type == "cuda"
        # Bytes that leave and arrive by bucket and rank, and what a GPU says of what arrived.
        self.sizes = torch.empty((len(buckets), 2, len(ranks)), dtype=torch.int64, pin_memory=on_gpu)
        self.statuses = torch.zeros((len(buckets), len(ranks), STATUS), dtype=torch.int64, device=self.device)
        self.failure: ReshardError | None = None
        self.received = 0

    def run(self) -> int:
        """Exchange all buckets; return the bytes that arrived.

        Where what came cannot be written, the rest is exchanged all the same, since others wait for it; the
        first failure is raised at the end.
        """
        ahead: Announced | None = None
        behind: Travelling | None = None
        for index in range(len(self.buckets) + 2):
            announced, ahead = ahead, self._announce(index) if index < len(self.buckets) else None
            travelling, behind = behind, self._send(announced) if announced is not None else None
            if travelling is not None:
                self._write(travelling)
        wait_for_partners(self.device, self.group)
        if self.failure is not None:
            try:
                raise self.failure
            finally:
                self.failure = None  # else it and its traceback keep this exchange, and its buffers
        if self.device.type == "cuda":
            for index, of_ranks in enumerate(self.statuses.tolist()):
                for rank, status in zip(self.ranks, of_ranks, strict=True):
                    check_status(status, self.since, index, self.group.names[rank])
        return self.received

    def _announce(self, index: int) -> Announced:
        """Find what changed in a bucket, and tell all others how many bytes each gets of it."""
        segments = self.pack(index)
        leaving = self.sent.find(index, segments, self.ranks)
        arriving = torch.empty_like(leaving)
        sizes_work = self.all_to_all(arriving, leaving, [], [])
        wait_for_exchange(sizes_work, self.device, self.group)
        for sizes, known in zip(self.sizes[index], (leaving, arriving), strict=True):
            sizes.copy_(known, non_blocking=True)
        return Announced(index, segments, event_now(self.device))

    def _send(self, announced: Announced) -> Travelling:
        """Send what changed in a bucket."""
        index, segments, event = announced
        leaving_sizes, arriving_sizes = self._sizes(index, event)
        parts = self.sent.changes(
            index, segments, self.since, dict(zip(self.ranks, leaving_sizes, strict=True))
        )
        arriving = torch.empty(sum(arriving_sizes), dtype=torch.uint8, device=self.device)
        leaving = parts[0] if len(parts) == 1 else torch.cat([arriving[:0], *parts])
        work = self.all_to_all(arriving, leaving, arriving_sizes, leaving_sizes)
        self.received += len(arriving)
        return Travelling(index, work, leaving, arriving, arriving_sizes)

    def _sizes(self, index: int, event: torch.cuda.Event | None) -> tuple[list[int], list[int]]:
        """Return the bytes of a bucket's changes that leave to each rank, and that arrive from each, once they are
        known. Raises ReshardError where a rank says more than a bucket of its size can take."""
        wait_for_partners(self.device, self.group, event)
        leaving, arriving = self.sizes[index].tolist()
        for rank, size, bucket in zip(self.ranks, arriving, self.buckets[index], strict=True):
            if not 0 <= size <= most_bytes(bucket) or size % SECTION:
                raise ReshardError(
                    f"{self.group.names[rank]} announces {size:,} bytes of changes in a bucket of {bucket:,} bytes"
                )
        return leaving, arriving

    def _write(self, travelling: Travelling) -> None:
        """Write what changed in a bucket, by trainer's rank, where it is served from; on a GPU, enqueue that."""
        wait_for_exchange(travelling.work, self.device, self.group)
        index = travelling.bucket
        parts = travelling.arriving.split(travelling.splits)
        for place, (rank, part, size) in enumerate(zip(self.ranks, parts, self.buckets[index], strict=True)):
            if not size:
                continue
            try:
                if self.device.type == "cuda" and len(part) >= header_bytes(size):
                    served = self.served(rank, index)
                    served.write_changes(part, size, self.since, index, self.statuses[index, place])
                    continue
                for words in read_changes(part, size, self.since, index, self.group.names[rank]):
                    self.served(rank, index).write(*words)
            except ReshardError as error:
                self.failure = self.failure or error
