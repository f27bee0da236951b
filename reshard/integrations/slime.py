"""slime: its weight sync as a refit, by a line of the command. `docs/guides/trainers/slime.md` has it.

    --custom-megatron-init-path reshard.integrations.slime.use_refits

slime calls that function in every rank of the actor, before it makes what updates the rollout's weights.
SGLang's schedulers load reshard's plugin by themselves.

With ``RESHARD_BEGIN=1`` an update begins at the end of a training step, where slime asks for metrics (`pop_metrics`),
and `update_weights`, which slime calls once it has awaited the rollout, only switches.

With ``--use-fault-tolerance`` slime replaces engines that its monitor finds dead, and tells the updater. One that is
dead, and that it has not found yet, is left out of the update.
"""

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch.distributed as dist

from reshard.core.extras import importing_beside

with importing_beside("slime", "ray", "slime"):
    import ray
    from slime.backends.megatron_utils.update_weight.common import named_params_and_buffers
    from slime.utils.distributed_utils import get_gloo_group

from reshard.comm.background import in_background
from reshard.comm.http import is_closed
from reshard.comm.ranks import error_line, first_said, on_first_rank
from reshard.core.errors import ReshardError, listed
from reshard.engines.sglang.calls import (
    NO_PLUGIN,
    action_request,
    call_and_join,
    connect_request,
    refit_request,
    says_plugin,
    swap_request,
)
from reshard.engines.sglang.group import ASKED
from reshard.engines.workers.actions import BEGIN, ROLL_BACK, SWITCH
from reshard.integrations.begun import BegunSync
from reshard.integrations.options import SyncOptions
from reshard.integrations.sync import Calls
from reshard.trainers.megatron import MegatronModel

log = logging.getLogger("reshard.slime")
ACTOR = "slime.backends.megatron_utils.actor"
# The classes of slime's that a refit takes the place of: rollouts on the actor's GPUs, and on others.
REPLACED = ("UpdateWeightFromTensor", "UpdateWeightFromDistributed")


def use_refits(arguments: Any) -> None:
    """Have slime's actor refit the rollout's weights in the place of its updates by tensors and by NCCL.

    Raises ReshardError if slime is to send weights as files, or has no such updates.
    """
    if arguments.update_weight_transport == "disk":
        raise ReshardError(
            "--update-weight-transport disk sends weights as files, and a refit does not: leave it out, or "
            "leave out --custom-megatron-init-path reshard.integrations.slime.use_refits"
        )
    actor = import_module(ACTOR)
    if missing := [name for name in REPLACED if not hasattr(actor, name)]:
        raise ReshardError(f"this slime's {ACTOR} has no {missing[0]}: tested with slime at 624b824a8")
    for name in REPLACED:
        setattr(actor, name, RefitWeights)


# How long the server of an engine whose process has died may still accept connections.
ENDING_SECONDS = 15.0


def cannot_begin(args: Any) -> str:
    """Return why an update cannot be begun with these arguments of slime's; empty if it can."""
    if getattr(args, "colocate", False):
        return "the rollout is on the actor's GPUs (--colocate)"
    if getattr(args, "offload_train", False):
        return "the actor gives its GPU's memory away after each step (--offload-train)"
    if getattr(args, "offload_rollout", False):
        return "the rollout gives the weights away that changes build on (--offload-rollout)"
    if getattr(args, "update_weights_interval", 1) != 1:
        return "not every training step is followed by an update (--update-weights-interval)"
    return ""


def is_replaced(args: Any) -> bool:
    """Return True if slime replaces an engine that dies, and goes on without it until then: not where it starts none
    itself, and not where it calls all engines between rollouts, to take their memory away."""
    return bool(
        getattr(args, "use_fault_tolerance", False)
        and not getattr(args, "rollout_external", False)
        and not getattr(args, "offload_rollout", False)
    )


class BackedUpModel(MegatronModel):
    """A Megatron model whose memory slime's memory saver has taken away, read from slime's copies of its
    weights in pinned host memory, which `weights_getter` returns by the names that slime's `args` give them."""

    def __init__(self, args: Any, models: Any, weights_getter: Callable[[], Mapping[str, Any]]) -> None:
        super().__init__(models)
        self._weights_getter = weights_getter
        names = {id(tensor): name for name, tensor in named_params_and_buffers(args, models)}
        for shard, region in zip(self.shards, self._regions, strict=True):
            if id(region.tensor) not in names:
                raise ReshardError(
                    f"slime keeps no copy of {shard.key} while the model is offloaded: start it with "
                    f"--no-offload-train"
                )
        self._names = [names[id(tensor)] for tensor in self._tensors]

    def _now(self) -> list[Any]:
        copies = self._weights_getter()
        return [copies.get(name) for name in self._names]


