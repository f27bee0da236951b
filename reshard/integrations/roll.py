"""ROLL with Megatron and vLLM: its weight sync as a refit, by lines of config. `docs/trainers/roll.md` has them.

`ActorWorker` and its like train as ROLL's workers do; where ROLL would make its updater of weights, `Refit` stands.
`InferWorker` lets the first of them call vLLM's workers, which get `reshard.integrations.roll_worker.RollExtension`. What a
refit does not cover (LoRA adapters, draft models, quantized rollouts, other strategies) takes ROLL's own way, and the
log says so.
"""

import logging
import os
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
from reshard.core.deprecated import renamed_variable
from reshard.core.errors import ReshardError
from reshard.core.limits import check_seconds
from reshard.integrations.calls import Calls, what_failed
from reshard.refit.connecting import connect
from reshard.refit.link import Link, RefitReport
from reshard.refit.routes import check_backend
from reshard.trainers.megatron import MegatronModel

TIMEOUT = 600.0
EXTENSION = "reshard.integrations.roll_worker.RollExtension"
# What each of our classes is in the place of.
TRAINING = {
    "ActorWorker": "roll.pipeline.rlvr.actor_worker.ActorWorker",
    "ActorPGWorker": "roll.pipeline.rlvr.actor_pg_worker.ActorPGWorker",
    "AgenticActorWorker": "roll.pipeline.agentic.agentic_actor_worker.ActorWorker",
    "AgenticActorPGWorker": "roll.pipeline.agentic.agentic_actor_pg_worker.ActorWorker",
}
log = logging.getLogger("reshard.roll")


class Refitting:
    """For a worker of ROLL that trains; stands before ROLL's own class."""

    strategy: Any
    worker_config: Any

    def setup_model_update(self, infer_cluster: Any, model_update_name: str) -> None:
        """ROLL calls this once on every rank, when all clusters are there; the first sync connects."""
        why = left_to_roll(self, infer_cluster)
        if why:
            log.warning("ROLL's own weight sync is used: %s", why)
            super().setup_model_update(infer_cluster=infer_cluster, model_update_name=model_update_name)  # type: ignore[misc]
            return
        # Its strategy asks the updater of this name for a sync, with the parameters on the GPU.
        self.strategy.weight_updaters[model_update_name] = Refit(
            self.strategy.models_unwrapped, infer_cluster, self._reshard_meeting_place
        )

    def _reshard_meeting_place(self) -> str:
        """An address that ROLL gives to nobody else."""
        host = str(self.get_node_ip())  # type: ignore[attr-defined]
        return f"[{host}]:{self.get_free_port()}" if ":" in host else f"{host}:{self.get_free_port()}"  # type: ignore[attr-defined]


def left_to_roll(worker: Any, infer_cluster: Any) -> str:
    """Why the weights of a worker do not go by a refit; empty where they do."""
    trains, serves = worker.worker_config, infer_cluster.worker_config
    engine = serves.strategy_args.strategy_config or {}
    if trains.strategy_args.strategy_name != "megatron_train":
        return f"the trainer's strategy is {trains.strategy_args.strategy_name}, not megatron_train"
    if serves.strategy_args.strategy_name != "vllm":
        return f"the rollout's strategy is {serves.strategy_args.strategy_name}, not vllm"
    if trains.model_args.lora_target is not None:
        return "the model has LoRA adapters"
    if getattr(worker.strategy, "is_multimodal", False):
        return "the model takes more than text"
    for name, means in (
        ("speculative_config", "drafts tokens"),
        ("quantization", "is quantized"),
        ("enable_eplb", "moves its experts"),
    ):
        if engine.get(name):
            return f"the rollout {means} ({name})"
    return ""


