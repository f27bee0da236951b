"""Methods of an engine's worker by which deltas of a chain are written into it."""

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial, wraps
from threading import RLock
from typing import TYPE_CHECKING, Any

from reshard.comm.fronts import ANOTHER
from reshard.comm.group import RefitGroup
from reshard.core.errors import ReshardError, UntouchedError, first_line
from reshard.core.limits import PENDING_BYTES

if TYPE_CHECKING:
    from reshard.delta.grouped import GroupDeltas
    from reshard.engines.workers.deltas import EngineDeltas
    from reshard.refit.engine import Engine

log = logging.getLogger("reshard")


def answering(method: Callable[..., Any]) -> Callable[..., Any]:
    """Have a method answer ``{"error": sentence}`` instead of raising: an engine that waits for several workers would
    leave what the others answer to the next call. ``untouched`` says whether the worker serves what it did then."""

    # What waits for other workers holds nobody up.
    is_alone = not method.__name__.startswith("reshard_delta_follow")

    @wraps(method)
    def answered(self: "DeltaMethods", *args: Any, **kwargs: Any) -> Any:
        before, is_back = _writes(self), False
        try:
            with self.reshard_delta_lock() if is_alone else nullcontext():
                return method(self, *args, **kwargs)
        except ReshardError as error:
            sentence, is_back = str(error), isinstance(error, UntouchedError)
        except Exception as error:
            log.exception("a delta failed")
            sentence = f"{type(error).__name__}: {first_line(error)}"
        deltas = self._reshard_deltas
        is_ready = deltas is None or deltas.engine.guard.ready
        return {"error": sentence, "untouched": is_ready and (is_back or before in (None, _writes(self)))}

    return answered


def _writes(worker: "DeltaMethods") -> int | None:
    """Return how often something was written into a worker's weights; None where it has followed no chain."""
    return None if worker._reshard_deltas is None else worker._reshard_deltas.engine.guard.writes


