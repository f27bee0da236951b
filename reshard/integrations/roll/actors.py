"""ROLL with Megatron and vLLM: its weight sync as a refit, by lines of config.
`docs/guides/trainers/roll.md` has them.

`ActorWorker` and its like train as ROLL's workers do, with `Refit` in the place of ROLL's updater
of weights. `InferWorker` lets the first of them call vLLM's workers, which get
`reshard.integrations.roll.RollExtension`. What a refit does not cover (quantized
rollouts, other strategies) takes ROLL's own way, and the log says so.
"""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from reshard.core.extras import importing_beside

with importing_beside("ROLL", "ray", "roll"):
    from roll.pipeline import base_worker

from reshard.comm.ranks import error_line, on_first_rank
from reshard.core.errors import ReshardError
from reshard.integrations.options import SyncOptions
from reshard.integrations.sync import Calls, WeightSync
from reshard.trainers.megatron import MegatronModel

EXTENSION = "reshard.integrations.roll.RollExtension"
# Our classes, and ROLL's that they extend.
TRAINING = {
    "ActorWorker": "roll.pipeline.rlvr.actor_worker.ActorWorker",
    "ActorPGWorker": "roll.pipeline.rlvr.actor_pg_worker.ActorPGWorker",
    "AgenticActorWorker": "roll.pipeline.agentic.agentic_actor_worker.ActorWorker",
    "AgenticActorPGWorker": "roll.pipeline.agentic.agentic_actor_pg_worker.ActorWorker",
}
# ROLL asks for the first adapter that vLLM lists, by its id as a name: a number.
ADAPTER_NAME = "1"
log = logging.getLogger("reshard.roll")


class Refitting:
    """Put before one of ROLL's classes of workers that train: its weights are refitted."""

    strategy: Any
    worker_config: Any

    def setup_model_update(self, infer_cluster: Any, model_update_name: str) -> None:
        """Set up the updater of weights; ROLL calls this once on every rank, when all clusters are
        there. The first sync connects."""
        why = left_to_roll(self, infer_cluster)
        if why:
            log.warning("ROLL's own weight sync is used: %s", why)
            super().setup_model_update(  # type: ignore[misc]
                infer_cluster=infer_cluster, model_update_name=model_update_name
            )
            return
        # ROLL's strategy asks the updater of this name for a sync, with the parameters on the GPU.
        adapter = ADAPTER_NAME if self.worker_config.model_args.lora_target is not None else None
        self.strategy.weight_updaters[model_update_name] = Refit(
            self.strategy.models_unwrapped, infer_cluster, self._reshard_meeting_place, adapter
        )

    def _reshard_meeting_place(self) -> str:
        """Return an address with a port that ROLL gives to nobody else."""
        host = str(self.get_node_ip())  # type: ignore[attr-defined]
        return (
            f"[{host}]:{self.get_free_port()}"  # type: ignore[attr-defined]
            if ":" in host
            else f"{host}:{self.get_free_port()}"  # type: ignore[attr-defined]
        )


def left_to_roll(worker: Any, infer_cluster: Any) -> str:
    """Return why the weights of a worker are not refitted; empty if they are."""
    trains, serves = worker.worker_config, infer_cluster.worker_config
    engine = serves.strategy_args.strategy_config or {}
    if trains.strategy_args.strategy_name != "megatron_train":
        return f"the trainer's strategy is {trains.strategy_args.strategy_name}, not megatron_train"
    if serves.strategy_args.strategy_name != "vllm":
        return f"the rollout's strategy is {serves.strategy_args.strategy_name}, not vllm"
    if (trains.model_args.lora_target is None) != (serves.model_args.lora_target is None):
        return "lora_target is set for one of actor_train and actor_infer"
    if getattr(worker.strategy, "is_multimodal", False):
        return "the model takes more than text"
    if engine.get("quantization"):
        return "the rollout is quantized (quantization)"
    if engine.get("enable_eplb"):
        return "the rollout moves its experts (enable_eplb)"
    return ""


