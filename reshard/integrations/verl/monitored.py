"""verl's rollouts, checked at each step, for any trainer and engine of verl's: `docs/guides/monitor.md` has the line.

verl compares the logprobs of both sides where it recomputes those of the actor (``calculate_debug_metrics``). Imported
while ``RESHARD_MONITOR`` names a file, by ``VERL_USE_EXTERNAL_MODULES``, this module adds its figures to verl's there,
so that verl's logger has them too.
"""

import functools
import os
from typing import Any

from reshard.core.errors import ReshardError
from reshard.integrations.monitoring import VARIABLE, figures_of, monitor


def rollout_of(batch: Any, version: int | None = None) -> dict[str, Any]:
    """Return the arguments of `reshard.parity.RolloutMonitor.step` for a ``DataProto`` of verl's, once it has
    ``old_log_probs``.

    Version V of the weights is that of verl's step V, and the actor has `version` (default: that before the batch's
    ``global_steps``). Of a trajectory verl knows the first and the last version that made it: each of its tokens counts
    as one of the first, so that lags are the largest that they can be. Batches of synchronous trainers have neither.

    Raises ReshardError where a side's logprobs are not there, or are copies of the other's.
    """
    tensors, known = batch.batch, batch.non_tensor_batch
    if "rollout_log_probs" not in tensors:
        raise ReshardError(
            "the batch has no rollout_log_probs: set actor_rollout_ref.rollout.calculate_log_probs=true"
        )
    if "old_log_probs" not in tensors:
        raise ReshardError("the batch has no old_log_probs yet: check it after verl has computed them")
    train, inference = tensors["old_log_probs"], tensors["rollout_log_probs"]
    if train.data_ptr() == inference.data_ptr():
        raise ReshardError(
            "old_log_probs are the rollout's own (rollout_correction.bypass_mode): there is nothing to compare"
        )
    rollout = {"train": train, "inference": inference, "mask": tensors["response_mask"]}
    steps = batch.meta_info.get("global_steps")
    if version is None and isinstance(steps, int):
        version = steps - 1
    versions = known.get("min_global_steps")
    if version is None or versions is None or any(made_by is None for made_by in versions):
        return rollout
    return rollout | {"versions": [int(made_by) for made_by in versions], "version": version}


def watch() -> None:
    """Add the figures of each rollout to verl's, in this process."""
    from verl.utils.debug import metrics

    theirs = metrics.calculate_debug_metrics

    @functools.wraps(theirs)
    def calculate_debug_metrics(data: Any) -> dict[str, Any]:
        return theirs(data) | figures_of(monitor(), rollout_of, data)

    metrics.calculate_debug_metrics = calculate_debug_metrics


if os.environ.get(VARIABLE):
    watch()
