"""A member's part in refits that are begun, and switched to later.

    trainer's ranks: `PendingRefits.begin` packs what changed, or all as if it had changed, and returns: the weights may
        change from now on
    a thread of each: the sizes, then the bytes; all have them, or nobody
    engines' ranks, between two steps: `PendingRefits.switch`, or `PendingRefits.roll_back`

A switch exchanges what changed with what is served, so that afterward the changes back are pending in the same memory.
"""

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from contextlib import ExitStack
from typing import Any, NamedTuple
from weakref import WeakMethod

import torch

from reshard.comm.background import in_background
from reshard.core.errors import ReshardError
from reshard.refit.changes.sent import WHOLE
from reshard.refit.copying.copies import event_now, wait_for_all_streams, wait_for_device
from reshard.refit.pending.exchange import PendingExchange
from reshard.refit.pending.report import BegunReport
from reshard.refit.pending.state import Linked, choice_of, state_of
from reshard.refit.pending.version import Arrived, Brought, PendingVersion
from reshard.refit.protocol.deltas import DeltaState, exchange_states
from reshard.refit.protocol.encoding import MOST_ADDRESS, exchange_json, is_number
from reshard.refit.trainer import Trainer


class Begun:
    """A refit that was begun. `why` it cannot become pending, as far as this member knows at once; empty if it may."""

    def __init__(self, why: str, outcome: "Future[BegunReport | str]") -> None:
        self.why, self._outcome = why, outcome

    @property
    def is_done(self) -> bool:
        """True once it is known what has become of it."""
        return self._outcome.done()

    def settle(self) -> None:
        """Wait until it is known what has become of it."""
        wait([self._outcome])

    def wait(self) -> BegunReport:
        """Return what has become of it, once that is known: a partner that does not come costs the connection's
        `timeout`. Raises ReshardError if it has failed."""
        outcome = self._outcome.result()
        if isinstance(outcome, str):
            raise ReshardError(outcome)
        return outcome


class Packed(NamedTuple):
    """A member's part of a refit that it begins: its state, and the exchange with what goes out, or the error with
    which that failed."""

    state: DeltaState
    exchange: PendingExchange | None
    verify: bool
    error: ReshardError | RuntimeError | None = None


