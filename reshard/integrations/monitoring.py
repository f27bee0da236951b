"""Checks of rollouts beside a trainer's own steps: the monitor that ``RESHARD_MONITOR`` asks for, and its figures for
the trainer's logger."""

import functools
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

from reshard.core.errors import ReshardError
from reshard.parity.rollout.monitor import RolloutMonitor

VARIABLE = "RESHARD_MONITOR"  # the file of the run
PREFIX = "reshard/"  # of the figures' names in a trainer's logger
log = logging.getLogger("reshard.monitor")


@functools.cache
def monitor() -> RolloutMonitor | None:
    """Return this process's monitor; None if the variable is not set."""
    path = os.environ.get(VARIABLE, "")
    return RolloutMonitor(path) if path else None


def figures_of(
    watching: RolloutMonitor | None, rollout_of: Callable[[Any], Mapping[str, Any]], batch: Any
) -> dict[str, Any]:
    """Check a step and return the figures for a logger; none without a monitor. `rollout_of` makes the arguments of
    `RolloutMonitor.step` of a trainer's batch.

    A rollout that cannot be checked is a warning in the log: who watches does not end a run.
    """
    if watching is None:
        return {}
    try:
        return watching.step(**rollout_of(batch)).to_dict(PREFIX)
    except ReshardError as error:
        log.warning("a rollout is not checked: %s", error)
        return {}
