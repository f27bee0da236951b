"""ROLL's weight sync as a refit. vLLM's workers import `RollExtension`, where what the trainer needs may not be
installed: nothing is imported before it is used."""

from typing import TYPE_CHECKING, Any

from reshard.core.lazy import lazy

if TYPE_CHECKING:
    from reshard.integrations.roll.actors import InferWorker
    from reshard.integrations.roll.worker import RollExtension

    ActorWorker: Any
    ActorPGWorker: Any
    AgenticActorWorker: Any
    AgenticActorPGWorker: Any

__all__ = [
    "ActorPGWorker",
    "ActorWorker",
    "AgenticActorPGWorker",
    "AgenticActorWorker",
    "InferWorker",
    "RollExtension",
]
if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy(
        __name__, dict.fromkeys(__all__, f"{__name__}.actors") | {"RollExtension": f"{__name__}.worker"}
    )
