"""What a trainer and an engine that have LoRA adapters give beside the interfaces of a refit."""

from typing import Protocol, runtime_checkable

from reshard.core.errors import ReshardError
from reshard.refit.engine import Engine
from reshard.refit.holder import Holder
from reshard.refit.lora.lent import LentAdapter


@runtime_checkable
class AdaptedTrainer(Protocol):
    """A rank that holds weights, a trainer's as a rule, whose model may have LoRA adapters."""

    def split_adapter(self) -> tuple[Holder, Holder]:
        """Return the weights without the adapter, and the adapter, as two sources; the same ones each time.

        Raises ReshardError if the adapter is none that is refitted.
        """


@runtime_checkable
class AdaptedEngine(Protocol):
    """An engine's rank that may serve LoRA adapters."""

    def adapter(self, name: str) -> "AdapterEngine":
        """Return the adapter that the engine serves by this name, as a destination of its own.

        Raises ReshardError if the engine serves none.
        """


class AdapterEngine(Engine):
    """One rank's LoRA adapter in an engine. Its `placement` is made of what trainers say of ranks and alphas
    (`reshard.refit.lora.scales`)."""

    # Bytes drawn at random for the next refit, the same on all ranks of all engines.
    attempt: bytes = b""

    def lent(self, version: int) -> LentAdapter:
        """Return a copy of the version, which requests get now, for other engines. Raises ReshardError if they get
        another, or none."""
        raise ReshardError(f"this {self.guard.engine} hands on no adapters: wait for what a trainer sends")
