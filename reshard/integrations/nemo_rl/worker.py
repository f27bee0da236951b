"""vLLM's worker under NeMo-RL, which has an extension of its own already.

policy.generation.vllm_kwargs.worker_cls=reshard.integrations.nemo_rl.ReshardWorker
"""

import weakref
from collections.abc import Callable
from typing import Any

from vllm.platforms import current_platform

from reshard.core.errors import ReshardError
from reshard.engines.vllm.worker import RefitExtension

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as Worker
else:
    from vllm.v1.worker.gpu_worker import Worker  # type: ignore[assignment]

_worker: Callable[[], Any] | None = None


class ReshardWorker(RefitExtension, Worker):
    """vLLM's own worker with what a refit needs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        global _worker
        super().__init__(*args, **kwargs)
        _worker = weakref.ref(self)

    def reshard_take(
        self,
        address: str,
        secret: str,
        trainers: int,
        prefix: int,
        engines: int,
        timeout: float,
        verify: bool,
    ) -> dict[str, Any]:
        """Take the trainer's weights, as `colocated.ColocatedSynchronizer` asks; connect first if an
        address is given.

        `prefix` is the first rank of this engine among those of all `engines`.
        """
        from nemo_rl.models.generation.vllm.checkpoint_engine import resolve_rollout_rank

        if address:
            rank = trainers + resolve_rollout_rank(prefix, engines)
            self.reshard_connect_worker(address, rank, trainers + engines, timeout=timeout, secret=secret)
        return self.reshard_refit(verify=verify)


def this_worker() -> ReshardWorker:
    """Return the worker of this process. Raises ReshardError if vLLM has another."""
    worker = _worker() if _worker is not None else None
    if worker is None:
        raise ReshardError(
            f"vLLM's worker is not ours: set policy.generation.vllm_kwargs.worker_cls={__package__}.ReshardWorker"
        )
    return worker
