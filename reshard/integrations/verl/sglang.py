"""verl's adapter to an SGLang server, whose weight sync is a refit."""

from concurrent.futures import Future
from functools import partial
from typing import Any

from reshard.core.errors import ReshardError
from reshard.core.extras import importing_beside

with importing_beside("verl", "verl", "sglang"):
    from verl.workers.rollout.sglang_rollout.sglang_rollout import ServerAdapter

from reshard.comm.background import in_background
from reshard.engines.sglang.calls import connect_server, refit_server
from reshard.integrations.options import SyncOptions
from reshard.integrations.sync import WAITS
from reshard.integrations.verl.plugin import NO_ADAPTERS, Invitation, Shards
from reshard.integrations.verl.rollout import RefittedRollout


class ReshardSglangAdapter(RefittedRollout, ServerAdapter):
    """verl's adapter to SGLang, which calls reshard's plugin in its schedulers by the server's routes."""

    async def refit(self, weights: Shards | Invitation, version: int | None) -> None:
        """Refit this replica, once verl has said which rank talks to its server."""
        await self._init_server_adapter()
        await super().refit(weights, version)

    async def _call_connect(self, meeting: dict[str, Any], adapter: str | None) -> Future[Any] | None:
        if adapter is not None:
            raise ReshardError(NO_ADAPTERS)
        return self._start(connect_server, **meeting)

    async def _call_refit(self, version: int | None, options: SyncOptions) -> Future[Any] | None:
        return self._start(refit_server, version, options.verify, timeout=WAITS * options.timeout)

    def _start(self, call: Any, *arguments: Any, **options: Any) -> Future[Any] | None:
        """Call the server's routes in a thread of the call's own, on the rank that talks to it: a server that does
        not answer holds up neither the next call nor the end of this process."""
        if self._engine is None:
            return None
        served = self._engine.server_args
        return in_background(partial(call, f"http://{served.host}:{served.port}", *arguments, **options))

    async def _refit_done(self, version: int | None, options: SyncOptions) -> None:
        """The refit has flushed the cache."""
        if self._engine is not None and version is not None:
            await self._answer(options, self.server_actor.set_global_steps.remote(version).future())
