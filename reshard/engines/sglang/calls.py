"""Calls of the methods that the plugin gives to SGLang's schedulers, from the process that has the
``sglang.Engine``, or by the address of a running server."""

import json
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from typing import Any

from reshard.comm.hosts import parsed
from reshard.comm.http import RefusedError, call_route
from reshard.core.errors import ReshardError, listed
from reshard.core.limits import check_seconds
from reshard.engines.sglang import compat
from reshard.engines.sglang.group import ASKED, GROUP, JOIN, JOIN_DIGEST, PRESENT, VERIFIED
from reshard.engines.sglang.pipeline import UNDER_WAY

NO_PLUGIN = (
    "this SGLang has no plugin of reshard: install reshard where SGLang is, and, where the environment variable "
    "SGLANG_PLUGINS is set, name reshard there too; SGLang's log says why a plugin did not load"
)
MISSING = "has no attribute 'reshard_"
# Calls that only begin, with pipeline stages, and that a second one joins.
JOINED = (
    "reshard_connect", "reshard_refit", "reshard_release", "reshard_write_deltas", "reshard_roll_back_deltas",
    "reshard_digest",
)  # fmt: skip
# All that a user makes.
CALLS = (
    *JOINED, "reshard_begin_refit", "reshard_switch", "reshard_roll_back", "reshard_check_version", "reshard_close",
    "reshard_join", "reshard_read_deltas", "reshard_check_deltas",
    "reshard_drop_deltas",
)  # fmt: skip


def call(engine: Any, method: str, **options: Any) -> None:
    """Call a method of `reshard.engines.sglang.worker.SchedulerMethods` on all ranks of an
    ``sglang.Engine``, such as ``reshard_connect``; with pipeline stages wait for it too.

    Raises ReshardError with what the method raised, where SGLang has not loaded the plugin, which
    it only logs, and with data parallel attention, for which SGLang loses such calls.
    """
    if compat.has_dp_attention(engine.server_args):
        raise ReshardError(
            "SGLang hands a call of collective_rpc to any one of the ranks of its data parallel attention, where it "
            "may be lost: start a server, and use connect_server and refit_server"
        )
    try:
        engine.collective_rpc(method, **options)
        if method in JOINED and engine.server_args.pp_size > 1:
            engine.collective_rpc("reshard_join")
    except AssertionError as error:
        message = str(error)
        if MISSING in message:
            from reshard.engines.sglang.worker import METHODS

            if method not in METHODS:
                raise ReshardError(f"there is no {method}: the calls are {listed(CALLS)}") from error
            raise ReshardError(NO_PLUGIN) from error
        raise ReshardError(message) from error


def connect_server(
    url: str, address: str, first_rank: int, size: int, timeout: float = 60.0, **options: Any
) -> None:
    """Connect a running server, ``http://HOST:PORT``, to a trainer, while the trainer's ranks connect; the
    arguments are those of `reshard.engines.sglang.worker.SchedulerMethods.reshard_connect`.

    Raises ReshardError with what that raises.
    """
    check_seconds(timeout, "timeout")
    body = connect_request(address, first_rank, size, timeout=timeout, **options)
    check_plugin(url)
    post(url, "init_weights_update_group", body, 2 * timeout)


def check_plugin(url: str) -> None:
    """Raise ReshardError if a server has not loaded the plugin.

    Without it SGLang would take a connect for one of its own groups: its scheduler would wait at the address for
    ever, and its log would show the secret. This question changes nothing in either case.
    """
    try:
        answer = call_route(url, "destroy_weights_update_group", {"group_name": ASKED})
    except RefusedError as error:
        if error.code != HTTPStatus.BAD_REQUEST:
            raise
        answer = None
    if not says_plugin(answer):
        raise ReshardError(f"{url}: {NO_PLUGIN}")


def says_plugin(answer: Any) -> bool:
    """Tell whether an answer of ``/destroy_weights_update_group`` to a group `ASKED` is a plugin's."""
    return isinstance(answer, dict) and answer.get("message") == PRESENT


