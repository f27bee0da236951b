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

from reshard.comm.fronts import (
    EMPTY_CACHES,
    IS_PAUSED,
    PAUSE,
    RESUME,
    Call,
    Calls,
    Front,
    Sent,
    front_of,
    naming_the_extension,
)
from reshard.comm.group import RefitGroup
from reshard.comm.hosts import is_loopback, parsed
from reshard.comm.secret import new_secret
from reshard.core.errors import ReshardError, first_line
from reshard.core.limits import check_switch
from reshard.delta.chain import Chain
from reshard.delta.manifests import Base, Delta
from reshard.digests.numbers import text_of, total_of
from reshard.digests.parts import numbers_of

log = logging.getLogger("reshard")
GROUP_SECONDS = 600.0  # for which workers of several engines wait for each other
# One caller at a time in this process. A second one elsewhere is refused by the workers.
_locks: WeakKeyDictionary[Any, threading.Lock] = WeakKeyDictionary()
_async_locks: WeakKeyDictionary[Any, asyncio.Lock] = WeakKeyDictionary()


class UntouchedError(ReshardError):
    """A refusal of workers that all serve on, as before."""


def apply_deltas(llm: Any, chain: str | Path, version: int | None = None, verify: bool = False) -> int:
    """Bring a running engine to a version of a chain, by default the newest; return that version.

    `llm` is a vLLM ``LLM``, or the address of a ``vllm serve`` with ``VLLM_SERVER_DEV_MODE=1``, whose workers
    have `reshard.engines.vllm.worker.RefitExtension`, and which reach the chain by the same path or URL. It holds the
    chain's base or one of its versions: which one is found by the digest of its weights. Every worker fetches and
    checks the deltas. Then changed elements are written in place, by the placement of a refit, while a server is
    paused; the engine refuses to serve until each worker has written its part. Keys and values of other weights are
    forgotten, so a request that was running goes on with those of the new ones. `verify` compares the digest of all
    weights afterward.

    Raises ReshardError, before the first byte, if a delta is missing, altered or out of order, the engine holds
    weights that are in no version up to the one asked for, or an ``LLM`` has requests under way. A server stays
    paused where a write failed.
    """
    check_switch(verify, "verify")
    front = front_of(llm, awaited=False)
    lock = threading.Lock() if isinstance(llm, str) else _locks.setdefault(llm, threading.Lock())
    with lock, _logged(chain) as done, naming_the_extension(front):
        calls = Sent(_calls(front, chain, version, verify))
        while call := calls.following():
            try:
                calls.answers = front.send(call)
            except Exception as error:
                calls.answers = _not_emptied(call, error)
        return done(calls.result)


async def apply_deltas_async(
    llm: Any, chain: str | Path, version: int | None = None, verify: bool = False
) -> int:
    """Do what `apply_deltas` does, for an ``AsyncLLM``, which is paused while it is written unless it is already."""
    check_switch(verify, "verify")
    front = front_of(llm, awaited=True)
    async with _async_locks.setdefault(llm, asyncio.Lock()):
        with _logged(chain) as done, naming_the_extension(front):
            calls = Sent(_calls(front, chain, version, verify))
            while call := calls.following():
                try:
                    calls.answers = await front.send(call)
                except Exception as error:
                    calls.answers = _not_emptied(call, error)
            return done(calls.result)


