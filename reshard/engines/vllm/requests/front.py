"""A refused request's answer as an error of the call that sent it, for vLLM 0.24 to 0.33.

An engine core answers a request that it refuses with the finish reason ``error``, and the sentence as the
stop reason. vLLM's server would make "Internal server error" of it, ``LLM.generate`` an empty text.
"""

import importlib
from functools import wraps
from http import HTTPStatus
from typing import Any

from reshard.core.errors import ReshardError
from reshard.engines.vllm.compat import known
from reshard.engines.vllm.requests.core import REFUSED


def install() -> None:
    """Raise ReshardError from ``generate`` and ``encode`` for a request that was refused, in fronts of this
    process; its server answers 503 with the sentence. May be called again."""
    with known("processes an engine's outputs elsewhere"):
        engine: Any = importlib.import_module("vllm.v1.engine.llm_engine").LLMEngine
        processor: Any = importlib.import_module("vllm.v1.engine.output_processor").OutputProcessor
        process, step = processor.process_outputs, engine.step
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

    process_outputs.of_vllm = process  # type: ignore[attr-defined]
    processor.process_outputs, engine.step = process_outputs, stepped


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
        state.queue.put(_error(sentence, is_pooling=state.detokenizer is None))


def _error(sentence: str, is_pooling: bool) -> Exception:
    """Return what ``AsyncLLM`` is to find, so that it raises a ReshardError, which its server answers with 503 (of a
    pooling model before vLLM 0.29: 400), and without a traceback in the log."""
    from vllm.v1.engine.async_llm import InputStreamError

    exceptions = importlib.import_module("vllm.exceptions")
    if not hasattr(exceptions, "GenerationError"):  # before 0.29
        exceptions = importlib.import_module("vllm.entrypoints.openai.engine.protocol")
    failed: type = exceptions.GenerationError
    raised_as_it_is = getattr(exceptions, "GracefulHTTPError", ValueError if is_pooling else Exception)

    class RequestRefusedError(ReshardError, failed, raised_as_it_is):  # type: ignore[misc, valid-type]
        """A request that this engine refuses."""

        def __init__(self) -> None:
            Exception.__init__(self, sentence)
            self.message, self.resumable = sentence, False
            self.status_code = self.http_status = HTTPStatus.SERVICE_UNAVAILABLE

    # What comes as the error of a stream of inputs is raised as it is, and not as an EngineGenerateError without a text.
    return InputStreamError(RequestRefusedError()) if raised_as_it_is is Exception else RequestRefusedError()
