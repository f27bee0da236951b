"""Addresses where members of a refit can meet that Ray has started."""

from typing import Any

import ray
import torch.distributed as dist

from reshard.comm.hosts import free_address
from reshard.comm.secret import new_secret


def this_host() -> str:
    """Return this host's address, as other hosts reach it."""
    return str(ray.util.get_node_ip_address()).strip("[]")


def meeting_place() -> str:
    """Return an address of this host that other hosts reach, with a port that is free now."""
    return free_address(this_host())


def agreed_meeting(group: Any = None) -> tuple[str, str]:
    """Return an address and a secret that the first rank of a trainer has made, on all its ranks.

    `group` is the process group that carries them, by default torch's.
    """
    values = [meeting_place(), new_secret()] if dist.get_rank() == 0 else ["", ""]
    dist.broadcast_object_list(values, 0, group=group)
    return values[0], values[1]
