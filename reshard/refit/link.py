"""A refit: connect once, then move the weights after every optimizer step.

At connect the members tell each other what they hold; every inference rank plans which boxes it needs from whom, and the plan is
proven. A refit then only copies: inference ranks pull from memory that they can reach (their own, another process's on the same
host), the rest travels in buckets.
"""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from reshard.collector import collector_paused
from reshard.dtypes import dtype_named
from reshard.errors import ReshardError, first_line, listed
from reshard.live.megatron import MegatronModel, Shard, Source, source_of
from reshard.live.vllm import VllmModel
from reshard.model import Model
from reshard.planner import PlanError, Transfer, make_plan
from reshard.refit.addresses import (
    ELEMENTS,
    SHARD,
    Piece,
    as_read,
    asked_for,
    destination_table,
    fill_table,
    from_source,
    memory_of,
    shards_here,
    source_table,
)
from reshard.refit.buckets import ALIGNMENT, Buckets, group_of
from reshard.refit.copies import TILE_BYTES, CopyTable, bytes_of, interleaved, tiles_of
from reshard.refit.digests import digests
from reshard.refit.members import Members, hello, pack_array, pack_json, unpack_array, unpack_json
from reshard.refit.peers import Mappings
from reshard.refit.routes import Seat, distance, nearest

EXECUTORS = ("auto", "peer", "buckets")
BUCKET_BYTES = 512 << 20


@dataclass(frozen=True)
class Report:
    """One refit as a member saw it: seconds waiting for the others, moving bytes, and in all; bytes pulled within the process and
    from peers' memory, and received in buckets; the version that the engine now has."""

    version: int
    wait_seconds: float
    transfer_seconds: float
    total_seconds: float
    local_bytes: int
    peer_bytes: int
    bucket_bytes: int
    launches: int

    def to_dict(self) -> dict[str, Any]:
        """For logs."""
        return asdict(self)


def connect(members: Members, source: MegatronModel | None = None, destination: VllmModel | None = None, *, executor: str = "auto",
            bucket_bytes: int = BUCKET_BYTES) -> "Link":  # fmt: skip
    """Connect a trainer's ranks (`source`) and an inference engine's (`destination`); a process may be both, or neither.

    Every member calls this. `executor` is ``auto`` (peers' memory within a host, buckets between hosts), ``peer`` or ``buckets``;
    `bucket_bytes` bounds the memory of all buckets of a rank together.

    Raises ReshardError on every member, before a byte moves, where the two sides do not hold the same model, where vLLM's loader
    disagrees with our rules, or where a member does not come.
    """
    if executor not in EXECUTORS:
        raise ReshardError(f"executor {executor!r} is not one of {listed(EXECUTORS)}")
    link = Link(members, source, destination, executor, bucket_bytes)
    with link._told("connect"), collector_paused():
        link._connect()
    return link


