"""ms-swift's Megatron GRPO, colocated: its weight sync as a refit, by a plugin of two lines, which
`docs/guides/trainers/ms-swift.md` has.

ms-swift trains in the ranks that torchrun starts, and vLLM serves in the same processes. `use` puts
a subclass of its trainer in the trainer's place, whose sync reads the shards of the models where
they are and writes them to where vLLM serves them from. All else is ms-swift's, also when the
engine sleeps and wakes and what is offloaded. With ``vllm_enable_lora`` the weights go once, and the
adapter at each sync. A multimodal model goes with its vision tower where a table says how that lies in Megatron and
vLLM serves it as it is loaded. What a refit does not cover (merged adapters, fp8 and fp4 parameters, Megatron's FSDP,
other multimodal models, a vLLM server) takes ms-swift's own sync, and the log says so.
"""

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reshard.core.extras import importing_beside

with importing_beside("ms-swift", "mcore_bridge", "megatron", "swift"):
    from swift.megatron import trainers
    from swift.megatron.trainers import MegatronGRPOTrainer
    from swift.rlhf_trainers.utils import VLLM_LORA_NAME

import torch
from megatron.core import parallel_state

from reshard.comm.group import RefitGroup
from reshard.core.errors import ReshardError
from reshard.engines.vllm.live import VllmModel
from reshard.engines.vllm.weights.tower import serves_tower
from reshard.integrations.monitoring import figures_of
from reshard.integrations.multimodal import left_with_its_tower
from reshard.integrations.options import TIMEOUT, SyncOptions
from reshard.integrations.sync import WeightSync
from reshard.models.model import Model
from reshard.models.rope import attention_factor
from reshard.parity.rollout.monitor import RolloutMonitor
from reshard.trainers.megatron import MegatronModel, rope_is_ignored

# What Megatron makes rotary embeddings of. For latent attention YaRN's factors scale the softmax
# too: they are compared.
ROTARY = frozenset(
    {"position_embedding_type", "rope_type", "rotary_percent", "use_rope_scaling", "rope_scaling_factor"}
)
log = logging.getLogger("reshard.swift")


def use(
    verify: bool = False, timeout: float = TIMEOUT, backend: str = "auto", keep_mapped: bool = False
) -> None:
    """Let ms-swift's entry make the trainer of GRPO that refits; called in a file that
    ``--external_plugins`` names.

    The arguments are those of `reshard.integrations.options.SyncOptions`. The last call's count.
    Raises ReshardError for wrong ones.
    """
    options = SyncOptions(verify=verify, timeout=timeout, backend=backend, keep_mapped=keep_mapped)
    ReshardGRPOTrainer.reshard_options = options.checked(lambda name: f"{name} of swift.use")
    trainers.MegatronGRPOTrainer = ReshardGRPOTrainer


def watch(path: str | Path) -> None:
    """Let the trainer of GRPO check its rollouts, and append the figures of each to a file; called in a file that
    ``--external_plugins`` names, after `use` where both are.

    The rank that computes the logprobs of the first data-parallel rank's samples writes them: those samples stand for
    all. ms-swift's logger has no figures of it.
    """

    class WatchedGRPOTrainer(trainers.MegatronGRPOTrainer):  # type: ignore[misc,name-defined]  # what `use` has set
        _reshard_monitor: RolloutMonitor | None = None

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            batches = super()._generate_and_score_completions(inputs)
            if is_watching_rank():
                if self._reshard_monitor is None:
                    self._reshard_monitor = RolloutMonitor(path)
                figures_of(self._reshard_monitor, rollout_of, batches)
            return batches

    trainers.MegatronGRPOTrainer = WatchedGRPOTrainer


def is_watching_rank() -> bool:
    """Return whether this rank has the logprobs of the first data-parallel rank: the last pipeline stage has them."""
    first = parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
    return (
        first
        and parallel_state.is_pipeline_last_stage()
        and parallel_state.get_tensor_model_parallel_rank() == 0
    )


def rollout_of(batches: Sequence[Any]) -> dict[str, Any]:
    """Return the arguments of `reshard.parity.RolloutMonitor.step` for the micro-batches of a rollout, as ms-swift's
    trainers of GRPO have them once the policy has scored them: each a dict with its ``GRPOBatch``.

    Raises ReshardError where a side's logprobs are not there.
    """
    batches = [batch["grpo_batch"] for batch in batches]
    for side, name in (("rollout", "rollout_per_token_logps"), ("policy", "old_per_token_logps")):
        if any(getattr(batch, name) is None for batch in batches):
            raise ReshardError(
                f"ms-swift has no logprobs of the {side} ({name}), as of turns without a sampled token"
            )
    return {
        "train": [batch.old_per_token_logps for batch in batches],
        "inference": [batch.rollout_per_token_logps for batch in batches],
        "mask": [batch.completion_mask for batch in batches],
    }