@dataclass
class RolloutEngine:
    """An SGLang, which slime's `actor` of it calls; see `RemoteEngine`. `url` is that of its server, on the first rank
    of a trainer that goes on without engines that die."""

    actor: Any
    name: str
    ranks: int
    url: str = ""

    def connect(self, meeting: dict[str, Any]) -> Future[Any]:
        """Have SGLang connect. One without the plugin is refused: it would wait to make a group of its own."""

        def call() -> Any:
            # slime returns nothing where SGLang refuses this.
            if not says_plugin(_answer(self.actor, "destroy_weights_update_group", {"group_name": ASKED})):
                raise ReshardError(NO_PLUGIN)
            return self._join("init_weights_update_group", connect_request(**meeting))

        return in_background(call)

    def refit(self, version: int | None, verify: bool) -> Future[Any]:
        """Have SGLang take the weights."""
        return self._update(refit_request(version, verify))

    def begin(self, version: int | None, verify: bool) -> Future[Any]:
        """Have SGLang take part in a refit that is begun."""
        request = action_request(BEGIN, version=version, verify=verify)
        return in_background(partial(_answer, self.actor, "init_weights_update_group", request))

    def switch(self, version: int | None) -> Future[Any]:
        """Have SGLang, which is paused, serve what was begun."""
        return self._update(swap_request(SWITCH, version))

    def roll_back(self, version: int | None) -> Future[Any]:
        """Have SGLang, which is paused, serve again what it did before a switch."""
        return self._update(swap_request(ROLL_BACK, version))

    def end(self) -> None:
        """End what is left of it, as slime's monitor does, which finds its actor dead and replaces it."""
        with suppress(Exception):  # whatever is left: slime's router forgets its address
            ray.get(self.actor.shutdown.remote(), timeout=ENDING_SECONDS)
        ray.kill(self.actor)

    def _update(self, request: dict[str, Any]) -> Future[Any]:
        return in_background(partial(self._join, "update_weights_from_distributed", request))

    def _join(self, method: str, request: dict[str, Any]) -> Any:
        return call_and_join(partial(_answer, self.actor, method), request)


