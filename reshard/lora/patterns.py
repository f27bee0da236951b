"""PEFT's ``rank_pattern`` and ``alpha_pattern``: which entry a module's name matches, in bounded time.

PEFT matches each pattern as a regular expression. Python's own matcher tries one way after the other, and some
patterns have so many ways that it does not end. Here all ways are followed at once, a character at a time.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from reshard.core.errors import ReshardError

try:
    from re import _parser as parser  # type: ignore[attr-defined]  # no public name; `sre_parse` before 3.11
except ImportError:
    import sre_parse as parser

# Names, in which a dot is any character; `\.` is a dot.
_PLAIN = re.compile(r"(?:[\w\-.]|\\\.)+")
_TOKENS = re.compile(r"\\?.")
_CATEGORIES = {
    "CATEGORY_DIGIT": r"\d", "CATEGORY_NOT_DIGIT": r"\D", "CATEGORY_SPACE": r"\s", "CATEGORY_NOT_SPACE": r"\S",
    "CATEGORY_WORD": r"\w", "CATEGORY_NOT_WORD": r"\W",
}  # fmt: skip
_AT_START, _AT_END = ("AT_BEGINNING", "AT_BEGINNING_STRING"), ("AT_END", "AT_END_STRING")
MAX_OPERATIONS = 200_000  # of what are no plain names
MAX_WORK = 10_000_000  # states followed for all names, some seconds

Test = Callable[[str], bool]
States = frozenset[int]


class _TooComplexError(Exception):
    """A pattern that would take too long, or that uses what is not followed here."""


class _State(NamedTuple):
    """Transitions from a state of the automaton: by a character, by one that passes a test, by none."""

    by_char: dict[str, int]
    by_test: list[tuple[Test, int]]
    by_nothing: list[int]


def _any(_: str) -> bool:
    return True


class Patterns:
    """The entries of a config's `values` by pattern; `find` gives the entry of a module.

    Raises ReshardError, naming the pattern, for one that is not a regular expression, or too complex.

    >>> Patterns({"q_proj": 4, r"1\\.mlp\\..*": 8}, "rank_pattern").find("model.layers.1.mlp.up_proj", 2)
    8
    """

    def __init__(self, values: Mapping[str, Any], where: object) -> None:
        self.values, self.where = list(values.values()), where
        self._states: list[_State] = []
        self._starts: set[int] = set()  # states that are passed at the beginning of a name alone
        self._ends: set[int] = set()  # and at its end alone
        self._entries: dict[int, int] = {}  # by final state
        self._next: dict[tuple[States, str], States] = {}
        self._work = self._operations = 0
        anything, first = self._state(), self._state()  # PEFT's ``(.*\.)?``, and what comes after it
        self._states[anything].by_test.extend([(_any, anything), (".".__eq__, first)])
        begin = {anything, first}
        for number, pattern in enumerate(values):
            try:
                begin |= self._add(pattern, first, number)
            except re.error as error:
                raise ReshardError(
                    f"{where}: {pattern[:80]!r} is not a regular expression: {error}"
                ) from None
            except (_TooComplexError, RecursionError, OverflowError):
                raise self._too_complex(pattern) from None
        self._begin = self._closure(begin, start=True)

    def find(self, module: str, default: Any) -> Any:
        """Return the entry of the first pattern that a module's name is or ends with after a point."""
        if not self.values:
            return default
        states = self._begin
        for char in module:
            following = self._next.get((states, char))
            if following is None:
                following = self._next[states, char] = self._step(states, char)
            states = following
        ends = self._closure(set(states), start=not module, end=True)
        entries = [self._entries[state] for state in ends if state in self._entries]
        return self.values[min(entries)] if entries else default

    def _too_complex(self, pattern: str) -> ReshardError:
        return ReshardError(
            f"{self.where}: {pattern[:80]!r} is more complex than the patterns that are followed here: "
            "write the names of the modules instead"
        )

    def _add(self, pattern: str, first: int, number: int) -> set[int]:
        """Add the states of a pattern; return those at the beginning of a name that are not `first`."""
        begin = set()
        if _PLAIN.fullmatch(pattern):
            state = first
            for token in _TOKENS.findall(pattern):
                state = self._shared(state, token)
        else:
            tree = parser.parse(rf"(.*\.)?({pattern})$")
            if tree.state.flags & ~int(re.UNICODE):
                raise _TooComplexError
            start = self._state()
            begin.add(start)
            state = self._sequence(tree, start)
        self._entries.setdefault(state, number)
        return begin

    def _shared(self, state: int, token: str) -> int:
        """Return the state after a character of a plain name, one for all names that begin alike."""
        leads = self._states[state]
        if token == ".":
            known = next((target for test, target in leads.by_test if test is _any), None)
            if known is None:
                known = self._state()
                leads.by_test.append((_any, known))
            return known
        char = token[-1]
        if char not in leads.by_char:
            leads.by_char[char] = self._state()
        return leads.by_char[char]

    def _state(self) -> int:
        self._states.append(_State({}, [], []))
        return len(self._states) - 1

    def _lead(self, state: int, target: int) -> int:
        self._states[state].by_nothing.append(target)
        return target

    def _sequence(self, tree: Any, state: int) -> int:
        """Add the states of a parsed pattern after one; return the last."""
        for operation, argument in tree:
            state = self._operation(str(operation), argument, state)
        return state

    def _operation(self, operation: str, argument: Any, state: int) -> int:
        end = self._state()
        self._operations += 1
        if self._operations > MAX_OPERATIONS:
            raise _TooComplexError
        if operation == "BRANCH":
            for tree in argument[1]:
                self._lead(self._sequence(tree, self._lead(state, self._state())), end)
        elif operation == "SUBPATTERN":
            _, added, removed, tree = argument
            if added or removed:
                raise _TooComplexError
            self._lead(self._sequence(tree, state), end)
        elif operation in ("MAX_REPEAT", "MIN_REPEAT"):
            self._repeat(argument, state, end)
        elif operation == "AT" and str(argument) in (*_AT_START, *_AT_END):
            (self._starts if str(argument) in _AT_START else self._ends).add(end)
            self._lead(state, end)
        else:
            self._states[state].by_test.append((_test(operation, argument), end))
        return end

    def _repeat(self, argument: Any, state: int, end: int) -> None:
        least, most, tree = argument
        for _ in range(least):
            state = self._sequence(tree, self._lead(state, self._state()))
        if most is parser.MAXREPEAT:
            again = self._lead(state, self._state())
            self._lead(self._sequence(tree, self._lead(again, self._state())), again)
            self._lead(again, end)
            return
        self._lead(state, end)
        for _ in range(most - least):
            state = self._lead(self._sequence(tree, self._lead(state, self._state())), self._state())
            self._lead(state, end)

    def _closure(self, states: set[int], start: bool = False, end: bool = False) -> States:
        """Return the states that are reached from these without a character."""
        reached, waiting = set(states), list(states)
        while waiting:
            for target in self._states[waiting.pop()].by_nothing:
                barred = (target in self._starts and not start) or (target in self._ends and not end)
                if target not in reached and not barred:
                    reached.add(target)
                    waiting.append(target)
        self._work += len(reached)
        return frozenset(reached)

    def _step(self, states: States, char: str) -> States:
        following: set[int] = set()
        for state in states:
            leads = self._states[state]
            if char in leads.by_char:
                following.add(leads.by_char[char])
            following.update(target for test, target in leads.by_test if test(char))
        self._work += len(states)
        if self._work > MAX_WORK:
            raise ReshardError(
                f"{self.where} has patterns that take too long to follow: write the names of the modules instead"
            )
        return self._closure(following)


def _test(operation: str, argument: Any) -> Test:
    """Return the test that a character of a name has to pass. Raises _TooComplexError for what is none, such as a
    reference to a group."""
    if operation == "LITERAL":
        return chr(argument).__eq__
    if operation == "NOT_LITERAL":
        return chr(argument).__ne__
    if operation == "ANY":
        return _any
    if operation == "RANGE":
        first, last = map(chr, argument)
        return lambda char: first <= char <= last
    if operation == "CATEGORY" and str(argument) in _CATEGORIES:
        matches = re.compile(_CATEGORIES[str(argument)]).match
        return lambda char: matches(char) is not None
    if operation == "IN":
        negated = str(argument[0][0]) == "NEGATE"
        tests = [_test(str(one), of) for one, of in argument[negated:]]
        return lambda char: any(test(char) for test in tests) is not negated
    raise _TooComplexError