class DeltaMethods:
    """Methods of an engine's worker by which `reshard.delta.apply_deltas` writes deltas into it. They answer
    with ``{"error": sentence}`` where they cannot, and else with lists: a server hands on others as text.

    A `session` is one call of `apply_deltas`. The next one ends it.
    """

    _reshard_deltas: "EngineDeltas | None" = None
    _reshard_following: "GroupDeltas | None" = None  # with the workers of other engines

    def _reshard_engine_side(self) -> "Engine":
        raise NotImplementedError

    def _reshard_rank(self) -> int:
        """Return this worker's rank among those of all engines of its model."""
        raise NotImplementedError

    def reshard_delta_lock(self) -> AbstractContextManager[Any]:
        """Return the lock of what deltas do with this worker: a thread may read for one session as another comes."""
        lock: AbstractContextManager[Any] = vars(self).setdefault("_reshard_deltas_lock", RLock())
        return lock

    def _reshard_logger(self) -> logging.Logger | None:
        """Return where this worker logs what it has applied; None unless it is the first of its engine."""
        return log

    @answering
    def reshard_delta_digests(self, chain: str, session: str, anew: bool = False) -> list[list[Any]]:
        """Return what each box of this worker adds to the digest of the weights; `anew` where this session has
        written them."""
        from reshard.engines.workers.deltas import EngineDeltas  # which needs more packages than a refit does

        engine = self._reshard_engine_side()
        if anew:
            return self._reshard_opened(session).digests()
        self._reshard_end_following(session)
        if self._reshard_deltas is None or self._reshard_deltas.engine is not engine:
            self._reshard_deltas = EngineDeltas(engine)
        self._reshard_deltas.open(chain, session)
        engine.guard.check_ready()
        return self._reshard_deltas.digests()

    @answering
    def reshard_delta_prepare(
        self, session: str, held: str, version: int, digest: str, pending_bytes: int = PENDING_BYTES
    ) -> None:
        """Begin to fetch and check the deltas from weights with digest `held` to a version, whose weights have this
        `digest`, and return; see `reshard.delta.apply_deltas`."""
        self._reshard_opened(session).begin(held, version, digest, pending_bytes)

    @answering
    def reshard_delta_prepared(self, session: str, waits: bool = False) -> list[bool]:
        """Return whether the deltas are there and checked; wait for that if it `waits`."""
        return [self._reshard_opened(session).is_prepared(waits)]

    @answering
    def reshard_delta_write(self, session: str, version: int, digest: str) -> None:
        """Write the prepared deltas, and serve as this version, whose weights have this digest."""
        deltas, start = self._reshard_opened(session), time.perf_counter()
        sizes = [files.delta.bytes for files in deltas.prepared]
        deltas.write(version, digest)
        logger = self._reshard_logger()
        if logger is not None:
            way_back = (
                f"{deltas.back[0].size / 1e6:.1f} MB lead back"
                if deltas.back
                else f"no way back: {deltas.why}"
            )
            logger.info(
                "reshard: deltas to version %d: %d of %.1f MB in all, written in %.3f s; %s",
                version, len(sizes), sum(sizes) / 1e6, time.perf_counter() - start, way_back,
            )  # fmt: skip

    @answering
    def reshard_delta_check_roll_back(self, version: int | None = None) -> list[int]:
        """Return the version to which `reshard_delta_roll_back` leads, which is the one that is asked for, if one
        is."""
        return [self._reshard_written().check_roll_back(version)]

    @answering
    def reshard_delta_roll_back(self, version: int) -> None:
        """Serve again what was there before the last deltas, as this version; see `reshard.delta.roll_back`, which sees
        to it that all workers do."""
        start = time.perf_counter()
        self._reshard_written().roll_back(version)
        logger = self._reshard_logger()
        if logger is not None:
            logger.info("reshard: back to version %d in %.3f s", version, time.perf_counter() - start)

    @answering
    def reshard_delta_follow_begin(
        self, address: str, size: int, timeout: float, secret: str | None, *options: Any
    ) -> None:
        """Begin to fetch and check the deltas to a version of a chain, together with the workers of all engines of its
        model, which meet at `address`, and return. The `options` are those of `apply_deltas`, from the chain on."""
        self._reshard_follow_begin(address, self._reshard_rank(), size, timeout, secret, *options)

    @answering
    def reshard_delta_follow_ready(self, session: str) -> list[bool]:
        """Return whether the workers that met have everything."""
        return [self._reshard_begun_following(session).is_prepared()]

    @answering
    def reshard_delta_follow(self, session: str) -> list[bool]:
        """Write it, together with the workers that met, and serve as that version; return whether anything was
        written."""
        return [self._reshard_follow(session)]

    @answering
    def reshard_delta_drop(self, session: str) -> list[Any]:
        """Forget what this session has read, so that it writes nothing any more; return whether it had written other
        weights, and the version that these lead back to, None where they lead to none."""
        following, deltas = self._reshard_following, self._reshard_deltas
        if following is not None and following.session == session:
            following.end()
            self._reshard_following = None
        if deltas is None or deltas.session != session:
            return [False, None]
        back = deltas.back[0].before if deltas.back else None
        wrote = deltas.wrote
        deltas.close()
        deltas.session = ""
        return [wrote, back]

    @answering
    def reshard_delta_follow_back(
        self, address: str, size: int, timeout: float, secret: str | None, version: int | None
    ) -> list[int]:
        """Have this worker go back, together with those of all engines of its model, which meet at `address`; return
        the version. See `reshard.delta.roll_back`."""
        return [self._reshard_follow_back(address, self._reshard_rank(), size, timeout, secret, version)]

    def _reshard_follow_begin(
        self,
        address: str,
        rank: int,
        size: int,
        timeout: float,
        secret: str | None,
        session: str,
        *options: Any,
    ) -> None:
        from reshard.delta.grouped import GroupDeltas  # which needs more packages than a refit

        with suppress(Exception):  # which a call of the group raises, for all
            self._reshard_engine_side()  # made here: it may look at the model in another form
        join = partial(RefitGroup.join, address, rank, size, timeout, secret)
        self._reshard_end_following(session)
        self._reshard_following = GroupDeltas(join, self, session, *options)

    def _reshard_end_following(self, session: str) -> None:
        """End what another session has begun together with the workers of other engines."""
        following = self._reshard_following
        if following is not None and following.session != session:
            following.end()
            self._reshard_following = None

    def _reshard_begun_following(self, session: str) -> "GroupDeltas":
        following = self._reshard_following
        if following is None or following.session != session:
            raise ReshardError(ANOTHER)
        return following

    def _reshard_follow(self, session: str) -> bool:
        following, self._reshard_following = self._reshard_begun_following(session), None
        return following.write()

    def _reshard_follow_back(
        self, address: str, rank: int, size: int, timeout: float, secret: str | None, version: int | None
    ) -> int:
        from reshard.delta.grouped import roll_back_in_group  # which needs more packages than a refit

        members = RefitGroup.join(address, rank, size, timeout, secret)
        return roll_back_in_group(members, self, version)

    def _reshard_written_side(self) -> "Engine | None":
        return None if self._reshard_deltas is None else self._reshard_deltas.engine

    def reshard_delta_invalidate(self, session: str | None) -> None:
        """Refuse to serve, since the weights are not those of a version; nothing where another session has begun."""
        deltas = self._reshard_deltas
        if deltas is not None and session in (None, deltas.session):
            guard = deltas.engine.guard
            guard.altered()  # of no version
            try:
                deltas.engine.begin()  # a drafter, too, which an engine may not load again with its model
            finally:
                guard.invalidate("other weights than a delta was to bring")

    def _reshard_opened(self, session: str) -> "EngineDeltas":
        deltas = self._reshard_deltas
        if deltas is None or deltas.session != session:
            raise ReshardError(ANOTHER)
        return deltas

    def _reshard_written(self) -> "EngineDeltas":
        if self._reshard_deltas is None:
            raise ReshardError(
                "no deltas were written into this engine, so it keeps no version to go back to"
            )
        return self._reshard_deltas
