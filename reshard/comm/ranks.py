"""Calls that the first rank of torch's process group makes for all, and what ranks tell each other."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from reshard.core.errors import ReshardError, first_line

Result = TypeVar("Result")


def is_first_rank() -> bool:
    """Return True on the first rank of torch's process group, and in a process without one."""
    return not dist.is_initialized() or dist.get_rank() == 0


def on_first_rank(call: Callable[[], Result], group: Any = None) -> Result:
    """Return what a call returns that the first rank of torch's process group makes, on all its ranks; a process
    without one is the first.

    Raises ReshardError, on all of them, if the call raises.
    """
    outcome: list[Any] = [None, ""]
    cause, together = None, dist.is_initialized()
    if is_first_rank():
        try:
            outcome[0] = call()
        except Exception as error:  # whatever it is, the other ranks wait for the answer
            cause, outcome[1] = error, str(error) if isinstance(error, ReshardError) else error_line(error)
    if together:
        dist.broadcast_object_list(outcome, 0, group=group)
    result, failure = outcome
    if failure:
        raise ReshardError(failure) from cause
    return result


def first_said(said: str, group: Any = None) -> str:
    """Return what the first rank says that says anything, on all ranks of torch's process group; empty if none does."""
    every: list[str] = [""] * dist.get_world_size(group)
    dist.all_gather_object(every, said, group=group)
    return next(filter(None, every), "")


def error_line(error: BaseException) -> str:
    """Return a call's error in a line. The text of an error by Ray is a traceback; its cause is the
    error itself."""
    return first_line(getattr(error, "cause", None) or error)
