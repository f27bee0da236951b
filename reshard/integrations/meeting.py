"""Where members of a refit meet that Ray has started."""

import socket
from contextlib import closing

import ray

from reshard.comm.hosts import family_of


def this_host() -> str:
    """This host's address, as others reach it."""
    return str(ray.util.get_node_ip_address()).strip("[]")


def meeting_place() -> str:
    """An address of this host that others reach, with a port that is free now."""
    host = this_host()
    with closing(socket.socket(family_of(host))) as probe:
        probe.bind((host, 0))
        port = probe.getsockname()[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
