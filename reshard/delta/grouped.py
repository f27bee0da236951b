"""Deltas into workers that meet in a group, of one engine or of several of one model: each makes the calls of its own
worker, and hears what the others answer."""

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from reshard.comm.background import in_background
from reshard.comm.fronts import ANOTHER, Calls, Sent
from reshard.comm.group import RefitGroup
from reshard.core.errors import ReshardError, UntouchedError
from reshard.core.limits import MOST_BUCKET_BYTES, PENDING_BYTES, check_number, check_switch
from reshard.delta.chain import Chain, target_of
from reshard.delta.worker_calls import ROLL_BACK, WAIT, WRITE, prepared, rolled_back, written


class Ready(NamedTuple):
    """A version that all members have read: its chain, its number, the digest of its weights, and whether any weights
    have to be written."""

    group: RefitGroup
    chain: Chain
    target: int
    after: str
    is_new: bool


class GroupDeltas:
    """A version of a chain on its way into a worker of this process
    (`reshard.engines.workers.delta_methods.DeltaMethods`), and into those of the other members of the group that `join`
    returns: all give the same `session`, which is one call of `apply_deltas`, and the same arguments of that.

    Files are read and checked in the background, while the worker serves; `write` is what it stands still for.
    """

    def __init__(
        self,
        join: Callable[[], RefitGroup],
        worker: Any,
        session: str,
        chain: str | Path,
        version: int | None = None,
        verify: bool = False,
        pending_bytes: int = PENDING_BYTES,
    ) -> None:
        check_switch(verify, "verify")
        check_number(pending_bytes, "pending_bytes", MOST_BUCKET_BYTES, 0)
        self.session, self._worker, self._verify, self._has_ended = session, worker, verify, False
        self._reading = in_background(lambda: self._read(join(), chain, version, pending_bytes))

    def is_prepared(self, waits: bool = False) -> bool:
        """Return True once all members have everything, for which this `waits` if it is told to. Raises the error of
        whoever could not, on all of them."""
        if not waits and not self._reading.done():
            return False
        self._reading.result()
        return True

    def end(self) -> None:
        """Have it do nothing more with the worker, since another session has come."""
        with self._worker.reshard_delta_lock():
            self._has_ended = True

    def _read(self, group: RefitGroup, place: str | Path, version: int | None, pending_bytes: int) -> Ready:
        with group.transaction("deltas are read"), Chain(place) as chain:
            target, after = target_of(chain, version)
            asked = f"{self.session} {target} {after}"
            if len(set(group.gather("target", asked.encode()))) > 1:
                raise ReshardError(
                    f"workers of this engine find different chains at {place}: give a place that is the same for all"
                )
            # This thread holds the worker for no longer than a call: a main thread may wait for that.
            calls = prepared(chain, target, after, self.session, pending_bytes, group.size, waits=False)
            is_new = made(group, self._call, calls)
        return Ready(group, chain, target, after, is_new)

    def write(self) -> bool:
        """Write it, once it is prepared; return whether anything was written: then the caller empties the prefix
        cache."""
        group, chain, target, after, is_new = self._reading.result()
        with group.transaction("deltas"):
            calls = written(chain, target, after, self.session, self._verify, group.size)
            made(group, self._call, calls, partial(self._worker.reshard_delta_invalidate, self.session))
        return is_new

    def _call(self, method: str, *arguments: Any) -> Any:
        with self._worker.reshard_delta_lock():
            if self._has_ended:
                raise ReshardError(ANOTHER)
            return getattr(self._worker, method)(*arguments)


def roll_back_in_group(group: RefitGroup, worker: Any, version: int | None = None) -> int:
    """Do what `reshard.delta.roll_back` does, called by each member of a group with its worker; return the version. The
    caller empties the prefix cache."""

    def call(method: str, *arguments: Any) -> Any:
        return getattr(worker, method)(*arguments)

    with group.transaction("a way back"):
        calls = rolled_back(version, group.size)
        reached: int = made(group, call, calls, partial(worker.reshard_delta_invalidate, None))
    return reached


def made(
    group: RefitGroup, call: Callable[..., Any], calls: Calls, invalidate: Callable[[], None] = lambda: None
) -> Any:
    """Return what calls come to that each member of a group makes of its own worker by `call`, and answers all; commit.
    `invalidate` what was written where others may not have."""
    sent, number, wrote = Sent(calls), 0, False
    try:
        while following := sent.following():
            method, arguments = following
            if method == WAIT:
                time.sleep(*arguments)
                continue
            wrote |= method in (WRITE, ROLL_BACK)
            answer = json.dumps(call(method, *arguments)).encode()
            sent.answers = [json.loads(each) for each in group.gather(f"answers/{number}", answer)]
            number += 1
        group.commit()
    except UntouchedError:
        raise
    except BaseException:
        if wrote:
            invalidate()
        raise
    return sent.result
