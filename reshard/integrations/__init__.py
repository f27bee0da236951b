"""The weight sync of other people's trainers through a refit: vLLM's weight transfer, verl,
ms-swift, ROLL and NeMo-RL."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from reshard.core.extras import require

if TYPE_CHECKING:
    from reshard.integrations.weight_transfer import HttpClient, LlmClient, WeightTransfer

require("megatron", "torch")

__all__ = ["HttpClient", "LlmClient", "WeightTransfer"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module("reshard.integrations.weight_transfer"), name)
    raise AttributeError(f"module 'reshard.integrations' has no attribute {name!r}")
