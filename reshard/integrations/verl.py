"""verl with Megatron and vLLM: its weight sync as a refit, by lines of config. `docs/trainers/verl.md` has them.

verl imports this module in the actor (``model.external_lib``) and in the rollout's workers
(``checkpoint_engine.custom_backend_module``). Imported, it registers

- an engine in the place of verl's Megatron engine, whose weights are the model itself (`Shards`),
- an adapter in the place of verl's to vLLM, which connects the two sides, and refits,
- for separate placement the checkpoint engine ``reshard``, by which they meet.

vLLM's workers get `reshard.integrations.verl_worker.VerlExtension`. What a refit does not cover (LoRA adapters, QAT, disaggregated
prefill) takes verl's own way, and the log says so.
"""

import asyncio
import logging
import socket
from typing import Any, NamedTuple

from reshard.core.extras import importing_beside

with importing_beside("verl", "ray", "torch", "verl"):
    import ray
    import torch.distributed as dist
    from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry
    from verl.utils.megatron_utils import load_megatron_model_to_gpu
    from verl.workers.engine import EngineRegistry
    from verl.workers.engine.megatron import MegatronEngineWithLMHead
    from verl.workers.rollout import base as rollouts
    from verl.workers.rollout.vllm_rollout import ServerAdapter

from reshard.comm.group import RefitGroup
from reshard.comm.secret import new_secret
from reshard.core.deprecated import accepts_renamed_options, renamed_options
from reshard.core.errors import ReshardError
from reshard.core.limits import check_seconds, check_switch
from reshard.integrations.calls import Calls, what_failed
from reshard.integrations.meeting import meeting_place
from reshard.refit.connecting import connect
from reshard.refit.link import Link
from reshard.refit.routes import check_backend
from reshard.trainers.megatron import MegatronModel

BACKEND = "reshard"
TIMEOUT = 600.0
WAITS = 3  # time limits, one after the other, that a call of an engine may take in all
log = logging.getLogger("reshard.verl")


class Shards(NamedTuple):
    """In the place of verl's iterator over full tensors: this rank's model, whose shards are read where they are."""

    source: MegatronModel


class Meeting(NamedTuple):
    """Where all members meet, the first rank of this replica's workers, how many members there are, and their secret. `new` says
    that this replica is not connected there yet."""

    address: str
    first_rank: int
    size: int
    secret: str
    new: bool


@EngineRegistry.register("language_model", "megatron", device="cuda", vendor="nvidia")
class ReshardMegatronEngine(MegatronEngineWithLMHead):
    """verl's engine, whose weights are not exported."""

    def get_per_tensor_param(self, base_sync_done: bool = False, **kwargs: Any) -> tuple[Any, dict | None]:
        """The live shards, in the GPU's memory; or what verl makes, where that is no plain copy of them."""
        why = _left_to_verl(self)
        if why:
            log.warning("verl's own weight sync is used: %s", why)
            return super().get_per_tensor_param(base_sync_done=base_sync_done, **kwargs)
        load_megatron_model_to_gpu(self.module, load_grad=False)
        if getattr(self, "_reshard_source", None) is None:
            self._reshard_source = MegatronModel(self.module)
        return Shards(self._reshard_source), None


def _left_to_verl(engine: Any) -> str:
    """Why an engine's weights do not go by a refit; empty where they do."""
    if engine.peft_cls is not None:
        return "the model has LoRA adapters"
    if getattr(engine, "_qat_enabled", False):
        return "the model is trained quantized (QAT)"
    return ""


