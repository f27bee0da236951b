"""The engine's side of a refit in SGLang's scheduler processes: methods that the plugin
(`reshard.engines.sglang.plugin`) gives to SGLang's ``Scheduler``, for ``Engine.collective_rpc``.

    engine.collective_rpc("reshard_connect", address="127.0.0.1:29600", first_rank=2, size=4)
    engine.collective_rpc("reshard_refit", version=1)

The trainer's ranks call `reshard.refit.connect` and `Link.refit` at the same time; each call returns
when both sides are done. Such a call returns nothing, and raises what a method here raises.
"""

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from reshard.comm.group import MOST_MEMBERS
from reshard.core.errors import ReshardError
from reshard.core.limits import check_number
from reshard.engines.sglang import compat
from reshard.engines.sglang.live import SglangModel
from reshard.engines.worker import ConnectOptions, LinkMethods, connect_worker, log_connected

logger = logging.getLogger("sglang.srt.reshard")  # below SGLang's own, which shows it


class SchedulerMethods(LinkMethods):
    """Methods of SGLang's scheduler that connect it to a trainer and take its weights."""

    _reshard_engine: SglangModel | None = None

    def reshard_connect(self, address: str, first_rank: int, size: int, **options: Any) -> None:
        """Connect an engine to a trainer: for a call that all of its schedulers get, at the same time
        as the trainer's ranks connect.

        `address` is the ``host:port`` at which member 0 serves, the first of the trainer's ranks as
        a rule. `first_rank` is how many members come before the engine, which are the trainer's
        ranks, and the schedulers of engines before this one: this scheduler is that member plus its
        own rank within the engine. `size` is how many members there are in all. The options are
        those of `ConnectOptions`.

        Raises ReshardError, as on every other member, if the two sides do not hold the same model
        or a member is missing.
        """
        check_number(first_rank, "first_rank", MOST_MEMBERS, 0)
        rank = first_rank + compat.rank_in_engine(self)
        side = partial(SchedulerMethods._reshard_side, self)
        connecting = ConnectOptions(**options)
        self._reshard_link = connect_worker(address, rank, size, connecting, side, self.reshard_close)
        if rank == first_rank:
            log_connected(logger, self._reshard_link)

    def reshard_check_version(self, version: int) -> None:
        """Raise ReshardError unless this scheduler serves weights of this version."""
        served = self.reshard_version()
        if served != version:
            raise ReshardError(f"this SGLang serves weights of version {served}, not {version}")

    def _reshard_side(self) -> SglangModel:
        """Return this scheduler's side: that of the last connect, if SGLang still has the same model in
        the same order."""
        last = self._reshard_engine
        model, _ = compat.served_model(self)
        if last is not None and last.module is model:
            with suppress(ReshardError):
                last.refresh_regions()
                return last
        self._reshard_engine = SglangModel.from_scheduler(self)
        return self._reshard_engine


def _methods() -> dict[str, Callable[..., Any] | None]:
    names = [name for name in dir(SchedulerMethods) if name.startswith(("reshard_", "_reshard_"))]
    return {name: getattr(SchedulerMethods, name) for name in names}


# What the plugin adds to SGLang's scheduler, by name.
METHODS: Mapping[str, Any] = _methods()
