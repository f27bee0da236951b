"""NeMo-RL's synchronizer of weights for vLLM on GPUs of its own under its SingleController, whose engines die and are
started again.

NeMo-RL gives no request to an engine that its fleet health has found dead, and, in versions that restart engines, none
to a new one before a sync. A sync is of all that live: one that has died is left out, in the same sync, and an actor
that NeMo-RL has put in its place is taken along by the next: all connect again where an engine is another than before.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import wraps
from inspect import signature
from typing import Any

from reshard.core.extras import importing_beside

with importing_beside("NeMo-RL", "nemo_rl", "ray"):
    import ray

from reshard.comm.ranks import error_line
from reshard.core.errors import ReshardError, listed
from reshard.integrations.nemo_rl.calls import name_of
from reshard.integrations.nemo_rl.checkpoint_engine import WHERE, WORKER, checked_options
from reshard.integrations.nemo_rl.driven import BACKEND, LABEL, NO_SCALES, DrivenSynchronizer
from reshard.integrations.options import SyncOptions

log = logging.getLogger("reshard.nemo_rl")
# How long an actor may take to say that it is there.
LOOKING_SECONDS = 5.0


class SurvivingSynchronizer(DrivenSynchronizer):
    """In the place of NeMo-RL's synchronizer by a checkpoint engine, which calls all engines for ever."""

    def __init__(self, policy: Any, generation: Any, options: SyncOptions, releases: bool = False) -> None:
        super().__init__(policy, generation, options)
        self._releases = releases  # after each sync
        self._absent: set[int] = set()  # as NeMo-RL says
        self._dead: set[Any] = set()  # actors
        self._connected: dict[int, Any] = {}  # the actors of the engines at the last sync

    def reconcile_communicator(self, absent_shards: Sequence[int], force: bool = False) -> bool:
        """Leave out the engines that NeMo-RL has found dead from now on; return True if the next sync connects.

        Raises ReshardError if none is left, or if the others need one of them.
        """
        self._absent = {*absent_shards}
        is_same = self._living() == self._connected
        self._connects = self._connects or force or not is_same
        return self._connects

    def sync_weights(self, *, timer: Any = None, kv_scales: dict[str, float] | None = None) -> None:
        """Refit all engines that live.

        Raises the policy's or an engine's ReshardError if it fails; the next one connects again.
        """
        if kv_scales is not None:
            raise ReshardError(NO_SCALES)
        self._stale = True
        with timer.time(LABEL) if timer is not None else nullcontext():
            self._refit_survivors()
        self._stale = False
        if self._releases:
            self.shutdown()

    def _refit_survivors(self) -> None:
        while True:
            engines = self._living()
            self._connects = self._connects or engines != self._connected
            try:
                self._refit(list(engines))
            except (ReshardError, ray.exceptions.RayError) as error:
                died = self._died(engines)
                if not died:
                    raise
                log.warning("%s is dead, and left out: %s", listed(map(name_of, died)), error_line(error))
                self._dead |= {engines[engine] for engine in died}
            else:
                self._connected = engines
                return

    def _living(self) -> dict[int, Any]:
        """Return the actors that talk to the engines, without those that are known to be dead.

        Raises ReshardError if none is left, or if the others need one that is dead.
        """
        actors = {engine: self._leader(engine) for engine in range(self._generation.dp_size)}
        living = {
            engine: actor
            for engine, actor in actors.items()
            if engine not in self._absent and actor not in self._dead
        }
        if not living:
            raise ReshardError("all engines of the rollout are dead")
        if len(living) < len(actors) and self._share_experts:
            dead = listed(name_of(engine) for engine in actors if engine not in living)
            raise ReshardError(
                f"{dead} is dead, and the others share its experts (vllm_cfg.expert_parallel_size)"
            )
        return living

    @property
    def _share_experts(self) -> bool:
        """True where the engines are ranks of one data parallel vLLM."""
        config = self._generation.cfg["vllm_cfg"]
        return bool(config.get("expert_parallel_size", 1) > config.get("tensor_parallel_size", 1))

    def _died(self, engines: Mapping[int, Any]) -> list[int]:
        """Return which of these engines have died, as Ray knows, once it knows of one, or after some seconds. One that
        does not answer may live."""
        deadline = time.monotonic() + LOOKING_SECONDS
        while True:
            calls = {engine: actor.is_alive.remote() for engine, actor in engines.items()}
            died = [engine for engine, call in calls.items() if _has_died(call, deadline - time.monotonic())]
            if died or time.monotonic() > deadline:
                return died
            time.sleep(0.2)


def _has_died(call: Any, seconds: float) -> bool:
    """Return True if the actor of a call has died, as far as Ray knows within so many seconds."""
    try:
        ray.get(call, timeout=max(seconds, 0.0))
    except ray.exceptions.ActorDiedError:
        return True
    except ray.exceptions.RayError:
        pass
    return False


def with_survivors(create: Callable[..., Any]) -> Callable[..., Any]:
    """Return NeMo-RL's ``create_weight_synchronizer``, which makes ours where reshard is the transport."""

    @wraps(create)
    def creating(*args: Any, **kwargs: Any) -> Any:
        given = signature(create).bind(*args, **kwargs).arguments
        generation = given["generation"]
        if given["colocated"] or generation.cfg.get("refit_transport") != BACKEND:
            return create(*args, **kwargs)
        section = (generation.cfg.get("refit_cfg") or {}).get(BACKEND) or {}
        options = checked_options(section)
        options.check_not_begun(f"begin of {WHERE}", "NeMo-RL's SingleController begins no sync")
        worker = (generation.cfg.get("vllm_kwargs") or {}).get("worker_cls")
        if worker != WORKER:
            raise ReshardError(f"policy.generation.vllm_kwargs.worker_cls is {worker}: make that {WORKER}")
        releases = bool(section.get("release_after_refit", False))
        return SurvivingSynchronizer(given["policy"], generation, options, releases)

    return creating
