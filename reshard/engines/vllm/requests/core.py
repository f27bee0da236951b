"""The gate before vLLM's engine core, for vLLM 0.24 to 0.33.

Every request passes `EngineCore.preprocess_add_request` and `EngineCore.add_request`, and runs in `step` or
`step_with_batch_queue`: of an ``LLM`` whose engine is in its process, of an ``LLM``, an ``AsyncLLM`` and a
server whose engines are in others, and with data parallelism. A core in a process of its own makes requests
in the thread that receives them, and adds them in the thread that steps and that calls the workers.
"""

import importlib
import logging
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

from reshard.core.errors import ReshardError
from reshard.engines.vllm.compat import known
from reshard.engines.vllm.requests.calls import call_for_answers
from reshard.engines.vllm.requests.gate import Gate

logger = logging.getLogger("vllm.reshard")
MODULE = "vllm.v1.engine.core"
REFUSED = "refused by reshard: "  # begins the answers that `reshard.engines.vllm.requests.front` looks for


def install() -> None:
    """Put a gate before every engine core of this process that is made from now on, in which weights are guarded;
    may be called again."""
    with known("takes requests elsewhere"):
        engine_core: Any = importlib.import_module(MODULE).EngineCore
        own_process: Any = importlib.import_module(MODULE).EngineCoreProc
        invoke = own_process._invoke_utility_method
        preprocess, add = engine_core.preprocess_add_request, engine_core.add_request
        steps, call = (engine_core.step, engine_core.step_with_batch_queue), engine_core.collective_rpc
    if hasattr(preprocess, "of_vllm"):
        return

    @wraps(preprocess)
    def preprocess_add_request(self: Any, request: Any) -> Any:
        made, wave = preprocess(self, request)
        if gate_of(self) is not None:
            made.reshard_entered = request
        return made, wave

    @wraps(add)
    def add_request(self: Any, request: Any, *args: Any, **kwargs: Any) -> None:
        entered = vars(request).pop("reshard_entered", None)
        gate = gate_of(self)
        if entered is not None and gate is not None:
            adapter = entered.lora_request
            sentence = gate.admit(entered)
            if sentence:
                _core_of(self).answer([(request.request_id, request.client_index)], sentence)
                return
            if entered.lora_request is not adapter:
                request = _made_again(self, entered)
        add(self, request, *args, **kwargs)

    @wraps(call)
    def collective_rpc(self: Any, *args: Any, **kwargs: Any) -> Any:
        gate_of(self)  # makes workers answer, also where no request has come yet
        return call(self, *args, **kwargs)

    preprocess_add_request.of_vllm = preprocess  # type: ignore[attr-defined]
    engine_core.collective_rpc = collective_rpc
    engine_core.preprocess_add_request = preprocess_add_request
    engine_core.add_request = add_request
    own_process._invoke_utility_method = staticmethod(_in_a_line(invoke))
    engine_core.step, engine_core.step_with_batch_queue = (_after_the_gate(step) for step in steps)


def _in_a_line(invoke: Callable[..., None]) -> Callable[..., None]:
    """Return the method by which a core answers its client's calls, which logs a refusal in one line."""

    @wraps(invoke)
    def invoked(
        name: str, get_result: Callable[[], Any], output: Any, enqueue_output: Callable[[Any], None]
    ) -> None:
        refusals: list[ReshardError] = []

        def result() -> Any:
            try:
                return get_result()
            except ReshardError as error:
                refusals.append(error)

        def enqueue(answer: Any) -> None:
            if refusals:
                logger.warning("%s: %s", name, refusals[0])
                answer.result, answer.failure_message = None, f"{REFUSED}{refusals[0]}"
            enqueue_output(answer)

        invoke(name, result, output, enqueue)

    return invoked


def put_before(front: Any) -> None:
    """Put the gate before the core of an engine of this process that has started, where vLLM was told to load
    no plugins."""
    install()
    core = getattr(getattr(front, "engine_core", None), "engine_core", None)
    if core is not None:
        core.step_fn = getattr(core, core.step_fn.__name__)


def install_where_cores_are() -> None:
    """Put the gate before engine cores if this process has vLLM's module of them, as one in which a core
    starts does."""
    if MODULE in sys.modules:
        install()


