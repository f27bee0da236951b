"""Deltas into workers that meet in a group, of one engine or of several of one model: each makes the calls of its own
worker, and hears what the others answer."""

import json
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from reshard.comm.background import in_background
from reshard.comm.fronts import Calls, Sent
from reshard.comm.group import RefitGroup
from reshard.core.errors import ReshardError, UntouchedError
from reshard.core.limits import MOST_BUCKET_BYTES, PENDING_BYTES, check_number, check_switch
from reshard.delta.chain import Chain, target_of
from reshard.delta.worker_calls import ROLL_BACK, WRITE, prepared, rolled_back, written


class Ready(NamedTuple):
    """What all members have ready: the chain, the version and the digest of its weights, and whether any have to be
    written."""

    group: RefitGroup
    chain: Chain
    target: int
    after: str
    is_new: bool


class GroupDeltas:
    """A version of a chain on its way into a worker of this process
    (`reshard.engines.workers.delta_methods.DeltaMethods`), and into those of the other members of the group that `join`
    returns: all give the same arguments, which are those of `reshard.delta.apply_deltas`.

    Files are read and checked in the background, while the worker serves; `write` is what it stands still for.
    """

    def __init__(
        self,
        join: Callable[[], RefitGroup],
        worker: Any,
        chain: str | Path,
        version: int | None = None,
        verify: bool = False,
        pending_bytes: int = PENDING_BYTES,
    ) -> None:
        check_switch(verify, "verify")
        check_number(pending_bytes, "pending_bytes", MOST_BUCKET_BYTES, 0)
        self._worker, self._verify, self._session = worker, verify, uuid.uuid4().hex
        self._version = version
        self._reading = in_background(lambda: self._read(join(), chain, version, pending_bytes))

    def is_prepared(self, waits: bool = False) -> bool:
        """Return True once all members have everything, for which this `waits` if it is told to. Raises the error of
        whoever could not, on all of them."""
        if not waits and not self._reading.done():
            return False
        self._reading.result()
        return True

    def check(self, version: int) -> None:
        """Raise ReshardError if it is not this version."""
        if version != self._version:
            raise ReshardError(
                f"version {self._version} was read, and not version {version}: call apply_deltas again"
            )

    def _read(self, group: RefitGroup, place: str | Path, version: int | None, pending_bytes: int) -> Ready:
        with group.transaction("deltas are read"), Chain(place) as chain:
            target, after = target_of(chain, version)
            if len(set(group.gather("target", f"{target} {after}".encode()))) > 1:
                raise ReshardError(
                    f"workers of this engine find different chains at {place}: give a place that is the same for all"
                )
            calls = prepared(chain, target, after, self._session, pending_bytes, group.size)
            is_new = made(group, self._worker, calls, self._session)
        return Ready(group, chain, target, after, is_new)

    def write(self) -> bool:
        """Write it, once it is prepared; return whether anything was written: then the caller empties the prefix
        cache."""
        group, chain, target, after, is_new = self._reading.result()
        with group.transaction("deltas"):
            calls = written(chain, target, after, self._session, self._verify, group.size)
            made(group, self._worker, calls, self._session)
        return is_new


def roll_back_in_group(group: RefitGroup, worker: Any, version: int | None = None) -> int:
    """Do what `reshard.delta.roll_back` does, called by each member of a group with its worker; return the version. The
    caller empties the prefix cache."""
    with group.transaction("a way back"):
        reached: int = made(group, worker, rolled_back(version, group.size), None)
    return reached


def made(group: RefitGroup, worker: Any, calls: Calls, session: str | None) -> Any:
    """Return what calls come to that each member of a group makes of its own worker, and answers all; commit."""
    sent, number, wrote = Sent(calls), 0, False
    try:
        while call := sent.following():
            method, arguments = call
            wrote |= method in (WRITE, ROLL_BACK)
            answer = json.dumps(getattr(worker, method)(*arguments)).encode()
            sent.answers = [json.loads(each) for each in group.gather(f"answers/{number}", answer)]
            number += 1
        group.commit()
    except UntouchedError:
        raise
    except BaseException:
        if wrote:  # others may not have
            worker.reshard_delta_invalidate(session)
        raise
    return sent.result
