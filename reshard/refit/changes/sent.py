"""Changes in place of all: what a transport that can send them has for that."""

from typing import Any, NamedTuple, Protocol, runtime_checkable

WHOLE = -1  # in place of a transaction: all travels as changes do, of whatever was there before


class Measured(NamedTuple):
    """The comparison of a trainer's rank's buckets with what it sent: `changed` of so many `words`, which take
    `delta_bytes` in place of `whole_bytes` on their way."""

    changed: int = 0
    words: int = 0
    delta_bytes: int = 0
    whole_bytes: int = 0

    def plus(self, other: "Measured") -> "Measured":
        """Return the sums of both."""
        return Measured(*(one + more for one, more in zip(self, other, strict=True)))


class Changes(Protocol):
    """The part of a transport that sends deltas: a trainer's rank keeps what it sent, and sends what changed
    since."""

    carries: bool  # it sends changes between some members of this connection; the same on all

    @property
    def keeps_sent(self) -> bool:
        """True if what this rank last sent is kept, as far as it has to be."""

    @property
    def bytes(self) -> int:
        """The bytes of memory that this takes once all is kept."""

    @property
    def measured(self) -> Measured:
        """The changes that the last refit has found."""

    def begin(self, since: int | None) -> None:
        """In the refit that begins send what changed since transaction `since`, all where it is None, and all as
        changes for `WHOLE`."""


@runtime_checkable
class SendsChanges(Protocol):
    """A transport that can send changes: `changes` is its part for that, in a connection with deltas."""

    changes: Changes | None

    def exchange_of_changes(self, kind: Any, since: int) -> Any:
        """Return an exchange, of a `kind`, of what changed since a transaction, which does not disturb others; None
        where this transport has none."""
