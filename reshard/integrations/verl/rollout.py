"""What verl's adapters to vLLM and SGLang do in a refit: connect the replica's engine, and refit it."""

import asyncio
from concurrent.futures import Future
from typing import Any

import ray
import torch.distributed as dist

from reshard.comm.group import RefitGroup
from reshard.comm.ranks import error_line
from reshard.core.errors import ReshardError
from reshard.integrations.options import SyncOptions
from reshard.integrations.sync import WAITS, Calls, WeightSync, late_error
from reshard.integrations.verl.plugin import Invitation, Shards, adapter_of, options_of


class RefittedRollout:
    """Part of an adapter of verl's, before its ``ServerAdapter``, for weights that are a model in this process,
    or a meeting with one elsewhere.

    A subclass says how its engine is called. Each call returns its future, None on ranks that do not talk
    to the replica's server. verl's own way to an engine has to be awaited, and each replica is called by one of its
    own ranks: so this goes through the steps of `WeightSync.run` by itself.
    """

    config: Any
    model_config: Any
    replica_rank: int
    _pd_role: str | None
    _sync: WeightSync | None = None

    async def _call_connect(self, meeting: dict[str, Any], adapter: str | None) -> Future[Any] | None:
        raise NotImplementedError

    async def _call_refit(self, version: int | None, options: SyncOptions) -> Future[Any] | None:
        raise NotImplementedError

    async def _refit_done(self, version: int | None, options: SyncOptions) -> None:
        """Tell the server that it has other weights."""
        raise NotImplementedError

    async def update_weights(
        self, weights: Any, global_steps: int | None = None, wire_format: str = "named_tensors", **kwargs: Any
    ) -> None:
        """Refit this replica, or, for weights that are tensors, do as verl does."""
        if isinstance(weights, Shards | Invitation):
            await self.refit(weights, global_steps)
        else:
            await super().update_weights(  # type: ignore[misc]  # of verl's adapter, which comes after this class
                weights, global_steps=global_steps, wire_format=wire_format, **kwargs
            )

    async def refit(self, weights: Shards | Invitation, version: int | None) -> None:
        """Refit this replica.

        Raises ReshardError, as the engine's side does, if it fails; the next one connects again.
        """
        if self._pd_role is not None:
            raise ReshardError("a refit does not know disaggregated prefill: unset rollout.disaggregation")
        options = options_of(self.config)
        if isinstance(weights, Shards):
            await self._refit_from(weights, version, options)
        else:
            await self._refit_at(weights, version, options)
        await self._refit_done(version, options)

    async def _refit_from(self, weights: Shards, version: int | None, options: SyncOptions) -> None:
        """Refit from this process, which is a rank of the trainer, and perhaps the one that talks
        to its replica's server."""
        if self._sync is None:
            self._sync = WeightSync(options)
        sync = self._sync
        sync.options = options
        with sync.dropped_on_failure():
            meeting = sync.agreed_meeting(self._members())
            if meeting is not None or not sync.reads_host_memory(weights.source):
                weights.load()
            if meeting is not None:
                arguments = meeting.arguments(self._first_rank())
                calls = self._calls(await self._call_connect(arguments, weights.adapter))
                members = meeting.join(dist.get_rank())
                sync.connect(members, weights.source, calls=calls, adapter=weights.adapter)
            sync.refit(version, self._calls(await self._call_refit(version, options)))

    async def _refit_at(self, invitation: Invitation, version: int | None, options: SyncOptions) -> None:
        """Refit from a trainer that this replica meets; this process is not a member."""
        try:
            if invitation.is_new:
                adapter = adapter_of(self.model_config)
                await self._answer(options, await self._call_connect(invitation.meeting, adapter))
            await self._answer(options, await self._call_refit(version, options))
        except ReshardError as error:
            # An engine that has died, or refuses before it has joined, cannot tell the actor, which
            # waits for it.
            meeting = invitation.meeting
            RefitGroup.abort(meeting["address"], str(error), secret=meeting["secret"])
            raise

    async def _answer(self, options: SyncOptions, call: Future[Any] | None) -> None:
        """Wait for a call of the rollout. Raises ReshardError if it fails, or takes longer than all the
        waits in it may."""
        if call is None:
            return
        seconds = WAITS * options.timeout
        try:
            await asyncio.wait_for(asyncio.wrap_future(call), seconds)
        except (asyncio.TimeoutError, TimeoutError):
            raise late_error([self._replica()], seconds) from None
        except (ReshardError, ray.exceptions.RayError) as error:
            raise ReshardError(f"{self._replica()} has failed: {error_line(error)}") from error

    def _calls(self, call: Future[Any] | None) -> Calls:
        """Return this rank's call of an engine, which runs while the rank does its part."""
        return Calls({} if call is None else {self._replica(): call})

    def _replica(self) -> str:
        return f"the rollout's replica {self.replica_rank}"

    def _workers(self) -> int:
        """Return how many workers a replica has."""
        sizes = ("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size")
        tp, dp, pp = (int(getattr(self.config, name)) for name in sizes)
        return tp * dp * pp

    def _members(self) -> int:
        """Return how many members there are: the trainer's ranks, and the workers of all replicas
        on their GPUs."""
        trainers, workers = dist.get_world_size(), self._workers()
        if trainers % workers:
            raise ReshardError(
                f"{trainers} ranks of the trainer are not a whole number of replicas of {workers}"
            )
        return 2 * trainers

    def _first_rank(self) -> int:
        """Return the member that this replica's first worker is, after the trainer's ranks."""
        return dist.get_world_size() + int(self.replica_rank) * self._workers()
