"""In the place of ROLL's worker of the rollout."""

from roll.distributed.executor.worker import Worker


class InferWorker(Worker):
    async def process_weights_after_loading(self):
        await self.strategy.process_weights_after_loading()
