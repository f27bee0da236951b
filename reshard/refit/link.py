"""A connection, and the refit: the protocol by which all members move the weights after an optimizer step."""

import logging
import operator
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext, suppress
from typing import Any, Protocol, TypeVar

import torch

from reshard.comm.client import TransactionFailedError
from reshard.comm.group import RefitGroup
from reshard.core.errors import ReshardError, first_line
from reshard.core.limits import PENDING_BYTES
from reshard.models.config_fields import ignored_config_fields
from reshard.refit.agreement import Agreement, names_of
from reshard.refit.changes.choice import RefitChain
from reshard.refit.copying.addresses import UNSTAGED
from reshard.refit.copying.copies import wait_for_all_streams, wait_for_device, wait_for_partners
from reshard.refit.engine import making_served, may_be_of_another
from reshard.refit.pending.refits import Begun, PendingRefits
from reshard.refit.protocol.memory import exchange_unmapped
from reshard.refit.protocol.notes import Note, notes
from reshard.refit.receiver import Receiver
from reshard.refit.reporting.describing import described
from reshard.refit.reporting.digest import RefitDigest
from reshard.refit.reporting.log import RefitLog
from reshard.refit.reporting.report import RefitReport
from reshard.refit.requesting import exchange_requests
from reshard.refit.sender import Sender
from reshard.refit.trainer import Trainer
from reshard.refit.transports import SENT
from reshard.refit.transports.together import Transports
from reshard.refit.verification import ReceivedDigests, SentDigests

log = logging.getLogger("reshard")
Result = TypeVar("Result")
SETTLE_SECONDS = 1.0  # for what a GPU was given before copies failed


class Below(Protocol):
    """The weights below those that a link brings, as those that an adapter adds to, by a `link` of their own."""

    link: "Link"

    def follow(self, version: int | None, verify: bool) -> int | None:
        """Bring them where an engine does not have them; return the version of what comes next. All members call
        this before each refit of the link above."""


