"""A trainer's fleet: engines that come and go.

    fleet = Fleet(MegatronModel(models), "10.0.0.1")
    fleet.add(HttpClient("http://10.0.0.7:8000", name="pod-7"))  # at any time, on the first rank
    for step in range(steps):
        train(models)
        report = fleet.send(step, pausing=True)

All engines are refitted together, so that replicas pass on to each other what they get (`reshard.refit.relays`). One
that dies, is late or refuses costs the others the wait for it, and a second try within the same send: it is left out,
named, and refitted again by the first `Fleet.send` that finds it answering, by itself until that succeeds. Ports,
ranks and sizes are the fleet's business.
"""

import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from reshard.comm.background import in_background
from reshard.comm.hosts import free_address, has_port, parsed
from reshard.comm.ranks import error_line, on_first_rank
from reshard.comm.registry import Registry
from reshard.comm.secret import new_secret
from reshard.core.errors import OptionError, ReshardError, first_line, listed
from reshard.core.limits import check_seconds
from reshard.core.printed import Printed
from reshard.integrations.sglang import SglangClient
from reshard.integrations.vllm.transfer import EngineClient, HttpClient, WeightTransfer, count_workers
from reshard.refit.link import RefitReport
from reshard.refit.options import ConnectOptions
from reshard.refit.trainer import Trainer

Result = TypeVar("Result")
log = logging.getLogger("reshard.fleet")
# How long a send waits for the first answer of an engine that was not connected. One that answers later is taken along
# by the next send.
ANSWER_SECONDS = 5.0
PORTS = 8  # of which a connection takes the first that is free, from the one that was given on


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
        """Return figures for a logger; ``transfer_seconds`` is the sum over connections: one, unless engines failed."""
        reports = {id(report): report for report in self.reports.values()}.values()
        return {
            "version": self.version,
            "seconds": self.seconds,
            "engines": len(self.reports),
            "engines_behind": len(self.behind),
            "transfer_seconds": sum(report.transfer_seconds for report in reports),
        }


@dataclass
class _Member:
    """An engine: its `client`, on the first rank, and how many `workers` it has."""

    name: str
    client: Any = None
    workers: int = 0
    version: int | None = None  # the last that it got
    refitted_at: float | None = None
    why: str = "it was added after the last send"
    asked: "Future[int] | None" = None  # how many workers it says that it has, while it is not connected
    has_failed: bool = False  # since it was last refitted


class _Connection(NamedTuple):
    """Engines that are refitted together, by name."""

    names: tuple[str, ...]
    transfer: WeightTransfer


@dataclass(frozen=True)
class _How:
    """The arguments of a send."""

    version: int
    verify: bool
    pausing: bool


