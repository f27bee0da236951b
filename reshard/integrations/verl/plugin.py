"""verl with Megatron or FSDP2, and vLLM or SGLang: its weight sync as a refit, by lines of config.
`docs/guides/trainers/verl.md` has them.

verl imports this module in the actor (``model.external_lib``) and in the rollout's workers
(``checkpoint_engine.custom_backend_module``). Imported, it registers

- engines in the place of verl's Megatron and FSDP engines, whose weights are the model itself (`Shards`),
- adapters in the place of verl's to vLLM (`reshard.integrations.verl.vllm`) and SGLang
  (`reshard.integrations.verl.sglang`), which connect the two sides, and refit,
- for separate placement the checkpoint engine ``reshard``, by which they meet.

vLLM's workers get `reshard.integrations.verl.VerlExtension`; SGLang's schedulers load reshard's
plugin. What a refit does not cover (LoRA that is merged, QAT, FSDP1) takes verl's own way, and the log says so.
"""

import logging
import socket
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from reshard.core.extras import importing_beside

with importing_beside("verl", "ray", "torch", "verl"):
    import ray
    from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry
    from verl.utils.fsdp_utils import fsdp_version, load_fsdp_model_to_gpu
    from verl.utils.megatron_utils import load_megatron_model_to_gpu
    from verl.workers.engine import EngineRegistry
    from verl.workers.engine.fsdp import FSDPEngineWithLMHead
    from verl.workers.engine.megatron import MegatronEngineWithLMHead
    from verl.workers.rollout import base as rollouts

from reshard.comm.secret import new_secret
from reshard.core.errors import ReshardError
from reshard.integrations.multimodal import left_with_its_tower
from reshard.integrations.options import SyncOptions
from reshard.integrations.sync import Meeting, WeightSync, ray_address
from reshard.refit.trainer import Trainer
from reshard.trainers.fsdp import FsdpModel
from reshard.trainers.megatron import MegatronModel

BACKEND = "reshard"
NO_ADAPTERS = (
    "LoRA adapters are refitted into vLLM alone: set actor_rollout_ref.model.lora.merge=true, which is "
    "verl's own sync, or leave out actor_rollout_ref.model.external_lib=reshard.integrations.verl.plugin"
)
log = logging.getLogger("reshard.verl")


class Shards(NamedTuple):
    """In the place of verl's iterator over full tensors: this rank's model, whose shards are read
    where they are, the name of its LoRA adapter in vLLM, None if it has none, and what brings its
    parameters back to the GPU, where verl has offloaded them."""

    source: Trainer
    adapter: str | None = None
    load: Callable[[], None] = lambda: None


class Invitation(NamedTuple):
    """A meeting with an actor elsewhere, in the place of verl's iterator over full tensors: the arguments with which a
    rollout's engine connects (`Meeting.arguments`), and whether it has yet to."""

    meeting: dict[str, Any]
    is_new: bool


@EngineRegistry.register("language_model", "megatron", device="cuda", vendor="nvidia")
class ReshardMegatronEngine(MegatronEngineWithLMHead):
    """verl's engine, whose weights are refitted instead of exported."""

    def get_per_tensor_param(self, base_sync_done: bool = False, **kwargs: Any) -> tuple[Any, dict | None]:
        """Return the live shards, which may be in host memory (`WeightSync.reads_host_memory`); or what verl
        exports, if a refit does not cover it."""
        why = left_to_verl(self)
        if why:
            log.warning("verl's own weight sync is used: %s", why)
            return super().get_per_tensor_param(base_sync_done=base_sync_done, **kwargs)
        load = partial(load_megatron_model_to_gpu, self.module, load_grad=False)
        if getattr(self, "_reshard_source", None) is None:
            load()
            self._reshard_source = MegatronModel(self.module)
        # Without verl's config of the adapter, so that it asks for one sync: a refit knows what goes when.
        return Shards(self._reshard_source, adapter_of(self.model_config), load), None


@EngineRegistry.register("language_model", ["fsdp", "fsdp2"], device="cuda", vendor="nvidia")
class ReshardFsdpEngine(FSDPEngineWithLMHead):
    """verl's engine of FSDP, whose weights are refitted instead of gathered."""

    def get_per_tensor_param(
        self, layered_summon: bool = False, base_sync_done: bool = False, **kwargs: Any
    ) -> tuple[Any, dict | None]:
        """Return the live shards; or what verl gathers, if a refit does not cover it."""
        why = fsdp_left_to_verl(self)
        if why:
            log.warning("verl's own weight sync is used: %s", why)
            return super().get_per_tensor_param(
                layered_summon=layered_summon, base_sync_done=base_sync_done, **kwargs
            )
        load = partial(load_fsdp_model_to_gpu, self.module)
        if getattr(self, "_reshard_source", None) is None:
            load()
            self._reshard_source = FsdpModel(self.module)
        return Shards(self._reshard_source, None, load), None


def fsdp_left_to_verl(engine: Any) -> str:
    """Return why the weights of an engine of FSDP are not refitted; empty if they are."""
    if fsdp_version(engine.module) != 2:
        return "the model is not sharded by FSDP2 (actor.strategy=fsdp2)"
    if hasattr(engine.module, "peft_config"):
        return "the model has LoRA adapters, and FSDP"
    if getattr(engine, "_qat_enabled", False):
        return "the model is trained quantized (QAT)"
    if getattr(engine, "_uses_fsdp2_cpu_offload_policy", False):
        return "FSDP2 has the parameters on the host (fsdp_config.offload_policy)"
    return ""


