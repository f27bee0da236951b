"""What a member does as a rank of the trainer, and as a rank of the engine: what it tells the others, and the
copies that follow."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch

from reshard.core.dtypes import dtype_named
from reshard.core.errors import ReshardError, listed
from reshard.core.placement import LocalTensor, Placement
from reshard.core.planner import PlanError, Transfer, make_plan
from reshard.live.cuda import Allocation, frees_of, generation_of, is_exportable
from reshard.live.engine import Engine
from reshard.live.trainer import Trainer
from reshard.models.model import Model
from reshard.refit.addresses import (
    ASKED,
    AT_ONCE,
    ELEMENTS,
    ENCODED,
    EXTENT,
    IN_ROUND,
    NO_SLOT,
    ROUND,
    SHARD,
    WHERE,
    Pieces,
    allocations_of,
    as_held,
    as_read,
    as_sent,
    destination_table,
    located,
    memory_of,
    rounds_of,
    source_table,
)
from reshard.refit.agreement import Agreement
from reshard.refit.blocks import PLACES, SHAPE, Strips, places_of
from reshard.refit.codecs import BLOCKWISE, codec_between
from reshard.refit.digests import Digests
from reshard.refit.members import Members
from reshard.refit.parcels import (
    compile_parcels,
    digests_as_made,
    digests_as_served,
    parcels_of,
    places_asked,
)
from reshard.refit.parts import PartsSlab, divided
from reshard.refit.remake import remade
from reshard.refit.routes import BUCKETS, HERE, PEER, SENT, STAGED, nearest
from reshard.refit.tables import CODEC
from reshard.refit.transports.base import Incoming, Outgoing
from reshard.refit.wire import Held, pack_array, pack_held, pack_json, unpack_array, unpack_held, unpack_json

# What a trainer has published of a model, and what an engine has planned from what trainers published: for who
# connects the same two again.
_published: WeakKeyDictionary[Trainer, tuple[tuple[Model, list[torch.dtype]], bytes, bytes]] = (
    WeakKeyDictionary()
)
_planned: WeakKeyDictionary[Engine, tuple[str, dict[int, Pieces]]] = WeakKeyDictionary()


class TrainerSide:
    """A trainer's rank in a connection: what inference ranks ask it for, and where its memory is."""

    def __init__(self, source: Trainer, members: Members, agreed: Agreement, device: torch.device) -> None:
        self.source, self.members, self.agreed, self.device = source, members, agreed, device
        self.asked: dict[int, np.ndarray] = {}
        # Where the parameters were, and the allocations that they are in, when this rank last told the
        # others.
        self.told: tuple[list[int], list[Allocation]] = [], []
        self.frees: int | None = None
        self.exported = False
        self.digests: dict[int, tuple[Digests, np.ndarray]] = {}

    def publish(self, model: Model) -> None:
        """Tell what this rank holds of the model."""
        self.source.check_memory(self.device)
        self.source.check_model(model)
        dtypes = [region.tensor.dtype for region in self.source.regions]
        known, header, parts = _published.get(self.source, (None, b"", b""))
        if known != (model, dtypes):
            names = {dtype: dtype_named(str(dtype)).name for dtype in set(dtypes)}
            header, parts = pack_held(self.source.publish(model), [names[dtype] for dtype in dtypes])
            _published[self.source] = (model, dtypes), header, parts
        self.members.post("held", header)
        self.members.post("parts", parts)

    def hear_what_is_asked(self) -> None:
        """Read which pieces every inference rank asks for, and tell where they are."""
        me = self.members.rank
        asked = {rank: unpack_array(self.members.read(f"pieces/{me}", rank)) for rank in self.agreed.engines}
        self.asked = {rank: pieces for rank, pieces in asked.items() if len(pieces)}
        self.told = self._look()
        self._tell()

    def tell_if_moved(self) -> bool:
        """Look where the memory is now; whether it has moved, which the others are then told.

        Raises ReshardError where parameters are not in the device's memory.
        """
        now = self._look()
        moved = now != self.told
        if moved:
            self.source.check_memory(self.device)
            self.told = now
            self._tell()
        return moved

    def forget(self) -> None:
        """After a refit that failed: tell everything again at the next."""
        self.told = [], []

    def _look(self) -> tuple[list[int], list[Allocation]]:
        """Where the parameters are now, and the allocations that other processes map as the driver knows
        them."""
        addresses, frees = (
            self.source.addresses(),
            frees_of(self.device) if self.device.type == "cuda" else None,
        )
        before, allocations = self.told
        unfreed, self.frees = frees is not None and frees == self.frees, frees
        # Asking the driver takes a while for each; what was never freed is what it was.
        if addresses == before and (
            unfreed or all(generation_of(a.base) == a.generation for a in allocations)
        ):
            return addresses, allocations
        return addresses, allocations_of(self.source, self._read_by_others())

    def _read_by_others(self) -> list[int]:
        """The shards of this rank that other processes read where they lie, if they can."""
        me = self.members.rank
        readers = [
            asked[:, SHARD] for rank, asked in self.asked.items() if self.agreed.way(me, rank, True) == PEER
        ]
        return np.unique(np.concatenate(readers)).tolist() if readers else []

    def _tell(self) -> None:
        """Publish where the shards lie, with handles to what another process is going to read: each takes the
        driver a while."""
        allocations = self.told[1]
        hidden = [a for a in allocations if not is_exportable(a.base)]
        if hidden and self.agreed.executor == PEER:
            raise ReshardError(
                "the trainer's weights lie in memory that cannot be shared with other "
                "processes (expandable segments, or a virtual memory pool): use "
                "executor='auto', or unset PYTORCH_CUDA_ALLOC_CONF"
            )
        self.exported = not hidden
        memory = memory_of(self.source, allocations if self.exported else [])
        self.members.post("regions", pack_array(memory.pop("regions")))
        self.members.post("memory", pack_json(memory | {"exported": self.exported}))

    def ways(self) -> dict[int, str]:
        """How inference ranks get their pieces from here."""
        return {rank: self.agreed.way(self.members.rank, rank, self.exported) for rank in self.asked}

    def outgoing(self) -> dict[str, dict[int, Outgoing]]:
        """What this rank sends, by way and inference rank."""
        found: dict[str, dict[int, Outgoing]] = {way: {} for way in SENT}
        memory = located(self.source.regions)
        for rank, way in self.ways().items():
            if way in SENT:
                found[way][rank] = self._outgoing(memory, self.asked[rank])
        return found

    def _outgoing(self, memory: np.ndarray, asked: np.ndarray) -> Outgoing:
        asked = as_sent(asked)
        table, n = source_table(memory, asked), len(asked)
        if asked.shape[1] == ASKED:
            return Outgoing(
                table, np.full(n, AT_ONCE), np.zeros((n, 3), np.int64), np.zeros((0, PLACES), np.int64)
            )
        blocks = asked[BLOCKWISE[asked[:, ENCODED]]]
        compile_parcels(blocks[:, ENCODED], True, self.device)
        places = places_asked(blocks[:, WHERE], blocks[:, EXTENT], blocks[:, ENCODED])
        return Outgoing(table, asked[:, ROUND], asked[:, WHERE], places)

    def digest(self) -> None:
        """Begin the digests of every piece, of this rank's memory by its own addresses, made anew; those of blocks
        that travel as such are of what they become."""
        memory = located(self.source.regions)
        for rank, way in self.ways().items():
            asked = self.asked[rank]
            made = BLOCKWISE[as_sent(asked)[:, ENCODED]] & (way in SENT)
            of_pieces = Digests(
                source_table(memory, as_held(asked[~made])), asked[~made, ELEMENTS], self.device
            )
            some = self._outgoing(memory, asked[made])
            parcels = parcels_of(some.table, some.into, some.places)
            self.digests[rank] = of_pieces, digests_as_made(parcels, some.places, self.device)

    def post_digests(self) -> None:
        """Publish the digests when they are done: of pieces, then of parcels."""
        for rank, (pieces, parcels) in self.digests.items():
            self.members.post(f"digests/{rank}", np.concatenate([pieces.result(), parcels]).tobytes())
        self.digests = {}


