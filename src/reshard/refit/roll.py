"""Who is to blame where a wait has lasted too long: who is late may itself only wait for another.

The member whose time is over first calls the roll. Every member that waits answers, with those that it waits for; who does
not is dead, stalled, or still at work.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from reshard.core.errors import ReshardError
from reshard.refit.wire import pack_json, unpack_json

if TYPE_CHECKING:
    from reshard.refit.members import Members

LOOK_SECONDS = 0.1  # between two looks of a member that waits: at the roll, and at what has become of others
ANSWER_SECONDS = 2.0
ROLL, ALIVE = "roll", "alive"


class Roll:
    """The roll of the members, in the turn that they are in."""

    def __init__(self, members: "Members") -> None:
        self.members = members
        self.answered = 0, 0  # the turn, and how often the roll had been called in it
        self.awaited: Callable[[], list[int]] = list  # whom this member waits for now: nobody in particular

    @contextmanager
    def waits_for(self, awaited: Callable[[], list[int]]) -> Iterator[None]:
        """While it is open this member waits for these ranks."""
        before, self.awaited = self.awaited, awaited
        try:
            yield
        finally:
            self.awaited = before

    def answer(self) -> None:
        """Where the roll has been called, say that this member only waits, and for whom."""
        called = self.members.turns, self.members.tally(ROLL)
        if called[1] and called != self.answered:
            self.answered = called
            self._say(called[1], self.awaited())

    @contextmanager
    def answering(self) -> Iterator[None]:
        """While it is open a thread answers, for who is in a call that does not come back to look."""
        ended = threading.Event()

        def answer() -> None:
            with suppress(ReshardError):  # who serves the store is gone, as all will find out
                while not ended.wait(LOOK_SECONDS):
                    self.answer()

        thread = threading.Thread(target=answer, name="reshard answers", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def silent(self, awaited: Callable[[], list[int]]) -> list[int]:
        """Call the roll: of the ranks that are awaited, and of those that these wait for in turn, the ones that do not
        answer within `ANSWER_SECONDS`."""
        number = self.members.tally(ROLL, 1)
        deadline = time.monotonic() + ANSWER_SECONDS
        with self.waits_for(awaited):
            while True:
                self.answer()  # others may call it too
                silent = self._followed(awaited(), number)
                if not silent or time.monotonic() > deadline:
                    return silent
                time.sleep(LOOK_SECONDS / 5)

    def _followed(self, awaited: list[int], number: int) -> list[int]:
        """Those that have not answered, from the awaited ones on."""
        silent, seen, todo = [], set[int](), set(awaited)
        while todo:
            seen |= todo
            said = self.members.said(ALIVE, sorted(todo))
            answers = {rank: unpack_json(payload) for rank, payload in said.items()}
            answers = {rank: some for rank, some in answers.items() if some["number"] >= number}
            silent += sorted(todo - answers.keys())
            todo = {rank for some in answers.values() for rank in some["awaits"]} - seen
        return sorted(silent)

    def _say(self, number: int, awaits: list[int]) -> None:
        self.members.post(ALIVE, pack_json({"number": number, "awaits": awaits}))
