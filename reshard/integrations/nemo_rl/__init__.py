"""NeMo-RL's weight sync as a refit. vLLM's workers import `ReshardWorker`, where what the policy needs may not be
installed: nothing is imported before it is used."""

from typing import TYPE_CHECKING

from reshard.core.lazy import lazy

if TYPE_CHECKING:
    from reshard.integrations.nemo_rl.checkpoint_engine import ReshardCheckpointEngine
    from reshard.integrations.nemo_rl.worker import ReshardWorker

__all__ = ["ReshardCheckpointEngine", "ReshardWorker"]
if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy(
        __name__,
        {
            "ReshardCheckpointEngine": f"{__name__}.checkpoint_engine",
            "ReshardWorker": f"{__name__}.worker",
        },
    )
