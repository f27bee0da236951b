"""Calls of engines that an adapter's process has under way while it does its own part of a connect
or a refit."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any, TypeVar

from reshard.comm.group import RefitGroup
from reshard.core.errors import ReshardError, first_line, listed

Result = TypeVar("Result")
# How long an engine may take to say why it has failed, once others have given it up.
ANSWER_SECONDS = 1.0
# Time limits, one after the other, that a call of an engine may take in all: to meet, to connect, to refit.
WAITS = 3


class Calls:
    """Calls of engines, by the names of these; empty on ranks that have called none.

    An engine that has died, or refuses before it has joined the members, cannot tell them so; but
    its call has ended, which this process sees.
    """

    def __init__(self, calls: "Mapping[str, Future[Any]]") -> None:
        self.calls = dict(calls)

    def first_failure(self, within: float = 0.0) -> str:
        """Return a sentence on the first call that has failed, or fails `within` so many seconds;
        empty if none does."""
        wait(self.calls.values(), within, FIRST_EXCEPTION)
        return next(self._failures(), "")

    def alongside(self, members: RefitGroup, part: Callable[[], Result]) -> Result:
        """Return the result of this process's `part`, a connect or a refit with these members; all
        give up when a call fails.

        Raises ReshardError if either fails. If both do, its text is the sentence that all members
        agree on, followed by what an engine says that never joined them.
        """
        try:
            with members.watching(self.first_failure):
                result = part()
        except ReshardError as error:
            wait(self.calls.values(), ANSWER_SECONDS)
            others = [text for text in self._failures() if str(error) not in text and text not in str(error)]
            raise ReshardError(f"{error} ({others[0]})" if others else str(error)) from error
        self.wait_all(members.timeout)
        return result

    def wait_all(self, seconds: float) -> None:
        """Wait until all calls have returned.

        Raises ReshardError naming the first that fails, or those that do not return within so many
        seconds.
        """
        wait(self.calls.values(), seconds, FIRST_EXCEPTION)
        if failure := self.first_failure():
            raise ReshardError(failure)
        if late := [name for name, call in self.calls.items() if not call.done()]:
            raise late_error(late, seconds)

    def _failures(self) -> Iterator[str]:
        for name, call in self.calls.items():
            error = call.exception() if call.done() and not call.cancelled() else None
            if error is not None:
                yield f"{name} has failed: {error_line(error)}"


def late_error(names: Iterable[str], seconds: float) -> ReshardError:
    """Return the error for calls, by the names of whom they were made to, that have not returned in time."""
    return ReshardError(f"{listed(names)} did not answer within {seconds:g} s: dead or stalled")


def error_line(error: BaseException) -> str:
    """Return a call's error in a line. The text of an error by Ray is a traceback; its cause is the
    error itself."""
    return first_line(getattr(error, "cause", None) or error)