class EngineSide:
    """An inference rank in a connection: which pieces it needs, and what the trainer's ranks have said of
    their memory."""

    def __init__(self, engine: Engine, members: Members, agreed: Agreement, device: torch.device) -> None:
        self.engine, self.members, self.agreed, self.device = engine, members, agreed, device
        self.pieces: dict[int, Pieces] = {}
        self.slab = PartsSlab(engine, device)
        self.memory: dict[int, dict[str, Any]] = {}
        self.digests: dict[int, tuple[Digests, np.ndarray]] = {}
        self.passed: dict[int, np.ndarray] = {}
        self.unlike: list[int] = []

    def plan(self, where: str) -> None:
        """Which boxes this rank needs, and from which trainer's ranks; `where` names the served model. Each
        is told what is asked of it."""
        said = {
            rank: (self.members.read("held", rank), self.members.read("parts", rank))
            for rank in self.agreed.trainers
        }
        position = self.agreed.engines.index(self.members.rank)
        distances = {rank: self.agreed.distance(rank) for rank in self.agreed.trainers}
        roundings = sorted({some.rounding for some in self.engine.scales.values()})
        key = _digest(
            [position, distances, roundings, self._may_be_sent()],
            *(text for both in said.values() for text in both),
        )
        known, self.pieces = _planned.get(self.engine, ("", {}))
        if known != key:
            published = {rank: unpack_held(*both) for rank, both in said.items()}
            self.pieces = self._plan(published, distances, position, where)
            _planned[self.engine] = key, self.pieces
        for rank in self.agreed.trainers:
            asked = self._asked(self.pieces[rank]) if rank in self.pieces else np.zeros((0, ASKED), np.int64)
            self.members.post(f"pieces/{rank}", pack_array(asked))

    def _asked(self, pieces: Pieces) -> np.ndarray:
        """What a trainer's rank is told of its pieces."""
        if not self.engine.scales and not self.engine.passing:
            return pieces.asked
        index, in_parts = pieces.into[:, 0], pieces.parts[:, IN_ROUND]
        rounds = np.where(in_parts != NO_SLOT, in_parts, rounds_of(self.engine)[index])
        return np.concatenate(
            [pieces.asked, pieces.into, places_of(self.engine)[index, SHAPE], rounds[:, None]], 1
        )

    def _may_be_sent(self) -> bool:
        """Whether a trainer's rank may come to send blocks to this one."""
        others = [rank for rank in self.agreed.trainers if rank != self.members.rank]
        if not self.engine.scales or self.agreed.executor == PEER:
            return False
        if self.agreed.executor == STAGED:
            return bool(others)
        both = (
            self.agreed.way(rank, self.members.rank, exported)
            for rank in others
            for exported in (True, False)
        )
        return any(way in SENT for way in both)

    def _plan(
        self, published: Mapping[int, Held], distances: Mapping[int, int], position: int, where: str
    ) -> dict[int, Pieces]:
        """The pieces that this rank needs, by trainer's rank, each from the nearest that holds it."""
        wanted = self.engine.placement
        sources = Sources.of(
            published,
            {part.name for tensor in wanted.tensors.values() for part in tensor.parts},
            self.members.names,
        )
        codecs = self._codecs(sources, where)
        try:
            plan = make_plan(Placement.of(wanted.shapes, sources.tensors), wanted)
        except PlanError as error:
            raise ReshardError(f"the trainer's shards do not make up the served model: {error}") from error
        copies: dict[int, list[tuple[int, int, Transfer]]] = defaultdict(list)
        choices: dict[tuple[int, ...], int] = {}  # among holders of the same ranks, of which there are few
        for transfer in plan.transfers:
            holders = sources.holders[transfer.src]
            ranks = tuple([rank for rank, _ in holders])
            if ranks not in choices:
                choices[ranks] = nearest(ranks, distances.__getitem__, position, self.engine.tp)
            rank, shard = holders[choices[ranks]]
            copies[rank].append((shard, codecs[transfer.name, transfer.dst], transfer))
        index = {identity: index for index, identity in enumerate(self.engine.regions)}
        found = {rank: Pieces.of(some, index) for rank, some in copies.items()}
        if not self._may_be_sent():
            return found
        first_round = max(self.engine.passing.values(), default=AT_ONCE) + 1
        return divided(found, places_of(self.engine)[:, SHAPE], first_round)

    def _codecs(self, sources: "Sources", where: str) -> dict[tuple[str, Any], int]:
        """How each part of each local tensor is encoded, by the part's name and the tensor's id. Raises
        ReshardError where the trainer lacks what is wanted, or has it in a dtype that none leads from."""
        lacking, other = [], []
        found: dict[tuple[str, Any], int] = {}
        dtypes = {region.tensor.dtype for region in self.engine.regions.values()}
        names = {dtype: dtype_named(str(dtype)).name for dtype in dtypes}
        for tensor in self.engine.placement.tensors.values():
            mine = names[self.engine.regions[tensor.id].tensor.dtype]
            for part in tensor.parts:
                theirs = sources.dtypes.get(part.name)
                if theirs is None:
                    lacking.append(part.name)
                    continue
                scales = self.engine.scales.get(tensor.id)
                codec = codec_between(theirs, mine, scales.rounding if scales is not None else None)
                if codec is None:
                    other.append(
                        f"{part.name} is {theirs} in the trainer, but {mine} in the engine: use "
                        f"{'one dtype for both' if scales is None else 'a trainer with parameters in bf16 or fp32'}"
                    )
                    continue
                found[part.name, tensor.id] = codec
        if lacking:
            absent = sorted(set(lacking))
            raise ReshardError(
                f"the trainer's model lacks {len(absent)} parameters that {where} calls for: {listed(absent)}"
            )
        if other:
            raise ReshardError(other[0])
        return found

    def read_memory(self, ranks: Iterable[int]) -> None:
        """What these trainers' ranks have published of their memory."""
        for rank in ranks:
            said = unpack_json(self.members.read("memory", rank))
            self.memory[rank] = said | {"regions": unpack_array(self.members.read("regions", rank))}

    def ways(self) -> dict[int, str]:
        """How this rank gets its pieces, by trainer's rank."""
        return {
            rank: self.agreed.way(rank, self.members.rank, self.memory[rank]["exported"])
            for rank in self.pieces
        }

    def incoming(self) -> dict[str, dict[int, Incoming]]:
        """What this rank gets, by way and trainer's rank, from where everything is now."""
        found: dict[str, dict[int, Incoming]] = {way: {} for way in (HERE, PEER, STAGED, BUCKETS)}
        memory, places = located(self.engine.regions.values()), places_of(self.engine)
        ways = self.ways()
        self.slab.arrange(self.pieces, [rank for rank, way in ways.items() if way in SENT])
        for rank, way in ways.items():
            pieces = self.pieces[rank]
            table, rounds = self.copies(rank, memory), self._rounds(rank)
            found[way][rank] = Incoming(table, rounds, pieces.asked, pieces.into, self.memory[rank], places)
            if way in SENT:
                compile_parcels(table[BLOCKWISE[table[:, CODEC]], CODEC], False, self.device)
        return found

    def copies(self, rank: int, memory: np.ndarray) -> np.ndarray:
        """The table of what comes from a trainer's rank, with the destination's end filled in; `memory` is `located` of
        the engine's regions."""
        pieces = self.pieces[rank]
        return self.slab.placed(rank, destination_table(memory, pieces), pieces)

    def _rounds(self, rank: int) -> np.ndarray:
        """The round in which each piece of a trainer's rank comes."""
        pieces = self.pieces[rank]
        of_regions = rounds_of(self.engine)[pieces.into[:, 0]]
        found: np.ndarray = np.where(self.slab.through[rank], pieces.parts[:, IN_ROUND], of_regions)
        return found

    @property
    def rounds(self) -> set[int]:
        """The numbers of those in which something is made here of what has come."""
        return {*self.engine.passing.values(), *self.slab.numbers}

    def take(self, number: int) -> None:
        """Make what is served of what has come in a round: blocks, whose parts are together now, or what the engine makes
        itself."""
        if number in self.slab.numbers:
            self.slab.make(number)
        else:
            self.engine.take(number)

    def _passes(self, rank: int) -> np.ndarray:
        """Of each piece of a trainer's rank, whether it comes in a round, after which something is made of it."""
        found: np.ndarray = self._rounds(rank) != AT_ONCE
        return found

    def _is_made_here(self, rank: int) -> np.ndarray:
        """Of each piece of a trainer's rank, whether what this engine serves is made of it here, with others."""
        blockwise = BLOCKWISE[self.pieces[rank].asked[:, ENCODED]]
        return self._passes(rank) | (blockwise & ~self._travels(rank))

    def _travels(self, rank: int) -> np.ndarray:
        """Of each piece of a trainer's rank, whether it comes in blocks that were made there."""
        sent, blockwise = self.ways()[rank] in SENT, BLOCKWISE[self.pieces[rank].asked[:, ENCODED]]
        found: np.ndarray = blockwise & ~self.slab.through[rank] & sent
        return found

    def _parcels(self, rank: int, memory: np.ndarray) -> Strips:
        """The blocks that come from a trainer's rank."""
        some = self.pieces[rank].where(self._travels(rank))
        return parcels_of(destination_table(memory, some), some.into, places_of(self.engine))

    def digest(self) -> None:
        """Begin the digests of every piece that is here as the trainer has it or has encoded it, of this rank's
        memory by its own addresses, made anew."""
        memory = located(self.engine.regions.values())
        self.digests, self.passed, self.unlike = {}, {}, []  # a check before may have ended in its middle
        for rank, pieces in self.pieces.items():
            whole = ~self._is_made_here(rank) & ~self._travels(rank)
            table = as_read(destination_table(memory, pieces))[whole]
            served = digests_as_served(self._parcels(rank, memory), self.device)
            self.digests[rank] = Digests(table, pieces.asked[whole, ELEMENTS], self.device), served

    def digest_round(self, number: int) -> None:
        """The digests of what has come in a round, and the local tensors of which something else is served."""
        places = {identity: index for index, identity in enumerate(self.engine.regions)}
        memory = located(self.engine.regions.values())
        for rank, pieces in self.pieces.items():
            here = self._rounds(rank) == number
            table = as_read(self.copies(rank, memory)[here])
            digests = Digests(table, pieces.asked[here, ELEMENTS], self.device)
            self.passed.setdefault(rank, np.zeros(len(here), np.int64))[here] = digests.result()
        if number in self.slab.numbers:
            self.unlike.extend(self.slab.unlike(number))
            return
        self.unlike.extend(places[identity] for identity in self.engine.unlike(number))

    def compare_digests(self, shards: Mapping[int, np.ndarray]) -> None:
        """Wait for the digests, and make the blocks that were made here once more from `shards`, by trainer's rank.
        Raises ReshardError where one differs from the trainer's, or another comes of it."""
        bad: set[str] = set()
        sent = [
            some.into[self._travels(rank) | self.slab.through[rank], 0] for rank, some in self.pieces.items()
        ]
        read = {rank: self.pieces[rank].where(~self.slab.through[rank]) for rank in shards}
        again = remade(self.engine, read, shards, np.concatenate([*sent, np.zeros(0, np.int64)]), self.device)
        unlike = [*again.unlike, *self.unlike]
        for rank, (of_pieces, of_parcels) in self.digests.items():
            pieces, passes, travels = self.pieces[rank], self._passes(rank), self._travels(rank)
            there = np.frombuffer(self.members.read(f"digests/{self.members.rank}", rank), np.int64)
            here = np.zeros(len(travels), np.int64)
            made = self._is_made_here(rank) & ~passes
            here[~made & ~passes & ~travels] = of_pieces.result()
            if made.any():
                here[made] = again.digests[rank][made[~self.slab.through[rank]]]
            if passes.any():
                here[passes] = self.passed[rank][passes]
            wrong = np.isin(pieces.into[:, 0], unlike)
            wrong[~travels] |= here[~travels] != there[: (~travels).sum()]
            blocks = self._parcels(rank, located(self.engine.regions.values()))
            wrong |= travels & np.isin(
                pieces.into[:, 0], blocks.tensors[of_parcels != there[(~travels).sum() :]]
            )
            bad.update(pieces.names[i] for i in np.flatnonzero(wrong))
        self.digests = {}
        if bad:
            raise ReshardError(
                f"{len(bad)} tensors did not arrive as they are in the trainer: {listed(sorted(bad))}"
            )