def refit_server(url: str, version: int | None, verify: bool = False, timeout: float = 120.0) -> None:
    """Have a connected server take the trainer's weights, while the trainer's ranks refit; SGLang tells
    the version as its ``weight_version``. `timeout` is in seconds.

    Raises ReshardError with what `SchedulerMethods.reshard_refit` raises.
    """
    post(url, "update_weights_from_distributed", refit_request(version, verify), timeout)


def act_on_server(url: str, action: str, timeout: float = 120.0, **options: Any) -> Any:
    """Have a connected server begin a refit, switch to it, or roll back (`reshard.engines.workers.actions`), while it
    serves; return its answer. Raises ReshardError with what `SchedulerMethods` raises."""
    return post(url, "init_weights_update_group", action_request(action, **options), timeout)


def action_request(action: str, **options: Any) -> dict[str, Any]:
    """Return what SGLang's ``init_weights_update_group`` gets for an action; see `act_on_server`."""
    return connect_request("127.0.0.1:1", 0, 1, action=action, **options)  # nobody meets there


def connect_request(address: str, first_rank: int, size: int, **options: Any) -> dict[str, Any]:
    """Return what SGLang's ``init_weights_update_group`` gets to connect; see `connect_server`."""
    host, port = parsed(address)
    return {
        "master_address": f"[{host}]" if ":" in host else host,
        "master_port": port,
        "rank_offset": first_rank,
        "world_size": size,
        "group_name": GROUP,
        "backend": json.dumps(options),
    }


def refit_request(version: int | None, verify: bool) -> dict[str, Any]:
    """Return what SGLang's ``update_weights_from_distributed`` gets to refit; see `refit_server`."""
    return {
        "names": [],
        "dtypes": [],
        "shapes": [],
        "group_name": GROUP,
        "weight_version": None if version is None else str(version),
        "load_format": VERIFIED if verify else None,
    }


def swap_request(action: str, version: int | None) -> dict[str, Any]:
    """Return what SGLang's ``update_weights_from_distributed`` gets to switch to a version that was begun, or to roll
    back to one (`reshard.engines.workers.actions`), once no request runs; SGLang tells it as its
    ``weight_version``."""
    return refit_request(version, False) | {"load_format": action}


def ask_digest(url: str, options: dict[str, Any], timeout: float) -> None:
    """Ask the schedulers of a server for the digest; see `reshard.engines.sglang.digest`."""
    body = refit_request(None, False) | {"load_format": json.dumps({"digest": True, **options})}
    post(url, "update_weights_from_distributed", body, timeout, JOIN_DIGEST)


def call_and_join(call: Callable[[dict[str, Any]], Any], request: dict[str, Any], join: str = JOIN) -> Any:
    """Return what `call` returns for a request to connect or to refit; where it raises that pipeline stages have
    begun, what it returns for the same request to join them."""
    try:
        return call(request)
    except Exception as error:
        if UNDER_WAY not in str(error):
            raise
    field = "backend" if "backend" in request else "load_format"
    return call(request | {field: join})


def server_ranks(url: str) -> int:
    """Return how many schedulers a server has, by what it says of itself. Raises ReshardError if it does not."""
    info = call_route(url, "server_info")
    fields = info if isinstance(info, dict) else {}
    tp, pp = fields.get("tp_size"), fields.get("pp_size", 1)
    if type(tp) is not int or type(pp) is not int or min(tp, pp) < 1:
        raise ReshardError(f"{url} does not say at /server_info how many ranks it has: use another SGLang")
    return tp * pp


def close_server(url: str) -> None:
    """Have a server forget its trainer."""
    call_route(url, "destroy_weights_update_group", {"group_name": GROUP})


def post(url: str, route: str, request: dict[str, Any], timeout: float, join: str = JOIN) -> Any:
    """Post a request to a server, and, where pipeline stages have begun, the one that joins them; return the answer."""
    return call_and_join(partial(call_route, url, route, timeout=timeout), request, join)
