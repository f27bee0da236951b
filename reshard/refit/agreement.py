"""The agreement of all members before anything is planned: who has which side, and which routes
bytes may take."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from reshard.comm.group import RefitGroup
from reshard.core.errors import ReshardError, listed
from reshard.refit.copying.addresses import COLUMN_COUNT, ROW_COUNT
from reshard.refit.engine import Engine
from reshard.refit.protocol.greeting import DeviceInfo, Greeting
from reshard.refit.relays import ALWAYS, AUTO, NEVER, Alike, Line, streams_of
from reshard.refit.routes import LOCAL, Pair, Peer, Reach, Seat, distance, why_apart
from reshard.refit.transports import transport_for
from reshard.refit.transports.context import Context


@dataclass(frozen=True)
class Agreement:
    """The members of a connection, the same on all of them but for `rank`.

    `trainers` and `engines` are the ranks that have a side, `backend` the one that a member has
    chosen or ``auto``, `bucket_bytes` the least that one gives. With `keep_mapped` engines keep
    trainers' memory mapped between refits. With `delta` what changed may be sent. `relays` is the choice of a member
    whether engines pass on what several of them want, or ``auto``.
    `unmapped` says, by trainer's rank and inference rank, why the second could not map the first one's memory
    at connect. `shared`: engines' ranks had better pass on what they get (`should_relay`). `ignored` are the fields of
    the engine's config that any member ignores. `origin` is that of the weights (`ConnectOptions`).
    """

    rank: int
    peers: list[Peer]
    trainers: list[int]
    engines: list[int]
    backend: str
    bucket_bytes: int
    keep_mapped: bool
    delta: bool = False
    relays: str = AUTO
    unmapped: dict[tuple[int, int], str] = field(default_factory=dict)
    shared: bool = False
    ignored: tuple[str, ...] = ()
    origin: str = ""

    @property
    def participants(self) -> list[int]:
        """The ranks that have a side."""
        return sorted({*self.trainers, *self.engines})

    @property
    def is_trainer(self) -> bool:
        """True on a trainer's rank."""
        return self.rank in self.trainers

    def distance(self, rank: int) -> int:
        """Return how far another member is (`routes.distance`)."""
        own, other = (Seat(r, self.peers[r].gpu or None, self.peers[r].host) for r in (self.rank, rank))
        return distance(own, other)

    def route(self, trainer: int, engine: int, exported: bool) -> str:
        """Return the route by which an inference rank gets its pieces from a trainer's rank: a
        transport's name, or `LOCAL`.

        `exported` says whether other processes can map that rank's memory. Raises ReshardError
        where the chosen backend does not reach it.
        """
        reach = self._reach(self._pair(trainer, engine, exported))
        return LOCAL if trainer == engine else reach.name

    def _pair(self, trainer: int, engine: int, exported: bool) -> Pair:
        mappable = (trainer, engine) not in self.unmapped
        peers = self.peers[trainer], self.peers[engine]
        return Pair(*peers, trainer == engine, exported, mappable, self.shared)

    def _reach(self, pair: Pair) -> Reach:
        return transport_for(pair, self.backend).reach

    def relay_route(self, trainer: int, engine: int, exported: bool) -> str:
        """Return the route by which an inference rank gets its pieces from a trainer's rank, if it may pass them on
        there; else nothing."""
        pair = self._pair(trainer, engine, exported)
        reach = self._reach(pair)
        may = reach.relays is not None and (self.relays == ALWAYS or reach.relays(pair))
        return reach.name if may and not pair.same_process else ""

    def relaying(self, trainer: int, exported: bool, ranks: Iterable[int]) -> dict[int, str]:
        """Return which of these inference ranks may pass on what they get from a trainer's rank, and by which route."""
        return {rank: route for rank in ranks if (route := self.relay_route(trainer, rank, exported))}

    def streams(
        self, trainer: int, rank: int, relaying: Mapping[int, str], requests: np.ndarray, alike: Alike
    ) -> dict[Line, np.ndarray]:
        """Return the lines in which an inference rank gets what it `requests` of a trainer's rank, and which of it; the
        same for both. All of a line get it by one route."""
        own_route = relaying.get(rank)

        def may_relay(other: int) -> bool:
            return own_route is not None and relaying.get(other) == own_route

        def host_of(other: int) -> str:
            return self.peers[other].host

        elements = requests[:, [ROW_COUNT, COLUMN_COUNT]].prod(1)
        return streams_of(trainer, rank, requests, elements, alike, self.relays, may_relay, host_of)

    def why_apart(self, trainer: int, engine: int) -> str:
        """Return why an inference rank does not map a trainer's memory on the same host; empty
        where nothing keeps it from that."""
        if trainer == engine:
            return ""
        return why_apart(self.peers[trainer], self.peers[engine]) or self.unmapped.get((trainer, engine), "")

    def context(
        self, group: RefitGroup, device: torch.device, engine: Engine | None, keep_on_host: bool
    ) -> Context:
        """Return what transports are made for."""
        return Context(
            group,
            device,
            self.backend,
            self.bucket_bytes,
            self.participants,
            self.peers,
            engine,
            self.delta,
            keep_on_host,
            self.keep_mapped,
        )

    @property
    def may_map(self) -> bool:
        """True where some member may come to map another's memory; the same on all members."""
        return self.backend == "auto" and any(self.peers[rank].device == "cuda" for rank in self.participants)


