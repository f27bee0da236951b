"""Live trainers as sources of a refit."""

from typing import TYPE_CHECKING

from reshard.core.extras import require
from reshard.core.lazy import lazy
from reshard.core.moved import MovedModules

if TYPE_CHECKING:
    from reshard.trainers.fsdp import FsdpModel
    from reshard.trainers.megatron import MegatronModel

require("megatron", "torch")

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
if not TYPE_CHECKING:  # a type checker knows the names above, and that there are no others
    __getattr__, __dir__ = lazy(
        __name__,
        {
            "FsdpModel": "reshard.trainers.fsdp",
            "MegatronModel": "reshard.trainers.megatron",
            **{name: f"reshard.trainers.{name}" for name in _ADAPTERS},
        },
        renamed={
            name: f"reshard.integrations.{name}" for name in ("HttpClient", "LlmClient", "WeightTransfer")
        },
    )
