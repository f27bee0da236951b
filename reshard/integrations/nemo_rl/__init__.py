"""NeMo-RL's weight sync as a refit. vLLM's workers import `ReshardWorker`, where the policy's packages may be missing:
nothing is imported before it is used."""

from reshard.core.lazy import lazy

PLACES = {
    "ReshardCheckpointEngine": f"{__name__}.checkpoint_engine",
    "ReshardWorker": f"{__name__}.worker",
}
__all__ = [*PLACES]
__getattr__, __dir__ = lazy(__name__, PLACES)
