"""The hub: a thread of the first member's process, to which every member has one authenticated connection.

It keeps what members publish for each other, counts them in at the steps of a transaction, and answers whoever waits as soon as
there is an answer. The end of a process is the end of its connection, so that all others learn of it at once; of one that only
stalls, the member whose time is over learns it: the hub knows who waits for whom, and blames nobody who only waits for another.
"""

import logging
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from reshard.comm.channel import (
    READ_BYTES,
    BrokenChannelError,
    Door,
    FrameReader,
    FrameWriter,
    Keys,
    Message,
    prepare,
)
from reshard.comm.transaction import DONE, GO, HERE, Posted, Transaction, Wait

ALIVE_SECONDS = (
    2.0  # how long a member counts as alive that has said so while it was in a call that does not return
)
KEPT_SECONDS = (
    600.0  # for those who have not heard how the last transaction ended, once the first member is no more
)
TICK_SECONDS, SWEEP_SECONDS = 1.0, 0.05  # between two looks at the time, and where somebody waits
MOST_VALUES = 1 << 20
log = logging.getLogger("reshard")


class Client:
    """A connection to the hub: a member's, once it has joined; or one that only asks for values, or tells something."""

    def __init__(self, connection: socket.socket, keys: Keys) -> None:
        self.connection = connection
        self.writer, self.reader = FrameWriter(keys.of_server), FrameReader(keys.of_client)
        self.out: deque[memoryview] = deque()
        self.rank: int | None = None
        self.number = 0  # of the transaction that it has come to
        self.told = 0  # the last transaction of which it knows how it ended
        self.alive = float("-inf")  # when it last said so
        self.waits: set[int] = set()  # its requests that have not been answered yet


