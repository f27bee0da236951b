"""Who is to blame where a wait has lasted too long: who is late may itself only wait for another.

The member whose time is over first calls the roll, and those whose time is over with it join in. Every member that waits
answers, with those that it waits for; who does not is dead, stalled, or still at work. All answers are lines under one key, so
that one read brings all of them, however many members there are.
"""

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, NamedTuple

from reshard.core.errors import ReshardError

if TYPE_CHECKING:
    from reshard.refit.members import Members

LOOK_SECONDS = 0.1  # between two looks of a member that waits: at the roll, and at what has become of others
ANSWER_SECONDS = 2.0
ROLL, ALIVE = "roll", "alive"
LONG_AGO = float("-inf")


class Call(NamedTuple):
    """A call of the roll: in which turn, the how manieth there (0: none yet), and a moment, by this process's clock, when it had
    not come yet."""

    turn: int
    number: int
    after: float


class Roll:
    """The roll of the members, in the turn that they are in."""

    def __init__(self, members: "Members") -> None:
        self.members: Members = weakref.proxy(members)  # which end when nobody else holds them
        self.last = Call(0, 0, LONG_AGO)
        self.looked = LONG_AGO
        self.answered = 0, 0  # the turn, and the number of the call in it
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
        turn, number, _ = self._look()
        if number and (turn, number) != self.answered:
            self.answered = turn, number
            self.members.write(ALIVE, as_line(self.members.rank, number, self.awaited()))

    def _look(self) -> Call:
        """The last call."""
        now, turn = time.monotonic(), self.members.turns
        number = self.members.tally(ROLL)
        if (turn, number) != self.last[:2]:
            self.last = Call(turn, number, self.looked if turn == self.last.turn else LONG_AGO)
        self.looked = now
        return self.last

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
        number = self._call()
        deadline = time.monotonic() + ANSWER_SECONDS
        with self.waits_for(awaited):
            while True:
                self.answer()
                silent = self._followed(awaited(), number)
                if not silent or time.monotonic() > deadline:
                    return silent
                time.sleep(LOOK_SECONDS / 2)

    def _call(self) -> int:
        """The number of the call whose answers count: one that goes on, of another member whose time is over too, or a new one."""
        _, number, after = self._look()
        if number and time.monotonic() - after < ANSWER_SECONDS:
            return number
        return self.members.raise_tally(ROLL, number)

    def _followed(self, awaited: list[int], number: int) -> list[int]:
        """Those that have not answered, from the awaited ones on."""
        silent, seen, todo = [], set[int](), set(awaited)
        answers = answers_in(self.members.written(ALIVE), number) if todo else {}
        while todo:
            seen |= todo
            silent += sorted(todo - answers.keys())
            todo = {rank for one in todo & answers.keys() for rank in answers[one]} - seen
        return sorted(silent)


def as_line(rank: int, number: int, awaits: list[int]) -> str:
    """An answer to a call.

    >>> as_line(7, 1, [0, 1, 2, 5])
    '7 1 0-2 5-5'
    """
    runs: list[list[int]] = []
    for one in sorted(awaits):
        if runs and one == runs[-1][1] + 1:
            runs[-1][1] = one
        else:
            runs.append([one, one])
    return " ".join([str(rank), str(number), *(f"{first}-{last}" for first, last in runs)])


def answers_in(lines: list[str], number: int) -> dict[int, list[int]]:
    """By rank whom it waits for, as it has answered this call, or a later one.

    >>> answers_in(["7 1 0-2 5-5", "6 0 1-1", "3 2"], 1)
    {7: [0, 1, 2, 5], 3: []}
    """
    found = {}
    for line in lines:
        rank, of_call, *runs = line.split()
        if int(of_call) >= number:
            ends = (run.split("-") for run in runs)
            found[int(rank)] = [one for first, last in ends for one in range(int(first), int(last) + 1)]
    return found
