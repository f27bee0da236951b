"""What all members agree on before anything is planned: who has which side, and by which way bytes may go."""

import os
from dataclasses import dataclass
from typing import Any

import torch

from reshard.comm.hosts import this_host
from reshard.core.errors import ReshardError, listed
from reshard.refit.members import Members
from reshard.refit.routes import Seat, distance, way_between
from reshard.refit.wire import pack_json, unpack_json

PROTOCOL = 7


@dataclass(frozen=True)
class Agreement:
    """`peers` are the members' own words (`hello`), `trainers` and `engines` the ranks that have a
    side, `executor` what one has chosen or ``auto``, `bucket_bytes` the least that one gives, `releases`
    whether a trainer wants its memory for itself."""

    rank: int
    peers: list[dict[str, Any]]
    trainers: list[int]
    engines: list[int]
    executor: str
    bucket_bytes: int
    releases: bool

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
        return way_between(
            self.peers[trainer], self.peers[engine], trainer == engine, self.executor, exported
        )


def agree(members: Members, mine: dict[str, Any]) -> Agreement:
    """Tell all members what this one is, and hear what they are.

    Raises ReshardError where they are not of one version and kind of device, where a side is missing, or
    where two ask for different executors.
    """
    peers = [unpack_json(payload) for payload in members.gather("hello", pack_json(mine))]
    members.names = {rank: peer["name"] for rank, peer in enumerate(peers)}
    for peer in peers:
        for key in ("protocol", "reshard", "device"):
            both_have_a_side = peer["roles"] and mine["roles"]
            if peer[key] != mine[key] and (key != "device" or both_have_a_side):
                raise ReshardError(f"{peer['name']} has {key} {peer[key]}, {mine['name']} has {mine[key]}")
    having = {
        role: [r for r, peer in enumerate(peers) if role in peer["roles"]]
        for role in ("trainer", "inference")
    }
    for role, ranks in having.items():
        if not ranks:
            raise ReshardError(f"none of the {members.size} members brings the {role} side of the refit")
    chosen = {peer["executor"]: peer["name"] for peer in peers if peer["executor"] != "auto"}
    if len(chosen) > 1:
        (one, who), (two, other), *_ = chosen.items()
        raise ReshardError(
            f"{who} asks for executor='{one}', {other} for '{two}': give all the same, or let one choose"
        )
    return Agreement(
        members.rank, peers, having["trainer"], having["inference"], next(iter(chosen), "auto"),
        min(peer["bucket_bytes"] for peer in peers if peer["roles"]), any(peer["release"] for peer in peers),
    )  # fmt: skip


def one_config(members: Members, engines: list[int]) -> dict[str, Any]:
    """The config that all inference ranks have published as ``model``. Raises ReshardError where two serve
    different models."""
    read = [(rank, unpack_json(members.read("model", rank))) for rank in engines]
    first, config = read[0]
    for rank, other in read[1:]:
        different = sorted(key for key in config.keys() | other.keys() if config.get(key) != other.get(key))
        if different:
            key, names = different[0], members.names
            raise ReshardError(
                f"{names[first]} serves {key} = {config.get(key)}, {names[rank]} {key} = {other.get(key)}"
            )
    return config


def names_of(members: Members, ranks: Any) -> str:
    """Members by name, for a sentence."""
    return listed(members.names[rank] for rank in ranks)


def hello(name: str, roles: list[str], device: torch.device) -> dict[str, Any]:
    """What a member says of itself."""
    from importlib.metadata import version

    gpu = ""
    if device.type == "cuda":
        gpu = str(torch.cuda.get_device_properties(device).uuid)
    mine = {"name": name, "roles": roles, "device": device.type, "gpu": gpu}
    process = {"host": this_host(), "user": os.getuid(), "pid": os.getpid()}
    return {"protocol": PROTOCOL, "reshard": version("reshard"), **mine, **process}
