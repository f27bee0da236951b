"""The processes that take part in a refit, and what they tell each other: small messages through a key-value store.

No collective is used here, so that a process that dies or stalls is named by the others, within a time limit. Payloads are JSON
and raw arrays; nothing is unpickled.
"""

import atexit
import json
import os
import socket
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from reshard.errors import ReshardError, first_line, listed

PROTOCOL = 1
CHECK_SECONDS = 0.1
LINGER_SECONDS = 3.0
_made: Counter[str] = Counter()


class Members:
    """The trainer's and the inference engine's processes under one numbering.

    `store` is any torch store that all of them reach, `rank` and `size` count over both sides. `timeout` in seconds bounds every
    wait. Make one with `of_process_group` or `join`.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: float = 60.0) -> None:
        if not 0 <= rank < size:
            raise ReshardError(f"rank {rank} is not one of {size} members")
        self.store, self.rank, self.size, self.timeout = store, rank, size, timeout
        self.names = {r: f"rank {r}" for r in range(size)}
        self.mine: list[str] = []
        self.process_group: dist.ProcessGroup | None = None
        self.local_address: str | None = None
        self.met = ""
        self.scope = "connect"

    @staticmethod
    def of_process_group(name: str = "reshard", timeout: float = 60.0) -> "Members":
        """All ranks of this torch process group: trainer and engine in the same processes, or started by one launcher.

        Every rank makes the same ones in the same order; those of one name are told apart by counting them.
        """
        if not dist.is_initialized():
            raise ReshardError("torch.distributed is not initialised: call init_process_group first, or use Members.join")
        # What earlier members of this name have left in the store must not be read again.
        _made[name] += 1
        store = dist.PrefixStore(f"{name}/{_made[name]}", dist.distributed_c10d._get_default_store())
        members = Members(store, dist.get_rank(), dist.get_world_size(), timeout)
        members.process_group = dist.group.WORLD
        return members

    @staticmethod
    def join(address: str, rank: int, size: int, timeout: float = 60.0) -> "Members":
        """Meet at ``host:port``: rank 0 serves there, the others connect.

        A host of ``127.0.0.1`` or ``localhost`` is served to this host only. Raises ReshardError where nobody answers in time.
        """
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit():
            raise ReshardError(f"{address} is not an address such as 10.0.0.1:29600")
        options: dict[str, Any] = {"timeout": timedelta(seconds=timeout), "wait_for_workers": False}
        try:
            if rank == 0:
                listener = socket.create_server((host, int(port)), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
                options |= {"is_master": True, "master_listen_fd": listener.detach()}
            store = dist.TCPStore(host, int(port), None, **options)
        except (OSError, RuntimeError, ValueError) as error:
            who = "cannot serve" if rank == 0 else "found no member 0"
            raise ReshardError(f"rank {rank} {who} at {address} ({first_line(error)})") from error
        members = Members(store, rank, size, timeout)
        members.local_address = _address_towards(host, int(port))
        if rank == 0:
            atexit.register(members.linger)
        return members

    def post(self, key: str, payload: bytes = b"", keep: bool = False) -> None:
        """Publish a payload under a key of this rank; with `keep` it stays when older messages are deleted."""
        self._call(self.store.set, f"{key}/{self.rank}", payload or b"-")
        if not keep:
            self.mine.append(f"{key}/{self.rank}")

    def read(self, key: str, rank: int) -> bytes:
        """What a rank published; waits for it. Raises ReshardError where some member failed or `rank` is late."""
        self.wait(key, [rank])
        payload = self._call(self.store.get, f"{key}/{rank}")
        return b"" if payload == b"-" else payload

    def wait(self, key: str, ranks: Iterable[int]) -> None:
        """Wait until these ranks have published under `key`; raises ReshardError naming those that are late, or that failed."""
        names = {f"{key}/{rank}": rank for rank in ranks}
        if self._until(list(names)):
            return
        late = sorted(rank for name, rank in names.items() if not self._call(self.store.check, [name]))
        who, what = listed(self.names[rank] for rank in late), key.rsplit("/", 1)[-1]
        raise ReshardError(f"{who} did not reach '{what}' within {self.timeout:g} s: dead, stalled or not started")

    def _until(self, names: list[str]) -> bool:
        """Wait until all of these keys are there, or the time is over. Raises ReshardError where a member has given up."""
        start = time.monotonic()
        pause, told = 50e-6, start
        while not self._call(self.store.check, names):
            now = time.monotonic()
            if now - told > CHECK_SECONDS:
                self.check()
                told = now
            if now - start > self.timeout:
                return False
            # Soon at first, since a refit takes milliseconds; then without a load on the store.
            time.sleep(pause)
            pause = min(pause * 1.2, 5e-3)
        return True

    def gather(self, key: str, payload: bytes) -> list[bytes]:
        """Publish, and get what everyone published, by rank."""
        self.post(key, payload)
        self.wait(key, range(self.size))
        return [self.read(key, rank) for rank in range(self.size)]

    def meet(self, key: str) -> None:
        """Wait for everyone. One counter, so that the cost does not grow with the square of the members."""
        self.post(key)
        if self._call(self.store.add, f"{key}/count", 1) == self.size:
            self._call(self.store.set, f"{key}/all", b"-")
            self.mine += [f"{key}/count", f"{key}/all"]
        if not self._until([f"{key}/all"]):
            self.wait(key, range(self.size))
        self.met = f"{key}/seen"
        if self.rank:
            with suppress(RuntimeError, dist.DistError):
                self.store.add(self.met, 1)
        else:
            self.mine.append(self.met)

    def linger(self) -> None:
        """As rank 0, stay until the others know that all have met: they ask the store that this process serves."""
        deadline = time.monotonic() + LINGER_SECONDS
        with suppress(RuntimeError, dist.DistError):
            while self.met and self.store.add(self.met, 0) < self.size - 1 and time.monotonic() < deadline:
                time.sleep(1e-3)

    def fail(self, error: BaseException) -> None:
        """Tell the others why this member gives up. Rank 0, which serves the store, stays until they know."""
        said = f"left {self.scope}"
        try:
            if not self.store.check([f"failed in {self.scope}"]):
                self.store.set(f"failed in {self.scope}", f"{self.names[self.rank]}: {error}")
            self.store.set(f"{said}/{self.rank}", "-")
            deadline = time.monotonic() + LINGER_SECONDS
            while self.rank == 0 and time.monotonic() < deadline and not self.store.check([f"{said}/{r}" for r in range(self.size)]):
                time.sleep(0.01)
        except (RuntimeError, dist.DistError):
            pass

    def silent(self, key: str, seconds: float = 2.0) -> list[int]:
        """Publish under `key`; those who have not done so some seconds later, though all should."""
        self.post(key)
        deadline, names = time.monotonic() + seconds, [f"{key}/{rank}" for rank in range(self.size)]
        while time.monotonic() < deadline and not self._call(self.store.check, names):
            time.sleep(0.01)
        return [rank for rank, name in enumerate(names) if not self._call(self.store.check, [name])]

    def check(self) -> None:
        """Raise ReshardError where another member has given up in this scope."""
        if self._call(self.store.check, [f"failed in {self.scope}"]):
            raise ReshardError(self._call(self.store.get, f"failed in {self.scope}").decode())

    def forget(self) -> None:
        """Delete this member's messages but the last three: others may not have seen yet that all have met.

        Who serves the store may be gone by then, after the last refit of a job; the next wait would say so.
        """
        old, self.mine = self.mine[:-3], self.mine[-3:]
        with suppress(RuntimeError, dist.DistError):
            for name in old:
                self.store.delete_key(name)

    def _call(self, function: Callable, *args: Any) -> Any:
        try:
            return function(*args)
        except (RuntimeError, dist.DistError) as error:
            who = f"{self.names[0]}, which serves the store that the members meet at, does not answer {self.names[self.rank]}"
            raise ReshardError(f"{who} ({first_line(error)})") from error


def _address_towards(host: str, port: int) -> str:
    """This machine's address on the way to a host; nothing is sent."""
    [(family, kind, _, _, there), *_] = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    with socket.socket(family, kind) as probe:
        probe.connect(there)
        return str(probe.getsockname()[0])