class ReshardServerAdapter(ServerAdapter):
    """verl's adapter to a vLLM server, for weights that are a model in this process, or a meeting with one elsewhere."""

    _link: Link | None = None

    async def update_weights(
        self, weights: Any, global_steps: int | None = None, wire_format: str = "named_tensors", **kwargs: Any
    ) -> None:
        """One refit of this replica. Raises ReshardError, as the engine's side does, where it fails; the next one
        connects again."""
        if not isinstance(weights, Shards | Meeting):
            await super().update_weights(
                weights, global_steps=global_steps, wire_format=wire_format, **kwargs
            )
            return
        if self._pd_role is not None:
            raise ReshardError("a refit does not know disaggregated prefill: unset rollout.disaggregation")
        options = options_of(self.config)
        if isinstance(weights, Shards):
            await self._together(weights.source, global_steps, options)
        else:
            try:
                if weights.new:
                    given = _connecting(
                        weights.address, weights.first_rank, weights.size, weights.secret, options
                    )
                    await self._within(options, self._execute_method("reshard_connect", kwargs=given))
                refit = self._execute_method("reshard_refit", args=(global_steps, options["verify"]))
                await self._within(options, refit)
            except ray.exceptions.RayError as error:
                # An engine that has died, or refuses before it comes, can tell nobody; the actor waits for it.
                said = f"{self._me()} has failed: {what_failed(error)}"
                RefitGroup.abort(weights.address, said, secret=weights.secret)
                raise ReshardError(said) from error
        if self._has_server:
            await self._within(options, self.server_handle.clear_kv_cache.remote())
            if global_steps is not None:
                await self._within(options, self.server_handle.set_global_steps.remote(global_steps))

    async def _within(self, options: dict[str, Any], call: Any) -> Any:
        """Return what a call of the rollout returns. Raises ReshardError where it takes longer than all of the waits in it may."""
        seconds = WAITS * options["timeout"]
        try:
            return await asyncio.wait_for(_awaited(call), seconds)
        except (asyncio.TimeoutError, TimeoutError):
            raise ReshardError(f"{self._me()} did not answer within {seconds:g} s: dead or stalled") from None

    async def _together(self, source: MegatronModel, version: int | None, options: dict[str, Any]) -> None:
        """This process is a rank of the trainer, and perhaps the one that talks to its replica's server."""
        verify, timeout, backend = (options[name] for name in ("verify", "timeout", "backend"))
        try:
            if self._link is None:
                trainers = dist.get_world_size()
                replicas, workers = divmod(trainers, self._workers())
                if workers:
                    raise ReshardError(
                        f"{trainers} ranks of the trainer are no whole number of replicas of {self._workers()}"
                    )
                size = trainers + replicas * self._workers()
                here = [meeting_place(), new_secret()] if dist.get_rank() == 0 else ["", ""]
                address, secret = _told(here)
                first = trainers + self.replica_rank * self._workers()
                calls = await self._asked(
                    "reshard_connect", kwargs=_connecting(address, first, size, secret, options)
                )
                members = RefitGroup.join(address, dist.get_rank(), size, timeout, secret)
                self._link = calls.beside(members, lambda: connect(members, source, backend=backend))
            link = self._link
            calls = await self._asked("reshard_refit", args=(version, verify))
            calls.beside(link.members, lambda: link.refit(version, verify))
        except BaseException:
            self._link = None
            raise

    async def _asked(self, method: str, **arguments: Any) -> Calls:
        """A call of this replica's workers, on the rank that makes it; it goes on while this rank does its part."""
        asked = await self._execute_method(method, non_block=True, **arguments)
        return Calls({} if asked is None else {self._me(): asked.future()})

    def _me(self) -> str:
        return f"the rollout's replica {self.replica_rank}"

    def _workers(self) -> int:
        """How many workers a replica has."""
        sizes = ("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size")
        tp, dp, pp = (int(getattr(self.config, name)) for name in sizes)
        return tp * dp * pp


def options_of(config: Any) -> dict[str, Any]:
    """``rollout.checkpoint_engine.engine_kwargs.reshard``: whether digests are compared, how long members wait for
    one another, in seconds, and the backend of `reshard.refit.connect`. Raises ReshardError for others."""
    given = renamed_options((config.checkpoint_engine.engine_kwargs or {}).get(BACKEND, {}))
    known: dict[str, Any] = {"verify": False, "timeout": TIMEOUT, "backend": "auto"}
    if given.keys() - known.keys():
        raise ReshardError(
            f"checkpoint_engine.engine_kwargs.{BACKEND} has {sorted(given.keys() - known.keys())}: it takes "
            f"verify, timeout and backend"
        )
    _check(**known | given)
    return known | given


