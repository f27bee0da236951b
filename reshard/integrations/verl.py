"""verl with Megatron and vLLM: its weight sync as a refit, by lines of config.
`docs/guides/trainers/verl.md` has them.

verl imports this module in the actor (``model.external_lib``) and in the rollout's workers
(``checkpoint_engine.custom_backend_module``). Imported, it registers

- an engine in the place of verl's Megatron engine, whose weights are the model itself (`Shards`),
- an adapter in the place of verl's to vLLM, which connects the two sides, and refits,
- for separate placement the checkpoint engine ``reshard``, by which they meet.

vLLM's workers get `reshard.integrations.verl_worker.VerlExtension`. What a refit does not cover
(LoRA that is merged, QAT, disaggregated prefill) takes verl's own way, and the log says so.
"""

import asyncio
import logging
import socket
from collections.abc import Callable
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
    from verl.workers.rollout.vllm_rollout.utils import VLLM_LORA_NAME

from reshard.comm.group import RefitGroup
from reshard.comm.secret import new_secret
from reshard.core.deprecated import accepts_renamed_options, renamed_options
from reshard.core.errors import ReshardError
from reshard.integrations.calls import Calls, error_line
from reshard.integrations.connection import TIMEOUT, Connection, SyncOptions
from reshard.integrations.meeting import meeting_place
from reshard.trainers.megatron import MegatronModel

BACKEND = "reshard"
WAITS = 3  # time limits, one after the other, that a call of an engine may take in all
log = logging.getLogger("reshard.verl")


class Shards(NamedTuple):
    """In the place of verl's iterator over full tensors: this rank's model, whose shards are read
    where they are, and the name of its LoRA adapter in vLLM, None where it has none."""

    source: MegatronModel
    adapter: str | None = None


class Meeting(NamedTuple):
    """The address where `size` members meet, with their secret, and the member that the first
    worker of this replica is.

    `is_new` if this replica is not connected there yet.
    """

    address: str
    first_rank: int
    size: int
    secret: str
    is_new: bool

    def arguments(self, timeout: float, adapter: str | None) -> dict[str, Any]:
        """Return the arguments of `RefitExtension.reshard_connect`."""
        address, first_rank, size, secret, _ = self
        return {
            "address": address,
            "first_rank": first_rank,
            "size": size,
            "timeout": timeout,
            "secret": secret,
            "adapter": adapter,
        }


@EngineRegistry.register("language_model", "megatron", device="cuda", vendor="nvidia")
class ReshardMegatronEngine(MegatronEngineWithLMHead):
    """verl's engine, whose weights are refitted instead of exported."""

    def get_per_tensor_param(self, base_sync_done: bool = False, **kwargs: Any) -> tuple[Any, dict | None]:
        """Return the live shards, in the GPU's memory; or what verl exports, if a refit does not
        cover it."""
        why = left_to_verl(self)
        if why:
            log.warning("verl's own weight sync is used: %s", why)
            return super().get_per_tensor_param(base_sync_done=base_sync_done, **kwargs)
        load_megatron_model_to_gpu(self.module, load_grad=False)
        if getattr(self, "_reshard_source", None) is None:
            self._reshard_source = MegatronModel(self.module)
        # Without verl's config of the adapter, so that it asks for one sync: a refit knows what goes when.
        return Shards(self._reshard_source, adapter_of(self.model_config)), None


def left_to_verl(engine: Any) -> str:
    """Return why an engine's weights are not refitted; empty if they are."""
    if engine.peft_cls is not None and adapter_of(engine.model_config) is None:
        return "the model has LoRA adapters that are merged (model.lora.merge)"
    if getattr(engine, "_qat_enabled", False):
        return "the model is trained quantized (QAT)"
    return ""


def adapter_of(model_config: Any) -> str | None:
    """Return the name by which verl asks vLLM for a model's LoRA adapter; None where vLLM serves none."""
    lora = getattr(model_config, "lora", None) or {}
    return VLLM_LORA_NAME if lora.get("rank", 0) > 0 and not lora.get("merge", False) else None


