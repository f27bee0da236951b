"""Two ranks of a trainer that agree on where to meet their engines, and syncs that they begin."""

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from reshard.comm.background import in_background
from reshard.comm.ranks import on_first_rank
from reshard.core.errors import ReshardError
from reshard.integrations.begun import BegunSync
from reshard.integrations.options import SyncOptions
from reshard.integrations.sync import Meeting, WeightSync
from reshard.refit import connect
from tests.on_cpu.refit_deltas_on_cpu import Served, Shards
from tests.starting.ranks import caught, free_port
from tests.tools.probe import caught as raised_by


def meetings(rank: int) -> list:
    """What this rank gets at a first sync; at one where all are connected; at one where the second rank alone is not;
    and where the first rank has no address."""
    sync = WeightSync(SyncOptions(timeout=7.0))
    agreed = lambda: sync.agreed_meeting(5, lambda: f"host:{rank}")  # noqa: E731
    first = agreed()
    sync.link = SimpleNamespace()  # type: ignore[assignment]
    connected = agreed()
    sync.link = None if rank else sync.link
    anew = agreed()
    return [first, connected, anew, caught(lambda: sync.agreed_meeting(5, lambda: fails(rank)))]


def asked(rank: int) -> list:
    """What this rank hears of calls that the first rank makes, one of which fails."""
    made: list[int] = []

    def call() -> str:
        made.append(rank)
        return f"made by {rank}"

    return [on_first_rank(call), made, caught(lambda: on_first_rank(lambda: fails(rank)))]


def fails(rank: int) -> str:
    """Raise what a framework might."""
    raise OSError(f"no port for {rank}\nand more")


class Threaded:
    """An engine of one rank, in a thread of the trainer's first one, by the way in which a framework calls it. A call
    that it `fails` raises, and what is ``late`` comes after the trainer has given it up."""

    ranks = 1

    def __init__(self, name: str) -> None:
        self.name, self.side, self.fails, self.calls = name, Served(), "", list[str]()
        self.link: Any = None

    def connect(self, meeting: dict) -> Future:
        meeting = dict(meeting)
        first_rank = meeting.pop("first_rank")

        def connected() -> None:
            members = Meeting(**meeting).join(first_rank)
            if self.link is not None:
                self.link.close()
            self.link = connect(members, None, self.side)

        return self._called("connect", connected)

    def refit(self, version: int | None, verify: bool) -> Future:
        return self._called("refit", lambda: self.link.refit(version, verify))

    def begin(self, version: int | None, verify: bool) -> Future:
        return self._called("begin", lambda: self.link.begin_refit(version, verify))

    def switch(self, version: int | None) -> Future:
        return self._called("switch", lambda: self.link.switch(version))

    def roll_back(self, version: int | None) -> Future:
        return self._called("roll back", self.link.roll_back)

    def _called(self, what: str, work: Callable[[], object]) -> Future:
        self.calls.append(what)

        def call() -> None:
            if self.fails == f"before {what}":
                raise ReshardError("no luck")
            if self.fails == f"late {what}":
                time.sleep(3 * SECONDS)
            work()
            if self.fails == f"after {what}":
                raise ReshardError("no luck")

        return in_background(call)

    def holds(self) -> list:
        return [self.side.now(), self.side.guard.version, self.side.ready]


SECONDS = 2.0


class Job:
    """A trainer's rank, with engines that its first rank calls, and what the test is told of each step."""

    def __init__(self, rank: int) -> None:
        self.rank, self.side, self.version = rank, Shards(rank), 0
        self.sync = BegunSync(SyncOptions(timeout=30.0, begin=True).checked())
        self.engines = [Threaded(name) for name in ("one", "two")]
        self.told: dict[str, dict] = {}

    def step(self, name: str, fails: str = "", between: Callable[[], object] = lambda: None, **other) -> None:
        """Train, begin, go on training while the bytes travel, and sync."""
        self.version += 1
        self.side.step(0.01)
        told = self.told[name] = {"before": self.holds(), "packed": [t.clone() for t in self.side.tensors]}
        self.engines[1].fails = fails
        for engine in self.engines:
            engine.calls.clear()
        told["why"] = self.sync.begin(self.engines, self.version)
        self.side.step(0.5)
        if self.sync.link is not None and not told["why"]:
            self.sync.link.begun.settle()
        told["while begun"] = self.holds()
        between()
        for tensor, packed in zip(self.side.tensors, told["packed"], strict=True):
            tensor.copy_(packed)
        version = other.get("version", self.version)
        told["raised"] = raised_by(lambda: told.update(switched=self.sync.switch(self.engines, version)))
        if not told["raised"] and told["switched"] is None:
            told["raised"] = raised_by(lambda: self.run(version))
        told |= {"after": self.holds(), "calls": [[*engine.calls] for engine in self.engines]}
        told["connected"] = self.sync.link is not None
        self.engines[1].fails = ""

    def run(self, version: int) -> None:
        self.sync.run(self.engines, self.side, version, place=lambda: f"127.0.0.1:{free_port()}")

    def holds(self) -> list:
        return [engine.holds() for engine in self.engines] if self.rank == 0 else []

    def lose(self) -> None:
        """As where an engine has discarded its weights."""
        self.engines[1].side.guard.lose("no weights")


def beginning(rank: int) -> dict:
    """Syncs that are begun, and what becomes of them where something fails."""
    job = Job(rank)
    job.step("first")
    job.step("begun")
    job.step("begun again")
    for fails in ("before switch", "after switch"):
        job.step(fails, fails)
        job.step(f"then {fails}")
    timeout, job.sync.options = job.sync.options, replace(job.sync.options, timeout=SECONDS)
    job.step("late switch", "late switch")
    job.sync.options = timeout
    time.sleep(3 * SECONDS)
    job.told["when it was late"] = {"after": job.holds()}
    job.step("then late switch")
    job.step("lost", between=lambda: job.rank or job.lose())
    job.step("then lost")
    job.step("not begun", "before begin")
    job.step("then not begun")
    job.step("another version", version=job.version + 100)
    job.version += 100
    job.sync.link.pending_bytes = 10
    job.step("too large")
    job.sync.link.pending_bytes = 1 << 20
    job.step("then too large")
    job.sync.begin(job.engines, job.version + 1)
    job.step("begun twice")
    job.sync.link = job.sync.link if rank else None
    job.step("one rank is not connected")
    job.told["no option"] = no_option(job)
    return job.told


def no_option(job: Job) -> dict:
    """What a sync does that is not to be begun."""
    for engine in job.engines:
        engine.calls.clear()
    job.sync.options = replace(job.sync.options, begin=False)
    why, switched = job.sync.begin(job.engines, 1), job.sync.switch(job.engines, 1)
    return {"why": why, "switched": switched, "calls": [engine.calls for engine in job.engines]}