@dataclass
class RolloutWorker:
    """The vLLM of a `worker` of the rollout, which calls it; `adapter` names the adapter there. See
    `RemoteEngine`."""

    worker: Any
    name: str
    ranks: int
    adapter: str | None

    def connect(self, meeting: dict[str, Any]) -> Future[Any]:
        """Have vLLM's workers connect."""
        return self.call("reshard_meet", meeting, self.adapter)

    def refit(self, version: int | None, verify: bool) -> Future[Any]:
        """Have vLLM's workers take the weights; ROLL counts no versions."""
        return self.call("reshard_take", verify)

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        """Call a method of `reshard.integrations.roll.RollExtension` in vLLM's workers."""
        future: Future[Any] = self.worker.reshard_call.remote(method, *arguments).future()
        return future


class Refit:
    """In the place of ROLL's updater: every rank of the trainer has one, and the first rank's calls
    the rollout.

    `models` are Megatron's chunks, `infer_cluster` is ROLL's cluster of the rollout,
    `meeting_place` gives an address with a free port, `adapter` names the models' adapter in
    vLLM. All meet there at the first sync, and anew after one that failed.
    """

    def __init__(
        self,
        models: Sequence[Any],
        infer_cluster: Any,
        meeting_place: Callable[[], str],
        adapter: str | None = None,
    ) -> None:
        self.models, self.meeting_place, self.adapter = models, meeting_place, adapter
        ranks = int(infer_cluster.worker_config.num_gpus_per_worker)
        self.workers = [
            RolloutWorker(worker, f"worker {index} of the rollout", ranks, adapter)
            for index, worker in enumerate(infer_cluster.workers)
        ]
        self.source: MegatronModel | None = None
        self.sync = WeightSync(options())

    def model_update(self) -> dict[str, float]:
        """Refit the whole rollout; return the seconds that it took, for ROLL's metrics.

        Raises ReshardError, as the rollout's side does, if it fails; the next one connects again.
        """
        with self.sync.dropped_on_failure():
            on_first_rank(self._wake)
        report = self.sync.run(self.workers, self._source, adapter=self.adapter, place=self.meeting_place)
        return {"refit": report.total_seconds, "refit_wait": report.wait_seconds}

    def _wake(self) -> None:
        """Wake the rollout, which may be asleep: its weights need memory."""
        try:
            calls = Calls({worker.name: worker.call("reshard_wake") for worker in self.workers})
            calls.wait_all(self.sync.options.timeout)
        except Exception as error:
            raise ReshardError(
                f"the rollout does not answer reshard ({error_line(error)}): set actor_infer.worker_cls="
                f"{__package__}.InferWorker, and worker_extension_cls={EXTENSION} in its strategy_config"
            ) from error

    def _source(self) -> MegatronModel:
        """Return the trainer's side, made while all are connecting, so that they hear if that fails
        on this rank alone."""
        if self.source is None:
            self.source = MegatronModel(self.models)
        return self.source


def options() -> SyncOptions:
    """Return the options in ``actor_train.system_envs``; see `SyncOptions.of_environment`."""
    where = "actor_train.system_envs"
    given = SyncOptions.of_environment(where)
    given.check_not_begun(
        f"RESHARD_BEGIN in {where}", "ROLL moves the trainer's weights between step and update"
    )
    return given


class InferWorker(base_worker.InferWorker):
    """ROLL's worker of the rollout, which lets others call its vLLM's workers."""

    async def reshard_call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of vLLM's workers; return what each returns."""
        results: list[Any] = await self.strategy.model.collective_rpc(method, args=arguments)
        return results


def __getattr__(name: str) -> Any:
    """Return a class of `TRAINING`, made now, since each of ROLL's pipelines imports packages of
    its own."""
    if name not in TRAINING:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, base = TRAINING[name].rpartition(".")
    worker_class = type(name, (Refitting, getattr(import_module(module), base)), {"__module__": __name__})
    globals()[name] = worker_class
    return worker_class
