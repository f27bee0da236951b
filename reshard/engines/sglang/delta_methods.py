"""The methods of SGLang's schedulers that write the deltas of a chain into them, or what was there before."""

from collections.abc import Callable
from typing import Any

from reshard.core.limits import MOST_BUCKET_BYTES, PENDING_BYTES, check_number, check_seconds, check_switch
from reshard.engines.sglang import compat
from reshard.engines.workers.delta_methods import DeltaMethods


class ChainMethods(DeltaMethods):
    """Methods of a scheduler that bring it to a version of a chain, and back."""

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
        pending_bytes: int = PENDING_BYTES,
    ) -> None:
        """Bring an engine to a version of a chain; see `reshard.delta.apply_deltas`. For a call that all of its
        schedulers get, which meet at `address`, a ``host:port`` where the first of them runs."""
        check_switch(verify, "verify")
        check_seconds(timeout, "timeout")
        check_number(pending_bytes, "pending_bytes", MOST_BUCKET_BYTES, 0)
        meeting = address, compat.rank_in_engine(self), compat.ranks_of_engine(), timeout, secret
        self._reshard_guard()

        self._reshard_run(lambda: self._reshard_follow(*meeting, chain, version, verify, pending_bytes))

    def reshard_roll_back_deltas(
        self, address: str, version: int, timeout: float = 600.0, secret: str | None = None
    ) -> None:
        """Have an engine serve again the version that it served before the last deltas; see `reshard.delta.roll_back`.
        For a call that all of its schedulers get, as `reshard_apply_deltas`."""
        check_seconds(timeout, "timeout")
        meeting = address, compat.rank_in_engine(self), compat.ranks_of_engine(), timeout, secret
        self._reshard_guard()

        self._reshard_run(lambda: self._reshard_follow_back(*meeting, version))
