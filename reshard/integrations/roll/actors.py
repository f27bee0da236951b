"""ROLL with Megatron and vLLM: its weight sync as a refit, by lines of config.
`docs/guides/trainers/roll.md` has them.

`ActorWorker` and its like train as ROLL's workers do, with `Refit` in the place of ROLL's updater
of weights. `InferWorker` lets the first of them call vLLM's workers, which get
`reshard.integrations.roll.RollExtension`. What a refit does not cover (quantized
rollouts, other strategies) takes ROLL's own way, and the log says so.
"""

import logging
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from reshard.core.extras import importing_beside

with importing_beside("ROLL", "ray", "roll", "torch"):
    import ray
    import torch.distributed as dist
    from roll.pipeline import base_worker

from reshard.comm.group import RefitGroup
from reshard.comm.secret import new_secret
from reshard.core.errors import ReshardError
from reshard.integrations.calls import Calls, error_line
from reshard.integrations.connection import Connection, SyncOptions
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
            super().setup_model_update(infer_cluster=infer_cluster, model_update_name=model_update_name)  # type: ignore[misc]
            return
        # ROLL's strategy asks the updater of this name for a sync, with the parameters on the GPU.
        adapter = ADAPTER_NAME if self.worker_config.model_args.lora_target is not None else None
        self.strategy.weight_updaters[model_update_name] = Refit(
            self.strategy.models_unwrapped, infer_cluster, self._reshard_meeting_place, adapter
        )

    def _reshard_meeting_place(self) -> str:
        """Return an address with a port that ROLL gives to nobody else."""
        host = str(self.get_node_ip())  # type: ignore[attr-defined]
        return f"[{host}]:{self.get_free_port()}" if ":" in host else f"{host}:{self.get_free_port()}"  # type: ignore[attr-defined]


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


class Refit:
    """In the place of ROLL's updater: every rank of the trainer has one, and the first rank's calls
    the rollout.

    `models` are Megatron's chunks, `infer_cluster` is ROLL's cluster of the rollout,
    `meeting_place` gives an address with a free port, `adapter` names the models' LoRA adapter in
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
        self.workers = list(infer_cluster.workers)
        self.ranks_each = int(infer_cluster.worker_config.num_gpus_per_worker)
        self.options = options()
        self.source: MegatronModel | None = None
        self.connection = Connection(self.options)

    def model_update(self) -> dict[str, float]:
        """Refit the whole rollout; return the seconds that it took, for ROLL's metrics.

        Raises ReshardError, as the rollout's side does, if it fails; the next one connects again.
        """
        with self.connection.dropped_on_failure():
            address, secret, is_new = self._agree()
            if is_new:
                self._connect(address, secret)
            calls = self._call("reshard_take", [(self.options.verify,)] * len(self.workers))
            report = self.connection.refit(calls=calls)
        return {"refit": report.total_seconds, "refit_wait": report.wait_seconds}

    def _agree(self) -> tuple[str, str, bool]:
        """Return where to meet, with which secret, and whether a rank has to connect.

        Wakes ROLL's rollout, which may be asleep: its weights need memory.
        """
        wrong, address, secret = "", "", ""
        if dist.get_rank() == 0:
            try:
                calls = [worker.reshard_call.remote("reshard_wake") for worker in self.workers]
                ray.get(calls, timeout=self.options.timeout)
                address, secret = self.meeting_place(), new_secret()
            except Exception as error:
                wrong = (
                    f"the rollout does not answer reshard ({error_line(error)}): set actor_infer.worker_cls="
                    f"{__package__}.InferWorker, and worker_extension_cls={EXTENSION} in its strategy_config"
                )
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, (self.connection.link is None, address, secret, wrong))
        _, address, secret, wrong = ranks[0]
        if wrong:
            raise ReshardError(wrong)
        return address, secret, any(is_new for is_new, *_ in ranks)

    def _connect(self, address: str, secret: str) -> None:
        rank, trainers, timeout = dist.get_rank(), dist.get_world_size(), self.options.timeout
        size = trainers + self.ranks_each * len(self.workers)
        first_ranks = range(trainers, size, self.ranks_each)
        calls = self._call(
            "reshard_meet",
            [(address, first_rank, size, timeout, secret, self.adapter) for first_rank in first_ranks],
        )
        members = RefitGroup.join(address, rank, size, timeout, secret)
        self.connection.connect(members, self._source, calls=calls, adapter=self.adapter)

    def _source(self) -> MegatronModel:
        """Return the trainer's side, made while all are connecting, so that they hear if that fails
        on this rank alone."""
        if self.source is None:
            self.source = MegatronModel(self.models)
        return self.source

    def _call(self, method: str, arguments: Sequence[tuple]) -> Calls:
        """Call the rollout's workers, on the first rank; the calls run while this rank does its part."""
        if dist.get_rank() != 0:
            return Calls({})
        return Calls(
            {
                f"worker {index} of the rollout": worker.reshard_call.remote(method, *args).future()
                for index, (worker, args) in enumerate(zip(self.workers, arguments, strict=True))
            }
        )


def options() -> SyncOptions:
    """Return the options in ``actor_train.system_envs``; see `SyncOptions.of_environment`."""
    return SyncOptions.of_environment("actor_train.system_envs")


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
