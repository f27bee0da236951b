"""Live trainers as sources of a refit."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from reshard.core.deprecated import MovedModules, warn_renamed
from reshard.core.extras import require

if TYPE_CHECKING:
    from reshard.trainers.fsdp import FsdpModel
    from reshard.trainers.megatron import MegatronModel

require("megatron", "torch")

_MODULES = {"FsdpModel": "fsdp", "MegatronModel": "megatron"}
_MOVED = ("HttpClient", "LlmClient", "WeightTransfer")
__all__ = ["FsdpModel", "MegatronModel"]

_ADAPTERS = (
    "nemo_rl",
    "nemo_rl_worker",
    "roll",
    "roll_worker",
    "swift",
    "verl",
    "verl_worker",
    "weight_transfer",
)
MovedModules({f"reshard.trainers.{name}": f"reshard.integrations.{name}" for name in _ADAPTERS}).install()


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f"reshard.trainers.{_MODULES[name]}"), name)
    if name in _MOVED:
        warn_renamed(f"reshard.trainers.{name}", f"reshard.integrations.{name}")
        return getattr(import_module("reshard.integrations"), name)
    if name in _ADAPTERS:
        return import_module(f"reshard.trainers.{name}")
    raise AttributeError(f"module 'reshard.trainers' has no attribute {name!r}")