class Refit:
    """In the place of ROLL's updater: every rank of the trainer has one, and the first one's calls the rollout.

    `models` are Megatron's chunks, `infer_cluster` is ROLL's cluster of the rollout, `meeting_place` gives an address
    with a free port. All meet there at the first sync, and anew after one that failed.
    """

    def __init__(self, models: Sequence[Any], infer_cluster: Any, meeting_place: Callable[[], str]) -> None:
        self.models, self.meeting_place = models, meeting_place
        self.workers = list(infer_cluster.workers)
        self.ranks_each = int(infer_cluster.worker_config.num_gpus_per_worker)
        self.verify, self.timeout, self.backend = options()
        self.source: MegatronModel | None = None
        self.link: Link | None = None

    def model_update(self) -> dict[str, float]:
        """One refit of the whole rollout; the seconds that it took, for ROLL's metrics. Raises ReshardError, as the
        rollout's side does, where it fails; the next one connects again."""
        try:
            address, secret, new = self._agreed()
            if new:
                self._connect(address, secret)
            report = self._refit()
        except BaseException:
            self.link = None
            raise
        return {"refit": report.total_seconds, "refit_wait": report.wait_seconds}

    def _agreed(self) -> tuple[str, str, bool]:
        """Where to meet, with which secret, and whether somebody has to. ROLL's rollout may be asleep: its weights have memory then."""
        wrong, address, secret = "", "", ""
        if dist.get_rank() == 0:
            try:
                waking = [worker.reshard_call.remote("reshard_wake") for worker in self.workers]
                ray.get(waking, timeout=self.timeout)
                address, secret = self.meeting_place(), new_secret()
            except Exception as error:
                wrong = (
                    f"the rollout does not answer reshard ({what_failed(error)}): set actor_infer.worker_cls="
                    f"{__name__}.InferWorker, and worker_extension_cls={EXTENSION} in its strategy_config"
                )
        everybody: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everybody, (self.link is None, address, secret, wrong))
        _, address, secret, wrong = everybody[0]
        if wrong:
            raise ReshardError(wrong)
        return address, secret, any(new for new, *_ in everybody)

    def _connect(self, address: str, secret: str) -> None:
        rank, trainers = dist.get_rank(), dist.get_world_size()
        size = trainers + self.ranks_each * len(self.workers)
        firsts = range(trainers, size, self.ranks_each)
        meeting = [(address, first, size, self.timeout, secret) for first in firsts]
        calls = self._asked("reshard_meet", meeting)
        members = RefitGroup.join(address, rank, size, self.timeout, secret)
        self.link = calls.beside(members, lambda: connect(members, self._source, backend=self.backend))

    def _source(self) -> MegatronModel:
        """Made when all are connecting, so that they hear of it where that fails on this rank alone."""
        if self.source is None:
            self.source = MegatronModel(self.models)
        return self.source

    def _refit(self) -> RefitReport:
        link = self.link
        assert link is not None
        calls = self._asked("reshard_take", [(self.verify,)] * len(self.workers))
        return calls.beside(link.members, lambda: link.refit(verify=self.verify))

    def _asked(self, method: str, arguments: Sequence[tuple]) -> Calls:
        """On the first rank, the calls of the rollout's workers; they go on while this rank does its part."""
        if dist.get_rank() != 0:
            return Calls({})
        return Calls(
            {
                f"worker {index} of the rollout": worker.reshard_call.remote(method, *given).future()
                for index, (worker, given) in enumerate(zip(self.workers, arguments))
            }
        )


def options() -> tuple[bool, float, str]:
    """Whether digests are compared, how many seconds members wait for one another, and the backend of `reshard.refit.connect`:
    ``RESHARD_VERIFY``, ``RESHARD_TIMEOUT`` and ``RESHARD_BACKEND`` in ``actor_train.system_envs``. Raises ReshardError for others
    than 0, 1, seconds and backends."""
    verify, timeout = os.environ.get("RESHARD_VERIFY", "0"), os.environ.get("RESHARD_TIMEOUT", str(TIMEOUT))
    if verify not in ("0", "1"):
        raise ReshardError(f"RESHARD_VERIFY is {verify!r}: set it to 0 or 1 in actor_train.system_envs")
    try:
        seconds: Any = float(timeout)
    except ValueError:
        seconds = timeout
    check_seconds(seconds, "RESHARD_TIMEOUT in actor_train.system_envs")
    backend = renamed_variable("RESHARD_EXECUTOR", "RESHARD_BACKEND", "auto")
    check_backend(backend, "RESHARD_BACKEND in actor_train.system_envs")
    return verify == "1", seconds, backend


class InferWorker(base_worker.InferWorker):
    """ROLL's worker of the rollout, whose vLLM's workers others may call."""

    async def reshard_call(self, method: str, *arguments: Any) -> list[Any]:
        """What each of them returns."""
        found: list[Any] = await self.strategy.model.collective_rpc(method, args=arguments)
        return found


def __getattr__(name: str) -> Any:
    """`TRAINING`'s classes: made when they are asked for, since each of ROLL's pipelines imports packages of its own."""
    if name not in TRAINING:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, base = TRAINING[name].rpartition(".")
    made = type(name, (Refitting, getattr(import_module(module), base)), {"__module__": __name__})
    globals()[name] = made
    return made
