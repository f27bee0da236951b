"""The call that brings a running SGLang to a version of a chain of deltas."""

import json
from pathlib import Path
from typing import Any

from reshard.comm.hosts import free_address
from reshard.comm.secret import new_secret
from reshard.engines.sglang.calls import call, check_plugin, post, refit_request


def apply_deltas(
    engine: Any,
    chain: str | Path,
    version: int | None = None,
    verify: bool = False,
    address: str | None = None,
    timeout: float = 600.0,
) -> int:
    """Bring a running SGLang to a version of a chain, by default the newest; return that version. For the rest
    see `reshard.delta.apply_deltas`.

    `engine` is an ``sglang.Engine``, or the address of a server, which then tells the version as its
    ``weight_version``. Its ranks meet at `address`, a ``host:port`` of the host of the first, by default a free
    port of this host. `timeout` is in seconds.
    """
    from reshard.delta.chain import Chain  # which needs more packages than a refit

    with Chain(chain) as opened:
        deltas = opened.deltas(version)
    reached = deltas[-1].version if deltas else 0
    options = {"chain": str(chain), "verify": verify, "timeout": timeout, "secret": new_secret(),
               "address": address or free_address("127.0.0.1")}  # fmt: skip
    if not isinstance(engine, str):
        call(engine, "reshard_apply_deltas", version=reached, **options)
        return reached
    check_plugin(engine)
    body = refit_request(reached, verify) | {"load_format": json.dumps(options)}
    post(engine, "update_weights_from_distributed", body, timeout)
    return reached
