"""Syncs of NeMo-RL that its driver starts by calls of our worker in vLLM, and not by NeMo-RL's checkpoint engine there:
an engine needs nothing before the first call."""

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
LABEL = "prepare_for_generation/transfer_and_update_weights"  # NeMo-RL's of the time that a sync takes
NO_SCALES = "scales of an fp8 key-value cache are not weights: set kv_cache_dtype=auto"


class DrivenSynchronizer(Workers, WeightSynchronizer):
    """A synchronizer of NeMo-RL's whose syncs are refits of its engines."""

    def __init__(self, policy: Any, generation: Any, options: SyncOptions) -> None:
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

    def shutdown(self) -> None:
        """Unmap the others' memory."""
        self._get(self._on_policy("finalize_checkpoint_engine"))
        self._connects = True

    def _refit(self, engines: list[int]) -> None:
        """Refit these engines; connect all before if one is new or the last refit has failed.

        Raises the policy's or an engine's ReshardError if it fails; the next one connects again.
        """
        try:
            self._start_refit(engines)
        except BaseException:
            self._connects = True
            raise
        self._connects = False

    def _start_refit(self, engines: list[int]) -> None:
        ranks, ranks_each = len(self._policy.worker_group.workers), self._ranks_each
        engine_ranks = len(engines) * ranks_each
        address = ""
        if self._connects:
            address = self._address = self._get(self._on_policy("meeting_place"))[0]
            self._secret = new_secret()
            self._get(
                self._on_policy("meet", address=address, size=ranks + engine_ranks, secret=self._secret)
            )
        policy_calls = self._on_policy("send_weights_via_checkpoint_engine", kv_scales=None)
        verify, timeout = self._options.verify, self._options.timeout
        arguments = {
            engine: (address, self._secret, ranks, index * ranks_each, engine_ranks, timeout, verify)
            for index, engine in enumerate(engines)
        }
        self._wait(policy_calls, self._on_leaders("reshard_take", arguments))

    def _wait(self, policy_calls: list[Any], engine_calls: dict[int, Any]) -> None:
        """Wait for a refit. Raises ReshardError naming the engine that has failed, or those that do
        not answer."""
        seconds = WAITS * self._options.timeout
        try:
            ray.get([*policy_calls, *engine_calls.values()], timeout=seconds)
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
