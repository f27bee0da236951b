"""The one error that a user's mistake or a bad file leads to."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

# Directories that stand for places elsewhere, and what messages call these.
SHOWN_AS: dict[str, str] = {}


def shown(text: str) -> str:
    """Return a text with the places that directories stand for instead of these."""
    for directory, place in list(SHOWN_AS.items()):  # threads may add to it
        text = text.replace(directory, place)
    return text


class ReshardError(Exception):
    """Something that the user can act on: what is wrong, where, and what to do.

    The message is one sentence or a short list; the command line prints it without a traceback and exits with
    status 1. `resumable` says that what a run has written so far is good, and worth keeping.
    """

    def __init__(self, message: str, resumable: bool = False) -> None:
        super().__init__(shown(message))
        self.resumable = resumable


class UntouchedError(ReshardError):
    """A refusal by an engine that serves on, as before."""


class UnmappedConfigError(ReshardError):
    """A model's config has a setting that Megatron cannot hold, or that no mapping table knows."""


class OptionError(ReshardError):
    """An option has a value that it cannot have with any checkpoint, or contradicts another option: a mistake in the
    call alone. The command line exits with status 2."""


@contextmanager
def rewrite_message(*replacements: tuple[str, str]) -> Iterator[None]:
    """Rewrite the messages of ReshardErrors raised inside: what matches the first of each pair
    becomes the second.

    An option has another name on the command line than in a call.
    """
    try:
        yield
    except ReshardError as error:
        message = str(error)
        for pattern, replacement in replacements:
            message = re.sub(pattern, replacement, message)
        if message == str(error):
            raise
        kind = OptionError if isinstance(error, OptionError) else ReshardError
        raise kind(message, error.resumable) from error


def is_resumable(error: BaseException) -> bool:
    """Return True if what a run wrote before this error is worth keeping: after an interrupt and
    where memory was short, not after an unexpected error."""
    if isinstance(error, ReshardError):
        return error.resumable
    return isinstance(error, MemoryError) or not isinstance(error, Exception)


def first_line(error: BaseException) -> str:
    """Return the first line of another library's message, cut to 300 characters."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0] if len(lines[0]) <= 300 else lines[0][:300] + " ..."


def one_line(error: BaseException) -> str:
    """Return all of another library's message in one line, cut to 300 characters."""
    line = " ".join(str(error).split()) or type(error).__name__
    return line if len(line) <= 300 else line[:300] + " ..."


def listed(names, limit: int = 10) -> str:
    """Join names for an error message, at most `limit` of them: ``a, b, c and 7 more``."""
    names = [str(name) for name in names]
    head = ", ".join(names[:limit])
    return head if len(names) <= limit else f"{head} and {len(names) - limit} more"
