"""The engines of a fleet, by name: whom others have added and removed, and what all ranks of a trainer know of each."""

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import wait
from functools import partial
from threading import Lock
from typing import Any

from reshard.comm.background import in_background
from reshard.comm.ranks import error_line, on_first_rank
from reshard.core.errors import OptionError, first_line, listed
from reshard.integrations.members import Member
from reshard.integrations.vllm.transfer import count_workers

# How long a send waits for the first answer of an engine that was not connected. One that answers later is taken along
# by the next send.
ANSWER_SECONDS = 5.0


class Roster:
    """Who is in a fleet. `members` are those that the last send tried to reach, the same on all ranks, with their
    clients on the first; what it is told since counts from `follow` on. It may be told so by any thread."""

    def __init__(self, is_first: bool) -> None:
        self.is_first = is_first
        self.members: dict[str, Member] = {}
        # Since `follow`, on the first rank: names with a member to add, or None to remove.
        self._changes: list[tuple[str, Member | None]] = []
        self._lock = Lock()

    def put(self, name: str, client: Any) -> None:
        """Add an engine, in place of another of this name or at its address."""
        with self._lock:
            self._changes += [(other, None) for other in self._others_at(client, name)]
            self._changes.append((name, Member(name, client)))

    def add(self, name: str, client: Any) -> None:
        """Add an engine. Raises OptionError for a name that there is, and for an address that has another one: under
        two names an engine would be brought up from itself."""
        with self._lock:
            if name in self._changed():
                raise OptionError(f"the fleet has an engine {name}: remove it first, or give another name")
            for other in self._others_at(client, name):
                raise OptionError(f"the fleet has the engine at {client.url} as {other}: remove that first")
            self._changes.append((name, Member(name, client)))

    def remove(self, name: str) -> None:
        """Remove an engine. Raises OptionError for a name that there is not."""
        with self._lock:
            if self.is_first and name not in self._changed():
                raise OptionError(
                    f"the fleet has no engine {name}: it has {listed(self._changed()) or 'none'}"
                )
            self._changes.append((name, None))

    def known(self) -> dict[str, Member]:
        """Return the members that the next send tries to reach."""
        with self._lock:
            return self._changed()

    def _changed(self) -> dict[str, Member]:
        members = dict(self.members)
        for name, member in self._changes:
            if member is None:
                members.pop(name, None)
            else:
                members[name] = member
        return members

    def _others_at(self, client: Any, name: str) -> list[str]:
        """Return the other names that the engine at a client's address has."""
        url = getattr(client, "url", None)
        return [
            other
            for other, member in self._changed().items()
            if url is not None and other != name and getattr(member.client, "url", None) == url
        ]

    def follow(self) -> list[str]:
        """Add and remove members as the first rank was told to, on all ranks; return the names of those whose
        connections are over."""
        with self._lock:
            changes, self._changes = self._changes if self.is_first else [], []
        news = on_first_rank(lambda: [(name, member is not None) for name, member in changes])
        own = (
            changes if self.is_first else [(name, Member(name) if is_new else None) for name, is_new in news]
        )
        over = [name for name, _ in own if self.members.pop(name, None) is not None]
        self.members |= {name: member for name, member in dict(own).items() if member is not None}
        # The first rank knows what has become of them since the last send.
        states = on_first_rank(lambda: {name: member.state() for name, member in self.members.items()})
        for name, state in states.items():
            self.members[name].take_state(state)
        for name, member in self.members.items():
            if member.has_restarted:
                member.has_restarted = False
                over.append(name)
        return over

    def answering(self, names: Collection[str]) -> list[str]:
        """Return which of these answer how many workers they have, which is noted, as why the others do not."""
        answers = on_first_rank(lambda: {name: self._ask(self.members[name]) for name in self._asked(names)})
        for name, (workers, why) in answers.items():
            self.members[name].workers = workers or 0
            if workers is None:
                self.members[name].why = why
        return [name for name, (workers, _) in answers.items() if workers is not None]

    def _asked(self, names: Collection[str]) -> Collection[str]:
        """Ask these engines how many workers they have, but those that still are; wait for a while."""
        asked_now = []
        for member in (self.members[name] for name in names):
            if member.asked is None:
                member.asked = in_background(partial(count_workers, member.client))
                asked_now.append(member.asked)
        wait(asked_now, ANSWER_SECONDS)
        return names

    def _ask(self, member: Member) -> tuple[int | None, str]:
        """Return how many workers an engine has said that it has; or None, and why not."""
        asked = member.asked
        if asked is None or not asked.done():
            return None, "it has not answered yet"
        member.asked = None
        error = asked.exception()
        return (asked.result(), "") if error is None else (None, first_line(error))

    def each(self, names: Sequence[str], call: Callable[[Member], None], seconds: float) -> dict[str, str]:
        """Make a call for each of these engines on the first rank; return, on all, why calls failed, or were late, by
        name."""

        def made() -> dict[str, str]:
            calls = {name: in_background(partial(call, self.members[name])) for name in names}
            wait(calls.values(), seconds)
            late = f"engine %s did not answer within {seconds:g} s"
            errors = {name: one.exception() if one.done() else late % name for name, one in calls.items()}
            return {
                name: error if isinstance(error, str) else error_line(error)
                for name, error in errors.items()
                if error is not None
            }

        return on_first_rank(made)
