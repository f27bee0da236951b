"""A trainer's fleet: engines that come and go.

    fleet = Fleet(MegatronModel(models), "10.0.0.1")
    fleet.add(HttpClient("http://10.0.0.7:8000", name="pod-7"))  # at any time, on the first rank
    for step in range(steps):
        train(models)
        report = fleet.send(step, pausing=True)

With ``delta=True`` `Fleet.begin` returns when the changes are packed, and `Fleet.switch` makes engines serve them.

All engines are refitted together, so that replicas pass on to each other what they get (`reshard.refit.relays`). One
that dies, is late or refuses costs the others the wait for it, and a second try within the same send: it is left out,
named, and refitted again by the first `Fleet.send` that finds it answering, by itself until that succeeds. Between two
sends engines that are behind, or new, get the last version from others that serve it (`reshard.integrations.peers`).
Ranks and sizes are the fleet's business, and all of it goes by one port.
"""

import logging
import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from reshard.comm.background import in_background
from reshard.comm.door import Door, held_door
from reshard.comm.hosts import address_of, has_port, parsed
from reshard.comm.ranks import is_first_rank, on_first_rank
from reshard.comm.registry import Registry
from reshard.core.errors import OptionError, ReshardError, first_line, listed
from reshard.core.limits import check_number, check_seconds, check_switch
from reshard.engines.workers.lending import LAST_VERSION
from reshard.integrations.members import FleetReport, Member, new_claim
from reshard.integrations.peers import Bringing, Recovery
from reshard.integrations.roster import Roster
from reshard.integrations.sglang import SglangClient
from reshard.integrations.standing import Standing
from reshard.integrations.switching import (
    GO_ON,
    KEEP,
    Switching,
    check_switches,
    roll_back_all,
    switch_all,
)
from reshard.integrations.vllm.transfer import EngineClient, HttpClient, WeightTransfer, check_takes
from reshard.refit.link import RefitReport
from reshard.refit.options import ConnectOptions
from reshard.refit.pending.report import BegunReport
from reshard.refit.trainer import Trainer

Result = TypeVar("Result")
log = logging.getLogger("reshard.fleet")


class _Connection(NamedTuple):
    """Engines that are refitted together, by name."""

    names: tuple[str, ...]
    transfer: WeightTransfer


@dataclass(frozen=True)
class _How:
    """The arguments of a send that `began` at a time."""

    version: int | None
    verify: bool
    pausing: bool
    required: Set[str]
    began: float

    @property
    def known_version(self) -> int:
        """The version, once it is chosen."""
        assert self.version is not None
        return self.version


class _Begun(NamedTuple):
    """A send that was begun."""

    connection: _Connection
    how: _How


