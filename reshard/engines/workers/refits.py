"""The engine's side of a refit in processes of an engine: the methods that its workers get.

An engine's own module has its way into them, and says how a worker makes its side.
"""

import logging
import os
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial, wraps
from inspect import Parameter, Signature
from typing import Any

from reshard.comm.group import RefitGroup, check_rank
from reshard.comm.hosts import parsed
from reshard.core.errors import ReshardError, first_line
from reshard.core.limits import check_seconds, check_switch
from reshard.models.config_fields import ignore_hint_for
from reshard.refit.connecting import connect
from reshard.refit.engine import Engine
from reshard.refit.link import Link
from reshard.refit.options import ConnectOptions


@dataclass(frozen=True, kw_only=True)
class WorkerOptions(ConnectOptions):
    """The options with which a worker connects.

    `timeout` is for how many seconds members wait for each other, when they connect and in every refit.
    `match_vllm_rounding` is that of `VllmModel`. `secret` is that of `RefitGroup.join`, the same
    for all members, and `name` the engine's, or this worker's, in the errors and logs of all.
    """

    timeout: float = 60.0
    match_vllm_rounding: bool = False
    secret: str | None = field(default=None, repr=False)

    @staticmethod
    def of_call(*arguments: Any, **named: Any) -> "WorkerOptions":
        """Return the options in the arguments of a call, which may have those of `ARGUMENTS`, in this order or
        by name. Raises TypeError, as any call does, for others."""
        return WorkerOptions(**ARGUMENTS.bind(*arguments, **named).arguments)

    def of_worker(self, index: int) -> dict[str, Any]:
        """Return the arguments for a worker of the engine that has these: its name says which one it is."""
        name = None if self.name is None else f"engine {self.name}, worker {index}"
        return {field: getattr(self, field) for field in ARGUMENTS.parameters} | {"name": name}

    def checked(self, name: Callable[[str], str] = str) -> "WorkerOptions":
        """Return these options; see `ConnectOptions.checked`."""
        check_seconds(self.timeout, name("timeout"))
        check_switch(self.match_vllm_rounding, name("match_vllm_rounding"))
        return super().checked(name)


# What a worker's call takes: what else `ConnectOptions` has is for a trainer's ranks to give.
ARGUMENTS = Signature(
    [
        Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=getattr(WorkerOptions, name))
        for name in ("backend", "bucket_bytes", "timeout", "match_vllm_rounding", "secret", "adapter", "name")
    ]
)


def connect_worker(
    address: str,
    rank: int,
    size: int,
    options: WorkerOptions,
    destination: Callable[[], Engine],
    close: Callable[[], None],
) -> Link:
    """Connect a worker as member `rank` of `size`; its side is made by `destination`.

    `close` gives up the present connection; wrong arguments are refused before that. Raises
    ReshardError, as on every other member, if the two sides do not hold the same model or a member
    is missing.
    """
    parsed(address)
    check_rank(rank, size)
    options = options.checked()
    close()
    members = RefitGroup.join(address, rank, size, options.timeout, options.secret)
    with ignore_hint_for("refit"):
        return connect(members, None, destination, options)


def log_refits(logger: logging.Logger, link: Link, is_first: bool) -> None:
    """Let the first of an engine's workers log in the engine's log how the weights come to it, and each refit."""
    for one in (link.below.link, link) if link.below is not None else (link,):
        one.log.logger, one.log.is_first = logger, is_first
    receiver, log = link.receiver, link.log
    if is_first and receiver is not None:
        routes = Counter(map(log.way, receiver.routes().values()))
        ways = ", ".join(f"{way} from {n}" for way, n in sorted(routes.items()))
        logger.info("reshard is connected: weights come to this rank by refits, %s trainer ranks", ways)


