"""NeMo-RL's synchronizer of weights for vLLM on GPUs of its own, whose syncs are begun when a training step ends.

policy.train           the optimizer's step; `begins_after_training`: what it changed is packed
prepare_for_refit      NeMo-RL awaits what is generated, unless updates are in flight; what changed travels
sync_weights           `BegunSynchronizer`: all engines switch, or none; where nothing was begun, NeMo-RL's own
"""

import logging
from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from inspect import signature
from typing import Any

from reshard.core.extras import importing_beside

with importing_beside("NeMo-RL", "nemo_rl", "ray"):
    import ray
    from nemo_rl.weight_sync.interfaces import WeightSynchronizer

from reshard.comm.ranks import error_line
from reshard.core.errors import ReshardError
from reshard.integrations.begun import all_or_none
from reshard.integrations.nemo_rl.calls import Workers, futures_of
from reshard.integrations.options import SyncOptions
from reshard.integrations.sync import WAITS, Calls

log = logging.getLogger("reshard")


class BegunSynchronizer(Workers, WeightSynchronizer):
    """Before NeMo-RL's own synchronizer (`theirs`), by which `checkpoint_engine.ReshardCheckpointEngine` refits: a sync
    that was begun is a switch."""

    def __init__(self, policy: Any, generation: Any, options: SyncOptions, theirs: Any) -> None:
        super().__init__(policy, generation, options)
        self._theirs = theirs
        self._stale: bool = theirs.is_stale
        self._is_connected = False  # as far as the last sync says
        self._begun: Calls | None = None  # of the engines, where a sync was begun

    @property
    def is_stale(self) -> bool:
        """True until a sync has succeeded."""
        return self._stale

    def init_communicator(self) -> None:
        """Set up NeMo-RL's own, as its setup has done already."""
        self._theirs.init_communicator()

    def begin(self) -> None:
        """Begin a sync, once a training step has ended: return when the policy's ranks have packed what it changed. A
        failure here does not end the run: the next sync then sends all, and raises what is still wrong."""
        self._begun = None
        if not self._is_connected:
            log.info("all weights are sent at the next sync: engines are to be connected")
            return
        try:
            # One after the other, since an engine must not hear of the next before it has answered to this one.
            self._get(self._on_policy("settle"), WAITS * self._options.timeout)
            self._begun = Calls(self._on_all("reshard_begin_refit", None, self._options.verify))
            whys = self._get(self._on_policy("begin"))
        except (ReshardError, ray.exceptions.RayError) as error:
            self._connect_anew(error_line(error))
            return
        if why := next(filter(None, whys), ""):
            log.info("all weights are sent at the next sync: %s", why)

    def sync_weights(self, *, timer: Any = None, kv_scales: dict[str, float] | None = None) -> Any:
        """Have all engines serve what was begun, or none; where nothing is, sync as NeMo-RL does.

        Raises ReshardError where an engine has not switched: all serve again what they did before, and the next sync
        connects again.
        """
        self._stale = True
        label = "prepare_for_generation/transfer_and_update_weights"
        with timer.time(label) if timer is not None else nullcontext():
            if kv_scales is not None:
                self.forget()
            is_switched = self._switch()
        metrics = None
        if not is_switched:
            self._is_connected = False
            metrics = self._theirs.sync_weights(timer=timer, kv_scales=kv_scales)
        self._is_connected, self._stale = True, False
        return metrics

    def shutdown(self) -> None:
        """Forget what was begun, and unmap the others' memory."""
        self._begun, self._is_connected = None, False
        self._theirs.shutdown()

    def forget(self) -> None:
        """Forget what was begun, whose weights are no longer those of the policy: the next sync brings all."""
        if self._begun is not None:
            self._connect_anew("the policy's weights are others than those that were begun")

    def _switch(self) -> bool:
        """Return True if all engines have switched to what was begun; False where there is nothing to switch to."""
        begun, self._begun = self._begun, None
        if begun is None:
            return False
        seconds = WAITS * self._options.timeout
        try:
            reports = self._get(self._on_policy("arrived"), seconds)
            begun.wait_all(seconds)
        except (ReshardError, ray.exceptions.RayError) as error:
            self._connect_anew(error_line(error))
            return False
        report = reports[0]
        if not report["is_pending"]:
            log.info("all weights are sent: %s", report["reason"])
            return False
        version, before, ticket = report["version"], report["before"], report["ticket"]
        try:
            all_or_none(
                lambda: self._on_all("reshard_switch", version, False, ticket),
                lambda: self._on_all("reshard_roll_back", before, False, ticket),
                version,
                before,
                self._options.timeout,
            )
        except ReshardError as error:
            self._connect_anew(str(error))
            raise
        log.info("all engines serve version %d, which was begun", version)
        return True

    def _connect_anew(self, why: str) -> None:
        """Have the next sync connect: how far each one was is not known."""
        log.warning("the next sync connects again: %s", why)
        try:
            self.shutdown()
        except (ReshardError, ray.exceptions.RayError) as error:  # who is gone is named by the next sync
            log.warning("not all have disconnected: %s", error_line(error))

    def _on_all(self, method: str, *arguments: Any) -> dict[str, Any]:
        """Call a method of our worker with the same arguments on all engines; return the calls' futures."""
        return futures_of(self._on_leaders(method, dict.fromkeys(range(self._generation.dp_size), arguments)))


def begins_after_training(
    train: Callable[..., Any], begin: Callable[[], None], forget: Callable[[], None]
) -> Callable[..., Any]:
    """Return NeMo-RL's ``policy.train``, which begins a sync when a step has changed the weights, and forgets what was
    begun before where a step fails, after which they may be any."""

    @wraps(train)
    def training(*args: Any, **kwargs: Any) -> Any:
        changes = not signature(train).bind(*args, **kwargs).arguments.get("eval_mode")
        try:
            results = train(*args, **kwargs)
        except BaseException:
            if changes:
                forget()
            raise
        if changes:
            begin()
        return results

    return training