def _after_the_gate(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return a core's step, before which requests that must not run are answered."""

    @wraps(step)
    def stepped(self: Any) -> Any:
        gate = gate_of(self)
        if gate is None:
            return step(self)
        gate.before_step()
        outputs, executed = step(self)
        return _core_of(self).with_answers(outputs), executed

    return stepped


def _made_again(core: Any, entered: Any) -> Any:
    """Return vLLM's request of one whose adapter is another than it asked for, so that its prefixes are keyed
    by that."""
    from vllm.v1.request import Request

    request = Request.from_engine_core_request(entered, core.request_block_hasher)
    if request.use_structured_output:
        core.structured_output_manager.grammar_init(request)
    return request


def gate_of(core: Any) -> Gate | None:
    """Return the gate of an engine core; None where no weights are guarded."""
    gate: Gate | None = getattr(core, "reshard_gate", None)
    if gate is None and _core_of(core).is_guarded():
        gate = vars(core).setdefault(
            "reshard_gate", Gate(_core_of(core))
        )  # two threads may come here at once
    return gate


def _core_of(core: Any) -> "VllmCore":
    if not hasattr(core, "reshard_core"):
        vars(core).setdefault("reshard_core", VllmCore(core))
    vllm_core: VllmCore = core.reshard_core
    return vllm_core


class VllmCore:
    """An engine core of vLLM, for its gate: a `reshard.engines.vllm.requests.gate.Core`."""

    def __init__(self, core: Any) -> None:
        self._core = core
        self._answers: dict[int, list[Any]] = {}  # by client, of a core in its caller's process
        worker = getattr(core.model_executor, "driver_worker", None)
        self._worker = getattr(worker, "worker", worker)
        self._extension = _extension(core.vllm_config)

    def is_guarded(self) -> bool:
        """Return True if the workers' weights are guarded."""
        return self._extension is not None if self._worker is None else bool(self.local_states())

    # What the workers hold

    def local_states(self) -> list[dict[str, Any]] | None:
        if self._worker is None:
            return None
        module = sys.modules.get("reshard.engines.vllm.guard")
        state = module.state_of(self._worker, self._adapters_in_use) if module is not None else None
        return [state] if state is not None else []

    def remote_states(self) -> list[dict[str, Any]]:
        call = self._core.model_executor.collective_rpc
        states: list[dict[str, Any]] = call("reshard_state", args=(self._adapters_in_use(),))
        return states

    def unfinished(self) -> list[tuple[str, Any]]:
        requests = self._core.scheduler.requests
        return [(identity, one.lora_request) for identity, one in requests.items()]

    def _adapters_in_use(self) -> list[int]:
        return sorted({adapter.lora_int_id for _, adapter in self.unfinished() if adapter is not None})

    def watch_calls(self, called: Callable[[], None]) -> None:
        if self._worker is None and self._extension is not None:
            call_for_answers(self._core.model_executor, called)

    def drop_encodings(self) -> None:
        """Drop them, as vLLM's `reset_encoder_cache` does: a request that has not come to the end of an image has it
        encoded again."""
        self._core.scheduler.reset_encoder_cache()
        self._core.model_executor.reset_encoder_cache()

    # Answers

    @property
    def _has_own_process(self) -> bool:
        return hasattr(self._core, "output_queue")

    def finish(self, sentence: str, requests: list[str] | None = None) -> int:
        """Answer requests with a sentence, and return how many they were. vLLM holds requests while it is
        paused, and so does this, but in a process whose one caller waits for them."""
        from vllm.v1.core.sched.interface import PauseState
        from vllm.v1.request import RequestStatus

        scheduler = self._core.scheduler
        paused = scheduler.pause_state if self._has_own_process else PauseState.UNPAUSED
        if paused == PauseState.PAUSED_ALL:
            return 0
        to_finish = requests
        if paused != PauseState.UNPAUSED:
            running = [one.request_id for one in scheduler.running]
            to_finish = running if requests is None else [one for one in requests if one in running]
        finished = scheduler.finish_requests(to_finish, RequestStatus.FINISHED_ERROR)
        clients = [one if isinstance(one, tuple) else (one.request_id, one.client_index) for one in finished]
        self.answer(clients, sentence)
        return len(clients)

    def answer(self, requests: list[tuple[str, int]], sentence: str) -> None:
        """Answer requests, by id and client, with an error that carries a sentence."""
        from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

        for request, client in requests:
            output = EngineCoreOutput(
                request, [], finish_reason=FinishReason.ERROR, stop_reason=REFUSED + sentence
            )
            if self._has_own_process:
                answer = EngineCoreOutputs(outputs=[output], finished_requests={request})
                self._core.output_queue.put_nowait((client, answer))
            else:
                self._answers.setdefault(client, []).append(output)

    def with_answers(self, outputs: dict[int, Any] | None) -> dict[int, Any] | None:
        """Return a step's outputs with the answers that its caller has not had."""
        if not self._answers:
            return outputs
        from vllm.v1.engine import EngineCoreOutputs

        outputs = outputs or {}
        for client, answers in self._answers.items():
            outputs.setdefault(client, EngineCoreOutputs()).outputs.extend(answers)
        self._answers = {}
        return outputs


def _extension(config: Any) -> type | None:
    """Return the class of ours, or derived from one, that is mixed into the workers of a config; None if
    there is none."""
    path = config.parallel_config.worker_extension_cls
    if not path:
        return None
    module, _, name = path.rpartition(".")
    extension: type = getattr(importlib.import_module(module), name)
    return extension if hasattr(extension, "reshard_state") else None
