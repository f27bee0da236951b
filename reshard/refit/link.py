"""A connection, and the refit: the protocol by which all members move the weights after an optimizer step."""

import logging
import operator
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass
from typing import Any

import torch

from reshard.comm.group import RefitGroup
from reshard.core.errors import ReshardError, first_line
from reshard.refit.addresses import AT_ONCE, located
from reshard.refit.agreement import Agreement, names_of
from reshard.refit.codecs import CODECS, PLAIN
from reshard.refit.copies import wait_for_device
from reshard.refit.protocol.checks import check_unmapped, gathered
from reshard.refit.receiver import Receiver
from reshard.refit.routes import CUDA_IPC, LOCAL, NCCL, SENT, STAGED
from reshard.refit.sender import Sender
from reshard.refit.tables import CODEC, bytes_of
from reshard.refit.transports.base import Incoming, Outgoing, Transport
from reshard.refit.transports.cuda_ipc import Pull
from reshard.refit.transports.nccl import Buckets
from reshard.refit.transports.staged import Staged
from reshard.refit.verification import ReceivedDigests, SentDigests

UNMAPPABLE = ": the trainer's memory cannot be mapped by other processes (expandable segments?)"
log = logging.getLogger("reshard")


@dataclass(frozen=True)
class RefitReport:
    """One refit as a member saw it: the version that the engine now has; seconds waiting for the others, moving bytes, and in
    all; bytes pulled within the process and from peers' memory, received through slabs of the same host and in buckets.

    `launches` are the kernels of ours that copied these bytes, sent them off, and made blocks of them; not those of a check, of
    torch, or of an engine that processes its layers anew.
    """

    version: int
    wait_seconds: float
    transfer_seconds: float
    total_seconds: float
    local_bytes: int
    peer_bytes: int
    staged_bytes: int
    bucket_bytes: int
    launches: int

    def to_dict(self) -> dict[str, Any]:
        """For logs."""
        return asdict(self)