def _digest(facts: Any, *texts: bytes) -> str:
    found = sha256(repr(facts).encode())
    for text in texts:
        found.update(sha256(text).digest())
    return found.hexdigest()


class Replicas(NamedTuple):
    """The id of a local tensor that one or more of a trainer's ranks hold alike."""

    number: int


@dataclass
class Sources:
    """All that a trainer's ranks hold: distinct local tensors, who has each (rank, index there), and the
    dtype of each name."""

    tensors: list[LocalTensor] = field(default_factory=list)
    holders: dict[Replicas, list[tuple[int, int]]] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def of(published: Mapping[int, Held], wanted: set[str], names: Mapping[int, str]) -> "Sources":
        """Put together what the ranks have published, as far as it is wanted. Raises ReshardError where two
        have another dtype."""
        found = Sources()
        known: dict[tuple, Replicas] = {}
        first: dict[str, int] = {}
        for rank, held in published.items():
            for tensor, dtype in zip(held.tensors, held.dtypes, strict=True):
                parts = tuple(part for part in tensor.parts if part.name in wanted)
                if not parts:
                    continue
                for name in {part.name for part in parts}:
                    other = first.setdefault(name, rank)
                    if found.dtypes.setdefault(name, dtype) != dtype:
                        both = f"{found.dtypes[name]} and {dtype}"
                        raise ReshardError(
                            f"{names[other]} and {names[rank]} do not agree on the dtype of {name}: {both}"
                        )
                replicas = known.get((tensor.shape, parts))
                if replicas is None:
                    replicas = known[tensor.shape, parts] = Replicas(len(found.tensors))
                    found.tensors.append(LocalTensor(replicas, tensor.shape, parts))
                    found.holders[replicas] = []
                found.holders[replicas].append((rank, tensor.id))
        return found
