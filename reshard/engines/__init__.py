"""Live inference engines as destinations of a refit."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from reshard.core.extras import importing

if TYPE_CHECKING:
    from reshard.engines.vllm.live import VllmModel
    from reshard.engines.vllm.worker import RefitExtension

_MODULES = {"VllmModel": "vllm.live", "RefitExtension": "vllm.worker"}
__all__ = ["RefitExtension", "VllmModel"]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        with importing("vllm"):
            return getattr(import_module(f"reshard.engines.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'reshard.engines' has no attribute {name!r}")
