"""The one error that a user's mistake or a bad file leads to."""

import re
from collections.abc import Iterator
from contextlib import contextmanager


class ReshardError(Exception):
    """Something that the user can act on: what is wrong, where, and what to do.

    The message is one sentence or a short list; the command line prints it without a traceback and exits with
    status 1. `resumable` says that what a run has written so far is good, and worth keeping.
    """

    def __init__(self, message: str, resumable: bool = False) -> None:
        super().__init__(message)
        self.resumable = resumable


@contextmanager
def rewrite_message(*words: tuple[str, str]) -> Iterator[None]:
    """Inside, sentences say the second instead of what matches the first of each pair: what a user acts on has another
    name on the command line than in a call, or in another program."""
    try:
        yield
    except ReshardError as error:
        said = str(error)
        for pattern, instead in words:
            said = re.sub(pattern, instead, said)
        if said == str(error):
            raise
        raise ReshardError(said, error.resumable) from error


def is_resumable(error: BaseException) -> bool:
    """Whether what a run has written before this error is worth keeping: after an interrupt and where memory
    was short it is, after what nobody expected it is not."""
    if isinstance(error, ReshardError):
        return error.resumable
    return isinstance(error, MemoryError) or not isinstance(error, Exception)


def first_line(error: BaseException) -> str:
    """Of what another library says, as much as fits into a sentence."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0] if len(lines[0]) <= 300 else lines[0][:300] + " ..."


def listed(names, limit: int = 10) -> str:
    """Join names for an error message, at most `limit` of them: ``a, b, c and 7 more``."""
    names = [str(name) for name in names]
    head = ", ".join(names[:limit])
    return head if len(names) <= limit else f"{head} and {len(names) - limit} more"
