"""The methods of SGLang's schedulers that write the deltas of a chain into them, or what was there before."""

import json
from collections.abc import Callable
from typing import Any

from reshard.core.errors import ReshardError
from reshard.core.limits import MOST_BUCKET_BYTES, PENDING_BYTES, check_number, check_seconds, check_switch
from reshard.engines.sglang import compat, pipeline
from reshard.engines.workers.delta_methods import DeltaMethods

READING = "reshard: deltas are being read"  # the answer to who asks meanwhile


class ChainMethods(DeltaMethods):
    """Methods of a scheduler that bring it to a version of a chain, and back."""

    def _reshard_guard(self) -> Any:
        raise NotImplementedError

    def _reshard_run(self, work: Callable[[], Any]) -> Any:
        raise NotImplementedError

    def reshard_read_deltas(
        self,
        address: str,
        session: str,
        chain: str,
        version: int,
        verify: bool = False,
        timeout: float = 600.0,
        secret: str | None = None,
        pending_bytes: int = PENDING_BYTES,
    ) -> None:
        """Begin to fetch and check what leads to a version of a chain, beside what is served, and return; see
        `reshard.delta.apply_deltas`, one call of which is a `session`. For a call that all of an engine's schedulers
        get, which meet at `address`, a ``host:port`` where the first of them runs."""
        check_switch(verify, "verify")
        check_seconds(timeout, "timeout")
        check_number(pending_bytes, "pending_bytes", MOST_BUCKET_BYTES, 0)
        meeting = address, compat.rank_in_engine(self), compat.ranks_of_engine(), timeout, secret
        self._reshard_guard()
        self._reshard_follow_begin(*meeting, session, chain, version, verify, pending_bytes)

    def reshard_check_deltas(self, session: str) -> None:
        """Return if all schedulers have everything. Raises ReshardError, with `READING` while they have not, and with
        why they could not."""
        if not self._reshard_begun_following(session).is_prepared():
            raise ReshardError(READING)

    def reshard_write_deltas(self, session: str, version: int) -> None:
        """Write what this session has read, which is this `version`, and serve it. For a call that all of an engine's
        schedulers get."""
        self._reshard_begun_following(session)
        self._reshard_run(lambda: self._reshard_follow(session))

    def reshard_drop_deltas(self, session: str) -> str:
        """Forget what this session has read; return as JSON what `reshard_delta_drop` does."""
        pipeline.check_ended(self)
        return json.dumps(self.reshard_delta_drop(session))

    def reshard_roll_back_deltas(
        self, address: str, version: int, timeout: float = 600.0, secret: str | None = None
    ) -> None:
        """Have an engine serve again the version that it served before the last deltas; see `reshard.delta.roll_back`.
        For a call that all of its schedulers get, as `reshard_read_deltas`."""
        check_seconds(timeout, "timeout")
        meeting = address, compat.rank_in_engine(self), compat.ranks_of_engine(), timeout, secret
        self._reshard_guard()

        self._reshard_run(lambda: self._reshard_follow_back(*meeting, version))
