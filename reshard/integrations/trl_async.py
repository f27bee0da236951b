"""TRL's trainers that learn while a server generates, `AsyncGRPOTrainer` and `AsyncDistillationTrainer`: their weight
sync as a refit, by one line before the trainer is made, which `docs/guides/trainers/trl.md` has.

TRL pauses the server, gathers each parameter on all ranks, sends it from the first one by NCCL, and has vLLM's loader
take it. `use` puts a refit in the place of that. All else is TRL's: when it syncs, which samples are too old, that it
merges a LoRA for the time of a sync, and, where the server is started with ``--enable-lora``, that it publishes the
adapter alone, as files.
"""

import time
import warnings
from collections.abc import Callable
from functools import partialmethod
from typing import Any

from reshard.core.extras import importing_beside

with importing_beside("TRL", "trl", "accelerate"), warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that TRL may change these
    from trl.experimental.async_distillation import async_distillation_trainer as distillation
    from trl.experimental.async_grpo import async_grpo_trainer as grpo
    from trl.generation.vllm_generation import DistributedBackend

from vllm.utils.network_utils import get_open_port

from reshard.comm.ranks import on_first_rank
from reshard.integrations import trl
from reshard.integrations.options import TIMEOUT

# The modules of the trainers, and each with its own sync.
_TRAINERS = {
    module: (trainer, trainer._sync_weight_merged)
    for module, trainer in (
        (grpo, grpo.AsyncGRPOTrainer), (distillation, distillation.AsyncDistillationTrainer)
    )
}  # fmt: skip


def use(
    verify: bool = False, timeout: float = TIMEOUT, backend: str = "auto", keep_mapped: bool = False
) -> None:
    """Let these trainers, and those of `reshard.integrations.trl.use`, refit their engines. They have to be made after
    this.

    The arguments are those of `reshard.integrations.options.SyncOptions`. The last call's count. Raises ReshardError
    for wrong ones.
    """
    trl.use(verify, timeout, backend, keep_mapped)
    for module, (trainer, trls_sync) in _TRAINERS.items():
        module.WeightTransferClient = Transfer
        trainer._sync_weight_merged = partialmethod(_sync_weight, trls_sync)


class Transfer:
    """TRL's client of weights on the first rank, by its `WeightTransferProtocol`, which sends none: all ranks sync by
    refits, which call the server themselves."""

    def __init__(self, vllm_client: Any, **_: Any) -> None:
        self.server = vllm_client

    def init_weight_transfer(self) -> None:
        """Do nothing: the server is met at the first sync, where all ranks hear why if it cannot be."""

    def meet(self) -> None:
        """Wait for the server. Raises ReshardError unless it takes weights from reshard."""
        self.server.wait_for_server_ready()
        trl.check_server(self.server.server_url, self.server.get_server_info())

    def destroy(self) -> None:
        """Do nothing: the trainer may train again."""


def _sync_weight(trainer: Any, trls_sync: Callable[..., Any], began: float) -> tuple[float, float, float]:
    """Refit a trainer's server, or do what TRL does where the trainer was given another transfer. All ranks call it.
    Return when the server was paused, when all ranks were there, and when the weights were; the first two are not told
    apart from when it began.

    Raises ReshardError on every rank if one fails; the next sync connects again.
    """
    if not on_first_rank(lambda: isinstance(trainer.weight_transfer, Transfer)):
        times: tuple[float, float, float] = trls_sync(trainer, began)
        return times
    if "_reshard_sync" not in vars(trainer):
        model, accelerator = trainer.accelerator.unwrap_model(trainer.model), trainer.accelerator
        trl.check_covered(trl.left_to_trl(model, accelerator, DistributedBackend(accelerator)))
        on_first_rank(lambda: trainer.weight_transfer.meet())
        trainer._reshard_sync = trl.ServerSync(model, trainer.args.vllm_server_base_url, get_open_port)
    trainer._reshard_sync.run()
    if trainer.accelerator.is_main_process:
        trainer.model_version += 1
        if trainer.rollout_worker:
            trainer.rollout_worker.update_model_version(trainer.model_version)
    return began, began, time.time()