class Link:
    """A connection; made by `connect`."""

    def __init__(
        self, members: Members, source: MegatronModel | None, destination: VllmModel | None, executor: str, bucket_bytes: int
    ) -> None:
        self.members, self.source, self.destination = members, source, destination
        self.executor, self.bucket_bytes = executor, bucket_bytes
        self.device = _device(source, destination)
        self.epoch = 0
        self.version: int | None = None
        self.mappings = Mappings(self.device)
        # As an inference rank: its pieces by trainer rank, where those lie, and the pulls.
        self.pieces: dict[int, list[Piece]] = {}
        self.memory: dict[int, dict[str, Any]] = {}
        self.pulls: CopyTable | None = None
        self.local_bytes = self.peer_bytes = self.received_bytes = 0
        # As a trainer's rank: what inference ranks ask for, and the addresses that they were told.
        self.asked: dict[int, np.ndarray] = {}
        self.told: list[int] = []
        self.exchange: Exchange | None = None

    # Connecting

    def _connect(self) -> None:
        members = self.members
        roles = [name for name, side in (("trainer", self.source), ("inference", self.destination)) if side is not None]
        mine = hello(f"{' and '.join(roles) or 'idle'} rank {members.rank}", roles, self.device)
        self.peers = [unpack_json(payload) for payload in members.gather("hello", pack_json(mine))]
        members.names = {rank: peer["name"] for rank, peer in enumerate(self.peers)}
        self._check_peers()
        self.trainers = [rank for rank, peer in enumerate(self.peers) if "trainer" in peer["roles"]]
        self.engines = [rank for rank, peer in enumerate(self.peers) if "inference" in peer["roles"]]
        if self.source is not None:
            self.source.check_memory(self.device)
            members.post("shards", pack_json({"shards": self.source.shards, "objects": sorted(self.source.objects)}))
        if self.destination is not None:
            members.post("model", pack_json(self.destination.hf_config))
        self._check_model()
        if self.destination is not None:
            self._plan()
            for rank in self.trainers:
                members.post(f"pieces/{rank}", pack_array(asked_for(self.pieces.get(rank, ()))))
        if self.source is not None:
            self.asked = {rank: unpack_array(members.read(f"pieces/{members.rank}", rank)) for rank in self.engines}
            self.asked = {rank: pieces for rank, pieces in self.asked.items() if len(pieces)}
            self._tell_memory("memory")
        self.memory = {rank: unpack_json(members.read("memory", rank)) for rank in self.pieces}
        self._set_up_exchange()
        if self.device.type == "cuda":
            from reshard.refit.kernels import compile_digest

            regions = [*(self.source.regions if self.source else ()), *(self.destination.regions.values() if self.destination else ())]
            for size in {region.tensor.element_size() for region in regions}:
                compile_digest(size, self.device)
        members.meet("connected")

    def _check_peers(self) -> None:
        mine = self.peers[self.members.rank]
        for peer in self.peers:
            for key in ("protocol", "reshard", "device"):
                if peer[key] != mine[key]:
                    raise ReshardError(f"{peer['name']} has {key} {peer[key]}, {mine['name']} has {mine[key]}")
        for role in ("trainer", "inference"):
            if not any(role in peer["roles"] for peer in self.peers):
                raise ReshardError(f"none of the {self.members.size} members brings the {role} side of the refit")

    def _check_model(self) -> None:
        """The served model, on every member; refused where engines, or the trainer's config, say something else."""
        read = [(rank, unpack_json(self.members.read("model", rank))) for rank in self.engines]
        first, config = read[0]
        for rank, other in read[1:]:
            different = sorted(key for key in config.keys() | other.keys() if config.get(key) != other.get(key))
            if different:
                key, names = different[0], self.members.names
                raise ReshardError(f"{names[first]} serves {key} = {config.get(key)}, {names[rank]} {key} = {other.get(key)}")
        self.model = Model.from_hf(config, f"the config of {self.members.names[first]}")
        if self.source is not None:
            self.source.check_config(self.model)

    def _plan(self) -> None:
        """Which boxes this inference rank needs, and from which trainer's ranks."""
        assert self.destination is not None
        described = {rank: unpack_json(self.members.read("shards", rank)) for rank in self.trainers}
        shards = {rank: [_shard(entry) for entry in value["shards"]] for rank, value in described.items()}
        source = source_of(shards, {name for value in described.values() for name in value["objects"]}, self.model)
        wanted = self.destination.placement
        for tensor in wanted.tensors.values():
            live = dtype_named(str(self.destination.regions[tensor.id].tensor.dtype)).name
            for part in tensor.parts:
                theirs = source.dtypes.get(part.name, live)
                if theirs != live:
                    raise ReshardError(f"{part.name} is {theirs} in the trainer, but {live} in vLLM: use one dtype for both")
        try:
            plan = make_plan(source.placement, wanted)
        except PlanError as error:
            raise ReshardError(f"the trainer's shards do not make up the served model: {error}") from error
        self._position = self.engines.index(self.members.rank), self.destination.rank.tp
        pieces: dict[int, list[Piece]] = defaultdict(list)
        for transfer in plan.transfers:
            piece = self._piece(transfer, source)
            pieces[piece.rank].append(piece)
        self.pieces = dict(pieces)

    def _piece(self, transfer: Transfer, source: Source) -> Piece:
        key, offsets, sizes, _ = transfer.src
        holders = source.holders[key, offsets, sizes]
        rank, index = holders[nearest([rank for rank, _ in holders], self._distance, *self._position)]
        return Piece(transfer.name, rank, index, transfer.src_at, transfer.box.lengths, transfer.dst, transfer.dst_at)

    def _distance(self, rank: int) -> int:
        return distance(self._seat(self.members.rank), self._seat(rank))

    def _seat(self, rank: int) -> Seat:
        return Seat(rank, self.peers[rank]["gpu"] or None, self.peers[rank]["host"])

    def _reachable(self, a: int, b: int) -> bool:
        """Whether one member can read the other's memory."""
        if a == b or self.executor == "buckets":
            return a == b
        one, two = self.peers[a], self.peers[b]
        same = all(one[key] == two[key] for key in ("host", "user")) and one["device"] == "cuda"
        if self.executor == "peer" and not same:
            raise ReshardError(f"{one['name']} and {two['name']} cannot read each other's memory: use executor='auto'")
        return same

    def _set_up_exchange(self) -> None:
        """Agree on the buckets, where any pair of members needs them: all take part in every round, or none does."""
        incoming, outgoing = self._tables()
        partners = max(len(incoming), len(outgoing))
        most = max(unpack_json(value) for value in self.members.gather("partners", pack_json(partners)))
        if not most:
            return
        limit = self.bucket_bytes // (4 * most) // ALIGNMENT * ALIGNMENT
        if limit < TILE_BYTES:
            raise ReshardError(f"bucket_bytes {self.bucket_bytes} is too little for {most} partners: {4 * most * TILE_BYTES} is the least")
        group = group_of(self.members, self.device)
        buckets = Buckets(self.members, group, self.device, outgoing, incoming, limit)
        rounds = max(unpack_json(value) for value in self.members.gather("rounds", pack_json(buckets.rounds)))
        self.exchange = Exchange(buckets, rounds)

    # Addresses

    def _tell_memory(self, key: str) -> None:
        """Publish where the shards lie, with handles to what another process is going to read: each takes the driver a while."""
        assert self.source is not None
        me = self.members.rank
        readers = [asked[:, SHARD] for rank, asked in self.asked.items() if rank != me and self._reachable(rank, me)]
        shared = np.unique(np.concatenate(readers)).tolist() if readers else []
        self.told = self.source.addresses()
        self.members.post(key, pack_json(memory_of(self.source, shared)), keep=key == "memory")

    def _tables(self) -> tuple[dict[int, np.ndarray], dict[int, np.ndarray]]:
        """Make the table of pulls; what has to come in buckets, and to go out in them, by partner."""
        me = self.members.rank
        incoming: dict[int, np.ndarray] = {}
        if self.destination is not None:
            pulls, groups = [], []
            self.local_bytes = self.peer_bytes = 0
            for rank, pieces in self.pieces.items():
                table = destination_table(self.destination, pieces)
                if not self._reachable(rank, me):
                    incoming[rank] = table
                    continue
                if rank == me:
                    self.local_bytes += bytes_of(table)
                    shards = np.array(self.memory[rank]["regions"], np.int64).reshape(-1, 2)
                else:
                    self.peer_bytes += bytes_of(table)
                    shards = shards_here(self.memory[rank], self.mappings, self.members.names[rank])
                pulls.append(from_source(table, asked_for(pieces), shards))
                groups.append(np.full(len(table), rank))
            fills, self.zeros = fill_table(self.destination, self.device)
            tiles, origin = tiles_of(np.concatenate([*pulls, fills]))
            order = interleaved(np.concatenate([*groups, np.full(len(fills), -1)])[origin])
            self.pulls = CopyTable(tiles[order], self.device)
            self.received_bytes = sum(bytes_of(table) for table in incoming.values())
        outgoing: dict[int, np.ndarray] = {}
        if self.source is not None:
            outgoing = {rank: source_table(self.source, asked) for rank, asked in self.asked.items() if not self._reachable(me, rank)}
        return incoming, outgoing

    # Refitting

    def refit(self, version: int | None = None, verify: bool = False) -> Report:
        """Move the weights. Every member calls this; it returns when all have what they need.

        `version` (default: one more than the last) is what both sides then carry. `verify` compares digests of every piece, computed
        on both sides from their own memory. Raises ReshardError on every member where one fails or is late; inference ranks then
        refuse to serve until a whole refit succeeded, since weights are written in place and nothing can be rolled back.
        """
        start = time.perf_counter()
        self.epoch += 1
        version = self.epoch if version is None else version
        tag = f"refit {self.epoch}"
        with self._told(tag):
            self._begin(tag)
            waited = time.perf_counter()
            if self.pulls is not None:
                self.pulls.run()
            self._exchange(tag)
            moved = time.perf_counter()
            if verify:
                self._verify(tag)
            self.members.meet(f"{tag}/done")
            if self.destination is not None:
                self.destination.end(version)
        self.version = version
        self.members.forget()
        end, launches = time.perf_counter(), self.pulls.launches if self.pulls is not None else 0
        amounts = self.local_bytes, self.peer_bytes, self.received_bytes
        return Report(version, waited - start, moved - waited, end - start, *amounts, launches)

    def _exchange(self, tag: str) -> None:
        """Run the buckets, and wait for all copies. Raises ReshardError, naming who is silent, where a partner dies or stalls."""
        try:
            if self.exchange is not None:
                self.exchange.buckets.run(self.exchange.rounds)
            done = self._synchronize(self.members.timeout)
            reason = f"nothing arrived within {self.members.timeout:g} s"
        except RuntimeError as error:
            done, reason = False, first_line(error)
        if not done:
            silent = [self.members.names[rank] for rank in self.members.silent(f"{tag}/alive")]
            raise ReshardError(f"the exchange broke off ({reason}); {listed(silent) or 'no member'} is silent")

    def _begin(self, tag: str) -> None:
        """Trainers say that their weights are ready, and where they are if that changed; inference ranks wait for theirs."""
        moved = False
        if self.source is not None:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)  # the optimizer's work, on whatever stream
            moved = self.source.addresses() != self.told
            if moved:
                self.source.check_memory(self.device)
                self._tell_memory(f"{tag}/memory")
            self.members.post(f"{tag}/ready", b"moved" if moved else b"")
        if self.destination is not None:
            changed = [rank for rank in self.pieces if self.members.read(f"{tag}/ready", rank)]
            self.memory |= {rank: unpack_json(self.members.read(f"{tag}/memory", rank)) for rank in changed}
            moved |= bool(changed)
            self.destination.begin()
        if moved:
            incoming, outgoing = self._tables()
            if self.exchange is not None:
                old = self.exchange.buckets
                buckets = Buckets(self.members, old.group, self.device, outgoing, incoming, old.limit)
                self.exchange = Exchange(buckets, self.exchange.rounds)
            self.mappings.close(but={entry[2] for memory in self.memory.values() for entry in memory["allocations"]})

    def _verify(self, tag: str) -> None:
        members = self.members
        if self.source is not None:
            for rank, asked in self.asked.items():
                sums = digests(source_table(self.source, asked), asked[:, ELEMENTS], self.device)
                members.post(f"{tag}/digests/{rank}", pack_array(sums.reshape(-1, 1)))
        if self.destination is not None:
            bad: set[str] = set()
            for rank, pieces in self.pieces.items():
                table = as_read(destination_table(self.destination, pieces))
                here = digests(table, asked_for(pieces)[:, ELEMENTS], self.device)
                there = unpack_array(members.read(f"{tag}/digests/{members.rank}", rank))[:, 0]
                bad.update(pieces[i].name for i in np.flatnonzero(here != there))
            if bad:
                raise ReshardError(f"{len(bad)} tensors did not arrive as they are in the trainer: {listed(sorted(bad))}")

    def _synchronize(self, seconds: float = float("inf")) -> bool:
        """Wait for the GPU; False where it takes longer. A stream that waits for a dead peer would block a plain synchronise."""
        if self.device.type != "cuda":
            return True
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        deadline = time.monotonic() + seconds
        while not event.query():
            if time.monotonic() > deadline:
                return False
            time.sleep(20e-6)
        return True

    @contextmanager
    def _told(self, scope: str) -> Iterator[None]:
        """Tell the others about an error here, whatever it is; an error of an earlier scope is forgotten."""
        self.members.scope = scope
        try:
            yield
        except BaseException as error:
            self.members.fail(error)
            raise

    def close(self) -> None:
        """Unmap the peers' memory."""
        self.mappings.close()


class Exchange(NamedTuple):
    """The buckets of this member, and the rounds that all members make."""

    buckets: Buckets
    rounds: int


def _shard(entry: list) -> Shard:
    key, shape, offsets, sizes, dtype = entry
    return Shard(key, tuple(shape), tuple(offsets), tuple(sizes), dtype)


def _device(source: MegatronModel | None, destination: VllmModel | None) -> torch.device:
    if source is not None and source.regions:
        return source.regions[0].tensor.device
    if destination is not None:
        return next(iter(destination.regions.values())).tensor.device
    return torch.device("cpu")
