"""Calls in a thread of their own."""

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

Result = TypeVar("Result")


def in_background(call: Callable[[], Result], outlasts: bool = False) -> "Future[Result]":
    """Return a future of a call. Nobody has to wait for it: unlike an executor's thread, it does
    not keep Python from ending, unless it `outlasts` the program."""
    future: Future[Result] = Future()
    future.set_running_or_notify_cancel()  # nobody can take it back, as `asyncio.wait_for` would at its end

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, daemon=not outlasts).start()
    return future
