"""The choice whether a refit sends what changed since the last, or all: made alike on all members."""

from collections.abc import Sequence
from typing import Any

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


def check_delta(value: Any, name: str = "delta") -> str:
    """Return the mode that `connect(delta=...)` stands for. Raises ReshardError where what was given as `name`
    is none."""
    if isinstance(value, bool):
        return ON if value else OFF
    if isinstance(value, str) and value == AUTO:
        return AUTO
    raise ReshardError(f"{name} is {value!r:.80}; it is true, false, or 'auto'")


class Deltas:
    """A member's part in the chain of deltas of a connection.

    Each refit builds on the one before. Where any member's weights are not those of that one, since it failed
    there, or an engine has loaded or discarded weights since, all is sent, and a new chain begins.
    """

    def __init__(self, agreed: Agreement, transports: Sequence[Transport], receiver: Receiver | None) -> None:
        self.agreed, self.transports, self.receiver = agreed, transports, receiver
        self.holds: int | None = None  # the transaction whose weights this member has
        self.why = "it has had no refit yet"
        self.version: int | None = None  # of these weights
        self.writes = 0  # of the engine's guard, when they were whole
        # What refits took: that sent all, and that sent changes.
        self.whole_seconds: list[float] = []
        self.delta_seconds: list[float] = []
        self.delta_bytes = 0  # that this rank sent in the last of the latter
        self.since: int | None = None  # of the refit under way
        self.reason = ""

    def begin(self, group: RefitGroup, broken: bool, moved: bool) -> None:
        """Agree with all members whether the refit that begins sends changes, and tell the transports.

        `broken`: the last refit failed; `moved`: this engine's tensors lie elsewhere than before.
        """
        states = exchange_states(group, self._state(broken, moved))
        self.since, self.reason = self._decide(states, group)
        self.holds, self.why = None, "its last refit failed"
        for transport in self.transports:
            transport.send_changes(self.since)

    def end(self, group: RefitGroup, seconds: float) -> None:
        """Note that the refit has brought all weights, in so many seconds."""
        self.holds, self.version = group.transaction_number, group.version
        if self.receiver is not None:
            self.writes = self.receiver.engine.guard.writes
        if self.since is None:
            self.whole_seconds.append(seconds)
        else:
            self.delta_seconds.append(seconds)
            self.delta_bytes = self._measured().delta_bytes

    def report(self) -> RefitDelta:
        """Return what the last refit did."""
        measured = self._measured()
        return RefitDelta(
            self.since is not None,
            self.reason,
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
        """Return what a refit that sends all takes, and what one that sends what changed should: what it
        takes besides the link, and the bytes that were found to have changed at the link's rate."""
        if len(self.whole_seconds) < TRIALS or not self.agreed.is_trainer:
            return None, None
        whole, measured = min(self.whole_seconds[-TRIALS:]), self._measured()
        if len(self.delta_seconds) < TRIALS:
            return whole, None
        per_byte = whole / max(1, measured.whole_bytes)
        beside = max(0.0, min(self.delta_seconds[-TRIALS:]) - self.delta_bytes * per_byte)
        return whole, beside + measured.delta_bytes * per_byte

    def _decide(self, states: Sequence[DeltaState], group: RefitGroup) -> tuple[int | None, str]:
        """Return the transaction since which changes are sent, None where all is, and why."""
        if not any(transport.carries_changes for transport in self.transports):
            return None, "all is sent: no ranks exchange by NCCL or Gloo"
        held = {rank: states[rank] for rank in self.agreed.participants}
        for rank, state in held.items():
            if state.holds is None:
                return None, f"all is sent: {group.names[rank]}: {state.why}"
        since = {state.holds for state in held.values()}
        if len(since) > 1:
            return None, "all is sent: members have weights of different refits"
        if self.agreed.delta == AUTO:
            whole = [states[rank].whole_seconds for rank in self.agreed.trainers]
            delta = [states[rank].delta_seconds for rank in self.agreed.trainers]
            if None in whole:
                return None, "all is sent, to time it"
            if None not in delta:
                slowest_whole, slowest_delta = (
                    max(filter(None, times), default=0.0) for times in (whole, delta)
                )
                if slowest_delta >= slowest_whole:
                    times = f"{slowest_whole:.3g} s, and changes would take {slowest_delta:.3g} s"
                    return None, f"all is sent: it takes {times}"
        return since.pop(), f"changes since version {self.version}"
