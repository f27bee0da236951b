"""The call that SGLang makes at start-up, in each of its processes, by the entry point in
``sglang.srt.plugins``.

It gives SGLang's scheduler the methods of `reshard.engines.sglang.worker`, for
``Engine.collective_rpc``, and its routes for weights a group of ours (`reshard.engines.sglang.group`), and
puts the guard around its runs and requests. Its log of calls does not show secrets. Its loaders get an option for
Megatron checkpoints (`reshard.engines.sglang.load`). Nothing else changes until a trainer connects.

Every SGLang process of an environment with reshard imports this module, so it imports nothing heavy.
"""

from collections.abc import Callable
from typing import Any


def register() -> None:
    """Register the hooks, and add the scheduler's methods. Raises ReshardError, which SGLang logs, if
    this SGLang cannot take them."""
    from reshard.engines.sglang import compat, group, guard
    from reshard.engines.sglang.worker import METHODS

    compat.add_to_scheduler(METHODS)
    compat.hook_around(compat.CALL, hide_secret)
    compat.hook_around(compat.RUN, guard.check_run)
    compat.hook_around(compat.REQUEST, guard.check_request)
    compat.hook_around(compat.RELEASE, guard.follow_release)
    compat.hook_around(compat.LOAD, guard.follow_load)
    compat.hook_around(compat.CONNECT, group.connect_group)
    compat.hook_around(compat.UPDATE, group.refit_group)
    compat.hook_around(compat.SERVE_UPDATE, group.check_idle)
    compat.hook_around(compat.CLOSE, group.close_group)
    compat.hook_around(compat.GET_LOADER, choose_loader)
    for update in (*compat.UPDATES, *([compat.BEGIN] if compat.has_sessions() else [])):
        compat.hook_around(update, guard.follow_update)


def hide_secret(call: Callable[..., Any], scheduler: Any, request: Any) -> Any:
    """Make a call that came by ``Engine.collective_rpc``, which SGLang logs with its arguments, and keep the secret of
    a group out of the log."""
    arguments = request.parameters or {}
    if request.method.startswith("reshard_") and isinstance(arguments.get("secret"), str):
        from reshard.comm.secret import HiddenSecret

        request.parameters = arguments | {"secret": HiddenSecret(arguments["secret"])}
    return call(scheduler, request)


def choose_loader(get_loader: Callable[..., Any], load_config: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the loader of `reshard.engines.sglang.load.choose_loader`, which is imported only where an engine
    has an option."""
    if not load_config.model_loader_extra_config:
        return get_loader(load_config, *args, **kwargs)
    from reshard.engines.sglang import load

    return load.choose_loader(get_loader, load_config, *args, **kwargs)
