"""NeMo-RL's synchronizer of weights for GPUs that policy and vLLM share, with refits."""

from contextlib import nullcontext
from typing import Any

from reshard.core.extras import importing_beside

with importing_beside("NeMo-RL", "nemo_rl", "ray"):
    import ray
    from nemo_rl.weight_sync.interfaces import WeightSynchronizer

from reshard.comm.group import RefitGroup
from reshard.comm.secret import new_secret
from reshard.core.errors import ReshardError
from reshard.integrations.nemo_rl.calls import Workers, futures_of, late_ranks
from reshard.integrations.options import SyncOptions
from reshard.integrations.sync import ANSWER_SECONDS, WAITS, Calls, late_error

# What every rank of the policy makes, by NeMo-RL's name of it.
BACKEND = "reshard.integrations.nemo_rl:ReshardCheckpointEngine"


class ColocatedSynchronizer(Workers, WeightSynchronizer):
    """In the place of NeMo-RL's synchronizer for GPUs that policy and vLLM share: its order, with a
    refit in the middle."""

    def __init__(
        self,
        policy: Any,
        generation: Any,
        options: SyncOptions,
    ) -> None:
        super().__init__(policy, generation, options)
        self._stale, self._connects = True, True
        self._address, self._secret = "", ""  # where all have met last, and with which secret

    @property
    def is_stale(self) -> bool:
        """True while vLLM has other weights than the last ones that were asked for."""
        return self._stale

    def init_communicator(self) -> None:
        """Make our side of every rank of the policy; the first sync connects."""
        self._get(
            self._on_policy(
                "init_checkpoint_engine",
                backend=BACKEND,
                bucket_size_bytes=0,
                engine_kwargs=self._options.to_config(),
            )
        )

    def sync_weights(self, *, timer: Any = None, kv_scales: dict[str, float] | None = None) -> None:
        """Refit all engines.

        Raises the policy's or an engine's ReshardError if it fails; the next one connects again.
        """
        if kv_scales is not None:
            raise ReshardError("scales of an fp8 key-value cache are not weights: set kv_cache_dtype=auto")
        self._stale = True
        self._policy.offload_before_refit()
        self._generation.prepare_for_generation(tags=["weights"])
        label = "prepare_for_generation/transfer_and_update_weights"
        try:
            with timer.time(label) if timer is not None else nullcontext():
                self._refit()
        finally:
            self._policy.offload_after_refit()
            self._generation.prepare_for_generation(tags=["kv_cache"])
        self._stale = False

    def shutdown(self) -> None:
        """Unmap the others' memory."""
        self._get(self._on_policy("finalize_checkpoint_engine"))
        self._connects = True

    def _refit(self) -> None:
        try:
            self._start_refit()
        except BaseException:
            self._connects = True
            raise
        self._connects = False

    def _start_refit(self) -> None:
        ranks = len(self._policy.worker_group.workers)
        engine_ranks = len(self._generation.worker_group.workers)
        address = ""
        if self._connects:
            address = self._address = self._get(self._on_policy("meeting_place"))[0]
            self._secret = new_secret()
            self._get(
                self._on_policy("meet", address=address, size=ranks + engine_ranks, secret=self._secret)
            )
        policy_calls = self._on_policy("send_weights_via_checkpoint_engine", kv_scales=None)
        ranks_each = engine_ranks // self._generation.dp_size
        verify, timeout = self._options.verify, self._options.timeout
        arguments = [
            (address, self._secret, ranks, first, engine_ranks, timeout, verify)
            for first in range(0, engine_ranks, ranks_each)
        ]
        self._wait(policy_calls, self._on_engines("reshard_take", arguments))

    def _wait(self, policy_calls: list[Any], engine_calls: list[Any]) -> None:
        """Wait for a refit. Raises ReshardError naming the engine that has failed, or those that do
        not answer."""
        seconds = WAITS * self._options.timeout
        try:
            ray.get(policy_calls + engine_calls, timeout=seconds)
        except ray.exceptions.RayError as error:
            # An engine that has died, or refuses before it has joined, cannot tell the policy,
            # which waits for it.
            calls = Calls(futures_of(engine_calls))
            if failure := calls.first_failure(ANSWER_SECONDS):
                RefitGroup.abort(self._address, failure, secret=self._secret)
                raise ReshardError(failure) from error
            if isinstance(error, ray.exceptions.GetTimeoutError):
                late = late_ranks(policy_calls)
                late += [name for name, call in calls.calls.items() if not call.done()]
                raise late_error(late, seconds) from error
            raise
