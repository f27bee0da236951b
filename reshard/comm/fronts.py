"""The fronts of a running vLLM, by which calls reach its scheduler and its workers: ``LLM``, ``AsyncLLM``, a server."""

import re
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from inspect import iscoroutinefunction
from typing import Any

from reshard.comm.http import EngineServer, RefusedError
from reshard.core.errors import ReshardError

CALL_SECONDS = 3600.0  # for a server to fetch and write what changed
EXTENSION = "reshard.engines.vllm.worker.RefitExtension"
START_IT = f"start it with VLLM_SERVER_DEV_MODE=1 and --worker-extension-cls {EXTENSION}"
# How vLLM says, alone and with several processes, that its workers have no such method.
_LACKS = re.compile(r"has no attribute 'reshard_|'reshard_\w+' is not implemented")
ANOTHER = "another call of apply_deltas has begun on this engine: call again when that one has returned"
# A method of all workers, and its arguments; or one of the front's own.
Call = tuple[str, tuple[Any, ...]]
# Calls in order, each of which is sent the answers to the one before.
Calls = Generator[Call, Any, Any]
IS_PAUSED, PAUSE, RESUME, EMPTY_CACHES = (
    "is_paused",
    "pause_generation",
    "resume_generation",
    "reset_prefix_cache",
)


class Front:
    """A vLLM ``LLM`` or ``AsyncLLM``.

    `engines` is how many engines of one model (data parallel) a call reaches, of which only the first one's workers
    are heard. `pauses` is True if requests can be held back. `advice` says how workers get the extension.
    """

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.pauses = hasattr(llm, PAUSE)
        config = getattr(llm, "vllm_config", None) or getattr(
            getattr(llm, "llm_engine", None), "vllm_config", None
        )
        parallel = getattr(config, "parallel_config", None)
        of = (
            "data_parallel_size_local"
            if getattr(parallel, "local_engines_only", False)
            else "data_parallel_size"
        )
        # An LLM with several is one of several processes, each with an engine of its own.
        self.engines: int = getattr(parallel, of, 1) if self.pauses else 1
        self.has_connector = getattr(config, "kv_transfer_config", None) is not None
        arguments = "AsyncEngineArgs" if self.pauses else "LLM"
        self.advice = f"give {arguments} worker_extension_cls={EXTENSION!r}"

    def send(self, call: Call) -> Any:
        """Send a call; return what is answered, of an ``AsyncLLM`` an awaitable."""
        method, arguments = call
        if method == PAUSE:  # requests stay where they are
            return self.llm.pause_generation(mode="keep", clear_cache=False)
        if method in (IS_PAUSED, RESUME, EMPTY_CACHES):
            return getattr(self.llm, method)(*arguments)
        return self.llm.collective_rpc(method, args=arguments)


class Server(Front, EngineServer):
    """A ``vllm serve``, by its routes."""

    def __init__(self, url: str) -> None:
        EngineServer.__init__(self, url, CALL_SECONDS, START_IT)
        self.pauses, self.advice = True, START_IT
        try:
            config = self._call("GET", "server_info?config_format=json").get("vllm_config")
        except RefusedError as error:
            if error.code != 500:
                raise
            raise ReshardError(
                f"{self.url} fails at /server_info (500), for which vLLM lists what is installed beside it by pip or "
                f"uv: see its log, and have one of them in its environment (uv pip install pip)"
            ) from error
        parallel = config.get("parallel_config") if isinstance(config, dict) else None
        if not isinstance(parallel, dict):
            raise ReshardError(
                f"{self.url} does not say at /server_info how many engines it has: use another vLLM"
            )
        local = parallel.get("data_parallel_external_lb") or parallel.get("data_parallel_hybrid_lb")
        self.engines = int(parallel.get("data_parallel_size_local" if local else "data_parallel_size") or 1)
        self.has_connector = config.get("kv_transfer_config") is not None

    def send(self, call: Call) -> Any:
        method, arguments = call
        if method == IS_PAUSED:
            return self._call("GET", "is_paused").get("is_paused")
        if method == PAUSE:
            return self._call("POST", "pause?mode=keep&clear_cache=false", {})
        if method == RESUME:
            return self._call("POST", "resume", {})
        if method == EMPTY_CACHES:
            running, connector = (str(bool(argument)).lower() for argument in arguments)
            route = f"reset_prefix_cache?reset_running_requests={running}&reset_external={connector}"
            return self._call("POST", route, {}).get("success")
        answer = self._call("POST", "collective_rpc", {"method": method, "args": list(arguments)})
        results = answer.get("results") if isinstance(answer, dict) else None
        if not isinstance(results, list):
            raise ReshardError(f"{self.url} answers /collective_rpc without results")
        return results


def front_of(llm: Any, awaited: bool) -> Front:
    """Return the front of a vLLM: an ``LLM`` or the address of a server, or an ``AsyncLLM`` where calls are `awaited`.
    Raises ReshardError for another object."""
    if isinstance(llm, str) and not awaited:
        return Server(llm)
    if not hasattr(llm, "collective_rpc") or not hasattr(llm, EMPTY_CACHES):
        raise ReshardError(
            f"llm is a {type(llm).__name__}: give a vLLM LLM, or the address of a vllm serve; an SGLang takes "
            f"reshard.engines.sglang.delta_calls.apply_deltas"
        )
    if iscoroutinefunction(llm.collective_rpc) != awaited:
        are, instead = ("are not", "call apply_deltas") if awaited else ("are", "await apply_deltas_async")
        raise ReshardError(f"the calls of this {type(llm).__name__} {are} awaited: {instead}")
    return Front(llm)


class Sent:
    """Calls that are made one by one: `answers` are those to the last, `result` is what the calls come to."""

    def __init__(self, calls: Calls) -> None:
        self.answers: Any = None
        self.result: Any = None
        self._calls = calls

    def following(self) -> Call | None:
        """Return the next call; None after the last."""
        try:
            return self._calls.send(self.answers)
        except StopIteration as end:
            self.result = end.value
            return None


@contextmanager
def naming_the_extension(front: Front) -> Iterator[None]:
    """Have vLLM's error, where its workers have no methods of ours, say how they get them."""
    try:
        yield
    except Exception as error:  # each of vLLM's ways to run workers raises another one
        if not _LACKS.search(str(error)):
            raise
        raise ReshardError(f"this vLLM's workers have no extension of reshard: {front.advice}") from error
