"""Live trainers as sources of a refit."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from reshard.core.extras import require

if TYPE_CHECKING:
    from reshard.trainers.fsdp import FsdpModel
    from reshard.trainers.megatron import MegatronModel
    from reshard.trainers.weight_transfer import HttpClient, LlmClient, WeightTransfer

require("megatron", "torch")

_HOMES = {
    "FsdpModel": "fsdp",
    "HttpClient": "weight_transfer",
    "LlmClient": "weight_transfer",
    "MegatronModel": "megatron",
    "WeightTransfer": "weight_transfer",
}
__all__ = ["FsdpModel", "HttpClient", "LlmClient", "MegatronModel", "WeightTransfer"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"reshard.trainers.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'reshard.trainers' has no attribute {name!r}")
