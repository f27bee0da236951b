"""Engines that are behind, brought up by others of their fleet, while the trainer trains.

The first rank's process is member 0 of the meeting, has no weights in it, and says which version is meant; the engine
that has it (`reshard.engines.workers.lending`) is the source, and goes on serving.
"""

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Event, Lock, Thread
from typing import Any

from reshard.comm.background import in_background
from reshard.comm.group import RefitGroup
from reshard.comm.ranks import error_line
from reshard.core.errors import ReshardError
from reshard.integrations.members import Held, Member, finish, new_claim
from reshard.integrations.standing import Standing
from reshard.integrations.sync import Calls, Meeting
from reshard.integrations.vllm.transfer import count_workers, with_adapter
from reshard.refit.connecting import connect
from reshard.refit.options import ConnectOptions

log = logging.getLogger("reshard.fleet")
LOOK_SECONDS = 1.0  # between two looks at who is behind
WATCH_SECONDS = 5.0  # between two questions what engines serve
AGAIN_SECONDS = 10.0  # between two tries to bring up one engine
OPTIONS = ("backend", "bucket_bytes", "relays", "adapter")  # of a fleet's, that count for one refit
STOP_SECONDS = 5.0  # that a send waits for the end of what it has stopped


@dataclass(frozen=True)
class Bringing:
    """The way in which engines are brought up: to which `version`, None while there is none, how many seconds members
    wait for each other, whether requests are `pausing` meanwhile, and the options of `reshard.refit.connect`. `invite`
    returns an address and a secret with which they can meet. `origin` tells whose version it is."""

    version: int | None
    invite: Callable[[], tuple[str, str]]
    timeout: float
    pausing: bool
    options: Mapping[str, Any] = field(default_factory=dict)
    origin: str = ""

    @property
    def adapter(self) -> str | None:
        """The name of the adapter of which it is a version; None if it is of the weights."""
        return self.options.get("adapter")

    @property
    def known_version(self) -> int:
        """The version, once there is one."""
        assert self.version is not None
        return self.version


