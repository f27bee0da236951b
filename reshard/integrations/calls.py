"""What an adapter's process has called in engines, and what has become of it while this process does its own part."""

from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any, TypeVar

from reshard.comm.group import RefitGroup
from reshard.core.errors import ReshardError, first_line, listed

Result = TypeVar("Result")
# How long an engine that others have failed may take to say what it knows of that.
WORD_SECONDS = 1.0


class Calls:
    """Calls to engines that are under way, by the names of those; none on ranks that have called nobody.

    An engine that has died, or refuses, has not come to where all members wait for it, so that nobody there can say
    so; but its call has ended, here.
    """

    def __init__(self, calls: "Mapping[str, Future[Any]]") -> None:
        self.calls = dict(calls)

    def failed(self, within: float = 0.0) -> str:
        """Of the first that has failed, or does `within` so many seconds, in a sentence; empty while none has."""
        wait(self.calls.values(), within, FIRST_EXCEPTION)
        return next(iter(self._sentences()), "")

    def beside(self, members: RefitGroup, part: Callable[[], Result]) -> Result:
        """What this process's `part` returns, which is a connect or a refit with these members; all give up when one of the
        calls fails. Raises ReshardError where either fails.

        Where both do it is the sentence that all members agree on. What an engine says that never came to that stands
        behind.
        """
        try:
            with members.watching(self.failed):
                result = part()
        except ReshardError as error:
            wait(self.calls.values(), WORD_SECONDS)
            told = [said for said in self._sentences() if str(error) not in said and said not in str(error)]
            raise ReshardError(f"{error} ({told[0]})" if told else str(error)) from error
        self.end(members.timeout)
        return result

    def end(self, seconds: float) -> None:
        """Wait until all have returned. Raises ReshardError naming the first that fails, or those that do not return within so
        many seconds."""
        wait(self.calls.values(), seconds, FIRST_EXCEPTION)
        if failed := self.failed():
            raise ReshardError(failed)
        if late := [name for name, call in self.calls.items() if not call.done()]:
            raise ReshardError(f"{listed(late)} did not answer within {seconds:g} s: dead or stalled")

    def _sentences(self) -> list[str]:
        said = []
        for name, call in self.calls.items():
            error = call.exception() if call.done() and not call.cancelled() else None
            if error is not None:
                said.append(f"{name} has failed: {what_failed(error)}")
        return said


def what_failed(error: BaseException) -> str:
    """A call's error in a line. Of what a call by Ray has raised the text is a traceback, and this its cause."""
    return first_line(getattr(error, "cause", None) or error)
