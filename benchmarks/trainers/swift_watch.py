"""ms-swift's trainer of GRPO, noting its phases, its syncs and what vLLM serves after each: `use`
is called in a plugin that `benchmarks.trainers.swift_grpo` writes."""

import os
import re
import time
from typing import Any

import torch
from swift.megatron import trainers
from swift.megatron.callbacks import megatron_callbacks_map
from swift.megatron.callbacks.base import MegatronCallback
from swift.megatron.trainers import MegatronGRPOTrainer
from swift.rewards import ORM, orms

from benchmarks.trainers.grpo import deterministic, note, overwrite, reward, write
from reshard.integrations.swift import ReshardGRPOTrainer


def phase(name: str) -> None:
    """It begins now."""
    torch.cuda.synchronize()
    if torch.distributed.get_rank() == 0:
        write("phases", name, time.perf_counter())


class Watched(MegatronGRPOTrainer):
    """As it is, with notes; what it has trained is not saved."""

    def _generate_completions(self, samples: Any) -> Any:
        phase("wake weights")
        answered = super()._generate_completions(samples)
        phase("logprobs")
        return answered

    def _export_and_load_weights(self) -> None:
        self.synced()
        phase("offload, wake cache")

    def synced(self) -> None:
        """One sync and a note of it."""
        self.timed(
            "refit" if isinstance(self, ReshardGRPOTrainer) else "stock", super()._export_and_load_weights
        )

    def timed(self, way: str, sync: Any) -> None:
        """A sync, and a note of what the engine of this rank serves after it."""
        phase(way)
        began = time.perf_counter()
        sync()
        note(torch.distributed.get_rank(), self.served(), way, began)
        torch.cuda.empty_cache()  # what the digests took

    def served(self) -> torch.nn.Module:
        """What is noted of the engine."""
        module: torch.nn.Module = self.engine.inner_model
        return module

    def _colocate_rollout(self, *args: Any) -> Any:
        phase("generate")
        answered = super()._colocate_rollout(*args)
        phase("sleep, load")
        return answered

    def _on_train_step_batch(self, *args: Any) -> None:
        phase("train")
        super()._on_train_step_batch(*args)

    def save_checkpoint(self) -> None:
        """Nothing."""


class Refit(Watched, ReshardGRPOTrainer):
    """The refit in the place of ms-swift's sync."""

    def synced(self) -> None:
        """A refit, and not what a refit does not cover."""
        super().synced()
        assert self._reshard_sync is not None and self._reshard_sync.link is not None, (
            "ms-swift's own sync was used"
        )


class Both(Refit):
    """The refit, then ms-swift's own sync, each into weights that were overwritten before."""

    def synced(self) -> None:
        """Two syncs of the same weights."""
        overwrite(self.engine.inner_model)
        super().synced()
        overwrite(self.engine.inner_model)
        self.timed("stock", lambda: MegatronGRPOTrainer._export_and_load_weights(self))


class AdapterSynced(Watched):
    """With LoRA that vLLM serves beside the weights: a sync is of the adapter, and at first of both."""

    def _move_model_to_vllm(self) -> None:
        self.timed("refit" if isinstance(self, ReshardGRPOTrainer) else "stock", super()._move_model_to_vllm)
        phase("offload, wake cache")

    def _export_and_load_weights(self) -> None:
        """As it is, without notes: a part of the first sync."""
        super(Watched, self)._export_and_load_weights()

    def served(self) -> torch.nn.Module:
        """What vLLM has in the slot that serves the adapter."""
        manager = self.engine.inner_model.lora_manager
        wanted = self.engine._get_grpo_lora_request()
        slot = manager.lora_index_to_id.index(wanted.lora_int_id)
        return torch.nn.ParameterDict(
            {
                f"{name.replace('.', '/')}/{kind}/{index}": torch.nn.Parameter(
                    held[slot], requires_grad=False
                )
                for name, layer in manager.modules.items()
                for kind in ("lora_a_stacked", "lora_b_stacked")
                for index, held in enumerate(getattr(layer, kind))
                if isinstance(getattr(layer, kind), tuple)
            }
        )


class AdapterRefit(AdapterSynced, ReshardGRPOTrainer):
    """The adapter's refit in the place of ms-swift's sync."""


class Steps(MegatronCallback):
    """Notes the end of each step."""

    def on_step_end(self) -> None:
        """What comes until the next rollout."""
        phase("between steps")


class Sums(ORM):
    """1 for an answer whose last number is the sum that was asked for, else 0."""

    def __call__(self, completions: list[str], total: list[str], **kwargs: Any) -> list[float]:
        return [
            float(re.findall(r"\d+", answer)[-1:] == [wanted])
            for answer, wanted in zip(completions, total, strict=True)
        ]


class Evens(ORM):
    """The share of an answer's words with an even number."""

    def __call__(self, completions: list[str], **kwargs: Any) -> list[float]:
        numbers = [re.findall(r"w(\d+)", answer) for answer in completions]
        return [sum(int(one) % 2 == 0 for one in some) / max(1, len(some)) for some in numbers]


class Repeats(ORM):
    """A reward for each word of the answer that is wanted."""

    def __call__(self, completions: list[str], worth: list[str], **kwargs: Any) -> list[float]:
        return [reward(*pair) for pair in zip(completions, worth, strict=True)]


def use(run: str) -> None:
    """Have ms-swift make this trainer, and know the rewards `repeats`, `evens` and `sums` and what to
    report to as `steps`. Where Transformer Engine may use deterministic kernels alone, so does PyTorch."""
    kinds = {
        "stock": Watched, "refit": Refit, "both": Both, "stock-lora": AdapterSynced, "refit-lora": AdapterRefit,
    }  # fmt: skip
    trainers.MegatronGRPOTrainer = kinds[run]
    orms["repeats"], orms["evens"], orms["sums"] = Repeats, Evens, Sums
    megatron_callbacks_map["steps"] = Steps
    if os.environ.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO") == "0":
        deterministic()