def _check(verify: bool, timeout: float, backend: str) -> None:
    where = f"checkpoint_engine.engine_kwargs.{BACKEND}"
    check_switch(verify, f"{where}.verify")
    check_seconds(timeout, f"{where}.timeout")
    check_backend(backend, f"{where}.backend")


@CheckpointEngineRegistry.register(BACKEND)
class ReshardCheckpointEngine(CheckpointEngine):
    """How an actor and rollouts elsewhere meet; nothing passes through it. Made in the actor's ranks and beside each of
    the rollout's workers; verl calls all of it at every sync, and the connection stays while all are who they were."""

    @accepts_renamed_options
    def __init__(
        self,
        bucket_size: int = 0,
        is_master: bool = False,
        verify: bool = False,
        timeout: float = TIMEOUT,
        backend: str = "auto",
    ) -> None:
        _check(verify, timeout, backend)
        self.verify, self.timeout, self.backend = verify, timeout, backend
        self.me = f"{socket.gethostname()} {id(self)} {ray.get_runtime_context().get_worker_id()}"
        self.told: dict[str, Any] = {}
        self.new = True
        self.link: Link | None = None

    def prepare(self) -> dict[str, Any]:
        """Who this is, whether it is connected, who else was there, and where; and where to meet otherwise."""
        told = {key: self.told.get(key) for key in ("address", "everybody", "secret")}
        new = {"elsewhere": meeting_place(), "its_secret": new_secret()}
        return told | {"who": self.me, "new": self.new} | new

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """The actor's ranks first, then the rollout's workers. Where somebody is new, or gone, all meet anew."""
        size, first = actor_wg_world_size + rollout_world_size, metadata[0]
        everybody = [one["who"] for one in metadata]
        new = first["everybody"] != everybody or any(one["new"] for one in metadata)
        address = first["elsewhere"] if new else first["address"]
        secret = first["its_secret"] if new else first["secret"]

        def told(ranks: range) -> dict[str, list[Any]]:
            each = {"size": size, "address": address, "everybody": everybody, "secret": secret, "new": new}
            return {"rank": list(ranks)} | {key: [value] * len(ranks) for key, value in each.items()}

        return told(range(actor_wg_world_size)), told(range(actor_wg_world_size, size))

    def init_process_group(
        self, rank: int, size: int, address: str, everybody: list[str], secret: str, new: bool
    ) -> None:
        """Note it."""
        self.told = {
            "rank": rank,
            "size": size,
            "address": address,
            "everybody": everybody,
            "secret": secret,
        }
        self.new = new

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> None:
        """On every rank of the actor: connect where that is new, and refit."""
        if not isinstance(weights, Shards):
            raise ReshardError(
                "the checkpoint engine reshard sends a live Megatron model: set "
                "actor_rollout_ref.model.external_lib=reshard.integrations.verl, without LoRA and QAT"
            )
        try:
            if self.new or self.link is None:
                members = RefitGroup.join(
                    self.told["address"],
                    self.told["rank"],
                    self.told["size"],
                    self.timeout,
                    self.told["secret"],
                )
                self.link = connect(members, weights.source, backend=self.backend)
            self.link.refit(global_steps, self.verify)
        except BaseException:
            self.link, self.new = None, True
            raise
        self.new = False

    def receive_weights(self, global_steps: int | None = None) -> Meeting:  # type: ignore[override]
        """Beside a rollout's worker: what the adapter tells its engine."""
        told = self.told
        meeting = Meeting(told["address"], told["rank"], told["size"], told["secret"], self.new)
        self.new = False
        return meeting

    def finalize(self) -> None:
        """Nothing is held between two syncs but the connection."""


def _connecting(address: str, first: int, size: int, secret: str, options: dict[str, Any]) -> dict[str, Any]:
    timeout = options["timeout"]
    return {"address": address, "first_rank": first, "size": size, "timeout": timeout, "secret": secret}


async def _awaited(call: Any) -> Any:
    return await call


def _told(said: list[str]) -> list[str]:
    """What the first rank of the trainer says."""
    dist.broadcast_object_list(said, 0)
    return said


# verl looks adapters up by name in this table, and has no call to register one.
rollouts._ROLLOUT_REGISTRY["vllm", "async"] = f"{__name__}.{ReshardServerAdapter.__name__}"
