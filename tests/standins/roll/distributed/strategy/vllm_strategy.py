"""In the place of ROLL's strategy for vLLM."""


class VllmStrategy:
    def __init__(self, worker):
        self.worker, self.model = worker, None

    async def process_weights_after_loading(self, *args, **kwargs):
        await self.model.collective_rpc("process_weights_after_loading")
