"""The choice whether a refit sends what changed since the last, or all: made alike on all members."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from reshard.comm.group import RefitGroup
from reshard.refit.agreement import Agreement
from reshard.refit.changes.sent import Changes, Measured, SendsChanges
from reshard.refit.protocol.deltas import DeltaState, exchange_states
from reshard.refit.receiver import Receiver
from reshard.refit.reporting.report import RefitDelta


class Choice(NamedTuple):
    """The choice for a refit: the transaction since which changes are sent, None where all is; and why."""

    since: int | None
    reason: str


class RefitChain:
    """A member's part in the chain of deltas of a connection, which has none where nobody wants deltas.

    Each refit builds on the one before. Where any member's weights are not those of that one, since it failed
    there, or an engine has loaded or discarded weights since, all is sent, and a new chain begins.
    """

    def __init__(self, agreed: Agreement, transports: Sequence[Any], receiver: Receiver | None) -> None:
        self.agreed, self.receiver = agreed, receiver
        self.senders = [
            one for one in transports if isinstance(one, SendsChanges) and one.changes is not None
        ]
        self.changes: list[Changes] = [one.changes for one in self.senders if one.changes is not None]
        self.holds: int | None = None  # the transaction whose weights this member has
        self.why = "it has had no refit yet"
        self.version: int | None = None  # of these weights
        self.writes = 0  # of the engine's guard, when they were whole
        self.choice = Choice(None, "")  # of the refit under way

    def begin(self, group: RefitGroup, broken: bool, moved: bool) -> None:
        """Agree with all members whether the refit that begins sends changes, and tell those that send them.

        `broken`: the last refit failed; `moved`: this engine's tensors lie elsewhere than before.
        """
        if not self.agreed.delta:
            return
        states = exchange_states(group, self.state(broken, moved))
        choice = self.decide(states, group)
        self.choice = Choice(None, f"all is sent: {choice.reason}") if choice.since is None else choice
        self.holds, self.why = None, "its last refit failed"
        for changes in self.changes:
            changes.begin(self.choice.since)

    def end(self, group: RefitGroup) -> None:
        """Note that the refit has brought all weights."""
        if self.agreed.delta:
            self.hold(group.version, group.transaction_number)

    def hold(self, version: int | None, transaction: int | None) -> None:
        """Note that this member has the weights of a version, which a transaction has brought; not known which for
        None."""
        self.version, self.holds = version, transaction
        if self.receiver is not None:
            self.writes = self.receiver.engine.guard.writes

    def report(self) -> RefitDelta | None:
        """Return what the last refit did."""
        if not self.agreed.delta:
            return None
        measured = self._measured()
        return RefitDelta(
            self.choice.since is not None,
            self.choice.reason,
            measured.changed / measured.words if measured.words else None,
            measured.delta_bytes,
            measured.whole_bytes,
            self.kept_bytes,
        )

    @property
    def kept_bytes(self) -> int:
        """The bytes of memory in which this member keeps what it sent."""
        return sum(changes.bytes for changes in self.changes)

    def described(self) -> dict[str, Any]:
        """Return what `Link.describe` says of it: whether ``delta`` was agreed on, and in ``kept_bytes`` the memory in
        which this member keeps what it sent."""
        return {"delta": self.agreed.delta, "kept_bytes": self.kept_bytes}

    def _measured(self) -> Measured:
        measured = Measured()
        for changes in self.changes:
            measured = measured.plus(changes.measured)
        return measured

    def state(self, broken: bool, moved: bool) -> DeltaState:
        """Return what this member tells of its weights; for the arguments see `begin`."""
        holds, why = self.holds, self.why
        if broken:
            holds, why = None, "its last refit failed"
        elif holds is not None and not all(changes.keeps_sent for changes in self.changes):
            holds, why = None, "it is asked for other pieces than before"
        elif holds is not None and self.receiver is not None:
            engine = self.receiver.engine
            if not engine.ready or engine.guard.writes != self.writes or moved:
                holds, why = None, "its weights were moved, discarded, or written by others since"
        return DeltaState(holds, "" if holds is not None else why)

    def decide(self, states: Sequence[DeltaState], group: RefitGroup) -> Choice:
        """Return what a refit does, and why all has to be sent, where it has; the same on all members."""
        if not any(changes.carries for changes in self.changes):
            return Choice(None, "no ranks exchange by NCCL or Gloo")
        held = {rank: states[rank] for rank in self.agreed.participants}
        for rank, state in held.items():
            if state.holds is None:
                return Choice(None, f"{group.names[rank]}: {state.why}")
        since = {state.holds for state in held.values()}
        if len(since) > 1:
            return Choice(None, "members have weights of different refits")
        return Choice(since.pop(), f"changes since version {self.version}")
