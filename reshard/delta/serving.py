"""The deltas of a chain into a running engine, through the methods of its workers."""

import asyncio
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from reshard.comm.fronts import (
    EMPTY_CACHES,
    IS_PAUSED,
    Call,
    Calls,
    Front,
    Sent,
    Server,
    front_of,
    naming_the_extension,
)
from reshard.comm.hosts import is_loopback, parsed
from reshard.comm.secret import new_secret
from reshard.core.errors import first_line
from reshard.core.limits import MOST_BUCKET_BYTES, PENDING_BYTES, check_number, check_switch
from reshard.delta.chain import MOST_VERSION, Chain, target_of
from reshard.delta.worker_calls import (
    DROP,
    WAIT,
    WORKERS,
    WRITE,
    applied,
    checked,
    followed,
    followed_back,
    held,
    rolled_back,
)

log = logging.getLogger("reshard")
GROUP_SECONDS = 600.0  # for which workers of several engines wait for each other
# One caller at a time in this process. A second one elsewhere is refused by the workers.
_locks: WeakKeyDictionary[Any, threading.Lock] = WeakKeyDictionary()
_async_locks: WeakKeyDictionary[Any, asyncio.Lock] = WeakKeyDictionary()


def apply_deltas(
    llm: Any,
    chain: str | Path,
    version: int | None = None,
    verify: bool = False,
    pending_bytes: int = PENDING_BYTES,
) -> int:
    """Bring a running engine to a version of a chain, by default the newest; return that version.

    `llm` is a vLLM ``LLM``, or the address of a ``vllm serve`` with ``VLLM_SERVER_DEV_MODE=1``, whose workers
    have `reshard.engines.vllm.worker.RefitExtension`, and which reach the chain by the same path or URL. It holds the
    chain's base or one of its versions: which one is found by the digest of its weights. Every worker fetches and
    checks the deltas, and keeps the changes beside its weights, as long as they take at most `pending_bytes` there; an
    engine goes on serving meanwhile.
    Then changed elements are written in place, by the placement of a refit, while a server is
    paused; the engine refuses to serve until each worker has written its part. Keys and values of other weights are
    forgotten, so a request that was running goes on with those of the new ones. `verify` compares the digest of all
    weights afterward. What the changes have replaced is kept in their memory, for `roll_back`.

    Raises ReshardError, before the first byte, if a delta is missing, altered or out of order, the engine holds
    weights that are in no version up to the one asked for, or an ``LLM`` has requests under way. A server stays
    paused where a write failed.
    """
    check_switch(verify, "verify")
    check_number(pending_bytes, "pending_bytes", MOST_BUCKET_BYTES, 0)
    front = front_of(llm, awaited=False)
    return _sent(llm, front, _calls(front, chain, version, verify, pending_bytes), f"deltas of {chain}")


async def apply_deltas_async(
    llm: Any,
    chain: str | Path,
    version: int | None = None,
    verify: bool = False,
    pending_bytes: int = PENDING_BYTES,
) -> int:
    """Do what `apply_deltas` does, for an ``AsyncLLM``, which is paused while it is written unless it is already."""
    check_switch(verify, "verify")
    check_number(pending_bytes, "pending_bytes", MOST_BUCKET_BYTES, 0)
    front = front_of(llm, awaited=True)
    calls = _calls(front, chain, version, verify, pending_bytes)
    return await _sent_async(llm, front, calls, f"deltas of {chain}")


def roll_back(llm: Any, version: int | None = None) -> int:
    """Have an engine serve again what it served before the last `apply_deltas`, bit for bit; return its version, 0 for
    the base. `llm` is as for that. An engine that would go back to another `version` than a given one refuses.

    Raises ReshardError, and the engine serves on, where it keeps nothing to go back to: what was replaced takes more
    than `pending_bytes`, the engine has gone back already, or something else has written, moved or discarded weights
    since.
    """
    front = front_of(llm, awaited=False)
    return _sent(llm, front, _calls_back(front, version), "a way back")


async def roll_back_async(llm: Any, version: int | None = None) -> int:
    """Do what `roll_back` does, for an ``AsyncLLM``, which is paused while it is written unless it is already."""
    front = front_of(llm, awaited=True)
    return await _sent_async(llm, front, _calls_back(front, version), "a way back")


def _sent(llm: Any, front: Front, calls: Calls, what: str) -> int:
    """Make calls of an engine; return the version that they come to."""
    lock = threading.Lock() if isinstance(llm, str) else _locks.setdefault(llm, threading.Lock())
    with lock, _logged(what) as done, naming_the_extension(front):
        sent = Sent(calls)
        while call := sent.following():
            sent.answers = _made(front, call)
        return done(sent.result)