class Fleet:
    """A trainer's rank, and the engines that it refits. All ranks of torch's process group make one, and call `send`
    and `close`; `add` and `remove` count on the first rank.

    `host` is an address of the first rank's host that all engines reach, with a port, or without one: then the fleet
    takes one that is free. At this `address` alone it listens until it is closed: all connections meet there, also
    several at once, and those in which an engine hands on weights. Each has a secret of its own, which engines get
    with the address, and by which the fleet knows whom a connection is for. `timeout` is how many seconds members wait
    for one another: an engine that hangs costs a send so much, some 6 seconds in which it is asked for a sign of life,
    and with `pausing` once more so much. Further arguments are those of `reshard.refit.connect`.

    With `registry` engines may be added and removed by others, and looked at: ``reshard fleet ADDRESS``, at the fleet's
    address for True, or another ``host:port`` of the first rank's host. Who asks knows the `secret`, or
    ``RESHARD_SECRET``; see `RefitGroup.join`.

    With `peers`, engines that are new or behind get the last version from others between two sends, also of an adapter,
    with the weights below it. Before the first send that is the highest version that engines serve by what they
    say, and the first send without a version has the next one; `version` names it instead, such as that of the
    checkpoint from which the trainer goes on.
    """

    def __init__(
        self,
        source: Trainer | Callable[[], Trainer],
        host: str,
        *,
        timeout: float = 60.0,
        registry: bool | str | None = None,
        secret: str | None = None,
        peers: bool = True,
        version: int | None = None,
        **options: Any,
    ) -> None:
        check_seconds(timeout, "timeout")
        if version is not None:
            check_number(version, "version", LAST_VERSION, 0)
        self.source, self.timeout = source, timeout
        self.host, self.port = parsed(host) if has_port(host) else (host, 0)
        self.origin = on_first_rank(_new_origin)  # of all that this sends, with numbers that go up
        ConnectOptions(**options, origin=self.origin).checked()
        self.options = options
        self.is_first = is_first_rank()
        self.version: int | None = None
        # The highest version that was sent or begun, or that engines served before: no other weights get its number.
        self._last = -1 if version is None else version
        self._is_new = True  # until it sends
        self._top = -1  # the highest version that was sent or begun with this origin
        # The origins of the version, and of what engines had before they switched.
        self._sent_as = self._before_switch = self.origin
        self._roster = Roster(self.is_first)
        self._members = self._roster.members
        self._connections: list[_Connection] = []
        check_switch(peers, "peers")
        self.peers = peers
        self._begun: _Begun | FleetReport | None = None  # what was begun, or sent in its place
        self._switched: _Connection | None = None  # of the engines that have switched since the last send
        self._recovery: Recovery | None = None  # on the first rank, between two sends
        self._registry: Registry | None = None
        self._registry_at, self._registry_secret = registry, secret
        if registry == "":
            raise OptionError('registry="" is no address: give True, or one such as 10.0.0.1:29700')
        self._door: Door | None = None  # on the first rank
        self.address = on_first_rank(self._open)
        self.host, self.port = parsed(self.address)  # for good: a name may have several addresses
        self._recover(None, pausing=False, standing=Standing(version, options.get("adapter")))

    def _open(self) -> str:
        """Listen, and serve the registry, if any, unless that is so; return the address. Raises ReshardError where that
        cannot be."""
        # The fleet was closed and goes on, or the door has failed.
        if self._door is None or self._door.is_closed:
            self._stop_listening()
            address = self._listen()
            try:
                if self._registry_at:
                    self._serve(address if self._registry_at is True else self._registry_at)
            except BaseException:
                self._stop_listening()
                raise
            return address
        return self.address

    def _listen(self) -> str:
        """Open the fleet's door, and return its address. Raises ReshardError where it cannot listen there."""
        try:
            self._door = held_door(self.host, self.port)
        except (OSError, ValueError) as error:
            given = address_of(self.host, self.port) if self.port else self.host
            raise ReshardError(
                f"no fleet can listen at {given} ({first_line(error)}): give Fleet an address of this host, with a "
                f"port that no other process has"
            ) from error
        return address_of(*self._door.place)

    def _stop_listening(self) -> None:
        registry, self._registry = self._registry, None
        if registry is not None:
            registry.close()
        door, self._door = self._door, None
        if door is not None:
            door.release()

    def _serve(self, address: str) -> None:
        calls: dict[str, Callable[..., Any]] = {
            "describe": self.describe,
            "join": self._join,
            "leave": self.remove,
        }
        self._registry = Registry(address, self._registry_secret, calls)

    def _join(self, url: str, name: str | None = None, sglang: bool = False) -> str:
        """Add the server at an address, in place of another of this name; see `add`."""
        client = SglangClient(url, name=name) if sglang else HttpClient(url, name=name)
        check_takes(client, self.options.get("adapter"))
        chosen = name or client.url
        self._roster.put(chosen, client)
        self._look()
        return chosen

    # Members

    def add(self, client: EngineClient, name: str | None = None) -> str:
        """Take an engine along from the next send on. Return its name, by default that of its client, or its address.

        Raises OptionError for a name that the fleet has, and for an engine that takes no adapters where the fleet sends
        one.
        """
        check_takes(client, self.options.get("adapter"))
        chosen = name or getattr(client, "name", None) or getattr(client, "url", None)
        if not chosen:
            raise OptionError(f"this {type(client).__name__} has no name: give name=")
        self._roster.add(str(chosen), client)
        self._look()
        return str(chosen)

    def remove(self, name: str) -> None:
        """Leave an engine out from the next send on, which disconnects it; it serves what it has. Raises OptionError
        for a name that the fleet does not have."""
        self._roster.remove(name)

    def names(self) -> list[str]:
        """Return the names of the engines that the next send tries to reach, as this rank knows them."""
        return [*self._roster.known()]

    def _look(self) -> None:
        """Bring up whoever is new now."""
        recovery = self._recovery
        if recovery is not None:
            recovery.look()

    def describe(self) -> dict[str, Any]:
        """Return the fleet's ``version``, before its first send the one that engines serve from before (``found``), and
        of each of its ``engines`` the ``version`` that it got last and how many seconds ago (``age``), whether it is
        ``connected``, and ``why`` it is behind, if it is."""
        engines, connected = {}, self._connected()
        for member in self._roster.known().values():
            engines[member.name] = {
                "version": member.version,
                "age": None
                if member.refitted_at is None
                else round(time.monotonic() - member.refitted_at, 1),
                "connected": member.name in connected
                and self._members.get(member.name) is member  # and not another one of this name
                and not member.has_restarted,
                "why": member.why or None,
            }
        recovery = self._recovery
        found = recovery.how.version if recovery is not None and recovery.standing is not None else None
        return {"version": self.version, "found": found, "engines": engines}

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
        how = _How(version, verify, pausing, {*required}, time.monotonic())
        return self._send(*self._prepared(how))

    def begin(
        self,
        version: int | None = None,
        verify: bool = False,
        *,
        pausing: bool = False,
        required: Collection[str] = (),
    ) -> bool:
        """Begin a send of what changed, or of all, which engines do not serve before `switch`; see
        `reshard.refit.Link.begin_refit`. All ranks call it, and may change their weights when it returns.

        Returns False where that could not be: for the first send, after a member has failed or has come without the
        version that the others have, and where what is to be sent takes too much memory. Then this has sent all, as
        `send` does, with its arguments.
        """
        how = _How(version, verify, pausing, {*required}, time.monotonic())
        how, together, apart = self._prepared(how)
        connection = None if apart else self._for_beginning(together)
        why = "engines are to be connected, and serve different versions, or none"
        if connection is not None:
            transfer = connection.transfer
            begun, why = self._together(lambda: transfer.begin(how.known_version, verify))
            if begun is not None:
                why = next(filter(None, _from_all(begun.why)), "")
            self._begun = _Begun(connection, how)
            if why:
                self._end_begun()
        if why:
            log.info("version %s is sent whole: %s", how.version, why)
            self._begun = self._send(how, together, apart)
        return not why

    def switch(self, requests: str = GO_ON, caches: str = KEEP) -> FleetReport:
        """Make all engines serve what was begun, once all have it; or none, where one that answers cannot. All ranks
        call it. For the arguments see `reshard.integrations.switching.Switching`. An engine that no longer answers is
        left out, and behind. Where `begin` has sent all, this returns what came of that.

        Raises ReshardError where engines serve what they did before: the next send, or begin, brings all.
        """
        switching, begun = Switching(requests, caches).checked(), self._begun
        if begun is None:
            raise ReshardError("nothing was begun: call begin first")
        if isinstance(begun, FleetReport):
            return begun
        (names, transfer), how = begun
        on_first_rank(lambda: check_switches([self._members[name].client for name in names], switching))
        self._begun = None
        report, failure = self._together(transfer.arrived)
        failed = dict.fromkeys(names, failure) if report is None else {}
        if report is not None and report.is_pending:
            clients = {name: self._members[name].client for name in names}
            new, old = report.version, transfer.before
            transfer.is_begun = False  # whoever does not switch forgets it
            served, failed = on_first_rank(
                lambda: switch_all(clients, new, transfer.ticket, old, switching, self.timeout)
            )
            if served != report.version or len(failed) == len(names):
                failure = next(f"{name} did not switch ({why})" for name, why in failed.items())
        elif report is not None:
            failure = report.reason
        for name, why in failed.items():
            self._members[name].lost(why)
        if report is None:
            with suppress(ReshardError):
                transfer.give_up()
        if failed:
            self._disconnect(names)
        if failure or report is None:
            raise ReshardError(f"version {how.version} is in no engine: {failure}; the next send brings all")
        self._before_switch = self._sent_as
        self._switched = begun.connection._replace(names=tuple(name for name in names if name not in failed))
        reports = {name: report for name in names if name not in failed}
        for name in reports:
            self._members[name].refitted(report.version)
        return self._sent(how, reports)

    def roll_back(self) -> int:
        """Have all engines that have switched last serve again what they served before, bit for bit; return its
        version. All ranks call it, and the next send, or begin, brings all.

        Raises ReshardError where nobody has switched since the last send, or one cannot go back: it is behind then, and
        the others have gone back.
        """
        switched, self._switched = self._switched, None
        if switched is None:
            raise ReshardError("no engine has switched since the last send: there is nothing to go back to")
        (names, transfer), version = switched, switched.transfer.before
        gone_back_from = self.version
        self._end_begun()
        self._end_recovery()
        clients = {name: self._members[name].client for name in names}
        failed = on_first_rank(lambda: roll_back_all(clients, version, transfer.ticket, self.timeout))
        transfer.link.roll_back()
        assert version is not None, "what is switched from has a version"
        self.version, self._sent_as = version, self._before_switch
        for name, member in self._members.items():
            if name in failed:
                member.lost(failed[name])
            elif name in names:
                member.refitted(version)
            elif member.version == gone_back_from:  # which it got from another engine
                member.lost(f"it serves version {gone_back_from}, from which the others have gone back")
        self._recover(version, pausing=False)
        if failed:
            raise ReshardError(
                f"version {version} is not in {listed(map(_said, failed.items()), 3)}: the next send brings all"
            )
        return version

    def _end_begun(self) -> None:
        """Have engines forget what was begun, if nobody has switched to it."""
        begun, self._begun = self._begun, None
        if isinstance(begun, _Begun):
            with suppress(ReshardError):
                begun.connection.transfer.give_up()

    def _prepared(self, how: "_How") -> tuple["_How", list[str], list[str]]:
        """Return how to send with the version, which engines are refitted together, and which each by itself, of those
        that answer."""
        self._end_begun()
        self._switched = None
        if self._is_new and how.version is None:
            self._last = max(self._last, on_first_rank(self._highest_served))
        self._is_new = False
        self._end_recovery()
        on_first_rank(self._open)
        self._disconnect(self._roster.follow())
        if how.version is None:
            how = replace(how, version=self._last + 1)
        elif how.version <= self._top:  # other weights may have had this number
            self.origin = on_first_rank(_new_origin)
            self._disconnect(self._connected())
        self._top, self._last = how.known_version, max(self._last, how.known_version)
        answering = self._roster.answering([name for name in self._members if name not in self._connected()])
        tried = [*self._connected(), *answering]
        together = [name for name in tried if not self._members[name].has_failed]
        return how, together, [name for name in tried if self._members[name].has_failed]

    def _send(self, how: "_How", together: Sequence[str], apart: Sequence[str]) -> FleetReport:
        """Send all to these engines; see `send`."""
        reports: dict[str, RefitReport | BegunReport] = {}
        for names in [together, *([name] for name in apart)]:
            claim = new_claim()
            try:
                reports |= self._bring(names, how, claim)
            except BaseException:
                self._break_off(names, how, claim)
                raise
        sent = self._sent(how, reports)
        if (together or apart) and not reports:
            raise ReshardError(
                f"version {sent.version} is not in {listed(map(_said, sent.behind.items()), 3)}"
            )
        return sent

    def _break_off(self, names: Sequence[str], how: "_How", claim: int) -> None:
        """Note that a send to these engines has ended halfway, as by a KeyboardInterrupt, and let requests that wait by
        its `claim` run again. No rank waits for others here, which may not have been interrupted."""
        for name in names:
            self._members[name].lost("a send to it was broken off")
        if how.pausing and self.is_first:
            go_on = partial(Member.go_on, claim=claim, is_new=True)
            wait([in_background(partial(go_on, self._members[name])) for name in names], self.timeout)

    def _sent(self, how: "_How", reports: Mapping[str, RefitReport | BegunReport]) -> FleetReport:
        """Note what the engines have, by the report of each that has the version; they bring up the others from now on.
        Raises ReshardError if one that is required is behind."""
        version = self.version = how.known_version
        self._sent_as = self.origin
        for name, member in self._members.items():
            if name not in reports and member.version == version:
                member.version = None  # it has what had this number before
        # Before others bring them up: the first rank alone learns what comes of that.
        behind = {name: member.why for name, member in self._members.items() if name not in reports}
        self._recover(version, how.pausing)
        sent = FleetReport(version, time.monotonic() - how.began, dict(reports), behind)
        if self.is_first:
            log.log(
                logging.WARNING if behind else logging.INFO, "%s", "; ".join(map(str.strip, sent.lines()))
            )
        missing = [name for name in sorted(how.required) if name not in reports]
        if missing:
            said = [_said((name, behind.get(name, "it is no member"))) for name in missing]
            raise ReshardError(f"version {version} is not in {listed(said, 3)}")
        return sent

    def _recover(self, version: int | None, pausing: bool, standing: Standing | None = None) -> None:
        """Have engines that have a version bring up the others, from now on; that of their `standing` if None."""
        if self.is_first and self.peers:
            how = Bringing(version, self._invite, self.timeout, pausing, self.options, self._sent_as)
            self._recovery = Recovery(self._roster.known, how, standing)

    def _highest_served(self) -> int:
        """Return the highest version that engines serve from before, as far as they say it; -1 for none."""
        standing = self._recovery.standing if self._recovery is not None else None
        return standing.wait_for_all(self._roster.known) if standing is not None else -1

    def _end_recovery(self) -> None:
        """Have nobody be brought up any more by others."""
        recovery, self._recovery = self._recovery, None
        if recovery is not None:
            recovery.stop()

    def _bring(self, names: Sequence[str], how: _How, claim: int) -> dict[str, RefitReport]:
        """Refit these engines together; where that fails, those again that still answer, at last each by itself. With
        `how.pausing` the requests of each wait, by a `claim`, until no more is tried for it."""
        if not names:
            return {}
        reports, failed, failure = self._attempt(names, how, claim)
        rest = [name for name in names if name not in reports and name not in failed]
        if failure and len(rest) == 1:
            failed |= {rest.pop(): failure}
        for name, why in failed.items():
            self._members[name].failed(why)
        for name in reports:
            self._members[name].refitted(how.known_version)
        if not rest:
            self._go_on(failed, how, claim, is_new=False)
            return reports
        answering = self._roster.answering(rest)
        for name in rest:
            if name not in answering:
                self._members[name].has_failed = True
                if f"engine {name}" in failure:  # which says more than that it does not answer now
                    self._members[name].why = failure
        # All answer, and one of them refuses: each finds out for itself.
        alone = not failed and len(answering) == len(rest)
        for group in [[name] for name in answering] if alone else [answering]:
            reports |= self._bring(group, how, claim)
        # Last, since one that hangs is waited for.
        self._go_on([name for name in names if name not in {*reports, *answering}], how, claim, is_new=False)
        return reports

    def _attempt(
        self, names: Sequence[str], how: _How, claim: int
    ) -> tuple[dict[str, RefitReport], dict[str, str], str]:
        """Refit these engines together, of which requests run again then. Return the reports of those that have the
        weights, why single ones have failed, and why all others have; these are disconnected."""
        pause = partial(Member.pause, claim=claim)
        failed = self._roster.each(names, pause, self.timeout) if how.pausing else {}
        report, failure = None, ""
        if not failed:
            report, failure = self._together(lambda: self._transfer(names).send(how.version, how.verify))
        if report is not None:
            failed |= self._go_on(names, how, claim, is_new=True)
        if report is None or failed:
            self._disconnect(names)
        if report is None:
            return {}, failed, failure
        return {name: report for name in names if name not in failed}, failed, ""

    def _go_on(self, names: Collection[str], how: _How, claim: int, is_new: bool) -> dict[str, str]:
        """Let requests of engines run again that wait by a claim: one that has failed then answers them that it may not
        serve. Return why some do not."""
        if not how.pausing or not names:
            return {}
        return self._roster.each([*names], partial(Member.go_on, claim=claim, is_new=is_new), self.timeout)

    def _for_beginning(self, names: Sequence[str]) -> _Connection | None:
        """Return the connection of these engines together, made now where all of them serve the fleet's version; None
        where there is none."""
        if self._known_connection(names) is None:
            versions = {self._members[name].version for name in names}
            if self.version is None or versions != {self.version}:
                return None
            connected, _ = self._together(lambda: self._transfer(names))
            if connected is None:  # `send` finds out whose fault that is
                self._disconnect(names)
        return self._known_connection(names)

    def _known_connection(self, names: Sequence[str]) -> _Connection | None:
        return next((one for one in self._connections if set(one.names) == {*names}), None)

    def _transfer(self, names: Sequence[str]) -> WeightTransfer:
        """Return the connection of these engines together, made now where they have another, or none."""
        if known := self._known_connection(names):
            return known.transfer
        self._disconnect(names)
        address, secret = on_first_rank(self._meeting)
        members = [self._members[name] for name in names]
        transfer = WeightTransfer(
            self.source,
            [member.client for member in members] if self.is_first else [],
            address,
            engine_ranks=[member.workers for member in members],
            timeout=self.timeout,
            secret=secret,
            origin=self.origin,
            **self.options,
        )
        self._connections.append(_Connection(tuple(names), transfer))
        return transfer

    def _meeting(self) -> tuple[str, str]:
        """Return the address and the secret with which the next connection meets."""
        self._open()
        return self._invite()

    def _invite(self) -> tuple[str, str]:
        """Return an address and a secret with which members can meet; those who come before the first rank wait for
        it."""
        door = self._door
        if door is None:  # while an engine was to be brought up
            raise ReshardError("the fleet was closed")
        try:
            return self.address, door.invite(self.timeout)
        except OSError as error:
            raise ReshardError(f"nobody can meet at {self.address} ({first_line(error)})") from error

    def _together(self, part: Callable[[], Result]) -> tuple[Result | None, str]:
        """Return what all ranks do together, or why one of them could not, whatever it raised: others would wait."""
        result, failure = None, ""
        try:
            result = part()
        except ReshardError as error:
            failure = str(error)
        except Exception as error:  # of the trainer's own, such as one of torch
            failure = f"{type(error).__name__}: {first_line(error)}"
            log.warning("this rank's part of a send failed", exc_info=True)
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
        """Disconnect all engines, which serve what they have, and give back the port; all ranks call it."""
        self._end_begun()
        self._end_recovery()
        for name in self._connected():
            self._members[name].why = "the fleet was closed"
        self._disconnect(self._connected())
        self._stop_listening()


def _new_origin() -> str:
    """Return an origin that no other fleet has (`reshard.refit.options.ConnectOptions`)."""
    return secrets.token_hex(8)


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
