"""The digest of the weights that a running engine serves, of what each of its workers holds."""

from inspect import iscoroutinefunction
from typing import Any

from reshard.comm.fronts import Calls, Front, Sent, Server, naming_the_extension
from reshard.comm.hosts import is_loopback, parsed
from reshard.comm.secret import new_secret
from reshard.core.dtypes import DTYPES
from reshard.core.errors import ReshardError
from reshard.digests.parts import numbers_of
from reshard.digests.result import Digest
from reshard.storage.io.casts import float_dtype
from reshard.storage.io.streams import TensorInfo

MEET_SECONDS = 120.0  # for which workers of several engines wait for each other
_HINT = "refit it, or load its weights again"


def digest_of_engine(llm: Any, dtype: object = None) -> Digest:
    """Return the digest of what a running vLLM serves: an ``LLM``, or the address of a ``vllm serve`` with
    ``VLLM_SERVER_DEV_MODE=1``, whose workers have `reshard.engines.vllm.worker.RefitExtension`.

    Each worker reads the weights where they lie, of all engines of the model (data parallel). Raises ReshardError if a
    worker does not answer, serves a form that no checkpoint has, or replicas or engines differ.
    """
    front = plain_front(llm, "await reshard.engines.digest.digest_of_engine_async(llm)")
    with naming_the_extension(front):
        calls = Sent(_calls(front, dtype, llm))
        while call := calls.following():
            calls.answers = front.send(call)
    digest: Digest = calls.result
    return digest


def plain_front(llm: Any, instead: str) -> Front:
    """Return the front of an ``LLM`` or of a server by its address. Raises ReshardError, saying what to do `instead`,
    for an engine whose calls are awaited."""
    if iscoroutinefunction(getattr(llm, "collective_rpc", None)):
        raise ReshardError(f"the calls of this {type(llm).__name__} are awaited: {instead}")
    return Server(llm) if isinstance(llm, str) else Front(llm)


async def digest_of_engine_async(llm: Any, dtype: object = None) -> Digest:
    """Do what `digest_of_engine` does, for an ``AsyncLLM``."""
    front = Front(llm)
    with naming_the_extension(front):
        calls = Sent(_calls(front, dtype, llm))
        while call := calls.following():
            calls.answers = await front.send(call)
    digest: Digest = calls.result
    return digest


def _calls(front: Front, dtype: object, llm: Any) -> Calls:
    """Yield the calls by which an engine's workers say what they hold; return its digest."""
    target = float_dtype(dtype)
    name, where = None if target is None else target.name, llm if isinstance(llm, str) else "the engine"
    workers, address = 0, ""
    if front.engines > 1:  # of which only the first one's workers are heard: all of them meet
        [workers, address] = checked((yield "reshard_delta_workers", ()))[0]
    if not address:
        digest = digest_of_answers(checked((yield "reshard_digest", (name,))), name, where)
        if front.engines > 1:
            digest.notices.append(
                f"of {front.engines} engines of this model, the first one's workers were heard"
            )
        return digest
    secret = None if is_loopback(parsed(address)[0]) else new_secret()
    options = address, front.engines * workers, name, MEET_SECONDS, secret
    checked((yield "reshard_digest_begin", options))
    answers = checked((yield "reshard_digest_end", (address,)))[0]
    return _digest_of_engines(
        [answers[i : i + workers] for i in range(0, len(answers), workers)], name, where
    )


def _digest_of_engines(engines: list[list[Any]], dtype: str | None, where: str) -> Digest:
    """Return the digest of several engines of one model, of what their workers answer. Raises ReshardError, naming the
    engine, if one holds other numbers than an earlier one."""
    first: dict[tuple[Any, ...], tuple[int, int]] = {}
    for index, answers in enumerate(engines):
        for name, rows, value in (part for answer in checked(answers) for part in answer["parts"]):
            before, expected = first.setdefault((name, *rows), (index, value))
            if value != expected and before != index:
                raise ReshardError(
                    f"engine {index} of {where} holds other numbers of {name} than engine {before}: {_HINT}"
                )
    return digest_of_answers([answer for answers in engines for answer in answers], dtype, where)


def checked(answers: Any) -> list[Any]:
    """Return what workers answer. Raises ReshardError if one has not answered, or could not."""
    if not isinstance(answers, list) or not answers:
        raise ReshardError("no worker of the engine has answered")
    for answer in answers:
        if answer is None or (isinstance(answer, dict) and "error" in answer):
            raise ReshardError("a worker has not answered" if answer is None else str(answer["error"]))
    return answers


def digest_of_answers(answers: list[Any], dtype: str | None, where: str) -> Digest:
    """Return the digest of what all workers of an engine answer to ``reshard_digest``."""
    checked(answers)
    tensors: dict[str, TensorInfo] = {}
    for answer in answers:
        for name, (held, shape) in answer["tensors"].items():
            info = TensorInfo(tuple(shape), DTYPES[held])
            if tensors.setdefault(name, info) != info:
                raise ReshardError(
                    f"workers of {where} hold {name} as {tensors[name].dtype.name} and as {held}: give dtype="
                )
    numbers = numbers_of(tensors, [answer["parts"] for answer in answers], where, _HINT)
    versions = {answer["version"] for answer in answers}
    if len(versions) > 1:
        raise ReshardError(f"workers of {where} serve different versions ({versions}): {_HINT}")
    digest = Digest.of(where, dict(sorted(tensors.items())), numbers, dtype)
    if drafters := sorted({answer.get("drafter") or "" for answer in answers} - {""}):
        digest.notices.append(f"the drafter, which does not count here: {'+'.join(drafters)}")
    if of_tower := max(answer.get("tower", 0) for answer in answers):
        digest.notices.append(
            f"the tower beside the language model, {of_tower:,} tensors as they were loaded, does not count here, and "
            "counts in the digest of a directory: a refit from a trainer that has it brings it"
        )
    coded = sum(info.dtype.name.startswith("float8") for info in tensors.values())
    if coded:
        digest.notices.append(
            f"{coded:,} weights are served in fp8 blocks, and count as their codes and scales: compare with "
            "reshard digest --stored of a checkpoint in that form"
        )
    return digest
