"""The deltas of a chain into a running engine, through the methods of its workers."""

import json
import re
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from inspect import iscoroutinefunction
from pathlib import Path
from typing import Any

from reshard.comm.group import RefitGroup
from reshard.comm.http import EngineServer
from reshard.core.errors import ReshardError
from reshard.core.limits import check_switch
from reshard.delta.chain import Chain
from reshard.delta.digest import digest_text, digest_total
from reshard.delta.manifests import Base

CALL_SECONDS = 3600.0  # for a server to fetch and write what changed
EXTENSION = "reshard.engines.vllm.worker.RefitExtension"
START_IT = f"start it with VLLM_SERVER_DEV_MODE=1 and --worker-extension-cls {EXTENSION}"
# How vLLM says, alone and with several processes, that its workers have no such method.
_LACKS = re.compile(r"has no attribute 'reshard_|'reshard_\w+' is not implemented")
# What a worker says of its weights: their digest, or (name, rows and columns, sum) of each box that it holds.
Answer = str | list[tuple[str, list[int], int]]
# A method of all workers, and its arguments; or RESET_PREFIX_CACHE, which is the engine's own.
Call = tuple[str, tuple[Any, ...]]
RESET_PREFIX_CACHE = "reset_prefix_cache"


def apply_deltas(llm: Any, chain: str | Path, version: int | None = None, verify: bool = False) -> int:
    """Bring a running engine to a version of a chain, by default the newest; return that version.

    `llm` is a vLLM ``LLM``, or the address of a ``vllm serve`` with ``VLLM_SERVER_DEV_MODE=1``, whose workers
    have `reshard.engines.vllm.worker.RefitExtension`, and which reach the chain by the same path or URL. It holds the
    chain's base or one of its versions: which one is found by the digest of its weights, and afterward
    remembered, until something else writes them. Elements that changed are written in place, by the
    placement of a refit, once every worker has fetched and checked all; the engine refuses to serve until each
    has written its part. Then its prefix cache is emptied. `verify` compares the digest of all weights afterward.

    Raises ReshardError, before the first byte, if a delta is missing, altered or out of order, or the engine
    holds weights that are in no version up to the one asked for.
    """
    server = isinstance(llm, str)
    llm = _VllmServer(llm, CALL_SECONDS, START_IT) if server else _checked_llm(llm, awaited=False)
    calls = _Calls(chain, version, verify)
    while call := calls.following():
        with _naming_the_extension(START_IT if server else f"give LLM worker_extension_cls={EXTENSION!r}"):
            calls.answers = _send(llm, call)
    return calls.version


async def apply_deltas_async(
    llm: Any, chain: str | Path, version: int | None = None, verify: bool = False
) -> int:
    """Do what `apply_deltas` does, for an ``AsyncLLM``. Pause generation around it where requests are running."""
    llm = _checked_llm(llm, awaited=True)
    calls = _Calls(chain, version, verify)
    while call := calls.following():
        with _naming_the_extension(f"give AsyncEngineArgs worker_extension_cls={EXTENSION!r}"):
            calls.answers = await _send(llm, call)
    return calls.version


def apply_deltas_in_group(
    group: RefitGroup, worker: Any, chain: str | Path, version: int | None = None, verify: bool = False
) -> int:
    """Do what `apply_deltas` does, called by each of an engine's workers: they are the members of `group`, each
    gives itself (`reshard.engines.delta_methods.DeltaMethods`), and all the same version. The engine empties its
    prefix cache itself."""
    with group.transaction("deltas"):
        calls, number = _Calls(chain, version, verify), 0
        while call := calls.following():
            method, arguments = call
            if method == RESET_PREFIX_CACHE:
                continue
            answer = json.dumps(getattr(worker, method)(*arguments)).encode()
            calls.answers = [json.loads(each) for each in group.gather(f"answers/{number}", answer)]
            number += 1
        group.commit()
    return calls.version


def _checked_llm(llm: Any, awaited: bool) -> Any:
    """Return vLLM's ``LLM``, or its ``AsyncLLM`` where calls are `awaited`. Raises ReshardError for another
    object."""
    if not hasattr(llm, "collective_rpc") or not hasattr(llm, RESET_PREFIX_CACHE):
        raise ReshardError(
            f"llm is a {type(llm).__name__}: give a vLLM LLM, or the address of a vllm serve; an SGLang takes "
            f"reshard.engines.sglang.calls.apply_deltas"
        )
    if iscoroutinefunction(llm.collective_rpc) != awaited:
        are, instead = ("are not", "call apply_deltas") if awaited else ("are", "await apply_deltas_async")
        raise ReshardError(f"the calls of this {type(llm).__name__} {are} awaited: {instead}")
    return llm


def _send(llm: Any, call: Call) -> Any:
    """Send a call to all workers; return what they answer, which is awaited of an ``AsyncLLM``."""
    method, arguments = call
    if method == RESET_PREFIX_CACHE:
        return llm.reset_prefix_cache()
    return llm.collective_rpc(method, args=arguments)


