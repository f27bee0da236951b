"""The gate of a vLLM engine core."""

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from reshard.core.errors import ReshardError
from reshard.engines.vllm.requests.adapters import withdrawn_requests
from reshard.engines.vllm.requests.admissions import ADMISSIONS

logger = logging.getLogger("vllm.reshard")


class Core(Protocol):
    """An engine core, as far as its gate needs it; see `reshard.engines.vllm.requests.core`."""

    def local_states(self) -> list[dict[str, Any]] | None:
        """Return what the worker in this process holds; None if the workers are in others."""

    def remote_states(self) -> list[dict[str, Any]]:
        """Ask the workers what they hold, and return it, by rank."""

    def watch_calls(self, called: Callable[[], None]) -> None:
        """Call `called` after each call to the workers that may change what they hold."""

    def unfinished(self) -> list[tuple[str, Any]]:
        """Return the ids of all requests that the core has, each with its adapter or None."""

    def finish(self, sentence: str, requests: list[str] | None = None) -> int:
        """Answer the requests that the next step would run with a sentence, or those of these ids alone, take them
        from the scheduler, and return how many they were."""

    def drop_encodings(self) -> None:
        """Drop what the workers have made of images and the like, and what the scheduler knows of that."""


class Gate:
    """The gate of an engine core: it knows what the workers hold, and lets requests in or refuses them.

    Workers in other processes are asked what they hold once after each call that may have changed it:
    nothing is asked for a request, or for a step.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._known: list[dict[str, Any]] | None = None
        self._logged = ""
        self._adapters: list[Any] = []  # the states of adapters for which all requests were looked at
        self._encoder_writes: list[Any] = []  # of the weights that have made what is kept of images
        core.watch_calls(self._forget)

    def _forget(self) -> None:
        self._known = None

    def states(self) -> Sequence[dict[str, Any]]:
        """Return what each worker holds, as `Guard.state` says it; none where no weights are guarded."""
        local = self._core.local_states()
        if local is not None:
            return local
        if self._known is None:
            self._known = self._core.remote_states()
        return self._known

    def refusal(self) -> str:
        """Return the sentence with which requests are refused as long as a worker's weights are not whole;
        empty if all are."""
        return next((state["refusal"] for state in self.states() if state["refusal"]), "")

    def admit(self, request: Any) -> str:
        """Pass a request through the admissions, which may change it. Return the sentence with which it is
        refused; empty if it may enter."""
        try:
            for admission in ADMISSIONS:
                admission(request, self)
        except ReshardError as error:
            logger.warning("refused a request: %s", error)
            return str(error)
        return ""

    def before_step(self) -> None:
        """Answer the requests that the next step would run, if it must not."""
        sentence = self.refusal()
        if not sentence:
            self._logged = ""
            self._drop_stale_encodings()
            self._finish_withdrawn()
            return
        count = self._core.finish(sentence)
        if count and sentence != self._logged:
            logger.warning("refused requests from here on: %s", sentence)
            self._logged = sentence

    def _drop_stale_encodings(self) -> None:
        """Drop what was made of images by weights that have changed since: requests with the same image would be
        answered with it."""
        writes = [state.get("encoder_writes") for state in self.states()]
        if writes != self._encoder_writes:
            if any(count is not None for count in writes):
                self._core.drop_encodings()
            self._encoder_writes = writes

    def _finish_withdrawn(self) -> None:
        """Answer the requests whose adapters must not be served any more."""
        states = [state.get("adapters") for state in self.states()]
        if not any(states) or states == self._adapters:
            return
        withdrawn = withdrawn_requests(self._core.unfinished(), self)
        for sentence, requests in withdrawn.items():
            if self._core.finish(sentence, requests):
                logger.warning("ended %d requests: %s", len(requests), sentence)
        if not withdrawn:  # else there may be some that wait while vLLM is paused
            self._adapters = states
