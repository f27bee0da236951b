"""In the place of ROLL's extension of vLLM's workers."""

from vllm.model_executor.model_loader.utils import process_weights_after_loading


class WorkerBase:
    def custom_init_worker(self, *args, **kwargs):
        self.weight_loaded = True

    def reload_model(self):
        if not self.weight_loaded:
            self.wake_up(["weights"])
        self.weight_loaded = True

    def load_weights(self, weights):
        self.reload_model()
        self.model_runner.model.load_weights(weights=weights)

    def process_weights_after_loading(self):
        process_weights_after_loading(self.model_runner.model, self.model_config, self.device_config.device)


class WorkerV1(WorkerBase):
    pass
