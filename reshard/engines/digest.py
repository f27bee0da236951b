"""The digest of the weights that a running engine serves, of what each of its workers holds."""

from typing import Any

from reshard.comm.fronts import Front, Server
from reshard.core.dtypes import DTYPES
from reshard.core.errors import ReshardError
from reshard.digests.parts import numbers_of
from reshard.digests.result import Digest
from reshard.storage.io.casts import float_dtype
from reshard.storage.io.streams import TensorInfo

_HINT = "refit it, or load its weights again"


def digest_of_engine(llm: Any, dtype: object = None) -> Digest:
    """Return the digest of what a running vLLM serves: an ``LLM``, or the address of a ``vllm serve`` with
    ``VLLM_SERVER_DEV_MODE=1``, whose workers have `reshard.engines.vllm.worker.RefitExtension`.

    Each worker reads the weights where they lie. Raises ReshardError if a worker does not answer, serves a form that no
    checkpoint has, or replicas differ.
    """
    front = Server(llm) if isinstance(llm, str) else Front(llm)
    target = float_dtype(dtype)
    name = None if target is None else target.name
    try:
        answers = front.send(("reshard_digest", (name,)))
    except Exception as error:
        if "reshard_digest" not in str(error):
            raise
        raise ReshardError(f"this vLLM's workers have no extension of reshard: {front.advice}") from error
    if not isinstance(answers, list):
        raise ReshardError(
            f"the calls of this {type(llm).__name__} are awaited: give the answers to digest_of_answers"
        )
    digest = digest_of_answers(answers, name, llm if isinstance(llm, str) else "the engine")
    if front.engines > 1:
        digest.notices.append(f"of {front.engines} engines of this model, the first one's workers were heard")
    return digest


def digest_of_answers(answers: list[Any], dtype: str | None, where: str) -> Digest:
    """Return the digest of what all workers of an engine answer to ``reshard_digest``."""
    for answer in answers:
        if not isinstance(answer, dict) or "error" in answer:
            sentence = answer.get("error") if isinstance(answer, dict) else "a worker has not answered"
            raise ReshardError(str(sentence))
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
    coded = sum(info.dtype.name.startswith("float8") for info in tensors.values())
    if coded:
        digest.notices.append(
            f"{coded:,} weights are served in fp8 blocks, and count as their codes and scales: compare with "
            "reshard digest --stored of a checkpoint in that form"
        )
    return digest
