"""The processes that take part in a refit: how they meet, take part in transactions, and wait for each other's messages.

A connect or a refit is a *transaction*, in which all members take part in the same order. The first member's process has a hub
(`reshard.comm.hub`), to which every member has one authenticated connection; it decides how each transaction ends, once for all.

No collective is used here, so that a process that dies or stalls is named by the others, within a time limit.
"""

import errno
import itertools
import json
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from reshard.comm.background import in_background
from reshard.comm.channel import BrokenChannelError, Channel, Message, WrongSecretError, connect
from reshard.comm.hosts import BACKLOG, family_of, listener_for, parsed
from reshard.comm.hub import ALIVE_SECONDS, Hub
from reshard.comm.secret import HOW, given_secret, new_secret, secret_for
from reshard.comm.transaction import DONE, HERE
from reshard.core.errors import ReshardError, first_line, listed
from reshard.core.limits import check_seconds

if TYPE_CHECKING:
    import torch.distributed as dist

MOST_MEMBERS = 1 << 20
LOOK_SECONDS = 0.1  # between two looks of a member that waits, at what has become of others
ALIVE_EVERY_SECONDS = 0.5  # a member says that it lives while it is in a call that does not return
FAIL_SECONDS = 10.0  # that a member which gives up waits until the hub knows
GRACE_SECONDS = 5.0  # beyond the time limit, within which the hub answers if it lives
_made: Counter[str] = Counter()


