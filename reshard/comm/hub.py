"""The hub: a thread of the first member's process, to which every member has one authenticated connection.

It keeps what members post for each other, counts them in at the steps of a transaction, and answers
each request as soon as it can. The end of a process is the end of its connection, so that all
others learn of it at once. A process that only stalls is found by the member whose time is over:
the hub knows who waits for whom, and blames nobody who only waits for another.
"""

import secrets
import time
from collections.abc import Callable
from typing import Any

from reshard.comm.channel import BrokenChannelError, Message, digest_of
from reshard.comm.door import Entrance
from reshard.comm.numbering import Call, Numbering
from reshard.comm.protocol import (
    COMMIT,
    PREPARE,
    Abort,
    Alive,
    Begin,
    Commit,
    Fail,
    Failure,
    Gather,
    GetValues,
    Join,
    Liveness,
    Post,
    PostAll,
    Prepare,
    Read,
    SetValue,
    WaitForCount,
    Waiting,
    decode,
)
from reshard.comm.server import Client, Server
from reshard.comm.transaction import Posted, Transaction, Wait
from reshard.comm.values import Values

ALIVE_SECONDS = 2.0  # for which a member counts as alive after it has said so
KEPT_SECONDS = 600.0  # for members that have not heard of the last outcome, once the first member has left


