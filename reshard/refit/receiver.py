"""A member as a rank of the engine: what it asks the trainer's ranks for, where their memory is,
and the copies that follow."""

from collections.abc import Mapping, Set
from hashlib import sha256
from itertools import chain
from math import prod
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from reshard.comm.group import RefitGroup
from reshard.core.errors import ReshardError
from reshard.core.placement import Placement
from reshard.refit.agreement import Agreement
from reshard.refit.codecs.makers import maker_for
from reshard.refit.codecs.places import places_of
from reshard.refit.copying.addresses import (
    PART_ROUND,
    REQUEST_COLUMNS,
    UNSTAGED,
    Pieces,
    destination_table,
    region_addresses,
    staged_rounds_of,
)
from reshard.refit.copying.flows import Incoming
from reshard.refit.copying.tables import CODEC
from reshard.refit.cuts import parts_of
from reshard.refit.engine import Engine
from reshard.refit.planning import build_requests, plan_pieces
from reshard.refit.protocol.alike import alone, read_alike
from reshard.refit.protocol.cuts import read_cuts
from reshard.refit.protocol.encoding import digest
from reshard.refit.protocol.facts import read_facts
from reshard.refit.protocol.held import HeldTensors, ShardSizes, names_held, unpack_held
from reshard.refit.protocol.memory import TrainerMemory, check_regions
from reshard.refit.protocol.notes import Note
from reshard.refit.protocol.requests import PieceRequest, RequestsRead
from reshard.refit.relays import NEVER, Alike, Line, length_of
from reshard.refit.routes import LOCAL
from reshard.refit.transports import READ, SENT, TRANSPORTS
from reshard.refit.twins import taking

# What an engine has planned from what trainers published, for who connects the same two again.
_planned: WeakKeyDictionary[
    Engine, tuple[str, Placement | None, dict[int, Pieces], dict[int, ShardSizes]]
] = WeakKeyDictionary()


