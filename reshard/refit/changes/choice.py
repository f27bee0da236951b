"""The choice whether a refit sends what changed since the last, or all: made alike on all members."""

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from reshard.comm.group import RefitGroup
from reshard.core.errors import ReshardError
from reshard.refit.agreement import Agreement
from reshard.refit.protocol.deltas import DeltaState, exchange_states
from reshard.refit.protocol.greeting import DELTAS
from reshard.refit.receiver import Receiver
from reshard.refit.report import RefitDelta
from reshard.refit.transports.base import Measured, Transport

OFF, ON, AUTO = DELTAS
TRIALS = 2  # refits of a kind that ``auto`` times before it compares: the first of each is slower
REST = 50  # refits that send all, once that was faster, before ``auto`` looks again: a look costs a few slower ones


def check_delta(value: Any, name: str = "delta") -> str:
    """Return the mode that `connect(delta=...)` stands for. Raises ReshardError where what was given as `name`
    is none."""
    if isinstance(value, bool):
        return ON if value else OFF
    if isinstance(value, str) and value == AUTO:
        return AUTO
    raise ReshardError(f"{name} is {value!r:.80}; it is true, false, or 'auto'")


class Choice(NamedTuple):
    """The choice for a refit: the transaction since which changes are sent, None where all is; whether what is sent
    is kept, for changes since; and why."""

    since: int | None
    keeps: bool
    reason: str


class Deltas:
    """A member's part in the chain of deltas of a connection.

    Each refit builds on the one before. Where any member's weights are not those of that one, since it failed
    there, or an engine has loaded or discarded weights since, all is sent, and a new chain begins.

    With ``auto`` a chain begins once refits that send all have been timed as they are without deltas, and goes on
    while it is faster. Else all is sent, and nothing kept or compared, for `REST` refits.
    """

    def __init__(self, agreed: Agreement, transports: Sequence[Transport], receiver: Receiver | None) -> None:
        self.agreed, self.transports, self.receiver = agreed, transports, receiver
        self.holds: int | None = None  # the transaction whose weights this member has
        self.why = "it has had no refit yet"
        self.version: int | None = None  # of these weights
        self.writes = 0  # of the engine's guard, when they were whole
        # What the last refits took that sent all and kept nothing, and those that sent changes.
        self.whole_seconds: deque[float] = deque(maxlen=TRIALS)
        self.delta_seconds: deque[float] = deque(maxlen=TRIALS)
        self.rested = 0  # refits of the former kind since the last of the latter
        self.choice = Choice(None, True, "")  # of the refit under way

    def begin(self, group: RefitGroup, broken: bool, moved: bool) -> None:
        """Agree with all members whether the refit that begins sends changes, and tell the transports.

        `broken`: the last refit failed; `moved`: this engine's tensors lie elsewhere than before.
        """
        states = exchange_states(group, self._state(broken, moved))
        self.choice = self._decide(states, group)
        self.holds, self.why = None, "its last refit failed"
        for transport in self.transports:
            transport.send_changes(self.choice.since, self.choice.keeps)

    def end(self, group: RefitGroup, seconds: float) -> None:
        """Note that the refit has brought all weights, in so many seconds."""
        self.version = group.version
        if self.choice.keeps:
            self.holds = group.transaction_number
        else:
            self.why = "it has kept nothing of its last refit"
        if self.receiver is not None:
            self.writes = self.receiver.engine.guard.writes
        if self.choice.since is not None:
            self.delta_seconds.append(seconds)
            self.rested = 0
        elif not self.choice.keeps:
            self.whole_seconds.append(seconds)
            self.rested += 1
        if self.rested == REST:
            self.delta_seconds.clear()  # which has a chain begin
            self.rested = 0

    def report(self) -> RefitDelta:
        """Return what the last refit did."""
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
        return sum(transport.kept_bytes for transport in self.transports)

    def _measured(self) -> Measured:
        measured = Measured()
        for transport in self.transports:
            measured = measured.plus(transport.measured)
        return measured

    def _state(self, broken: bool, moved: bool) -> DeltaState:
        holds, why = self.holds, self.why
        if broken:
            holds, why = None, "its last refit failed"
        elif holds is not None and not all(transport.keeps_sent for transport in self.transports):
            holds, why = None, "it is asked for other pieces than before"
        elif holds is not None and self.receiver is not None:
            engine = self.receiver.engine
            if not engine.ready or engine.guard.writes != self.writes or moved:
                holds, why = None, "its weights were moved, discarded, or written by others since"
        return DeltaState(holds, "" if holds is not None else why, *self._seconds())

    def _seconds(self) -> tuple[float | None, float | None]:
        """Return what a refit that sends all takes on a trainer's rank, and what one that sends changes does; None of
        what was not timed yet."""
        timed = self.whole_seconds, self.delta_seconds
        whole, delta = (min(times) if len(times) == TRIALS else None for times in timed)
        return (whole, delta) if self.agreed.is_trainer else (None, None)

    def _decide(self, states: Sequence[DeltaState], group: RefitGroup) -> Choice:
        """Return what the refit does; the same on all members."""
        if not any(transport.carries_changes for transport in self.transports):
            return Choice(None, True, "all is sent: no ranks exchange by NCCL or Gloo")
        if self.agreed.delta == AUTO and (reason := self._why_rest(states)):
            return Choice(None, False, reason)
        held = {rank: states[rank] for rank in self.agreed.participants}
        for rank, state in held.items():
            if state.holds is None:
                return Choice(None, True, f"all is sent: {group.names[rank]}: {state.why}")
        since = {state.holds for state in held.values()}
        if len(since) > 1:
            return Choice(None, True, "all is sent: members have weights of different refits")
        return Choice(since.pop(), True, f"changes since version {self.version}")

    def _why_rest(self, states: Sequence[DeltaState]) -> str:
        """Return why ``auto`` sends all and keeps nothing; empty where it sends changes, or times them."""
        whole = [states[rank].whole_seconds for rank in self.agreed.trainers]
        delta = [states[rank].delta_seconds for rank in self.agreed.trainers]
        if None in whole:
            return "all is sent, to time it"
        slowest_whole, slowest_delta = (max(filter(None, times), default=0.0) for times in (whole, delta))
        if None in delta or slowest_delta < slowest_whole:
            return ""
        times = f"{slowest_whole:.3g} s, and changes take {slowest_delta:.3g} s"
        return f"all is sent: it takes {times}, which is timed again after {REST} refits"
