"""A client of torch's key-value store that does not wait for ever.

torch bounds how long a client waits for a key, not how long it waits for an answer: where the process that
serves the store is stopped, or its host is gone without a word, every call hangs. The kernel bounds it here
(``SO_RCVTIMEO``), on a connection of our own.
"""

import os
import socket
import struct
from collections.abc import Callable

import torch.distributed as dist


def bounded(make: Callable[[], dist.Store], port: int, seconds: float) -> dist.Store:
    """A client that `make` connects to a server at `port`; each of its calls raises an error where no answer
    comes within `seconds`.

    After such an error the connection is out of step, and the client must not be used again.
    """
    before = set(_sockets())
    store = make()
    limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    for link, descriptor in _sockets().items():
        if link in before:
            continue
        try:
            with socket.socket(fileno=os.dup(descriptor)) as connection:
                if connection.getpeername()[1] == port:
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        except (OSError, IndexError, TypeError):
            pass  # no connection, not one of the internet's, or one that another thread has closed since
    return store


def _sockets() -> dict[str, int]:
    """The descriptors of this process's sockets, by what the kernel calls these: a number may be given again
    at any time."""
    found = {}
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else []:
        try:
            link = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # closed since, as the listing's own is
        if link.startswith("socket:"):
            found[link] = int(name)
    return found


def of_process_group(seconds: float) -> dist.Store:
    """The store at which the ranks of torch's process group have met: where it is a TCPStore, over a
    connection of our own."""
    default = dist.distributed_c10d._get_default_store()
    innermost = default
    while isinstance(innermost, dist.PrefixStore):
        innermost = innermost.underlying_store
    if isinstance(innermost, dist.TCPStore) and hasattr(default, "clone"):
        return bounded(default.clone, innermost.port, seconds)
    return default