def pack_json(value: Any) -> bytes:
    """JSON, compressed."""
    return zlib.compress(json.dumps(value, separators=(",", ":")).encode(), 1)


def unpack_json(payload: bytes) -> Any:
    """The inverse of `pack_json`; tuples come back as lists."""
    return json.loads(zlib.decompress(payload))


def pack_array(array: np.ndarray) -> bytes:
    """An int64 matrix, compressed."""
    return np.int64(array.shape[1]).tobytes() + zlib.compress(np.ascontiguousarray(array, np.int64).tobytes(), 1)


def unpack_array(payload: bytes) -> np.ndarray:
    """The inverse of `pack_array`."""
    columns = int(np.frombuffer(payload[:8], np.int64)[0])
    return np.frombuffer(zlib.decompress(payload[8:]), np.int64).reshape(-1, columns)


def this_host() -> str:
    """Names the machine as long as it runs: two containers on it share memory and links."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else socket.gethostname()


def hello(name: str, roles: list[str], device: torch.device) -> dict[str, Any]:
    """What a member says of itself."""
    from importlib.metadata import version

    gpu = ""
    if device.type == "cuda":
        gpu = str(torch.cuda.get_device_properties(device).uuid)
    return {"protocol": PROTOCOL, "reshard": version("reshard"), "name": name, "roles": roles, "host": this_host(), "user": os.getuid(),
            "device": device.type, "gpu": gpu, "pid": os.getpid()}  # fmt: skip
