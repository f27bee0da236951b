"""Greetings of members (``hello``, ``device``), and the model that the engines serve (``model``)."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from reshard.comm.group import MOST_MEMBERS, RefitGroup
from reshard.comm.hosts import namespaces, this_host
from reshard.core.errors import ReshardError
from reshard.core.limits import MOST_BUCKET_BYTES
from reshard.core.version import __version__
from reshard.models.towers import TAKES_TOWER
from reshard.refit.protocol.encoding import (
    MOST_ADDRESS,
    check_own,
    exchange_json,
    is_number,
    is_word,
    pack_json,
    unpack_json,
)
from reshard.refit.relays import AUTO, RELAYS
from reshard.refit.routes import BACKENDS

PROTOCOL = 23  # of members that understand each other
ROLES = ("trainer", "inference")
MOST_FIELDS = 1000  # of a config that are ignored


@dataclass(frozen=True)
class Greeting:
    """The first message of a member: its name and version, its roles and options, and the process that it is.

    `ignored` are the fields of the engine's config that it ignores, `adapter` the name of the adapter
    that is refitted, empty for weights alone, `delta` whether it wants deltas, `relays` its choice of these,
    `origin` that of the weights which it has, or, without a side, of those that it means; empty if it knows none.
    `protocol` and `name` are what all versions send.
    """

    name: str
    roles: list[str]
    backend: str
    bucket_bytes: int
    keep_mapped: bool
    ignored: list[str]
    adapter: str = ""
    delta: bool = False
    relays: str = AUTO
    origin: str = ""
    protocol: int = field(default_factory=lambda: PROTOCOL)
    reshard: str = field(default=__version__)
    host: str = field(default_factory=this_host)
    namespaces: str = field(default_factory=namespaces)
    user: int = field(default_factory=os.getuid)
    pid: int = field(default_factory=os.getpid)


@dataclass(frozen=True)
class DeviceInfo:
    """The device on which a member's sides compute: ``cuda`` or ``cpu``, and the GPU's UUID, empty on a
    CPU; the version of NIXL, empty where there is none, and whether its host has RDMA; an inference rank's tensor
    parallel size, else 0."""

    device: str
    gpu: str
    nixl: str
    rdma: bool
    tp: int = 0

    @staticmethod
    def of(device: torch.device, nixl: str = "", rdma: bool = False, tp: int = 0) -> "DeviceInfo":
        """Return that of a torch device."""
        is_gpu = device.type == "cuda"
        gpu = str(torch.cuda.get_device_properties(device).uuid) if is_gpu else ""
        return DeviceInfo(device.type, gpu, nixl, rdma, tp)


def exchange_greetings(group: RefitGroup, own: Greeting) -> list[Greeting]:
    """Greet all members, and return their greetings by rank; from here on errors name members as these do.

    Raises ReshardError where one speaks another protocol, is of another version, or says what makes no sense.
    """
    messages = exchange_json(group, "hello", vars(own))
    for rank, fields in enumerate(messages):
        if (
            not isinstance(fields, dict)
            or type(fields.get("protocol")) is not int
            or not is_word(fields.get("name"))
        ):
            raise ReshardError(
                f"rank {rank} does not say who it is, and of which version: give all members the same reshard"
            )
    group.names = {rank: fields["name"] for rank, fields in enumerate(messages)}
    for fields in messages:
        _check_equal("protocol", fields, vars(own))
    greetings = [_checked_greeting(fields) for fields in messages]
    for greeting in greetings:
        _check_equal("reshard", vars(greeting), vars(own))
    return greetings


def exchange_devices(group: RefitGroup, own: DeviceInfo) -> list[DeviceInfo]:
    """Tell all members where this one's sides compute, and return what each says."""
    devices = []
    for rank, fields in enumerate(exchange_json(group, "device", vars(own))):
        name = group.names[rank]
        if not isinstance(fields, dict):
            raise ReshardError(f"{name} does not say where it computes")
        for key in ("device", "gpu", "nixl"):
            _check_field(name, key, fields, is_word(fields.get(key)))
        _check_field(name, "rdma", fields, isinstance(fields.get("rdma"), bool))
        _check_field(name, "tp", fields, is_number(fields.get("tp"), 0, MOST_MEMBERS))
        devices.append(DeviceInfo(**{key: fields[key] for key in DeviceInfo.__dataclass_fields__}))
    return devices


