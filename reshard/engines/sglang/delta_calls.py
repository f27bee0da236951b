"""The calls that bring a running SGLang to a version of a chain of deltas, and back."""

import json
import time
import uuid
from pathlib import Path
from typing import Any

from reshard.comm.hosts import free_address
from reshard.comm.secret import new_secret
from reshard.core.errors import ReshardError
from reshard.core.limits import PENDING_BYTES, check_number, check_seconds
from reshard.engines.sglang.calls import (
    act_on_server,
    call,
    check_plugin,
    connect_request,
    post,
    refit_request,
)
from reshard.engines.sglang.delta_methods import READING
from reshard.engines.workers.actions import DROP_DELTAS, IS_READ, READ, ROLL_BACK, WRITE

LOOK_SECONDS = 0.2


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
    session = uuid.uuid4().hex
    reached = read_deltas(engine, session, chain, version, verify, address, timeout, pending_bytes)
    write_deltas(engine, session, reached, timeout)
    return reached


def read_deltas(
    engine: Any,
    session: str,
    chain: str | Path,
    version: int | None,
    verify: bool,
    address: str | None,
    timeout: float,
    pending_bytes: int,
) -> int:
    """Have an SGLang read what leads to a version, while it serves; return that version. The first half of
    `apply_deltas`, one call of which is a `session`."""
    from reshard.delta.chain import Chain, target_of  # which need more packages than a refit

    with Chain(chain) as opened:
        reached, _ = target_of(opened, version)
    options = _meeting(address, timeout)
    options |= {"session": session, "chain": str(chain), "version": reached, "verify": verify}
    options["pending_bytes"] = pending_bytes
    if isinstance(engine, str):
        check_plugin(engine)
        body = connect_request(options.pop("address"), 0, 1, action=READ, **options)
        post(engine, "init_weights_update_group", body, timeout)
    else:
        call(engine, "reshard_read_deltas", **options)
    while not _is_read(engine, session):
        time.sleep(LOOK_SECONDS)
    return reached


def _is_read(engine: Any, session: str) -> bool:
    """Return whether an SGLang has read what it was told to. Raises ReshardError if it could not."""
    try:
        if isinstance(engine, str):
            act_on_server(engine, IS_READ, session=session)
        else:
            call(engine, "reshard_check_deltas", session=session)
    except ReshardError as error:
        if READING in str(error):
            return False
        raise
    return True


def write_deltas(engine: Any, session: str, version: int, timeout: float) -> None:
    """Have an SGLang write what it has read, and serve this version. The second half of `apply_deltas`."""
    _call(engine, "reshard_write_deltas", {"session": session}, WRITE, version, timeout)


def drop_deltas(url: str, session: str) -> tuple[bool, int | None]:
    """Have a server forget what a session has read, so that it writes nothing any more; return whether it had written
    other weights, and the version to which these lead back, if they do."""
    message = act_on_server(url, DROP_DELTAS, session=session).get("message")
    [wrote, back] = json.loads(message)
    return wrote, back


def roll_back(engine: Any, version: int, address: str | None = None, timeout: float = 600.0) -> int:
    """Have a running SGLang serve `version` again, which it served before the last `apply_deltas`, bit for bit; return
    it. For the rest see `reshard.delta.roll_back`; the other arguments are those of `apply_deltas`."""
    from reshard.delta.chain import MOST_VERSION  # which needs more packages than a refit

    check_number(version, "version", MOST_VERSION, 0)
    _call(engine, "reshard_roll_back_deltas", _meeting(address, timeout), ROLL_BACK, version, timeout)
    return version


def _meeting(address: str | None, timeout: float) -> dict[str, Any]:
    """Return the options by which an engine's ranks meet."""
    check_seconds(timeout, "timeout")
    return {"timeout": timeout, "secret": new_secret(), "address": address or free_address("127.0.0.1")}


def _call(
    engine: Any, method: str, options: dict[str, Any], action: str, version: int, timeout: float
) -> None:
    """Call a method of an engine's schedulers; or have a server do that, which is told the `action` beside the options,
    and tells this version from then on."""
    if not isinstance(engine, str):
        call(engine, method, version=version, **options)
        return
    check_plugin(engine)
    body = refit_request(version, False) | {"load_format": json.dumps({"action": action, **options})}
    post(engine, "update_weights_from_distributed", body, timeout)
