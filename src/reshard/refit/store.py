"""A client of torch's key-value store that does not wait for ever.

torch bounds how long a client waits for a key, not how long it waits for an answer: where the process that serves the store is stopped,
or its host is gone without a word, every call hangs. The kernel bounds it here (``SO_RCVTIMEO``), on a connection of our own.
"""

import os
import socket
import struct
from collections.abc import Callable

import torch.distributed as dist


def bounded(make: Callable[[], dist.Store], port: int, seconds: float) -> dist.Store:
    """A client that `make` connects to a server at `port`; each of its calls raises an error where no answer comes within `seconds`.

    After such an error the connection is out of step, and the client must not be used again.
    """
    before = set(_sockets())
    store = make()
    for descriptor in set(_sockets()) - before:
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            try:
                ours = connection.getpeername()[1] == port
            except (OSError, IndexError, TypeError):
                continue  # no connection, or not one of the internet's
            if ours:
                limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    return store


def _sockets() -> list[int]:
    """The descriptors of this process that are sockets."""
    found = []
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else []:
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                found.append(int(name))
        except OSError:
            pass  # closed since, as the listing's own is
    return found


def of_process_group(seconds: float) -> dist.Store:
    """The store at which the ranks of torch's process group have met: where it is a TCPStore, over a connection of our own."""
    default = dist.distributed_c10d._get_default_store()
    innermost = default
    while isinstance(innermost, dist.PrefixStore):
        innermost = innermost.underlying_store
    if isinstance(innermost, dist.TCPStore) and hasattr(default, "clone"):
        return bounded(default.clone, innermost.port, seconds)
    return default
