"""Extensions of vLLM's workers under verl that note after each sync what the worker then serves."""

import hashlib
import json
import os
import time
from typing import Any

import torch
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from reshard.trainers.verl_worker import VerlExtension


def digest(model: torch.nn.Module) -> str:
    """Of every parameter's name and bits: 16-bit words times their place, summed where they lie, so that a sync's time stays a sync's."""
    found = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        words = parameter.detach().contiguous().view(torch.int16).flatten()
        total = torch.zeros((), dtype=torch.int64, device=words.device)
        for start in range(0, len(words), 1 << 26):
            part = words[start : start + (1 << 26)].long()
            total += (part * (torch.arange(len(part), device=part.device) * 2 + 2 * start + 1)).sum()
        found.update(f"{name} {total.item()}".encode())
    return found.hexdigest()


def write(who: str, way: str, began: float, **more: Any) -> None:
    """A line: how a sync went, how long it took since then in seconds, and what its GPU holds then, all processes together, in bytes."""
    free, total = torch.cuda.mem_get_info()
    line = {
        "way": way,
        "at": time.time(),
        "seconds": time.perf_counter() - began,
        "used": total - free,
    } | more
    with open(f"{os.environ['RESHARD_WATCH']}.{who}", "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def note(worker: Any, way: str, began: float) -> None:
    """What this worker holds now."""
    torch.cuda.synchronize()
    took = time.perf_counter() - began
    weights = digest(worker.model_runner.model)
    write(str(worker.rank), way, time.perf_counter() - took, weights=weights)


class Stock(vLLMColocateWorkerExtension):
    """verl's own sync."""

    def update_weights_from_ipc(self, *args: Any, **kwargs: Any) -> None:
        """As it is, and a note."""
        began = time.perf_counter()
        super().update_weights_from_ipc(*args, **kwargs)
        note(self, "stock", began)


class Refit(VerlExtension):
    """A refit, and verl's own sync into weights that were overwritten before, where that is asked for."""

    def reshard_refit(self, *args: Any, **kwargs: Any) -> dict:
        """As it is, and a note."""
        began = time.perf_counter()
        report = super().reshard_refit(*args, **kwargs)
        note(self, "refit", began)
        return report

    def update_weights_from_ipc(self, *args: Any, **kwargs: Any) -> None:
        """As it is, into other weights, and a note."""
        with torch.no_grad():
            for parameter in self.model_runner.model.parameters():
                parameter.fill_(0.5)
        torch.cuda.synchronize()
        began = time.perf_counter()
        super().update_weights_from_ipc(*args, **kwargs)
        note(self, "stock", began)
