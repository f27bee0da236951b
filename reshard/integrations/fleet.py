"""A trainer's fleet: vLLM engines that come and go, each with a connection of its own.

    fleet = Fleet(MegatronModel(models), "10.0.0.1")
    fleet.add(HttpClient("http://10.0.0.7:8000", name="pod-7"))  # at any time, on the first rank
    for step in range(steps):
        train(models)
        report = fleet.send(step, pausing=True)

An engine that dies, is late or refuses costs the others nothing but the wait for it: it is left out, named, and
refitted again by the first `Fleet.send` that finds it answering. Ports, ranks and sizes are the fleet's business.
"""

import logging
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import Any, TypeVar

import torch.distributed as dist

from reshard.comm.background import in_background
from reshard.comm.hosts import free_address
from reshard.comm.ranks import on_first_rank
from reshard.comm.secret import new_secret
from reshard.core.errors import OptionError, ReshardError, first_line, listed
from reshard.core.limits import check_seconds
from reshard.core.printed import Printed
from reshard.integrations.sync import Calls
from reshard.integrations.vllm.transfer import EngineClient, WeightTransfer, count_workers
from reshard.refit.link import RefitReport
from reshard.refit.options import ConnectOptions
from reshard.refit.trainer import Trainer

Result = TypeVar("Result")
log = logging.getLogger("reshard.fleet")
# How long a send waits for the first answer of an engine that was not connected. One that answers later is taken along
# by the next send.
ANSWER_SECONDS = 5.0


@dataclass(frozen=True)
class FleetReport(Printed):
    """The outcome of a send: the `version`, the `reports` of the engines that have it, by name, and why each other one
    is `behind`."""

    version: int
    seconds: float
    reports: dict[str, RefitReport] = field(default_factory=dict)
    behind: dict[str, str] = field(default_factory=dict)

    def lines(self) -> Iterator[str]:
        """Return a line on the send, and one on each engine that is behind."""
        count = len(self.reports) + len(self.behind)
        yield f"version {self.version} in {len(self.reports)} of {count} engines, {self.seconds:.2f} s"
        yield from (f"  {name} is behind: {why}" for name, why in self.behind.items())

    def to_dict(self) -> dict[str, Any]:
        """Return figures for a logger: ``transfer_seconds`` and ``received_bytes`` are the sums over all engines."""
        return {
            "version": self.version,
            "seconds": self.seconds,
            "engines": len(self.reports),
            "engines_behind": len(self.behind),
            "transfer_seconds": sum(report.transfer_seconds for report in self.reports.values()),
            "received_bytes": sum(sum(report.received_bytes.values()) for report in self.reports.values()),
        }


@dataclass
class _Member:
    """An engine: its `client`, on the first rank, and its `transfer` while it is connected."""

    name: str
    client: Any = None
    transfer: WeightTransfer | None = None
    version: int | None = None  # the last that it got
    why: str = "it was added after the last send"
    workers: "Future[int] | None" = None  # how many it says that it has, asked while it is not connected


