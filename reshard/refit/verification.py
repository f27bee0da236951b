"""The check of a refit: digests that both sides take of the same pieces, from their own memory by their own addresses, made anew,
and compared where the engine is."""

import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from reshard.core.errors import ReshardError, listed
from reshard.refit.addresses import (
    AT_ONCE,
    ELEMENTS,
    ENCODED,
    as_held,
    as_read,
    as_sent,
    destination_table,
    located,
    source_table,
)
from reshard.refit.checks import check_digests
from reshard.refit.codecs import BLOCKWISE
from reshard.refit.digests import Digests
from reshard.refit.fp8_blocks.check import requantized
from reshard.refit.fp8_blocks.items import BlockItems, places_of
from reshard.refit.fp8_blocks.packed import cut_into_blocks, digest_requantized, digest_served
from reshard.refit.routes import SENT

if TYPE_CHECKING:
    from reshard.refit.receiver import Receiver
    from reshard.refit.sender import Sender


class TrainerDigests:
    """Those of a trainer's rank, by inference rank: of pieces, then of parcels."""

    def __init__(self, side: "Sender") -> None:
        self.side: Sender = weakref.proxy(side)  # which holds this one
        self.begun: dict[int, tuple[Digests, np.ndarray]] = {}

    def begin(self) -> None:
        """Begin the digests of every piece, of this rank's memory by its own addresses, made anew; those of blocks
        that travel as such are of what they become."""
        memory = located(self.side.source.regions)
        for rank, way in self.side.ways().items():
            asked = self.side.asked[rank]
            made = BLOCKWISE[as_sent(asked)[:, ENCODED]] & (way in SENT)
            of_pieces = Digests(
                source_table(memory, as_held(asked[~made])), asked[~made, ELEMENTS], self.side.device
            )
            some = self.side.sent(memory, asked[made])
            parcels = cut_into_blocks(some.table, some.into, some.places)
            self.begun[rank] = of_pieces, digest_requantized(parcels, some.places, self.side.device)

    def post(self) -> None:
        """Publish the digests when they are done: of pieces, then of parcels."""
        for rank, (pieces, parcels) in self.begun.items():
            self.side.members.post(f"digests/{rank}", np.concatenate([pieces.result(), parcels]).tobytes())
        self.begun = {}


class EngineDigests:
    """Those of an inference rank, by trainer's rank; of what was made of several pieces here it is seen whether it comes of them."""

    def __init__(self, side: "Receiver") -> None:
        self.side: Receiver = weakref.proxy(side)  # which holds this one
        self.begun: dict[int, tuple[Digests, np.ndarray]] = {}
        self.passed: dict[int, np.ndarray] = {}
        self.unlike: list[int] = []

    def begin(self) -> None:
        """Begin the digests of every piece that is here as the trainer has it or has encoded it, of this rank's
        memory by its own addresses, made anew."""
        memory = located(self.side.engine.regions.values())
        self.begun, self.passed, self.unlike = {}, {}, []  # a check before may have ended in its middle
        for rank, pieces in self.side.pieces.items():
            whole = ~self._is_made_here(rank) & ~self._travels(rank)
            table = as_read(destination_table(memory, pieces))[whole]
            served = digest_served(self._parcels(rank, memory), self.side.device)
            self.begun[rank] = Digests(table, pieces.asked[whole, ELEMENTS], self.side.device), served

    def add_round(self, number: int) -> None:
        """The digests of what has come in a round, and the local tensors of which something else is served."""
        places = {identity: index for index, identity in enumerate(self.side.engine.regions)}
        memory = located(self.side.engine.regions.values())
        for rank, pieces in self.side.pieces.items():
            here = self.side.rounds_of(rank) == number
            table = as_read(self.side.copies(rank, memory)[here])
            digests = Digests(table, pieces.asked[here, ELEMENTS], self.side.device)
            self.passed.setdefault(rank, np.zeros(len(here), np.int64))[here] = digests.result()
        if number in self.side.slab.numbers:
            self.unlike.extend(self.side.slab.mismatches(number))
            return
        self.unlike.extend(places[identity] for identity in self.side.engine.mismatches(number))

    def compare(self, shards: Mapping[int, np.ndarray]) -> None:
        """Wait for the digests, and make the blocks that were made here once more from `shards`, by trainer's rank.
        Raises ReshardError where one differs from the trainer's, or another comes of it."""
        bad: set[str] = set()
        sent = [
            some.into[self._travels(rank) | self.side.slab.through[rank], 0]
            for rank, some in self.side.pieces.items()
        ]
        read = {rank: self.side.pieces[rank].where(~self.side.slab.through[rank]) for rank in shards}
        again = requantized(
            self.side.engine, read, shards, np.concatenate([*sent, np.zeros(0, np.int64)]), self.side.device
        )
        unlike = [*again.unlike, *self.unlike]
        for rank, (of_pieces, of_parcels) in self.begun.items():
            pieces, passes, travels = self.side.pieces[rank], self._passes(rank), self._travels(rank)
            there = check_digests(
                self.side.members.read(f"digests/{self.side.members.rank}", rank),
                int((~travels).sum()) + len(of_parcels),
                self.side.members.names[rank],
            )
            here = np.zeros(len(travels), np.int64)
            made = self._is_made_here(rank) & ~passes
            here[~made & ~passes & ~travels] = of_pieces.result()
            if made.any():
                here[made] = again.digests[rank][made[~self.side.slab.through[rank]]]
            if passes.any():
                here[passes] = self.passed[rank][passes]
            wrong = np.isin(pieces.into[:, 0], unlike)
            wrong[~travels] |= here[~travels] != there[: (~travels).sum()]
            blocks = self._parcels(rank, located(self.side.engine.regions.values()))
            wrong |= travels & np.isin(
                pieces.into[:, 0], blocks.tensors[of_parcels != there[(~travels).sum() :]]
            )
            bad.update(pieces.names[i] for i in np.flatnonzero(wrong))
        self.begun = {}
        if bad:
            raise ReshardError(
                f"{len(bad)} tensors did not arrive as they are in the trainer: {listed(sorted(bad))}"
            )
        if stale := self.side.engine.stale_derived():
            raise ReshardError(
                f"{len(stale)} tensors are not what the engine derives from the weights that arrived: {listed(sorted(stale))}"
            )

    def _passes(self, rank: int) -> np.ndarray:
        """Of each piece of a trainer's rank, whether it comes in a round, after which something is made of it."""
        found: np.ndarray = self.side.rounds_of(rank) != AT_ONCE
        return found

    def _is_made_here(self, rank: int) -> np.ndarray:
        """Of each piece of a trainer's rank, whether what this engine serves is made of it here, with others."""
        blockwise = BLOCKWISE[self.side.pieces[rank].asked[:, ENCODED]]
        return self._passes(rank) | (blockwise & ~self._travels(rank))

    def _travels(self, rank: int) -> np.ndarray:
        """Of each piece of a trainer's rank, whether it comes in blocks that were made there."""
        sent, blockwise = self.side.ways()[rank] in SENT, BLOCKWISE[self.side.pieces[rank].asked[:, ENCODED]]
        found: np.ndarray = blockwise & ~self.side.slab.through[rank] & sent
        return found

    def _parcels(self, rank: int, memory: np.ndarray) -> BlockItems:
        """The blocks that come from a trainer's rank."""
        some = self.side.pieces[rank].where(self._travels(rank))
        return cut_into_blocks(destination_table(memory, some), some.into, places_of(self.side.engine))