def apply_deltas_in_group(
    group: RefitGroup, worker: Any, chain: str | Path, version: int | None = None, verify: bool = False
) -> bool:
    """Do what `apply_deltas` does, called by each of the workers of an engine, or of several of one model: they are the
    members of `group`, each gives itself (`reshard.engines.workers.delta_methods.DeltaMethods`), and all the
    same version. Return whether anything was written: then the caller empties the prefix cache."""
    check_switch(verify, "verify")
    with group.transaction("deltas"), Chain(chain) as opened:
        session, number, wrote = uuid.uuid4().hex, 0, False
        target, after = _target(opened, version)
        if len(set(group.gather("target", f"{target} {after}".encode()))) > 1:
            raise ReshardError(
                f"workers of this engine find different chains at {chain}: give a place that is the same for all"
            )
        calls = Sent(_applied(opened, target, after, session, verify, group.size))
        try:
            while call := calls.following():
                method, arguments = call
                wrote |= method == "reshard_delta_write"
                answer = json.dumps(getattr(worker, method)(*arguments)).encode()
                calls.answers = [json.loads(each) for each in group.gather(f"answers/{number}", answer)]
                number += 1
            group.commit()
        except BaseException:
            if wrote:  # others may not have
                worker.reshard_delta_invalidate(session)
            raise
    changed: bool = calls.result
    return changed


@contextmanager
def _logged(chain: str | Path) -> Iterator[Callable[[int], int]]:
    """Log a line of what comes of a call: the version, which is given to the function and returned by it, or the
    failure."""
    start = time.perf_counter()

    def done(version: int) -> int:
        log.info(
            "reshard: the engine serves version %d of %s, after %.3f s",
            version,
            chain,
            time.perf_counter() - start,
        )
        return version

    try:
        yield done
    except BaseException as error:
        reason = first_line(error)
        log.warning(
            "reshard: deltas of %s failed after %.1f s: %s", chain, time.perf_counter() - start, reason
        )
        raise


def _not_emptied(call: Call, error: Exception) -> bool:
    """Return what an error of a call answers: that caches were not emptied. Raises the error of any other call."""
    if call[0] != EMPTY_CACHES:
        raise error
    log.warning("vLLM did not empty its prefix cache: %s", error)
    return False


def _calls(front: Front, chain: str | Path, version: int | None, verify: bool) -> Calls:
    """Yield the calls that bring an engine to a version of a chain; return the version."""
    with Chain(chain) as opened:
        target, after = _target(opened, version)
        answers = yield "reshard_delta_workers", ()
        [workers, address] = _checked(answers, len(answers))[0]
        if front.engines == 1:
            yield from _applied(opened, target, after, uuid.uuid4().hex, verify, workers, front)
        else:
            # Only the first engine's workers are heard: all meet, and succeed or fail together.
            secret = None if is_loopback(parsed(address)[0]) else new_secret()
            options = address, front.engines * workers, str(chain), target, verify, GROUP_SECONDS, secret
            yield from _held(front, _followed(options, workers))
    return target


def _followed(options: tuple[Any, ...], workers: int) -> Calls:
    """Yield the call of workers that meet, and bring themselves to a version; return whether they wrote anything."""
    answers = yield "reshard_delta_follow", options
    return any(_checked(answers, workers))


def _target(chain: Chain, version: int | None) -> tuple[int, str]:
    """Return the version that is asked for, 0 for the base, and the digest of its weights."""
    deltas = chain.deltas(version)
    return (deltas[-1].version, deltas[-1].after) if deltas else (0, chain.base.digest)


def _checked(answers: Any, workers: int) -> list[Any]:
    """Return what workers answer. Raises ReshardError if one has not answered, or could not."""
    if not isinstance(answers, list) or len(answers) != workers:
        heard = len(answers) if isinstance(answers, list) else 0
        raise ReshardError(
            f"{heard} of the engine's {workers} workers have answered, so what the others hold is not known: load the "
            f"base into it again"
        )
    errors = [answer for answer in answers if isinstance(answer, dict)]
    if errors:
        kind = UntouchedError if all(error.get("untouched") for error in errors) else ReshardError
        raise kind(str(errors[0].get("error")))
    return answers


def _applied(
    chain: Chain,
    target: int,
    after: str,
    session: str,
    verify: bool,
    workers: int,
    front: Front | None = None,
) -> Calls:
    """Yield the calls of workers that bring them to a version whose weights have a digest, and those of the `front`,
    where there is one, around what is written; return whether anything was."""
    place = chain.where
    held = _digest(chain.base, _checked((yield "reshard_delta_digests", (place, session)), workers))
    if held != after:
        _check_forward(chain, chain.deltas(target), held, target)
        prepared = yield "reshard_delta_prepare", (session, held, target, after)
        _checked(prepared, workers)
    writing = _written(chain, target, after, session, verify, workers)
    if front is None or held == after:
        yield from writing
    else:
        yield from _held(front, writing)
    return held != after