def _checked_greeting(fields: dict[str, Any]) -> Greeting:
    """Return the greeting in a message. Raises ReshardError for the first field that makes no sense."""
    name, roles, ignored = fields["name"], fields.get("roles"), fields.get("ignored")
    if (
        not isinstance(ignored, list)
        or len(ignored) > MOST_FIELDS
        or not all(map(is_word, ignored))
        or not is_word(fields.get("reshard"))
    ):
        raise ReshardError(f"{name} does not name its version, or the fields of a config that it ignores")
    valid = {
        "roles": isinstance(roles, list)
        and all(role in ROLES for role in roles)
        and len({*map(str, roles)}) == len(roles),
        "backend": fields.get("backend") in (*BACKENDS,),
        "relays": fields.get("relays") in RELAYS,
        "bucket_bytes": is_number(fields.get("bucket_bytes"), 1, MOST_BUCKET_BYTES),
        "keep_mapped": isinstance(fields.get("keep_mapped"), bool),
        "delta": isinstance(fields.get("delta"), bool),
        **{key: is_number(fields.get(key), 0, MOST_ADDRESS) for key in ("user", "pid")},
        **{key: is_word(fields.get(key)) for key in ("host", "namespaces", "adapter", "origin")},
    }  # fmt: skip
    for key, holds in valid.items():
        _check_field(name, key, fields, holds)
    return Greeting(**{key: fields[key] for key in Greeting.__dataclass_fields__})


def _check_field(name: str, key: str, fields: dict[str, Any], holds: bool) -> None:
    if not holds:
        raise ReshardError(f"{name} says {key} {fields.get(key)!r:.80} of itself, which makes no sense")


def _check_equal(key: str, fields: dict[str, Any], own: dict[str, Any]) -> None:
    if fields[key] != own[key]:
        raise ReshardError(f"{fields['name']} has {key} {fields[key]}, {own['name']} has {own[key]}")


def post_config(group: RefitGroup, config: dict[str, Any]) -> bytes:
    """Post the published config of the model that this inference rank serves; return the message."""
    payload = pack_json(config)
    group.post("model", payload)
    return payload


def one_config(group: RefitGroup, engines: Sequence[int], own: bytes) -> dict[str, Any]:
    """Return the config that all inference ranks have posted, this one as `own`: with the tower around the language
    model where all take it, of pipeline stages those that have some of it.

    Raises ReshardError where two serve different models.
    """
    configs: dict[int, dict[str, Any]] = {}
    names = group.names
    seen: set[bytes] = set()  # nearly always one, of all ranks
    for rank, payload in zip(engines, group.read_all("model", engines), strict=True):
        if rank == group.rank:
            check_own(group, "model", own, payload)
        if payload in seen:
            continue
        seen.add(payload)
        config = unpack_json(payload, f"the config of {names[rank]}")
        if not isinstance(config, dict):
            raise ReshardError(f"the config of {names[rank]} is a {type(config).__name__}, not an object")
        configs[rank] = config
    _agree_on_tower([*configs.values()])
    (first, config), *others = configs.items()
    for rank, other in others:
        different = sorted(key for key in config.keys() | other.keys() if config.get(key) != other.get(key))
        if different:
            key = different[0]
            raise ReshardError(
                f"{names[first]} serves {key} = {config.get(key)!s:.200}, {names[rank]} {key} = {other.get(key)!s:.200}"
            )
    return config


def _agree_on_tower(configs: Sequence[dict[str, Any]]) -> None:
    """Have pipeline stages that take nothing of a tower say of it what the others do; all leave it alone where nobody
    takes it, or a stage has parts of it that cannot be refitted."""
    said = [config.get(TAKES_TOWER, {}) for config in configs]
    taken = next((larger for larger in said if larger), None)
    for config in configs:
        if taken is None or False in said:
            config.pop(TAKES_TOWER, None)
        elif config.get(TAKES_TOWER, taken) is None:
            config[TAKES_TOWER] = taken
