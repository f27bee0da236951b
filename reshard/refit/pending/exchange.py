"""The exchange of a pending version's changes: all are packed before the first travels, so that the trainer may change
its weights meanwhile, and what arrives is kept."""

from typing import TYPE_CHECKING, Any

import torch

from reshard.delta.chunks import Words
from reshard.refit.changes.buckets import Received, ServedBucket
from reshard.refit.changes.exchange import Announced, ChangesExchange, Travelling
from reshard.refit.copying.copies import event_now, wait_for_device, wait_for_exchange, wait_for_partners
from reshard.refit.pending.version import Arrived
from reshard.refit.relays import Line

if TYPE_CHECKING:
    from reshard.refit.pending.kernels import PlacedChanges


class PendingExchange(ChangesExchange):
    """One exchange of the changes since a transaction. `buckets` are those that have arrived, with where each is
    served."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.packed: list[dict[Line, torch.Tensor]] = [{} for _ in range(self.steps)]
        self.packed_bytes = 0
        self.buckets: list[tuple[ServedBucket, list[Received]]] = []
        self.placed: list[PlacedChanges | None] = []  # on a GPU, of each of these

    def pack_all(self, limit: int) -> bool:
        """Pack what changed in all buckets of this trainer's rank. Returns False, and has given up, where that takes
        more than `limit` bytes; else its weights may change from now on."""
        ahead: Announced | None = None
        if not self.told:
            return True
        for index in range(self.steps + 1):
            announced, ahead = ahead, self._found(index) if index < self.steps else None
            if announced is None:
                continue
            self._wait(announced.event)
            made = self._encoded(announced.bucket, announced.segments)
            self.packed[announced.bucket] = made
            # Lines of replicas share one tensor.
            self.packed_bytes += sum(len(one) for one in {id(one): one for one in made.values()}.values())
            if self.packed_bytes > limit:
                return False
        self.sent.end()
        self._wait(None)
        return True

    def _found(self, index: int) -> Announced:
        """Pack a bucket, and find what changed in it; enqueued on a GPU, with the sizes."""
        segments, sizes = self._find(index)
        self.told_sizes[index].copy_(sizes, non_blocking=True)
        return Announced(index, segments, event_now(self.device))

    def _wait(self, event: "torch.cuda.Event | None") -> None:
        if not wait_for_device(self.device, self.group.timeout, event=event):
            raise RuntimeError(f"the GPU has not packed what changed within {self.group.timeout:g} s")

    def exchange_sizes(self) -> int:
        """Tell all how many bytes the changes of each bucket take; return the bytes that will arrive here."""
        leaving = self.told_sizes.T.reshape(-1).to(self.device)
        arriving = torch.empty(len(self.heard) * self.steps, dtype=torch.int64, device=self.device)
        counts = ([self.steps * count for count in each] for each in (self.heard_counts, self.told_counts))
        wait_for_exchange(self.all_to_all(arriving, leaving, *counts), self.device, self.group)
        self.heard_sizes.copy_(arriving.view(len(self.heard), self.steps).T)
        wait_for_partners(self.device, self.group)
        for step in range(self.steps):
            self._check_sizes(step)
        return int(self.heard_sizes.sum())

    def run(self) -> int:
        """Exchange what was packed, once its sizes are known; return the bytes that arrived. For a failure see
        `ChangesExchange.run`."""
        behind: Travelling | None = None
        for index in range(self.steps + 1):
            travelling, behind = behind, self._sent(index) if index < self.steps else None
            if travelling is not None:
                self._write(travelling)
        self._end()
        # Not before: another stream has made them, and would write into their memory while they are sent.
        self.packed = []
        return self.received

    def _sent(self, index: int) -> Travelling:
        return self._exchange(index, self.packed[index])

    def _take(self, line: Line, index: int, size: int, part: torch.Tensor) -> None:
        """Keep what changed in a bucket of `size` bytes."""
        served, received = self.served(line, index), [*self._read(line, index, size, part)]
        self.buckets.append((served, received))
        if self.device.type == "cuda":
            from reshard.refit.pending.kernels import place

            self.placed.extend(place(one, served) for one in received if not isinstance(one, Words))

    def arrived(self) -> Arrived:
        """Return what has arrived, once `run` is through."""
        if self.device.type == "cpu":
            return Arrived(self.buckets)
        from reshard.refit.pending.kernels import Swap

        swap = Swap([placed for placed in self.placed if placed is not None])
        is_listed = iter(swap.is_listed)
        left = [placed is None or not next(is_listed) for placed in self.placed]
        wait_for_partners(self.device, self.group)
        return Arrived([bucket for bucket, is_left in zip(self.buckets, left, strict=True) if is_left], swap)