def with_short_traceback(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of a worker that raises a ReshardError without its causes, and from there: the engine logs the
    whole traceback, and the sentence says what is to be done."""

    @wraps(method)
    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except ReshardError as error:
            if os.environ.get("RESHARD_DEBUG"):
                raise
            refusal = error
        try:
            raise refusal.with_traceback(None) from None
        finally:
            del refusal  # which its traceback would keep

    return called


def _error_of(work: Callable[[], Any]) -> ReshardError | None:
    """Return the error of work, if it raises one, of whatever kind: other ranks wait to hear of it."""
    try:
        work()
    except Exception as error:
        return error if isinstance(error, ReshardError) else ReshardError(first_line(error))
    return None


class LinkMethods:
    """Methods of a worker that has connected, on its `_reshard_link`."""

    _reshard_link: Link | None = None

    @with_short_traceback
    def reshard_refit(self, version: int | None = None, verify: bool = False) -> dict[str, Any]:
        """Take the trainer's weights; return the report as a dict."""
        check_switch(verify, "verify")
        return self._reshard_connected().refit(version, verify).to_dict()

    @with_short_traceback
    def reshard_begin_refit(
        self, version: int | None = None, verify: bool = False, ticket: str | None = None
    ) -> None:
        """Take part in a refit that a trainer has begun, in the background: return at once, and go on serving; see
        `Link.begin_refit`. `reshard_begun` says what has become of it. For the `ticket` see `reshard_expecting`."""
        check_switch(verify, "verify")
        with self.reshard_expecting(ticket):
            self._reshard_connected().begin_refit(version, verify)

    @with_short_traceback
    def reshard_begun(self) -> dict[str, Any]:
        """Wait for what becomes of the refit that was begun last; return its report as a dict."""
        return self._reshard_connected().begun.last().wait().to_dict()

    @with_short_traceback
    def reshard_switch(
        self, version: int | None = None, keep_caches: bool = False, ticket: str | None = None
    ) -> int:
        """Serve the version that a refit was begun with, if all ranks of this engine can; see `Link.switch`. vLLM drops
        what it has computed from the weights before by a call of its own."""
        check_switch(keep_caches, "keep_caches")
        switch = partial(Link.switch, keep_caches=keep_caches)
        roll_back = partial(Link.roll_back, keep_caches=keep_caches)
        check = partial(Link.check_switch, version=version, ticket=ticket)
        return self._reshard_all(check, switch, roll_back)

    @with_short_traceback
    def reshard_roll_back(
        self, version: int | None = None, keep_caches: bool = False, ticket: str | None = None
    ) -> int:
        """Serve again what was served before the last switch, this version if it is given, if all ranks of this engine
        can; see `Link.roll_back`."""
        check_switch(keep_caches, "keep_caches")
        switch = partial(Link.switch, keep_caches=keep_caches)
        roll_back = partial(Link.roll_back, keep_caches=keep_caches)
        check = partial(Link.check_roll_back, version=version, ticket=ticket)
        return self._reshard_all(check, roll_back, switch)

    def _reshard_all(
        self, check: Callable[[Link], None], act: Callable[[Link], int], undo: Callable[[Link], int]
    ) -> int:
        """Return what `act` returns of this worker's link, if all ranks of this engine can do it by their `check`, and
        do; else it is undone where it was done, so that they serve one version. Whatever a rank lacks, it takes
        part."""
        error = _error_of(lambda: check(self._reshard_connected()))
        if not self._reshard_agree(error is None):
            raise error or ReshardError("another rank of this engine has nothing to switch to: refit it")
        link, results = self._reshard_connected(), list[int]()
        before = link.begun.served
        error = _error_of(lambda: results.append(act(link)))
        if self._reshard_agree(error is None):
            return results[0]
        if link.begun.served != before and (undone := _error_of(lambda: undo(link))) is not None:
            link.refuse_to_serve(f"a version that other ranks of its engine do not have, since {undone}")
        raise error or ReshardError(
            f"another rank of this engine did not do it: it serves version {self.reshard_version()} as before"
        )

    def _reshard_agree(self, is_done: bool) -> bool:
        """Return True if all ranks of this engine, who all call this at the same time, say so."""
        return is_done

    def reshard_expecting(self, ticket: str | None) -> AbstractContextManager[None]:
        """Return a context in which a refit is that of a trainer's `ticket` (`RefitGroup.ticket`), where there is
        one."""
        link = self._reshard_connected()
        return nullcontext() if ticket is None else link.group.expecting(ticket)

    def reshard_describe(self) -> dict[str, Any]:
        """Return what `Link.describe` says of this worker's side: also the ``digest`` of a verified refit, as long as
        this worker serves what that has brought."""
        return self._reshard_connected().describe()

    def reshard_release(self) -> None:
        """Unmap the trainer's memory, together with the trainer's `Link.release`."""
        self._reshard_connected().release()

    def reshard_close(self) -> None:
        """Free what was mapped and staged, and forget the trainer, if one is connected."""
        link, self._reshard_link = self._reshard_link, None
        if link is not None:
            try:
                link.close()
            finally:
                link.group.close()

    def reshard_version(self) -> int | None:
        """Return the version of the weights that this worker serves.

        None before the first refit, and if the engine has discarded the weights or loaded others
        since.
        """
        written = self._reshard_written_side()
        if self._reshard_link is None and written is not None:
            return written.version
        receiver = self._reshard_connected().receiver
        return receiver.engine.version if receiver is not None else None

    def _reshard_written_side(self) -> Engine | None:
        """Return this worker's side where it is written in another way than by a connection."""
        return None

    def _reshard_connected(self) -> Link:
        if self._reshard_link is None:
            raise ReshardError("this engine is not connected: call reshard_connect first")
        return self._reshard_link
