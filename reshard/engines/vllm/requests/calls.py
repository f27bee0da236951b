"""Calls of an engine core to workers in processes of their own, for vLLM 0.24 to 0.33.

If a worker raises, vLLM raises in the core at once, and takes what the other workers answer for the answers
to its next call: from then on it is out of step with them, also if it was a method of vLLM's own. So methods
do not raise in a worker; they answer, and the core raises when it has heard all.
"""

import logging
from collections.abc import Callable
from functools import wraps
from typing import Any

from reshard.core.errors import ReshardError, first_line

logger = logging.getLogger("vllm.reshard")
# Calls of each step, which change no weights.
_STEPS = frozenset(("execute_model", "sample_tokens", "execute_dummy_batch", "take_draft_token_ids"))

Answer = tuple[str, Any]
_RESULT, _REFUSAL, _FAILURE = "result", "refusal", "failure"


def answered(worker: Any, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Answer:
    """Return what a method of a worker returns, or the sentence of what it raises."""
    try:
        return _RESULT, getattr(worker, method)(*args, **kwargs)
    except ReshardError as error:
        return _REFUSAL, str(error)
    except Exception as error:
        logger.exception("%s failed", method)
        return _FAILURE, f"{type(error).__name__}: {first_line(error)}"


def call_for_answers(executor: Any, called: Callable[[], None]) -> None:
    """Have an executor call methods of workers, which have our extension, by their answers; and call `called`
    after each call that may have changed what the workers hold."""
    plain = executor.collective_rpc

    @wraps(plain)
    def collective_rpc(
        method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None, **how: Any
    ) -> Any:
        if method in _STEPS:
            return plain(method, timeout, args, kwargs, **how)
        try:
            if how or not isinstance(method, str):
                return plain(method, timeout, args, kwargs, **how)
            return _results(plain("reshard_answer", timeout, (method, tuple(args), kwargs or {})))
        finally:
            if method != "reshard_state":
                called()

    executor.collective_rpc = collective_rpc


def _results(answers: list[Answer]) -> list[Any]:
    """Return what all workers have answered. Raises ReshardError if one has refused, RuntimeError if one has failed."""
    for kind, error in ((_FAILURE, RuntimeError), (_REFUSAL, ReshardError)):
        messages = dict.fromkeys(value for answer, value in answers if answer == kind)
        # Members of a refit agree on a sentence; who has failed says it without a name before it.
        sentences = [one for one in messages if not any(one in other for other in messages if other != one)]
        if sentences:
            raise error("; ".join(sentences))
    return [value for _, value in answers]
