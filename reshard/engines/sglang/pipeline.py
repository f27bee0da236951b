"""Calls that take part in a connect or a refit on all stages of a pipeline.

SGLang hands a call on to the next stage when the stage before has answered it, and a refit needs all of
them at once. So with stages a call begins on a thread of its own, and returns; a second one,
``reshard_join``, waits for it and has its outcome.

In between a stage refuses requests. Stages see requests and calls in the same order, and have to refuse the
same ones: one that runs what another refuses would wait for it forever. So nothing of what a stage serves
changes while the thread runs, and what does change, changes in `BackgroundCall.join`.
"""

import contextvars
import time
from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import Any

import torch

from reshard.core.errors import ReshardError
from reshard.engines.sglang import compat

UNDER_WAY = "the stages of this pipeline have begun: call once more to join them"


class BackgroundCall:
    """A call of a scheduler on another thread, while the scheduler's loop continues.

    Make it on the scheduler's thread, since only that thread knows whether there are requests. If there were
    some then that are not about to end, `check_idle` says so inside the call.
    """

    def __init__(self, scheduler: Any, action: Callable[[], Any]) -> None:
        self._busy: ReshardError | None = None
        self._running: list[Any] = []
        try:
            compat.check_idle(scheduler)
        except ReshardError as error:
            self._busy, self._running = error, compat.running_requests(scheduler)
        self._at_end: list[Callable[[], None]] = []
        self._outcome: Future[Any] = Future()
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

        def run() -> None:
            try:
                if device is not None:
                    torch.cuda.set_device(device)
                self._outcome.set_result(action())
            except BaseException as error:
                self._outcome.set_exception(error)

        context = contextvars.copy_context()
        self._thread = Thread(target=context.run, args=(run,), name="reshard", daemon=True)

    def start(self) -> None:
        """Let the call begin."""
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """True until the call has ended."""
        return not self._outcome.done()

    def check_idle(self) -> None:
        """Raise ReshardError if the scheduler had requests under way.

        The first stage answers a request a turn or two before the others hear that it has ended: what they still
        run is waited for, while their loops go on.
        """
        if self._busy is None:
            return
        end = time.monotonic() + compat.FINISHING_SECONDS
        while self._running and time.monotonic() < end:
            if all(request.finished() for request in self._running):
                return
            time.sleep(0.005)
        raise self._busy

    def at_end(self, action: Callable[[], None]) -> None:
        """Have `join` call this on the scheduler's thread."""
        self._at_end.append(action)

    def join(self) -> Any:
        """Wait for the call, on the scheduler's thread, and return what it returned, or raise what it
        raised."""
        result = self._outcome.result()
        for action in self._at_end:
            action()
        return result


def call_of(scheduler: Any) -> BackgroundCall | None:
    """Return the call of a scheduler that has not been joined; None if there is none."""
    call: BackgroundCall | None = getattr(scheduler, "_reshard_call", None)
    return call


def check_ended(scheduler: Any) -> None:
    """Raise ReshardError while the last call of a scheduler is running."""
    call = call_of(scheduler)
    if call is not None and call.is_running:
        raise ReshardError("the last call of this SGLang is still running: call reshard_join first")


def begin(scheduler: Any, action: Callable[[], Any]) -> None:
    """Call `action` on a thread, and refuse requests until `join`.

    Raises ReshardError while an earlier call is running; the outcome of one that has ended, and that nobody
    has joined, is dropped.
    """
    check_ended(scheduler)
    scheduler._reshard_call = BackgroundCall(scheduler, action)
    scheduler._reshard_call.start()


def join(scheduler: Any) -> Any:
    """Return the outcome of the last call, and take requests again if the weights are whole. Raises
    ReshardError if it failed, or there is none."""
    call = call_of(scheduler)
    if call is None:
        raise ReshardError(
            "no call of this SGLang waits to be joined: reshard_join comes after reshard_connect, reshard_refit "
            "or reshard_release, with pipeline stages"
        )
    compat.drop_finished(scheduler)  # which would keep its cache from being flushed
    try:
        return call.join()
    finally:
        scheduler._reshard_call = None
