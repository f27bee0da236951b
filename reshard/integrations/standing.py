"""What the engines of a fleet serve from before: until a new trainer has sent something, this is the version that
others hand on."""

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from functools import partial
from threading import Lock
from typing import NamedTuple

from reshard.comm.background import in_background
from reshard.comm.ranks import error_line
from reshard.core.errors import listed
from reshard.integrations.members import Held, Member

ASK_SECONDS = 1.0  # for which one look waits for answers
AGAIN_SECONDS = 5.0  # between two questions to an engine
ANSWER_SECONDS = 5.0  # for which an engine that does not answer keeps others from being brought up
SETTLE_SECONDS = 2.0  # after an engine has come: the next one may say more
UNSENT = "this trainer has sent nothing yet"


class _Asked(NamedTuple):
    """A question to an engine, put `at` a time."""

    member: Member
    at: float
    answer: "Future[Held | None]"


class Standing:
    """The versions that engines say they serve, of the weights or of an `adapter`. `given` is the one that the trainer
    has named, if any: then no other is handed on.

    Versions are numbers of one sender, and another one's may be the same. So engines that serve what different senders
    have sent, or do not know whose it is, hand on nothing.
    """

    def __init__(self, given: int | None, adapter: str | None = None) -> None:
        self.given, self.adapter = given, adapter
        self.highest = -1 if given is None else given  # of all that was said
        self._asked: dict[str, _Asked] = {}
        self._known: dict[str, tuple[Member, float, str]] = {}  # who has answered when; why not
        self._said: dict[str, tuple[Member, int | None, Held | None]] = {}  # for what there is a reason
        self._grew_at = time.monotonic()
        self._lock = Lock()

    def ask(self, members: Mapping[str, Member], wanted: int | None) -> None:
        """Ask engines that do not serve the version `wanted` until now what they serve, and wait for a while."""
        with self._lock:
            for name, member in members.items():
                if member.hands_on and self._is_due(name, member, wanted):
                    self._asked[name] = _Asked(
                        member, time.monotonic(), in_background(partial(member.client.holds, self.adapter))
                    )
        wait([asked.answer for asked in self._asked.copy().values()], ASK_SECONDS)

    def _is_due(self, name: str, member: Member, wanted: int | None) -> bool:
        asked, known = self._asked.get(name), self._known.get(name)
        if asked is not None and asked.member is member:
            return False
        if known is None or known[0] is not member:
            self._grew_at = time.monotonic()
            return True
        has_wanted = member.version is not None and member.version == wanted
        return not has_wanted and time.monotonic() >= known[1] + AGAIN_SECONDS

    def take(self, members: Mapping[str, Member]) -> Held | None:
        """Note what engines have answered; return what is to be handed on, or None while nothing is. An engine that is
        behind has the reason noted."""
        with self._lock:
            able = {name: member for name, member in members.items() if member.hands_on}
            self._take_answers(able)
            chosen, why = self._chosen(able)
            for name, member in able.items():
                state = member, member.version, chosen
                error = self._known[name][2] if name in self._known else "it has not answered yet"
                if error or why or state != self._said.get(name):
                    member.why = error or why or _reason(member, chosen)
                self._said[name] = state
            now = time.monotonic()
            waits = any(now < asked.at + ANSWER_SECONDS for asked in self._asked.values())
            return None if waits or now < self._grew_at + SETTLE_SECONDS else chosen

    def wait_for_all(self, members: Callable[[], Mapping[str, Member]]) -> int:
        """Return the highest number that engines say, or the trainer has named, once all have answered, or had the time
        for it; -1 for none."""
        deadline = time.monotonic() + ANSWER_SECONDS
        while True:
            now = members()
            self.ask(now, None)
            self.take(now)
            able = {name: member for name, member in now.items() if member.hands_on}
            if time.monotonic() > deadline or all(self._has_said(*one) for one in able.items()):
                return self.highest

    def _has_said(self, name: str, member: Member) -> bool:
        return name in self._known and self._known[name][0] is member

    def _take_answers(self, members: Mapping[str, Member]) -> None:
        """Note what has been answered by now."""
        for name, (member, at, answer) in [*self._asked.items()]:
            if members.get(name) is not member:
                del self._asked[name]
            elif answer.done():
                del self._asked[name]
                error = answer.exception()
                held = answer.result() if error is None else None
                self._known[name] = member, time.monotonic(), "" if error is None else error_line(error)
                if member.refitted_at is None or member.refitted_at < at:  # else it is of what it had before
                    member.version, member.origin = (None, "") if held is None else held
                    self.highest = max(self.highest, -1 if member.version is None else member.version)
        for name in self._known.keys() - members.keys():
            del self._known[name]

    def _chosen(self, members: Mapping[str, Member]) -> tuple[Held | None, str]:
        """Return what is to be handed on; or None, and why nothing is."""
        serving = {name: one for name, one in members.items() if one.version is not None}
        meant = {name: one for name, one in serving.items() if self.given in (None, one.version)}
        origins = {one.origin for one in meant.values()}
        if not meant:
            named = "a version" if self.given is None else f"version {self.given}"
            return None, f"no engine serves {named}, and {UNSENT}"
        said = listed([f"{name} version {one.version}" for name, one in meant.items()], 3)
        if len(origins) > 1:
            return None, f"engines serve what different trainers have sent ({said}), and {UNSENT}"
        if origins == {""}:
            return None, f"engines do not know whose versions they serve ({said}), and {UNSENT}"
        return Held(max(one.version or 0 for one in meant.values()), *origins), ""


def _reason(member: Member, chosen: Held | None) -> str:
    """Return why an engine does not have what was chosen; empty if it has it."""
    if chosen is None or (member.version, member.origin) == chosen:
        return ""
    if member.version is None:
        return f"it serves no version, and others serve version {chosen.version}"
    if member.version > chosen.version:
        return f"it serves version {member.version}, and this trainer has named version {chosen.version}"
    return f"it serves version {member.version}, and others serve version {chosen.version}"
