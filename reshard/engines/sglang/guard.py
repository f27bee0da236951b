"""The guard of an SGLang model: it checks every run of the model and every request, and follows what
SGLang does to the weights itself.

SGLang's processes know nothing of it until the first connect: a plugin (`reshard.engines.sglang.plugin`)
puts the functions below around SGLang's own, and these look for the guard of the model at hand.
"""

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch

from reshard.core.errors import ReshardError
from reshard.engines.sglang import compat
from reshard.engines.sglang.pipeline import call_of
from reshard.refit.guard import Guard

_guards: WeakKeyDictionary[torch.nn.Module, Guard] = WeakKeyDictionary()
_lost: WeakSet[torch.nn.Module] = WeakSet()  # models without a guard, whose weights were lost


def guard_of(model: torch.nn.Module, load_format: str) -> Guard:
    """Return the guard of a model that SGLang started with this ``load_format``."""
    if model not in _guards:
        reason = ""
        if load_format == "dummy":
            reason = "dummy weights (load_format='dummy')"
        elif model in _lost:
            reason = "weights whose memory it released before it was connected"
        _guards[model] = Guard("SGLang", not reason, reason, was_whole=model not in _lost)
    return _guards[model]


def check_run(run: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a ``ModelRunner``'s model. Raises ReshardError while its weights are not whole."""
    guard = _guards.get(runner.model)
    if guard is not None:
        guard.check_ready()
    return run(runner, *args, **kwargs)


def check_request(add: Callable[..., Any], scheduler: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
    """Schedule a request, or answer it with an error while the weights are not whole, or a call has not been
    joined: a run that raises would end the engine."""
    if call_of(scheduler) is not None:
        compat.refuse_request(scheduler, request, "this SGLang connects or takes weights: ask again later")
        return None
    model, _ = compat.served_model(scheduler)
    guard = _guards.get(model)
    if guard is None or guard.ready:
        return add(scheduler, request, *args, **kwargs)
    compat.refuse_request(scheduler, request, f"this SGLang holds {guard.reason}: refit it before it serves")
    return None


def follow_release(release: Callable[..., Any], updater: Any, *args: Any, **kwargs: Any) -> Any:
    """Release memory, and refuse to serve from then on if the weights were lost with it."""
    guard = _guards.get(compat.model_of(updater))
    if guard is not None:
        guard.end_readers()
    result = release(updater, *args, **kwargs)
    if guard is not None and _loses_weights(updater):
        guard.lose("no weights since it released their memory")
    elif guard is None:
        try:
            is_lost = _loses_weights(updater)
        except (AttributeError, ReshardError):
            is_lost = True  # an SGLang that is not connected goes on; what it keeps is not known
        if is_lost:
            _lost.add(compat.model_of(updater))
    return result


def _loses_weights(updater: Any) -> bool:
    """Tell whether the memory that is released has weights, which do not come back."""
    return compat.WEIGHTS in updater.offload_tags and not compat.keeps_released_weights(updater)


def follow_load(load: Callable[..., Any], updater: Any, *args: Any, **kwargs: Any) -> Any:
    """Load all weights from a disk, and serve again."""
    guard = _guards.get(compat.model_of(updater))
    if guard is not None:
        guard.altered()  # also by a load that fails: SGLang then loads what it started with
    result = load(updater, *args, **kwargs)
    guard = _guards.get(compat.model_of(updater))
    if getattr(result, "success", False):
        _lost.discard(compat.model_of(updater))
        if guard is not None:
            guard.loaded()
    return result


def follow_update(update: Callable[..., Any], updater: Any, *args: Any, **kwargs: Any) -> Any:
    """Let others write some weights, which then have no version of ours any more."""
    guard = _guards.get(compat.model_of(updater))
    if guard is not None:
        guard.altered()
    return update(updater, *args, **kwargs)
