"""NeMo-RL's synchronizer of weights for GPUs that policy and vLLM share, with refits."""

from contextlib import nullcontext
from typing import Any

from reshard.core.errors import ReshardError
from reshard.integrations.nemo_rl.driven import LABEL, NO_SCALES, DrivenSynchronizer


class ColocatedSynchronizer(DrivenSynchronizer):
    """In the place of NeMo-RL's synchronizer for GPUs that policy and vLLM share: its order, with a
    refit in the middle."""

    def sync_weights(self, *, timer: Any = None, kv_scales: dict[str, float] | None = None) -> None:
        """Refit all engines.

        Raises the policy's or an engine's ReshardError if it fails; the next one connects again.
        """
        if kv_scales is not None:
            raise ReshardError(NO_SCALES)
        self._stale = True
        self._policy.offload_before_refit()
        self._generation.prepare_for_generation(tags=["weights"])
        try:
            with timer.time(LABEL) if timer is not None else nullcontext():
                self._refit(list(range(self._generation.dp_size)))
        finally:
            self._policy.offload_after_refit()
            self._generation.prepare_for_generation(tags=["kv_cache"])
        self._stale = False
