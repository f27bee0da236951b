"""A member as a rank of the trainer: what it tells of its memory, what it is asked for, and the
copies that follow."""

from collections.abc import Mapping
from weakref import WeakKeyDictionary

import numpy as np
import torch

from reshard.comm.group import RefitGroup
from reshard.core.dtypes import dtype_named
from reshard.core.errors import ReshardError
from reshard.core.placement import LocalTensor, local_matrix
from reshard.device.cuda import Allocation, exported, frees_of, generation_of, is_exportable
from reshard.models.model import Model
from reshard.refit.agreement import Agreement
from reshard.refit.codecs.makers import maker_of
from reshard.refit.codecs.places import places_of_requests
from reshard.refit.copying.addresses import (
    DESTINATION,
    REQUEST_CODEC,
    REQUEST_COLUMNS,
    SHARD,
    STAGED_ROUND,
    UNSTAGED,
    allocations_of,
    as_sent,
    region_addresses,
    source_table,
)
from reshard.refit.copying.copies import wait_for_device
from reshard.refit.copying.flows import Outgoing
from reshard.refit.copying.tables import TILE_BYTES
from reshard.refit.cuts import (
    BUCKETS_OF_A_LINE,
    LEAST_BUCKET_BYTES,
    LEAST_PART_BYTES,
    cuts_among,
    elements_of,
    most_lines,
    no_cuts,
    parts_of,
)
from reshard.refit.holder import Holder
from reshard.refit.protocol.alike import alone, post_alike
from reshard.refit.protocol.cuts import post_cuts
from reshard.refit.protocol.encoding import digest
from reshard.refit.protocol.facts import post_facts
from reshard.refit.protocol.held import ShardSizes, pack_held
from reshard.refit.protocol.memory import TrainerMemory
from reshard.refit.protocol.requests import PieceRequest, RequestsRead, check_pieces
from reshard.refit.relays import ALWAYS, NEVER, Alike, Line, alike_in, length_of
from reshard.refit.trainer import Trainer
from reshard.refit.transports import READ, SENT

# What has been published of a model, for who connects the same trainer again.
_published: WeakKeyDictionary[Holder, tuple[tuple[Model, list[torch.dtype]], bytes, bytes, ShardSizes]] = (
    WeakKeyDictionary()
)


