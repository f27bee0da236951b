"""The way into a running server by HTTP: SGLang's own routes for weights, with a group that is reshard's.

    POST /init_weights_update_group        connect, as ``Scheduler.reshard_connect``
    POST /update_weights_from_distributed  take the weights, as ``Scheduler.reshard_refit``; or switch, or roll back
    POST /destroy_weights_update_group     forget the trainer; for a group `ASKED`, say that the plugin is here

The plugin puts the functions below around SGLang's own, which get what is of other groups. A server without
the plugin knows no such group, and would wait for ever to make it: ask first. `reshard.engines.sglang.calls`
    makes them.

With pipeline stages the first two answer with an error that begins with `UNDER_WAY`, since nothing is there
yet; the same call with ``join`` as the backend or load format has the outcome.
"""

import json
from collections.abc import Callable
from functools import partial
from typing import Any

from reshard.core.errors import ReshardError, listed
from reshard.engines.sglang import compat
from reshard.engines.sglang.guard import follow_update
from reshard.engines.sglang.pipeline import UNDER_WAY, call_of
from reshard.engines.workers.actions import BEGIN, DROP_DELTAS, HOLDS, IS_READ, READ, ROLL_BACK, SWITCH, WRITE

GROUP = "reshard"
ASKED, PRESENT = "reshard?", "reshard is here"  # a group that nobody has, and the answer of a plugin
VERIFIED = "verify"  # as a load format: compare every bit
JOIN = "join"  # as a backend or load format: wait for the stages that have begun
JOIN_DIGEST = "join a digest"  # as a load format: the same, where they only read


def connect_group(connect: Callable[..., Any], updater: Any, request: Any) -> Any:
    """Connect to a trainer for a group of ours, or hand on what is served, where its version comes as ``lends``; or,
    with an ``action`` that needs no idle engine, do that: SGLang's route for this does not wait for requests. The
    backend of the request holds the options of `reshard.engines.workers.refits.WorkerOptions.of_call`, or those of the
    action, as JSON."""
    if request.group_name != GROUP:
        return connect(updater, request)

    said: list[str] = []

    def connected() -> None:
        if request.backend == JOIN:
            updater.scheduler.reshard_join()
            return
        options, address = _options(request.backend), f"{request.master_address}:{request.master_port}"
        if (action := options.pop("action", None)) is not None:
            said.append(_act(updater.scheduler, action, address, **options) or "")
            return
        meeting = address, request.rank_offset, request.world_size
        lends = options.pop("lends", None)
        if lends is None:
            updater.scheduler.reshard_connect(*meeting, **options)
        else:
            updater.scheduler.reshard_lend(*meeting, lends, **options)
        _check_done(updater.scheduler)

    return _answer(compat.CONNECTED, connected, lambda: next(filter(None, said), "connected"))


def _act(scheduler: Any, action: str, address: str, **options: Any) -> str | None:
    """Begin a refit, switch to it, or roll back, whereupon SGLang tells the version; or have deltas read beside what is
    served, or dropped; or say what is served. Return what the caller is told, if anything."""
    begins = {
        BEGIN: scheduler.reshard_begin_refit,
        READ: partial(scheduler.reshard_read_deltas, address),
        IS_READ: scheduler.reshard_check_deltas,
        DROP_DELTAS: scheduler.reshard_drop_deltas,
        HOLDS: scheduler.reshard_state,
    }
    if action in begins:
        answer: str | None = begins[action](**options)
        return answer
    acts = {SWITCH: scheduler.reshard_switch, ROLL_BACK: scheduler.reshard_roll_back}
    if action not in acts:
        raise ReshardError(f"action is {action!r:.80}; it is one of {listed([*begins, *acts])}")
    compat.record_version(scheduler, str(acts[action](**options)))
    return None


def _swap(scheduler: Any, action: str, version: str | None) -> None:
    """Switch to this version, or roll back to it, between two requests, for a caller by whose route the server tells
    the version too."""
    swap = scheduler.reshard_roll_back if action == ROLL_BACK else scheduler.reshard_switch
    swap(None if version is None else int(version))


