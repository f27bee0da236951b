"""The extension of vLLM's workers under ROLL: ROLL's own and ours.

actor_infer.strategy_args.strategy_config.worker_extension_cls=reshard.integrations.roll.RollExtension
"""

from collections.abc import Iterable
from typing import Any

from reshard.core.extras import importing_beside

with importing_beside("ROLL", "roll"):
    from roll.third_party.vllm.worker import WorkerV1

from reshard.engines.vllm.compat import plain_weights
from reshard.engines.vllm.guard import guard_of
from reshard.engines.vllm.worker import RefitExtension


class RollExtension(WorkerV1, RefitExtension):
    """ROLL's extension, which loads, wakes and offloads as ever, and ours, by which a refit writes
    where vLLM serves from."""

    _reshard_loaded = False

    def reshard_wake(self) -> None:
        """Give the weights memory, as ROLL's own sync does."""
        self.reload_model()

    def reshard_meet(self, meeting: dict[str, Any], adapter: str | None) -> None:
        """Connect; the meeting's `first_rank` is that of the first worker of this engine, of which a worker of
        ROLL has exactly one."""
        self.reload_model()
        meeting = dict(meeting)
        rank = meeting.pop("first_rank") + self.rank  # type: ignore[attr-defined]
        self.reshard_connect_worker(rank=rank, adapter=adapter, **meeting)

    def reshard_take(self, verify: bool) -> dict[str, Any]:
        """Take the trainer's weights; return the report as a dict."""
        self.reload_model()
        self._reshard_loaded = False
        return self.reshard_refit(verify=verify)

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> None:
        """Load weights in ROLL's own sync."""
        self._reshard_loaded = True
        super().load_weights(weights)

    def process_weights_after_loading(self) -> None:
        """Process what ROLL's own sync has loaded, which is whole from here on; ROLL calls this
        after every sync.

        What a refit has written is processed already.
        """
        if not self._reshard_loaded:
            return
        with plain_weights():
            super().process_weights_after_loading()
        self._reshard_loaded = False
        guard_of(self.get_model(), self.vllm_config).loaded()  # type: ignore[attr-defined]
