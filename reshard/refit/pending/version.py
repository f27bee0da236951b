"""The version that lies beside the one that an engine's rank serves."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from reshard.refit.changes.buckets import Received, ServedBucket

if TYPE_CHECKING:
    from reshard.refit.pending.kernels import Swap


class Brought(NamedTuple):
    """A version of the weights, the transaction that has brought it, None where another connection has, and whose it is
    (`reshard.refit.options.ConnectOptions`)."""

    version: int
    transaction: int | None
    origin: str = ""


class Arrived:
    """The changes that have arrived: those of each bucket, with where it is served, but for the lists on a GPU, which
    `listed` swaps all at once."""

    def __init__(
        self, buckets: Sequence[tuple[ServedBucket, Sequence[Received]]], listed: "Swap | None" = None
    ) -> None:
        self.buckets, self.listed = buckets, listed

    def swap(self) -> None:
        """Exchange them with what is served; on a GPU, enqueue that."""
        if self.listed is not None:
            self.listed.run()
        for served, received in self.buckets:
            for changes in received:
                served.write(changes, swap=True)


@dataclass
class PendingVersion:
    """The version `other` beside the one that is `served`, as the `changes` between the two: they take
    `size` bytes. `digests` are those of the `newer` one by trainer's rank, if these have taken them; `writes` those of
    the engine's guard that have made what is served."""

    served: Brought
    other: Brought
    newer: Brought
    changes: "Arrived"
    size: int
    digests: Mapping[int, bytes] | None
    writes: int

    @property
    def older(self) -> Brought:
        """The version that was served before the `newer` one."""
        return self.served if self.served != self.newer else self.other

    def swap(self) -> None:
        """Write the other version into the weights, and keep what was there; on a GPU, enqueue that."""
        self.changes.swap()
        self.served, self.other = self.other, self.served
