"""The surroundings of a transport."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from reshard.comm.group import RefitGroup
from reshard.refit.engine import Engine
from reshard.refit.routes import Peer


class Context(NamedTuple):
    """The surroundings that a transport is made for.

    `backend` is what was chosen for all, `bucket_bytes` bounds its memory, `participants` are the
    ranks that have a side, `peers` all members. `engine` is this member's, None where it has none.
    With `keep_sent` trainers' ranks keep what they send by buckets, since they may send what changed in it, in pinned
    host memory with `keep_on_host`. With `keep_mapped` what a refit needs may stay until the next one.
    """

    group: RefitGroup
    device: torch.device
    backend: str
    bucket_bytes: int
    participants: Sequence[int]
    peers: Sequence[Peer]
    engine: Engine | None
    keep_sent: bool = False
    keep_on_host: bool = False
    keep_mapped: bool = False
