"""Changes beside the weights of an engine's rank, each with the place where it goes: they lead to a version, and, once
they were exchanged with what is there, back."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from reshard.core.placement import Placement
from reshard.delta.encoding import BITS
from reshard.device.digests import Sums
from reshard.refit.engine import Engine


class Placed(NamedTuple):
    """The bits of `values` ``[elements]``, and the `places` of these in a region's memory, no two alike."""

    memory: torch.Tensor
    places: torch.Tensor
    values: torch.Tensor

    @staticmethod
    def of(memory: torch.Tensor, places: torch.Tensor, values: torch.Tensor) -> "Placed":
        """Return values of the memory's dtype with their places, in int64."""
        bits = BITS[memory.element_size()]
        return Placed(memory.view(bits), places, values.view(bits))

    def write(self) -> None:
        """Write the values."""
        self.memory.index_copy_(0, self.places, self.values)

    def kept(self) -> "Placed":
        """Return the same in less memory, to be swapped."""
        return self._replace(places=self.places.int()) if self.memory.numel() < 1 << 31 else self

    @property
    def size(self) -> int:
        """The bytes that it takes beside the weights."""
        return self.places.nbytes + self.values.nbytes

    def swap(self) -> None:
        """Exchange the values with what is in the memory."""
        places = self.places.long()
        there = self.memory.index_select(0, places)
        self.memory.index_copy_(0, places, self.values)
        self.values.copy_(there)


@dataclass(frozen=True, eq=False)
class State:
    """A state of an engine's weights, which is the same as long as nobody has written or moved them: see `state_of`."""

    writes: int
    addresses: list[int]
    placement: Placement

    def __eq__(self, other: object) -> bool:
        """Return True if nobody has; an engine that has moved experts, on any rank, has another placement."""
        if not isinstance(other, State) or self.placement is not other.placement:
            return False
        return (self.writes, self.addresses) == (other.writes, other.addresses)


def state_of(engine: Engine) -> State:
    """Return the state of an engine's weights, where they are now."""
    engine.refresh_regions()
    return State(engine.guard.writes, engine.written_addresses(), engine.placement)


class PlacedDeltas:
    """The changes from version `before` to version `after`, in the order in which they are written. `sums` took
    `values` of the weights before."""

    def __init__(self, before: int, after: int, sums: Sums, values: Sequence[int], limit: int) -> None:
        self.before, self.after, self.limit, self.size = before, after, limit, 0
        self.sums, self.values = sums, values
        self.parts: list[Placed] = []
        self.why = ""  # there is not all of it here

    def add(self, find: Callable[[], list[Placed]]) -> None:
        """Keep what is found, unless that takes more memory than there may be, or is: then nothing is kept."""
        if self.why:
            return
        try:
            found = [one.kept() for one in find()]
        except torch.OutOfMemoryError:
            self.drop("the GPU has no memory left for what it replaced")
            return
        self.parts += found
        self.size += sum(one.size for one in found)
        if self.size > self.limit:
            self.drop(f"what it replaced takes more than pending_bytes={self.limit:,}")

    def drop(self, why: str) -> None:
        """Give the memory back."""
        self.parts, self.size, self.why = [], 0, why

    def write(self) -> None:
        """Exchange the changes with the weights of the version before; on a GPU, enqueue that."""
        for one in self.parts:
            one.swap()

    def take_back(self) -> bool:
        """Do the opposite after `write`, and return True; where others have written into the weights since, so that
        they would not be those of the version before, leave them as they were, and return False."""
        for one in reversed(self.parts):  # elements may be among the changes of several deltas
            one.swap()
        if self.sums.take() == self.values:
            return True
        self.write()
        return False