def _check_forward(chain: Chain, deltas: list[Delta], held: str, target: int) -> None:
    """Raise ReshardError unless weights with digest `held` are the base or a version before the target."""
    if held in {chain.base.digest, *(delta.after for delta in deltas)}:
        return
    newer = [delta.version for delta in chain.deltas() if delta.after == held]
    if newer:
        raise ReshardError(
            f"the engine holds version {newer[-1]} of {chain.where}, and goes forward only: to go back to "
            f"version {target}, load the base or an older version into it first"
        )
    raise ReshardError(
        f"the engine holds weights with digest {held}, which are neither the base of {chain.where} ({chain.base.name}) "
        f"nor a version up to {target}: load the base into it first"
    )


def _written(chain: Chain, target: int, after: str, session: str, verify: bool, workers: int) -> Calls:
    """Yield the calls that write what was prepared, and compare the digest if asked to `verify`; return True."""
    written = yield "reshard_delta_write", (session, target, after)
    try:
        _checked(written, workers)
    except UntouchedError:
        if all(isinstance(answer, dict) for answer in written):
            raise
        yield "reshard_delta_invalidate", (session,)  # others have written theirs
        raise ReshardError(str(next(each["error"] for each in written if isinstance(each, dict)))) from None
    except ReshardError:
        yield "reshard_delta_invalidate", (session,)
        raise
    if verify:
        anew = _checked((yield "reshard_delta_digests", (chain.where, session, True)), workers)
        if _digest(chain.base, anew) != after:
            yield "reshard_delta_invalidate", (session,)
            raise ReshardError(
                f"the engine does not hold version {target} of {chain.where}: load the base anew"
            )
    return True


def _held(front: Front, writing: Calls) -> Calls:
    """Yield the calls of `writing` while no request runs, and, where these wrote anything, the one after which nothing
    of other weights is in a cache. Where a write fails the engine stays paused."""
    is_ours = False
    if front.pauses:
        if not (yield IS_PAUSED, ()):
            yield PAUSE, ()
            is_ours = True
    elif not (yield EMPTY_CACHES, (False, False)):
        raise ReshardError(
            "this LLM has requests under way, whose keys and values are of the weights that it has now: "
            "call again when they have ended"
        )
    try:
        wrote = yield from writing
    except UntouchedError:
        if is_ours:
            yield RESUME, ()
        raise
    except ReshardError as error:
        if not is_ours:
            raise
        raise ReshardError(
            f"{error} (it stays paused: POST /resume, or resume_generation(), ends that)"
        ) from error
    if wrote and front.pauses and not (yield IS_PAUSED, ()):
        yield "reshard_delta_invalidate", (None,)
        raise ReshardError(
            "somebody resumed this engine while it was written, so requests may have mixed two versions, "
            "and it does not serve: load the base into it again"
        )
    # Requests that were running begin again, with the tokens that they have.
    if wrote and (yield EMPTY_CACHES, (True, front.has_connector)) is not True:
        yield "reshard_delta_invalidate", (None,)
        raise ReshardError(
            "the engine did not forget keys and values of the weights that it had before, so it does not "
            "serve: load the base into it again"
        )
    if is_ours:
        yield RESUME, ()


def _digest(base: Base, answers: list[Any]) -> str:
    """Return the digest of an engine's weights, of what all of its workers say of their boxes. Raises ReshardError if
    they lack a part, or replicas of one differ."""
    hint = f"a chain reaches engines that hold all tensors of its base; load {base.name} into it again"
    return text_of(total_of(numbers_of(base.tensors, answers, "the engine", hint).values()))