class PendingRefits:
    """The refits that a link's member begins. `pending` is what an engine's rank has beside what it serves."""

    def __init__(self) -> None:
        self.pending: PendingVersion | None = None
        self._begun: Begun | None = None  # the last
        self._stream: Any = None  # in which a GPU sends and receives
        self._count = 0
        self._sent: tuple[int | None, int] | None = (
            None  # by a trainer's rank: the versions before and after the last
        )
        self._refused: tuple[int, str] | None = None  # refits until then, and why all could not be begun
        self._writes = 0  # of the engine's guard, when the last was begun

    # Beginning

    def begin(
        self, link: Linked, version: int | None, verify: bool, called: Callable[[], str] = lambda: ""
    ) -> Begun:
        """Begin a refit; see `Link.begin_refit`. `called` returns why a call of an engine has failed, empty while none
        has; see `RefitGroup.watching`."""
        self.settle()
        start, expected = time.perf_counter(), link.group.expected
        with ExitStack() as ends:
            ends.enter_context(link.group.one_call("begin a refit"))
            link.check_open()
            self.drop()
            self._count += 1
            self._writes = link.receiver.engine.guard.writes if link.receiver is not None else 0
            packed = self._packed(link, verify)
            event = event_now(link.device)
            seconds = time.perf_counter() - start
            rest = ends.pop_all()

        def brought() -> BegunReport | str:
            link.group.expected = expected  # which counts for the call that goes on here
            try:
                with rest, self._in_stream(link, event), link.group.watching(called):
                    return self._bring(link, version, packed, start, seconds)
            except (ReshardError, RuntimeError) as error:
                return str(error)  # and not what its traceback keeps

        why = str(packed.error or ("" if packed.state.is_whole else packed.state.why))
        self._begun = Begun(why, in_background(brought))
        return self._begun

    def _packed(self, link: Linked, verify: bool) -> "Packed":
        """Pack what changed, where this is a trainer's rank that may send that alone; else all, where there is room."""
        state = DeltaState(None, "")
        try:
            self._finish_step(link)
            state = state_of(link)
            since = WHOLE if state.holds is None and state.is_whole else state.holds
            exchange, why = self._exchange(link, since, verify) if since is not None else (None, state.why)
            state = DeltaState(None, why) if why else state
            return Packed(state, exchange, verify)
        except (ReshardError, RuntimeError) as error:  # which the others hear of
            return Packed(state, None, verify, error)

    def _finish_step(self, link: Linked) -> None:
        """Finish what a trainer's rank has put off, before anybody asks where its memory is, or reads it."""
        if link.sender is None or link.below is not None or link.broken or not link.agreed.delta:
            return
        source = link.sender.source
        source.check_current()
        if isinstance(source, Trainer) and source.has_pending_sync:
            source.sync_params()
        wait_for_all_streams(link.device, None)  # the optimizer's work

    def _exchange(self, link: Linked, since: int, verify: bool) -> tuple[PendingExchange | None, str]:
        """Return the exchange of what changed since a transaction, or of all (`WHOLE`), with all that goes out packed;
        or why there is none. A member that has no side takes no part in it."""
        sender = link.sender
        if link.group.rank not in link.agreed.participants:
            return None, ""
        senders = link.chain.senders
        exchange = senders[0].exchange_of_changes(PendingExchange, since) if senders else None
        if exchange is None:
            return None, "it shares its communicator with others, or has none"
        if sender is None:
            return exchange, ""
        size = link.chain.kept_bytes
        if since == WHOLE and self._refused is not None and self._refused[0] == link.refits:
            return None, self._refused[1]  # which only a refit changes: others would be asked in vain again
        if since == WHOLE and size > link.pending_bytes:
            limit = f"pending_bytes={link.pending_bytes:,}"
            return None, f"{link.chain.why}, and all, {size:,} bytes, takes more than {limit}"
        # What is kept becomes what is packed.
        link.chain.holds, link.chain.why = None, "a refit that was begun did not end"
        for changes in link.chain.changes:
            changes.begin(since)
        if verify and link.sent_digests is not None:
            link.sent_digests.begin()
        is_packed = exchange.pack_all(link.pending_bytes)
        if not link.keep_mapped:
            link.transports.free()
        if is_packed:
            return exchange, ""
        return None, f"its changes take more than pending_bytes={link.pending_bytes:,}"

    def _in_stream(self, link: Linked, packed: torch.cuda.Event | None) -> ExitStack:
        """Return a context in which this thread uses the device, in a stream that others do not wait for, from the
        event on with which all is packed."""
        device, contexts = link.device, ExitStack()
        if device.type == "cuda":
            contexts.enter_context(torch.cuda.device(device))
            if self._stream is None:
                self._stream = torch.cuda.Stream(device)
            if packed is not None:
                self._stream.wait_event(packed)
            contexts.enter_context(torch.cuda.stream(self._stream))
        return contexts

    def _bring(
        self, link: Linked, version: int | None, packed: "Packed", start: float, packing: float
    ) -> BegunReport:
        """Bring what was packed to the engines; every member calls this."""
        group, exchange, digests, arrived = link.group, packed.exchange, None, Arrived([])
        what = f"begun refit {self._count}"
        try:
            with group.transaction(what, f"begun refit of connection {link.number}"):
                if packed.error is not None:
                    raise packed.error
                agreed = group.prepare(version, "", packed.verify, link.broken)
                states = exchange_states(group, packed.state)
                choice, since = choice_of(link, states)
                why = choice.reason if since is None else ""
                if not why:
                    why = self._too_large(link, exchange)
                if not why and exchange is not None:
                    if group.verify and not packed.verify:
                        raise ReshardError("another member has given verify=True: give all the same")
                    exchange.since = WHOLE if since is None else since
                    link.bounded(exchange.run)
                    arrived = exchange.arrived()  # here, since others hear of it where that fails
                    digests = self._digests(link) if group.verify else None
                group.commit()
        except BaseException as error:
            link.clean_up()
            link.log.failed(what, time.perf_counter() - start, error)
            raise
        brought, before = Brought(agreed, group.transaction_number, link.agreed.origin), None
        if not why:
            link.chain.choice, before = choice, states[link.agreed.engines[0]].version
            self._take(link, brought, before, exchange, arrived, digests)
        elif link.chain.holds is None:
            link.chain.why = packed.state.why or why
            if packed.state.is_whole:
                self._refused = link.refits, why
        sent, received = (exchange.packed_bytes, exchange.received) if exchange is not None else (0, 0)
        total, reason = time.perf_counter() - start, why or choice.reason
        delta = link.chain.report() if link.sender is not None and not why else None
        report = BegunReport(agreed, not why, reason, packing, total, sent, received, delta, before)
        link.log.begun(report)
        return report

    def _take(
        self,
        link: Linked,
        brought: Brought,
        before: int | None,
        exchange: PendingExchange | None,
        arrived: Arrived,
        digests: Mapping[int, bytes] | None,
    ) -> None:
        """Note what a transaction has brought: a trainer's rank has sent it, an engine's has it beside what it
        serves, the version `before`."""
        if link.receiver is None or exchange is None:
            link.chain.hold(brought.version, brought.transaction)
            self._sent = before, brought.version
            link.version = brought.version
            return
        assert before is not None, "else nothing is pending"
        # What others have brought since has no transaction of this connection.
        holds = link.chain.holds if link.chain.writes == self._writes else None
        served = Brought(before, holds, link.receiver.engine.guard.origin)
        self.pending = PendingVersion(
            served, brought, brought, arrived, exchange.received, digests, self._writes
        )
        link.receiver.engine.guard.readers.append(WeakMethod(self.drop))

    def _too_large(self, link: Linked, exchange: PendingExchange | None) -> str:
        """Return, alike on all members, whose changes take more than all trainers' ranks allow; empty if nobody's
        do."""
        group, size = link.group, 0

        def learn() -> None:
            nonlocal size
            size = exchange.exchange_sizes() if exchange is not None else 0

        link.bounded(learn)
        own = {"bytes": size, "limit": link.pending_bytes}
        told = exchange_json(group, "pending", own)
        for rank, fields in enumerate(told):
            if not isinstance(fields, dict) or not all(
                is_number(fields.get(key), 0, MOST_ADDRESS) for key in own
            ):
                raise ReshardError(
                    f"{group.names[rank]} says {fields!r:.80} of its changes, which makes no sense"
                )
        limit = min(told[rank]["limit"] for rank in link.agreed.trainers)
        for rank in link.agreed.engines:
            if told[rank]["bytes"] > limit:
                size = told[rank]["bytes"]
                return f"the changes for {group.names[rank]} take {size:,} bytes, more than pending_bytes"
        return ""

    def _digests(self, link: Linked) -> dict[int, bytes] | None:
        """Post, or read, the digests of what a trainer's rank has packed; return those that were read."""
        if link.sent_digests is not None:
            link.sent_digests.post()
        return link.received_digests.read() if link.received_digests is not None else None

    @property
    def served(self) -> Brought | None:
        """The one of an engine rank's two versions that is served; None where none is pending."""
        return self.pending.served if self.pending is not None else None

    def last(self) -> Begun:
        """Return the refit that was begun last. Raises ReshardError where none was."""
        if self._begun is None:
            raise ReshardError("no refit was begun: call begin_refit first")
        return self._begun

    # Switching

    def check(self, link: Linked, version: int | None, ticket: str | None) -> PendingVersion:
        """Return what an engine's rank can switch to; see `Link.check_switch`."""
        pending = self._ready_to_swap(link, ticket)
        if version not in (None, pending.newer.version):
            raise ReshardError(f"version {pending.newer.version} is pending, and not version {version}")
        return pending

    def check_back(self, link: Linked, version: int | None, ticket: str | None) -> PendingVersion:
        """Return what an engine's rank can go back from; see `Link.check_roll_back`."""
        pending = self._ready_to_swap(link, ticket)
        if version not in (None, pending.older.version):
            raise ReshardError(
                f"version {pending.older.version} was served before version {pending.newer.version}, and not version "
                f"{version}: there is no way back to that"
            )
        return pending

    def switch(self, link: Linked, version: int | None, keep_caches: bool, ticket: str | None) -> int:
        """Serve the pending version; see `Link.switch`."""
        pending = self.check(link, version, ticket)
        if pending.served != pending.newer:
            start = time.perf_counter()
            self._swap(link, pending, keep_caches)
            if pending.digests is not None:
                self._compare(link, pending, pending.digests, keep_caches)
            self._serve(link, pending, start)
        return pending.served.version

    def roll_back(self, link: Linked, keep_caches: bool, version: int | None, ticket: str | None) -> int:
        """Serve again what was served before; see `Link.roll_back`."""
        if link.receiver is None:
            link.chain.holds, link.chain.why = None, "engines were rolled back"
            before, after = self._sent or (None, None)
            if link.version == after:
                link.version = before
            return link.version or 0
        pending = self.check_back(link, version, ticket)
        if pending.served == pending.newer:
            start = time.perf_counter()
            self._swap(link, pending, keep_caches)
            self._serve(link, pending, start)
        return pending.served.version

    def _ready_to_swap(self, link: Linked, ticket: str | None) -> PendingVersion:
        """Return what is pending. Raises ReshardError where that is nothing, was begun with another ticket, or somebody
        has written into the weights since."""
        receiver = link.receiver
        link.check_open()
        if receiver is None:
            raise ReshardError("this member has no engine: engines' ranks switch")
        transaction = link.group.transaction_of(ticket) if ticket is not None else None
        if self._begun is not None and not (report := self._begun.wait()).is_pending:
            raise ReshardError(f"no version is pending: {report.reason}; refit this engine")
        pending, guard = self.pending, receiver.engine.guard
        if pending is None or not guard.ready or guard.writes != pending.writes or receiver.has_moved():
            self.drop()
            raise ReshardError(
                "no version is pending: none was begun, or the engine's weights were moved, discarded or written by "
                "others since; refit this engine"
            )
        if transaction not in (None, pending.newer.transaction):
            raise ReshardError(
                f"the call comes late: version {pending.newer.version} was begun since, and is not what it means"
            )
        return pending

    def _swap(self, link: Linked, pending: PendingVersion, keep_caches: bool) -> None:
        """Exchange the two versions in the weights, which are not served before `_serve`."""
        assert link.receiver is not None
        engine = link.receiver.engine
        if not keep_caches:
            engine.check_idle()
        wait_for_all_streams(link.device, None)
        engine.guard.readers = [one for one in engine.guard.readers if one() != self.drop]
        engine.begin()
        pending.swap()
        engine.update_derived()
        if not keep_caches:
            engine.drop_caches()
        if not wait_for_device(link.device, link.group.timeout):
            raise ReshardError("the GPU is not done with a switch")

    def _serve(self, link: Linked, pending: PendingVersion, start: float) -> None:
        """Serve what is in the weights now."""
        assert link.receiver is not None
        engine = link.receiver.engine
        engine.guard.origin = pending.served.origin
        engine.end(pending.served.version)
        pending.writes = engine.guard.writes
        link.digest.forget()
        link.chain.hold(pending.served.version, pending.served.transaction)
        link.chain.why = "what it serves again came before all was sent"
        link.version = pending.served.version
        engine.guard.readers.append(WeakMethod(self.drop))
        link.log.switched(pending.served.version, pending.other.version, time.perf_counter() - start)

    def _compare(
        self, link: Linked, pending: PendingVersion, sent: Mapping[int, bytes], keep_caches: bool
    ) -> None:
        """Compare the weights with the digests that the trainer's ranks have `sent`; where they differ serve again what
        was served before, and raise ReshardError."""
        received, start = link.received_digests, time.perf_counter()
        assert received is not None
        received.begin({})
        try:
            received.compare(sent)
        except ReshardError as error:
            self._swap(link, pending, keep_caches)
            self._serve(link, pending, start)
            raise ReshardError(
                f"{error}; the engine serves version {pending.served.version} again"
            ) from error

    # Ending

    def drop(self) -> None:
        """Forget what is pending, and give its memory back."""
        self.pending = None

    def settle(self) -> None:
        """Wait until it is known what has become of the refit that was begun last, for another call of the
        members."""
        if self._begun is not None:
            self._begun.settle()
