"""A fleet's engines, and what a send says of them."""

import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from inspect import signature
from itertools import count
from threading import Lock
from typing import Any, NamedTuple

from reshard.core.printed import Printed
from reshard.refit.link import RefitReport
from reshard.refit.pending.report import BegunReport


class Held(NamedTuple):
    """What an engine serves: the version, and whose it is (`reshard.refit.options.ConnectOptions`), empty if it does
    not know that."""

    version: int
    origin: str


@dataclass(frozen=True)
class FleetReport(Printed):
    """The outcome of a send: the `version`, the `reports` of the engines that have it, by name, and why each other one
    is `behind`."""

    version: int
    seconds: float
    reports: dict[str, RefitReport | BegunReport] = field(default_factory=dict)
    behind: dict[str, str] = field(default_factory=dict)

    def lines(self) -> Iterator[str]:
        """Return a line on the send, and one on each engine that is behind."""
        count = len(self.reports) + len(self.behind)
        yield f"version {self.version} in {len(self.reports)} of {count} engines, {self.seconds:.2f} s"
        yield from (f"  {name} is behind: {why}" for name, why in self.behind.items())

    def to_dict(self) -> dict[str, Any]:
        """Return figures for a logger; ``transfer_seconds`` is the sum over connections: one, unless engines failed."""
        reports = {id(report): report for report in self.reports.values()}.values()
        return {
            "version": self.version,
            "seconds": self.seconds,
            "engines": len(self.reports),
            "engines_behind": len(self.behind),
            "transfer_seconds": sum(report.transfer_seconds for report in reports),
        }


_claims = count(1)


@dataclass
class Member:
    """An engine: its `client`, on the first rank, and how many `workers` it has."""

    name: str
    client: Any = None
    workers: int = 0
    version: int | None = None  # the last that it got, or serves from before
    origin: str = ""  # of the version that it serves from before
    refitted_at: float | None = None
    why: str = "it was added after the last send"  # it is behind; empty while it is not
    asked: "Future[int] | None" = None  # how many workers it says that it has, while it is not connected
    has_failed: bool = False  # since it was last refitted
    has_restarted: bool = False  # since it was connected
    _paused_by: set[int] = field(default_factory=set)  # claims
    _ended: set[int] = field(default_factory=set)  # claims that no longer pause it: a call may come late
    _lock: Lock = field(default_factory=Lock, repr=False, compare=False)  # of these, and while it resumes

    @property
    def hands_on(self) -> bool:
        """True if it can hand on weights to others and get them so: its client says that it may be called at any time,
        also from another thread, and that its engine understands the call."""
        return bool(getattr(self.client, "hands_on", False))

    def refitted(self, version: int) -> None:
        """Note that it has the weights of a version now."""
        self.version, self.refitted_at, self.why, self.has_failed = version, time.monotonic(), "", False

    def restarted(self) -> None:
        """Note that it no longer serves the version that it had."""
        self.version, self.has_restarted = None, True
        self.why = "it no longer serves the weights that it got: it was started again, or got others"

    def pause(self, claim: int) -> None:
        """Let no request run until `go_on` with the same claim (`new_claim`), as far as its client can; where that is
        so by this claim, or was called before this, do nothing."""
        with self._lock:
            if claim in self._ended:
                return
            is_paused = claim in self._paused_by
            self._paused_by.add(claim)
        if is_paused or not hasattr(self.client, "pause"):
            return
        try:
            self.client.pause()
        finally:
            with self._lock:
                # Meanwhile it was to go on, and may have been paused after that.
                if claim in self._ended:
                    self._resume(claim)

    def go_on(self, claim: int, is_new: bool) -> None:
        """Let requests run again, unless a later claim has them paused, which lets them go on; drop before what was
        computed from the old weights if there are new ones. A call that comes late so ends no pause but its own, and
        one that comes before its pause, or during it, ends it, too."""
        try:
            if is_new and hasattr(self.client, "reset_prefix_cache"):
                self.client.reset_prefix_cache()
        finally:
            with self._lock:
                self._paused_by.discard(claim)
                self._ended.add(claim)
                self._resume(claim)

    def _resume(self, claim: int) -> None:
        """Let requests run again that a claim had waiting, unless a later one has."""
        if hasattr(self.client, "resume") and claim > max(self._paused_by, default=0):
            self.client.resume()

    def state(self) -> dict[str, Any]:
        """Return what all ranks have to know of it."""
        return {name: getattr(self, name) for name in ("version", "why", "has_failed", "has_restarted")}

    def take_state(self, state: dict[str, Any]) -> None:
        """Take the first rank's `state`."""
        for name, value in state.items():
            setattr(self, name, value)

    def failed(self, why: str) -> None:
        """Note that it could not be refitted."""
        self.why, self.has_failed = why, True

    def lost(self, why: str) -> None:
        """Note that it could not be refitted, and that nobody knows what it serves: its number may be another's."""
        self.failed(why)
        self.version = None


def new_claim() -> int:
    """Return a claim to have engines paused, later than all before."""
    return next(_claims)


def finish(engine: Any, version: str | None) -> None:
    """End an update, with the version if this client or engine takes one."""
    if version is not None and "weight_version" in signature(engine.finish_weight_update).parameters:
        engine.finish_weight_update(weight_version=version)
    else:
        engine.finish_weight_update()