@contextmanager
def _naming_the_extension(advice: str) -> Iterator[None]:
    """Have vLLM's error, where its workers have no methods of ours, say how they get them."""
    try:
        yield
    except Exception as error:  # each of vLLM's ways to run workers raises another one
        if not _LACKS.search(str(error)):
            raise
        raise ReshardError(f"this vLLM's workers have no extension of reshard: {advice}") from error


class _VllmServer(EngineServer):
    """The calls of an ``LLM``, by the routes of a ``vllm serve``."""

    def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        answer = self._call("POST", "collective_rpc", {"method": method, "args": list(args)})
        results = answer.get("results") if isinstance(answer, dict) else None
        if not isinstance(results, list):
            raise ReshardError(f"{self.url} answers /collective_rpc without results")
        return results

    def reset_prefix_cache(self) -> None:
        self._call("POST", "reset_prefix_cache", {})


class _Calls:
    """The calls that bring an engine to a version of a chain, in order: each depends on the `answers` to the
    one before. `version` is what the engine has after the last."""

    def __init__(self, chain: str | Path, version: int | None, verify: bool) -> None:
        check_switch(verify, "verify")
        self.answers: Any = None
        self.version = 0
        self._calls = _calls(chain, version, verify)

    def following(self) -> Call | None:
        """Return the next call; None after the last. Raises ReshardError if the engine cannot be brought there."""
        try:
            return self._calls.send(self.answers)
        except StopIteration as end:
            self.version = end.value
            return None


def _checked(answers: list[Any]) -> list[Any]:
    """Return what workers answer. Raises ReshardError for the first that could not."""
    for answer in answers:
        if isinstance(answer, dict):
            raise ReshardError(str(answer.get("error")))
    return answers


def _calls(chain: str | Path, version: int | None, verify: bool) -> Generator[Call, Any, int]:
    """Yield the calls of all workers, which are sent the list of what these answer; return the version."""
    place = str(chain)
    with Chain(chain) as opened:
        deltas, base = opened.deltas(version), opened.base
        held = _digest(base, _checked((yield "reshard_delta_digests", (place,))), opened.where)
        versions = {base.digest: 0, **{delta.after: delta.version for delta in deltas}}
        target, digest = (deltas[-1].version, deltas[-1].after) if deltas else (0, base.digest)
        if held not in versions:
            newer = [delta.version for delta in opened.deltas() if delta.after == held]
            if newer:
                raise ReshardError(
                    f"the engine holds version {newer[-1]} of {opened.where}, and goes forward only: to go back to version {target}, "
                    f"load the base or an older version into it first"
                )
            raise ReshardError(
                f"the engine holds weights with digest {held}, which are neither the base of {opened.where} ({base.name}) "
                f"nor a version up to {target}: load the base into it first"
            )
        if held != digest:
            _checked((yield "reshard_delta_prepare", (held, target, digest)))
        if target:
            written = yield "reshard_delta_write", (target, digest)
            if any(isinstance(answer, dict) for answer in written):
                # Others have written theirs, and must not serve beside one that does not.
                yield "reshard_delta_invalidate", ()
            _checked(written)
        if held != digest:
            yield RESET_PREFIX_CACHE, ()
        if verify:
            anew = _checked((yield "reshard_delta_digests", (place, True)))
            if _digest(base, anew, opened.where) != digest:
                yield "reshard_delta_invalidate", ()
                raise ReshardError(
                    f"the engine does not hold version {target} of {opened.where}: load the base anew"
                )
        return target


def _digest(base: Base, answers: list[Answer], chain: str) -> str:
    """Return the digest of an engine's weights, of what all of its workers say. Raises ReshardError if they
    lack a part, or replicas of one differ."""
    texts = {answer for answer in answers if isinstance(answer, str)}
    boxes = [answer for answer in answers if not isinstance(answer, str)]
    if len(texts) == 1 and not boxes:
        return texts.pop()
    if texts:
        raise ReshardError(
            f"the engine's workers hold different versions of {chain}: load the base into it again"
        )
    sums: dict[tuple[str, ...], int] = {}
    elements = dict.fromkeys(base.tensors, 0)
    for name, rows, value in (part for parts in boxes for part in parts):
        key = (name, str(list(rows)))
        if key not in sums:
            start, stop, _, columns = rows
            elements[name] += (stop - start) * columns
        if sums.setdefault(key, value) != value:
            raise ReshardError(
                f"the engine's workers hold different numbers of {name}: load the base into it again"
            )
    for name, info in base.tensors.items():
        if elements[name] != info.rows * info.columns:
            raise ReshardError(
                f"the engine holds {elements[name]:,} of the {info.rows * info.columns:,} elements of {name}, or parts of "
                f"it that overlap: a chain reaches engines that hold all tensors of its base"
            )
    return digest_text(digest_total(sums.values()))
