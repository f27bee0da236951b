"""What all members agree on before anything is planned: who has which side, and by which way bytes may go."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from reshard.comm.group import RefitGroup
from reshard.comm.hosts import namespaces, this_host
from reshard.core.errors import ReshardError, listed
from reshard.core.version import __version__
from reshard.models.config_fields import ignored, ignored_config_fields
from reshard.refit.protocol.checks import (
    check_greeting,
    check_hello,
    check_ignored_fields,
    check_own,
    gathered,
)
from reshard.refit.protocol.encoding import unpack_json
from reshard.refit.routes import Seat, distance, way_between, why_apart

PROTOCOL = 8


@dataclass(frozen=True)
class Agreement:
    """`peers` are the members' own words (`hello`), `trainers` and `engines` the ranks that have a
    side, `backend` what one has chosen or ``auto``, `bucket_bytes` the least that one gives, `keep_mapped`
    whether engines keep trainers' memory mapped between refits, `unmapped` why an inference rank could not map a trainer's memory when it
    tried to at connect, by the ranks of both."""

    rank: int
    peers: list[dict[str, Any]]
    trainers: list[int]
    engines: list[int]
    backend: str
    bucket_bytes: int
    keep_mapped: bool
    unmapped: dict[tuple[int, int], str] = field(default_factory=dict)

    @property
    def participants(self) -> list[int]:
        """The ranks that have a side."""
        return sorted({*self.trainers, *self.engines})

    def distance(self, rank: int) -> int:
        """How far another member is (`routes.distance`)."""
        mine, other = (
            Seat(r, self.peers[r]["gpu"] or None, self.peers[r]["host"]) for r in (self.rank, rank)
        )
        return distance(mine, other)

    def way(self, trainer: int, engine: int, exported: bool) -> str:
        """How an inference rank gets its pieces from a trainer's rank, whose memory other processes can map
        or not."""
        mappable = (trainer, engine) not in self.unmapped
        return way_between(
            self.peers[trainer], self.peers[engine], trainer == engine, self.backend, exported, mappable
        )

    def why_apart(self, trainer: int, engine: int) -> str:
        """Why an inference rank does not map a trainer's memory on the same host; empty where nothing keeps it from that."""
        if trainer == engine:
            return ""
        said = why_apart(self.peers[trainer], self.peers[engine])
        return said or self.unmapped.get((trainer, engine), "")

    @property
    def may_map(self) -> bool:
        """Whether some member may come to map another's memory, if it can: the same on all."""
        return self.backend == "auto" and any(
            self.peers[rank]["device"] == "cuda" for rank in self.participants
        )


def agree(members: RefitGroup, mine: dict[str, Any]) -> Agreement:
    """Tell all members what this one is, and hear what they are.

    Raises ReshardError where they are not of one kind of device, where a side is missing, or where two ask
    for different backends.
    """
    peers = gathered(members, "sides", mine)
    for rank, peer in enumerate(peers):
        check_greeting(peer, rank)
    members.names = {rank: peer["name"] for rank, peer in enumerate(peers)}
    for peer in peers:
        check_hello(peer)
        if peer["roles"] and mine["roles"]:
            _check_alike("device", peer, mine)
    having = {
        role: [r for r, peer in enumerate(peers) if role in peer["roles"]]
        for role in ("trainer", "inference")
    }
    for role, ranks in having.items():
        if not ranks:
            raise ReshardError(f"none of the {members.size} members brings the {role} side of the refit")
    chosen = {peer["backend"]: peer["name"] for peer in peers if peer["backend"] != "auto"}
    if len(chosen) > 1:
        (one, who), (two, other), *_ = chosen.items()
        raise ReshardError(
            f"{who} asks for backend='{one}', {other} for '{two}': give all the same, or let one choose"
        )
    return Agreement(
        members.rank, peers, having["trainer"], having["inference"], next(iter(chosen), "auto"),
        min(peer["bucket_bytes"] for peer in peers if peer["roles"]), all(peer["keep_mapped"] for peer in peers),
    )  # fmt: skip


@contextmanager
def ignoring_alike(members: RefitGroup, name: str) -> Iterator[None]:
    """Inside, every member ignores the fields of a config that one of them does: a trainer's process is told in its code,
    an engine's cannot be. It is the first that members tell each other, before any makes its side.

    Raises ReshardError where they are not of one version.
    """
    mine = {"name": name, **spoken(), "ignored": sorted(ignored())}
    peers = gathered(members, "hello", mine)
    for rank, peer in enumerate(peers):
        check_greeting(peer, rank)
    for peer in peers:
        _check_alike("protocol", peer, mine)
    for peer in peers:
        check_ignored_fields(peer)
        _check_alike("reshard", peer, mine)
    fields = {field for peer in peers for field in peer["ignored"]}
    with ignored_config_fields(*fields, recorded=True):
        yield


def spoken() -> dict[str, Any]:
    """Return the versions that all members must have."""
    return {"protocol": PROTOCOL, "reshard": __version__}


def _check_alike(key: str, peer: dict[str, Any], mine: dict[str, Any]) -> None:
    if peer[key] != mine[key]:
        raise ReshardError(f"{peer['name']} has {key} {peer[key]}, {mine['name']} has {mine[key]}")


def one_config(members: RefitGroup, engines: list[int], mine: bytes) -> dict[str, Any]:
    """The config that all inference ranks have published as ``model``, this one as `mine`. Raises ReshardError where two serve
    different models."""
    read = []
    for rank in engines:
        payload = members.read("model", rank)
        if rank == members.rank:
            check_own(members, "model", mine, payload)
        read.append((rank, unpack_json(payload, f"the config of {members.names[rank]}")))
        if not isinstance(read[-1][1], dict):
            raise ReshardError(
                f"the config of {members.names[rank]} is a {type(read[-1][1]).__name__}, not an object"
            )
    first, config = read[0]
    for rank, other in read[1:]:
        different = sorted(key for key in config.keys() | other.keys() if config.get(key) != other.get(key))
        if different:
            key, names = different[0], members.names
            raise ReshardError(
                f"{names[first]} serves {key} = {config.get(key)}, {names[rank]} {key} = {other.get(key)}"
            )
    return config


def names_of(members: RefitGroup, ranks: Any) -> str:
    """Members by name, for a sentence."""
    return listed(members.names[rank] for rank in ranks)


def hello(name: str, roles: list[str], device: torch.device) -> dict[str, Any]:
    """What a member says of itself."""
    gpu = ""
    if device.type == "cuda":
        gpu = str(torch.cuda.get_device_properties(device).uuid)
    mine = {"name": name, "roles": roles, "device": device.type, "gpu": gpu}
    process = {"host": this_host(), "namespaces": namespaces(), "user": os.getuid(), "pid": os.getpid()}
    return {**spoken(), **mine, **process}
