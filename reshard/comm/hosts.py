"""Hosts, and the addresses at which members meet."""

import errno
import ipaddress
import os
import random
import socket
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from reshard.core.errors import ReshardError
from reshard.core.system import boot_id, namespace

BACKLOG = 4096  # processes that connect at the same moment
RANGE_OF_CONNECTIONS = Path("/proc/sys/net/ipv4/ip_local_port_range")  # for IPv6, too
USUAL_RANGE = "49152 65535"  # IANA's, and macOS's
PORTS = range(20000, 30000)  # below are those of many servers, above those of Kubernetes' services
PROBES = 64  # ports that are tried
ELSEWHERE = "192.0.2.1"  # an address of nobody; only the route to it is looked up


def family_of(host: str) -> socket.AddressFamily:
    """Return the kind of socket for an address of a host, without brackets."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def parsed(address: str) -> tuple[str, int]:
    """Return host and port of an address. Raises ReshardError if it is not an address."""
    host, _, port = str(address).rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        host = ""
    if not host or not port.isascii() or not port.isdigit() or len(port) > 5 or not 0 < int(port) < 1 << 16:
        raise ReshardError(f"{address!s:.100} is not an address such as 10.0.0.1:29600 or [::1]:29600")
    return host, int(port)


def has_port(address: str) -> bool:
    """Return True for an address with a port, False for that of a host."""
    return address.startswith("[") or address.count(":") == 1


def address_of(host: str, port: int) -> str:
    """Return the address of a port of a host, given without brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def free_address(host: str) -> str:
    """Return an address of this host, given without brackets, with a port that is free now, and that the system gives
    to no connection before somebody serves there. Raises ReshardError if none is."""
    for port in [*_random_ports(), 0]:
        with closing(socket.socket(family_of(host))) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    continue
                raise
            return address_of(host, probe.getsockname()[1])
    raise ReshardError(f"no port is free on {host}")


def _random_ports() -> list[int]:
    """Return a few ports that the system chooses for no connection; none where it chooses among all."""
    try:
        given = RANGE_OF_CONNECTIONS.read_text(encoding="ascii")
    except OSError:
        given = USUAL_RANGE
    lowest, highest = map(int, given.split())
    ports = [port for port in PORTS if not lowest <= port <= highest]
    # Not Python's usual generator: a training script seeds that, alike on each rank, and counts on what it gives next.
    return random.SystemRandom().sample(ports, min(PROBES, len(ports)))


def address_towards(host: str, port: int) -> str:
    """Return this machine's address on the way to a host; nothing is sent."""
    [(family, kind, _, _, destination), *_] = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    with socket.socket(family, kind) as probe:
        probe.connect(destination)
        return str(probe.getsockname()[0])


def namespaces() -> str:
    """Return the names of those of Linux's namespaces that this process is in, and in which two
    must be to map each other's memory: that of its process numbers, and that of what it shares with
    others. Containers usually have their own."""
    return " ".join(map(namespace, ("pid", "ipc")))


def this_host() -> str:
    """Return a name of the machine as long as it runs: two containers on it share links, and
    perhaps memory (`namespaces`)."""
    return boot_id() or socket.gethostname()


def has_rdma() -> bool:
    """Return True if this host has a network device that does RDMA by verbs, and whose port is up. Amazon's
    EFA has no such reads."""
    for state in Path("/sys/class/infiniband").glob("*/ports/*/state"):
        driver = os.path.realpath(state.parents[2] / "device" / "driver")
        with suppress(OSError):
            if "ACTIVE" in state.read_text(encoding="utf-8") and Path(driver).name != "efa":
                return True
    return False


def is_loopback(host: str) -> bool:
    """Return True for an address that only processes of this host reach."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def listener_for(store: Any) -> socket.socket:
    """Listen where all processes that share a torch store reach this host, on one address and at a
    port that is free. Raises ReshardError if there is no such address."""
    problem = ""  # no exception, whose frames would keep what is made here until a garbage collection
    for host in _reached_hosts(store):
        try:
            return socket.create_server((host, 0), family=family_of(host), backlog=BACKLOG)
        except OSError as error:  # not an address of this host
            problem = str(error)
    raise ReshardError(
        f"no address to listen at ({problem}): set MASTER_ADDR to one of the first process's host"
    )


def _reached_hosts(store: Any) -> list[str]:
    """Return addresses that may be this host's and that the others may reach, the likeliest first:
    that of the store, and this host's own on the way to it; of the default route; of its name."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    hosts: list[str] = []
    for host in (
        getattr(store, "host", None),
        os.environ.get("MASTER_ADDR"),
        ELSEWHERE,
        socket.gethostname(),
    ):
        with suppress(OSError):
            if host:
                resolved = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
                # Many a host has its own name as an address that only it reaches.
                if is_loopback(host) or not is_loopback(resolved):
                    hosts += [resolved, address_towards(resolved, 9)]
    return list(dict.fromkeys([*hosts, "127.0.0.1"]))
