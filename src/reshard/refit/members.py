"""The processes that take part in a refit: how they meet, take turns, and wait for each other's messages.

A connect or a refit is a *turn*, in which all members take part in the same order. Each turn has one verdict,
a key that all read and that only changes by compare-and-set: from nothing to `GO` (all are here), from there
to `DONE` (all have what they need), or, from either, to failed. So no member can take a turn for good that
another has given up, however late it comes.

No collective is used here, so that a process that dies or stalls is named by the others, within a time limit.
"""

import errno
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from reshard.core.errors import ReshardError, first_line, listed
from reshard.core.limits import check_seconds
from reshard.refit.endings import Ending, endings
from reshard.refit.hosts import address_towards, family_of, parsed, wait_for_server
from reshard.refit.messages import Messages
from reshard.refit.roll import ALIVE, LOOK_SECONDS, ROLL, Roll
from reshard.refit.store import bounded, of_process_group

MOST_MEMBERS = 1 << 20
NOTHING, GO, DONE, FAILED = "-", "go", "done", "failed"
TOLD = "told"
_made: Counter[str] = Counter()


class Members(Messages):
    """The trainer's and the inference engine's processes under one numbering.

    `store` is any torch store that all of them reach, `rank` and `size` count over both sides. `timeout` in
    seconds bounds every wait. Make one with `of_process_group` or `join`.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: float = 60.0) -> None:
        check_rank(rank, size)
        check_seconds(timeout, "timeout")
        super().__init__(store, rank, size)
        self.timeout = timeout
        self.process_group: dist.ProcessGroup | None = None
        self.local_address: str | None = None
        self.what = "connect"
        self.version: int | None = None
        self._note = ""
        self._ending: Ending | None = None  # of the first member
        self._failed: Callable[[], str] = str  # of what this process knows beside the store: nothing
        self._gone = NOTHING  # the verdict of this turn, as this member has last seen it
        self.roll = Roll(self)

    @staticmethod
    def of_process_group(name: str = "reshard", timeout: float = 60.0) -> "Members":
        """All ranks of this torch process group: trainer and engine in the same processes, or started by one
        launcher.

        Every rank makes the same ones in the same order; those of one name are told apart by counting them.
        """
        if not dist.is_initialized():
            raise ReshardError(
                "torch.distributed is not initialised: call init_process_group first, or use Members.join"
            )
        check_seconds(timeout, "timeout")
        # What earlier members of this name have left in the store must not be read again.
        _made[name] += 1
        store = dist.PrefixStore(f"{name}/{_made[name]}", of_process_group(timeout))
        members = Members(store, dist.get_rank(), dist.get_world_size(), timeout)
        members.process_group = dist.group.WORLD
        members._keep_the_store()
        return members

    @staticmethod
    def join(address: str, rank: int, size: int, timeout: float = 60.0) -> "Members":
        """Meet at ``host:port`` or ``[IPv6]:port``: rank 0 serves there, the others connect.

        A host of ``127.0.0.1``, ``::1`` or ``localhost`` is served to this host only. Raises ReshardError
        where nobody answers in time, and where another process has joined as this rank.
        """
        host, port = parsed(address)
        check_rank(rank, size)
        check_seconds(timeout, "timeout")
        deadline = time.monotonic() + timeout
        try:
            if rank == 0:
                listener = socket.create_server((host, port), family=family_of(host))
                options: dict[str, Any] = {"is_master": True, "master_listen_fd": listener.detach()}
            else:
                # torch's own client prints stacks, and waits twice as long
                wait_for_server(host, port, deadline)
                options = {}
            seconds = timedelta(seconds=max(1.0, deadline - time.monotonic()))
            store = bounded(
                lambda: dist.TCPStore(host, port, None, wait_for_workers=False, timeout=seconds, **options),
                port,
                timeout,
            )
        except (OSError, RuntimeError, ValueError, OverflowError) as error:
            who = "cannot serve" if rank == 0 else "found no member 0"
            taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
            hint = ": connect at another port, also after members were replaced" if taken else ""
            raise ReshardError(f"rank {rank} {who} at {address} ({first_line(error)}){hint}") from error
        members = Members(store, rank, size, timeout)
        members._register(address)
        members.local_address = address_towards(host, port)
        members._keep_the_store()
        return members

    @staticmethod
    def tell(address: str, sentence: str, timeout: float = 10.0) -> None:
        """Say to those who meet at an address, as none of them, that one of them will not come: their turn fails with that
        sentence, as do all later ones. Nothing where they meet no more, or nobody serves there within `timeout` seconds."""
        host, port = parsed(address)
        with suppress(OSError, RuntimeError, dist.DistError):
            wait_for_server(host, port, time.monotonic() + timeout)
            seconds = timedelta(seconds=max(1.0, timeout))
            store = bounded(
                lambda: dist.TCPStore(host, port, None, wait_for_workers=False, timeout=seconds),
                port,
                timeout,
            )
            store.set(TOLD, sentence)

    def _register(self, address: str) -> None:
        """Raise ReshardError where another process is this rank, or counts other members."""
        sizes = self._swap("size", "", str(self.size))
        if sizes != str(self.size):
            raise ReshardError(
                f"rank {self.rank} expects {self.size} members at {address}, another "
                f"{sizes}: give all the same number"
            )
        mine = f"{socket.gethostname()}, process {os.getpid()}, {time.time_ns()}"
        other = self._swap(f"joined/{self.rank}", "", mine)
        if other != mine:
            who = other.rpartition(", ")[0]
            raise ReshardError(
                f"rank {self.rank} has joined at {address} before ({who}): give each process "
                f"a rank of its own, and meet at another port after a restart"
            )

    # Turns

    @contextmanager
    def turn(self, what: str) -> Iterator[None]:
        """A connect or a refit. An error inside, whatever it is, is told to the others."""
        self.turns += 1
        self.what, self._note, self._gone = what, "", NOTHING
        try:
            yield
        except BaseException as error:
            self.fail(error)
            raise

    def go(self, version: int | None = None, note: str = "") -> int:
        """Wait for everyone before the first byte; the version that all agree on.

        None leaves it to the others; where nobody says one it is one more than the last. `note` is what
        `note_of` tells the others. Raises ReshardError where two say different ones, where one fails, or is
        late.
        """
        if version is not None:
            mine = f"{version} {self.names[self.rank]}"
            first = self._swap(self._key("version"), "", mine)
            if first.partition(" ")[0] != str(version):
                theirs, _, who = first.partition(" ")
                raise ReshardError(
                    f"{who} refits to version {theirs}, {self.names[self.rank]} to version "
                    f"{version}: give all the same"
                )
        self._note = note
        self._gone = self._arrive("here", f"did not come to {self.what}", NOTHING, GO)
        return int(self._gone.removeprefix(GO))

    def note_of(self, ranks: Iterable[int]) -> dict[int, str]:
        """After `go`: what these members noted."""
        ranks = list(ranks)
        marks = self._call(self.store.multi_get, [f"at/{rank}" for rank in ranks]) if ranks else []
        return {rank: mark.decode().split(" ", 2)[2] for rank, mark in zip(ranks, marks, strict=True)}

    def done(self) -> None:
        """Wait until everyone has what it needs. Raises ReshardError, for all, where one has failed, or is
        late."""
        self._arrive("done", f"did not end {self.what}", self._gone, DONE)
        if self._gone.startswith(GO):
            self.version = int(self._gone.removeprefix(GO))
        self._note_the_end()
        self.forget()

    def _arrive(self, step: str, late: str, before: str, after: str) -> str:
        """Count this member in. The last one moves the verdict on, for which all wait."""
        self._call(self.store.set, f"at/{self.rank}", f"{self.turns} {step} {self._note}")
        if self._call(self.store.add, self._key(step), 1) == self.size:
            if after == GO:
                after = f"{GO} {self._version_to_go_to()}"
            self._swap(self._key("verdict"), "" if before == NOTHING else before, after)
        told = time.monotonic()
        deadline, pause = told + self.timeout, 20e-6

        awaited = [*range(self.size)]

        def missing() -> list[int]:
            awaited[:] = self._before(step, awaited)  # who has come is not asked for again
            return [*awaited]

        with self.roll.waits_for(missing):
            while (verdict := self._verdict()) == before:
                now = time.monotonic()
                if now - told > LOOK_SECONDS:
                    told = now
                    self.roll.answer()
                    if heard := self._heard():
                        verdict = self._give_up(heard)
                        break
                if now > deadline:
                    said = self._late(missing, late)
                    if (verdict := self._verdict()) == before:
                        verdict = self._give_up(said)
                    break
                # Soon at first, since a refit takes milliseconds; then without a load on the store.
                time.sleep(pause)
                pause = min(pause * 1.2, 5e-3)
        self._raise_failed(verdict)
        return verdict

    def _version_to_go_to(self) -> int:
        if self._call(self.store.check, [self._key("version")]):
            return int(self._call(self.store.get, self._key("version")).decode().partition(" ")[0])
        return (self.version or 0) + 1

    def _before(self, step: str, ranks: Sequence[int]) -> list[int]:
        """Those of these members that have not come to a step of this turn."""
        never = self._absent(ranks, "at/{}".format)
        others = sorted({*ranks} - {*never})
        marks = self._call(self.store.multi_get, [f"at/{rank}" for rank in others]) if others else []
        for rank, mark in zip(others, marks, strict=True):
            turn, at, _ = mark.decode().split(" ", 2)
            if int(turn) < self.turns or (step == "done" and at != "done"):
                never.append(rank)
        return sorted(never)

    def silent(self) -> list[int]:
        """Those that do not answer, of all members."""
        others = [rank for rank in range(self.size) if rank != self.rank]
        return self.roll.silent(lambda: others)

    def check(self) -> None:
        """Raise ReshardError where a member has given this turn up."""
        self._raise_failed(self._verdict())

    @contextmanager
    def watching(self, failed: Callable[[], str]) -> Iterator[None]:
        """While it is open, this member also asks `failed` several times a second while it waits: what has become of
        others, which the store does not know. Where that gives a sentence, all members give up with it."""
        before, self._failed = self._failed, failed
        try:
            yield
        finally:
            self._failed = before

    def _heard(self) -> str:
        """Why nobody has to be waited for any more; empty while there is no such reason."""
        if failed := self._failed():
            return failed
        return self._call(self.store.get, TOLD).decode() if self._call(self.store.check, [TOLD]) else ""

    def fail(self, error: BaseException) -> None:
        """Tell the others why this member gives up."""
        with suppress(ReshardError):
            self._give_up(str(error) or type(error).__name__)
            self._note_the_end()

    def _give_up(self, sentence: str) -> str:
        """Fail this turn for everyone, unless that is decided already; the verdict as it is then."""
        verdict, failed = self._verdict(), f"{FAILED} {self.names[self.rank]}: {sentence}"
        while not verdict.startswith((FAILED, DONE)):
            now = self._swap(self._key("verdict"), "" if verdict == NOTHING else verdict, failed)
            verdict = now or NOTHING
        return verdict

    def _verdict(self) -> str:
        # Compared with what it never is, the value comes back as it is; a plain get would wait for one.
        return self._swap(self._key("verdict"), NOTHING, NOTHING)

    def _raise_failed(self, verdict: str) -> None:
        if verdict.startswith(FAILED):
            said = verdict.removeprefix(f"{FAILED} ")
            raise ReshardError(said.removeprefix(f"{self.names[self.rank]}: "))

    # Messages within a turn

    def read(self, key: str, rank: int) -> bytes:
        """What a rank published; waits for it. Raises ReshardError where some member failed or `rank` is
        late."""
        return self.read_all(key, [rank])[0]

    def read_all(self, key: str, ranks: Iterable[int]) -> list[bytes]:
        """What these ranks published, in their order; waits for them."""
        ranks = [*ranks]
        self.wait(key, ranks)
        return self.posted(key, ranks)

    def wait(self, key: str, ranks: Iterable[int]) -> None:
        """Wait until these ranks have published under `key`; raises ReshardError naming those that are late,
        or that failed."""
        awaited = [*ranks]

        def late() -> list[int]:
            awaited[:] = self.lacking(key, awaited)  # who has published is not asked for again
            return [*awaited]

        self._until(lambda: self.have_posted(key, awaited), late, key)

    def wait_for_count(self, key: str, rank: int, value: int) -> None:
        """Wait until a rank has come so far. Raises ReshardError where some member failed or `rank` is
        late."""

        def reached() -> bool:
            return self.have_posted(key, [rank]) and int(self.posted(key, [rank])[0]) >= value

        self._until(reached, lambda: [] if reached() else [rank], key)

    def _late(self, awaited: Callable[[], list[int]], what: str) -> str:
        """What is said where those that are awaited are late: of them, or of who keeps them."""
        ranks = awaited()
        silent = self.roll.silent(awaited)
        said = f"{what} within {self.timeout:g} s: dead, stalled or not started"
        if silent and not set(silent) & set(ranks):
            keeps, waits = (listed(self.names[rank] for rank in some) for some in (silent, ranks))
            return f"{keeps} is silent, and {waits}, which waits for it, {said}"
        return f"{listed(self.names[rank] for rank in ranks if rank in silent or not silent)} {said}"

    def _until(self, reached: Callable[[], bool], awaited: Callable[[], list[int]], key: str) -> None:
        """Wait until something is so, which `awaited` ranks keep from being so. Raises ReshardError where a member has
        given up, before and meanwhile, and where the time is over."""
        self.check()
        start = time.monotonic()
        pause, told = 50e-6, start
        with self.roll.waits_for(awaited):
            while not reached():
                now = time.monotonic()
                if now - told > LOOK_SECONDS:
                    self.check()
                    self.roll.answer()
                    if heard := self._heard():
                        self._raise_failed(self._give_up(heard))
                    told = now
                if now - start > self.timeout:
                    late = self._late(awaited, f"did not reach '{key.partition('/')[0]}'")
                    if reached():  # the last of them has come meanwhile
                        return
                    self.check()
                    raise ReshardError(late)
                time.sleep(pause)
                pause = min(pause * 1.2, 5e-3)

    def gather(self, key: str, payload: bytes) -> list[bytes]:
        """Publish, and get what everyone published, by rank."""
        self.post(key, payload)
        return self.read_all(key, range(self.size))

    def _left_by_all(self) -> list[str]:
        """By the first member; the verdict of a turn that failed stays, for who comes late."""
        if self.rank or self.turns < 2:
            return []
        before = f"{self.turns - 1}/"
        names = ["here", "done", "version", "seen", ROLL, ALIVE]
        if self.store.compare_set(f"{before}verdict", NOTHING, NOTHING).decode() == DONE:
            names.append("verdict")
        return [before + name for name in names]

    def _note_the_end(self) -> None:
        """That this member knows how the turn ended; of the first one, that the others may ask it."""
        if self.rank:
            with suppress(RuntimeError, dist.DistError):
                self.store.add(self._key("seen"), 1)
        elif self._ending is not None:
            self._ending.seen = self._key("seen")

    def _keep_the_store(self) -> None:
        """As the first member, for the others, beyond the end of these members in this process."""
        if self.rank == 0:
            self._ending = endings.begin(self, self.store, self.size, self.timeout)


def check_rank(rank: int, size: int) -> None:
    """Raise ReshardError where this is no rank of so many members."""
    if not (isinstance(rank, int) and isinstance(size, int)) or size > MOST_MEMBERS:
        raise ReshardError(
            f"rank {rank!r} of {size!r:.40} members is not a whole number of at most {MOST_MEMBERS:,}"
        )
    if not 0 <= rank < size:
        raise ReshardError(f"rank {rank} is not one of {size} members, which count from 0")
