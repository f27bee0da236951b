"""Calls of NeMo-RL's groups of workers from the driver, for synchronizers of weights."""

from collections.abc import Mapping
from typing import Any

from reshard.core.extras import importing_beside

with importing_beside("NeMo-RL", "nemo_rl", "ray"):
    import ray

from reshard.integrations.options import SyncOptions
from reshard.integrations.sync import late_error

# The axes of vLLM's workers of which the first of each data parallel group talks to its engine.
ONE_OF_EACH_ENGINE = ["tensor_parallel", "pipeline_parallel"]


class Workers:
    """The ranks of a `policy`, and the engines of a `generation`, as NeMo-RL's driver calls them."""

    def __init__(self, policy: Any, generation: Any, options: SyncOptions) -> None:
        self._policy, self._generation, self._options = policy, generation, options

    def _get(self, calls: list[Any], seconds: float | None = None) -> list[Any]:
        """Return what the policy's ranks answer. Raises ReshardError if one does not within the
        time limit."""
        seconds = seconds or self._options.timeout
        try:
            answers: list[Any] = ray.get(calls, timeout=seconds)
            return answers
        except ray.exceptions.GetTimeoutError as error:
            raise late_error(late_ranks(calls), seconds) from error

    def _on_policy(self, method: str, **arguments: Any) -> list[Any]:
        return self._policy.worker_group.run_all_workers_single_data(
            "checkpoint_engine_rpc", checkpoint_method=method, method_kwargs=arguments
        )

    def _on_engines(self, method: str, arguments: list[tuple]) -> list[Any]:
        """Call a method of our workers of vLLM; `arguments` are those of each engine."""
        return self._generation.worker_group.run_all_workers_multiple_data(
            self._rpc,
            method_args=arguments,
            run_rank_0_only_axes=ONE_OF_EACH_ENGINE,
            common_kwargs={"checkpoint_method": method},
        )

    def _on_leaders(self, method: str, arguments: Mapping[int, tuple]) -> dict[int, Any]:
        """Call a method of our workers of some engines, with the arguments of each; the calls are by engine."""
        return {
            engine: getattr(self._leader(engine), self._rpc).remote(
                checkpoint_method=method, method_args=each
            )
            for engine, each in arguments.items()
        }

    def _leader(self, engine: int) -> Any:
        """Return the actor that talks to an engine, which is another one once NeMo-RL has replaced it."""
        group = self._generation.worker_group
        return group.workers[group.get_dp_leader_worker_idx(engine)]

    @property
    def _rpc(self) -> str:
        is_async = self._generation.cfg["vllm_cfg"]["async_engine"]
        return "checkpoint_engine_rpc_async" if is_async else "checkpoint_engine_rpc"

    @property
    def _ranks_each(self) -> int:
        """Return how many ranks each engine has."""
        ranks: int = len(self._generation.worker_group.workers)
        return ranks // self._generation.dp_size


def late_ranks(calls: list[Any]) -> list[str]:
    """Return the policy's ranks whose calls have not returned."""
    return [
        f"rank {index} of the policy"
        for index, call in enumerate(calls)
        if not ray.wait([call], timeout=0)[0]
    ]


def name_of(engine: int) -> str:
    """Return what errors call an engine."""
    return f"engine {engine} of the rollout"


def futures_of(calls: Mapping[int, Any]) -> dict[str, Any]:
    """Return the futures of calls of engines, by the names of these."""
    return {name_of(engine): call.future() for engine, call in calls.items()}
