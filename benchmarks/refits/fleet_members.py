"""The members of a simulated fleet, as threads: each makes the real calls of a connect and of refits, but for the bytes
of weights, over a connection of its own to the real hub.

Replicas, and members of one process, would decode and plan the same again and again; they share it. Two members, one
of each side, do all by themselves, and their CPU time is measured.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from benchmarks.refits.fleet_sides import Fleet, Sides
from reshard.comm.group import RefitGroup
from reshard.refit import receiver as receiving
from reshard.refit import sender as sending
from reshard.refit.agreement import Agreement, agreement_of, check_sides
from reshard.refit.copying.addresses import UNSTAGED
from reshard.refit.copying.flows import Incoming, Outgoing
from reshard.refit.link import Link
from reshard.refit.protocol import encoding, greeting, held, memory, requests
from reshard.refit.protocol.buckets import exchange_bucket_counts, exchange_partner_counts, exchange_relays
from reshard.refit.protocol.greeting import exchange_devices, exchange_greetings, one_config, post_config
from reshard.refit.receiver import Receiver
from reshard.refit.sender import Sender
from reshard.refit.transports import together
from reshard.refit.transports.base import Transport
from reshard.refit.transports.nccl import Nccl

MEASURED = "measured"  # threads of members that share nothing
SECONDS = 3600.0  # all members have two cores or so, so that nothing is said of limits
SECRET = "of the simulated fleet"
DEVICE = torch.device("cpu")
PARTNERS, BUCKETS = 16, 480  # that members agree on: a number like any other here


def is_measured() -> bool:
    """Return True in the thread of a member that does all by itself."""
    return threading.current_thread().name == MEASURED


def shared(function: Callable[..., Any], key_of: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that remembers what it has returned, but for members that are measured."""
    known: dict[Any, Any] = {}

    def call(*arguments: Any) -> Any:
        if is_measured():
            return function(*arguments)
        key = key_of(*arguments)
        if key not in known:
            known[key] = function(*arguments)
        return known[key]

    return call


def share_work() -> None:
    """Let members of a process, and of those that are forked from it, share what they would all find alike."""
    unpack_json = shared(encoding.unpack_json, lambda payload, *_: payload)
    for module in (encoding, greeting, held, memory):
        module.unpack_json = unpack_json  # type: ignore[attr-defined]
    greeting._checked_greeting = shared(greeting._checked_greeting, id)  # of what `unpack_json` keeps
    requests.unpack_array = shared(requests.unpack_array, lambda payload, *_: payload)
    sending.check_pieces = shared(sending.check_pieces, lambda pieces, sizes, *_: (id(pieces), id(sizes)))
    receiving.unpack_held = shared(receiving.unpack_held, lambda header, parts, _: (header, parts))
    receiving.plan_pieces = shared(
        receiving.plan_pieces, lambda engine, held, names, distances, position, where: (id(engine), position)
    )
    together.TRANSPORTS = (Agreeing,)


class Agreeing(Transport):
    """Agrees with all members as NCCL does, and moves nothing."""

    reach = Nccl.reach

    def prepare(
        self,
        outgoing: Mapping[int, Outgoing],
        incoming: Mapping[int, Incoming],
        elsewhere: Collection[Incoming] = (),
    ) -> None:
        return

    def negotiate(self, anew: bool = False) -> None:
        exchange_partner_counts(self.group, PARTNERS, self.reach.name)
        exchange_relays(self.group, 1 << 20, 1)
        self.store = self.group.torch_store()
        if self.group.rank == 0:  # NCCL's id
            self.store.set("id", bytes(128))
        self.store.get("id")
        exchange_bucket_counts(self.group, {UNSTAGED: BUCKETS})

    def run(self, number: int) -> None:
        return


class Member:
    """One member: its side, its connection, and the CPU seconds that it took for each part."""

    def __init__(self, fleet: Fleet, sides: Sides, rank: int, address: str) -> None:
        self.fleet, self.sides, self.rank, self.address = fleet, sides, rank, address
        self.group: RefitGroup | None = None
        self.link: Link | None = None
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the CPU time of what is done inside as that of a part."""
        began = time.thread_time()
        yield
        self.seconds[name] += time.thread_time() - began

    def meet(self) -> None:
        """Join the hub, and wait until all have."""
        self.group = RefitGroup.join(self.address, self.rank, self.fleet.members, SECONDS, SECRET)
        with self.group.transaction("meet"):
            self.group.prepare()
            self.group.commit()

    def connect(self) -> None:
        """Connect, as `reshard.refit.connect` does."""
        assert self.group is not None
        group, fleet = self.group, self.fleet
        with group.transaction("connect"):
            agreed = self._agree(group)
            sender = receiver = None
            if fleet.is_trainer(self.rank):
                sender = Sender(self.sides.trainers[self.rank], group, agreed, DEVICE)
            else:
                receiver = Receiver(self.sides.engines[fleet.place(self.rank)], group, agreed, DEVICE)
            self._exchange_requests(group, agreed, sender, receiver)
            self.link = SimulatedLink(self, agreed, sender, receiver)
            with self.part("answers, and agreement of transports"):
                self.link.set_up()
            group.commit()

    def _agree(self, group: RefitGroup) -> Agreement:
        with self.part("greetings"):
            greetings = exchange_greetings(group, self.fleet.greeting(self.rank))
            devices = exchange_devices(group, self.fleet.device(self.rank))
            check_sides(greetings)
            agreed = agreement_of(self.rank, greetings, devices)
        return replace(agreed, peers=_peers_of_all(*agreed.peers))

    def _exchange_requests(
        self, group: RefitGroup, agreed: Agreement, sender: Sender | None, receiver: Receiver | None
    ) -> None:
        config = b""
        if receiver is not None:
            receiver.find_moved()
            config = post_config(group, receiver.engine.hf_config)
        with self.part("config"):
            one_config(group, agreed.engines, config)
        if sender is not None:
            with self.part("publish"):
                sender.publish(self.fleet.model)
            with self.part("requests, and who wants alike"):
                sender.receive_requests()
        if receiver is not None:
            with self.part("sort, plan and ask"):
                receiver.plan(self.fleet.name)

    def refit(self) -> None:
        """Refit without a byte."""
        assert self.link is not None
        with self.part("refits"):
            self.link.refit()

    def leave(self) -> None:
        """Close the connection."""
        assert self.link is not None and self.group is not None
        self.link.close()
        self.group.close()


class SimulatedLink(Link):
    """A link that makes no tables of copies."""

    def __init__(
        self, member: Member, agreed: Agreement, sender: Sender | None, receiver: Receiver | None
    ) -> None:
        assert member.group is not None
        self.member = member
        super().__init__(member.group, agreed, sender, receiver, DEVICE)

    def _prepare(self) -> None:
        if not is_measured():
            return
        with self.member.part("of these, lines"):
            if self.sender is not None:
                self.sender.streams(self.sender.routes())
            if self.receiver is not None:
                for rank in self.receiver.pieces:
                    self.receiver.streams(rank)


@lru_cache(1)
def _peers_of_all(*peers: Any) -> list[Any]:
    """Return one list for all members of a process, which would keep millions of these."""
    return [*peers]
