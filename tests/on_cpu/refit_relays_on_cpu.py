"""Replicas that read from each other what they want of a trainer, one of whom dies in the middle."""

import os
import time

import torch
import torch.distributed as dist

from reshard.refit import RefitGroup, connect
from reshard.refit.transports import TRANSPORTS
from tests.refit.test_transports import OneShard, OneTensor
from tests.starting.ranks import caught

ROWS, BUCKET_BYTES = 1 << 16, 4 << 16  # a MiB in eight rounds


def dying(rank: int, ports: list[int], backend: str, victim: int, moment: str, patience: float):
    """Refit three replicas, and once more, in which the `victim` ends without a word when it begins its fourth round
    of what happens at that moment; then the others alone, over a connection of their own. What the others say, after
    how many seconds, of an engine whether it is ready then; and the weights of the last refit."""
    # Of this process, for `ranks`.
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(7)
    source = OneShard(0, ROWS) if not rank else None
    engine = OneTensor(ROWS) if rank else None
    options = {"backend": backend, "relays": "always", "bucket_bytes": BUCKET_BYTES}
    group = RefitGroup.join(f"127.0.0.1:{ports[0]}", rank, 4, timeout=patience)
    link = connect(group, source, engine, **options)
    link.refit(version=1)
    if rank == victim:
        [kind] = [kind for kind in TRANSPORTS if kind.reach.name == backend]
        plain, seen = getattr(kind, moment), []

        def last(self, *arguments):
            if moment != "tell" or (arguments[0] == "packed" and arguments[1]):
                seen.append(arguments)
            if len(seen) == 4:
                os._exit(0)
            return plain(self, *arguments)

        setattr(kind, moment, last)
    began = time.monotonic()
    said = caught(lambda: link.refit(version=2, verify=True))
    took, ready = time.monotonic() - began, engine is not None and engine.ready
    link.close()
    group.close()
    if not victim:  # there is no trainer any more
        return said, took, ready, None
    group = RefitGroup.join(f"127.0.0.1:{ports[1]}", rank - (rank > victim), 3, timeout=60)
    link = connect(group, source, engine, **options)
    link.refit(version=3, verify=True)
    link.close()
    return said, took, ready, (source or engine).weight