class Receiver:
    """An inference rank in a connection: which pieces it needs, and where the trainer's ranks have them."""

    def __init__(self, engine: Engine, group: RefitGroup, agreed: Agreement, device: torch.device) -> None:
        self.group, self.agreed, self.device = group, agreed, device
        self._use(engine)
        # By trainer's rank: the pieces wanted of it, its shards' sizes, and its memory.
        self.pieces: dict[int, Pieces] = {}
        self.sizes: dict[int, ShardSizes] = {}
        self.memory: dict[int, TrainerMemory] = {}
        # Digests of this rank's requests, and of the memory as it was last read.
        self.request_digests: dict[int, bytes] = {}
        self.alike: dict[int, Alike] = {}  # what others want of a trainer's rank as this one does
        self.memory_digests: dict[int, bytes] = {}
        self._addresses: list[int] | None = None  # that were last found
        self._placement: Placement | None = None  # that the pieces are of
        self.offered: frozenset[str] = frozenset()  # of the engine's optional names, what trainers have
        self._is_taken = False  # the engine has taken facts for this connection
        self._taken_placement: object = None  # the engine's placement then

    def _use(self, engine: Engine) -> None:
        """Write into this engine from now on."""
        self.engine, self.maker = engine, maker_for(engine)
        self.slab = self.maker.slab(engine, self.device)

    def plan(self, where: str) -> None:
        """Plan which pieces this rank needs of which trainer's rank, and post the requests; `where`
        names the served model."""
        trainers = self.agreed.trainers
        headers, parts = (self.group.read_all(key, trainers) for key in ("held", "parts"))
        messages = dict(zip(trainers, zip(headers, parts, strict=True), strict=True))
        names = self.group.names
        facts = read_facts(self.group, self.agreed.trainers)
        self._is_taken = bool(facts)
        engine = taking(self.engine, facts)
        if engine is not self.engine:
            self._use(engine)
        if self.engine.optional:
            held_names = {
                name for rank, (header, _) in messages.items() for name in names_held(header, names[rank])
            }
            self.offered = self.engine.optional & held_names
            self.engine.take_optional(self.offered)
        self._taken_placement = self.engine.taken
        distances = {rank: self.agreed.distance(rank) for rank in self.agreed.trainers}
        position = self._position(distances)
        roundings = sorted({scales.rounding for scales in self.engine.scales.values()})
        key = _digest(
            [position, distances, roundings, self._may_be_sent_blocks()],
            *(payload for header_and_parts in messages.values() for payload in header_and_parts),
        )
        placement = self.engine.placement
        known_key, known_placement, self.pieces, self.sizes = _planned.get(self.engine, ("", None, {}, {}))
        if known_key != key or known_placement is not placement:
            held = {
                rank: unpack_held(*header_and_parts, names[rank])
                for rank, header_and_parts in messages.items()
            }
            self.pieces = self._needed(held, distances, position, where)
            self.sizes = {rank: ShardSizes.of(*of_rank) for rank, of_rank in held.items()}
            _planned[self.engine] = key, placement, self.pieces, self.sizes
        self._placement = placement
        asked: dict[str, bytes] = {}
        for rank in trainers:
            if rank in self.pieces:
                requests = build_requests(self.engine, self.pieces[rank])
            else:
                requests = np.zeros((0, REQUEST_COLUMNS), np.int64)
            request = PieceRequest(digest(*messages[rank]), requests).encode()
            self.request_digests[rank] = digest(request)
            asked[PieceRequest.key(rank)] = request
        self.group.post_all(asked)

    def _position(self, distances: Mapping[int, int]) -> int:
        """Return by which place among the engines' ranks this one chooses among trainers' ranks that are equally near.
        Ranks of one place in their tensor parallel group choose alike where they can pass on what they get; else they
        spread."""
        position, own_rank = self.agreed.engines.index(self.group.rank), self.group.rank
        elements = sum(prod(tensor.shape) for tensor in self.engine.placement.tensors.values())
        if length_of(self.agreed.relays, 2, elements) < 2:
            return position
        least = min(distances.values())
        nearest = [rank for rank, distance in distances.items() if distance == least]
        may_pass_on = all(
            self.agreed.relay_route(rank, own_rank, exported)
            for rank in nearest
            for exported in (True, False)
        )
        return position % self.engine.tp if may_pass_on else position

    def _may_be_sent_blocks(self) -> bool:
        """Return True where a trainer's rank may come to send blocks to this one."""
        if not self.engine.scales or self.agreed.backend in READ:
            return False
        own_rank = self.group.rank
        others = [rank for rank in self.agreed.trainers if rank != own_rank]
        if self.agreed.backend != "auto":
            return bool(others)
        routes = (
            self.agreed.route(rank, own_rank, exported) for rank in others for exported in (True, False)
        )
        return any(route in SENT for route in routes)

    def _needed(
        self, held: Mapping[int, HeldTensors], distances: Mapping[int, int], position: int, where: str
    ) -> dict[int, Pieces]:
        """Return the pieces that this rank needs, by trainer's rank, each from the nearest that holds it."""
        pieces = plan_pieces(self.engine, held, self.group.names, distances, position, where)
        if not self._may_be_sent_blocks():
            return pieces
        first_round = max(self.engine.staged_rounds.values(), default=UNSTAGED) + 1
        return self.maker.split(pieces, places_of(self.engine), first_round)

    def find_moved(self) -> bool:
        """Follow tensors that the engine has moved; return True if copies of this connection go elsewhere than
        before. Another connection may have followed them first."""
        before, self._addresses = self._addresses, self._written_addresses()
        return before != self._addresses

    def holds_others(self) -> bool:
        """Return True if the engine holds other boxes than those that are planned, as of experts that it has moved."""
        return self.engine.placement is not self._placement

    def has_moved(self) -> bool:
        """Return True if the engine has moved tensors since `find_moved` was last called."""
        return self._written_addresses() != self._addresses

    def _written_addresses(self) -> list[int]:
        self.engine.refresh_regions()
        return self.engine.written_addresses()

    def check_taken(self) -> None:
        """Raise ReshardError where another connection has had the engine take other weights since."""
        if self.engine.taken is not self._taken_placement:
            raise ReshardError(
                "another connection refits an adapter of other layers, ranks or scales under this name, or other parts "
                "of the model or a drafter: connect again"
            )

    def close(self) -> None:
        """Let the engine give back what it took for this connection."""
        if self._is_taken:
            self._is_taken = False
            self.engine.disconnect()

    def read_answers(self) -> None:
        """Read what the trainer's ranks were asked for as they read it, and where their memory is; cut pieces alike.
        Raises ReshardError where one has read another request than this rank sent."""
        answers = self.group.read_all("asked", self.agreed.trainers)
        own_position = self.agreed.engines.index(self.group.rank)
        memory_digests: dict[int, bytes] = {}
        cuts_digests: dict[int, bytes] = {}
        for rank, payload in zip(self.agreed.trainers, answers, strict=True):
            who = self.group.names[rank]
            answer = RequestsRead.decode(payload, len(self.agreed.engines), who)
            if answer.of(own_position) != self.request_digests[rank]:
                own_name = self.group.names[self.group.rank]
                raise ReshardError(
                    f"{who} has heard {own_name} ask for something else than it has asked for: connect again"
                )
            if rank in self.pieces:
                memory_digests[rank], cuts_digests[rank] = answer.memory_digest, answer.cuts_digest
        self._cut(read_cuts(self.group, cuts_digests))
        self._read_memory(memory_digests)
        counts = {rank: len(self.pieces[rank].requests) for rank in memory_digests}
        if self.agreed.relays == NEVER:
            self.alike = {rank: alone(self.group.rank, count) for rank, count in counts.items()}
        else:
            self.alike = read_alike(self.group, self.agreed.engines, counts)

    def _cut(self, cuts: Mapping[int, np.ndarray]) -> None:
        """Cut the pieces of trainers' ranks as these say."""
        pieces = dict(self.pieces)  # what is planned stays whole
        for rank, of_rank in cuts.items():
            if len(of_rank):
                parts = parts_of(build_requests(self.engine, pieces[rank]), of_rank)
                pieces[rank] = pieces[rank].cut(*parts)
        self.pieces = pieces

    def _read_memory(self, expected_digests: Mapping[int, bytes]) -> None:
        """Read and check what trainers' ranks have posted of their memory."""
        for rank, memory in TrainerMemory.read(self.group, expected_digests).items():
            pieces = self.pieces[rank]
            mapped = self.agreed.route(rank, self.group.rank, memory.exported) in READ
            names = self.group.names
            check_regions(memory, pieces.requests, self.sizes[rank], mapped, names[rank], pieces.names)
            self.memory[rank], self.memory_digests[rank] = memory, expected_digests[rank]

    def read_moved(self, notes: Mapping[int, Note]) -> list[int]:
        """Read anew the memory of the trainer's ranks whose notes have another digest; return these ranks."""
        noted = {rank: notes[rank].memory_digest for rank in self.pieces}
        if silent := [self.group.names[rank] for rank, digest in noted.items() if not digest]:
            raise ReshardError(
                f"{silent[0]} does not say where its memory is: give all members the same reshard"
            )
        moved = {rank: digest for rank, digest in noted.items() if digest != self.memory_digests[rank]}
        self._read_memory(moved)
        return [*moved]

    def memory_of(self, routes: Set[str]) -> dict[int, TrainerMemory]:
        """Return the memory of the trainers' ranks whose bytes come by these routes."""
        return {rank: self.memory[rank] for rank, route in self.routes().items() if route in routes}

    def routes(self) -> dict[int, str]:
        """Return how this rank gets its pieces, by trainer's rank."""
        return {
            rank: self.agreed.route(rank, self.group.rank, self.memory[rank].exported) for rank in self.pieces
        }

    def streams(self, rank: int) -> dict[Line, np.ndarray]:
        """Return the lines in which this rank gets its pieces of a trainer's rank."""
        requests = build_requests(self.engine, self.pieces[rank])
        alike = self.alike[rank]
        relaying = self.agreed.relaying(rank, self.memory[rank].exported, {*chain.from_iterable(alike.ranks)})
        return self.agreed.streams(rank, self.group.rank, relaying, requests, alike)

    def incoming(self) -> dict[str, dict[int, Incoming]]:
        """Return what this rank gets, by route and trainer's rank, from where everything is now."""
        incoming: dict[str, dict[int, Incoming]] = {LOCAL: {}, **{kind.reach.name: {} for kind in TRANSPORTS}}
        memory, places = region_addresses(self.engine.regions.values()), places_of(self.engine)
        routes = self.routes()
        self.slab.arrange(self.pieces, [rank for rank, route in routes.items() if route in SENT])
        for rank, route in routes.items():
            pieces = self.pieces[rank]
            table, rounds = self.copies(rank, memory), self.rounds_of(rank)
            incoming[route][rank] = Incoming(
                table,
                rounds,
                pieces.requests,
                pieces.destinations,
                self.memory[rank],
                places,
                self.streams(rank),
            )
            if route in SENT:
                self.maker.compile(table[:, CODEC], False, self.device)
        return incoming

    def copies(self, rank: int, memory: np.ndarray) -> np.ndarray:
        """Return the table of what comes from a trainer's rank, with the destination's end filled
        in; `memory` is `region_addresses` of the engine's regions."""
        pieces = self.pieces[rank]
        return self.slab.placed(rank, destination_table(memory, pieces), pieces)

    def rounds_of(self, rank: int) -> np.ndarray:
        """Return the round in which each piece of a trainer's rank comes."""
        pieces = self.pieces[rank]
        of_regions = staged_rounds_of(self.engine)[pieces.destinations[:, 0]]
        rounds: np.ndarray = np.where(self.slab.through[rank], pieces.parts[:, PART_ROUND], of_regions)
        return rounds

    @property
    def rounds(self) -> set[int]:
        """The rounds after which this rank makes something of what has come."""
        return {*self.engine.staged_rounds.values(), *self.slab.numbers}

    def process_round(self, number: int) -> None:
        """Make what is served of what has come in a round: blocks, whose parts are together now, or
        what the engine makes itself."""
        if number in self.slab.numbers:
            self.slab.make(number)
        else:
            self.engine.process_round(number)


def _digest(facts: Any, *payloads: bytes) -> str:
    total = sha256(repr(facts).encode())
    for payload in payloads:
        total.update(sha256(payload).digest())
    return total.hexdigest()
