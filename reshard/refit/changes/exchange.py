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
from reshard.refit.copying.legs import Leg, Legs, splits
from reshard.refit.copying.tables import STATUS

LEAVING, ARRIVING = range(2)  # in `ChangesExchange.sizes`


class Announced(NamedTuple):
    """A bucket of which the sizes are on their way: its number, what it holds for each inference rank, and an event
    after which the sizes are there."""

    bucket: int
    segments: Mapping[int, torch.Tensor]
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
    must not keep that. `pack` packs a bucket, and returns what it holds for the first inference rank of each line;
    `legs` are those of the whole buckets in so many `steps`, and `served` returns the places of a bucket of a trainer's
    rank.
    """

    def __init__(
        self,
        group: RefitGroup,
        all_to_all: Callable[[torch.Tensor, torch.Tensor, list[int], list[int]], Any],
        ranks: Sequence[int],
        sent: SentBuckets,
        since: int,
        pack: Callable[[int], Mapping[int, torch.Tensor]],
        steps: int,
        legs: Legs,
        served: Callable[[int, int], ServedBucket],
    ) -> None:
        self.group, self.all_to_all, self.ranks, self.sent = group, all_to_all, ranks, sent
        self.since, self.pack, self.steps, self.legs, self.served = since, pack, steps, legs, served
        self.device, on_gpu = sent.device, sent.device.type == "cuda"
        # Bytes that leave and arrive by bucket and rank, and what a GPU says of what arrived.
        self.sizes = torch.empty((steps, 2, len(ranks)), dtype=torch.int64, pin_memory=on_gpu)
        self.statuses = torch.zeros((steps, len(ranks), STATUS), dtype=torch.int64, device=self.device)
        self.place = {rank: place for place, rank in enumerate(ranks)}
        heads = [self.place[legs.heads.get(rank, rank)] for rank in ranks]
        self.heads = torch.tensor(heads, device=self.device)  # by rank: whose bytes it gets, by their place
        self.passing: dict[tuple[int, int], torch.Tensor] = {}  # what arrived, by trainer's rank and bucket
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
        leaving = self.sent.find(index, segments, self.ranks)[self.heads]
        arriving = torch.empty_like(leaving)
        sizes_work = self.all_to_all(arriving, leaving, [], [])
        wait_for_exchange(sizes_work, self.device, self.group)
        for sizes, known in zip(self.sizes[index], (leaving, arriving), strict=True):
            sizes.copy_(known, non_blocking=True)
        return Announced(index, segments, event_now(self.device))

    def _send(self, announced: Announced) -> Travelling:
        """Send what changed in a bucket, and pass on what changed in others."""
        step, segments, event = announced
        self._check_sizes(step, event)
        own_sizes = dict(zip(self.ranks, self.sizes[step, LEAVING].tolist(), strict=True))
        own = self.sent.changes(step, segments, self.since, own_sizes)
        parts = {}
        for leg in self.legs.leaving(step):
            is_own, key = leg.trainer == self.group.rank, (leg.trainer, leg.bucket)
            part = own.get(leg.partner) if is_own else self.passing.pop(key, None)
            if part is not None:
                parts[leg] = part
        arriving_legs = [(leg, self._announced(leg)) for leg in self.legs.arriving(step)]
        arriving = torch.empty(sum(size for _, size in arriving_legs), dtype=torch.uint8, device=self.device)
        joined = [*parts.values()]
        leaving = joined[0] if len(joined) == 1 else torch.cat([arriving[:0], *joined])
        sizes_in = splits([leg._replace(size=size) for leg, size in arriving_legs], self.ranks)
        sizes_out = splits([leg._replace(size=len(part)) for leg, part in parts.items()], self.ranks)
        work = self.all_to_all(arriving, leaving, sizes_in, sizes_out)
        self.received += len(arriving)
        return Travelling(work, leaving, arriving, arriving_legs)

    def _announced(self, leg: Leg) -> int:
        """Return the bytes that its trainer's rank has said that the changes of a bucket take."""
        if not leg.size:
            return 0
        return int(self.sizes[leg.bucket, ARRIVING, self.place[leg.trainer]])

    def _check_sizes(self, step: int, event: torch.cuda.Event | None) -> None:
        """Wait until the sizes of a bucket's changes are known. Raises ReshardError where a rank says more than a
        bucket of its size can take."""
        wait_for_partners(self.device, self.group, event)
        whole = {way.trainer: way.pair.bytes_of_round(step) for way in self.legs.ins}
        for rank, size in zip(self.ranks, self.sizes[step, ARRIVING].tolist(), strict=True):
            bucket = whole.get(rank, 0)
            if not 0 <= size <= most_bytes(bucket) or size % SECTION:
                raise ReshardError(
                    f"{self.group.names[rank]} announces {size:,} bytes of changes in a bucket of {bucket:,} bytes"
                )

    def _write(self, travelling: Travelling) -> None:
        """Write what changed in a bucket, by trainer's rank, where it is served from; on a GPU, enqueue that."""
        wait_for_exchange(travelling.work, self.device, self.group)
        parts = travelling.arriving.split([size for _, size in travelling.legs])
        for (leg, _), part in zip(travelling.legs, parts, strict=True):
            rank, index, size = leg.trainer, leg.bucket, leg.size
            if not size:
                continue
            if rank in self.legs.passed:
                self.passing[rank, index] = part
            try:
                if self.device.type == "cuda" and len(part) >= header_bytes(size):
                    served = self.served(rank, index)
                    served.write_changes(
                        part, size, self.since, index, self.statuses[index, self.place[rank]]
                    )
                    continue
                for words in read_changes(part, size, self.since, index, self.group.names[rank]):
                    self.served(rank, index).write(*words)
            except ReshardError as error:
                self.failure = self.failure or error
