"""Values that outlive a transaction: what torch's process groups keep in a store."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from reshard.comm.channel import BrokenChannelError
from reshard.comm.protocol import Failure, GetValues

MOST_VALUES = 1 << 20
Answer = Callable[[Any, dict[str, Any], bytes], None]


@dataclass(eq=False)
class ValueWait:
    """A client that waits until all `keys` have values; it gives up with its transaction, or at its
    deadline."""

    client: Any
    request: int
    transaction: int
    keys: list[str]
    deadline: float


class Values:
    """The hub's keys and values; `answer` sends a head and a body to a client."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.values: dict[str, bytes] = {}
        self.waits: list[ValueWait] = []

    def set(self, key: str, value: bytes) -> None:
        """Keep a value, and answer whoever waits for it. Raises BrokenChannelError if there are too
        many."""
        if len(self.values) >= MOST_VALUES:
            raise BrokenChannelError("too many values")
        self.values[key] = value
        for wait in list(self.waits):
            if all(key in self.values for key in wait.keys):
                self._answer_values(wait)

    def get(
        self, client: Any, request: int, transaction: int, asked: GetValues, failure: Failure | None
    ) -> None:
        """Answer with the values, now or once all are there; `failure` is that of the client's
        transaction."""
        wait = ValueWait(client, request, transaction, asked.keys, time.monotonic() + asked.timeout)
        self.waits.append(wait)
        if all(key in self.values for key in asked.keys):
            self._answer_values(wait)
        elif failure is not None:
            self._end(wait, {"failed": failure.to_json()})
        elif asked.timeout <= 0:
            self._end(wait, {"absent": True})

    def sweep(self, now: float) -> None:
        """Answer those whose deadline has passed."""
        for wait in [wait for wait in self.waits if wait.deadline <= now]:
            self._end(wait, {"absent": True})

    def fail(self, transaction: int, failure: Failure) -> None:
        """Answer those who wait within a transaction that has failed."""
        for wait in [wait for wait in self.waits if wait.transaction == transaction]:
            self._end(wait, {"failed": failure.to_json()})

    def drop(self, client: Any) -> None:
        """Forget the waits of a client whose connection has ended."""
        self.waits = [wait for wait in self.waits if wait.client is not client]

    def _answer_values(self, wait: ValueWait) -> None:
        values = [self.values[key] for key in wait.keys]
        self._end(wait, {"lengths": [*map(len, values)]}, b"".join(values))

    def _end(self, wait: ValueWait, head: dict[str, Any], body: bytes = b"") -> None:
        if wait in self.waits:
            self.waits.remove(wait)
            self.answer(wait.client, {"id": wait.request} | head, body)
