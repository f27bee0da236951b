"""Live trainers as sources of a refit."""

from typing import TYPE_CHECKING

from reshard.core.extras import require
from reshard.core.lazy import lazy

if TYPE_CHECKING:
    from reshard.trainers.drafter import WithDrafter
    from reshard.trainers.fsdp import FsdpModel
    from reshard.trainers.megatron import MegatronModel

require("megatron", "torch")

__all__ = ["FsdpModel", "MegatronModel", "WithDrafter"]

if not TYPE_CHECKING:  # a type checker knows the names above, and that there are no others
    __getattr__, __dir__ = lazy(
        __name__,
        {
            "FsdpModel": "reshard.trainers.fsdp",
            "MegatronModel": "reshard.trainers.megatron",
            "WithDrafter": "reshard.trainers.drafter",
        },
    )
