"""A member as a rank of the engine: what it asks the trainer's ranks for, what these have said of their memory, and the copies
that follow."""

from collections.abc import Mapping
from hashlib import sha256
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from reshard.comm.group import RefitGroup
from reshard.core.errors import ReshardError
from reshard.engines.base import Engine
from reshard.refit.addresses import (
    ASKED,
    AT_ONCE,
    IN_ROUND,
    Pieces,
    destination_table,
    located,
    rounds_of,
)
from reshard.refit.agreement import Agreement
from reshard.refit.codecs import BLOCKWISE
from reshard.refit.fp8_blocks.items import SHAPE, places_of
from reshard.refit.fp8_blocks.packed import compile_block_kernels
from reshard.refit.fp8_blocks.split import SplitBlocksSlab, split_pieces
from reshard.refit.needs import build_requests, needed
from reshard.refit.protocol.checks import Extents, check_memory, check_regions
from reshard.refit.protocol.encoding import (
    DIGEST_BYTES,
    Held,
    digest,
    names_held,
    pack_array,
    readable,
    unpack_array,
    unpack_digests,
    unpack_held,
    unpack_json,
)
from reshard.refit.routes import CUDA_IPC, LOCAL, NCCL, SENT, STAGED
from reshard.refit.tables import CODEC
from reshard.refit.transports.base import Incoming

# What an engine has planned from what trainers published, for who connects the same two again.
_planned: WeakKeyDictionary[Engine, tuple[str, dict[int, Pieces], dict[int, Extents]]] = WeakKeyDictionary()


