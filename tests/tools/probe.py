"""What tests of trainers ask of a worker of vLLM, and of each other."""

import hashlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def digest_of(tensor: torch.Tensor) -> str:
    """The digest of a tensor's bytes."""
    return hashlib.sha256(tensor.data.contiguous().view(torch.uint8).numpy()).hexdigest()


class Probed:
    """Mixed into a worker."""

    def digests(self) -> dict[str, str]:
        return {name: digest_of(one) for name, one in self.get_model().named_parameters()}

    def wipe(self) -> None:
        for parameter in self.get_model().parameters():
            parameter.data.zero_()

    def adapter(self, name: str, folder: str = "") -> list:
        return adapter_in_slot(self, name, folder)

    def ready(self) -> list:
        """Return whether it would serve, and which version it has."""
        from reshard.engines.vllm.guard import guard_of

        guard = guard_of(self.get_model(), self.vllm_config)
        return [guard.ready, guard.version]


def with_adapter(folder: str) -> Any:
    """A transformers model with PEFT's adapter on its linear layers."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    layers = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    return get_peft_model(plain, LoraConfig(r=4, lora_alpha=10, target_modules=layers))


def train_adapter(model: Any, seed: int, folder: str) -> None:
    """Give an adapter other numbers, and let PEFT save it."""
    numbers = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=numbers) * 0.1)
    model.save_pretrained(folder)


def adapter_in_slot(worker: Any, name: str, folder: str = "") -> list:
    """Digests of what a worker's vLLM has in the slot of an adapter that is refitted, or after its own loading of
    a directory; and the ids of adapters that it lists."""
    from vllm.lora.request import LoRARequest

    from reshard.engines.vllm.guard import guard_of

    manager = worker.get_model().lora_manager
    if folder:
        worker.add_lora(LoRARequest("theirs", 77, folder))
        slot = manager.lora_index_to_id.index(77)
    else:
        newest = guard_of(worker.get_model(), worker.vllm_config).adapters.newest[name]
        slot = manager.lora_index_to_id.index(newest.identity)
    digests = {
        f"{key} {kind} {index}": hashlib.sha256(held[slot].contiguous().view(torch.uint8).numpy()).hexdigest()
        for key, layer in manager.modules.items()
        for kind in ("lora_a_stacked", "lora_b_stacked")
        for index, held in enumerate(getattr(layer, kind))
        if isinstance(getattr(layer, kind), tuple)
    }
    listed = sorted(worker.list_loras())
    worker.remove_lora(77)
    return [digests, listed]


def caught(function: Callable[[], Any]) -> str:
    """What it raises, or what the call by Ray that it made has raised, in a line; empty where nothing."""
    try:
        function()
    except Exception as error:
        return str(getattr(error, "cause", None) or error)
    return ""


def alike(one: dict, other: dict) -> int:
    """How many parameters have the same bytes."""
    assert one.keys() == other.keys() and len(one) > 30
    return sum(one[name] == other[name] for name in one)


def alone(link: Any, over: str) -> None:
    """The next refit of this member waits for nobody; when it is over there is a file of this name."""
    refit, link.group.timeout = link.refit, 0.0

    def refitted(*args: Any, **kwargs: Any) -> Any:
        try:
            return refit(*args, **kwargs)
        finally:
            Path(over).touch()

    link.refit = refitted


def after(link: Any, over: str) -> None:
    """The next refit of this member begins when that file is there."""
    refit, deadline = link.refit, time.monotonic() + 300

    def refitted(*args: Any, **kwargs: Any) -> Any:
        while not Path(over).exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return refit(*args, **kwargs)

    link.refit = refitted