def refit_group(update: Callable[..., Any], updater: Any, request: Any) -> Any:
    """Take the trainer's weights for a group of ours, or with options as JSON for a load format those that
    `reshard.engines.sglang.worker.SchedulerMethods.reshard_read_deltas` has read, go back from these, or only say what
    it serves; or switch to what was begun, or roll back, where the load format says so. The version is the request's.
    """
    if request.group_name != GROUP:
        return follow_update(update, updater, request)

    def refitted() -> None:
        version = request.weight_version
        if version is not None and not version.isdecimal():
            raise ReshardError(f"weight_version is {version!r:.80}, not a whole number")
        if request.load_format == JOIN:
            updater.scheduler.reshard_join()
        elif request.load_format == JOIN_DIGEST:
            updater.scheduler.reshard_join()
            return  # it serves the version that it did before
        elif request.load_format in (SWITCH, ROLL_BACK):
            _swap(updater.scheduler, request.load_format, version)
        elif (request.load_format or "").startswith("{"):
            options = _options(request.load_format)
            if options.pop("digest", False):
                updater.scheduler.reshard_digest(**options)
                _check_done(updater.scheduler)
                return
            acts = {
                WRITE: updater.scheduler.reshard_write_deltas,
                ROLL_BACK: updater.scheduler.reshard_roll_back_deltas,
            }
            action = options.pop("action", None)
            if action not in acts:
                raise ReshardError(f"action is {action!r:.80}; it is one of {listed([*acts])}")
            acts[action](version=int(version or 0), **options)
        else:
            verify = request.load_format == VERIFIED
            updater.scheduler.reshard_refit(None if version is None else int(version), verify)
        _check_done(updater.scheduler)
        compat.record_version(updater.scheduler, version)

    return _answer(compat.UPDATED, refitted, lambda: "refitted")


async def check_idle(
    update: Callable[..., Any], manager: Any, request: Any, *args: Any, **kwargs: Any
) -> Any:
    """Update weights, in the server's process; or refuse a refit of a group of ours while requests run. SGLang's
    route would wait for their end before its schedulers hear of the refit, and the trainer would wait, too.

    Deltas, for which no trainer waits, wait for the requests as SGLang's own updates do.
    """
    is_refit = request.group_name == GROUP and request.load_format in (None, VERIFIED, SWITCH, ROLL_BACK)
    if is_refit and not request.abort_all_requests and await compat.is_busy(manager):
        return False, compat.BUSY
    return await update(manager, request, *args, **kwargs)


def close_group(close: Callable[..., Any], updater: Any, request: Any) -> Any:
    """Forget the trainer of a group of ours, or answer whoever asks for the plugin."""
    if request.group_name == ASKED:
        return compat.answer(compat.DESTROYED, True, PRESENT)
    if request.group_name != GROUP:
        return close(updater, request)
    return _answer(compat.DESTROYED, lambda: updater.scheduler.reshard_close(), lambda: "closed")


def _answer(kind: str, action: Callable[[], None], done: Callable[[], str]) -> Any:
    """Return SGLang's answer to a request: what is then `done`, or what the action raises, of which the server must
    not end."""
    try:
        action()
    except Exception as error:
        return compat.answer(kind, False, str(error) or type(error).__name__)
    return compat.answer(kind, True, done())


def _check_done(scheduler: Any) -> None:
    """Raise ReshardError if the stages of a pipeline have only begun: SGLang must not yet tell the version
    as its own."""
    if call_of(scheduler) is not None:
        raise ReshardError(UNDER_WAY)


def _options(text: str) -> dict[str, Any]:
    """Read the options of a call. Raises ReshardError for anything but a JSON object."""
    try:
        options = json.loads(text)
    except ValueError:
        options = None
    if not isinstance(options, dict):
        # The text is not shown: it may have a secret in it, and SGLang logs answers.
        raise ReshardError(
            f"the options of the group {GROUP!r} are not a JSON object, such as {json.dumps({'timeout': 60})}"
        )
    return options
