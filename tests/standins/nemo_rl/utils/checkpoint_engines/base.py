"""In the place of NeMo-RL's interface of a checkpoint engine, which no package index has: what ours
overrides, and nothing else."""

from abc import ABC, abstractmethod
from importlib import import_module


class CheckpointEngine(ABC):
    def get_target_weight_layout(self):
        return None

    @abstractmethod
    def prepare(self): ...

    @abstractmethod
    def init_policy_process_group(self, *, worker_rank, train_world_size, rollout_world_size, metadata): ...

    @abstractmethod
    def init_rollout_process_group(self, *, rollout_rank, train_world_size, rollout_world_size, metadata): ...

    def finalize(self):  # noqa: B027
        pass

    @abstractmethod
    async def send_weights(self, weights): ...

    @abstractmethod
    def receive_weight_batches(self): ...


def create_checkpoint_engine(backend, *, bucket_size_bytes, engine_kwargs):
    module, name = backend.split(":")
    return getattr(import_module(module), name)(bucket_size=bucket_size_bytes, **engine_kwargs)
