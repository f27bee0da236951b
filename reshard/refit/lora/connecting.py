"""Connecting a trainer's LoRA adapter and the one that an engine serves by a name, above the weights."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from reshard.core.errors import ReshardError
from reshard.refit.engine import Engine
from reshard.refit.holder import Holder
from reshard.refit.link import Link
from reshard.refit.lora.below import Below
from reshard.refit.lora.sides import AdaptedEngine, AdaptedTrainer
from reshard.refit.options import ConnectOptions

# Makes the link of two sides, given as `reshard.refit.connect` takes them.
Connect = Callable[[Any, Any, ConnectOptions], Link]


def connect_adapter(
    connect: Connect,
    source: Callable[[], Holder] | None,
    destination: Any,
    options: ConnectOptions,
) -> Link:
    """Connect the weights below an adapter, and then the adapter; return the adapter's link, which has that of
    the weights `below`. `source` makes the trainer's side, and `destination` is as `reshard.refit.connect` takes it."""
    adapters: list[Holder] = []

    def without_adapter() -> Holder:
        assert source is not None
        side = source()
        if not isinstance(side, AdaptedTrainer):
            raise ReshardError(f"{type(side).__name__} has no LoRA adapter that a refit can take")
        weights, adapter = side.split_adapter()
        adapters.append(adapter)
        return weights

    below = connect(without_adapter if source is not None else None, destination, options)
    engine = below.receiver.engine if below.receiver is not None else None

    def adapter_of_engine() -> Engine:
        if not isinstance(engine, AdaptedEngine):
            raise ReshardError(f"{type(engine).__name__} serves no LoRA adapters that a refit can bring")
        return engine.adapter(str(options.adapter))

    try:
        link = connect(
            next(iter(adapters), None),
            adapter_of_engine if engine is not None else None,
            options.for_adapter(),
        )
    except BaseException:
        with suppress(ReshardError):
            below.close()
        raise
    link.below = Below(below, link)
    return link