def left_to_verl(engine: Any) -> str:
    """Return why the weights of an engine of Megatron are not refitted; empty if they are."""
    config: Any = getattr(engine.model_config, "hf_config", None)
    if hasattr(config, "vision_config"):
        why = "the model is multimodal, and has adapters" if engine.peft_cls is not None else ""
        by_mbridge = getattr(getattr(engine, "engine_config", None), "vanilla_mbridge", False)
        why = why or left_with_its_tower(config.to_dict(), of_layers=by_mbridge)
        if why:
            return why
    if engine.peft_cls is not None and adapter_of(engine.model_config) is None:
        return "the model has LoRA adapters that are merged (model.lora.merge)"
    if getattr(engine, "_qat_enabled", False):
        return "the model is trained quantized (QAT)"
    return ""


def adapter_of(model_config: Any) -> str | None:
    """Return the name by which verl asks vLLM for a model's LoRA adapter; None if vLLM serves none.

    Raises ReshardError if there is an adapter and no vLLM: SGLang's are not refitted.
    """
    lora = getattr(model_config, "lora", None) or {}
    if lora.get("rank", 0) == 0 or lora.get("merge", False):
        return None
    try:
        from verl.workers.rollout.vllm_rollout.utils import VLLM_LORA_NAME
    except ModuleNotFoundError as error:
        raise ReshardError(NO_ADAPTERS) from error
    return str(VLLM_LORA_NAME)


def options_of(config: Any) -> SyncOptions:
    """Return the options in ``rollout.checkpoint_engine.engine_kwargs.reshard``. Raises
    ReshardError for wrong ones."""
    return checked_options((config.checkpoint_engine.engine_kwargs or {}).get(BACKEND, {}))


def checked_options(given: Mapping[str, Any]) -> SyncOptions:
    """Return the options `given` in that section of the config. Raises ReshardError for wrong ones."""
    where = f"checkpoint_engine.engine_kwargs.{BACKEND}"
    options = SyncOptions.of_config(given, where, lambda name: f"{where}.{name}")
    options.check_not_begun(f"{where}.begin", "verl stops the rollouts before it tells the actor of a sync")
    return options


@CheckpointEngineRegistry.register(BACKEND)
class ReshardCheckpointEngine(CheckpointEngine):
    """The meeting of an actor and rollouts on other GPUs; no tensor passes through it. Made in the
    actor's ranks and beside each of the rollout's workers. verl calls all its methods at every
    sync; the connection stays while the members do.

    The `options` are those of `reshard.integrations.options.SyncOptions`.
    """

    def __init__(self, bucket_size: int = 0, is_master: bool = False, **options: Any) -> None:
        self.sync = WeightSync(checked_options(options))
        self.member = f"{socket.gethostname()} {id(self)} {ray.get_runtime_context().get_worker_id()}"
        self.meeting: Meeting | None = None  # the last one, of these members, where this one has this rank
        self.members: list[str] = []
        self.rank = 0
        self.is_new = True

    def prepare(self) -> dict[str, Any]:
        """Return who this member is, whether it is new, where all have met last, and where they could
        meet next."""
        last = None if self.meeting is None else (self.meeting.address, self.meeting.secret)
        this = {"member": self.member, "is_new": self.is_new}
        return this | {"members": self.members, "last": last, "next": (ray_address(), new_secret())}

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
        address, secret = first["next" if is_new else "last"]
        topology = {"size": size, "address": address, "members": members, "secret": secret, "is_new": is_new}

        def arguments(ranks: range) -> dict[str, list[Any]]:
            return {"rank": list(ranks)} | {key: [value] * len(ranks) for key, value in topology.items()}

        return arguments(range(actor_wg_world_size)), arguments(range(actor_wg_world_size, size))

    def init_process_group(
        self, rank: int, size: int, address: str, members: list[str], secret: str, is_new: bool
    ) -> None:
        """Note the arguments; the sync uses them."""
        self.meeting = Meeting(address, size, self.sync.options.timeout, secret)
        self.rank, self.members, self.is_new = rank, members, is_new

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> None:
        """Refit, on every rank of the actor; connect first if that is new."""
        if not isinstance(weights, Shards):
            raise ReshardError(
                "the checkpoint engine reshard sends a live Megatron model: set "
                "actor_rollout_ref.model.external_lib=reshard.integrations.verl.plugin, without merged LoRA and QAT"
            )
        sync, meeting = self.sync, self.meeting
        assert meeting is not None, "verl calls init_process_group before"
        try:
            with sync.dropped_on_failure():
                is_new = self.is_new or sync.link is None
                if is_new or not sync.reads_host_memory(weights.source):
                    weights.load()
                if is_new:
                    sync.connect(meeting.join(self.rank), weights.source, adapter=weights.adapter)
                sync.refit(global_steps)
        except BaseException:
            self.is_new = True
            raise
        self.is_new = False

    def receive_weights(self, global_steps: int | None = None) -> Invitation:  # type: ignore[override]
        """Return, beside a rollout's worker, what the adapter tells its engine."""
        assert self.meeting is not None, "verl calls init_process_group before"
        invitation = Invitation(self.meeting.arguments(self.rank), self.is_new)
        self.is_new = False
        return invitation

    def finalize(self) -> None:
        """Do nothing: between two syncs nothing is held but the connection."""


# verl looks adapters up by name in this table, and has no call to register one. It imports their modules
# when a rollout is made: of the two engines only one need be there.
rollouts._ROLLOUT_REGISTRY["vllm", "async"] = "reshard.integrations.verl.vllm.ReshardServerAdapter"
rollouts._ROLLOUT_REGISTRY["sglang", "async"] = "reshard.integrations.verl.sglang.ReshardSglangAdapter"