class Hub(Server):
    """The state that members share."""

    def __init__(self, entrance: Entrance, size: int, timeout: float) -> None:
        super().__init__(entrance)
        self.size, self.kept_seconds = size, max(KEPT_SECONDS, timeout)
        self.members: dict[int, Client] = {}
        self.processes: dict[int, str] = {}  # names of the members' processes, for people
        self.gone: set[int] = set()
        self.transactions: dict[int, Transaction] = {}
        self.last_decided = 0
        self.numbering = Numbering()
        self.meeting = secrets.token_hex(8)  # tells it from all other meetings
        self.aborted = ""  # why no transaction will succeed, from a process that is no member
        self.values = Values(self.send)
        self.liveness_waits: list[Wait] = []
        self.owner_left: float | None = None  # when the first member's connection ended
        self.operations: dict[type, Callable[[Client, Message, Any], None]] = {
            Join: self._join,
            Begin: self._begin,
            Post: self._post,
            PostAll: self._post_all,
            Read: self._read,
            Gather: self._gather,
            WaitForCount: self._wait_for_count,
            Prepare: self._prepare,
            Commit: self._commit,
            Fail: self._fail,
            Alive: self._alive,
            Liveness: self._liveness,
            Abort: self._abort,
            SetValue: self._set_value,
            GetValues: self._get_values,
        }

    def sweep(self, now: float) -> None:
        """Answer the requests whose time is over."""
        for transaction in list(self.transactions.values()):
            for wait in [wait for wait in transaction.all_waits() if wait.deadline <= now]:
                self._fail_late(transaction, wait)
        self.values.sweep(now)
        for call in self.numbering.take_late(now):
            self._answer_begin(call, self.numbering.last)
        for wait in list(self.liveness_waits):
            if wait.deadline <= now:
                others = [rank for rank in range(self.size) if rank != wait.rank]
                transaction = self.transactions[wait.transaction]
                self._answer(wait, {"unresponsive": self._unresponsive(transaction, others)})

    def is_over(self) -> bool:
        """Return True once the first member has left and all others know the outcome of the last
        transaction."""
        if self.owner_left is None:
            return False
        others = (
            self.members[rank]
            for rank in range(1, self.size)
            if rank in self.members and rank not in self.gone
        )
        all_informed = all(client.informed >= self.last_decided and not client.out for client in others)
        never_came = (
            not self.closing
            and self.last_decided
            and any(rank not in self.members for rank in range(1, self.size))
        )
        return (all_informed and not never_came) or time.monotonic() - self.owner_left > self.kept_seconds

    def is_waited_for(self) -> bool:
        in_transactions = any(transaction.waits for transaction in self.transactions.values())
        return bool(self.values.waits or self.liveness_waits or self.numbering.late or in_transactions)

    def handle(self, client: Client, message: Message) -> None:
        """Carry out a request."""
        request = decode(message.head)
        self.operations[type(request)](client, message, request)

    def disconnected(self, client: Client) -> None:
        """Fail the transactions of a member that is gone before it had what it needs."""
        self.values.drop(client)
        rank = client.rank
        if rank is None or self.members.get(rank) is not client:
            return
        self.gone.add(rank)
        self.numbering.drop(client)
        if rank == 0:
            self.owner_left = time.monotonic()
        for transaction in list(self.transactions.values()):
            if not transaction.decided and rank not in transaction.arrived[COMMIT]:
                self._decide(transaction, Failure(gone=[rank]))

    # Members, and the outcome of their transactions

    def _join(self, client: Client, message: Message, request: Join) -> None:
        """Make a client a member. A rank that has joined before stays taken, also when it is gone:
        others count on what it posted."""
        answer: dict[str, Any] = {"id": message.head["id"]}
        if request.size != self.size:
            answer["size"] = self.size
        elif request.rank in self.members or not 0 <= request.rank < self.size:
            answer["taken_by"] = self.processes.get(request.rank, "")
            answer["has_left"] = request.rank in self.gone
        else:
            client.rank = request.rank
            self.members[request.rank], self.processes[request.rank] = client, request.process
            answer["meeting"] = self.meeting
        self.send(client, answer)

    def _begin(self, client: Client, message: Message, request: Begin) -> None:
        """Let a member's call take part in the transaction that others have begun, or in a new one."""
        call = Call(client, int(message.head["id"]), request)
        number = self.numbering.number_of(call, self.transactions, bool(self.gone or self.aborted))
        if number is None:
            self.numbering.late.append(call)
        else:
            self._answer_begin(call, number)

    def _answer_begin(self, call: Call, number: int) -> None:
        """Answer with the transaction in which a call takes part, and why it has failed, if it has."""
        client, is_new = call.client, number > self.numbering.last
        is_late = not is_new and client.transaction < number
        transaction = self._transaction(client, number)
        if transaction is not None and not transaction.decided:
            is_late = False
            if why := transaction.begin(call.begin.what, call.begin.kind):
                self._decide(transaction, Failure(client.rank, why))
        client.was_told = is_late
        failure = transaction.failure if transaction is not None else Failure(reason=Failure.OVER)
        if failure is not None:
            client.informed = max(client.informed, number)
        head = {"transaction": number, "failed": failure.to_json() if failure is not None else None}
        self.send(client, {"id": call.id} | head)
        if is_new:
            for late in self.numbering.take_late():
                self._answer_begin(late, number)

    def _transaction_of(self, client: Client, message: Message) -> Transaction | None:
        """Return the transaction that a member's request belongs to; see `_transaction`."""
        return self._transaction(client, int(message.head["transaction"]))

    def _transaction(self, client: Client, number: int) -> Transaction | None:
        """Return a transaction, to which a member comes, None if it is over and forgotten."""
        if client.rank is None:
            raise BrokenChannelError("it has not joined")
        client.transaction = max(client.transaction, number)
        self._forget_failed()
        if number <= self.numbering.last and number not in self.transactions:
            return None
        self.numbering.last = max(self.numbering.last, number)
        if number not in self.transactions:
            transaction = self.transactions[number] = Transaction(number)
            if self.aborted:
                self._decide(transaction, Failure(reason=self.aborted))
            elif self.gone:
                self._decide(transaction, Failure(gone=sorted(self.gone)))
        return self.transactions[number]

    def _forget_failed(self) -> None:
        """Drop the failed transactions that all members have left behind."""
        failed = [
            transaction for transaction in self.transactions.values() if transaction.failure is not None
        ]
        if failed and len(self.members) == self.size:
            left = [client.transaction for rank, client in self.members.items() if rank not in self.gone]
            for transaction in failed:
                if transaction.number < min(left):
                    del self.transactions[transaction.number]

    def _decide(self, transaction: Transaction, failure: Failure | None) -> None:
        """Set the outcome and send it to all members, to the first one last: its process, which has
        the hub, may end then."""
        number = transaction.number
        if failure is None:
            transaction.committed = True
        else:
            transaction.failure = failure
        self.last_decided = max(self.last_decided, number)
        transaction.clear()
        outcome = {} if failure is None else {"failed": failure.to_json()}
        waits: dict[int, list[Wait]] = {}
        for wait in transaction.all_waits():
            waits.setdefault(wait.rank, []).append(wait)
        for rank in sorted(self.members, key=lambda rank: (rank == 0, rank)):
            client = self.members[rank]
            client.informed = max(client.informed, number)
            if failure is not None:
                self.send(client, outcome | {"transaction": number})
            for wait in waits.get(rank, []):
                self._answer(wait, outcome)
        transaction.waits.clear()
        if failure is None:
            del self.transactions[number]
            return
        self.values.fail(number, failure)
        for wait in [wait for wait in self.liveness_waits if wait.transaction == number]:
            self._answer(wait, outcome)

    def _answer(
        self, wait: Wait, head: dict[str, Any], body: bytes = b"", digest: bytes | None = None
    ) -> None:
        if wait.answered:
            return
        wait.answered = True
        client = self.members[wait.rank]
        if "failed" in head:
            client.informed = max(client.informed, wait.transaction)
        self.liveness_waits = [other for other in self.liveness_waits if other is not wait]
        self.send(client, {"id": wait.request} | head, body, digest)

    def _answer_if_over(self, transaction: Transaction | None, wait: Wait) -> bool:
        """Answer a request of a transaction whose outcome is known. Returns True if it was."""
        if transaction is not None and transaction.failure is None:
            return False
        failure = transaction.failure if transaction is not None else None
        self._answer(wait, {"failed": (failure or Failure(reason=Failure.OVER)).to_json()})
        return True

    # Messages within a transaction

    def _post(self, client: Client, message: Message, request: Post) -> None:
        transaction = self._transaction_of(client, message)
        self._keep_post(client, transaction, request.key, Posted(message.body, message.digest))

    def _post_all(self, client: Client, message: Message, request: PostAll) -> None:
        transaction = self._transaction_of(client, message)
        for key, payload in zip(request.keys, request.payloads(message.body), strict=True):
            self._keep_post(client, transaction, key, Posted(payload, digest_of(payload)))

    def _keep_post(self, client: Client, transaction: Transaction | None, key: str, posted: Posted) -> None:
        if transaction is None or transaction.decided or client.rank is None:
            return
        transaction.post(key, client.rank, posted)
        if key not in transaction.waits:
            return
        counts = transaction.counts_posts_of(key, client.rank)
        if counts and self._fails_without_numbers(transaction, key, [client.rank]):
            return
        for wait in sorted(transaction.take_complete(key, client.rank), key=lambda wait: wait.rank == 0):
            self._answer_posts(transaction, wait)

    def _fails_without_numbers(self, transaction: Transaction, key: str, ranks: list[int]) -> bool:
        """Fail the transaction where one of these ranks has posted something other than the number
        that is waited for."""
        wrong = transaction.without_number(key, ranks)
        if wrong:
            self._decide(transaction, Failure(wrong[0], f"what is published as '{key}' is not a number"))
        return bool(wrong)

    def _answer_posts(self, transaction: Transaction, wait: Wait) -> None:
        if wait.count is not None:
            self._answer(wait, {})
            return
        lengths, body, digest = transaction.body_of(wait.key, wait.ranks)
        self._answer(wait, {"lengths": lengths}, body, digest)

    def _new_wait(
        self, client: Client, message: Message, seconds: float, what: str, key: str, ranks: list[int]
    ) -> Wait:
        assert client.rank is not None
        request, number = int(message.head["id"]), int(message.head["transaction"])
        return Wait(client.rank, request, number, key, ranks, what, seconds, time.monotonic() + seconds)

    def _read(self, client: Client, message: Message, request: Read) -> None:
        ranks = [*range(self.size)] if request.ranks is None else request.ranks
        self._wait_for_posts(client, message, request, request.key, ranks, None)

    def _gather(self, client: Client, message: Message, request: Gather) -> None:
        # It waits for its own post too, which answers it where that is the last.
        self._wait_for_posts(
            client, message, request, request.key, [*range(self.size)], None, posts_itself=True
        )
        self._post(client, message, Post(request.key))

    def _wait_for_count(self, client: Client, message: Message, request: WaitForCount) -> None:
        self._wait_for_posts(client, message, request, request.key, [request.rank], request.count)

    def _wait_for_posts(
        self,
        client: Client,
        message: Message,
        request: Waiting,
        key: str,
        ranks: list[int],
        count: int | None,
        posts_itself: bool = False,
    ) -> None:
        transaction = self._transaction_of(client, message)
        wait = self._new_wait(client, message, request.timeout, request.what, key, ranks)
        wait.count = count
        if self._answer_if_over(transaction, wait) or transaction is None:
            return
        if count is not None and self._fails_without_numbers(transaction, key, ranks):
            self._answer_if_over(transaction, wait)
            return
        if not transaction.add(wait, posts_itself):
            self._answer_posts(transaction, wait)

    def _prepare(self, client: Client, message: Message, request: Prepare) -> None:
        transaction, wait = self._step(client, message, request, PREPARE)
        if transaction is None or client.rank is None:
            return
        if (conflict := transaction.prepare(client.rank, request)) is not None:
            self._answer(wait, {"conflict": [*conflict]})
            return
        waiting = transaction.add_to_step(wait)
        if len(transaction.arrived[PREPARE]) < self.size:
            return
        answer, notes = transaction.prepared()
        digest = digest_of(notes)
        del transaction.waits[wait.key]
        for member in sorted(waiting, key=lambda member: member.rank == 0):
            self._answer(member, vars(answer), notes, digest)

    def _commit(self, client: Client, message: Message, request: Commit) -> None:
        transaction, wait = self._step(client, message, request, COMMIT)
        if transaction is None or client.rank is None:
            return
        transaction.arrived[COMMIT].add(client.rank)
        transaction.add_to_step(wait)
        if len(transaction.arrived[COMMIT]) == self.size:
            self._decide(transaction, None)

    def _step(
        self, client: Client, message: Message, request: Waiting, step: str
    ) -> tuple[Transaction | None, Wait]:
        """Return the transaction to which a member comes, None if it is over, and its wait for the
        others."""
        transaction = self._transaction_of(client, message)
        wait = self._new_wait(client, message, request.timeout, request.what, f"/{step}", [*range(self.size)])
        return (None if self._answer_if_over(transaction, wait) else transaction), wait

    # Who is late, and who responds

    def _fail_late(self, transaction: Transaction, wait: Wait) -> None:
        """Fail the transaction because a member's time is over, and name whom it waits for."""
        if wait.answered or transaction.decided:
            return
        late = sorted(self._awaited(transaction, wait))
        unresponsive = self._unresponsive(transaction, late)
        self._decide(
            transaction,
            Failure(
                wait.rank,
                late=late,
                unresponsive=unresponsive,
                absent=[rank for rank in late if rank not in self.members],
                away=[rank for rank in late if self._is_away(rank, transaction)],
                call=transaction.what or "this call",
                what=wait.what,
                seconds=wait.seconds,
            ),
        )

    def _is_away(self, rank: int, transaction: Transaction) -> bool:
        """Return True for a member that has not begun a transaction."""
        return rank in self.members and self.members[rank].transaction < transaction.number

    def _awaited(self, transaction: Transaction, wait: Wait) -> set[int]:
        """Return the ranks that a member waits for."""
        if wait.key.startswith("/"):
            return set(range(self.size)) - transaction.arrived[wait.key[1:]]
        return wait.missing

    def _unresponsive(self, transaction: Transaction, ranks: list[int]) -> list[int]:
        """Return those of these ranks, and of those that they wait for in turn, that neither wait
        nor say that they are alive."""
        waits = {wait.rank: wait for wait in transaction.all_waits()}
        asking = {wait.rank for wait in self.liveness_waits}
        unresponsive, seen, todo = [], set[int](), set(ranks)
        while todo:
            rank = todo.pop()
            seen.add(rank)
            client = self.members.get(rank)
            if client is None or rank in self.gone:
                unresponsive.append(rank)
            elif rank in waits:
                todo |= self._awaited(transaction, waits[rank]) - seen
            elif rank not in asking and time.monotonic() - client.alive > ALIVE_SECONDS:
                unresponsive.append(rank)
        return sorted(unresponsive)

    def _alive(self, client: Client, message: Message, request: Alive) -> None:
        client.alive = time.monotonic()

    def _liveness(self, client: Client, message: Message, request: Liveness) -> None:
        """Answer which members do not respond, once each has had time to."""
        transaction = self._transaction_of(client, message)
        wait = self._new_wait(client, message, request.timeout, "", "", [])
        if not self._answer_if_over(transaction, wait):
            self.liveness_waits.append(wait)

    def _fail(self, client: Client, message: Message, request: Fail) -> None:
        transaction = self._transaction_of(client, message)
        if transaction is not None and not transaction.decided:
            self._decide(transaction, Failure(client.rank, request.reason, resumable=request.resumable))
        failure = transaction.failure if transaction is not None else None
        self.send(client, {"id": message.head["id"], "failed": failure.to_json() if failure else None})

    def _abort(self, client: Client, message: Message, request: Abort) -> None:
        self.aborted = request.reason
        for transaction in list(self.transactions.values()):
            if not transaction.decided:
                self._decide(transaction, Failure(reason=self.aborted))
        self.send(client, {"id": message.head["id"]})

    # Values, for torch's process groups

    def _set_value(self, client: Client, message: Message, request: SetValue) -> None:
        self.values.set(request.key, message.body)
        self.send(client, {"id": message.head["id"]})

    def _get_values(self, client: Client, message: Message, request: GetValues) -> None:
        number = int(message.head["transaction"])
        transaction = self.transactions.get(number)
        failure = transaction.failure if transaction is not None else None
        self.values.get(client, int(message.head["id"]), number, request, failure)
