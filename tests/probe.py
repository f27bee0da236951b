"""What tests of trainers ask of a worker of vLLM, and of each other."""

import hashlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


class Probed:
    """Mixed into a worker."""

    def digests(self) -> dict[str, str]:
        named = self.get_model().named_parameters()
        return {
            n: hashlib.sha256(p.data.contiguous().view(torch.uint8).numpy()).hexdigest() for n, p in named
        }

    def wipe(self) -> None:
        for parameter in self.get_model().parameters():
            parameter.data.zero_()

    def ready(self) -> list:
        """Return whether it would serve, and which version it has."""
        from reshard.engines.vllm.guard import guard_of

        guard = guard_of(self.get_model(), self.vllm_config)
        return [guard.ready, guard.version]


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
