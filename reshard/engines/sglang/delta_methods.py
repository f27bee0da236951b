"""The method of SGLang's schedulers that writes the deltas of a chain into them."""

from collections.abc import Callable
from typing import Any

from reshard.core.limits import check_seconds, check_switch
from reshard.engines.sglang import compat
from reshard.engines.workers.delta_methods import DeltaMethods


class ChainMethods(DeltaMethods):
    """A method of a scheduler that brings it to a version of a chain."""

    def _reshard_guard(self) -> Any:
        raise NotImplementedError

    def _reshard_run(self, work: Callable[[], Any]) -> Any:
        raise NotImplementedError

    def reshard_apply_deltas(
        self,
        address: str,
        chain: str,
        version: int,
        verify: bool = False,
        timeout: float = 600.0,
        secret: str | None = None,
    ) -> None:
        """Bring an engine to a version of a chain; see `reshard.delta.apply_deltas`. For a call that all of its
        schedulers get, which meet at `address`, a ``host:port`` where the first of them runs."""
        check_switch(verify, "verify")
        check_seconds(timeout, "timeout")
        rank, size = compat.rank_in_engine(self), compat.ranks_of_engine()
        self._reshard_guard()

        self._reshard_run(
            lambda: self._reshard_follow(address, rank, size, chain, version, verify, timeout, secret)
        )
