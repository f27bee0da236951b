"""verl's adapter to a vLLM server, whose weight sync is a refit."""

from concurrent.futures import Future
from typing import Any

from reshard.core.extras import importing_beside

with importing_beside("verl", "verl", "vllm"):
    from verl.workers.rollout.vllm_rollout import ServerAdapter

from reshard.integrations.options import SyncOptions
from reshard.integrations.verl.rollout import RefittedRollout


class ReshardServerAdapter(RefittedRollout, ServerAdapter):
    """verl's adapter to vLLM, which calls `reshard.integrations.verl.VerlExtension` in its workers."""

    async def _call_connect(self, meeting: dict[str, Any], adapter: str | None) -> Future[Any] | None:
        return await self._start("reshard_connect", kwargs=meeting | {"adapter": adapter})

    async def _call_refit(self, version: int | None, options: SyncOptions) -> Future[Any] | None:
        return await self._start("reshard_refit", args=(version, options.verify))

    async def _start(self, method: str, **arguments: Any) -> Future[Any] | None:
        call = await self._execute_method(method, non_block=True, **arguments)
        return None if call is None else call.future()

    async def _refit_done(self, version: int | None, options: SyncOptions) -> None:
        if self._has_server:
            await self._answer(options, self.server_handle.clear_kv_cache.remote().future())
            if version is not None:
                await self._answer(options, self.server_handle.set_global_steps.remote(version).future())