class Hub:
    """The state that members share; everything in it belongs to the thread that runs `serve`."""

    def __init__(self, listener: socket.socket, secret: bytes, size: int, timeout: float) -> None:
        self.size, self.kept_seconds = size, max(KEPT_SECONDS, timeout)
        self.door = Door(listener, secret)
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.door, selectors.EVENT_READ)
        self.clients: dict[socket.socket, Client] = {}
        self.members: dict[int, Client] = {}
        self.who: dict[int, str] = {}
        self.gone: set[int] = set()
        self.transactions: dict[int, Transaction] = {}
        self.last_done = self.last_decided = 0
        self.told = ""  # by somebody who is no member: why no transaction will succeed
        self.values: dict[str, bytes] = {}
        self.value_waits: list[tuple[Client, Wait, list[str]]] = []
        self.liveness_waits: list[Wait] = []
        self.swept = time.monotonic()
        self.owner_left: float | None = None
        self.stopped = False
        self.operations: dict[str, Callable[[Client, Message], None]] = {
            "join": self._join,
            "post": self._post,
            "wait": self._wait,
            "arrive": self._arrive,
            "fail": self._fail_by,
            "alive": self._alive,
            "silent": self._silent_later,
            "tell": self._tell,
            "set": self._set,
            "get": self._get,
        }

    def start(self) -> None:
        """Serve in a thread that ends when nobody needs the hub any more."""
        threading.Thread(target=self.serve, name="reshard hub", daemon=True).start()

    def stop(self) -> None:
        """Serve nobody any more; for another thread, where the first member could not join."""
        self.stopped = True

    def serve(self) -> None:
        """Answer until the first member is no more, and all others know how the last transaction ended."""
        try:
            while not self.stopped and not self._is_over():
                self._look_once()
        except Exception:
            log.exception("the hub of a refit has failed")
        finally:
            self._close()

    def _look_once(self) -> None:
        waiting = (
            self.value_waits or self.liveness_waits or any(one.waits for one in self.transactions.values())
        )
        knocks = bool(self.door.handshakes)
        for key, events in self.selector.select(SWEEP_SECONDS if waiting else TICK_SECONDS):
            if key.fileobj is self.door:
                knocks = True
                continue
            if events & selectors.EVENT_WRITE:
                self._flush(key.data)
            if events & selectors.EVENT_READ:
                self._hear(key.data)
        if knocks:
            for connection, keys in self.door.admitted():
                self._welcome(connection, keys)
        if time.monotonic() - self.swept > SWEEP_SECONDS:
            self._sweep()

    def _sweep(self) -> None:
        """Answer those whose time is over."""
        now = self.swept = time.monotonic()
        for transaction in list(self.transactions.values()):
            for wait in [one for waits in transaction.waits.values() for one in waits]:
                if wait.deadline <= now:
                    self._is_late(transaction, wait)
        for client, wait, _ in list(self.value_waits):
            if wait.deadline <= now:
                self._answer_value(client, wait, {"absent": True})
        for wait in list(self.liveness_waits):
            if wait.deadline <= now:
                others = [rank for rank in range(self.size) if rank != wait.rank]
                self._answer(wait, {"silent": self._silent(self.transactions[wait.number], others)})

    def _is_over(self) -> bool:
        if self.owner_left is None:
            return False
        others = (
            self.members[rank]
            for rank in range(1, self.size)
            if rank in self.members and rank not in self.gone
        )
        heard = all(client.told >= self.last_decided and not client.out for client in others)
        never_came = self.last_decided and any(rank not in self.members for rank in range(1, self.size))
        return (heard and not never_came) or time.monotonic() - self.owner_left > self.kept_seconds

    def _close(self) -> None:
        for client in list(self.clients.values()):
            client.connection.close()
        self.door.close()
        self.selector.close()

    # Connections

    def _welcome(self, connection: socket.socket, keys: Keys) -> None:
        prepare(connection)
        client = self.clients[connection] = Client(connection, keys)
        self.selector.register(connection, selectors.EVENT_READ, client)

    def _hear(self, client: Client) -> None:
        if client.connection not in self.clients:
            return
        try:
            data = client.connection.recv(READ_BYTES)
            if not data:
                raise BrokenChannelError("the connection has ended")
            for message in client.reader.feed(data):
                self.operations[message.head["op"]](client, message)
        except BlockingIOError:
            return
        except (
            Exception
        ) as error:  # its end, or a message that makes no sense: nobody else is to suffer from that
            self._drop(client, error)

    def _drop(self, client: Client, why: BaseException) -> None:
        """A connection has ended, or says what is no message: a member's process has ended, or let go of it."""
        if self.clients.pop(client.connection, None) is None:
            return
        log.debug("a connection to the hub has ended (%s)", why)
        self.selector.unregister(client.connection)
        client.connection.close()
        self.value_waits = [one for one in self.value_waits if one[0] is not client]
        rank = client.rank
        if rank is None or self.members.get(rank) is not client:
            return
        self.gone.add(rank)
        if rank == 0:
            self.owner_left = time.monotonic()
        for transaction in list(self.transactions.values()):
            if not transaction.is_decided() and rank not in transaction.arrived[DONE]:
                self._decide(transaction, {"gone": [rank]})

    def _send(
        self, client: Client, head: dict[str, Any], body: bytes = b"", digest: bytes | None = None
    ) -> None:
        if client.connection not in self.clients:
            return
        client.out.append(memoryview(client.writer.frame(head, body, digest)))
        if body:
            client.out.append(memoryview(body))
        self._flush(client)

    def _flush(self, client: Client) -> None:
        if client.connection not in self.clients:
            return
        try:
            while client.out:
                sent = client.connection.send(client.out[0])
                if sent < len(client.out[0]):
                    client.out[0] = client.out[0][sent:]
                else:
                    client.out.popleft()
        except BlockingIOError:
            pass
        except OSError:
            client.out.clear()  # its end is read like any other's
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.out else 0)
        if self.selector.get_key(client.connection).events != events:
            self.selector.modify(client.connection, events, client)

    # Members

    def _join(self, client: Client, message: Message) -> None:
        """Seat a member. One of this rank that has joined before keeps its seat, also when it is gone: others count on what it
        has said."""
        rank, size, who = int(message.head["rank"]), int(message.head["size"]), str(message.head["who"])
        answer: dict[str, Any] = {"id": message.head["id"]}
        if size != self.size:
            answer["size"] = self.size
        elif rank in self.members or not 0 <= rank < size:
            answer["other"] = self.who.get(rank, "")
        else:
            client.rank = rank
            self.members[rank], self.who[rank] = client, who
        self._send(client, answer)

    def _transaction(self, client: Client, message: Message) -> Transaction | None:
        """Return the transaction that a member's request belongs to, None where it is done and forgotten."""
        if client.rank is None:
            raise BrokenChannelError("it has not joined")
        number = int(message.head["turn"])
        client.number = max(client.number, number)
        self._forget()
        if number <= self.last_done and number not in self.transactions:
            return None
        if number not in self.transactions:
            transaction = self.transactions[number] = Transaction(number)
            if self.told:
                self._decide(transaction, {"says": self.told})
            elif self.gone:
                self._decide(transaction, {"gone": sorted(self.gone)})
        return self.transactions[number]

    def _forget(self) -> None:
        """Drop the transactions that have failed and that all members have left behind."""
        decided = [one for one in self.transactions.values() if one.failure is not None]
        if decided and len(self.members) == self.size:
            least = min(client.number for rank, client in self.members.items() if rank not in self.gone)
            for transaction in decided:
                if transaction.number < least:
                    del self.transactions[transaction.number]

    def _decide(self, transaction: Transaction, failure: dict[str, Any] | None) -> None:
        """A transaction has failed, or is done: tell all members, the first one last, which may end its process then."""
        if failure is None:
            transaction.verdict = DONE
            self.last_done = max(self.last_done, transaction.number)
        else:
            transaction.failure = failure
        self.last_decided = max(self.last_decided, transaction.number)
        transaction.clear()
        number = transaction.number
        for rank in sorted(self.members, key=lambda rank: (rank == 0, rank)):
            client = self.members[rank]
            client.told = max(client.told, number)
            if failure is not None:
                self._send(client, {"failed": failure, "turn": number})
            for wait in [wait for waits in transaction.waits.values() for wait in waits if wait.rank == rank]:
                self._answer(wait, {"failed": failure} if failure is not None else {})
        transaction.waits.clear()
        if failure is not None:
            for store, wait, _ in [one for one in self.value_waits if one[1].number == number]:
                self._answer_value(store, wait, {"failed": failure})
            for wait in [one for one in self.liveness_waits if one.number == number]:
                self._answer(wait, {"failed": failure})
        else:
            del self.transactions[number]

    def _answer(
        self, wait: Wait, head: dict[str, Any], body: bytes = b"", digest: bytes | None = None
    ) -> None:
        if not wait.answered:
            wait.answered = True
            client = self.members[wait.rank]
            if "failed" in head:
                client.told = max(client.told, wait.number)
            self.liveness_waits = [one for one in self.liveness_waits if one is not wait]
            self._send(client, {"id": wait.request} | head, body, digest)

    # Messages within a transaction

    def _post(self, client: Client, message: Message) -> None:
        transaction = self._transaction(client, message)
        if transaction is None or transaction.is_decided() or client.rank is None:
            return
        key = str(message.head["key"])
        transaction.post(key, client.rank, Posted(message.body, message.digest))
        waiting = transaction.waits.get(key, [])
        counting = [wait for wait in waiting if wait.count is not None and client.rank in wait.ranks]
        if counting and self._fails_without_numbers(transaction, key, [client.rank]):
            return
        for wait in waiting:
            if client.rank not in transaction.lacking(key, [client.rank], wait.count):
                wait.missing.discard(client.rank)
        self._answer_those_who_lack_nothing(transaction, key)

    def _fails_without_numbers(self, transaction: Transaction, key: str, ranks: list[int]) -> bool:
        """Fail the transaction where one of these ranks has published something else than the number that is waited for."""
        wrong = transaction.without_number(key, ranks)
        if wrong:
            self._decide(
                transaction, {"by": wrong[0], "says": f"what is published as '{key}' is not a number"}
            )
        return bool(wrong)

    def _answer_those_who_lack_nothing(self, transaction: Transaction, key: str) -> None:
        waiting = transaction.waits.pop(key, [])
        if still := [wait for wait in waiting if wait.missing]:
            transaction.waits[key] = still
        for wait in sorted((wait for wait in waiting if not wait.missing), key=lambda wait: wait.rank == 0):
            self._answer_posts(transaction, wait)

    def _answer_posts(self, transaction: Transaction, wait: Wait) -> None:
        if wait.count is not None:
            self._answer(wait, {})
            return
        lengths, body, digest = transaction.body_of(wait.key, wait.ranks)
        self._answer(wait, {"lengths": lengths}, body, digest)

    def _new_wait(self, client: Client, message: Message, key: str, ranks: list[int]) -> Wait:
        head = message.head
        seconds = float(head["timeout"])
        assert client.rank is not None
        count = head.get("count")
        return Wait(
            client.rank, int(head["id"]), int(head["turn"]), key, ranks, set(), str(head.get("what", "")), seconds,
            time.monotonic() + seconds, None if count is None else int(count),
        )  # fmt: skip

    def _wait(self, client: Client, message: Message) -> None:
        transaction = self._transaction(client, message)
        given = message.head.get("ranks")
        ranks = list(range(self.size)) if given is None else [int(rank) for rank in given]
        wait = self._new_wait(client, message, str(message.head["key"]), ranks)
        if transaction is None or transaction.failure is not None:
            self._answer(wait, {"failed": transaction.failure if transaction else {"says": "this is over"}})
            return
        if wait.count is not None and self._fails_without_numbers(transaction, wait.key, ranks):
            self._answer(wait, {"failed": transaction.failure})
            return
        wait.missing = transaction.lacking(wait.key, ranks, wait.count)
        if not wait.missing:
            self._answer_posts(transaction, wait)
            return
        transaction.waits.setdefault(wait.key, []).append(wait)

    def _arrive(self, client: Client, message: Message) -> None:
        transaction, step = self._transaction(client, message), str(message.head["step"])
        wait = self._new_wait(client, message, f"/{step}", list(range(self.size)))
        if transaction is None or transaction.failure is not None:
            self._answer(wait, {"failed": transaction.failure if transaction else {"says": "this is over"}})
            return
        assert client.rank is not None
        if (conflict := transaction.come(step, client.rank, message.head)) is not None:
            self._answer(wait, {"conflict": conflict})
            return
        arrived = transaction.arrived[step]
        transaction.waits.setdefault(wait.key, []).append(wait)
        if len(arrived) < self.size:
            return
        if step == HERE:
            transaction.verdict = GO
            answer = transaction.go_answer()
            for one in sorted(transaction.waits.pop(wait.key), key=lambda one: one.rank == 0):
                self._answer(one, answer)
        else:
            self._decide(transaction, None)

    def _is_late(self, transaction: Transaction, wait: Wait) -> None:
        """The time of a member is over: the transaction fails, and whoever keeps it is named."""
        if wait.answered or transaction.is_decided():
            return
        late = sorted(self._missing(transaction, wait))
        silent = self._silent(transaction, late)
        self._decide(
            transaction,
            {"by": wait.rank, "late": late, "silent": silent, "what": wait.what, "seconds": wait.seconds},
        )

    def _missing(self, transaction: Transaction, wait: Wait) -> set[int]:
        """Return the ranks that a member waits for."""
        if wait.key.startswith("/"):
            return set(range(self.size)) - transaction.arrived[wait.key[1:]]
        return wait.missing

    def _silent(self, transaction: Transaction, ranks: list[int]) -> list[int]:
        """Return those of these ranks, and of those that they wait for in turn, that neither wait nor say that they live."""
        waits = {wait.rank: wait for waits in transaction.waits.values() for wait in waits}
        asking = {wait.rank for wait in self.liveness_waits}
        silent, seen, todo = [], set[int](), set(ranks)
        while todo:
            rank = todo.pop()
            seen.add(rank)
            client = self.members.get(rank)
            if client is None or rank in self.gone:
                silent.append(rank)
            elif rank in waits:
                todo |= self._missing(transaction, waits[rank]) - seen
            elif rank not in asking and time.monotonic() - client.alive > ALIVE_SECONDS:
                silent.append(rank)
        return sorted(silent)

    def _alive(self, client: Client, message: Message) -> None:
        client.alive = time.monotonic()

    def _silent_later(self, client: Client, message: Message) -> None:
        """Say which members are silent, once each has had time to say that it is not."""
        transaction = self._transaction(client, message)
        wait = self._new_wait(client, message, "", [])
        if transaction is None or transaction.failure is not None:
            self._answer(wait, {"failed": transaction.failure if transaction else {"says": "this is over"}})
            return
        self.liveness_waits.append(wait)

    def _fail_by(self, client: Client, message: Message) -> None:
        transaction = self._transaction(client, message)
        if transaction is not None and not transaction.is_decided():
            self._decide(transaction, {"by": client.rank, "says": str(message.head["says"])})
        failure = transaction.failure if transaction is not None else None
        self._send(client, {"id": message.head["id"], "failed": failure})

    def _tell(self, client: Client, message: Message) -> None:
        self.told = str(message.head["says"])
        for transaction in list(self.transactions.values()):
            if not transaction.is_decided():
                self._decide(transaction, {"says": self.told})
        self._send(client, {"id": message.head["id"]})

    # Values, for torch's groups and for boards

    def _set(self, client: Client, message: Message) -> None:
        if len(self.values) >= MOST_VALUES:
            raise BrokenChannelError("too many values")
        self.values[str(message.head["key"])] = message.body
        self._send(client, {"id": message.head["id"]})
        for store, wait, keys in list(self.value_waits):
            if all(key in self.values for key in keys):
                self._answer_keys(store, wait, keys)

    def _get(self, client: Client, message: Message) -> None:
        """Answer with the values of these keys, once all are there; only with whether they are, where nobody waits."""
        head = message.head
        keys, seconds = [str(key) for key in head["keys"]], float(head["timeout"])
        wait = Wait(
            -1,
            int(head["id"]),
            int(head.get("turn", 0)),
            "",
            [],
            set(),
            "",
            seconds,
            time.monotonic() + seconds,
        )
        transaction = self.transactions.get(wait.number)
        if all(key in self.values for key in keys):
            self._answer_keys(client, wait, keys)
        elif transaction is not None and transaction.failure is not None:
            self._answer_value(client, wait, {"failed": transaction.failure})
        elif seconds <= 0:
            self._answer_value(client, wait, {"absent": True})
        else:
            self.value_waits.append((client, wait, keys))

    def _answer_keys(self, client: Client, wait: Wait, keys: list[str]) -> None:
        values = [self.values[key] for key in keys]
        self._answer_value(client, wait, {"lengths": [len(value) for value in values]}, b"".join(values))

    def _answer_value(self, client: Client, wait: Wait, head: dict[str, Any], body: bytes = b"") -> None:
        if not wait.answered:
            wait.answered = True
            self.value_waits = [one for one in self.value_waits if one[1] is not wait]
            with suppress(KeyError):
                self._send(client, {"id": wait.request} | head, body)