class Receiver:
    """An inference rank in a connection: which pieces it needs, and what the trainer's ranks have said of
    their memory."""

    def __init__(self, engine: Engine, members: RefitGroup, agreed: Agreement, device: torch.device) -> None:
        self.engine, self.members, self.agreed, self.device = engine, members, agreed, device
        self.pieces: dict[int, Pieces] = {}
        self.extents: dict[int, Extents] = {}  # of the trainer's ranks' shards
        # What tells what this rank has asked for from anything else, and what trainer's ranks have last said of their memory.
        self.asked_digests: dict[int, bytes] = {}
        self.memory_digests: dict[int, bytes] = {}
        self.slab = SplitBlocksSlab(engine, device)
        self.memory: dict[int, dict[str, Any]] = {}

    def plan(self, where: str) -> None:
        """Which boxes this rank needs, and from which trainer's ranks; `where` names the served model. Each
        is told what is asked of it."""
        said = {
            rank: (self.members.read("held", rank), self.members.read("parts", rank))
            for rank in self.agreed.trainers
        }
        if self.engine.optional:
            names = self.members.names
            held = {name for rank, (header, _) in said.items() for name in names_held(header, names[rank])}
            self.engine.select_optional(self.engine.optional & held)
        position = self.agreed.engines.index(self.members.rank)
        distances = {rank: self.agreed.distance(rank) for rank in self.agreed.trainers}
        roundings = sorted({some.rounding for some in self.engine.scales.values()})
        key = _digest(
            [position, distances, roundings, self._may_be_sent()],
            *(text for both in said.values() for text in both),
        )
        known, self.pieces, self.extents = _planned.get(self.engine, ("", {}, {}))
        if known != key:
            published = {rank: unpack_held(*both, self.members.names[rank]) for rank, both in said.items()}
            self.pieces = self._needed(published, distances, position, where)
            self.extents = {rank: Extents.of(*held) for rank, held in published.items()}
            _planned[self.engine] = key, self.pieces, self.extents
        for rank in self.agreed.trainers:
            asked = (
                build_requests(self.engine, self.pieces[rank])
                if rank in self.pieces
                else np.zeros((0, ASKED), np.int64)
            )
            request = digest(*said[rank]) + pack_array(asked)
            self.asked_digests[rank] = digest(request)
            self.members.post(f"pieces/{rank}", request)

    def _may_be_sent(self) -> bool:
        """Whether a trainer's rank may come to send blocks to this one."""
        others = [rank for rank in self.agreed.trainers if rank != self.members.rank]
        if not self.engine.scales or self.agreed.backend == CUDA_IPC:
            return False
        if self.agreed.backend == STAGED:
            return bool(others)
        both = (
            self.agreed.way(rank, self.members.rank, exported)
            for rank in others
            for exported in (True, False)
        )
        return any(way in SENT for way in both)

    def _needed(
        self, published: Mapping[int, Held], distances: Mapping[int, int], position: int, where: str
    ) -> dict[int, Pieces]:
        """The pieces that this rank needs, by trainer's rank, each from the nearest that holds it."""
        found = needed(self.engine, published, self.members.names, distances, position, where)
        if not self._may_be_sent():
            return found
        first_round = max(self.engine.staged_rounds.values(), default=AT_ONCE) + 1
        return split_pieces(found, places_of(self.engine)[:, SHAPE], first_round)

    def hear_answers(self) -> None:
        """Read what the trainer's ranks say that they were asked for, and where their memory is. Raises ReshardError where one was
        asked for something else than this rank has asked for."""
        answers = self.members.read_all("asked", self.agreed.trainers)
        mine = 1 + self.agreed.engines.index(self.members.rank)
        for rank, answer in zip(self.agreed.trainers, answers, strict=True):
            who = self.members.names[rank]
            heard = unpack_digests(answer, 1 + len(self.agreed.engines), f"the answer of {who}")
            if heard[mine] != self.asked_digests[rank]:
                me = self.members.names[self.members.rank]
                raise ReshardError(
                    f"{who} has heard {me} ask for something else than it has asked for: connect again"
                )
            if rank in self.pieces:
                self.read_memory(rank, heard[0])

    def read_memory(self, rank: int, told: bytes) -> None:
        """Read what a trainer's rank has published of its memory, of which it has `told` the digest."""
        who = self.members.names[rank]
        [regions], [rest] = (self.members.read_all(key, [rank]) for key in ("regions", "memory"))
        if digest(regions, rest) != told:
            raise ReshardError(f"what {who} says of its memory did not arrive as it was sent: connect again")
        what = f"what {who} says of its memory"
        memory = unpack_json(rest, what)
        check_memory(memory, who)
        memory["regions"] = unpack_array(regions, what, [2])
        pieces = self.pieces[rank]
        mapped = self.agreed.way(rank, self.members.rank, memory["exported"]) == CUDA_IPC
        check_regions(memory, pieces.asked, self.extents[rank], mapped, who, pieces.names)
        self.memory[rank], self.memory_digests[rank] = memory, told

    def read_moved(self, notes: Mapping[int, str]) -> list[int]:
        """Read anew what those trainer's ranks say of their memory that have noted another digest; which these are."""
        moved = []
        for rank, note in notes.items():
            with readable(f"the note of {self.members.names[rank]}"):
                told = bytes.fromhex(note)
                if len(told) != DIGEST_BYTES:
                    raise ValueError(f"a digest of {len(told)} bytes")
            if told != self.memory_digests[rank]:
                self.read_memory(rank, told)
                moved.append(rank)
        return moved

    def ways(self) -> dict[int, str]:
        """How this rank gets its pieces, by trainer's rank."""
        return {
            rank: self.agreed.way(rank, self.members.rank, self.memory[rank]["exported"])
            for rank in self.pieces
        }

    def incoming(self) -> dict[str, dict[int, Incoming]]:
        """What this rank gets, by way and trainer's rank, from where everything is now."""
        found: dict[str, dict[int, Incoming]] = {way: {} for way in (LOCAL, CUDA_IPC, STAGED, NCCL)}
        memory, places = located(self.engine.regions.values()), places_of(self.engine)
        ways = self.ways()
        self.slab.arrange(self.pieces, [rank for rank, way in ways.items() if way in SENT])
        for rank, way in ways.items():
            pieces = self.pieces[rank]
            table, rounds = self.copies(rank, memory), self.rounds_of(rank)
            found[way][rank] = Incoming(table, rounds, pieces.asked, pieces.into, self.memory[rank], places)
            if way in SENT:
                compile_block_kernels(table[BLOCKWISE[table[:, CODEC]], CODEC], False, self.device)
        return found

    def copies(self, rank: int, memory: np.ndarray) -> np.ndarray:
        """The table of what comes from a trainer's rank, with the destination's end filled in; `memory` is `located` of
        the engine's regions."""
        pieces = self.pieces[rank]
        return self.slab.placed(rank, destination_table(memory, pieces), pieces)

    def rounds_of(self, rank: int) -> np.ndarray:
        """The round in which each piece of a trainer's rank comes."""
        pieces = self.pieces[rank]
        of_regions = rounds_of(self.engine)[pieces.into[:, 0]]
        found: np.ndarray = np.where(self.slab.through[rank], pieces.parts[:, IN_ROUND], of_regions)
        return found

    @property
    def rounds(self) -> set[int]:
        """The numbers of those in which something is made here of what has come."""
        return {*self.engine.staged_rounds.values(), *self.slab.numbers}

    def process_round(self, number: int) -> None:
        """Make what is served of what has come in a round: blocks, whose parts are together now, or what the engine makes
        itself."""
        if number in self.slab.numbers:
            self.slab.make(number)
        else:
            self.engine.process_round(number)


def _digest(facts: Any, *texts: bytes) -> str:
    found = sha256(repr(facts).encode())
    for text in texts:
        found.update(sha256(text).digest())
    return found.hexdigest()
