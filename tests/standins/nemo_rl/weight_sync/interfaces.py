"""In the place of NeMo-RL's interface of a synchronizer."""

from abc import ABC, abstractmethod


class WeightSynchronizer(ABC):
    @abstractmethod
    def sync_weights(self, *, timer=None, kv_scales=None): ...

    @property
    @abstractmethod
    def is_stale(self): ...

    @abstractmethod
    def init_communicator(self): ...

    @abstractmethod
    def shutdown(self): ...
