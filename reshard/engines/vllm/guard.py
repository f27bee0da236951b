"""Whether a running vLLM holds whole weights, and what keeps it from serving others."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, WeakMethod

import torch

from reshard.core.errors import ReshardError
from reshard.engines.vllm.compat import with_plain_weights


@dataclass
class Guard:
    """Whether the weights of a model are whole (`ready`), `why` not, and of which version: one for each model,
    whoever looks at it."""

    ready: bool
    why: str = ""
    version: int | None = None
    # What wants to know when all weights have been loaded, as long as it is there.
    when_loaded: list[WeakMethod] = field(default_factory=list)
    losses: int = 0  # how often weights have been forgotten
    buffer_losses: int = 0  # and how often buffers with them, which vLLM keeps itself while it sleeps
    asleep: bool = False
    warming_up: bool = False
    watched: bool = False
    front_watched: bool = False

    def spoil(self, why: str) -> None:
        """From now on there are no whole weights."""
        self.ready, self.why = False, why

    def loaded(self) -> None:
        """All weights are there, and no refit has brought them."""
        self.ready, self.version = True, None
        for note in [note() for note in self.when_loaded]:
            if note is not None:
                note()

    def refuse_unfit(self) -> None:
        """Raise ReshardError where the weights are not whole."""
        if not self.ready:
            raise ReshardError(f"this vLLM holds {self.why}: refit it before it serves")

    def watch(self, module: torch.nn.Module, worker: Any, front: Any) -> None:
        """From now on every run of the model, by this worker or this engine of the process, asks first."""
        if front is not None and not self.front_watched:
            self.front_watched = True
            # Before a request is scheduled: a worker that raises leaves vLLM's scheduler waiting for what
            # will not come.
            front.add_request = self._asking_first(front.add_request)
        if self.watched:
            return
        self.watched = True
        runner = getattr(worker, "model_runner", None)
        if runner is None:
            module.register_forward_pre_hook(lambda *_: self.refuse_unfit())
            return
        runner.execute_model = self._asking_first(runner.execute_model)
        if hasattr(worker, "compile_or_warm_up_model"):
            worker.compile_or_warm_up_model = self._warming_up(worker.compile_or_warm_up_model)
        for name, after in (
            ("sleep", self._slept),
            ("wake_up", self._woken),
            ("reload_weights", self._reloaded),
            ("discard", self._discarded),
            ("reset_weights", self._zeroed),
        ):
            if hasattr(worker, name):
                setattr(worker, name, then(with_plain_weights(getattr(worker, name)), after))

    def _asking_first(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*args: Any, **kwargs: Any) -> Any:
            # vLLM's second model runner profiles and warms up through here; nobody reads what that says.
            if not (self.warming_up or kwargs.get("dummy_run")):
                self.refuse_unfit()
            return plain(*args, **kwargs)

        return guarded

    def _warming_up(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def warmed(*args: Any, **kwargs: Any) -> Any:
            self.warming_up = True
            try:
                return plain(*args, **kwargs)
            finally:
                self.warming_up = False

        return warmed

    def _slept(self, level: int = 1, *_: Any, **__: Any) -> None:
        """Level 2 discards the weights."""
        self.asleep = True
        if level > 1:
            self._lose(f"no weights since it slept (level {level})")

    def _lose(self, why: str) -> None:
        self.spoil(why)
        self.version, self.losses = None, self.losses + 1

    def _woken(self, tags: list[str] | None = None, *_: Any, **__: Any) -> None:
        """The weights have memory again."""
        if tags is None or "weights" in tags:
            self.asleep = False

    def _discarded(self, tags: Sequence[str] = (), *_: Any, **__: Any) -> None:
        """From 0.31 on: the memory of some tags is given back, and what was in it forgotten."""
        if "weights" in tags:
            self.asleep = True
            self.buffer_losses += 1
            self._lose("no weights since it discarded them")

    def _zeroed(self, *_: Any, **__: Any) -> None:
        """From 0.32 on: for a check that an update brings all of them."""
        self._lose("zeros since its weights were reset")

    def _reloaded(self, *args: Any, **kwargs: Any) -> None:
        """vLLM has loaded all weights from the disk itself."""
        if not args and not kwargs.get("weights_iterator"):
            self.loaded()


_guards: WeakKeyDictionary[torch.nn.Module, Guard] = WeakKeyDictionary()


def guard_of(model: torch.nn.Module, config: Any, just_loaded: bool = False) -> Guard:
    """The guard of a model that was started with this ``VllmConfig``.

    Weights that were loaded are whole, but for what may have happened since, where it was not watched from
    then on (`just_loaded`): with sleep mode on, they may have been discarded (level 2).
    """
    if model not in _guards:
        why = ""
        if config.load_config.load_format == "dummy":
            why = "weights of no meaning (load_format='dummy')"
        elif config.model_config.enable_sleep_mode and not just_loaded:
            why = "weights that it may have discarded in sleep before it was connected"
        _guards[model] = Guard(not why, why)
    return _guards[model]


def then(plain: Callable[..., Any], after: Callable[..., None]) -> Callable[..., Any]:
    """A method that tells somebody, with its arguments, when it has succeeded."""

    def watched(*args: Any, **kwargs: Any) -> Any:
        result = plain(*args, **kwargs)
        after(*args, **kwargs)
        return result

    return watched