class RefitGroup:
    """The trainer's and the inference engine's processes under one numbering.

    `rank` and `size` count over both sides. `timeout` in seconds bounds every wait. Make one with `of_process_group` or `join`.
    """

    def __init__(
        self, channel: Channel, address: str, secret: bytes, rank: int, size: int, timeout: float
    ) -> None:
        self.channel, self.address, self.secret = channel, address, secret
        self.rank, self.size, self.timeout = rank, size, timeout
        self.names = {r: f"rank {r}" for r in range(size)}
        self.process_group: Any = None
        self.local_address: str | None = None
        self.turns = 0
        self.what = "connect"
        self.version: int | None = None
        self.verify = False  # some member has asked for a check of this refit
        self._notes: dict[int, str] = {}
        self._agreed: int | None = None  # the version of the refit that goes on
        self._failures: dict[int, dict[str, Any]] = {}  # by transaction, as the hub has told
        self._answers: dict[int, Message] = {}  # by request
        self._failed: Callable[[], str] = str  # of what this process knows beside the hub: nothing
        self._lost = ""  # why the hub is not asked any more
        self._said_alive = float("-inf")
        self._requests, self._lock = itertools.count(), threading.RLock()
        channel.limit_sending(timeout)

    @staticmethod
    def of_process_group(
        name: str = "reshard", timeout: float = 60.0, secret: str | None = None
    ) -> "RefitGroup":
        """All ranks of this torch process group: trainer and engine in the same processes, or started by one launcher.

        Every rank makes the same ones in the same order; those of one name are told apart by counting them. The first rank says
        through the process group's store where its hub listens. The secret is made by it and said there too, unless it is given
        or in the environment.
        """
        import torch.distributed as dist

        if not dist.is_initialized():
            raise ReshardError(
                "torch.distributed is not initialized: call init_process_group first, or use RefitGroup.join"
            )
        check_seconds(timeout, "timeout")
        # What earlier members of this name have left in the store must not be read again.
        _made[name] += 1
        store = dist.PrefixStore(f"{name}/{_made[name]}", dist.distributed_c10d._get_default_store())
        rank, size = dist.get_rank(), dist.get_world_size()
        given = given_secret(secret)
        if rank == 0:
            known = given if given is not None else new_secret()
            listener = listener_for(store)
            group = _first(listener, secret_for("", known), size, timeout)
            said = {"address": group.address, "secret": None if given is not None else known}
            _bounded(lambda: store.set("hub", json.dumps(said)), timeout, rank)
        else:
            text = _bounded(lambda: _looked_up(store, timeout), timeout, rank)
            where = json.loads(text)
            known = given if given is not None else where["secret"]
            if known is None:
                raise ReshardError(f"rank 0 has a secret of its own: {HOW}")
            group = _joined(
                where["address"], secret_for("", known), rank, size, timeout, time.monotonic() + timeout
            )
        group.process_group = dist.group.WORLD
        return group

    @staticmethod
    def join(
        address: str, rank: int, size: int, timeout: float = 60.0, secret: str | None = None
    ) -> "RefitGroup":
        """Meet at ``host:port`` or ``[IPv6]:port``: rank 0 serves there, the others connect.

        All members know the same secret: `secret`, or ``RESHARD_SECRET`` in the environment, or, where the host is
        ``127.0.0.1``, ``::1`` or ``localhost``, which is served to this host only, a file that only this user can read. Raises
        ReshardError where there is none, where nobody answers in time, and where another process has joined as this rank.
        """
        host, port = parsed(address)
        check_rank(rank, size)
        check_seconds(timeout, "timeout")
        key = secret_for(host, secret)
        deadline = time.monotonic() + timeout
        if rank:
            return _joined(address, key, rank, size, timeout, deadline)
        try:
            listener = socket.create_server((host, port), family=family_of(host), backlog=BACKLOG)
        except (OSError, ValueError, OverflowError) as error:
            taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
            hint = ": connect at another port, also after members were replaced" if taken else ""
            raise ReshardError(f"rank 0 cannot serve at {address} ({first_line(error)}){hint}") from error
        return _first(listener, key, size, timeout, address)

    @staticmethod
    def tell(address: str, sentence: str, timeout: float = 10.0, secret: str | None = None) -> None:
        """Say to those who meet at an address, as none of them, that one of them will not come: their transaction fails with that
        sentence, as do all later ones. Does nothing where they meet no more, or nobody serves there within `timeout` seconds."""
        host, port = parsed(address)
        key = secret_for(host, secret)
        with suppress(OSError, BrokenChannelError):
            channel = connect(host, port, key, time.monotonic() + timeout)
            try:
                channel.send({"op": "tell", "says": sentence, "id": 0})
                channel.receive(timeout)
            finally:
                channel.close()

    def torch_store(self) -> "dist.Store":
        """Make a store over the hub, for a process group of members; whoever makes the group keeps it."""
        from reshard.comm.torch_store import HubStore

        return HubStore(self.address, self.secret, self.timeout, self.turns)

    def __del__(self) -> None:
        if hasattr(self, "channel"):
            self.channel.close()

    # Transactions

    @contextmanager
    def turn(self, what: str) -> Iterator[None]:
        """A connect or a refit. An error inside, whatever it is, is told to the others."""
        self.begin(what)
        try:
            yield
        except BaseException as error:
            self.fail(error)
            raise

    def begin(self, what: str) -> None:
        """Begin the next transaction. One that nobody brings to an end says who is gone (`failure`) as long as all are there."""
        self.turns += 1
        self.what, self.verify, self._notes, self._agreed = what, False, {}, None
        self._failures = {number: one for number, one in self._failures.items() if number >= self.turns}

    def failure(self) -> str:
        """Return why this transaction has failed; empty while it has not."""
        try:
            self.check()
        except ReshardError as error:
            return str(error)
        return self._lost

    def go(self, version: int | None = None, note: str = "", verify: bool = False) -> int:
        """Wait for everyone before the first byte; return the version that all agree on.

        None leaves it to the others; where nobody says one it is one more than the last. `note` is what `note_of` tells the
        others; where any member gives `verify`, `self.verify` is true for all. Raises ReshardError where two say different
        versions, where one fails, or is late.
        """
        answer = self._arrive(
            HERE, f"did not come to {self.what}", version=version, note=note, verify=verify, last=self.version
        )
        if (conflict := answer.get("conflict")) is not None:
            raise ReshardError(
                f"{self.names[conflict['who']]} refits to version {conflict['version']}, {self.names[self.rank]} to version "
                f"{version}: give all the same"
            )
        self._notes = dict(answer["notes"])
        self.verify = bool(answer["verify"])
        agreed = self._agreed = int(answer["version"])
        return agreed

    def note_of(self, ranks: Iterable[int]) -> dict[int, str]:
        """After `go`: what these members noted."""
        return {rank: self._notes.get(rank, "") for rank in ranks}

    def done(self) -> None:
        """Wait until everyone has what it needs. Raises ReshardError, for all, where one has failed, or is late."""
        self._arrive(DONE, f"did not end {self.what}")
        if self._agreed is not None:
            self.version = self._agreed

    def _arrive(self, step: str, late: str, **more: Any) -> dict[str, Any]:
        return self._wait_for({"op": "arrive", "step": step, "what": late} | more).head

    def silent(self) -> list[int]:
        """Return the ranks that neither wait nor say that they live."""
        answer = self._wait_for({"op": "silent", "timeout": ALIVE_SECONDS}).head
        return [int(rank) for rank in answer["silent"]]

    def check(self) -> None:
        """Raise ReshardError where a member has given this transaction up, or is gone."""
        with self._lock:
            try:
                while not self._lost and (message := self.channel.receive(0)) is not None:
                    self._note(message)
            except BrokenChannelError as error:
                self._raise_failed(self._failures.get(self.turns))
                self._lose(str(error))
        self._raise_failed(self._failures.get(self.turns))

    @contextmanager
    def watching(self, failed: Callable[[], str]) -> Iterator[None]:
        """While it is open, this member also asks `failed` several times a second while it waits: what has become of others, which
        the hub does not know. Where that gives a sentence, all members give up with it."""
        before, self._failed = self._failed, failed
        try:
            yield
        finally:
            self._failed = before

    def fail(self, error: BaseException) -> None:
        """Tell the others why this member gives up, and wait until they have been told."""
        with suppress(ReshardError):
            self._fail(str(error) or type(error).__name__)

    def _fail(self, sentence: str) -> None:
        request = {"op": "fail", "says": sentence}
        seconds = max(GRACE_SECONDS, min(self.timeout, FAIL_SECONDS))
        answer = self._request(request, seconds, watches=False).head
        if answer.get("failed") is not None:
            self._failures[self.turns] = answer["failed"]

    def _raise_failed(self, failure: dict[str, Any] | None) -> None:
        if failure is not None:
            raise ReshardError(sentence_of(failure, self.names, self.rank))

    # While others wait for this member

    def answer(self) -> None:
        """Say that this member lives, from within a call that takes long; at most so often."""
        now = time.monotonic()
        if now - self._said_alive >= ALIVE_EVERY_SECONDS and not self._lost:
            self._said_alive = now
            with suppress(BrokenChannelError):  # who serves the hub is gone, as all will find out
                self.channel.send({"op": "alive"})

    @contextmanager
    def answering(self) -> Iterator[None]:
        """While it is open a thread says that this member lives, for who is in a call that does not return soon."""
        ended = threading.Event()

        def say() -> None:
            self.answer()
            while not ended.wait(ALIVE_EVERY_SECONDS):
                self.answer()

        thread = threading.Thread(target=say, name="reshard answers", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    # Messages within a transaction

    def post(self, key: str, payload: bytes = b"") -> None:
        """Publish a payload under a key of this rank."""
        self._send({"op": "post", "turn": self.turns, "key": key}, payload)

    def count(self, key: str, value: int) -> None:
        """Publish how far this rank has come: a number that grows."""
        self.post(key, str(value).encode())

    def read(self, key: str, rank: int) -> bytes:
        """Return what a rank published; waits for it. Raises ReshardError where some member failed or `rank` is late."""
        return self.read_all(key, [rank])[0]

    def read_all(self, key: str, ranks: Iterable[int] | None = None) -> list[bytes]:
        """Return what these ranks published, or all of them, in their order; waits for them."""
        chosen = None if ranks is None else [*ranks]
        if chosen == []:
            return []
        message = self._wait_for(
            {"op": "wait", "key": key, "ranks": chosen, "what": f"did not reach '{key.partition('/')[0]}'"}
        )
        ends = [0, *itertools.accumulate(message.head["lengths"])]
        return [message.body[start:end] for start, end in itertools.pairwise(ends)]

    def wait(self, key: str, ranks: Iterable[int]) -> None:
        """Wait until these ranks have published under `key`; raises ReshardError naming those that are late, or that failed."""
        self.read_all(key, ranks)

    def wait_for_count(self, key: str, rank: int, value: int) -> None:
        """Wait until a rank has come so far. Raises ReshardError where some member failed or `rank` is late."""
        what = f"did not reach '{key.partition('/')[0]}'"
        self._wait_for({"op": "wait", "key": key, "ranks": [rank], "count": value, "what": what})

    def gather(self, key: str, payload: bytes) -> list[bytes]:
        """Publish, and return what everyone published, by rank."""
        self.post(key, payload)
        return self.read_all(key)

    # The hub

    def _wait_for(self, request: dict[str, Any]) -> Message:
        """Return the answer to a request that the hub answers later. Raises ReshardError where this transaction has failed."""
        message = self._request({"timeout": self.timeout} | request, self.timeout + GRACE_SECONDS)
        self._raise_failed(message.head.get("failed"))
        return message

    def _request(self, request: dict[str, Any], seconds: float, watches: bool = True) -> Message:
        with self._lock:
            number = next(self._requests)
            self._send({"turn": self.turns, "id": number} | request)
            return self._answer_to(number, time.monotonic() + seconds, watches)

    def _answer_to(self, number: int, deadline: float, watches: bool) -> Message:
        """Read until a request is answered; what comes besides is noted."""
        heard = False
        while number not in self._answers:
            watched = watches and not heard and self._failed is not str
            left = deadline - time.monotonic()
            if left <= 0:
                self._lose(f"nothing came within {self.timeout:g} s")
            try:
                message = self.channel.receive(min(left, LOOK_SECONDS) if watched else left)
            except BrokenChannelError as error:
                self._raise_failed(self._failures.get(self.turns))
                self._lose(str(error))
            if message is None:
                if watched and (sentence := self._failed()):
                    heard = True
                    self._fail(sentence)
            else:
                self._note(message)
        return self._answers.pop(number)

    def _note(self, message: Message) -> None:
        """Keep an answer for who waits for it, and why a transaction has failed."""
        if "id" in message.head:
            self._answers[int(message.head["id"])] = message
        elif message.head.get("failed") is not None and "turn" in message.head:
            self._failures[int(message.head["turn"])] = message.head["failed"]

    def _send(self, head: dict[str, Any], body: bytes = b"") -> None:
        if self._lost:
            self._lose(self._lost)
        try:
            self.channel.send(head, body)
        except BrokenChannelError as error:
            self.check()  # it may have said why before it went
            self._lose(str(error))

    def _lose(self, why: str) -> None:
        """Raise ReshardError: the hub is gone."""
        server, me = self.names[0], self.names[self.rank]
        again = ": meet again to go on" if self._lost else ""
        self._lost = why
        raise ReshardError(
            f"{server}, which serves the hub that the members meet at, does not answer {me} ({why}){again}"
        )


def sentence_of(failure: dict[str, Any], names: dict[int, str], rank: int) -> str:
    """Return why a transaction has failed, as this rank says it: what another has said stands behind its name."""
    by = failure.get("by")
    if "gone" in failure:
        gone = failure["gone"]
        be = "is" if len(gone) == 1 else "are"
        return f"{listed(names[one] for one in gone)} {be} gone: the process has ended, or has let go of this connection"
    if "says" in failure:
        sentence = str(failure["says"])
    else:
        sentence = _late_sentence(failure, names)
    return sentence if by is None or by == rank else f"{names[by]}: {sentence}"


def _late_sentence(failure: dict[str, Any], names: dict[int, str]) -> str:
    """Return which ranks are late, or which silent ranks they wait for."""
    late, silent = failure["late"], failure["silent"]
    what = f"{failure['what']} within {failure['seconds']:g} s: dead, stalled or not started"
    if silent and not set(silent) & set(late):
        keeps, waits = (listed(names[rank] for rank in ranks) for ranks in (silent, late))
        return f"{keeps} is silent, and {waits}, which waits for it, {what}"
    return f"{listed(names[rank] for rank in late if rank in silent or not silent)} {what}"


def _first(
    listener: socket.socket, secret: bytes, size: int, timeout: float, address: str | None = None
) -> RefitGroup:
    """Start the hub, and join it as the first member."""
    host, port = listener.getsockname()[:2]
    hub = Hub(listener, secret, size, timeout)
    hub.start()
    here = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        return _joined(address or here, secret, 0, size, timeout, time.monotonic() + timeout)
    except BaseException:
        hub.stop()
        raise


def _joined(address: str, secret: bytes, rank: int, size: int, timeout: float, deadline: float) -> RefitGroup:
    host, port = parsed(address)
    try:
        channel = connect(host, port, secret, deadline)
    except WrongSecretError as error:
        raise ReshardError(f"rank {rank} is not let in at {address} ({error}): {HOW}") from error
    except (OSError, ValueError, OverflowError) as error:
        raise ReshardError(f"rank {rank} found no member 0 at {address} ({first_line(error)})") from error
    group = RefitGroup(channel, address, secret, rank, size, timeout)
    who = f"{socket.gethostname()}, process {os.getpid()}"
    seconds = max(1.0, deadline - time.monotonic())
    answer = group._request(
        {"op": "join", "rank": rank, "size": size, "who": who}, seconds, watches=False
    ).head
    if "size" in answer:
        raise ReshardError(
            f"rank {rank} expects {size} members at {address}, another {answer['size']}: give all the same number"
        )
    if "other" in answer:
        raise ReshardError(
            f"rank {rank} has joined at {address} before ({answer['other']}): give each process a rank of its own, and meet at "
            f"another port after a restart"
        )
    group.local_address = channel.connection.getsockname()[0]
    return group


def _looked_up(store: Any, timeout: float) -> bytes:
    store.wait(["hub"], timedelta(seconds=timeout))
    return store.get("hub")


def _bounded(call: Callable[[], Any], seconds: float, rank: int) -> Any:
    """Ask the process group's store, which has no time limit where its process is stopped."""
    try:
        return in_background(call).result(seconds + GRACE_SECONDS)
    except (RuntimeError, FutureTimeoutError) as error:
        raise ReshardError(
            f"rank {rank} did not learn within {seconds:g} s where rank 0 serves the members ({first_line(error)})"
        ) from error


def check_rank(rank: int, size: int) -> None:
    if not (isinstance(rank, int) and isinstance(size, int)) or size > MOST_MEMBERS:
        raise ReshardError(
            f"rank {rank!r} of {size!r:.40} members is not a whole number of at most {MOST_MEMBERS:,}"
        )
    if not 0 <= rank < size:
        raise ReshardError(f"rank {rank} is not one of {size} members, which count from 0")
