"""A member's connection to the hub: requests and answers, failures that the hub reports, and signs of
life."""

import itertools
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from reshard.comm.channel import BrokenChannelError, Channel, Message
from reshard.comm.protocol import Alive, Fail, Failure, Request, encode
from reshard.core.errors import ReshardError, is_resumable

LOOK_SECONDS = 0.1  # between two looks of a waiting member at what it watches
ALIVE_EVERY_SECONDS = 0.5  # between two messages of a member that it is alive
FAIL_SECONDS = 10.0  # for which a member that gives up waits until the hub knows
GRACE_SECONDS = 5.0  # beyond the time limit, within which a hub that lives answers


class TransactionFailedError(ReshardError):
    """A member has given the transaction up, is gone, or is late: `failure`."""

    failure = Failure()

    @staticmethod
    def of(failure: Failure, names: Mapping[int, str], rank: int) -> "TransactionFailedError":
        """Return it with the sentence for `rank`. It can be pickled, since actors raise it across
        processes."""
        error = TransactionFailedError(failure.sentence(names, rank), failure.resumable)
        error.failure = failure
        return error


class PeerMemoryError(ReshardError):
    """Memory that another member has shared cannot be mapped. Where the transaction had failed before, that is why:
    a member that gives up frees what it has shared."""


class HubLostError(ReshardError):
    """The process that has the hub is gone, or does not answer."""


class HubClient:
    """A member's end of its connection to the hub.

    `rank` and `size` count all members, `names` are theirs, for errors. `timeout` in seconds bounds
    every wait.
    """

    def __init__(self, channel: Channel, rank: int, size: int, timeout: float) -> None:
        self.channel = channel
        self.rank, self.size, self.timeout = rank, size, timeout
        self.names = {r: f"rank {r}" for r in range(size)}
        self.transaction_number = 0
        self._failures: dict[int, Failure] = {}  # by transaction
        self._answers: dict[int, Message] = {}  # by request
        self._watched: Callable[[], str] | None = None  # says why to give up, beside the hub
        self._lost = ""  # why the hub is not asked any more
        self._last_alive = float("-inf")
        self.closed = False
        self._requests, self._lock = itertools.count(), threading.RLock()
        channel.limit_sending(timeout)

    def wait_without_limit(self) -> None:
        """Lift the time limit: from here on every wait takes as long as the others need, and live."""
        self.timeout = math.inf
        self.channel.limit_sending(0)

    def __del__(self) -> None:
        if hasattr(self, "channel"):
            self.channel.close()

    def check(self) -> None:
        """Raise ReshardError if a member has given this transaction up, or is gone."""
        with self._lock:
            try:
                while not self._lost and (message := self.channel.receive(0)) is not None:
                    self._keep(message)
            except BrokenChannelError as error:
                self._raise_failed()
                self._lose(str(error))
        self._raise_failed()

    @contextmanager
    def watching(self, failed: Callable[[], str]) -> Iterator[None]:
        """Inside the `with` block, call `failed` several times a second while this member waits. It checks
        processes that the hub does not know. If it returns a sentence, the transaction fails for all members
        with that sentence."""
        before, self._watched = self._watched, failed
        try:
            yield
        finally:
            self._watched = before

    def fail(self, error: BaseException) -> None:
        """Tell the others why this member gives up, and wait until the hub knows."""
        with suppress(ReshardError):
            self._fail(str(error) or type(error).__name__, is_resumable(error))

    def _fail(self, reason: str, resumable: bool = False) -> None:
        seconds = max(GRACE_SECONDS, min(self.timeout, FAIL_SECONDS))
        answer = self._request(Fail(reason, resumable), seconds, watches=False).head
        if answer.get("failed") is not None:
            self._failures[self.transaction_number] = Failure.from_json(answer["failed"])

    def _raise_failed(self) -> None:
        failure = self._failures.get(self.transaction_number)
        if failure is not None:
            raise TransactionFailedError.of(failure, self.names, self.rank)

    def report_alive(self) -> None:
        """Say that this member is alive, from within a call that takes long; at most every
        `ALIVE_EVERY_SECONDS`."""
        now = time.monotonic()
        if now - self._last_alive >= ALIVE_EVERY_SECONDS and not self._lost:
            self._last_alive = now
            with suppress(BrokenChannelError):  # the process with the hub is gone, as all will find out
                self.channel.send(encode(Alive()))

    def attend(self) -> None:
        """Say that this member is alive, and raise ReshardError where the others wait for nothing any more: see
        `report_alive` and `check`. For calls that look again and again whether a GPU is done."""
        self.report_alive()
        self.check()

    @contextmanager
    def reporting_alive(self) -> Iterator[None]:
        """While it is open, a thread says that this member is alive: for calls that do not return soon."""
        ended = threading.Event()

        def report() -> None:
            self.report_alive()
            while not ended.wait(ALIVE_EVERY_SECONDS):
                self.report_alive()

        thread = threading.Thread(target=report, name="reshard alive", daemon=True)
        try:
            thread.start()  # in which Ctrl-C may come as well, when it runs already
            yield
        finally:
            ended.set()
            if thread.is_alive():
                thread.join()

    def _wait_for(self, request: Request, body: bytes = b"") -> Message:
        """Return the answer to a request that waits for others. Raises ReshardError if the
        transaction has failed."""
        message = self._request(request, self.timeout + GRACE_SECONDS, body=body)
        if message.head.get("failed") is not None:
            failure = Failure.from_json(message.head["failed"])
            raise TransactionFailedError.of(failure, self.names, self.rank)
        return message

    def _request(self, request: Request, seconds: float, watches: bool = True, body: bytes = b"") -> Message:
        with self._lock:
            number = next(self._requests)
            self._send(encode(request) | {"transaction": self.transaction_number, "id": number}, body)
            return self._answer_to(number, time.monotonic() + seconds, watches)

    def _answer_to(self, number: int, deadline: float, watches: bool) -> Message:
        """Read until a request is answered, and keep whatever else comes."""
        gave_up = False
        while number not in self._answers:
            watched = self._watched if watches and not gave_up else None
            left = deadline - time.monotonic()
            try:
                # Also once the time is over: what came while this process was stopped counts.
                message = self.channel.receive(max(0.0, left if watched is None else min(left, LOOK_SECONDS)))
            except BrokenChannelError as error:
                self._raise_failed()
                self._lose(str(error))
            if message is not None:
                self._keep(message)
            elif left <= 0:
                self._lose(f"nothing came within {self.timeout:g} s")
            elif watched is not None and (reason := watched()):
                gave_up = True
                self._fail(reason)
        return self._answers.pop(number)

    def _keep(self, message: Message) -> None:
        """Keep an answer for the request that waits for it, or why a transaction has failed."""
        head = message.head
        if "id" in head:
            self._answers[int(head["id"])] = message
        elif head.get("failed") is not None and "transaction" in head:
            self._failures[int(head["transaction"])] = Failure.from_json(head["failed"])

    def _send(self, head: dict[str, Any], body: bytes = b"") -> None:
        if self._lost:
            self._lose(self._lost)
        try:
            self.channel.send(head, body)
        except BrokenChannelError as error:
            self.check()  # the hub may have said why before it went
            self._lose(str(error))

    def _lose(self, why: str) -> None:
        """Raise HubLostError."""
        if self.closed:
            raise HubLostError("this group was closed: meet again")
        server, member = self.names[0], self.names[self.rank]
        again = ": meet again to go on" if self._lost else ""
        self._lost = why
        raise HubLostError(
            f"{server}, which serves the hub that the members meet at, does not answer {member} ({why}){again}"
        )
