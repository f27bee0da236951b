"""The numbers of transactions: in which of them a member's call takes part."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from reshard.comm.protocol import Begin
from reshard.comm.server import Client
from reshard.comm.transaction import Transaction

# How long a call that comes late to a failed transaction is held, at most: if the others call again meanwhile, it
# takes part in that, and is told of the failure otherwise.
AGAIN_SECONDS, AGAIN_SHARE = 2.0, 0.25  # of its time limit


@dataclass(eq=False)
class Call:
    """A call that a member begins: its request `id`, which is answered by the `deadline` at the latest."""

    client: Client
    id: int
    begin: Begin
    deadline: float = field(init=False)

    def __post_init__(self) -> None:
        self.deadline = time.monotonic() + min(AGAIN_SECONDS, AGAIN_SHARE * self.begin.timeout)


class Numbering:
    """The numbers of transactions that were begun, up to `last`, and the calls that are `late`.

    Each call of a member is for the next transaction. But others may have failed because a member did not come: then
    it may have missed that call, and call once more with all others, or may call only now, and late. Nobody but its
    caller knows, who may give a number. Such a call is held for a little. If the others call again meanwhile, it takes
    part in that; otherwise it is told of the failure. But that happens not twice in a row, so that a member which
    always calls first gets in step, too.
    """

    def __init__(self) -> None:
        self.last = 0
        self.late: list[Call] = []

    def number_of(self, call: Call, transactions: Mapping[int, Transaction], is_over: bool) -> int | None:
        """Return the transaction in which a call takes part; None if that is not known yet.

        `transactions` are all that are not over for every member; where it `is_over` none comes any more.
        """
        client, wanted = call.client, call.begin.number
        if wanted is not None:
            return min(wanted, self.last + 1)
        for number in sorted(transactions):
            if number > client.transaction and not _was_awaited(client, transactions[number]):
                return number
        if client.transaction == self.last or (client.was_told and not is_over):
            return self.last + 1
        return self.last if is_over else None

    def take_late(self, now: float | None = None) -> list[Call]:
        """Return the late calls, or only those whose time is over, and forget them."""
        taken = [call for call in self.late if now is None or call.deadline <= now]
        self.late = [call for call in self.late if call not in taken]
        return taken

    def drop(self, client: Client) -> None:
        """Forget the calls of a client whose connection has ended."""
        self.late = [call for call in self.late if call.client is not client]


def _was_awaited(client: Client, transaction: Transaction) -> bool:
    """Return True for a transaction that has failed because this member did not come."""
    failure = transaction.failure
    return failure is not None and client.rank in (failure.late or [])
