"""Verification of a refit: both sides take digests of the same pieces from their own memory, and
the engine's compare them.

Addresses are looked up again for this, so that a wrong table of copies is seen too. Digests travel
in the order of the pieces (`reshard.refit.planning`), followed by those of blocks that travelled as
blocks.
"""

from collections.abc import Mapping

import numpy as np

from reshard.core.errors import ReshardError, listed
from reshard.refit.addresses import (
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
from reshard.refit.codecs import BLOCKWISE
from reshard.refit.digests import Digests
from reshard.refit.fp8_blocks.check import requantized
from reshard.refit.fp8_blocks.items import BlockItems, places_of
from reshard.refit.fp8_blocks.packed import cut_into_blocks, digest_requantized, digest_served
from reshard.refit.receiver import Receiver
from reshard.refit.sender import Sender
from reshard.refit.transports import SENT


class SentDigests:
    """The digests that a trainer's rank takes, by inference rank: of pieces, then of blocks."""

    def __init__(self, sender: Sender) -> None:
        self.sender = sender
        self.pending: dict[int, tuple[Digests, np.ndarray]] = {}

    def begin(self) -> None:
        """Begin the digest of every piece. Blocks that travel as blocks count as what they become."""
        sender = self.sender
        memory = region_addresses(sender.source.regions)
        for rank, route in sender.routes().items():
            request = sender.requests[rank]
            as_blocks = BLOCKWISE[as_sent(request)[:, REQUEST_CODEC]] & (route in SENT)
            pieces = request[~as_blocks]
            of_pieces = Digests(
                source_table(memory, as_fragments(pieces)), pieces[:, COLUMN_COUNT], sender.device
            )
            outgoing = sender.sent(memory, request[as_blocks])
            blocks = cut_into_blocks(outgoing.table, outgoing.destinations, outgoing.places)
            self.pending[rank] = of_pieces, digest_requantized(blocks, outgoing.places, sender.device)

    def post(self) -> None:
        """Publish the digests once they are computed."""
        for rank, (pieces, blocks) in self.pending.items():
            payload = np.concatenate([pieces.result(), blocks]).tobytes()
            self.sender.group.post(f"digests/{rank}", payload)
        self.pending = {}


class ReceivedDigests:
    """The digests that an inference rank takes, by trainer's rank.

    Tensors that the engine makes of several pieces have no digest of their own: they are made once
    more and compared.
    """

    def __init__(self, receiver: Receiver) -> None:
        self.receiver = receiver
        self.pending: dict[int, tuple[Digests, np.ndarray]] = {}
        self.in_rounds: dict[int, np.ndarray] = {}
        self.mismatches: list[int] = []  # indices of local tensors that differ from what arrived in a round

    def begin(self) -> None:
        """Begin the digest of every piece that lies here as the trainer has it, or has encoded it."""
        receiver = self.receiver
        memory = region_addresses(receiver.engine.regions.values())
        # A verification that failed may have left some.
        self.pending, self.in_rounds, self.mismatches = {}, {}, []
        for rank, pieces in receiver.pieces.items():
            plain = ~self._made_here(rank) & ~self._as_blocks(rank)
            table = reading_destination(destination_table(memory, pieces))[plain]
            of_pieces = Digests(table, pieces.requests[plain, COLUMN_COUNT], receiver.device)
            self.pending[rank] = of_pieces, digest_served(self._blocks(rank, memory), receiver.device)

    def add_round(self, number: int) -> None:
        """Take the digests of what arrived in a round, and note the local tensors that differ from
        what it makes."""
        receiver = self.receiver
        memory = region_addresses(receiver.engine.regions.values())
        for rank, pieces in receiver.pieces.items():
            in_round = receiver.rounds_of(rank) == number
            table = reading_destination(receiver.copies(rank, memory)[in_round])
            digests = Digests(table, pieces.requests[in_round, COLUMN_COUNT], receiver.device)
            self.in_rounds.setdefault(rank, np.zeros(len(in_round), np.int64))[in_round] = digests.result()
        if number in receiver.slab.numbers:
            self.mismatches.extend(receiver.slab.mismatches(number))
            return
        index = {identity: index for index, identity in enumerate(receiver.engine.regions)}
        self.mismatches.extend(index[identity] for identity in receiver.engine.mismatches(number))

    def compare(self, shards: Mapping[int, np.ndarray]) -> None:
        """Wait for all digests and compare them. `shards` says, by trainer's rank, where its shards
        are mapped here: blocks that were quantized from them are quantized once more.

        Raises ReshardError, naming the tensors, where one differs.
        """
        receiver = self.receiver
        names = receiver.group.names
        tensors_sent = [
            pieces.destinations[self._as_blocks(rank) | receiver.slab.through[rank], 0]
            for rank, pieces in receiver.pieces.items()
        ]
        pulled = {rank: receiver.pieces[rank].where(~receiver.slab.through[rank]) for rank in shards}
        again = requantized(
            receiver.engine,
            pulled,
            shards,
            np.concatenate([*tensors_sent, np.zeros(0, np.int64)]),
            receiver.device,
        )
        mismatches = [*again.unlike, *self.mismatches]
        wrong_names: set[str] = set()
        for rank, (of_pieces, of_blocks) in self.pending.items():
            pieces, in_rounds, as_blocks = receiver.pieces[rank], self._in_rounds(rank), self._as_blocks(rank)
            payload = receiver.group.read(f"digests/{receiver.group.rank}", rank)
            plain_count = int((~as_blocks).sum())
            sent = decode_digests(payload, plain_count + len(of_blocks), names[rank])
            received = np.zeros(len(as_blocks), np.int64)
            made = self._made_here(rank) & ~in_rounds
            received[~made & ~in_rounds & ~as_blocks] = of_pieces.result()
            if made.any():
                received[made] = again.digests[rank][made[~receiver.slab.through[rank]]]
            if in_rounds.any():
                received[in_rounds] = self.in_rounds[rank][in_rounds]
            wrong = np.isin(pieces.destinations[:, 0], mismatches)
            wrong[~as_blocks] |= received[~as_blocks] != sent[:plain_count]
            blocks = self._blocks(rank, region_addresses(receiver.engine.regions.values()))
            wrong |= as_blocks & np.isin(
                pieces.destinations[:, 0], blocks.tensors[of_blocks != sent[plain_count:]]
            )
            wrong_names.update(pieces.names[index] for index in np.flatnonzero(wrong))
        self.pending = {}
        if wrong_names:
            raise ReshardError(
                f"{len(wrong_names)} tensors did not arrive as they are in the trainer: "
                f"{listed(sorted(wrong_names))}"
            )
        if stale := receiver.engine.stale_derived():
            raise ReshardError(
                f"{len(stale)} tensors are not what the engine derives from the weights that arrived: {listed(sorted(stale))}"
            )

    def _in_rounds(self, rank: int) -> np.ndarray:
        """Return a mask over a trainer's rank's pieces: those that arrive in a round and become
        something else then."""
        mask: np.ndarray = self.receiver.rounds_of(rank) != UNSTAGED
        return mask

    def _made_here(self, rank: int) -> np.ndarray:
        """Return a mask over a trainer's rank's pieces: those from which this engine makes what it serves."""
        blockwise = BLOCKWISE[self.receiver.pieces[rank].requests[:, REQUEST_CODEC]]
        return self._in_rounds(rank) | (blockwise & ~self._as_blocks(rank))

    def _as_blocks(self, rank: int) -> np.ndarray:
        """Return a mask over a trainer's rank's pieces: those that arrive as blocks made by the trainer."""
        is_sent = self.receiver.routes()[rank] in SENT
        blockwise = BLOCKWISE[self.receiver.pieces[rank].requests[:, REQUEST_CODEC]]
        mask: np.ndarray = blockwise & ~self.receiver.slab.through[rank] & is_sent
        return mask

    def _blocks(self, rank: int, memory: np.ndarray) -> BlockItems:
        """Return the blocks that arrive as such from a trainer's rank."""
        pieces = self.receiver.pieces[rank].where(self._as_blocks(rank))
        return cut_into_blocks(
            destination_table(memory, pieces), pieces.destinations, places_of(self.receiver.engine)
        )


def decode_digests(payload: bytes, count: int, who: str) -> np.ndarray:
    """Return the digests of so many pieces and blocks in a message. Raises ReshardError where it
    has another size."""
    if len(payload) != 8 * count:
        raise ReshardError(
            f"{who} sends {len(payload):,} bytes of digests, and not {8 * count:,}: is it of the same version?"
        )
    return np.frombuffer(payload, np.int64)
