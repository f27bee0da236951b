"""The guard of a vLLM model: it checks every run of the model, and follows what vLLM does to the
weights itself."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary

import torch

from reshard.engines.vllm.compat import with_plain_weights
from reshard.refit.guard import Guard, call_after


@dataclass
class VllmGuard(Guard):
    """The guard of one model, which `watch` puts before its runs. `adapters` are the versions of adapters that
    trainers refit (`reshard.engines.vllm.adapters.versions.Versions`); None before the first. With an encoder vLLM
    keeps what it has made of images, by other weights too."""

    has_encoder: bool = False
    asleep: bool = False
    warming_up: bool = False
    is_model_watched: bool = False
    adapters: Any = None

    def watch(self, module: torch.nn.Module, worker: Any) -> None:
        """Check every run of the model from now on, by this worker, which may be None. Whoever sends a request has its
        answer from `reshard.engines.vllm.requests`: vLLM does not go on after a worker that raises."""
        if self.is_model_watched:
            return
        self.is_model_watched = True
        if hasattr(module, "load_weights"):
            module.load_weights = self._loading(module.load_weights)  # type: ignore[assignment,operator,arg-type]
        runner = getattr(worker, "model_runner", None)
        if runner is None:
            module.register_forward_pre_hook(lambda *_: self.check_ready())
            return
        runner.execute_model = self._checked(runner.execute_model)
        if hasattr(worker, "compile_or_warm_up_model"):
            worker.compile_or_warm_up_model = self._while_warming_up(worker.compile_or_warm_up_model)
        for name, after in (
            ("sleep", self._slept),
            ("wake_up", self._woken),
            ("discard", self._discarded),
            ("reset_weights", self._zeroed),
        ):
            if hasattr(worker, name):
                plain = with_plain_weights(getattr(worker, name))
                setattr(worker, name, call_after(self._unread(plain), after))
        for name, around in (("reload_weights", self._reloading), ("update_weights", self._updating)):
            if hasattr(worker, name):
                setattr(worker, name, around(with_plain_weights(getattr(worker, name)), worker))

    def _checked(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def checked(*args: Any, **kwargs: Any) -> Any:
            # vLLM's second model runner profiles and warms up through here; nobody reads these
            # results. A step without tokens runs nothing: it tells the runner who has been answered.
            idle = bool(args) and getattr(args[0], "total_num_scheduled_tokens", None) == 0
            if not (self.warming_up or kwargs.get("dummy_run") or idle):
                self.check_ready()
            return run(*args, **kwargs)

        return checked

    def _unread(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method of the worker that takes memory away, before which nobody may read from it any more."""

        @wraps(method)
        def unread(*args: Any, **kwargs: Any) -> Any:
            self.end_readers()
            return method(*args, **kwargs)

        return unread

    def _while_warming_up(self, warm_up: Callable[..., Any]) -> Callable[..., Any]:
        def warmed_up(*args: Any, **kwargs: Any) -> Any:
            self.warming_up = True
            try:
                return warm_up(*args, **kwargs)
            finally:
                self.warming_up = False

        return warmed_up

    def state(self) -> dict[str, Any]:
        """Return the state of the weights; ``asleep`` says that vLLM sleeps, ``adapters`` which ones trainers
        refit, if any, ``encoder_writes`` how often its weights may have changed, if it has an encoder of images."""
        adapters = {"adapters": self.adapters.state()} if self.adapters is not None else {}
        encoder = {"encoder_writes": self.writes} if self.has_encoder else {}
        return super().state() | {"asleep": self.asleep} | adapters | encoder

    def _slept(self, level: int = 1, *_: Any, **__: Any) -> None:
        """After ``sleep``: level 2 discards the weights."""
        self.asleep = True
        if level > 1:
            self.lose(f"no weights since it slept (level {level})")

    def _woken(self, tags: list[str] | None = None, *_: Any, **__: Any) -> None:
        """After ``wake_up``: the weights have memory again."""
        if tags is None or "weights" in tags:
            self.asleep = False

    def _discarded(self, tags: Sequence[str] = (), *_: Any, **__: Any) -> None:
        """After ``discard``, which vLLM has from 0.31 on: memory by tags is freed, and its contents
        are lost."""
        if "weights" in tags:
            self.asleep = True
            self.buffer_losses += 1
            self.lose("no weights since it discarded them")

    def _zeroed(self, *_: Any, **__: Any) -> None:
        """After ``reset_weights``, which vLLM has from 0.32 on, to check that an update brings all
        weights."""
        self.lose("zeros since its weights were reset")

    def _reloading(self, reload: Callable[..., Any], _: Any) -> Callable[..., Any]:
        """Follow ``reload_weights``, by which vLLM loads all weights from the disk, unless it is given some; one that
        fails may have written some."""

        @wraps(reload)
        def reloaded(*args: Any, **kwargs: Any) -> Any:
            self.altered()
            result = reload(*args, **kwargs)
            if not args and not kwargs.get("weights_iterator"):
                self.loaded()
            return result

        return reloaded

    def _loading(self, load: Callable[..., Any]) -> Callable[..., Any]:
        """Follow the model's own ``load_weights``, by which trainers write weights without a word to vLLM's worker."""

        @wraps(load)
        def loading(*args: Any, **kwargs: Any) -> Any:
            self.altered()
            return load(*args, **kwargs)

        loading.unwatched = load  # type: ignore[attr-defined]
        return loading

    def _updating(self, update: Callable[..., Any], worker: Any) -> Callable[..., Any]:
        """Follow ``update_weights``, by which vLLM takes weights from a trainer: through us, or through others."""

        @wraps(update)
        def updated(*args: Any, **kwargs: Any) -> Any:
            if not hasattr(worker.weight_transfer_engine, "attach_reshard_worker"):
                self.altered()
            return update(*args, **kwargs)

        return updated


_guards: WeakKeyDictionary[torch.nn.Module, VllmGuard] = WeakKeyDictionary()


def guard_of(
    model: torch.nn.Module, config: Any, just_loaded: bool = False, never_slept: bool = False
) -> VllmGuard:
    """Return the guard of a model that was started with this ``VllmConfig``.

    Weights that were loaded are whole. But with sleep mode on they may have been discarded (level
    2) before the guard watched, unless they were `just_loaded`. What no refit brings is whole then also if the worker
    `never_slept`.
    """
    if model not in _guards:
        model_config = getattr(config, "model_config", None)
        may_have_slept = bool(getattr(model_config, "enable_sleep_mode", False)) and not just_loaded
        reason = ""
        if config.load_config.load_format == "dummy":
            reason = "dummy weights (load_format='dummy')"
        elif may_have_slept:
            reason = "weights that it may have discarded in sleep before it was connected"
        has_encoder = bool(getattr(model_config, "is_multimodal_model", False))
        was_whole = never_slept or not may_have_slept
        _guards[model] = VllmGuard("vLLM", not reason, reason, was_whole=was_whole, has_encoder=has_encoder)
    return _guards[model]


def state_of(worker: Any, adapters_in_use: Callable[[], list[int]] | None = None) -> dict[str, Any] | None:
    """Return what a worker holds; None if its weights are not guarded.

    An engine core says which ids of adapters its unfinished requests have; other versions than the newest are
    dropped.
    """
    guard = _guards.get(worker.get_model())
    if guard is None:
        return None
    if adapters_in_use is not None and guard.adapters is not None:
        guard.adapters.keep(adapters_in_use() if guard.adapters.has_older else [])
    return guard.state()
