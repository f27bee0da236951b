"""Bounds of options, the same on the command line and in Python: above any useful value, below nonsense."""

import math
from typing import Any

from reshard.core.errors import OptionError

MAX_WORKERS = 1024
MAX_VOCAB_MULTIPLE = 1 << 20
MAX_ITERATION = 10**15
# Of a trainer or an engine, in a plan: every rank is looked at.
MAX_RANKS = 1 << 17
MOST_BUCKET_BYTES = 1 << 40
PENDING_BYTES = 2 << 30  # by default, of changes beside the weights of an engine


def check_number(value: Any, name: str, most: int, least: int = 1) -> None:
    """Raise OptionError unless the value given as `name` is a whole number between `least` and `most`."""
    if type(value) is not int or not least <= value <= most:
        raise OptionError(f"{name} is {value!r:.80}; it is a whole number between {least} and {most:,}")


def check_positive(value: Any, name: str, kind: str = "number") -> None:
    """Raise OptionError unless the value given as `name` is a finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise OptionError(f"{name} is {value!r:.80}; it is a {kind} above 0")


def check_seconds(value: Any, name: str) -> None:
    """Raise OptionError unless the value given as `name` is a valid time limit."""
    check_positive(value, name, "number of seconds")


def check_switch(value: Any, name: str) -> None:
    """Raise OptionError unless the value given as `name` is true or false."""
    if not isinstance(value, bool):
        raise OptionError(f"{name} is {value!r:.80}; it is true or false")