class Fleet:
    """A trainer's rank, and the engines that it refits. All ranks of torch's process group make one, and call `send`
    and `close`; `add` and `remove` count on the first rank.

    `host` is an address of the first rank's host that all engines reach. Given with a port, members meet there, or at
    one of the next few while it is taken; else at any that is free. Each connection has a secret of its own, which
    engines get with the address. `timeout` is how many seconds members wait for one another, and so the most that an
    engine that hangs can cost a send. Further arguments are those of `reshard.refit.connect`.

    With `registry`, a ``host:port`` of the first rank's host, engines may be added and removed there by others, and
    looked at: ``reshard fleet host:port``. Who asks knows the `secret`, or ``RESHARD_SECRET``; see `RefitGroup.join`.
    """

    def __init__(
        self,
        source: Trainer | Callable[[], Trainer],
        host: str,
        *,
        timeout: float = 60.0,
        registry: str | None = None,
        secret: str | None = None,
        **options: Any,
    ) -> None:
        check_seconds(timeout, "timeout")
        self.source, self.timeout = source, timeout
        self.host, self.port = parsed(host) if has_port(host) else (host, 0)
        ConnectOptions(**options).checked()
        self.options = options
        self.is_first = not dist.is_initialized() or dist.get_rank() == 0
        self.version: int | None = None
        self._members: dict[str, _Member] = {}
        self._connections: list[_Connection] = []
        # Since the last send, on the first rank: names with a client to add, or None to remove. Another thread may add.
        self._changes: list[tuple[str, EngineClient | None]] = []
        self._lock = Lock()
        self._registry: Registry | None = None
        if registry is not None:
            on_first_rank(lambda: self._serve(registry, secret))

    def _serve(self, address: str, secret: str | None) -> None:
        calls: dict[str, Callable[..., Any]] = {
            "describe": self.describe,
            "join": self._join,
            "leave": self.remove,
        }
        self._registry = Registry(address, secret, calls)

    def _join(self, url: str, name: str | None = None, sglang: bool = False) -> str:
        """Add the server at an address, in place of another of this name; see `add`."""
        client = SglangClient(url, name=name) if sglang else HttpClient(url, name=name)
        with self._lock:
            self._changes.append((name or client.url, client))
        return name or client.url

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
        """Return the fleet's ``version``, and of each of its ``engines`` the ``version`` that it got last and how many
        seconds ago (``age``), whether it is ``connected``, and ``why`` it is behind, if it is."""
        engines, connected = {}, self._connected()
        with self._lock:
            names = self._names()
        members = dict(self._members)  # another thread may change it
        for member in (members.get(name) or _Member(name) for name in names):
            current = member.name in connected and member.version == self.version
            engines[member.name] = {
                "version": member.version,
                "age": None
                if member.refitted_at is None
                else round(time.monotonic() - member.refitted_at, 1),
                "connected": member.name in connected,
                "why": None if current else member.why,
            }
        return {"version": self.version, "engines": engines}

    def _connected(self) -> list[str]:
        return [name for connection in self._connections for name in connection.names]

    # Sending

    def send(
        self,
        version: int | None = None,
        verify: bool = False,
        *,
        pausing: bool = False,
        required: Collection[str] = (),
    ) -> FleetReport:
        """Refit every engine that answers; see `reshard.refit.Link.refit`. All ranks call it.

        With `pausing` no request runs meanwhile: each engine is paused, and drops what it has computed from the old
        weights, as far as its client can. `required` names engines without which the send has failed.

        Raises ReshardError, after all others have been refitted, if a required one is behind, or if none of those that
        answered could be connected and refitted, which may be this trainer's fault.
        """
        began = time.monotonic()
        self._follow_changes()
        if version is None:
            version = 0 if self.version is None else self.version + 1
        answering = self._answering([name for name in self._members if name not in self._connected()])
        tried = [*self._connected(), *answering]
        together = [name for name in tried if not self._members[name].has_failed]
        apart = [name for name in tried if self._members[name].has_failed]
        how = _How(version, verify, pausing)
        reports: dict[str, RefitReport] = {}
        for names in [together, *([name] for name in apart)]:
            reports |= self._bring(names, how)
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
        if missing or (tried and not reports):
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
                self._disconnect([name])
                del self._members[name]
            if is_new:
                self._members[name] = _Member(name)
        for name, client in changes:
            if client is not None and name in self._members:
                self._members[name].client = client

    def _answering(self, names: Collection[str]) -> list[str]:
        """Return which of these answer how many workers they have, which is noted, as why the others do not."""
        answers = on_first_rank(lambda: {name: self._ask(self._members[name]) for name in self._asked(names)})
        for name, (workers, why) in answers.items():
            self._members[name].workers = workers or 0
            if workers is None:
                self._members[name].why = why
        return [name for name, (workers, _) in answers.items() if workers is not None]

    def _asked(self, names: Collection[str]) -> Collection[str]:
        """Ask these engines how many workers they have, but those that still are; wait for a while."""
        asked_now = []
        for member in (self._members[name] for name in names):
            if member.asked is None:
                member.asked = in_background(partial(count_workers, member.client))
                asked_now.append(member.asked)
        wait(asked_now, ANSWER_SECONDS)
        return names

    def _ask(self, member: _Member) -> tuple[int | None, str]:
        """Return how many workers an engine has said that it has; or None, and why not."""
        asked = member.asked
        if asked is None or not asked.done():
            return None, "it has not answered yet"
        member.asked = None
        error = asked.exception()
        return (asked.result(), "") if error is None else (None, first_line(error))

    def _bring(self, names: Sequence[str], how: _How) -> dict[str, RefitReport]:
        """Refit these engines together; where that fails, those again that still answer, at last each by itself."""
        if not names:
            return {}
        reports, failed, failure = self._attempt(names, how)
        rest = [name for name in names if name not in reports and name not in failed]
        if failure and len(rest) == 1:
            failed |= {rest.pop(): failure}
        for name, why in failed.items():
            member = self._members[name]
            member.why, member.has_failed = why, True
        for name in reports:
            member = self._members[name]
            member.version, member.refitted_at, member.has_failed = how.version, time.monotonic(), False
        if not rest:
            return reports
        answering = self._answering(rest)
        for name in rest:
            if name not in answering:
                self._members[name].has_failed = True
                if f"engine {name}" in failure:  # which says more than that it does not answer now
                    self._members[name].why = failure
        # All answer, and one of them refuses: each finds out for itself.
        alone = not failed and len(answering) == len(rest)
        for group in [[name] for name in answering] if alone else [answering]:
            reports |= self._bring(group, how)
        return reports

    def _attempt(self, names: Sequence[str], how: _How) -> tuple[dict[str, RefitReport], dict[str, str], str]:
        """Refit these engines together. Return the reports of those that have the weights, why single ones have
        failed, and why all others have; these are disconnected."""
        failed = self._each(names, _pause) if how.pausing else {}
        report, failure = None, ""
        if not failed:
            report, failure = self._together(lambda: self._transfer(names).send(how.version, how.verify))
        if how.pausing:  # also after a failure: engines then answer those who wait that they may not serve
            resumed = self._each(names, partial(_go_on, is_new=report is not None))
            failed |= resumed if report is not None else {}
        if report is None or failed:
            self._disconnect(names)
        if report is None:
            return {}, failed, failure
        return {name: report for name in names if name not in failed}, failed, ""

    def _transfer(self, names: Sequence[str]) -> WeightTransfer:
        """Return the connection of these engines together, made now where they have another, or none."""
        known = [connection for connection in self._connections if set(connection.names) == {*names}]
        if known:
            return known[0].transfer
        self._disconnect(names)
        address, secret = on_first_rank(lambda: (self._address(), new_secret()))
        members = [self._members[name] for name in names]
        transfer = WeightTransfer(
            self.source,
            [member.client for member in members] if self.is_first else [],
            address,
            engine_ranks=[member.workers for member in members],
            timeout=self.timeout,
            secret=secret,
            **self.options,
        )
        self._connections.append(_Connection(tuple(names), transfer))
        return transfer

    def _address(self) -> str:
        """Return where the next connection meets."""
        return free_address(self.host, *((self.port, PORTS) if self.port else ()))

    def _each(self, names: Sequence[str], call: Callable[[Any], None]) -> dict[str, str]:
        """Call each engine's client on the first rank; return, on all, why calls failed, or were late, by name."""

        def made() -> dict[str, str]:
            calls = {name: in_background(partial(call, self._members[name].client)) for name in names}
            wait(calls.values(), self.timeout)
            late = f"engine %s did not answer within {self.timeout:g} s"
            errors = {name: one.exception() if one.done() else late % name for name, one in calls.items()}
            return {
                name: error if isinstance(error, str) else error_line(error)
                for name, error in errors.items()
                if error is not None
            }

        return on_first_rank(made)

    def _together(self, part: Callable[[], Result]) -> tuple[Result | None, str]:
        """Return what all ranks do together, or why one of them could not."""
        result, failure = None, ""
        try:
            result = part()
        except ReshardError as error:
            failure = str(error)
        failures = [each for each in _from_all(failure) if each]
        return (None, failures[0]) if failures else (result, "")

    def _disconnect(self, names: Collection[str]) -> None:
        """Close the connections that any of these engines has."""
        closing = [one for one in self._connections if not {*names}.isdisjoint(one.names)]
        self._connections = [one for one in self._connections if one not in closing]
        for connection in closing:
            with suppress(ReshardError):
                connection.transfer.close()

    def close(self) -> None:
        """Disconnect all engines, which serve what they have; all ranks call it."""
        for name in self._connected():
            self._members[name].why = "the fleet was closed"
        self._disconnect(self._connected())
        if self._registry is not None:
            self._registry.close()


def _pause(client: Any) -> None:
    """Let no request of an engine run, as far as its client can."""
    if hasattr(client, "pause"):
        client.pause()


def _go_on(client: Any, is_new: bool) -> None:
    """Let requests run again; drop before what was computed from the old weights if there are new ones."""
    try:
        if is_new and hasattr(client, "reset_prefix_cache"):
            client.reset_prefix_cache()
    finally:
        if hasattr(client, "resume"):
            client.resume()


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
