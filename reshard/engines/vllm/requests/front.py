"""What an engine core refuses as an error of who has asked for it, for vLLM 0.24 to 0.33.

A core answers a request that it refuses with the finish reason ``error``, and the sentence as the stop reason.
vLLM's server would make "Internal server error" of it, ``LLM.generate`` an empty text. What a call to the
workers refuses comes as its failure, of which vLLM's server would log a traceback of sixty lines.
"""

import asyncio
import importlib
from concurrent.futures import InvalidStateError
from contextlib import suppress
from functools import wraps
from http import HTTPStatus
from typing import Any

from reshard.core.errors import ReshardError
from reshard.engines.vllm.compat import known
from reshard.engines.vllm.requests.core import REFUSED


def install() -> None:
    """Raise ReshardError in fronts of this process: from ``generate`` and ``encode`` for a request that was refused, to
    which a server answers 503 with the sentence, and from ``collective_rpc`` and the like for a call, to
    which it answers
    500. May be called again."""
    with known("processes an engine's outputs elsewhere"):
        engine: Any = importlib.import_module("vllm.v1.engine.llm_engine").LLMEngine
        processor: Any = importlib.import_module("vllm.v1.engine.output_processor").OutputProcessor
        client: Any = importlib.import_module("vllm.v1.engine.core_client")
        process, step, receive = processor.process_outputs, engine.step, client._process_utility_output
    if hasattr(process, "of_vllm"):
        return

    @wraps(process)
    def process_outputs(self: Any, outputs: list[Any], *args: Any, **kwargs: Any) -> Any:
        refused = {
            one.request_id: one for one in outputs if one.finish_reason is not None and _is_refusal(one)
        }
        if refused:
            outputs = [one for one in outputs if one.request_id not in refused]
            for request, output in refused.items():
                _deliver(self, request, output.stop_reason.removeprefix(REFUSED))
        return process(self, outputs, *args, **kwargs)

    @wraps(step)
    def stepped(self: Any) -> Any:
        done = step(self)
        sentence = vars(self.output_processor).pop("reshard_refusal", None)
        if sentence is None:
            return done
        # The caller gets no outputs, and so not those of the requests that it sent together with this one either.
        self.abort_request(list(self.output_processor.request_states), internal=True)
        raise ReshardError(sentence)

    @wraps(receive)
    def receive_answer(output: Any, waiting: dict[int, Any]) -> None:
        message = output.failure_message
        if message is None or not message.startswith(REFUSED):
            receive(output, waiting)
            return
        with suppress(asyncio.InvalidStateError, InvalidStateError):  # nobody waits any more
            error = _error(message.removeprefix(REFUSED), HTTPStatus.INTERNAL_SERVER_ERROR, Exception)
            waiting.pop(output.call_id).set_exception(error)

    process_outputs.of_vllm = process  # type: ignore[attr-defined]
    processor.process_outputs, engine.step = process_outputs, stepped
    client._process_utility_output = receive_answer


def _is_refusal(output: Any) -> bool:
    return str(output.finish_reason) == "error" and str(output.stop_reason).startswith(REFUSED)


def _deliver(processor: Any, request: str, sentence: str) -> None:
    """Have the call that waits for a request raise; a request that is waited for no more is passed over."""
    state = processor.request_states.get(request)
    if state is None:
        return
    processor.abort_requests([request], internal=True)
    if state.queue is None:
        processor.reshard_refusal = sentence
    else:
        state.queue.put(_error_of_request(sentence, is_pooling=state.detokenizer is None))


def _error_of_request(sentence: str, is_pooling: bool) -> Exception:
    """Return what ``AsyncLLM`` is to find in place of an output, so that it raises the error for a refused request."""
    from vllm.v1.engine.async_llm import InputStreamError

    status = HTTPStatus.SERVICE_UNAVAILABLE
    exceptions = importlib.import_module("vllm.exceptions")
    if hasattr(exceptions, "GracefulHTTPError"):  # from 0.29 on
        return _error(sentence, status, exceptions.GracefulHTTPError)
    if is_pooling:  # whose server answers 400
        return _error(sentence, status, ValueError)
    # The error of a stream of inputs is raised as it is; another would become one without a text.
    return InputStreamError(_error(sentence, status, Exception))


def _error(sentence: str, status: HTTPStatus, kind: type) -> Exception:
    """Return a ReshardError that is of this `kind`, too, and that vLLM's server answers with a status and without a
    traceback in its log."""
    exceptions = importlib.import_module("vllm.exceptions")
    if not hasattr(exceptions, "GenerationError"):  # before 0.29
        exceptions = importlib.import_module("vllm.entrypoints.openai.engine.protocol")

    class EngineRefusedError(ReshardError, exceptions.GenerationError, kind):  # type: ignore[name-defined, misc]
        """A request or a call that this engine refuses."""

        def __init__(self) -> None:
            Exception.__init__(self, sentence)
            self.message, self.resumable = sentence, False
            self.status_code = self.http_status = status

    return EngineRefusedError()
