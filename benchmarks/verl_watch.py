"""Extensions of vLLM's workers under verl, stock and ours, that note after each sync what the worker then serves."""

import hashlib
import json
import os
import time

import torch
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from reshard.trainers.verl_worker import VerlExtension


def note(worker, began: float) -> None:
    """A line with a digest of every parameter's bits, and how long the worker took."""
    torch.cuda.synchronize()
    took, digest = time.perf_counter() - began, hashlib.sha256()
    for name, parameter in sorted(worker.model_runner.model.named_parameters()):
        digest.update(
            name.encode() + parameter.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes()
        )
    with open(f"{os.environ['RESHARD_WATCH']}.{worker.rank}", "a", encoding="utf-8") as file:
        file.write(json.dumps({"seconds": took, "weights": digest.hexdigest()}) + "\n")


class Stock(vLLMColocateWorkerExtension):
    """verl's own sync."""

    def update_weights_from_ipc(self, *args, **kwargs) -> None:
        """As it is, and a note."""
        began = time.perf_counter()
        super().update_weights_from_ipc(*args, **kwargs)
        note(self, began)


class Refit(VerlExtension):
    """A refit."""

    def reshard_refit(self, *args, **kwargs) -> dict:
        """As it is, and a note."""
        began = time.perf_counter()
        report = super().reshard_refit(*args, **kwargs)
        note(self, began)
        return report
