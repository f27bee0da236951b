"""Calls of the methods that the plugin gives to SGLang's schedulers, from the process that has the
``sglang.Engine``."""

from typing import Any

from reshard.core.errors import ReshardError

MISSING = "has no attribute 'reshard_"


def call(engine: Any, method: str, **options: Any) -> None:
    """Call a method of `reshard.engines.sglang.worker.SchedulerMethods` on all ranks of an
    ``sglang.Engine``, such as ``reshard_connect``.

    Raises ReshardError with what the method raised, and where SGLang has not loaded the plugin, which
    it only logs.
    """
    try:
        engine.collective_rpc(method, **options)
    except AssertionError as error:
        message = str(error)
        if MISSING in message:
            raise ReshardError(
                "this SGLang has no plugin of reshard: install reshard where SGLang is, and, where the "
                "environment variable SGLANG_PLUGINS is set, name reshard there too; SGLang's log says why a "
                "plugin did not load"
            ) from error
        raise ReshardError(message) from error