class RefitWeights:
    """In the place of slime's ``UpdateWeightFromTensor`` and ``UpdateWeightFromDistributed``, with their
    methods. Made once in each of the actor's ranks, which all take part; the first calls the engines."""

    def __init__(
        self, args: Any, model: Any, weights_getter: Callable[[], Mapping[str, Any]], **_: Any
    ) -> None:
        self.args, self.model, self.weights_getter = args, model, weights_getter
        self.weight_version = 0
        self.rollout_engines: list[RolloutEngine] = []
        self._source: MegatronModel | None = None
        options = SyncOptions.of_environment("--train-env-vars")
        if why := cannot_begin(args):
            options.check_not_begun("RESHARD_BEGIN in --train-env-vars", why)
        self._sync = BegunSync(options)
        self._left_out: set[Any] = set()  # actors of engines that were dead, as slime's monitor finds later
        self._urls: dict[Any, str] = {}  # of their servers, by actor, on the first rank

    def connect_rollout_engines(
        self, rollout_engines: Any, rollout_engine_lock: Any, engine_gpu_counts: Any = None, **_: Any
    ) -> None:
        """Keep the engines, since some are new: the next update connects."""
        self._sync.close()
        counts = engine_gpu_counts or [self.args.rollout_num_gpus_per_engine] * len(rollout_engines)
        engines = [
            RolloutEngine(actor, f"the rollout's engine {index}", ranks)
            for index, (actor, ranks) in enumerate(zip(rollout_engines, counts, strict=True))
        ]
        self.rollout_engines = [engine for engine in engines if engine.actor not in self._left_out]
        if is_replaced(self.args):
            dead, why = on_first_rank(self._find_servers, get_gloo_group())
            if why:
                raise ReshardError(why)
            self._leave_out(dead, "its process has died")

    def _find_servers(self) -> tuple[list[str], str]:
        """Ask the engines that are new where their servers are. Return the names of those whose process has died, and
        why others do not say it."""
        new = {engine.name: engine for engine in self.rollout_engines if engine.actor not in self._urls}
        calls = {name: engine.actor.get_url.remote().future() for name, engine in new.items()}
        errors = Calls(calls).errors(self._sync.options.timeout)
        dead = [name for name in errors if calls[name].done() and _has_died(calls[name].exception())]
        self._urls |= {
            engine.actor: calls[name].result() for name, engine in new.items() if name not in errors
        }
        for engine in self.rollout_engines:
            engine.url = self._urls.get(engine.actor, "")
        for name in dead:
            new[name].end()
        return dead, _said_in("get_url", {name: error for name, error in errors.items() if name not in dead})

    def disconnect_rollout_engines(self) -> None:
        """Forget the connection, before slime ends its process groups."""
        self._sync.close()

    def pop_metrics(self) -> dict[str, float]:
        """Return nothing: a refit has no metrics of slime's. But slime calls this on every rank when a training step
        has ended, and so the next update is begun here, with ``RESHARD_BEGIN=1``."""
        if self._sync.options.begin:
            self._sync.begin(self.rollout_engines, self.weight_version + 1, get_gloo_group())
        return {}

    def update_weights(self) -> None:
        """Pause the engines, have them switch to what was begun, or refit them, and resume them, as slime does. Where
        slime replaces engines, one that has died is left out, and the others get the weights all the same.

        Raises ReshardError, on all ranks, if it fails; the next update connects again.
        """
        self.weight_version += 1
        # Pausing aborts the requests: none has keys of earlier weights.
        self._ask("pause_generation")
        self._ask("flush_cache")
        while why := first_said(_sentence(error := self._update()), get_gloo_group()):
            if not self._leave_out_dead(why):
                raise ReshardError(why) from error
        self._ask("continue_generation")

    def _update(self) -> Exception | None:
        """Bring the engines the weights; return what has failed on this rank."""
        version, group = self.weight_version, get_gloo_group()
        try:
            if self._sync.switch(self.rollout_engines, version, group) is None:
                self._sync.run(self.rollout_engines, self.source, version, group=group)
        except Exception as error:  # whatever it is, the other ranks wait for the answer
            return error
        return None

    def _leave_out_dead(self, why: str) -> bool:
        """Leave out the engines that are dead, where slime replaces them, and have the next call connect; return True,
        on all ranks, if there are some. Raises ReshardError if no engine is left."""
        if not is_replaced(self.args):
            return False
        dead = on_first_rank(self._end_dead, get_gloo_group())
        self._leave_out(dead, why)
        return bool(dead)

    def _leave_out(self, dead: list[str], why: str) -> None:
        """Leave out the engines of these names, if any. Raises ReshardError if no engine is left."""
        if not dead:
            return
        self._sync.close()
        self._left_out |= {engine.actor for engine in self.rollout_engines if engine.name in dead}
        self.rollout_engines = [engine for engine in self.rollout_engines if engine.name not in dead]
        if not self.rollout_engines:
            raise ReshardError(f"all engines of the rollout are dead: {why}")
        if dist.get_rank() == 0:
            log.warning("%s is dead, and left out until slime replaces it: %s", listed(dead), why)

    def _end_dead(self) -> list[str]:
        """End the engines whose servers no longer listen; return their names. Waits some seconds for the first."""
        deadline = time.monotonic() + ENDING_SECONDS
        while not (dead := [engine for engine in self.rollout_engines if is_closed(engine.url)]):
            if time.monotonic() > deadline:
                return []
            time.sleep(0.2)
        for engine in dead:
            engine.end()
        return [engine.name for engine in dead]

    def source(self) -> MegatronModel:
        """Return this rank's model, or slime's copies of it where it is offloaded between steps."""
        if self._source is None:
            if getattr(self.args, "offload_train", False):
                self._source = BackedUpModel(self.args, self.model, self.weights_getter)
            else:
                self._source = MegatronModel(self.model)
        return self._source

    def _ask(self, method: str) -> None:
        """Call a method of all engines on the first rank, for which the others wait.

        Raises ReshardError, on all ranks, if an engine fails that is not to be left out.
        """

        def ask() -> dict[str, str]:
            calls = {
                engine.name: getattr(engine.actor, method).remote().future()
                for engine in self.rollout_engines
            }
            return Calls(calls).errors(self._sync.options.timeout)

        failed = on_first_rank(ask, get_gloo_group())
        if failed and self._leave_out_dead(_said_in(method, failed)):
            remaining = {engine.name for engine in self.rollout_engines}
            failed = {name: error for name, error in failed.items() if name in remaining}
        if failed:
            raise ReshardError(_said_in(method, failed))


def _said_in(method: str, failed: Mapping[str, str]) -> str:
    """Return a sentence on calls of a method that have failed, by the engines' names; empty without any."""
    return listed([f"{name} has failed in {method}: {error}" for name, error in failed.items()], 1)


def _has_died(error: BaseException | None) -> bool:
    """Return True if a call has failed since the process of its actor has ended."""
    return isinstance(error, ray.exceptions.ActorDiedError)


def _sentence(error: Exception | None) -> str:
    """Return what other ranks are told of an error; empty for none."""
    if error is None:
        return ""
    return str(error) if isinstance(error, ReshardError) else error_line(error)


def _answer(engine: Any, method: str, request: dict[str, Any]) -> Any:
    """Return what a method of an engine returns for a request. Raises what it raises, with the text of
    SGLang's answer, which slime adds to its error as a note."""
    return ray.get(getattr(engine, method).remote(**request))