def agreement_of(rank: int, greetings: Sequence[Greeting], devices: Sequence[DeviceInfo]) -> Agreement:
    """Return what follows from what all members have said of themselves.

    Raises ReshardError where those with a side are not of one kind of device.
    """
    own = greetings[rank]
    for greeting, device in zip(greetings, devices, strict=True):
        if greeting.roles and own.roles and device.device != devices[rank].device:
            raise ReshardError(
                f"{greeting.name} has device {device.device}, {own.name} has {devices[rank].device}: "
                "both sides have to compute on one kind"
            )
    peers = [
        Peer(
            greeting.name,
            greeting.host,
            greeting.namespaces,
            greeting.user,
            greeting.pid,
            device.device,
            device.gpu,
            device.nixl,
            device.rdma,
        )
        for greeting, device in zip(greetings, devices, strict=True)
    ]
    return Agreement(
        rank,
        peers,
        [member for member, greeting in enumerate(greetings) if "trainer" in greeting.roles],
        [member for member, greeting in enumerate(greetings) if "inference" in greeting.roles],
        next((greeting.backend for greeting in greetings if greeting.backend != "auto"), "auto"),
        min(greeting.bucket_bytes for greeting in greetings if greeting.roles),
        all(greeting.keep_mapped for greeting in greetings),
        any(greeting.delta for greeting in greetings),
        next((greeting.relays for greeting in greetings if greeting.relays != AUTO), AUTO),
        shared=should_relay(greetings, devices),
        ignored=tuple(sorted({field for greeting in greetings for field in greeting.ignored})),
        origin=next((greeting.origin for greeting in greetings if "trainer" in greeting.roles), ""),
    )


def should_relay(greetings: Sequence[Greeting], devices: Sequence[DeviceInfo]) -> bool:
    """Return whether weights that engines' ranks pass on, by NCCL, come sooner than those that each of them fetches
    from the trainer: there are twice as many GPUs to fill as to read from, and replicas among them. NCCL connects no
    two members of one GPU. What an adapter has is too little for that."""
    gpus = [device.gpu for greeting, device in zip(greetings, devices, strict=True) if greeting.roles]
    trainers = sum("trainer" in greeting.roles for greeting in greetings)
    sizes = [device.tp for device in devices if device.tp]
    alone = all(gpus) and len({*gpus}) == len(gpus)
    may = all(greeting.relays != NEVER and not greeting.adapter for greeting in greetings)
    return may and alone and len(sizes) >= 2 * trainers and len(sizes) > max(sizes, default=0)


def check_sides(greetings: Sequence[Greeting]) -> None:
    """Raise ReshardError where a side is missing, or two members choose different backends or relays."""
    for role in ("trainer", "inference"):
        if not any(role in greeting.roles for greeting in greetings):
            raise ReshardError(f"none of the {len(greetings)} members brings the {role} side of the refit")
    adapters = {greeting.adapter: greeting.name for greeting in greetings if greeting.roles}
    if len(adapters) > 1:
        (one, name), (other, other_name), *_ = adapters.items()
        raise ReshardError(
            f"{name} connects with adapter={one!r}, {other_name} with {other!r}: give all the same, or none"
        )
    origins = {one.origin: one.name for one in greetings if one.origin or "trainer" in one.roles}
    if len(origins) > 1:
        first, second, *_ = origins.values()
        raise ReshardError(
            f"{first} and {second} mean weights of different senders, whose versions may have the same numbers"
        )
    for option in ("backend", "relays"):
        chosen = {vars(greeting)[option]: greeting.name for greeting in greetings}
        chosen.pop(AUTO, None)
        if len(chosen) > 1:
            (one, name), (other, other_name), *_ = chosen.items()
            raise ReshardError(
                f"{name} asks for {option}='{one}', {other_name} for '{other}': give all the same, or let one choose"
            )


def names_of(group: RefitGroup, ranks: Sequence[int]) -> str:
    """Return members' names, for an error or the log."""
    return listed(group.names[rank] for rank in ranks)