class ReshardGRPOTrainer(MegatronGRPOTrainer):
    """ms-swift's trainer, whose weights are refitted instead of exported."""

    reshard_options = SyncOptions()
    _reshard_sync: WeightSync | None = None
    _reshard_tower: str | None = None  # why that is left to ms-swift, once it is known
    _reshard_engine: VllmModel

    def _move_model_to_vllm(self) -> None:
        """Refit the adapter that this process's engine serves, if a refit covers it; else do what
        ms-swift does.

        Raises ReshardError on every rank if one fails; the next sync connects again.
        """
        if self.args.tuner_type != "lora" or left_to_swift(self):
            super()._move_model_to_vllm()
            return
        self._refit(VLLM_LORA_NAME)
        # A rollout asks for it by this, and is refused where no adapter may be served.
        adapter = self._reshard_engine.adapter(VLLM_LORA_NAME)
        self.engine._get_grpo_lora_request = lambda given=None: given or adapter.request()
        self.base_sync_done = True
        self._reset_vllm_cache()

    def _export_and_load_weights(self) -> None:
        """Refit the engine of this process; or do what ms-swift does, if a refit does not cover it.

        Raises ReshardError on every rank if one fails; the next sync connects again.
        """
        why = left_to_swift(self)
        if why:
            log.warning("ms-swift's own weight sync is used: %s", why)
            super()._export_and_load_weights()
            return
        self._refit(None)

    def _refit(self, adapter: str | None) -> None:
        """Refit the engine of this process, with the adapter that it serves by a name."""
        if self._reshard_sync is None:
            self._reshard_sync = WeightSync(self.reshard_options)
        sync = self._reshard_sync
        sync.options = self.reshard_options
        with sync.dropped_on_failure():
            if sync.link is None:
                sync.connect(
                    RefitGroup.of_process_group(timeout=sync.options.timeout),
                    lambda: SwiftModel(self.wrapped_models),
                    self._engine_side,
                    adapter=adapter,
                )
            sync.refit(self._step)

    def _engine_side(self) -> VllmModel:
        """Return the engine of this process."""
        self._reshard_engine = VllmModel.from_llm(self.engine.engine)
        return self._reshard_engine


class SwiftModel(MegatronModel):
    """The models of a rank as mcore-bridge makes them, whose rotary embeddings are transformers'
    own."""

    def check_model(self, model: Model, without: frozenset[str] = frozenset()) -> None:
        """Check the model, with the rotary embedding of mcore-bridge in place of Megatron's.

        mcore-bridge puts its own frequencies into Megatron's plain embedding, and scales cosines
        and sines by a factor of its own. Megatron's settings of both have no effect then, and these
        two are compared.
        """
        if all(hasattr(chunk.config, "attention_scaling") for chunk in self.models):
            without |= ROTARY
            for chunk in self.texts:
                _check_rotary_of_bridge(chunk, model)
        super().check_model(model, without)


def _check_rotary_of_bridge(chunk: Any, model: Model) -> None:
    if rope_is_ignored():
        return
    frequencies = getattr(getattr(chunk, "rotary_pos_emb", None), "inv_freq", None)
    kinds = ("rope", "mrope") if model.wrapped else ("rope",)  # in sections, for the positions in images
    if getattr(chunk, "position_embedding_type", None) not in kinds or not isinstance(
        frequencies, torch.Tensor
    ):
        raise ReshardError("the trainer's model has no rotary embedding as mcore-bridge 1.6 makes it")
    factor, expected = chunk.config.attention_scaling, attention_factor(model.rope())
    if not math.isclose(factor, expected, rel_tol=1e-6):
        raise ReshardError(
            f"the trainer's attention_scaling is {factor:.6g}, but the served model's is {expected:.6g} "
            f"({model.where})"
        )


def left_to_swift(trainer: Any) -> str:
    """Return why a trainer's weights are not refitted, empty if they are; the same on every
    rank."""
    args, config = trainer.args, trainer.config
    if trainer.vllm_mode != "colocate":
        return "vLLM runs in a server (vllm_mode)"
    if args.tuner_type != "full" and not (args.tuner_type == "lora" and args.vllm_enable_lora):
        return (
            f"the model has adapters that are merged (tuner_type {args.tuner_type} without vllm_enable_lora)"
        )
    if getattr(config, "is_multimodal", False):
        if getattr(trainer, "_reshard_tower", None) is None:
            trainer._reshard_tower = tower_left_to_swift(trainer)
        if trainer._reshard_tower:
            return str(trainer._reshard_tower)
    if getattr(args, "use_megatron_fsdp", False):
        return "the parameters are sharded by Megatron's FSDP (use_megatron_fsdp)"
    for name in ("fp8_param_gather", "fp4_param_gather"):
        if getattr(args, name, False):
            return f"the parameters are quantized ({name})"
    return ""


def tower_left_to_swift(trainer: Any) -> str:
    """Return why a multimodal model is not refitted with its tower, empty if it is; the same on every rank."""
    if trainer.args.tuner_type != "full":
        return "the model is multimodal, and has adapters"
    if getattr(trainer.config, "language_model_only", False):
        return "the model is multimodal, and its language model is trained alone (language_model_only)"
    why = left_with_its_tower(trainer.config.hf_config.to_dict())
    if why:
        return why
    if not serves_tower(trainer.engine.engine):
        return "the model is multimodal, and this vLLM serves its tower otherwise than it is loaded"
    return ""