class Fleet:
    """A trainer's rank, and the engines that it refits. All ranks of torch's process group make one, and call `send`
    and `close`; `add` and `remove` count on the first rank.

    `host` is an address of the first rank's host that all engines reach; each connection takes a free port of it, and
    has a secret of its own, which its engine gets with the address. `timeout` is how many seconds members wait for one
    another, and so the most that an engine that hangs can cost a send. Further arguments are those of
    `reshard.refit.connect`.
    """

    def __init__(
        self, source: Trainer | Callable[[], Trainer], host: str, *, timeout: float = 60.0, **options: Any
    ) -> None:
        check_seconds(timeout, "timeout")
        self.source, self.host, self.timeout = source, host, timeout
        ConnectOptions(**options).checked()
        self.options = options
        self.is_first = not dist.is_initialized() or dist.get_rank() == 0
        self.version: int | None = None
        self._members: dict[str, _Member] = {}
        # Since the last send, on the first rank: names with a client to add, or None to remove. Another thread may add.
        self._changes: list[tuple[str, EngineClient | None]] = []
        self._lock = Lock()

    # Members

    def add(self, client: EngineClient, name: str | None = None) -> str:
        """Take an engine along from the next send on. Return its name, by default that of its client, or its address.

        Raises OptionError for a name that the fleet has.
        """
        chosen = name or getattr(client, "name", None) or getattr(client, "url", None)
        if not chosen:
            raise OptionError(f"this {type(client).__name__} has no name: give name=")
        with self._lock:
            if chosen in self._names():
                raise OptionError(f"the fleet has an engine {chosen}: remove it first, or give another name")
            self._changes.append((str(chosen), client))
        return str(chosen)

    def remove(self, name: str) -> None:
        """Leave an engine out from the next send on, which disconnects it; it serves what it has. Raises OptionError
        for a name that the fleet does not have."""
        with self._lock:
            if self.is_first and name not in self._names():
                raise OptionError(f"the fleet has no engine {name}: it has {listed(self._names()) or 'none'}")
            self._changes.append((name, None))

    def names(self) -> list[str]:
        """Return the names of the engines that the next send tries to reach, as this rank knows them."""
        with self._lock:
            return self._names()

    def _names(self) -> list[str]:
        names = dict.fromkeys(self._members)
        for name, client in self._changes:
            if client is None:
                names.pop(name, None)
            else:
                names[name] = None
        return list(names)

    def describe(self) -> dict[str, Any]:
        """Return the fleet's ``version``, and of each of its ``engines`` the ``version`` that it got last, whether it
        is ``connected``, and ``why`` it is behind, if it is."""
        engines = {}
        for member in self._members.values():
            current = member.transfer is not None and member.version == self.version
            engines[member.name] = {
                "version": member.version,
                "connected": member.transfer is not None,
                "why": None if current else member.why,
            }
        return {"version": self.version, "engines": engines}

    # Sending

    def send(
        self,
        version: int | None = None,
        verify: bool = False,
        *,
        pausing: bool = False,
        required: Collection[str] = (),
    ) -> FleetReport:
        """Refit every engine that answers, one after the other; see `reshard.refit.Link.refit`. All ranks call it.

        With `pausing` no request runs meanwhile: each engine is paused, and drops what it has computed from the old
        weights, as far as its client can. `required` names engines without which the send has failed.

        Raises ReshardError, after all others have been refitted, if a required one is behind, or if none of those that
        answered could be connected and refitted, which may be this trainer's fault.
        """
        began = time.monotonic()
        self._follow_changes()
        if version is None:
            version = 0 if self.version is None else self.version + 1
        tried = self._connect_waiting()
        connected = [member for member in self._members.values() if member.transfer is not None]
        reports: dict[str, RefitReport] = {}
        for member in connected:
            report = self._refit(member, version, verify, pausing)
            if report is not None:
                reports[member.name], member.version = report, version
        self.version = version
        behind = {name: member.why for name, member in self._members.items() if name not in reports}
        sent = FleetReport(version, time.monotonic() - began, reports, behind)
        if self.is_first:
            log.log(
                logging.WARNING if behind else logging.INFO, "%s", "; ".join(map(str.strip, sent.lines()))
            )
        missing = [
            f"{name} ({behind.get(name, 'it is no member')})" for name in required if name not in reports
        ]
        if missing or ((connected or tried) and not reports):
            raise ReshardError(
                f"version {version} is not in {listed(missing or map(_said, behind.items()), 3)}"
            )
        return sent

    def _follow_changes(self) -> None:
        """Add and remove members as the first rank was told to, on all ranks."""
        with self._lock:
            changes, self._changes = self._changes if self.is_first else [], []
        for name, is_new in on_first_rank(lambda: [(added, client is not None) for added, client in changes]):
            if name in self._members:
                self._drop(self._members.pop(name), "it was removed")
            if is_new:
                self._members[name] = _Member(name)
        for name, client in changes:
            if client is not None and name in self._members:
                self._members[name].client = client

    def _connect_waiting(self) -> bool:
        """Connect each engine that is not connected and answers now. Return False if there is none."""
        tried = False
        for name, (workers, why) in on_first_rank(self._answering).items():
            member = self._members[name]
            if workers is None:
                member.why = why
            else:
                tried = True
                member.transfer = self._part(member, partial(self._connect, member, workers))
        return tried

    def _answering(self) -> dict[str, tuple[int | None, str]]:
        """Return, of each engine that is not connected, how many workers it says that it has; or why not."""
        waiting = [member for member in self._members.values() if member.transfer is None]
        asked_now = []
        for member in waiting:
            if member.workers is None:
                member.workers = in_background(partial(count_workers, member.client))
                asked_now.append(member.workers)
        wait(asked_now, ANSWER_SECONDS)
        answers: dict[str, tuple[int | None, str]] = {}
        for member in waiting:
            asked = member.workers
            if asked is None or not asked.done():
                answers[member.name] = None, "it has not answered yet"
                continue
            member.workers = None
            error = asked.exception()
            answers[member.name] = (asked.result(), "") if error is None else (None, first_line(error))
        return answers

    def _connect(self, member: _Member, workers: int) -> WeightTransfer:
        address, secret = on_first_rank(lambda: (free_address(self.host), new_secret()))
        return WeightTransfer(
            self.source,
            [member.client] if self.is_first else [],
            address,
            engine_ranks=[workers],
            timeout=self.timeout,
            secret=secret,
            **self.options,
        )

    def _refit(self, member: _Member, version: int, verify: bool, pausing: bool) -> RefitReport | None:
        """Return the report of a member's refit; None where it failed, which has dropped the member."""
        transfer = member.transfer
        assert transfer is not None
        paused = not pausing or self._part(member, lambda: self._called(member, _pause))
        report = self._part(member, lambda: transfer.send(version, verify)) if paused else None
        if not pausing:
            return report
        if report is None:  # it goes on all the same, so that it answers those who wait that it may not serve
            if self.is_first:
                in_background(partial(_go_on, member.client, is_new=False))
            return None
        return (
            report if self._part(member, lambda: self._called(member, partial(_go_on, is_new=True))) else None
        )

    def _called(self, member: _Member, call: Callable[[Any], bool]) -> bool:
        """Return on all ranks what a call of a member's client returns on the first. Raises ReshardError if it does not
        within the time limit."""

        def bounded() -> bool:
            calls = Calls({f"engine {member.name}": in_background(partial(call, member.client))})
            calls.wait_all(self.timeout)
            return True

        return on_first_rank(bounded)

    def _part(self, member: _Member, part: Callable[[], Result]) -> Result | None:
        """Return what all ranks do with a member; None, and the member dropped, where one of them fails."""
        result, failure = None, ""
        try:
            result = part()
        except ReshardError as error:
            failure = str(error)
        failures = [each for each in _from_all(failure) if each]
        if not failures:
            return result
        if isinstance(result, WeightTransfer):
            member.transfer = result
        self._drop(member, failures[0])
        return None

    def _drop(self, member: _Member, why: str) -> None:
        transfer, member.transfer, member.why = member.transfer, None, why
        if transfer is not None:
            with suppress(ReshardError):
                transfer.close()

    def close(self) -> None:
        """Disconnect all engines, which serve what they have; all ranks call it."""
        for member in self._members.values():
            self._drop(member, "the fleet was closed")


def _pause(client: Any) -> bool:
    """Let no request of an engine run, as far as its client can."""
    if hasattr(client, "pause"):
        client.pause()
    return True


def _go_on(client: Any, is_new: bool) -> bool:
    """Let requests run again; drop before what was computed from the old weights if there are new ones."""
    try:
        if is_new and hasattr(client, "reset_prefix_cache"):
            client.reset_prefix_cache()
    finally:
        if hasattr(client, "resume"):
            client.resume()
    return True


def _said(pair: tuple[str, str]) -> str:
    name, why = pair
    return f"{name} ({why})"


def _from_all(value: str) -> list[str]:
    """Return the values of all ranks, on each."""
    if not dist.is_initialized():
        return [value]
    values = [""] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
