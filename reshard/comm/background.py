"""Calls in a daemon thread."""

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

Result = TypeVar("Result")


def in_background(call: Callable[[], Result]) -> "Future[Result]":
    """Return a future of a call. Nobody has to wait for it: unlike an executor's thread, it does
    not keep Python from ending."""
    future: Future[Result] = Future()
    future.set_running_or_notify_cancel()  # nobody can take it back, as `asyncio.wait_for` would at its end

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, daemon=True).start()
    return future
