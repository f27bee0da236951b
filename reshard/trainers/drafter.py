"""A live drafter, such as an EAGLE-3 head, that is trained beside a model: both as one source of a refit."""

import json
from collections.abc import Collection
from copy import copy
from typing import Any

import torch

from reshard.core.errors import ReshardError, listed
from reshard.core.placement import LocalTensor, Part
from reshard.device.memory import Region
from reshard.models.drafters import DRAFTER, T2D
from reshard.models.model import Model
from reshard.refit.drafter import DeclaredDrafter
from reshard.refit.trainer import Trainer
from reshard.trainers.fsdp_shards import FsdpShards


class DraftModel(FsdpShards):
    """The weights of one rank of a drafter: a torch module, plain or under ``fully_shard``, whose parameters and
    persistent buffers have the names of its published checkpoint; `prefix` is what theirs begin with beside that, and
    `without` are the published names that the checkpoint does not have, as of an embedding that is the model's.

    Raises ReshardError, as `FsdpShards` does, and if a name of `without` is none.
    """

    def __init__(self, module: torch.nn.Module, prefix: str = "", without: Collection[str] = ()) -> None:
        self.prefix, self.without = prefix, {*without, T2D}
        super().__init__(module)
        names = {name for name, _ in [*module.named_parameters(), *module.named_buffers()]}
        published = {self._published(name) for name in names}
        if unknown := sorted({*without} - published):
            raise ReshardError(f"the drafter has no {listed(unknown)} that could be left out")
        if not self.published:
            raise ReshardError(f"{type(module).__name__} has no weights of a drafter under {prefix!r}")

    def _published(self, name: str) -> str:
        return name.removeprefix(self.prefix)

    def _publishes(self, name: str) -> bool:
        return name.startswith(self.prefix) and self._published(name) not in self.without

    def publish(self, model: Model) -> list[LocalTensor]:
        return [
            LocalTensor(
                index,
                held.box.lengths,
                (Part(DRAFTER + self._published(held.name), held.box, (0,) * len(held.shape)),),
            )
            for index, held in enumerate(self.held)
        ]

    def check_model(self, model: Model) -> None:
        """Nothing: an engine compares the drafter's config with that of its own."""

    def facts(self) -> bytes:
        """Return the drafter's tensors and config, the same on every rank that has it."""
        tensors = {
            self._published(held.name): (held.shape, str(held.tensor.dtype).removeprefix("torch."))
            for held in self.published
        }
        config: Any = getattr(self.model, "config", None)
        fields = config.to_dict() if hasattr(config, "to_dict") else {}
        return DeclaredDrafter(tensors, json.loads(json.dumps(fields, default=str))).encode()


class WithDrafter(Trainer):
    """One rank of a trainer, a `MegatronModel` or an `FsdpModel`, with the `drafter` that it trains beside its model:
    a module, of which `prefix` and `without` are as for `DraftModel`. A refit brings both, under one version.

    On a rank that holds nothing of the drafter, as in another pipeline stage, the trainer alone is the source.
    """

    def __init__(
        self, trainer: Trainer, drafter: torch.nn.Module, prefix: str = "", without: Collection[str] = ()
    ) -> None:
        self.trainer, self.drafter = trainer, DraftModel(drafter, prefix, without)
        self._as_published: WithDrafter | None = None

    def split_adapter(self) -> tuple[Trainer, Trainer]:
        """Raise ReshardError: each refit of an adapter brings that alone."""
        raise ReshardError(
            "a refit with adapter= brings the adapter alone, and the drafter would stay as it was: connect the model "
            "without its drafter, or merge the adapter"
        )

    @property
    def memory(self) -> list[Region]:
        return [*self.trainer.memory, *self.drafter.memory]

    @property
    def device(self) -> torch.device | None:
        return self.trainer.device or self.drafter.device

    def publish(self, model: Model) -> list[LocalTensor]:
        own = self.trainer.publish(model)
        return [*own, *(one._replace(id=len(own) + one.id) for one in self.drafter.publish(model))]

    def as_published(self, model: Model) -> "WithDrafter":
        """Return the same with the trainer's own numbers as they are published; see `Holder.as_published`."""
        trainer = self.trainer.as_published(model)
        if trainer is self.trainer:
            return self
        if self._as_published is None or self._as_published.trainer is not trainer:
            self._as_published = copy(self)
            self._as_published.trainer = trainer  # type: ignore[assignment]
        return self._as_published

    def check_model(self, model: Model) -> None:
        self.trainer.check_model(model)

    def name_of(self, index: int) -> str:
        """Return the parameter's name in the model, or in the drafter."""
        own = len(self.trainer.memory)
        return (
            self.trainer.name_of(index) if index < own else f"drafter's {self.drafter.name_of(index - own)}"
        )

    def facts(self) -> bytes:
        """Return what engines have to know of the drafter."""
        return self.drafter.facts()

    def check_current(self) -> None:
        self.trainer.check_current()

    def addresses(self) -> list[int]:
        return [*self.trainer.addresses(), *self.drafter.addresses()]

    def check_memory(self, device: torch.device) -> None:
        self.trainer.check_memory(device)
        self.drafter.check_memory(device)

    @property
    def has_pending_sync(self) -> bool:
        return self.trainer.has_pending_sync

    def sync_params(self) -> None:
        self.trainer.sync_params()
