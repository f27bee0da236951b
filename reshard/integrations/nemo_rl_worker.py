"""vLLM's worker under NeMo-RL, which has an extension of its own already.

policy.generation.vllm_kwargs.worker_cls=reshard.integrations.nemo_rl_worker.ReshardWorker
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

_here: Callable[[], Any] | None = None


class ReshardWorker(RefitExtension, Worker):
    """vLLM's own, and what a refit needs of it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        global _here
        super().__init__(*args, **kwargs)
        _here = weakref.ref(self)

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
        """Said by `reshard.integrations.nemo_rl.ColocatedSynchronizer`: connect where an address is given, and refit.
        `prefix` is the first rank of this engine among those of all `engines`."""
        from nemo_rl.models.generation.vllm.checkpoint_engine import resolve_rollout_rank

        if address:
            rank = trainers + resolve_rollout_rank(prefix, engines)
            self.reshard_join(address, rank, trainers + engines, timeout=timeout, secret=secret)
        return self.reshard_refit(verify=verify)


def here() -> ReshardWorker:
    """The worker of this process. Raises ReshardError where vLLM has another."""
    worker = _here() if _here is not None else None
    if worker is None:
        raise ReshardError(
            f"vLLM's worker is not ours: set policy.generation.vllm_kwargs.worker_cls={__name__}.ReshardWorker"
        )
    return worker