def _made(front: Front, call: Call) -> Any:
    """Return what is answered to a call that is not awaited."""
    if call[0] == WAIT:
        time.sleep(*call[1])
        return None
    try:
        return front.send(call)
    except Exception as error:
        return _not_emptied(call, error)


class ServerDeltas:
    """A version of a chain on its way into a ``vllm serve``, in two halves; see `apply_deltas`."""

    def __init__(self, url: str, chain: str | Path, version: int, verify: bool, pending_bytes: int) -> None:
        self._front, self._session = Server(url), uuid.uuid4().hex
        self._sent = Sent(_calls(self._front, chain, version, verify, pending_bytes, self._session))
        self._next: Call | None = None
        self._what = f"deltas of {chain}"

    def prepare(self) -> None:
        """Have its workers read and check what leads to the version, while it serves."""
        with naming_the_extension(self._front):
            while (call := self._sent.following()) and call[0] not in (IS_PAUSED, WRITE):
                self._sent.answers = _made(self._front, call)
            self._next = call

    def write(self) -> None:
        """Write it, in a pause, and serve it."""
        with _logged(self._what) as done, naming_the_extension(self._front):
            while self._next:
                self._sent.answers = _made(self._front, self._next)
                self._next = self._sent.following()
            done(self._sent.result)

    def drop(self) -> bool:
        """Have its workers forget what they have read, so that nothing is written any more; return whether they had
        written other weights."""
        answers = checked(self._front.send((DROP, (self._session,))))
        return any(wrote for wrote, _ in answers)


async def _sent_async(llm: Any, front: Front, calls: Calls, what: str) -> int:
    """Do what `_sent` does, for an engine whose calls are awaited."""
    async with _async_locks.setdefault(llm, asyncio.Lock()):
        with _logged(what) as done, naming_the_extension(front):
            sent = Sent(calls)
            while call := sent.following():
                if call[0] == WAIT:
                    await asyncio.sleep(*call[1])
                    continue
                try:
                    sent.answers = await front.send(call)
                except Exception as error:
                    sent.answers = _not_emptied(call, error)
            return done(sent.result)


@contextmanager
def _logged(what: str) -> Iterator[Callable[[int], int]]:
    """Log a line of what comes of a call: the version, which is given to the function and returned by it, or the
    failure."""
    start = time.perf_counter()

    def done(version: int) -> int:
        seconds = time.perf_counter() - start
        log.info("reshard: the engine serves version %d by %s, after %.3f s", version, what, seconds)
        return version

    try:
        yield done
    except BaseException as error:
        seconds = time.perf_counter() - start
        log.warning("reshard: %s failed after %.1f s: %s", what, seconds, first_line(error))
        raise


def _not_emptied(call: Call, error: Exception) -> bool:
    """Return what an error of a call answers: that caches were not emptied. Raises the error of any other call."""
    if call[0] != EMPTY_CACHES:
        raise error
    log.warning("vLLM did not empty its prefix cache: %s", error)
    return False


def _calls(
    front: Front,
    chain: str | Path,
    version: int | None,
    verify: bool,
    pending_bytes: int,
    session: str | None = None,
) -> Calls:
    """Yield the calls that bring an engine to a version of a chain, as one `session`; return the version."""
    session = session or uuid.uuid4().hex
    with Chain(chain) as opened:
        target, after = target_of(opened, version)
        [workers, address] = checked((yield WORKERS, ()))[0]
        if front.engines == 1:
            yield from applied(opened, target, after, session, verify, pending_bytes, workers, front)
        else:
            # Only the first engine's workers are heard: all meet, and succeed or fail together.
            meeting = _meeting(front, workers, address)
            options = str(chain), target, verify, pending_bytes
            yield from followed(meeting, session, options, workers, front)
    return target


def _calls_back(front: Front, version: int | None) -> Calls:
    """Yield the calls that bring an engine back to what it served before; return its version."""
    if version is not None:
        check_number(version, "version", MOST_VERSION, 0)
    [workers, address] = checked((yield WORKERS, ()))[0]
    if front.engines == 1:
        return (yield from rolled_back(version, workers, front))
    meeting = _meeting(front, workers, address)
    return (yield from held(front, followed_back((*meeting, version), workers)))


def _meeting(front: Front, workers: int, address: str) -> tuple[Any, ...]:
    """Return the arguments by which the workers of several engines meet."""
    secret = None if is_loopback(parsed(address)[0]) else new_secret()
    return address, front.engines * workers, GROUP_SECONDS, secret
