"""The calls that bring a running SGLang to a version of a chain of deltas, and back."""

import json
from pathlib import Path
from typing import Any

from reshard.comm.hosts import free_address
from reshard.comm.secret import new_secret
from reshard.core.limits import PENDING_BYTES, check_number, check_seconds
from reshard.engines.sglang.calls import call, check_plugin, post, refit_request
from reshard.engines.workers.actions import ROLL_BACK


def apply_deltas(
    engine: Any,
    chain: str | Path,
    version: int | None = None,
    verify: bool = False,
    address: str | None = None,
    timeout: float = 600.0,
    pending_bytes: int = PENDING_BYTES,
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
    given = {"chain": str(chain), "verify": verify, "pending_bytes": pending_bytes}
    _call(engine, "reshard_apply_deltas", _meeting(address, timeout) | given, {}, reached)
    return reached


def roll_back(engine: Any, version: int, address: str | None = None, timeout: float = 600.0) -> int:
    """Have a running SGLang serve `version` again, which it served before the last `apply_deltas`, bit for bit; return
    it. For the rest see `reshard.delta.roll_back`; the other arguments are those of `apply_deltas`."""
    from reshard.delta.chain import MOST_VERSION  # which needs more packages than a refit

    check_number(version, "version", MOST_VERSION, 0)
    _call(engine, "reshard_roll_back_deltas", _meeting(address, timeout), {"action": ROLL_BACK}, version)
    return version


def _meeting(address: str | None, timeout: float) -> dict[str, Any]:
    """Return the options by which an engine's ranks meet."""
    check_seconds(timeout, "timeout")
    return {"timeout": timeout, "secret": new_secret(), "address": address or free_address("127.0.0.1")}


def _call(engine: Any, method: str, options: dict[str, Any], action: dict[str, Any], version: int) -> None:
    """Call a method of an engine's schedulers; or have a server do that, which is told the `action` beside the options,
    and tells this version from then on."""
    if not isinstance(engine, str):
        call(engine, method, version=version, **options)
        return
    check_plugin(engine)
    body = refit_request(version, False) | {"load_format": json.dumps(action | options)}
    post(engine, "update_weights_from_distributed", body, options["timeout"])
