"""Verification of a refit: both sides take digests of the same pieces from their own memory, and
the engine's compare them.

Addresses are looked up again for this, so that a wrong table of copies is seen too. Digests travel
in the order of the pieces (`reshard.refit.planning`), followed by those of blocks that travelled as
blocks.

These sums are not those of `reshard.digest`, which take a quarter longer (on an H100 6.9 ms for 16 GB, and these 5.4),
and are weakest where rows and columns change places, as a wrong table of copies has them do. So for the digest that it
reports a verified refit reads what engines serve once more (`reshard.refit.reporting.digest`).
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from reshard.core.errors import ReshardError, listed
from reshard.refit.codecs import IN_BLOCKS
from reshard.refit.codecs.blocks import BlockCheck, BlockDigests
from reshard.refit.codecs.makers import maker_of
from reshard.refit.codecs.places import places_of
from reshard.refit.copying.addresses import (
    COLUMN_COUNT,
    REQUEST_CODEC,
    UNSTAGED,
    as_fragments,
    as_sent,
    destination_table,
    reading_destination,
    region_addresses,
    source_table,
)
from reshard.refit.copying.digests import Digests
from reshard.refit.copying.flows import Placed
from reshard.refit.receiver import Receiver
from reshard.refit.sender import Sender
from reshard.refit.transports import SENT


class SentDigests:
    """The digests that a trainer's rank takes, by inference rank: of pieces, then of blocks; once for those that ask
    for the same and get it alike."""

    def __init__(self, sender: Sender) -> None:
        self.sender = sender
        # The addresses and routes that `pieces` and `blocks` are of.
        self.made_for: tuple[list[int], dict[int, str]] | None = None
        self.same: dict[int, int] = {}  # by inference rank: the one whose digests are its own, too
        self.pieces: dict[int, Digests] = {}
        self.blocks: dict[int, BlockDigests] = {}  # that travel as such

    def begin(self) -> None:
        """Begin the digest of every piece. Blocks that travel as blocks count as what they become."""
        routes = self.sender.routes()
        made_for = self.sender.source.addresses(), routes
        if made_for != self.made_for:
            memory = region_addresses(self.sender.source.memory)
            firsts: dict[tuple[int, bool], int] = {}
            self.same = {
                rank: firsts.setdefault((self.sender.first[rank], route in SENT), rank)
                for rank, route in routes.items()
            }
            taken = {rank: routes[rank] for rank in firsts.values()}
            self.pieces = {rank: self._of_pieces(rank, route, memory) for rank, route in taken.items()}
            self.blocks = {
                rank: self._of_blocks(rank, route, memory)
                for rank, route in taken.items()
                if _as_blocks(self.sender.requests[rank], route).any()
            }
            self.made_for = made_for
        for digests in self.pieces.values():
            digests.begin()
        for blocks in self.blocks.values():
            blocks.begin()

    def post(self) -> None:
        """Publish the digests once they are computed."""
        payloads: dict[int, bytes] = {}
        for rank, pieces in self.pieces.items():
            payloads[rank] = pieces.result().tobytes()
            if rank in self.blocks:
                payloads[rank] += self.blocks[rank].result().tobytes()
        for rank, first in self.same.items():
            self.sender.group.post(f"digests/{rank}", payloads[first])

    def _of_pieces(self, rank: int, route: str, memory: np.ndarray) -> Digests:
        request = self.sender.requests[rank]
        pieces = request[~_as_blocks(request, route)]
        table = source_table(memory, as_fragments(pieces))
        return Digests(table, pieces[:, COLUMN_COUNT], self.sender.device)

    def _of_blocks(self, rank: int, route: str, memory: np.ndarray) -> BlockDigests:
        request = self.sender.requests[rank]
        outgoing = self.sender.sent(memory, request[_as_blocks(request, route)])
        pieces = Placed(outgoing.table, outgoing.destinations)
        maker = maker_of(request[:, REQUEST_CODEC])
        return maker.digests(pieces, outgoing.places, False, self.sender.device)


def _as_blocks(request: np.ndarray, route: str) -> np.ndarray:
    """Return a mask over the pieces that an inference rank asks for: those that travel as blocks."""
    mask: np.ndarray = IN_BLOCKS[as_sent(request)[:, REQUEST_CODEC]] & (route in SENT)
    return mask


class ReceivedDigests:
    """The digests that an inference rank takes, by trainer's rank.

    Tensors that the engine makes of several pieces have no digest of their own: they are made once
    more and compared.
    """

    def __init__(self, receiver: Receiver) -> None:
        self.receiver = receiver
        # The addresses and routes that `plain` and `blocks` are of.
        self.made_for: tuple[list[int], dict[int, str]] | None = None
        self.plain: dict[int, Digests] = {}
        self.blocks: dict[int, BlockDigests] = {}  # that arrive as such
        # By trainer's rank: the round of each piece and the table that its digests are of, and by round the indices
        # of its pieces with these digests.
        self.tables: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self.of_rounds: dict[int, dict[int, tuple[np.ndarray, Digests]]] = {}
        self.arrived: set[int] = set()  # the rounds of which digests were begun
        self.mismatches: list[int] = []  # indices of local tensors that differ from what arrived in a round
        self.checked_for: Any = None  # the addresses, routes and shards that `check` is of
        self.check: BlockCheck | None = None

    def begin(self, shards: Mapping[int, np.ndarray]) -> None:
        """Begin the digest of every piece that lies here as the trainer has it, or has encoded it, and the
        check of blocks that were made here. `shards` says, by trainer's rank, where its shards are mapped:
        blocks that were quantized from them are quantized once more."""
        receiver = self.receiver
        # A verification that failed may have left some.
        self.arrived, self.mismatches = set(), []
        made_for = receiver.engine.written_addresses(), receiver.routes()
        if made_for != self.made_for:
            memory = region_addresses(receiver.engine.regions.values())
            self.plain = {rank: self._of_plain(rank, memory) for rank in receiver.pieces}
            self.blocks = {
                rank: self._arriving_blocks(rank, memory)
                for rank in receiver.pieces
                if self._as_blocks(rank).any()
            }
            self.made_for = made_for
        for rank in receiver.pieces:
            self._divide(rank)
        for digests in self.plain.values():
            digests.begin()
        for blocks in self.blocks.values():
            blocks.begin()
        self._block_check(shards).begin()

    def _of_plain(self, rank: int, memory: np.ndarray) -> Digests:
        pieces = self.receiver.pieces[rank]
        plain = ~self._made_here(rank) & ~self._as_blocks(rank)
        table = reading_destination(destination_table(memory, pieces))[plain]
        return Digests(table, pieces.requests[plain, COLUMN_COUNT], self.receiver.device)

    def _divide(self, rank: int) -> None:
        """Note the digests of what comes in rounds from a trainer's rank, by round."""
        receiver, pieces = self.receiver, self.receiver.pieces[rank]
        memory = region_addresses(receiver.engine.regions.values())
        now = receiver.rounds_of(rank), reading_destination(receiver.copies(rank, memory))
        if rank in self.tables and all(map(np.array_equal, now, self.tables[rank])):
            return
        self.tables[rank], self.of_rounds[rank] = now, {}
        rounds, table = now
        for number in np.unique(rounds[rounds != UNSTAGED]).tolist():
            own = np.flatnonzero(rounds == number)
            digests = Digests(table[own], pieces.requests[own, COLUMN_COUNT], receiver.device)
            self.of_rounds[rank][number] = own, digests

    def _arriving_blocks(self, rank: int, memory: np.ndarray) -> BlockDigests:
        pieces = self.receiver.pieces[rank].where(self._as_blocks(rank))
        placed = Placed(destination_table(memory, pieces), pieces.destinations)
        places = places_of(self.receiver.engine)
        return self.receiver.maker.digests(placed, places, True, self.receiver.device)

    def add_round(self, number: int) -> None:
        """Take the digests of what arrived in a round, and note the local tensors that differ from
        what it makes."""
        receiver = self.receiver
        for of_rank in self.of_rounds.values():
            if number in of_rank:
                # Read when all rounds have run: a GPU brings the next one only after that.
                of_rank[number][1].begin()
        self.arrived.add(number)
        if number in receiver.slab.numbers:
            self.mismatches.extend(receiver.slab.mismatches(number))
            return
        index = {identity: index for index, identity in enumerate(receiver.engine.regions)}
        self.mismatches.extend(index[identity] for identity in receiver.engine.mismatches(number))

    def read(self) -> dict[int, bytes]:
        """Return the digests that trainers' ranks have posted for this one."""
        group = self.receiver.group
        return {rank: group.read(f"digests/{group.rank}", rank) for rank in self.receiver.pieces}

    def compare(self, sent: Mapping[int, bytes]) -> None:
        """Wait for all digests and compare them with those that were `sent`. Raises ReshardError, naming the tensors,
        where one differs."""
        assert self.check is not None, "begin comes first"
        receiver = self.receiver
        mismatches, made_here = self.check.result()
        mismatches.extend(self.mismatches)
        wrong_names: set[str] = set()
        for rank, pieces in receiver.pieces.items():
            wrong = np.isin(pieces.destinations[:, 0], mismatches) | self._differing(
                rank, sent[rank], made_here.get(rank)
            )
            wrong_names.update(pieces.names[index] for index in np.flatnonzero(wrong))
        if wrong_names:
            raise ReshardError(
                f"{len(wrong_names)} tensors did not arrive as they are in the trainer: "
                f"{listed(sorted(wrong_names))}"
            )
        if stale := receiver.engine.stale_derived():
            raise ReshardError(
                f"{len(stale)} tensors are not what the engine derives from the weights that arrived: "
                f"{listed(sorted(stale))}"
            )

    def _block_check(self, shards: Mapping[int, np.ndarray]) -> BlockCheck:
        """Return the check of the blocks that this rank made of the trainer's mapped memory."""
        checked_for = self.made_for, {rank: of_rank.tobytes() for rank, of_rank in shards.items()}
        if self.check is None or checked_for != self.checked_for:
            receiver = self.receiver
            sent = [
                pieces.destinations[self._as_blocks(rank) | receiver.slab.through[rank], 0]
                for rank, pieces in receiver.pieces.items()
            ]
            made = {rank: receiver.pieces[rank].where(self._pulled_blocks(rank)) for rank in shards}
            elsewhere = np.concatenate([*sent, np.zeros(0, np.int64)])
            self.check = receiver.maker.check(receiver.engine, made, shards, elsewhere, receiver.device)
            self.checked_for = checked_for
        return self.check

    def _differing(self, rank: int, payload: bytes, made_here: np.ndarray | None) -> np.ndarray:
        """Return a mask over a trainer's rank's pieces: those whose digests, or whose blocks' digests,
        are others there, in what it sent, and here. `made_here` are the digests of the pieces of which blocks were
        made here."""
        receiver, pieces = self.receiver, self.receiver.pieces[rank]
        as_blocks = self._as_blocks(rank)
        plain_count, blocks = int((~as_blocks).sum()), self.blocks.get(rank)
        of_blocks = blocks.result() if blocks is not None else np.zeros(0, np.int64)
        posted = decode_digests(payload, plain_count + len(of_blocks), receiver.group.names[rank])
        received = np.zeros(len(as_blocks), np.int64)
        received[~self._made_here(rank) & ~as_blocks] = self.plain[rank].result()
        if made_here is not None:
            received[self._pulled_blocks(rank)] = made_here
        for number, (own, digests) in self.of_rounds[rank].items():
            if number in self.arrived:
                received[own] = digests.result()
        wrong = np.zeros(len(as_blocks), bool)
        wrong[~as_blocks] = received[~as_blocks] != posted[:plain_count]
        if blocks is not None:
            tensors = blocks.tensors[of_blocks != posted[plain_count:]]
            wrong |= as_blocks & np.isin(pieces.destinations[:, 0], tensors)
        return wrong

    def _pulled_blocks(self, rank: int) -> np.ndarray:
        """Return a mask over a trainer's rank's pieces: those from which this engine makes blocks where
        they lie."""
        in_blocks = IN_BLOCKS[self.receiver.pieces[rank].requests[:, REQUEST_CODEC]]
        mask: np.ndarray = in_blocks & ~self._as_blocks(rank) & ~self._in_rounds(rank)
        return mask

    def _in_rounds(self, rank: int) -> np.ndarray:
        """Return a mask over a trainer's rank's pieces: those that arrive in a round and become
        something else then."""
        mask: np.ndarray = self.receiver.rounds_of(rank) != UNSTAGED
        return mask

    def _made_here(self, rank: int) -> np.ndarray:
        """Return a mask over a trainer's rank's pieces: those from which this engine makes what it serves."""
        return self._in_rounds(rank) | self._pulled_blocks(rank)

    def _as_blocks(self, rank: int) -> np.ndarray:
        """Return a mask over a trainer's rank's pieces: those that arrive as blocks made by the trainer."""
        is_sent = self.receiver.routes()[rank] in SENT
        in_blocks = IN_BLOCKS[self.receiver.pieces[rank].requests[:, REQUEST_CODEC]]
        mask: np.ndarray = in_blocks & ~self.receiver.slab.through[rank] & is_sent
        return mask


def decode_digests(payload: bytes, count: int, who: str) -> np.ndarray:
    """Return the digests of so many pieces and blocks in a message. Raises ReshardError where it
    has another size."""
    if len(payload) != 8 * count:
        raise ReshardError(
            f"{who} sends {len(payload):,} bytes of digests, and not {8 * count:,}: is it of the same version?"
        )
    return np.frombuffer(payload, np.int64)