class ReshardServerAdapter(ServerAdapter):
    """verl's adapter to a vLLM server, for weights that are a model in this process, or a meeting
    with one elsewhere."""

    _connection: Connection | None = None

    async def update_weights(
        self, weights: Any, global_steps: int | None = None, wire_format: str = "named_tensors", **kwargs: Any
    ) -> None:
        """Refit this replica.

        Raises ReshardError, as the engine's side does, if it fails; the next one connects again.
        """
        if not isinstance(weights, Shards | Meeting):
            await super().update_weights(
                weights, global_steps=global_steps, wire_format=wire_format, **kwargs
            )
            return
        if self._pd_role is not None:
            raise ReshardError("a refit does not know disaggregated prefill: unset rollout.disaggregation")
        options = options_of(self.config)
        if isinstance(weights, Shards):
            await self._refit_from(weights, global_steps, options)
        else:
            await self._refit_at(weights, global_steps, options)
        if self._has_server:
            await self._within(options, self.server_handle.clear_kv_cache.remote())
            if global_steps is not None:
                await self._within(options, self.server_handle.set_global_steps.remote(global_steps))

    async def _refit_from(self, weights: Shards, version: int | None, options: SyncOptions) -> None:
        """Refit from this process, which is a rank of the trainer, and perhaps the one that talks
        to its replica's server."""
        if self._connection is None:
            self._connection = Connection(options)
        connection, timeout = self._connection, options.timeout
        connection.options = options
        with connection.dropped_on_failure():
            if connection.link is None:
                rank, size, first_rank = dist.get_rank(), self._members(), self._first_rank()
                address, secret = _of_first_rank(lambda: [meeting_place(), new_secret()])
                meeting = Meeting(address, first_rank, size, secret, True)
                arguments = meeting.arguments(timeout, weights.adapter)
                calls = await self._call("reshard_connect", kwargs=arguments)
                members = RefitGroup.join(address, rank, size, timeout, secret)
                connection.connect(members, weights.source, calls=calls, adapter=weights.adapter)
            calls = await self._call("reshard_refit", args=(version, options.verify))
            connection.refit(version, calls=calls)

    async def _refit_at(self, meeting: Meeting, version: int | None, options: SyncOptions) -> None:
        """Refit from a trainer that this replica meets; this process is no member."""
        try:
            if meeting.is_new:
                arguments = meeting.arguments(options.timeout, adapter_of(self.model_config))
                await self._within(options, self._execute_method("reshard_connect", kwargs=arguments))
            await self._within(options, self._execute_method("reshard_refit", args=(version, options.verify)))
        except ray.exceptions.RayError as error:
            # An engine that has died, or refuses before it has joined, cannot tell the actor, which
            # waits for it.
            failure = f"{self._replica()} has failed: {error_line(error)}"
            RefitGroup.abort(meeting.address, failure, secret=meeting.secret)
            raise ReshardError(failure) from error

    async def _within(self, options: SyncOptions, call: Any) -> Any:
        """Return what a call of the rollout returns. Raises ReshardError if it takes longer than
        all the waits in it may."""
        seconds = WAITS * options.timeout
        try:
            return await asyncio.wait_for(_awaited(call), seconds)
        except (asyncio.TimeoutError, TimeoutError):
            raise ReshardError(
                f"{self._replica()} did not answer within {seconds:g} s: dead or stalled"
            ) from None

    async def _call(self, method: str, **arguments: Any) -> Calls:
        """Call this replica's workers, on the rank that does so; the call goes on while this rank
        does its part."""
        call = await self._execute_method(method, non_block=True, **arguments)
        return Calls({} if call is None else {self._replica(): call.future()})

    def _replica(self) -> str:
        return f"the rollout's replica {self.replica_rank}"

    def _workers(self) -> int:
        """Return how many workers a replica has."""
        sizes = ("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size")
        tp, dp, pp = (int(getattr(self.config, name)) for name in sizes)
        return tp * dp * pp

    def _members(self) -> int:
        """Return how many members there are: the trainer's ranks, and the workers of all replicas
        on their GPUs."""
        trainers, workers = dist.get_world_size(), self._workers()
        if trainers % workers:
            raise ReshardError(
                f"{trainers} ranks of the trainer are no whole number of replicas of {workers}"
            )
        return 2 * trainers

    def _first_rank(self) -> int:
        """Return the member that this replica's first worker is, after the trainer's ranks."""
        return dist.get_world_size() + int(self.replica_rank) * self._workers()


def options_of(config: Any) -> SyncOptions:
    """Return the options in ``rollout.checkpoint_engine.engine_kwargs.reshard``. Raises
    ReshardError for wrong ones."""
    options = renamed_options((config.checkpoint_engine.engine_kwargs or {}).get(BACKEND, {}))
    unknown = sorted(options.keys() - set(SyncOptions._fields))
    if unknown:
        raise ReshardError(
            f"checkpoint_engine.engine_kwargs.{BACKEND} has {unknown}: it takes verify, timeout, backend and delta"
        )
    return _checked(SyncOptions(**options))