class Link:
    """A connection, made by `connect`. `sender` and `receiver` are this member's sides of it."""

    def __init__(
        self,
        group: RefitGroup,
        agreed: Agreement,
        sender: Sender | None,
        receiver: Receiver | None,
        device: torch.device,
        keep_on_host: bool = False,
        pending_bytes: int = PENDING_BYTES,
    ) -> None:
        self.group, self.agreed, self.device = group, agreed, device
        self.number = group.transaction_number  # of this connection, the same on all members
        self.sender, self.receiver = sender, receiver
        self.sent_digests = SentDigests(sender) if sender is not None else None
        self.received_digests = ReceivedDigests(receiver) if receiver is not None else None
        self.keep_mapped = agreed.keep_mapped
        self.digest = RefitDigest(group, agreed, receiver)
        self.log = RefitLog(group, agreed)
        self.refits = 0
        self.version: int | None = None
        self.broken = False  # the last refit failed
        self.closed = False
        self.below: Below | None = None  # weights that this link's build on
        self.pending_bytes = pending_bytes
        self.begun = PendingRefits()
        engine = receiver.engine if receiver is not None else None
        self._context = agreed.context(group, device, engine, keep_on_host)
        self._is_planned = True  # of what engines hold, by all members
        self.transports = Transports(self._context)
        self.chain = RefitChain(agreed, [*self.transports], receiver)
        if receiver is not None:
            receiver.engine.timeout = group.timeout

    # Connecting

    def set_up(self) -> None:
        """Make the first tables, and let transports agree with all members."""
        if self.receiver is not None:
            self.receiver.read_answers()
        self._exchange_unmapped()
        self._prepare()
        self.transports.negotiate()
        self._release()

    def _exchange_unmapped(self) -> None:
        """Agree with all members whose memory cannot be mapped by whom, as between containers on
        the same host; its bytes go by another transport."""
        if self.agreed.may_map:
            unmapped = (
                self.transports.unmappable(self.receiver.memory_of) if self.receiver is not None else []
            )
            self.agreed.unmapped.update(exchange_unmapped(self.group, unmapped, self.agreed.trainers))
        if self.receiver is not None:
            names = self.group.names
            for rank, route in self.receiver.routes().items():
                if why := self.agreed.why_apart(rank, self.group.rank):
                    log.warning(
                        "%s gets the bytes of %s by %s: %s", names[self.group.rank], names[rank], route, why
                    )

    def _prepare(self) -> None:
        """Hand the transports the copies of this member, from where everything is now."""
        outgoing = self.sender.outgoing() if self.sender is not None else {}
        incoming = self.receiver.incoming() if self.receiver is not None else {}
        self.transports.prepare(outgoing, incoming)

    def _release(self) -> None:
        """Unmap others' memory, unless all trainers let it stay mapped."""
        if not self.keep_mapped:
            self.transports.release()

    # Refitting

    def refit(self, version: int | None = None, verify: bool = False) -> RefitReport:
        """Move the weights. Every member calls this; it returns when all have what they need.

        `version` is what both sides then carry; members that give one must give the same, and where
        nobody does it is one more than the last. `verify` compares digests of every piece, computed
        on both sides from their own memory; it is enough that one member asks for it.

        Raises ReshardError on every member where one fails or is late. Inference ranks that have
        begun to write then refuse to serve until a whole refit succeeded, since weights are written
        in place and nothing can be rolled back.
        """
        self.begun.settle()
        if self.below is not None:
            version = self.below.follow(version, verify)
        with self.group.one_call("refit"):
            return self._refit(version, verify)

    def _refit(self, version: int | None, verify: bool) -> RefitReport:
        start, is_prepared = time.perf_counter(), False
        self.refits += 1
        try:
            with self.group.transaction(f"refit {self.refits}", f"refit of connection {self.number}"):
                self.check_open()
                wanted = _checked(version)
                self.digest.forget()
                sender_moved, receiver_moved = self._find_moved()
                agreed_version = self.group.prepare(wanted, self._note().encode(), verify, self.broken)
                is_prepared = True
                self._follow(sender_moved, receiver_moved)
                self.chain.begin(self.group, self.group.anew, receiver_moved)
                prepared_at = time.perf_counter()
                if self.receiver is not None:
                    self.receiver.engine.begin()
                self.bounded(self._transfer)
                transferred_at = time.perf_counter()
                if self.group.verify:
                    self._verify()
                    self.digest.exchange()
                    if self.sender is not None and not isinstance(self.sender.source, Trainer):
                        # An engine serves meanwhile, and others may have written into it.
                        self.sender.source.check_current()
                self._release()
                self._commit()
                self._is_planned = True
        except BaseException as error:
            self.clean_up()
            if self.receiver is not None and is_prepared and self.receiver.engine.guard.shared:
                self.receiver.engine.guard.invalidate(
                    "weights of other engines that may be half-written, since a refit failed"
                )
            self.log.failed(f"{self.log.what} {self.refits}", time.perf_counter() - start, error)
            raise
        if self.receiver is not None:
            self.receiver.engine.guard.origin = self.agreed.origin
            self.receiver.engine.end(agreed_version)
        if not self.keep_mapped:
            self.transports.free()
        before, self.version = self.version, agreed_version
        self.chain.end(self.group)
        seconds = prepared_at - start, transferred_at - prepared_at, time.perf_counter() - start
        report = self._report(agreed_version, *seconds)
        side = self.receiver or self.sender
        if side is not None and self.log.is_first:
            sent = self.sender.bytes_read if self.sender is not None else 0
            self.log.succeeded(report, before, [*side.routes().values()], sent)
        return report

    def _commit(self) -> None:
        """Wait until all have what they need. A rank that does not learn how that ended refuses to serve, also what
        it had before: others of its engine may serve the new weights."""
        try:
            self.group.commit()
        except TransactionFailedError:
            raise
        except BaseException:
            if self.receiver is not None and len(self.agreed.engines) > 1:
                self.receiver.engine.guard.invalidate(
                    "weights that other ranks may not have, since it did not learn how a refit ended"
                )
            raise

    def _report(self, version: int, waited: float, transferred: float, total: float) -> RefitReport:
        work, changes = self.transports.work, self.chain.report()
        launches = work.launches + (self.receiver.slab.launches if self.receiver is not None else 0)
        received, digest = work.received_bytes, self.digest.text
        return RefitReport(version, waited, transferred, total, received, launches, changes, digest)

    def _find_moved(self) -> tuple[bool, bool]:
        """Finish what this GPU has to do first. Returns whether this trainer's rank has moved,
        which it then tells others, and whether this engine's has."""
        if self.sender is not None:
            if self.below is None:  # else that has looked, before the weights below moved
                self.sender.source.check_current()
            self.sender.sync_params()
        # The optimizer's work, or the engine's last step.
        if not wait_for_all_streams(self.device, self.group.timeout if self.broken else None):
            raise ReshardError(
                f"the GPU of {self.group.names[self.group.rank]} is not done within {self.group.timeout:g} s: it may "
                f"wait for a partner that was lost in the refit before; start this process again"
            )
        if self.receiver is not None:
            self.receiver.check_taken()
            self.receiver.engine.check_idle()
        receiver_moved = self.receiver is not None and self.receiver.find_moved()
        return self.sender is not None and self.sender.post_if_moved(), receiver_moved

    def _note(self) -> Note:
        """Return what this member says of itself before a refit."""
        holds_others = self.receiver is not None and self.receiver.holds_others()
        memory_digest = self.sender.memory_digest if self.sender is not None else b""
        return Note(memory_digest, holds_others or not self._is_planned)

    def _plan_anew(self) -> None:
        """Plan what engines hold now; what is kept to send changes belongs to the old plan, so all is sent."""
        self._is_planned = False  # until a refit by the new plan has succeeded
        self.transports.close(self.broken)
        if self.sender is not None:
            self.sender.forget()
        with ignored_config_fields(*self.agreed.ignored, recorded=True):
            exchange_requests(self.group, self.agreed, self.sender, self.receiver)
        self.transports = Transports(self._context)
        self.chain = RefitChain(self.agreed, [*self.transports], self.receiver)
        self.chain.why = "engines hold other boxes than before"
        self.sent_digests = SentDigests(self.sender) if self.sender is not None else None
        self.received_digests = ReceivedDigests(self.receiver) if self.receiver is not None else None
        self.set_up()

    def _follow(self, sender_moved: bool, receiver_moved: bool) -> None:
        """Refresh addresses on both sides, and map again what was unmapped; where engines hold other boxes, plan
        anew."""
        anew = self.group.anew
        if anew and not self.broken:  # it has missed a refit that failed for the others, who start anew
            self._abort()
        noted = notes(self.group)
        if any(note.anew for note in noted.values()):
            self._plan_anew()
            if self.receiver is not None and not self.transports.update_addresses(self.receiver.memory_of):
                self._prepare()  # of what `set_up` has unmapped
            self.broken = False
            return
        # After a refit that failed nobody knows how far the tables had been made.
        tables_hold = not anew and not receiver_moved and not (sender_moved and self._sends())
        moved: list[int] = []
        if self.receiver is not None:
            moved = self.receiver.read_moved(noted)
            tables_hold = tables_hold and self.transports.update_addresses(self.receiver.memory_of)
        if not tables_hold:
            self._prepare()
        if anew:
            self.transports.negotiate(anew=True)
        if moved and self.receiver is not None:
            self.transports.release(but=self.receiver.memory)
        self.broken = False

    def _sends(self) -> bool:
        """Return True where a transport has to make its copies again if this trainer's rank has
        moved: it sends, or did before."""
        if self.sender is None:
            return False
        return self.transports.work.is_sending or any(
            route in SENT for route in self.sender.routes().values()
        )

    def _transfer(self) -> None:
        """Carry out all copies, and let the engine process the rounds that it processes itself."""
        self._run_rounds((UNSTAGED, *self._rounds()), self.receiver.process_round if self.receiver else None)
        if self.receiver is not None:
            self._wait_for_partners()
            with making_served(self.receiver.engine):
                self.receiver.engine.update_derived()
                self.receiver.engine.drop_caches()

    def _transfer_rounds_again(self) -> None:
        """Carry out once more the copies of the rounds that engines process, for a verification of
        what they make of them."""
        add_round = self.received_digests.add_round if self.received_digests is not None else None
        self._run_rounds(self._rounds(), add_round)

    def _run_rounds(self, numbers: Sequence[int], work: Callable[[int], None] | None) -> None:
        """Run the copies of these rounds, and after each of this engine's `work`.

        Where work fails, all the same the rest is run, since others wait for copies; and where copies fail, the
        rest of the work is done, on whatever is there: the engine's other ranks may wait for this one in it,
        with a collective that the next one would be taken for. The first failure is raised at the end.
        """
        failure: ReshardError | RuntimeError | None = None
        cut_off = False  # copies have failed
        of_engine = self.receiver.rounds if self.receiver is not None else set()
        for number in numbers:
            own = work if number in of_engine else None
            try:
                if not cut_off:
                    self.transports.run(number)
                    if own is not None:
                        self._wait_for_partners()
            except (ReshardError, RuntimeError) as error:
                failure, cut_off = failure or error, True
                if not wait_for_device(self.device, SETTLE_SECONDS):
                    raise  # a kernel waits for a partner that is gone, and work would wait for the kernel
            if own is not None and self.receiver is not None:
                try:
                    with making_served(self.receiver.engine):
                        own(number)
                except ReshardError as error:
                    failure = failure or error
        if failure is not None:
            try:
                raise failure
            finally:
                failure = None  # else it and its traceback, with all that was under way, keep each other

    def _rounds(self) -> list[int]:
        """Return the numbers of the rounds in which this member takes part, besides `UNSTAGED`."""
        return sorted(self.transports.work.numbers)

    def _wait_for_partners(self) -> None:
        """Wait until a GPU that may wait for a partner has what it waits for: before work in which this process
        waits for the GPU with no limit."""
        if self.transports.work.is_blocking:
            wait_for_partners(self.device, self.group)

    def bounded(self, work: Callable[[], Any]) -> None:
        """Do work to its end. Raises ReshardError, naming the ranks that do not respond, where a
        partner dies or stalls."""
        # On a GPU work is only enqueued, and waited for below, unless a transport blocks.
        blocks = self.device.type == "cpu" or self.transports.work.is_blocking
        try:
            with self.group.reporting_alive() if blocks else nullcontext():
                work()
            wait_for_partners(self.device, self.group)
            return
        except RuntimeError as error:
            reason = first_line(error)
        except ReshardError as error:
            if len(self.agreed.engines) == 1 or not may_be_of_another(error):
                raise
            if silent := self._silent_members():
                raise ReshardError(f"{error}; {silent} is silent") from error
            raise
        raise ReshardError(
            f"the exchange broke off ({reason}); {self._silent_members() or 'no member'} is silent"
        )

    def _silent_members(self) -> str:
        """Return the names of members that do not respond. Raises ReshardError if somebody has said why this failed."""
        self.group.check()
        unresponsive = names_of(self.group, self.group.unresponsive_ranks())
        self.group.check()  # somebody may have said why meanwhile
        return unresponsive

    def clean_up(self) -> None:
        """After a refit that failed: unmap the trainers' memory, and give everything back, since a link
        that failed may not be used again, nor be closed."""
        if self.sender is not None:
            self.sender.forget()
        self._abort()

    def _abort(self) -> None:
        """Unmap the trainers' memory, and end and give back what transports have."""
        self.broken = True
        self.transports.abort()
        with suppress(ReshardError, RuntimeError):
            if wait_for_device(self.device, self.group.timeout):  # not under a kernel that reads it
                self._release()
                # A kernel of torch's own communicator may wait for a dead partner for ever, and the
                # driver would wait for that.
                if not self.transports.work.is_blocking:
                    self.transports.close()

    def _verify(self) -> None:
        """Compare digests of every piece, which both sides take from their own memory by addresses
        looked up anew."""
        if self.sent_digests is not None:
            self.sent_digests.begin()
        if self.received_digests is not None:
            self.received_digests.begin(self.transports.work.shards or {})
        if self.sent_digests is not None:
            self.sent_digests.post()
        # Nobody begins to transfer once more with one that has failed.
        self.group.gather("moved", b"")
        self.bounded(self._transfer_rounds_again)
        if self.received_digests is not None:
            self.received_digests.compare(self.received_digests.read())

    # Refits that are begun, and switched to later

    def begin_refit(
        self, version: int | None = None, verify: bool = False, *, called: Callable[[], str] = lambda: ""
    ) -> Begun:
        """Begin a refit, of what changed, which engines do not serve yet. Every member calls this.

        On a trainer's rank it returns once the changes are packed: the weights may change from then on. The bytes
        travel in the background, from memory of at most ``pending_bytes``, while an engine serves; `Begun.wait` says
        what has become of it. For `version` and `verify`, which all members give alike, see `refit`; digests are taken
        of the weights that are packed, and compared when an engine switches. `called` returns a sentence once a call
        of an engine has failed, which then does not come.

        Where the changes have nothing to build on, since a connection is new or engines went back, all travels so, if
        it takes no more memory. Where nothing can (an engine serves no version yet, some bytes go by another backend
        than NCCL or Gloo, there is too much of it), nothing is brought, `Begun.wait` says why, and `refit` brings all.
        """
        return self.begun.begin(self, _checked(version), verify, called)

    def check_switch(self, version: int | None = None, *, ticket: str | None = None) -> None:
        """Raise ReshardError unless this engine's rank can `switch` with these arguments: for engines of several ranks,
        which ask all before the first switches."""
        self._alone("check a switch", lambda: self.begun.check(self, _checked(version), ticket))

    def check_roll_back(self, version: int | None = None, *, ticket: str | None = None) -> None:
        """Raise ReshardError unless this engine's rank can `roll_back` with these arguments, as `check_switch` does."""
        self._alone("check a roll back", lambda: self.begun.check_back(self, _checked(version), ticket))

    def switch(
        self, version: int | None = None, *, keep_caches: bool = False, ticket: str | None = None
    ) -> int:
        """Serve the version that a refit was begun with, on an engine's rank, between two steps of its model; return
        it. What was served before is kept until the next refit, for `roll_back`. With the `ticket`
        (`RefitGroup.ticket`) that the trainer's rank had when it began the refit, a call that comes late switches to
        nothing that was begun since.

        Nothing is waited for but this GPU, so whoever calls the engines has to see that all switch, or roll back those
        that did. With `keep_caches` the engine is not asked to drop what it has computed from the weights before, and
        may have requests under way.

        Raises ReshardError, with the engine as it was, where no such version is pending, or, after ``verify=True``, the
        weights are not those of the trainer.
        """
        return self._alone("switch", lambda: self.begun.switch(self, _checked(version), keep_caches, ticket))

    def roll_back(
        self, version: int | None = None, *, keep_caches: bool = False, ticket: str | None = None
    ) -> int:
        """Serve what was served before `switch`, bit for bit, on an engine's rank; return its version, which is
        `version` if that is given. Does nothing where the engine has not switched. With the `ticket` that the trainer's
        rank had when it began what is gone back from, a call that comes late goes back from nothing that was begun
        since. On a trainer's rank it says that engines do that: the next refit brings all, and nothing can be begun
        before.

        Raises ReshardError, with the engine as it was, where another version was served before, or what is pending has
        another ticket."""
        return self._alone(
            "roll back", lambda: self.begun.roll_back(self, keep_caches, _checked(version), ticket)
        )

    def refuse_to_serve(self, what: str) -> None:
        """Have this engine's rank refuse to serve `what` it holds, until the next refit."""
        if self.receiver is not None:
            self.receiver.engine.guard.invalidate(what)

    def _alone(self, what: str, work: Callable[[], Result]) -> Result:
        """Return what work returns that needs no other member, while no call that does goes on."""
        self.begun.settle()
        with self.group.one_call(what):
            return work()

    # Between refits

    def release(self) -> None:
        """Unmap the trainers' memory, where mappings were to stay (`connect(keep_mapped=True)`).
        Every member calls this."""
        self.begun.settle()
        if self.below is not None:
            self.below.link.release()
        with self.group.one_call("release"):
            self.keep_mapped, kept = False, self.keep_mapped
            try:
                with self.group.transaction("release", f"release of connection {self.number}"):
                    self._release()
                    self.group.commit()
            finally:
                self.keep_mapped = kept

    def describe(self) -> dict[str, Any]:
        """Return how this member gets its bytes, for logs.

        ``backend``, ``keep_mapped`` and ``bucket_bytes`` are what was agreed on; what
        `reshard.refit.changes.choice.RefitChain.described` says comes after. ``routes``
        says for each trainer's rank (``from``) the ``route`` (``local``, ``cuda_ipc``, ``staged``,
        ``nixl``, ``nccl``), ``through`` which other inference ranks some come, the ``bytes``
        that arrive, those of them that are ``cast`` on their way (``float32 to bfloat16``), and why memory of
        the same host is not mapped (``apart``). ``sends`` says of a trainer's rank what goes ``to`` which inference
        ranks, in how many ``pieces``: the first in each list gets it from here, by the ``route``, each other one from
        the one before.
        ``quantized`` is what the engine serves quantized, ``parts`` the blocks that are put
        together of several ranks' parts, and ``tensors`` what a refit does to each of the engine's
        tensors. ``digest`` is that of a verified refit, if this rank serves its part of it now, which it reads for
        this; else None, as on a trainer's rank. ``weights`` is this of the weights below an adapter.
        """
        return described(self)

    def check_open(self) -> None:
        """Raise ReshardError once the link is closed."""
        if self.closed:
            raise ReshardError("this connection is closed: call connect again")

    def close(self) -> None:
        """Unmap the peers' memory, free what was staged and what was kept of what was sent, and end the communicator of
        NCCL or Gloo, if this connection made one; it cannot be used again. The group stays, and with it the port at
        which its members have met, until it is closed, too (`RefitGroup.close`). vLLM gets the slots of an adapter
        back, which it serves until it needs them for others."""
        self.begun.settle()
        try:
            with self.group.one_call("close"):
                self.give_back()
        finally:
            if self.below is not None:
                self.below.link.close()

    def give_back(self) -> None:
        """Do what `close` does, within a call of the group's that goes on."""
        self.closed = True
        self.begun.drop()
        with ExitStack() as parts:  # each is given back also if another fails
            if self.receiver is not None:
                parts.callback(self.receiver.close)
            parts.callback(self.transports.close, self.broken)


def _checked(version: Any) -> int | None:
    """Return a version. Raises ReshardError where it is no whole number from 0 on."""
    try:
        wanted = None if version is None else int(operator.index(version))
        wanted = -1 if isinstance(version, bool) else wanted
    except TypeError:
        wanted = -1
    if wanted is not None and wanted < 0:
        raise ReshardError(f"version is {version!r}, which is not a whole number from 0 on")
    return wanted