class Sender:
    """A trainer's rank in a connection: what inference ranks ask it for, and where its memory is."""

    def __init__(self, source: Holder, group: RefitGroup, agreed: Agreement, device: torch.device) -> None:
        self.source, self.group, self.agreed, self.device = source, group, agreed, device
        self.requests: dict[int, np.ndarray] = {}  # `Pieces.requests` by inference rank, after cuts
        self.first: dict[int, int] = {}  # by inference rank: the first that asks for the same
        self.alike: dict[int, Alike] = {}  # in these
        self.sizes = ShardSizes.of([], [])
        self.held_digest = self.memory_digest = b""  # of what was last posted
        # Addresses and allocations of the parameters when this rank last posted them, and torch's
        # count of frees then.
        self.posted: tuple[list[int], list[Allocation]] = [], []
        self.frees: int | None = None
        self.exported = False
        self.on_host = False  # shards that others read were moved to host memory

    def publish(self, model: Model) -> None:
        """Post what this rank holds of the model."""
        self.source = self.source.as_published(model)
        self.source.check_memory(self.device)
        self.source.check_model(model)
        dtypes = [region.tensor.dtype for region in self.source.memory]
        known, header, parts, self.sizes = _published.get(self.source, (None, b"", b"", self.sizes))
        if known != (model, dtypes):
            names = {dtype: dtype_named(str(dtype)).name for dtype in set(dtypes)}
            held, dtype_names = self._held(model), [names[dtype] for dtype in dtypes]
            header, parts = pack_held(held, dtype_names)
            self.sizes = ShardSizes.of(held, dtype_names)
            _published[self.source] = (model, dtypes), header, parts, self.sizes
        self.held_digest = digest(header, parts)
        self.group.post("held", header)
        self.group.post("parts", parts)
        post_facts(self.group, self.source.facts())

    def _held(self, model: Model) -> list[LocalTensor]:
        """Return what the trainer's rank holds, in rows and columns."""
        try:
            return list(map(local_matrix, self.source.publish(model)))
        except ValueError as error:
            raise ReshardError(f"the trainer's {error}, which a refit does not support") from error

    def sync_params(self) -> None:
        """Let the trainer's ranks finish what training has put off, if there may be anything; not before all have
        come, since torch bounds their wait for each other by a limit of its own."""
        if not isinstance(self.source, Trainer) or not self.source.has_pending_sync:
            return
        self.source.check_memory(self.device)
        self.group.post("sync")
        self.group.wait("sync", self.agreed.trainers)
        with self.group.reporting_alive():
            self.source.sync_params()
            if not wait_for_device(self.device, self.group.timeout):
                raise ReshardError(
                    f"the trainer's parameters were not gathered after its last step within {self.group.timeout:g} s"
                )

    def receive_requests(self) -> None:
        """Read which pieces every inference rank wants, and post where they are, and where they are cut."""
        engines = self.agreed.engines
        messages = self.group.read_all(PieceRequest.key(self.group.rank), engines)
        requests = {
            rank: self._pieces(rank, message) for rank, message in zip(engines, messages, strict=True)
        }
        self.requests = {rank: pieces for rank, pieces in requests.items() if len(pieces)}
        digests = {rank: digest(message) for rank, message in zip(engines, messages, strict=True)}
        firsts: dict[bytes, int] = {}
        self.first = {rank: firsts.setdefault(digests[rank], rank) for rank in self.requests}
        self.posted = self._find_memory()
        self._post_memory()
        cuts = self._find_alike(digests)
        cuts_digest = post_cuts(self.group, cuts)
        answer = RequestsRead(self.memory_digest, cuts_digest, b"".join(digests.values()))
        self.group.post("asked", answer.encode())

    def _find_alike(self, digests: Mapping[int, bytes]) -> np.ndarray:
        """Find out, and post, which pieces inference ranks want alike, after cutting them where that makes more alike.
        Return the cuts."""
        if self.agreed.relays == NEVER:
            self.alike = {rank: alone(rank, len(pieces)) for rank, pieces in self.requests.items()}
            return no_cuts()
        cuts = self._cuts(digests)
        if len(cuts):
            distinct = {digests[rank]: pieces for rank, pieces in self.requests.items()}
            parts = {of: parts_of(pieces, cuts).requests for of, pieces in distinct.items()}
            requests = {rank: parts[digests[rank]] for rank in self.requests}
            alike = alike_in(requests, digests)
            least = TILE_BYTES if self.agreed.relays == ALWAYS else LEAST_BUCKET_BYTES
            lines = most_lines(requests, alike, len(self.agreed.trainers), self.agreed.relays)
            if self.agreed.bucket_bytes // (BUCKETS_OF_A_LINE * lines) >= least:
                self.requests, self.alike = requests, alike
                post_alike(self.group, alike)
                return cuts
        self.alike = alike_in(self.requests, digests)
        post_alike(self.group, self.alike)
        return no_cuts()

    def _cuts(self, digests: Mapping[int, bytes]) -> np.ndarray:
        """Return where pieces would be cut of ranks that may pass on what they get from here."""
        if len({digests[rank] for rank in self.requests}) < 2:
            return no_cuts()
        relays = self.agreed.relays
        relaying = self.agreed.relaying(self.group.rank, self.exported, self.requests)
        distinct = {digests[rank]: self.requests[rank] for rank in relaying}
        elements = max((int(elements_of(pieces).sum()) for pieces in distinct.values()), default=0)
        if length_of(relays, len(relaying), elements) < 2:
            return no_cuts()
        least_bytes = 1 if relays == ALWAYS else LEAST_PART_BYTES
        return cuts_among([*distinct.values()], self.sizes.itemsizes, least_bytes)

    @property
    def bytes_read(self) -> int:
        """The bytes that inference ranks read of this rank's shards in a refit."""
        return sum(
            int((elements_of(pieces) * self.sizes.itemsizes[pieces[:, SHARD]]).sum())
            for pieces in self.requests.values()
        )

    @property
    def times_read(self) -> float:
        """The number of times that inference ranks read an element of this rank, on average."""
        wanted = sum(int(elements_of(pieces).sum()) for pieces in self.requests.values())
        return wanted / max(1, int(self.sizes.shapes.prod(1).sum()))

    def _pieces(self, rank: int, payload: bytes) -> np.ndarray:
        """Return the pieces that an inference rank wants. Raises ReshardError where this rank does
        not have them, or where that one has read something else of what this one holds than was
        sent."""
        who = self.group.names[rank]
        request = PieceRequest.decode(payload, who)
        if request.held_digest != self.held_digest:
            own_name = self.group.names[self.group.rank]
            raise ReshardError(
                f"{who} has heard something else of what {own_name} holds than it has said: connect again"
            )
        check_pieces(request.pieces, self.sizes, who, self.source.name_of)
        return request.pieces

    def post_if_moved(self) -> bool:
        """Look up where the memory is now. Returns True where it has moved, after telling the others.

        Raises ReshardError where parameters are not in the device's memory.
        """
        now = self._find_memory()
        moved = now != self.posted
        if moved:
            self.source.check_memory(self.device)
            self.posted = now
            self._post_memory()
        return moved

    def forget(self) -> None:
        """After a refit that failed: post everything again at the next."""
        self.posted = [], []

    def _find_memory(self) -> tuple[list[int], list[Allocation]]:
        """Return the addresses of the parameters now, and the allocations that other processes map,
        as the driver knows them."""
        addresses = self.source.addresses()
        frees = frees_of(self.device) if self.device.type == "cuda" else None
        known_addresses, allocations = self.posted
        nothing_freed, self.frees = frees is not None and frees == self.frees, frees
        # Asking the driver takes a while for each; what was never freed is what it was.
        if addresses == known_addresses and (
            nothing_freed or all(generation_of(a.base) == a.generation for a in allocations)
        ):
            return addresses, allocations
        shards = self._read_by_others()
        regions = self.source.memory  # once: a trainer may make them anew, and has ten thousands
        # Of the host's memory others map nothing: it goes through a slab.
        self.on_host = any(regions[shard].tensor.device != self.device for shard in shards)
        return addresses, [] if self.on_host else allocations_of(self.source, shards)

    def _read_by_others(self) -> list[int]:
        """Return the shards of this rank that other processes read where they lie, if they can."""
        own_rank = self.group.rank
        shards = [
            requests[:, SHARD]
            for rank, requests in self.requests.items()
            if self.agreed.route(own_rank, rank, exported=True) in READ
        ]
        return np.unique(np.concatenate(shards)).tolist() if shards else []

    def _post_memory(self) -> None:
        """Post where the shards lie, with handles to what another process is going to read; each
        takes the driver a while."""
        allocations = self.posted[1]
        self.exported = not self.on_host and all(is_exportable(a.base) for a in allocations)
        if self.on_host and self.agreed.backend in READ:
            raise ReshardError(
                "the trainer's weights were moved to host memory, which other processes cannot map: use "
                "backend='auto', or bring them back before a refit"
            )
        if not self.exported and self.agreed.backend in READ:
            raise ReshardError(
                "the trainer's weights lie in memory that cannot be shared with other "
                "processes (expandable segments, or a virtual memory pool): use "
                "backend='auto', or unset PYTORCH_CUDA_ALLOC_CONF"
            )
        address, pitch, itemsize = region_addresses(self.source.memory).T
        handles = [(a.base, a.size, exported(a.base)) for a in allocations] if self.exported else []
        memory = TrainerMemory(np.stack([address, pitch * itemsize], 1), handles, self.exported)
        self.memory_digest = memory.post(self.group)

    def routes(self) -> dict[int, str]:
        """Return how inference ranks get their pieces from here."""
        return {rank: self.agreed.route(self.group.rank, rank, self.exported) for rank in self.requests}

    def streams(self, routes: Mapping[int, str]) -> dict[int, dict[Line, np.ndarray]]:
        """Return the lines in which inference ranks get their pieces from here, by these routes."""
        own = self.group.rank
        relaying = self.agreed.relaying(own, self.exported, self.requests)
        return {
            rank: self.agreed.streams(own, rank, relaying, self.requests[rank], self.alike[rank])
            for rank in routes
        }

    def outgoing(self) -> dict[str, dict[int, Outgoing]]:
        """Return what this rank sends, by route and inference rank."""
        outgoing: dict[str, dict[int, Outgoing]] = {route: {} for route in SENT}
        regions = self.source.memory
        memory = region_addresses(regions)
        on_host = np.array([region.tensor.device != self.device for region in regions], bool)
        routes = {rank: route for rank, route in self.routes().items() if route in SENT}
        for rank, of_rank in self.streams(routes).items():
            streams = {line: pieces for line, pieces in of_rank.items() if line.first == rank}
            if streams:  # else others pass on to it all that it gets
                route = routes[rank]
                shards = np.unique(self.requests[rank][:, SHARD])
                storages = {
                    regions[shard].tensor.untyped_storage().data_ptr()
                    for shard in shards[on_host[shards]].tolist()
                }
                host_memory = np.array(sorted(storages), np.int64)
                sent = self.sent(memory, self.requests[rank])
                outgoing[route][rank] = sent._replace(host_memory=host_memory, streams=streams)
        return outgoing

    def sent(self, memory: np.ndarray, requests: np.ndarray) -> Outgoing:
        """Return what an inference rank gets that asks for these pieces; `memory` is
        `region_addresses` of this rank's regions."""
        requests = as_sent(requests)
        table, places = source_table(memory, requests), places_of_requests(requests)
        if requests.shape[1] == REQUEST_COLUMNS:
            count = len(requests)
            return Outgoing(table, np.full(count, UNSTAGED), np.zeros((count, 3), np.int64), places)
        codecs = requests[:, REQUEST_CODEC]
        maker_of(codecs).compile(codecs, True, self.device)
        return Outgoing(table, requests[:, STAGED_ROUND], requests[:, DESTINATION], places)