def _checked(options: SyncOptions) -> SyncOptions:
    return options.check(lambda name: f"checkpoint_engine.engine_kwargs.{BACKEND}.{name}")


@CheckpointEngineRegistry.register(BACKEND)
class ReshardCheckpointEngine(CheckpointEngine):
    """The meeting of an actor and rollouts on other GPUs; no tensor passes through it. Made in the
    actor's ranks and beside each of the rollout's workers. verl calls all its methods at every
    sync; the connection stays while the members do."""

    @accepts_renamed_options
    def __init__(
        self,
        bucket_size: int = 0,
        is_master: bool = False,
        verify: bool = False,
        timeout: float = TIMEOUT,
        backend: str = "auto",
        delta: bool | str = False,
    ) -> None:
        self.connection = Connection(_checked(SyncOptions(verify, timeout, backend, delta)))
        self.member = f"{socket.gethostname()} {id(self)} {ray.get_runtime_context().get_worker_id()}"
        self.topology: dict[str, Any] = {}  # the last arguments of `init_process_group`
        self.is_new = True

    def prepare(self) -> dict[str, Any]:
        """Return who this member is, whether it is new, the last meeting with all its members, and
        where a new one could be."""
        last = {key: self.topology.get(key) for key in ("address", "members", "secret")}
        next_meeting = {"next_address": meeting_place(), "next_secret": new_secret()}
        return last | {"member": self.member, "is_new": self.is_new} | next_meeting

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Return the arguments of `init_process_group` for the actor's ranks, which come first, and
        for the rollout's workers.

        If a member is new, or gone, all meet anew.
        """
        size, first = actor_wg_world_size + rollout_world_size, metadata[0]
        members = [entry["member"] for entry in metadata]
        is_new = first["members"] != members or any(entry["is_new"] for entry in metadata)
        topology = {
            "size": size,
            "address": first["next_address"] if is_new else first["address"],
            "members": members,
            "secret": first["next_secret"] if is_new else first["secret"],
            "is_new": is_new,
        }

        def arguments(ranks: range) -> dict[str, list[Any]]:
            return {"rank": list(ranks)} | {key: [value] * len(ranks) for key, value in topology.items()}

        return arguments(range(actor_wg_world_size)), arguments(range(actor_wg_world_size, size))

    def init_process_group(
        self, rank: int, size: int, address: str, members: list[str], secret: str, is_new: bool
    ) -> None:
        """Note the arguments; the sync uses them."""
        self.topology = {
            "rank": rank,
            "size": size,
            "address": address,
            "members": members,
            "secret": secret,
        }
        self.is_new = is_new

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> None:
        """Refit, on every rank of the actor; connect first if that is new."""
        if not isinstance(weights, Shards):
            raise ReshardError(
                "the checkpoint engine reshard sends a live Megatron model: set "
                "actor_rollout_ref.model.external_lib=reshard.integrations.verl, without merged LoRA and QAT"
            )
        connection, topology = self.connection, self.topology
        try:
            with connection.dropped_on_failure():
                if self.is_new or connection.link is None:
                    members = RefitGroup.join(
                        topology["address"],
                        topology["rank"],
                        topology["size"],
                        connection.options.timeout,
                        topology["secret"],
                    )
                    connection.connect(members, weights.source, adapter=weights.adapter)
                connection.refit(global_steps)
        except BaseException:
            self.is_new = True
            raise
        self.is_new = False

    def receive_weights(self, global_steps: int | None = None) -> Meeting:  # type: ignore[override]
        """Return, beside a rollout's worker, what the adapter tells its engine."""
        topology = self.topology
        meeting = Meeting(
            topology["address"], topology["rank"], topology["size"], topology["secret"], self.is_new
        )
        self.is_new = False
        return meeting

    def finalize(self) -> None:
        """Do nothing: between two syncs nothing is held but the connection."""


async def _awaited(call: Any) -> Any:
    return await call


def _of_first_rank(make: Callable[[], list[str]]) -> list[str]:
    """Return what the first rank of the trainer makes, on all its ranks."""
    values = make() if dist.get_rank() == 0 else ["", ""]
    dist.broadcast_object_list(values, 0)
    return values


# verl looks adapters up by name in this table, and has no call to register one.
rollouts._ROLLOUT_REGISTRY["vllm", "async"] = f"{__name__}.{ReshardServerAdapter.__name__}"