class Link:
    """A connection; made by `connect`. `trainer` and `engine` are this member's sides of it."""

    def __init__(
        self,
        members: RefitGroup,
        agreed: Agreement,
        trainer: Sender | None,
        engine: Receiver | None,
        device: torch.device,
    ) -> None:
        self.members, self.agreed, self.trainer, self.engine, self.device = (
            members,
            agreed,
            trainer,
            engine,
            device,
        )
        self.sent_digests = SentDigests(trainer) if trainer is not None else None
        self.received_digests = ReceivedDigests(engine) if engine is not None else None
        self.keep_mapped = agreed.keep_mapped
        self.refits = 0
        self.version: int | None = None
        self.pull = Pull(engine.engine, members.rank, members.names, device) if engine is not None else None
        processes = [peer["pid"] for peer in agreed.peers]
        self.staged = Staged(members, device, agreed.bucket_bytes, processes)
        self.buckets = Buckets(members, agreed.participants, device, agreed.bucket_bytes)
        self.broken = False
        if engine is not None:
            engine.engine.timeout = members.timeout

    @property
    def _transports(self) -> list[Transport]:
        return [*([self.pull] if self.pull is not None else []), self.staged, self.buckets]

    # Connecting

    def _set_up(self) -> None:
        """Make the first tables, and agree on buckets with all members."""
        if self.engine is not None:
            self.engine.hear_answers()
        self._find_unmappable()
        outgoing, incoming = self._prepare()
        self.buckets.agree(outgoing.get(NCCL, {}), incoming.get(NCCL, {}))
        if self.pull is not None and self.buckets.group is not None:
            self.pull.go_aside()
        self._unmap()

    def _find_unmappable(self) -> None:
        """Where an inference rank cannot map a trainer's memory, as on the same host between containers, agree with all members that
        its bytes go by buckets."""
        if self.agreed.may_map:
            mine: list[tuple[int, str]] = []
            if self.engine is not None and self.pull is not None:
                peers = [rank for rank, way in self.engine.ways().items() if way == CUDA_IPC]
                mine = self.pull.unmappable({rank: self.engine.memory[rank] for rank in peers})
            said = gathered(self.members, "unmapped", mine)
            self.agreed.unmapped.update(check_unmapped(said, self.agreed.trainers, self.members.names))
        if self.engine is not None:
            for rank in self.engine.pieces:
                if why := self.agreed.why_apart(rank, self.members.rank):
                    names = self.members.names
                    log.warning(
                        "%s gets the bytes of %s in buckets: %s", names[self.members.rank], names[rank], why
                    )

    def _prepare(self) -> tuple[dict[str, dict[int, Outgoing]], dict[str, dict[int, Incoming]]]:
        """Hand the transports the copies of this member, from where everything is now; what goes out and
        comes in, by way."""
        outgoing = self.trainer.outgoing() if self.trainer is not None else {}
        incoming = self.engine.incoming() if self.engine is not None else {}
        if self.pull is not None:
            sent = [some for way in SENT for some in incoming[way].values()]
            self.pull.prepare({}, incoming[LOCAL] | incoming[CUDA_IPC], sent)
        for way, transport in ((STAGED, self.staged), (NCCL, self.buckets)):
            transport.prepare(outgoing.get(way, {}), incoming.get(way, {}))
        if partners := sorted(self.staged.outgoing.keys() | self.staged.incoming.keys()):
            why = "" if self.agreed.backend == STAGED else UNMAPPABLE
            log.info(
                "%s: bytes of %s are staged%s",
                self.members.names[self.members.rank],
                names_of(self.members, partners),
                why,
            )
        return outgoing, incoming

    def _unmap(self) -> None:
        """Let the trainers have their memory for themselves, where one of them wants that."""
        if not self.keep_mapped:
            for transport in self._transports:
                transport.release()

    # Refitting

    def refit(self, version: int | None = None, verify: bool = False) -> RefitReport:
        """Move the weights. Every member calls this; it returns when all have what they need.

        `version` is what both sides then carry; members that give one must give the same, and where nobody
        does it is one more than the last. `verify` compares digests of every piece, computed on both sides
        from their own memory; it is enough that one member asks for it.

        Raises ReshardError on every member where one fails or is late. Inference ranks that have begun to write
        then refuse to serve until a whole refit succeeded, since weights are written in place and nothing can be
        rolled back.
        """
        start = time.perf_counter()
        self.refits += 1
        try:
            with self.members.transaction(f"refit {self.refits}"):
                wanted = _checked(version)
                trainer_moved, engine_moved = self._ready()
                noted = self.trainer.memory_digest.hex() if self.trainer is not None else ""
                agreed = self.members.prepare(wanted, noted, verify)
                self._follow(trainer_moved, engine_moved)
                waited = time.perf_counter()
                if self.engine is not None:
                    self.engine.engine.begin()
                self._bounded(self._bring)
                moved_at = time.perf_counter()
                if self.members.verify:
                    self._verify()
                self._unmap()
                self.members.commit()
        except BaseException:
            self._clear_up()
            raise
        if self.engine is not None:
            self.engine.engine.end(agreed)
        if not self.keep_mapped:
            self.staged.close()
        self.version = agreed
        return self._report(agreed, waited - start, moved_at - waited, time.perf_counter() - start)

    def _report(self, version: int, waited: float, moved: float, total: float) -> RefitReport:
        local, peer = (self.pull.local_bytes, self.pull.peer_bytes) if self.pull is not None else (0, 0)
        staged, buckets = self.staged.received_bytes, self.buckets.received_bytes
        launches = sum(transport.launches for transport in self._transports)
        if self.engine is not None:
            launches += self.engine.slab.launches
        return RefitReport(
            version,
            waited,
            moved,
            total,
            local,
            peer,
            staged,
            buckets,
            launches,
        )

    def _ready(self) -> tuple[bool, bool]:
        """Finish what this GPU has to do first, and tell where the trainer's memory is if that changed;
        whether the trainer's side, and the engine's, have moved."""
        if self.trainer is not None and self.trainer.source.has_pending_sync:
            self._settle(self.trainer)
        if self.device.type == "cuda":
            # the optimizer's work, or the engine's last step, on whatever stream
            torch.cuda.synchronize(self.device)
        engine_moved = self.engine is not None and self.engine.engine.refresh_regions()
        return self.trainer is not None and self.trainer.tell_if_moved(), engine_moved

    def _settle(self, trainer: Sender) -> None:
        """Let the trainer's ranks finish what they have put off, together: not before all have come so far, since torch
        bounds their wait for each other by a limit of its own."""
        trainer.source.check_memory(self.device)
        self.members.post("settles")
        self.members.wait("settles", self.agreed.trainers)
        with self.members.reporting_alive():
            trainer.source.sync_params()
            if not wait_for_device(self.device, self.members.timeout):
                raise ReshardError(
                    f"the trainer's parameters were not gathered after its last step within {self.members.timeout:g} s"
                )

    def _follow(self, trainer_moved: bool, engine_moved: bool) -> None:
        """After all are here: find again what has moved, on either side, and map what was unmapped."""
        # After a refit that failed nobody knows how far the tables had been made.
        stays = not self.broken and not engine_moved and not (trainer_moved and self._sends())
        moved: list[int] = []
        if self.engine is not None and self.pull is not None:
            moved = self.engine.read_moved(self.members.notes_of(self.engine.pieces))
            pulled = {
                rank: self.engine.memory[rank]
                for rank, way in self.engine.ways().items()
                if way in (LOCAL, CUDA_IPC)
            }
            stays = stays and self.pull.follow(pulled)
        if not stays:
            self._prepare()
        if self.broken:
            self.buckets.renew()
        self.broken = False
        if moved and self.engine is not None and self.pull is not None:
            self.pull.keep_only(self.engine.memory)

    def _sends(self) -> bool:
        """Whether copies from here have to be made again where this trainer's rank has moved: it sends, or
        did before."""
        if self.trainer is None:
            return False
        return bool(self.staged.outgoing or self.buckets.sends) or any(
            way in SENT for way in self.trainer.ways().values()
        )

    def _bring(self) -> None:
        """Carry out all copies, and let the engine make of them what it makes itself."""
        self._go_through((AT_ONCE, *self._rounds()), self.engine.process_round if self.engine else None)
        if self.engine is not None:
            self.engine.engine.update_derived()

    def _bring_again(self) -> None:
        """Carry out once more the copies of what engines make in rounds, and compare it with what they then make."""
        self._go_through(self._rounds(), self.received_digests.add_round if self.received_digests else None)

    def _go_through(self, numbers: Sequence[int], work: Callable[[int], None] | None) -> None:
        """The copies of these rounds, and after each of this engine's `work`. Where that fails both go on, since others
        wait for copies, and the engine's other ranks for what they find together; what failed first is said at the end."""
        failure: ReshardError | None = None
        for number in numbers:
            self._run(number)
            if work is not None and self.engine is not None and number in self.engine.rounds:
                try:
                    work(number)
                except ReshardError as error:
                    failure = failure or error
        if failure is not None:
            raise failure

    def _bounded(self, work: Callable[[], None]) -> None:
        """Do it to its end. Raises ReshardError, naming who is silent, where a partner dies or stalls."""
        # A GPU's work is waited for below; over Gloo an exchange returns when it has ended, and NCCL's first when all have met.
        blocks = self.device.type == "cpu" or self.buckets.group is not None
        answering = self.members.reporting_alive() if blocks else nullcontext()
        try:
            with answering:
                work()
            done = wait_for_device(self.device, self.members.timeout, self.members.report_alive)
            reason = f"nothing arrived within {self.members.timeout:g} s"
        except RuntimeError as error:
            done, reason = False, first_line(error)
        if not done:
            self.members.check()
            silent = names_of(self.members, self.members.unresponsive_ranks())
            self.members.check()  # somebody may have said why meanwhile
            raise ReshardError(f"the exchange broke off ({reason}); {silent or 'no member'} is silent")

    def _rounds(self) -> list[int]:
        """The numbers of the rounds in which engines make what they serve, and this member takes part."""
        return sorted({number for transport in self._transports for number in transport.numbers})

    def _run(self, number: int) -> None:
        """Carry out the copies of a round."""
        try:
            for transport in self._transports:
                transport.run(number)
        finally:
            if self.pull is not None:
                self.pull.join()

    def _clear_up(self) -> None:
        """After a refit that failed: a communicator that lost a partner is not used again, the trainers' memory is let go,
        and the slab is given back, since a link that failed may not be used again, nor be closed."""
        self.broken = True
        if self.trainer is not None:
            self.trainer.forget()
        with suppress(ReshardError, RuntimeError):
            if wait_for_device(self.device, self.members.timeout):  # not under a kernel that reads it
                self._unmap()
                # With buckets a kernel may wait for a dead partner for ever, and the driver would wait for that.
                if self.buckets.group is None:
                    self.staged.close()

    def _verify(self) -> None:
        """Compare digests of every piece, which both sides take from their own memory by their own addresses,
        made anew."""
        if self.sent_digests is not None:
            self.sent_digests.begin()
        if self.received_digests is not None:
            self.received_digests.begin()
        if self.sent_digests is not None:
            self.sent_digests.post()
        # Nobody begins to exchange once more with one that has failed.
        self.members.gather("moved", b"")
        self._bounded(self._bring_again)
        if self.received_digests is not None:
            self.received_digests.compare(self.pull.at if self.pull is not None else {})

    def release(self) -> None:
        """Unmap the trainers' memory, where mappings were to stay (`connect(keep_mapped=True)`). Every member
        calls this."""
        self.keep_mapped, kept = False, self.keep_mapped
        try:
            with self.members.transaction("release"):
                self._unmap()
                self.members.commit()
        finally:
            self.keep_mapped = kept

    def describe(self) -> dict[str, Any]:
        """How this member gets its bytes, for logs: the backend, whether mappings are kept between refits, and for each
        trainer's rank the way (``same process``, ``cuda_ipc``, ``staged``, ``nccl``), the bytes that arrive, of these the
        bytes that are cast on their way (``float32 to bfloat16``), and why memory of the same host is not mapped (``apart``);
        what the engine serves quantized, how, and by which kernel; of blocks of which several ranks send parts their
        bytes, in how many rounds, and those of the slab in which they are put together; and what a refit does to each of the
        engine's tensors."""
        ways = []
        if self.engine is not None:
            memory = located(self.engine.engine.regions.values())
            for rank, way in self.engine.ways().items():
                table = self.engine.copies(rank, memory)
                cast = {
                    str(codec): bytes_of(table[table[:, CODEC] == number])
                    for number, codec in enumerate(CODECS)
                    if number != PLAIN and (table[:, CODEC] == number).any()
                }
                ways.append(
                    {
                        "from": self.members.names[rank],
                        "way": way,
                        "bytes": bytes_of(table),
                        "cast": cast,
                        "apart": self.agreed.why_apart(rank, self.members.rank),
                    }
                )
        return {
            "backend": self.agreed.backend,
            "keep_mapped": self.keep_mapped,
            "bucket_bytes": self.agreed.bucket_bytes,
            "ways": ways,
            "quantized": self.engine.engine.quantized_layers() if self.engine is not None else [],
            "parts": self.engine.slab.described() if self.engine is not None else {},
            "tensors": self.engine.engine.tensor_accounts() if self.engine is not None else [],
        }

    def close(self) -> None:
        """Unmap the peers' memory, and free what was staged."""
        for transport in self._transports:
            transport.close()


def _checked(version: Any) -> int | None:
    """Raise ReshardError where a version is no whole number from 0 on."""
    try:
        wanted = None if version is None else int(operator.index(version))
        wanted = -1 if isinstance(version, bool) else wanted
    except TypeError:
        wanted = -1
    if wanted is not None and wanted < 0:
        raise ReshardError(f"version is {version!r}, which is not a whole number from 0 on")
    return wanted
