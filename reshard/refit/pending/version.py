"""The version that lies beside the one that an engine's rank serves."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from reshard.refit.changes.buckets import Received, ServedBucket


class Brought(NamedTuple):
    """A version of the weights, and the transaction that has brought it."""

    version: int
    transaction: int


@dataclass
class PendingVersion:
    """The version `other` beside the one that is `served`, as the `changes` between the two: they take
    `size` bytes. `digests` are those of the `newer` one by trainer's rank, if these have taken them."""

    served: Brought
    other: Brought
    newer: Brought
    changes: Sequence[tuple[ServedBucket, Sequence[Received]]]
    size: int
    digests: Mapping[int, bytes] | None

    def swap(self) -> None:
        """Write the other version into the weights, and keep what was there; on a GPU, enqueue that."""
        for served, received in self.changes:
            for changes in received:
                served.write(changes, swap=True)
        self.served, self.other = self.other, self.served
