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

from reshard.dtypes import dtype_named
from reshard.errors import ReshardError, listed
from reshard.live.megatron import MegatronModel, Shard, Source, source_of
from reshard.live.vllm import VllmModel
from reshard.model import Model
from reshard.planner import Plan, PlanError, Transfer, make_plan
from reshard.refit.buckets import Buckets, new_group
from reshard.refit.copies import CopyTable, bytes_of, interleaved, table_of, tiles_of
from reshard.refit.digests import digests
from reshard.refit.members import Members, hello, pack_array, pack_json, unpack_array, unpack_json

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


class Piece(NamedTuple):
    """One copy of a plan between a source rank's shard and this rank: `at` is the first element in the shard, pitches are in
    elements; `dst` is the local tensor and `dst_at` its first element."""

    name: str
    rank: int
    shard: int
    at: tuple[int, ...]
    lengths: tuple[int, ...]
    dst: Any
    dst_at: tuple[int, ...]


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
    with link._told():
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
        self.table: CopyTable | None = None
        self.buckets: Buckets | None = None
        self.rounds = 0
        self.pieces: list[Piece] = []
        self.asked: dict[int, np.ndarray] = {}
        self.memory: dict[int, Any] = {}

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
            shards = [[*shard] for shard in self.source.shards]
            members.post("shards", pack_json({"shards": shards, "objects": sorted(self.source.objects)}))
            self._post_memory("memory")
        if self.destination is not None:
            members.post("model", pack_json(self.destination.hf_config))
        self._check_model()
        wanted: dict[int, np.ndarray] = {}
        if self.destination is not None:
            self._plan()
            wanted = self._wanted()
            for rank in self.trainers:
                members.post(f"pieces/{rank}", pack_array(wanted.get(rank, np.zeros((0, 5), np.int64))))
        if self.source is not None:
            self.asked = {rank: unpack_array(members.read(f"pieces/{members.rank}", rank)) for rank in self.engines}
            self.asked = {rank: pieces for rank, pieces in self.asked.items() if len(pieces)}
        self._make_tables(wanted)
        members.meet("connected")
        members.forget()

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
                key = different[0]
                raise ReshardError(
                    f"{self.members.names[first]} serves {key} = {config.get(key)}, {self.members.names[rank]} {key} = {other.get(key)}"
                )
        self.model = Model.from_hf(config, f"the config of {self.members.names[first]}")
        if self.source is not None:
            self.source.check_config(self.model)

    def _plan(self) -> None:
        """Which boxes this inference rank needs, and from which trainer ranks."""
        assert self.destination is not None
        described = {rank: unpack_json(self.members.read("shards", rank)) for rank in self.trainers}
        shards = {rank: [_shard(entry) for entry in value["shards"]] for rank, value in described.items()}
        objects = {name for value in described.values() for name in value["objects"]}
        source = source_of(shards, objects, self.model)
        wanted = self.destination.placement
        for tensor in wanted.tensors.values():
            live = dtype_named(str(self.destination.regions[tensor.id].tensor.dtype)).name
            for part in tensor.parts:
                if source.dtypes.get(part.name, live) != live:
                    raise ReshardError(
                        f"{part.name} is {source.dtypes[part.name]} in the trainer, but {live} in vLLM: use one dtype for both"
                    )
        try:
            self.plan: Plan = make_plan(source.placement, wanted)
        except PlanError as error:
            raise ReshardError(f"the trainer's shards do not make up the served model: {error}") from error
        self.pieces = [self._piece(transfer, source) for transfer in self.plan.transfers]

    def _piece(self, transfer: Transfer, source: Source) -> Piece:
        key, offsets, sizes, _ = transfer.src
        holders = source.holders[key, offsets, sizes]
        rank, index = min(holders, key=lambda holder: self._distance(holder[0]))
        return Piece(transfer.name, rank, index, transfer.src_at, transfer.box.lengths, transfer.dst, transfer.dst_at)

    def _distance(self, rank: int) -> tuple[int, int]:
        """How far a trainer's rank is: this process, this GPU, this host, another; equals take turns over the inference ranks."""
        mine, other = self.peers[self.members.rank], self.peers[rank]
        if rank == self.members.rank:
            near = 0
        elif other["host"] == mine["host"]:
            near = 1 if other["gpu"] and other["gpu"] == mine["gpu"] else 2
        else:
            near = 3
        return near, (rank - self.engines.index(self.members.rank)) % self.members.size

    def _reachable(self, a: int, b: int) -> bool:
        """Whether one member can read the other's memory."""
        if self.executor == "buckets":
            return a == b
        one, two = self.peers[a], self.peers[b]
        same = one["host"] == two["host"] and one["user"] == two["user"] and one["device"] == two["device"] == "cuda"
        if self.executor == "peer" and a != b and not same:
            raise ReshardError(f"{one['name']} and {two['name']} cannot read each other's memory: use executor='auto'")
        return a == b or same

    def _wanted(self) -> dict[int, np.ndarray]:
        """By trainer rank: (shard, first row, first column, rows, columns) of each piece, in this rank's order."""
        found: dict[int, list] = defaultdict(list)
        for p in self.pieces:
            found[p.rank].append((p.shard, *_two(p.at, 0), *_two(p.lengths, 1)))
        return {rank: np.array(some, np.int64) for rank, some in found.items()}

    # Memory

    def _post_memory(self, key: str) -> None:
        """Publish where each shard lies: allocation, bytes from its start, pitch. Handles only where another process may read."""
        assert self.source is not None
        regions = [[region.address, region.pitch * region.tensor.element_size()] for region in self.source.regions]
        allocations: dict[int, Any] = {}
        shared = (
            self.device.type == "cuda"
            and self.executor != "buckets"
            and any(rank != self.members.rank and self._reachable(rank, self.members.rank) for rank in self.engines)
        )
        if shared:
            from reshard.refit.peers import allocation_of, exported

            for region in regions:
                if not any(base <= region[0] < base + size for base, (size, _) in allocations.items()):
                    base, size = allocation_of(region[0])
                    allocations[base] = (size, exported(base))
        self.addresses = [region[0] for region in regions]
        self.members.post(
            key, pack_json({"regions": regions, "allocations": [[b, *v] for b, v in allocations.items()]}), keep=key == "memory"
        )

    def _source_addresses(self, rank: int) -> np.ndarray:
        """(address here, pitch in bytes) of each shard of a trainer's rank; 0 where it cannot be reached."""
        table = np.array(self.memory[rank]["regions"], np.int64).reshape(-1, 2)
        if rank == self.members.rank:
            return table
        if not self._reachable(rank, self.members.rank):
            return np.stack([np.zeros(len(table), np.int64), table[:, 1]], 1)
        moved = table.copy()
        for base, size, handle in self.memory[rank]["allocations"]:
            inside = (table[:, 0] >= base) & (table[:, 0] < base + size)
            moved[inside, 0] += self.mappings.address(handle, self.members.names[rank]) - base
        return moved

    def _make_tables(self, wanted: dict[int, np.ndarray]) -> None:
        """The copies of this member: pulls as one table, the rest as buckets."""
        me = self.members.rank
        incoming: dict[int, np.ndarray] = {}
        self.local_bytes = self.peer_bytes = 0
        if self.destination is not None:
            if not self.memory:
                self.memory = {rank: unpack_json(self.members.read("memory", rank)) for rank in wanted}
            self._read_peers(wanted, incoming)
        outgoing = {}
        for rank, asked in self.asked.items():
            if not self._reachable(me, rank):
                outgoing[rank] = self._source_table(asked)
        # Every member takes part in every round of the exchange, and in its first set-up, or none does.
        pairs = max(1, len(incoming), len(outgoing))
        needs = [unpack_json(value) for value in self.members.gather("pairs", pack_json(pairs if incoming or outgoing else 0))]
        if any(needs):
            if not hasattr(self, "group"):
                self.group = new_group(self.members, self.device)
            limit = self.bucket_bytes // (4 * max(needs)) // 16 * 16
            largest = max((int(t[:, 3].max()) for t in (*incoming.values(), *outgoing.values())), default=0)
            if limit < min(largest, 64 << 10):
                raise ReshardError(f"bucket_bytes {self.bucket_bytes} is too little for {max(needs)} partners: 64 KiB each in 4 buffers")
            self.buckets = Buckets(self.members, self.group, self.device, outgoing, incoming, limit)
            self.rounds = max(unpack_json(value) for value in self.members.gather("rounds", pack_json(self.buckets.rounds)))
        self.received_bytes = sum(bytes_of(table) for table in incoming.values())

    def _read_peers(self, wanted: dict[int, np.ndarray], incoming: dict[int, np.ndarray]) -> None:
        if self.device.type == "cuda" and not hasattr(self, "mappings"):
            from reshard.refit.peers import Mappings

            self.mappings = Mappings(self.device)
        mine = self._destination_table()
        pulls, groups = [], []
        ranks = np.array([p.rank for p in self.pieces], np.int64)
        for rank, asked in wanted.items():
            table = mine[ranks == rank]
            memory = self._source_addresses(rank)
            itemsize = table[:, 3] // asked[:, 4]
            table[:, 4] = memory[asked[:, 0], 1]
            table[:, 0] = memory[asked[:, 0], 0] + asked[:, 1] * table[:, 4] + asked[:, 2] * itemsize
            if not self._reachable(rank, self.members.rank):
                incoming[rank] = table
                continue
            pulls.append(table)
            groups.append(np.full(len(table), rank))
            if rank == self.members.rank:
                self.local_bytes += bytes_of(table)
            else:
                self.peer_bytes += bytes_of(table)
        fills = self._fills()
        table = np.concatenate([*pulls, fills]) if pulls else fills
        tiles, origin = tiles_of(table)
        order = interleaved(np.concatenate([*groups, np.full(len(fills), -1)])[origin]) if len(tiles) else np.zeros(0, np.int64)
        self.table = CopyTable(tiles[order], self.device)

    def _destination_table(self) -> np.ndarray:
        """A table of this rank's pieces with the destination's end filled in."""
        assert self.destination is not None
        rows = []
        for p in self.pieces:
            region = self.destination.regions[p.dst]
            size = region.tensor.element_size()
            (row, column), (n, width) = _two(p.dst_at, 0), _two(p.lengths, 1)
            rows.append((0, region.address + (row * region.pitch + column) * size, n, width * size, 0, region.pitch * size))
        return table_of(rows)

    def _fills(self) -> np.ndarray:
        """Rows of padding, copied from a row of zeros."""
        assert self.destination is not None
        rows, longest = [], 0
        for tensor in self.destination.placement.tensors.values():
            region = self.destination.regions[tensor.id]
            size = region.tensor.element_size()
            for fill in tensor.fills:
                (row, column), (n, width) = _two(fill.offsets, 0), _two(fill.lengths, 1)
                rows.append([0, region.address + (row * region.pitch + column) * size, n, width * size, 0, region.pitch * size])
                longest = max(longest, width * size)
        self.zeros = torch.zeros(longest, dtype=torch.uint8, device=self.device)
        table = table_of(rows)
        table[:, 0] = self.zeros.data_ptr()
        return table

    def _source_table(self, asked: np.ndarray) -> np.ndarray:
        """A table of the pieces that another rank asked for, with the source's end filled in."""
        assert self.source is not None
        regions = self.source.regions
        size = np.array([region.tensor.element_size() for region in regions], np.int64)[asked[:, 0]]
        memory = np.array([[region.address, region.pitch] for region in regions], np.int64).reshape(-1, 2)[asked[:, 0]]
        table = np.zeros((len(asked), 6), np.int64)
        table[:, 4] = memory[:, 1] * size
        table[:, 0] = memory[:, 0] + asked[:, 1] * table[:, 4] + asked[:, 2] * size
        table[:, 2], table[:, 3] = asked[:, 3], asked[:, 4] * size
        return table

    # Refitting

    def refit(self, version: int | None = None, verify: bool = False) -> Report:
        """Move the weights. Every member calls this; it returns when all have what they need.

        `version` (default: one more than the last) is what both sides then carry. `verify` compares digests of every piece on both
        sides. Raises ReshardError on every member where one fails or is late; inference ranks then refuse to serve until a whole
        refit succeeded, since weights are written in place and nothing can be rolled back.
        """
        start = time.perf_counter()
        self.epoch += 1
        version = self.epoch if version is None else version
        tag = f"refit {self.epoch}"
        with self._told():
            self._begin(tag)
            waited = time.perf_counter()
            if self.table is not None:
                self.table.run()
            if self.buckets is not None:
                self.buckets.run(self.rounds)
            self._synchronize()
            moved = time.perf_counter()
            if verify:
                self._verify(tag)
            self.members.meet(f"{tag}/done")
            if self.destination is not None:
                self.destination.end(version)
        self.version = version
        self.members.forget(keep=4)
        end = time.perf_counter()
        launches = self.table.launches if self.table is not None else 0
        return Report(
            version, waited - start, moved - waited, end - start, self.local_bytes, self.peer_bytes, self.received_bytes, launches
        )

    def _begin(self, tag: str) -> None:
        """Sources say that their weights are ready, and where they are if that changed; destinations wait for theirs."""
        if self.source is not None:
            self._synchronize()
            moved = [region.address for region in self.source.regions] != self.addresses
            if moved:
                self._post_memory(f"{tag}/memory")
            self.members.post(f"{tag}/ready", b"moved" if moved else b"")
        changed = [rank for rank in self.trainers if self.members.read(f"{tag}/ready", rank)]
        if changed:
            for rank in changed:
                if rank in self.memory:
                    self.memory[rank] = unpack_json(self.members.read(f"{tag}/memory", rank))
            self._make_tables(self._wanted() if self.destination is not None else {})
        if self.destination is not None:
            self.destination.begin()

    def _verify(self, tag: str) -> None:
        """Digests of each piece, computed on both sides from their own memory."""
        members = self.members
        if self.source is not None:
            for rank, asked in self.asked.items():
                sums = digests(self._source_table(asked), asked[:, 4], self.device)
                members.post(f"{tag}/digests/{rank}", pack_array(sums.reshape(-1, 1)))
        if self.destination is not None:
            mine, wanted = self._destination_table(), self._wanted()
            ranks = np.array([p.rank for p in self.pieces], np.int64)
            bad: set[str] = set()
            for rank, asked in wanted.items():
                table = mine[ranks == rank]
                table[:, 0], table[:, 4] = table[:, 1], table[:, 5]
                here = digests(table, asked[:, 4], self.device)
                there = unpack_array(members.read(f"{tag}/digests/{members.rank}", rank))[:, 0]
                chosen = [p.name for p in self.pieces if p.rank == rank]
                bad.update(chosen[i] for i in np.flatnonzero(here != there))
            if bad:
                raise ReshardError(f"{len(bad)} tensors did not arrive as they are in the trainer: {listed(sorted(bad))}")

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Tell the others about an error here, whatever it is."""
        try:
            yield
        except BaseException as error:
            self.members.fail(error)
            raise

    def memory_of(self, rank: int) -> dict[str, Any]:
        """What a trainer's rank said of its memory: regions, and allocations with their handles."""
        if rank not in self.memory:
            self.memory[rank] = unpack_json(self.members.read("memory", rank))
        return self.memory[rank]

    def peer_bytes_by_rank(self) -> dict[int, int]:
        """Bytes that this rank pulls from each other trainer's rank."""
        found: dict[int, int] = defaultdict(int)
        for piece, row in zip(self.pieces, self._destination_table().tolist(), strict=True):
            if piece.rank != self.members.rank:
                found[piece.rank] += row[2] * row[3]
        return dict(found)

    def close(self) -> None:
        """Unmap the peers' memory."""
        if hasattr(self, "mappings"):
            self.mappings.close()


def _two(values: tuple[int, ...], fill: int) -> tuple[int, int]:
    """Rows and columns of offsets or lengths: a vector is one row."""
    if len(values) == 2:
        return values[0], values[1]
    return fill, values[0] if values else 1


def _shard(entry: list) -> Shard:
    key, shape, offsets, sizes, dtype = entry
    return Shard(key, tuple(shape), tuple(offsets), tuple(sizes), dtype)


def _device(source: MegatronModel | None, destination: VllmModel | None) -> torch.device:
    if source is not None and source.regions:
        return source.regions[0].tensor.device
    if destination is not None:
        return next(iter(destination.regions.values())).tensor.device
    return torch.device("cpu")
