"""The switch of an engine to a version that was begun, by its client; what becomes of its requests, and of what it has
computed from the weights before.

In vLLM's protocol both are steps of one update, whose end tells vLLM the version. The switch names what it switches to
by the ticket with which that was begun: a call that comes late, of one that was given up, switches to nothing.
"""

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from threading import Event
from typing import Any

from reshard.comm.background import in_background
from reshard.core.errors import OptionError, ReshardError
from reshard.engines.workers.actions import BEGIN, DROP, ROLL_BACK, SWITCH
from reshard.integrations.members import finish
from reshard.integrations.sync import Calls

GO_ON, FINISH, ABORT = REQUESTS = ("go on", "finish", "abort")
KEEP, RESET = CACHES = ("keep", "reset")
ANSWER_SECONDS = 5.0  # that an engine which has not switched may take to say what it serves
PAUSES = {GO_ON: "keep", FINISH: "wait", ABORT: "abort"}  # of vLLM


@dataclass(frozen=True)
class Switching:
    """The way in which engines switch to new weights. Running `requests` ``go on`` with these, ``finish`` with the old
    ones first, or are dropped (``abort``); `caches` are kept or reset, after which requests that go on are computed
    anew as far as they have come."""

    requests: str = GO_ON
    caches: str = KEEP

    def checked(self) -> "Switching":
        """Return this. Raises OptionError for a value that is none of those above."""
        for name, value, known in (("requests", self.requests, REQUESTS), ("caches", self.caches, CACHES)):
            if value not in known:
                raise OptionError(f"{name} is {value!r:.80}; it is one of {', '.join(known)}")
        return self

    @property
    def pauses(self) -> bool:
        """True if an engine is paused for it."""
        return (self.requests, self.caches) != (GO_ON, KEEP)


def begin(client: Any, info: dict[str, Any]) -> None:
    """Have an engine take part in a refit that is begun; `info` are the fields of
    `reshard.integrations.vllm.worker.ReshardUpdateInfo`."""
    client.start_weight_update()
    client.update_weights(info | {"action": BEGIN})


def switch(
    client: Any, version: int, ticket: str | None, how: Switching, is_over: Callable[[], bool] = lambda: False
) -> None:
    """Have an engine switch to the version that was begun with a ticket, unless it `is_over`, since it was given up:
    then it goes back where it has switched by then. Raises ReshardError if it cannot, or has not done all of it: then
    `roll_back` makes sure of what it serves."""
    try:
        try:
            if how.pauses:
                client.pause(PAUSES[how.requests], clear_cache=False)
            if is_over():
                raise ReshardError("it was paused too late to switch with the others")
            client.update_weights(_info(SWITCH, version, ticket))
            if is_over():
                client.update_weights(_info(ROLL_BACK, ticket=ticket))
                finish(client, None)  # the version that it tells is still the one before
                raise ReshardError("it switched too late to do so with the others, and went back")
            finish(client, str(version))
            if how.caches == RESET and hasattr(client, "reset_prefix_cache"):
                client.reset_prefix_cache()
        finally:
            if how.pauses:
                client.resume()
    except Exception:
        with suppress(Exception):
            drop(client, ticket, is_over)  # else vLLM's update goes on
        raise


def drop(client: Any, ticket: str | None, is_over: Callable[[], bool] = lambda: False) -> None:
    """Have an engine forget that it was to switch to what was begun with a ticket, and end its update, unless it
    `is_over` by then: others have gone on, and the update may be theirs."""
    client.update_weights(_info(DROP, ticket=ticket))
    if not is_over():
        finish(client, None)


def roll_back(
    client: Any, version: int | None, ticket: str | None, is_over: Callable[[], bool] = lambda: False
) -> None:
    """Have an engine serve the version again that it served before it switched to what was begun with a ticket. Where
    it `is_over`, since it was given up, it does not go back any more, or its version is not named: that may be another
    by then."""
    client.start_weight_update()
    if not is_over():
        client.update_weights(_info(ROLL_BACK, version, ticket))
    finish(client, None if version is None or is_over() else str(version))


def roll_back_all(
    clients: Mapping[str, Any], version: int | None, ticket: str | None, seconds: float
) -> dict[str, str]:
    """Have engines, by name, serve the version again that they served before they switched to what was begun with a
    ticket. Return why some have failed, or were late: these do not go back any more. Each may take so many seconds."""
    over = Event()
    calls = {name: partial(roll_back, one, version, ticket, over.is_set) for name, one in clients.items()}
    failed = _called(calls, seconds)
    over.set()
    return failed


def switch_all(
    clients: Mapping[str, Any],
    version: int,
    ticket: str | None,
    before: int | None,
    how: Switching,
    seconds: float,
) -> tuple[int | None, dict[str, str]]:
    """Have all engines, by name, switch to a version that was begun with a `ticket`, or none: where one that answers
    has not, or not all the way, all go back to the version `before`. Return the version that the fleet has then, and
    why single engines have failed; who does not answer any more keeps nobody back. Each call may take so many
    seconds."""
    over = Event()
    calls = {
        name: partial(switch, client, version, ticket, how, over.is_set) for name, client in clients.items()
    }
    failed = _called(calls, seconds)
    over.set()
    answering = [name for name in clients if name not in failed or _answers(clients[name], seconds)]
    if not any(name in failed for name in answering):
        return version, failed
    # Also those that have failed: how far they had come is not known.
    back = roll_back_all({name: clients[name] for name in answering}, before, ticket, seconds)
    return before, back | failed


def _answers(client: Any, seconds: float) -> bool:
    """Return False if an engine does not say what it serves; True too if its client cannot ask."""
    if not hasattr(client, "serves"):
        return True
    answer = in_background(client.serves)
    wait([answer], min(seconds, ANSWER_SECONDS))
    return answer.done() and answer.exception() is None


def _called(calls: Mapping[str, Callable[[], None]], seconds: float) -> dict[str, str]:
    """Make calls side by side; return why some have failed, or were late, by name."""
    return Calls({name: in_background(call) for name, call in calls.items()}).errors(seconds)


def _info(action: str, version: int | None = None, ticket: str | None = None) -> dict[str, Any]:
    return {"version": version, "verify": False, "ticket": ticket, "action": action}


def check_switches(clients: Iterable[Any], how: Switching) -> None:
    """Raise ReshardError if a client cannot pause its engine so."""
    for client in clients:
        if how.pauses and not hasattr(client, "pause"):
            raise ReshardError(
                f"{type(client).__name__} cannot pause its engine: switch with requests='{GO_ON}' and "
                f"caches='{KEEP}'"
            )
