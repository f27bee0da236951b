"""The deltas of a chain into a running engine, through the methods of its workers."""

import asyncio
import json
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from reshard.comm.fronts import EMPTY_CACHES, Call, Calls, Front, Sent, front_of, naming_the_extension
from reshard.comm.group import RefitGroup
from reshard.comm.hosts import is_loopback, parsed
from reshard.comm.secret import new_secret
from reshard.core.errors import ReshardError, UntouchedError, first_line
from reshard.core.limits import MOST_BUCKET_BYTES, PENDING_BYTES, check_number, check_switch
from reshard.delta.chain import MOST_VERSION, Chain
from reshard.delta.worker_calls import (
    ROLL_BACK,
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
    engine goes on serving meanwhile, unless it is one of several with data parallelism.
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
            if call[0] == WAIT:
                time.sleep(*call[1])
                continue
            try:
                sent.answers = front.send(call)
            except Exception as error:
                sent.answers = _not_emptied(call, error)
        return done(sent.result)


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


def apply_deltas_in_group(
    group: RefitGroup,
    worker: Any,
    chain: str | Path,
    version: int | None = None,
    verify: bool = False,
    pending_bytes: int = PENDING_BYTES,
) -> bool:
    """Do what `apply_deltas` does, called by each of the workers of an engine, or of several of one model: they are the
    members of `group`, each gives itself (`reshard.engines.workers.delta_methods.DeltaMethods`), and all the
    same version. Return whether anything was written: then the caller empties the prefix cache."""
    check_switch(verify, "verify")
    with group.transaction("deltas"), Chain(chain) as opened:
        session = uuid.uuid4().hex
        target, after = _target(opened, version)
        if len(set(group.gather("target", f"{target} {after}".encode()))) > 1:
            raise ReshardError(
                f"workers of this engine find different chains at {chain}: give a place that is the same for all"
            )
        calls = applied(opened, target, after, session, verify, pending_bytes, group.size)
        changed: bool = _made_in_group(group, worker, calls, session)
    return changed


def roll_back_in_group(group: RefitGroup, worker: Any, version: int | None = None) -> int:
    """Do what `roll_back` does, called as `apply_deltas_in_group`; return the version. The caller empties the prefix
    cache."""
    with group.transaction("a way back"):
        reached: int = _made_in_group(group, worker, rolled_back(version, group.size), None)
    return reached


def _made_in_group(group: RefitGroup, worker: Any, calls: Calls, session: str | None) -> Any:
    """Return what calls come to that each member of a group makes of its own worker, and answers all."""
    sent, number, wrote = Sent(calls), 0, False
    try:
        while call := sent.following():
            method, arguments = call
            wrote |= method in (WRITE, ROLL_BACK)
            answer = json.dumps(getattr(worker, method)(*arguments)).encode()
            sent.answers = [json.loads(each) for each in group.gather(f"answers/{number}", answer)]
            number += 1
        group.commit()
    except UntouchedError:
        raise
    except BaseException:
        if wrote:  # others may not have
            worker.reshard_delta_invalidate(session)
        raise
    return sent.result


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


def _calls(front: Front, chain: str | Path, version: int | None, verify: bool, pending_bytes: int) -> Calls:
    """Yield the calls that bring an engine to a version of a chain; return the version."""
    with Chain(chain) as opened:
        target, after = _target(opened, version)
        [workers, address] = checked((yield WORKERS, ()))[0]
        if front.engines == 1:
            session = uuid.uuid4().hex
            yield from applied(opened, target, after, session, verify, pending_bytes, workers, front)
        else:
            # Only the first engine's workers are heard: all meet, and succeed or fail together.
            meeting = _meeting(front, workers, address)
            yield from held(front, followed((*meeting, str(chain), target, verify, pending_bytes), workers))
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


def _target(chain: Chain, version: int | None) -> tuple[int, str]:
    """Return the version that is asked for, 0 for the base, and the digest of its weights."""
    deltas = chain.deltas(version)
    return (deltas[-1].version, deltas[-1].after) if deltas else (0, chain.base.digest)
