"""In the place of what slime has under this name."""


class UpdateWeightFromDistributed:
    def __init__(self, args, model, weights_getter, *, model_name, quantization_config): ...

    def connect_rollout_engines(
        self,
        rollout_engines,
        rollout_engine_lock,
        engine_gpu_counts=None,
        engine_gpu_offsets=None,
        engine_parallel_configs=None,
    ): ...

    def disconnect_rollout_engines(self): ...

    def pop_metrics(self): ...

    def update_weights(self): ...
