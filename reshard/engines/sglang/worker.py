"""The engine's side of a refit in SGLang's scheduler processes: methods that the plugin
(`reshard.engines.sglang.plugin`) gives to SGLang's ``Scheduler``, for ``Engine.collective_rpc``.

    engine.collective_rpc("reshard_connect", address="127.0.0.1:29600", first_rank=2, size=4)
    engine.collective_rpc("reshard_refit", version=1)

The trainer's ranks call `reshard.refit.connect` and `Link.refit` at the same time; each call returns
when both sides are done. Such a call returns nothing, and raises what a method here raises.

With pipeline stages a call returns at once, and ``reshard_join`` when both sides are done
(`reshard.engines.sglang.pipeline`); `reshard.engines.sglang.calls` makes both.
"""

import json
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from reshard.comm.group import MOST_MEMBERS
from reshard.core.errors import ReshardError
from reshard.core.limits import check_number, check_seconds, check_switch
from reshard.engines.sglang import compat, pipeline
from reshard.engines.sglang.delta_methods import ChainMethods
from reshard.engines.sglang.guard import guard_of
from reshard.engines.sglang.live import SglangModel
from reshard.engines.workers.digest_methods import DigestMethods, say
from reshard.engines.workers.lending import LendingMethods
from reshard.engines.workers.refits import LinkMethods, WorkerOptions, connect_worker, log_refits

logger = logging.getLogger("sglang.srt.reshard")  # below SGLang's own, which shows it


class SchedulerMethods(ChainMethods, DigestMethods, LinkMethods, LendingMethods):
    """Methods of SGLang's scheduler that connect it to a trainer and take its weights, or a chain's."""

    _reshard_engine: SglangModel | None = None

    def reshard_connect(self, address: str, first_rank: int, size: int, **options: Any) -> None:
        """Connect an engine to a trainer: for a call that all of its schedulers get, at the same time
        as the trainer's ranks connect.

        `address` is the ``host:port`` at which member 0 serves, the first of the trainer's ranks as
        a rule. `first_rank` is how many members come before the engine, which are the trainer's
        ranks, and the schedulers of engines before this one: this scheduler is that member plus its
        own rank within the engine. `size` is how many members there are in all. The options are
        those of `WorkerOptions.of_call`.

        Raises ReshardError, as on every other member, if the two sides do not hold the same model
        or a member is missing.
        """
        check_number(first_rank, "first_rank", MOST_MEMBERS, 0)
        index = compat.rank_in_engine(self)
        rank = first_rank + index
        connecting = WorkerOptions(**WorkerOptions.of_call(**options).checked().of_worker(index))
        self._reshard_check_other(address, connecting.secret)
        self._reshard_guard()

        def connected() -> None:
            side = partial(SchedulerMethods._reshard_side, self)
            close = partial(LinkMethods.reshard_close, self)  # type: ignore[arg-type]
            self._reshard_link = connect_worker(address, rank, size, connecting, side, close)
            log_refits(logger, self._reshard_link, index == 0)

        self._reshard_run(connected)

    def reshard_refit(  # type: ignore[override]
        self, version: int | None = None, verify: bool = False
    ) -> dict[str, Any] | None:
        """Take the trainer's weights; return the report as a dict, or nothing with pipeline stages."""
        check_switch(verify, "verify")
        self._reshard_connected()
        return self._reshard_run(partial(LinkMethods.reshard_refit, self, version, verify))  # type: ignore[arg-type]

    def reshard_digest(  # type: ignore[override]
        self, address: str, dtype: str | None = None, timeout: float = 600.0, secret: str | None = None
    ) -> None:
        """Say what this scheduler serves to the process that asks at `address`; see `reshard.engines.sglang.digest`."""
        check_seconds(timeout, "timeout")
        rank, size = compat.rank_in_engine(self), compat.ranks_of_engine()
        self._reshard_guard()

        def said() -> None:
            say(address, rank, size, DigestMethods.reshard_digest(self, dtype), timeout, secret)

        self._reshard_run(said)

    def reshard_release(self) -> None:
        """Unmap the trainer's memory, together with the trainer's `Link.release`."""
        self._reshard_connected()
        self._reshard_run(partial(LinkMethods.reshard_release, self))  # type: ignore[arg-type]

    def reshard_join(self) -> dict[str, Any] | None:
        """With pipeline stages: wait for the last of the calls above, and return or raise what it does
        without stages."""
        result: dict[str, Any] | None = pipeline.join(self)
        return result

    def reshard_close(self) -> None:
        """Free what was mapped and staged, and forget the trainer, if one is connected."""
        pipeline.check_ended(self)
        LinkMethods.reshard_close(self)  # type: ignore[arg-type]

    def _reshard_guard(self) -> None:
        """Guard the model from now on, before a thread does: whether requests are refused must not depend on
        how far it is."""
        model, arguments = compat.served_model(self)
        guard_of(model, str(arguments.load_format))

    def _reshard_run(self, action: Callable[[], Any]) -> Any:
        """Return what an action returns; with pipeline stages begin it, and return nothing."""
        if not compat.has_stages(self):
            return action()
        pipeline.begin(self, action)
        return None

    def reshard_state(self) -> str:
        """Return as JSON what this scheduler's guard says of its weights (`reshard.refit.guard.Guard.state`)."""
        self._reshard_guard()
        model, arguments = compat.served_model(self)
        return json.dumps(guard_of(model, str(arguments.load_format)).state())

    def reshard_check_version(self, version: int) -> None:
        """Raise ReshardError unless this scheduler serves weights of this version."""
        served = self.reshard_version()
        if served != version:
            raise ReshardError(f"this SGLang serves weights of version {served}, not {version}")

    def _reshard_logger(self) -> logging.Logger | None:
        return logger if compat.rank_in_engine(self) == 0 else None

    def _reshard_agree(self, is_done: bool) -> bool:
        return compat.agree(self, is_done)

    def _reshard_rank(self) -> int:
        """Return the rank of this scheduler among those of the engine."""
        return compat.rank_in_engine(self)

    def _reshard_engine_side(self) -> SglangModel:
        return self._reshard_side()

    def _reshard_side(self) -> SglangModel:
        """Return this scheduler's side: that of the last connect, if SGLang still has the same model in
        the same order."""
        call = pipeline.call_of(self)
        if call is not None:  # whose thread looks at the model in another form while it traces the loader
            call.check_idle()
        last = self._reshard_engine
        model, _ = compat.served_model(self)
        if last is None or not last.still_serves(model):
            last = self._reshard_engine = SglangModel.from_scheduler(self)
        return last


def _methods() -> dict[str, Callable[..., Any] | None]:
    names = [name for name in dir(SchedulerMethods) if name.startswith(("reshard_", "_reshard_"))]
    return {name: getattr(SchedulerMethods, name) for name in names}


# What the plugin adds to SGLang's scheduler, by name.
METHODS: Mapping[str, Any] = _methods()