class Recovery:
    """A thread of the trainer's first rank that brings up engines from others, between two sends.

    `members` returns all of the fleet's engines, by name, each time anew; those whose version is that of `how` hand it
    on. An engine that has been started again since is noticed. Before the first send engines' `standing` says which
    version that is.
    """

    def __init__(
        self, members: Callable[[], Mapping[str, Member]], how: Bringing, standing: Standing | None = None
    ) -> None:
        self.members, self.how, self.standing = members, how, standing
        self._wake, self._stopped = Event(), False
        # Of whether it is stopped, while the first rank joins a meeting, or notes what it has learned.
        self._lock = Lock()
        self._meeting: Meeting | None = None  # of those that are under way
        self._again: dict[str, float] = {}  # when to try an engine next
        # What engines serve, as they say, with who was asked: another may have the name since.
        self._asked: dict[str, tuple[Member, Future[Held | None]]] = {}
        self._watch_at = time.monotonic() + WATCH_SECONDS
        self._thread = Thread(target=self._run, name="reshard-recovery", daemon=True)
        self._thread.start()

    def look(self) -> None:
        """Look at once who is behind: an engine was added."""
        self._wake.set()

    def stop(self) -> None:
        """End it, and what is under way.

        An engine that was to be brought up by then refuses to serve, until the send that comes brings it along.
        """
        with self._lock:
            self._stopped = True
        self._wake.set()
        deadline = time.monotonic() + STOP_SECONDS
        while (meeting := self._meeting) is not None and time.monotonic() < deadline:
            RefitGroup.abort(meeting.address, "the trainer sends other weights", 1.0, meeting.secret)
            self._thread.join(0.2)

    def _run(self) -> None:
        while not self._stopped:
            self._find_version()
            if time.monotonic() >= self._watch_at:
                self._watch()
                self._watch_at = time.monotonic() + WATCH_SECONDS
            for name, member in self.members().items():
                if self._stopped or not self._is_behind(member):
                    continue
                if time.monotonic() >= self._again.get(name, 0.0):
                    self._try(member)
                    self._again[name] = time.monotonic() + AGAIN_SECONDS
            self._wake.wait(LOOK_SECONDS)
            self._wake.clear()

    def _find_version(self) -> None:
        """Follow what engines say that they serve from before."""
        if self.standing is None:
            return
        self.standing.ask(self.members(), self.how.version)
        with self._lock:
            if not self._stopped:
                held = self.standing.take(self.members())
                version, origin = (None, "") if held is None else held
                self.how = replace(self.how, version=version, origin=origin)

    def _is_behind(self, member: Member) -> bool:
        """Return True if an engine is to be brought up: one that serves a later version than the trainer has named is
        left alone."""
        version = self.how.version
        if version is None or not member.hands_on or member.version == version:
            return False
        return self.standing is None or member.version is None or member.version < version

    def _watch(self) -> None:
        """Ask engines that have the version whether they still serve it: one may have been started again, or have got
        another sender's, which may have the same number."""
        asked = {
            name: member
            for name, member in self.members().items()
            if member.version is not None and member.version == self.how.version and member.hands_on
        }
        self._asked = {name: one for name, one in self._asked.items() if asked.get(name) is one[0]}
        for name, member in asked.items():
            if name not in self._asked:
                self._asked[name] = member, self._ask(member)
        wait([answer for _, answer in self._asked.values()], WATCH_SECONDS)
        for name, (member, answer) in [*self._asked.items()]:
            with self._lock:
                if not self._stopped and answer.done():
                    del self._asked[name]
                    self._note(member, answer)

    def _ask(self, member: Member) -> "Future[Held | None]":
        """Ask an engine what it serves."""
        return in_background(partial(member.client.holds, self.how.adapter))

    def _note(self, member: Member, answer: "Future[Held | None]") -> None:
        """Note what an engine that had the version says that it serves."""
        error = answer.exception()
        if error is not None:
            member.why = error_line(error)
        elif answer.result() == (self.how.version, self.how.origin):
            member.why = ""
        else:
            member.restarted()

    def _try(self, member: Member) -> None:
        """Bring an engine up from the first of its peers that can do that, if it does not serve the version already, as
        one that has joined again."""
        if self._serves_it(member) or not self._counts_workers(member):
            return
        for peer in [one for one in self.members().values() if one.version == self.how.version]:
            if self._stopped:
                return
            if not peer.hands_on or not (peer.workers or self._counts_workers(peer)):
                continue
            if self._brings_up(member, peer):
                return

    def _serves_it(self, member: Member) -> bool:
        """Return whether an engine says that it serves the version, and note that."""
        answer = self._ask(member)
        wait([answer], WATCH_SECONDS)
        held = answer.result() if answer.done() and answer.exception() is None else None
        if held is None or not held.origin or held != (self.how.version, self.how.origin):
            return False
        with self._lock:
            if not self._stopped:  # else a send says what becomes of it
                member.version, member.origin = held
                member.why = ""
        return True

    def _counts_workers(self, member: Member) -> bool:
        """Ask an engine how many workers it has; return whether it has said that."""
        try:
            member.workers = count_workers(member.client)
        except ReshardError as error:
            with self._lock:
                if not self._stopped:  # else it may have been refitted since
                    member.why = str(error)
            return False
        return True

    def _brings_up(self, member: Member, peer: Member) -> bool:
        """Have an engine take the weights of a peer; return whether it has them."""
        how, began = self.how, time.monotonic()
        size = 1 + peer.workers + member.workers
        try:
            address, secret = how.invite()
            self._meeting = meeting = Meeting(address, size, how.timeout, secret)
            claim = new_claim()
            try:
                if how.pausing:
                    member.pause(claim)
                self._refit(meeting, member, peer)
            finally:
                if how.pausing:
                    member.go_on(claim, is_new=True)
        except Exception as error:  # of whatever kind a client raises: others are still to be brought up
            if self._stopped:
                return False  # the send that stopped this says what becomes of it
            member.why = f"{peer.name} could not hand on version {how.version} to it: {error_line(error)}"
            log.info("%s", member.why)
            return False
        else:
            if self._stopped:
                return False  # which may have brought it another version since
            member.refitted(how.known_version)
            member.origin = how.origin
            seconds = time.monotonic() - began
            log.info("%s has version %s from %s, %.2f s", member.name, how.version, peer.name, seconds)
            return True
        finally:
            self._meeting = None  # a send that waits for this goes on

    def _check_goes_on(self) -> None:
        """Raise ReshardError once this is to end."""
        if self._stopped:
            raise ReshardError("the trainer sends other weights")

    def _refit(self, meeting: Meeting, member: Member, peer: Member) -> None:
        version, timeout = self.how.version, meeting.timeout
        adapter = with_adapter(self.how.adapter)
        lend = meeting.arguments(1) | adapter | {"name": peer.name, "lends": version}
        take = meeting.arguments(1 + peer.workers) | adapter | {"name": member.name}
        calls = [(peer, lambda: peer.client.init_weight_transfer_engine(lend))]
        calls += [(member, lambda: member.client.init_weight_transfer_engine(take))]
        with ExitStack() as ends:
            with self._lock:  # once it is stopped, the fleet may close its port: nobody listens there again
                self._check_goes_on()  # to have an engine pause may take long
                group = meeting.join(0)
                ends.callback(group.close)
            connecting = Calls({f"engine {who.name}": in_background(call) for who, call in calls})
            self._check_goes_on()
            # There is one refit: what is kept for the next, as with deltas, would be an engine's memory for nothing.
            options = {name: value for name, value in self.how.options.items() if name in OPTIONS}
            options["origin"] = self.how.origin
            link = connecting.alongside(group, lambda: connect(group, None, None, ConnectOptions(**options)))
            ends.callback(link.close)
            info = {"version": version, "verify": True, "ticket": group.ticket()}

            def update() -> None:
                member.client.start_weight_update()
                member.client.update_weights(info)

            name = f"engine {member.name}"
            Calls({name: in_background(update)}).alongside(group, lambda: link.refit(version, verify=True))
            self._check_goes_on()
            Calls({name: in_background(lambda: finish(member.client, str(version)))}).wait_all(timeout)
