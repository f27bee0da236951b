"""Hosts, and the addresses at which members meet."""

import os
import socket
import time
from pathlib import Path

from reshard.core.errors import ReshardError


def family_of(host: str) -> socket.AddressFamily:
    """The kind of socket for an address of a host, without brackets."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def parsed(address: str) -> tuple[str, int]:
    """Host and port of an address. Raises ReshardError where it is none."""
    host, _, port = str(address).rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        host = ""
    if not host or not port.isascii() or not port.isdigit() or len(port) > 5 or not 0 < int(port) < 1 << 16:
        raise ReshardError(f"{address!s:.100} is not an address such as 10.0.0.1:29600 or [::1]:29600")
    return host, int(port)


def wait_for_server(host: str, port: int, deadline: float) -> None:
    """Wait until something listens there. Raises OSError where nothing does in time."""
    while True:
        try:
            socket.create_connection((host, port), timeout=max(0.1, deadline - time.monotonic())).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def address_towards(host: str, port: int) -> str:
    """This machine's address on the way to a host; nothing is sent."""
    [(family, kind, _, _, there), *_] = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    with socket.socket(family, kind) as probe:
        probe.connect(there)
        return str(probe.getsockname()[0])


def namespaces() -> str:
    """Those of Linux's namespaces that this process is in, and in which two must be to map each other's memory: the names that
    its process numbers have, and what it shares with others. Containers usually have their own."""
    return " ".join(_namespace(kind) for kind in ("pid", "ipc"))


def _namespace(kind: str) -> str:
    try:
        return os.readlink(f"/proc/self/ns/{kind}")
    except OSError:
        return f"{kind}:unknown"


def this_host() -> str:
    """Names the machine as long as it runs: two containers on it share links, and perhaps memory (`namespaces`)."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text(encoding="utf-8").strip() if boot.exists() else socket.gethostname()
