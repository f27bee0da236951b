"""ROLL's weight sync as a refit. vLLM's workers import `RollExtension`, where the trainer's packages may be missing:
nothing is imported before it is used."""

from reshard.core.lazy import lazy

ACTORS = ("ActorPGWorker", "ActorWorker", "AgenticActorPGWorker", "AgenticActorWorker", "InferWorker")
PLACES = dict.fromkeys(ACTORS, f"{__name__}.actors") | {"RollExtension": f"{__name__}.worker"}
__all__ = [*PLACES]
__getattr__, __dir__ = lazy(__name__, PLACES)
