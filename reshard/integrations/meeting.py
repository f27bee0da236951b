"""Addresses where members of a refit can meet that Ray has started."""

import socket
from contextlib import closing

import ray

from reshard.comm.hosts import family_of


def this_host() -> str:
    """Return this host's address, as other hosts reach it."""
    return str(ray.util.get_node_ip_address()).strip("[]")


def meeting_place() -> str:
    """Return an address of this host that other hosts reach, with a port that is free now."""
    host = this_host()
    with closing(socket.socket(family_of(host))) as probe:
        probe.bind((host, 0))
        port = probe.getsockname()[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
