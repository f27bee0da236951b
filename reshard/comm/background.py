"""Calls that go on beside the thread that has made them."""

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

Result = TypeVar("Result")


def in_background(call: Callable[[], Result]) -> "Future[Result]":
    """Return what a call will return or raise; nobody has to wait for its end, not even Python's."""
    future: Future[Result] = Future()

    def carry_out() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=carry_out, daemon=True).start()
    return future
