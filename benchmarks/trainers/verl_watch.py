"""Extensions of vLLM's workers under verl that note after each sync what the worker then serves."""

import time
from typing import Any

from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from benchmarks.trainers.grpo import note, overwrite
from reshard.integrations.verl.worker import VerlExtension


class Stock(vLLMColocateWorkerExtension):
    """verl's own sync."""

    def update_weights_from_ipc(self, *args: Any, **kwargs: Any) -> None:
        """As it is, and a note."""
        began = time.perf_counter()
        super().update_weights_from_ipc(*args, **kwargs)
        note(self.rank, self.model_runner.model, "stock", began)


class Refit(VerlExtension):
    """A refit, and verl's own sync into weights that were overwritten before, where that is asked for."""

    noted: int | None = None  # the last version
    repeats = 0  # of it

    def reshard_refit(self, version: int | None = None, *args: Any, **kwargs: Any) -> dict:
        """As it is, and a note; the same version once more is noted as such, and after that without a digest,
        which takes its time within the trainer's call."""
        self.repeats = self.repeats + 1 if version == self.noted else 0
        self.noted = version
        way = ("refit", "again", "alone")[min(self.repeats, 2)]
        began = time.perf_counter()
        report = super().reshard_refit(version, *args, **kwargs)
        prefix = "received_bytes_"
        received = {
            key.removeprefix(prefix): size for key, size in report.items() if key.startswith(prefix) and size
        }
        served = self.model_runner.model if way != "alone" else None
        note(self.rank, served, way, began, received=received)
        return report

    def update_weights_from_ipc(self, *args: Any, **kwargs: Any) -> None:
        """As it is, into other weights, and a note."""
        overwrite(self.model_runner.model)
        began = time.perf_counter()
        super().update_weights_from_ipc(*args, **kwargs)
        note(self.rank, self.model_runner.model, "stock", began)
