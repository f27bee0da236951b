"""The processes that take part in a refit: how they meet, take part in transactions, and exchange messages.

A connect or a refit is a *transaction*: all members prepare it, move bytes, and commit it, or it
fails for all. The first member's process has a hub (`reshard.comm.hub`), to which every member has
one authenticated connection; it decides the outcome once, for all.

No collective is used here, so that a process that dies or stalls is named by the others, within a time limit.
"""

import errno
import itertools
import json
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from reshard.comm.background import in_background
from reshard.comm.channel import BrokenChannelError, Channel, Message, WrongSecretError, connect
from reshard.comm.client import (
    GRACE_SECONDS,
    LOOK_SECONDS,
    HubClient,
    PeerMemoryError,
    TransactionFailedError,
)
from reshard.comm.door import entrance_at, entrance_behind
from reshard.comm.hosts import address_of, listener_for, parsed
from reshard.comm.hub import ALIVE_SECONDS, Hub
from reshard.comm.protocol import (
    MOST_DIGITS,
    Abort,
    Begin,
    Commit,
    Failure,
    Gather,
    Join,
    Liveness,
    Post,
    PostAll,
    Prepare,
    Read,
    WaitForCount,
    encode,
)
from reshard.comm.secret import HOW, given_secret, new_secret, secret_for
from reshard.core.errors import ReshardError, first_line
from reshard.core.limits import check_seconds

if TYPE_CHECKING:
    import torch.distributed as dist

MOST_MEMBERS = 1 << 20
OVER_SECONDS = 5.0  # for which a rank that has left a meeting waits at its port for the next one
_groups_made: Counter[str] = Counter()


class RefitGroup(HubClient):
    """The trainer's and the inference engine's processes under one numbering.

    `rank` and `size` count over both sides. `timeout` in seconds bounds every wait. Make one with
    `of_process_group` or `join`.
    """

    def __init__(
        self, channel: Channel, address: str, secret: bytes, rank: int, size: int, timeout: float
    ) -> None:
        super().__init__(channel, rank, size, timeout)
        self.address, self.secret = address, secret
        self.process_group: Any = None
        self.hub: Hub | None = None  # in the first member's process
        self.local_address: str | None = None
        self.what = "connect"  # the transaction that goes on, in words
        self.version: int | None = None
        self.meeting = ""  # the hub's word for it, which no other meeting has
        self.verify = False  # some member has asked for a check of this refit
        self.anew = False  # for some member the refit before has failed
        self.expected: int | None = None  # the transaction for which this member's next call was asked for
        self._notes: dict[int, str] = {}
        self._prepared_version: int | None = None
        self._call = ""  # that goes on, in words

    @staticmethod
    def of_process_group(
        name: str = "reshard", timeout: float = 60.0, secret: str | None = None
    ) -> "RefitGroup":
        """All ranks of this torch process group: trainer and engine in the same processes, or
        started by one launcher.

        Every rank makes the same groups in the same order; those of one name are told apart by
        counting them. The first rank publishes the address of its hub through the process group's
        store, with the secret unless that is given or in the environment.
        """
        import torch.distributed as dist

        if not dist.is_initialized():
            raise ReshardError(
                "torch.distributed is not initialized: call init_process_group first, or use RefitGroup.join"
            )
        check_seconds(timeout, "timeout")
        store = dist.distributed_c10d._get_default_store()
        group = RefitGroup.of_store(store, dist.get_rank(), dist.get_world_size(), name, timeout, secret)
        group.process_group = dist.group.WORLD
        return group

    @staticmethod
    def of_store(
        store: "dist.Store", rank: int, size: int, name: str, timeout: float, secret: str | None = None
    ) -> "RefitGroup":
        """Meet by a torch store that all of these processes have; for the rest see `of_process_group`."""
        import torch.distributed as dist

        # What earlier groups of this name have left in the store must not be read again.
        _groups_made[name] += 1
        store = dist.PrefixStore(f"{name}/{_groups_made[name]}", store)
        own_secret = given_secret(secret)
        if rank == 0:
            hub_secret = own_secret if own_secret is not None else new_secret()
            key = secret_for("", hub_secret)
            try:
                hub = Hub(entrance_behind(listener_for(store), key), size, timeout)
            except OSError as error:
                raise ReshardError(f"rank 0 cannot serve the members ({first_line(error)})") from error
            group = _first(hub, address_of(*hub.entrance.door.place), timeout)
            meeting = {"address": group.address, "secret": None if own_secret is not None else hub_secret}
            try:
                _bounded(lambda: store.set("hub", json.dumps(meeting)), timeout, rank)
            except BaseException:
                group.close()
                raise
            return group
        text = _bounded(lambda: _looked_up(store, timeout), timeout, rank)
        meeting = json.loads(text)
        hub_secret = own_secret if own_secret is not None else meeting["secret"]
        if hub_secret is None:
            raise ReshardError(f"rank 0 has a secret of its own: {HOW}")
        deadline = time.monotonic() + timeout
        return _joined(meeting["address"], secret_for("", hub_secret), rank, size, timeout, deadline)

    @staticmethod
    def join(
        address: str, rank: int, size: int, timeout: float = 60.0, secret: str | None = None
    ) -> "RefitGroup":
        """Meet at ``host:port`` or ``[IPv6]:port``: rank 0 serves there, the others connect.

        All members know the same secret: `secret`, or ``RESHARD_SECRET`` in the environment, or,
        where the host is ``127.0.0.1``, ``::1`` or ``localhost``, which is served to this host
        only, a file that only this user can read. Raises ReshardError if there is none, if
        nobody answers in time, and if another process has joined as this rank.
        """
        host, port = parsed(address)
        check_rank(rank, size)
        check_seconds(timeout, "timeout")
        key = secret_for(host, secret)
        deadline = time.monotonic() + timeout
        if rank:
            return _joined(address, key, rank, size, timeout, deadline)
        try:
            hub = Hub(entrance_at(host, port, key), size, timeout)
        except (OSError, ValueError, OverflowError) as error:
            taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
            hint = (
                "; RefitGroup.close of one that met there gives it back): connect at another port, also after members "
                "were replaced"
                if taken
                else ")"
            )
            raise ReshardError(f"rank 0 cannot serve at {address} ({first_line(error)}{hint}") from error
        return _first(hub, address, timeout)

    @staticmethod
    def abort(address: str, reason: str, timeout: float = 10.0, secret: str | None = None) -> bool:
        """Fail the transactions of the members that meet at an address, now and later; for a process that is
        not a member.

        Returns True once these have been told. Does nothing, and returns False, if nobody serves there within `timeout`
        seconds, or no meeting of this secret: it may be over, and others go on at its port.
        """
        host, port = parsed(address)
        key = secret_for(host, secret)
        try:
            channel = connect(host, port, key, time.monotonic() + timeout)
        except (WrongSecretError, OSError, ValueError):
            return False
        try:
            channel.send(encode(Abort(reason)) | {"id": 0})
            return channel.receive(timeout) is not None
        except BrokenChannelError:
            return False
        finally:
            channel.close()

    def close(self) -> None:
        """Leave the meeting, which ends it: whoever waits for this member learns that it is gone. With the first
        member's its port is free, and another meeting may be held there.

        Close what was connected over it first.
        """
        hub, self.hub = self.hub, None
        if hub is not None:
            hub.closing = True
        self.channel.close()  # which wakes the hub
        self.closed, self._lost = True, "this group was closed"
        if hub is not None:
            hub.closed.wait(GRACE_SECONDS)

    def torch_store(self) -> "dist.Store":
        """Make a store over the hub, for a process group of members. The caller must keep a reference to
        it."""
        from reshard.comm.torch_store import HubStore

        return HubStore(self.address, self.secret, self.timeout, self.transaction_number)

    # Transactions

    @contextmanager
    def one_call(self, what: str) -> Iterator[None]:
        """A call that uses these members from its first message to its last: a connect, refit, release or close.

        Raises ReshardError in another thread, or a signal's handler, that begins one meanwhile: it would take the
        answers of the first, or give back memory that the first copies from.
        """
        if self._call:
            raise ReshardError(
                f"{self.names[self.rank]} cannot {what} while it is in another call ({self._call}): call it again "
                f"once that has returned"
            )
        try:
            self._call = what  # no lock, which Ctrl-C would leave locked right after it was taken
            yield
        finally:
            self._call = ""

    def ticket(self) -> str:
        """Return a text that says for which transaction another member is called: the next of this one. Raises
        ReshardError where there will be none."""
        if self._lost:
            self._lose(self._lost)
        return f"{self.meeting}/{self.transaction_number + 1}"

    @contextmanager
    def expecting(self, ticket: str) -> Iterator[None]:
        """Take part with the call inside in the transaction of another member's `ticket`, and in no other. Raises
        ReshardError if that is a member of another meeting."""
        self.expected = self.transaction_of(ticket)
        try:
            yield
        finally:
            self.expected = None

    def transaction_of(self, ticket: str) -> int:
        """Return the number of the transaction of another member's `ticket`. Raises ReshardError if that is a member of
        another meeting."""
        meeting, _, number = str(ticket).partition("/")
        if meeting != self.meeting or not number.isdecimal() or len(number) > MOST_DIGITS:
            raise ReshardError(
                f"{self.names[self.rank]} is called by a connection that is over: it has connected anew since, and is "
                f"refitted by that connection alone"
            )
        return int(number)

    @contextmanager
    def transaction(self, what: str, kind: str = "") -> Iterator[None]:
        """A connect or a refit. An error inside, whatever it is, fails it for all members; see `begin`."""
        self.begin(what, kind)
        try:
            self.check()
            yield
        except BaseException as error:
            self.fail(error)
            if isinstance(error, PeerMemoryError):
                self._raise_earlier_failure(error)
            raise

    def _raise_earlier_failure(self, error: ReshardError) -> None:
        """Raise why the transaction had failed before this member's error, where another member was first."""
        earlier = self._failures.get(self.transaction_number)
        if earlier is not None and earlier.by != self.rank:
            raise TransactionFailedError.of(earlier, self.names, self.rank) from error

    def begin(self, what: str, kind: str = "") -> None:
        """Begin the next transaction, of the members' calls of one `kind`, by default those of the same words. While
        it is neither committed nor failed, `failure` says who is gone.

        A member whose call comes late to one that has failed is in that one, and so is told. It may have missed
        others: the hub says which is the next.
        """
        self.what, self.verify, self.anew, self._notes, self._prepared_version = what, False, False, {}, None
        number, self.expected = self.expected, None
        begin = Begin(what, kind or what, self.timeout, number)
        answer = self._request(begin, self.timeout + GRACE_SECONDS, watches=False).head
        self.transaction_number = int(answer["transaction"])
        self._failures = {
            number: failure for number, failure in self._failures.items() if number >= self.transaction_number
        }
        if answer.get("failed") is not None:
            self._failures[self.transaction_number] = Failure.from_json(answer["failed"])

    def failure(self) -> str:
        """Return why this transaction has failed; empty while it has not."""
        try:
            self.check()
        except ReshardError as error:
            return str(error)
        return self._lost

    def prepare(
        self, version: int | None = None, note: str = "", verify: bool = False, anew: bool = False
    ) -> int:
        """Wait for everyone before the first byte; return the version that all agree on.

        None leaves it to the others; where nobody gives one it is one more than the last. `note` is
        what `notes_of` returns to the others; where any member gives `verify`, or `anew`, `self.verify`,
        or `self.anew`, is true for all. Raises ReshardError if two give different versions, where one fails, or is
        late.
        """
        late = f"did not come to {self.what}"
        message = self._wait_for(Prepare(self.timeout, late, version, self.version, note, verify, anew))
        answer = message.head
        if (conflict := answer.get("conflict")) is not None:
            other_version, other = conflict
            raise ReshardError(
                f"{self.names[other]} refits to version {other_version}, {self.names[self.rank]} to version "
                f"{version}: give all the same"
            )
        self._notes = {int(rank): noted for rank, noted in json.loads(message.body or b"{}").items()}
        self.verify, self.anew = bool(answer["verify"]), bool(answer["anew"])
        self._prepared_version = int(answer["version"])
        return self._prepared_version

    def notes_of(self, ranks: Iterable[int]) -> dict[int, str]:
        """Return the notes with which these members prepared."""
        return {rank: self._notes.get(rank, "") for rank in ranks}

    def commit(self) -> None:
        """Wait until everyone has what it needs. Raises ReshardError, for all, if one has
        failed, or is late."""
        self._wait_for(Commit(self.timeout, f"did not end {self.what}"))
        if self._prepared_version is not None:
            self.version = self._prepared_version

    def unresponsive_ranks(self) -> list[int]:
        """Return the ranks that neither wait nor say that they are alive."""
        answer = self._wait_for(Liveness(ALIVE_SECONDS)).head
        return [int(rank) for rank in answer["unresponsive"]]

    # Messages within a transaction

    def post(self, key: str, payload: bytes = b"") -> None:
        """Publish a payload under a key of this rank."""
        self._send(encode(Post(key)) | {"transaction": self.transaction_number}, payload)

    def post_all(self, payloads: Mapping[str, bytes]) -> None:
        """Publish payloads by key, in one message: each message of its own would cost the hub far more than a key."""
        if payloads:
            head = encode(PostAll([*payloads], [*map(len, payloads.values())]))
            self._send(head | {"transaction": self.transaction_number}, b"".join(payloads.values()))

    def post_count(self, key: str, value: int) -> None:
        """Publish this rank's progress as a count, which only grows."""
        self.post(key, str(value).encode())

    def read(self, key: str, rank: int) -> bytes:
        """Return what a rank posted; waits for it. Raises ReshardError if some member failed or
        `rank` is late."""
        return self.read_all(key, [rank])[0]

    def read_all(self, key: str, ranks: Iterable[int] | None = None) -> list[bytes]:
        """Return what these ranks posted, or all of them, in their order; waits for them."""
        chosen = None if ranks is None else [*ranks]
        if chosen == []:
            return []
        return _payloads(self._wait_for(Read(self.timeout, _did_not_reach(key), key, chosen)))

    def wait(self, key: str, ranks: Iterable[int]) -> None:
        """Wait until these ranks have posted under `key`; raises ReshardError naming those that are
        late, or that failed."""
        self.read_all(key, ranks)

    def wait_for_count(self, key: str, rank: int, value: int) -> None:
        """Wait until a rank has posted at least this count. Raises ReshardError if a member failed or `rank`
        is late."""
        self._wait_for(WaitForCount(self.timeout, _did_not_reach(key), key, rank, value))

    def gather(self, key: str, payload: bytes) -> list[bytes]:
        """Publish, and return what everyone published, by rank."""
        return _payloads(self._wait_for(Gather(self.timeout, _did_not_reach(key), key), payload))


def _payloads(message: Message) -> list[bytes]:
    """Return the payloads in the answer to a Read or Gather."""
    ends = [0, *itertools.accumulate(message.head["lengths"])]
    return [message.body[start:end] for start, end in itertools.pairwise(ends)]


def _did_not_reach(key: str) -> str:
    return f"did not reach '{key.partition('/')[0]}'"


def _first(hub: Hub, address: str, timeout: float) -> RefitGroup:
    """Start the hub, and join it as the first member."""
    hub.start()
    try:
        deadline = time.monotonic() + timeout
        group = _joined(address, hub.entrance.secret, 0, hub.size, timeout, deadline)
        group.hub = hub
        return group
    except BaseException:
        hub.stop()
        raise


def _joined(address: str, secret: bytes, rank: int, size: int, timeout: float, deadline: float) -> RefitGroup:
    """Connect to the hub and join. Raises ReshardError if it does not let this member in."""
    over_by = min(deadline, time.monotonic() + OVER_SECONDS)
    while True:
        group = _connected(address, secret, rank, size, timeout, deadline)
        process = f"{socket.gethostname()}, process {os.getpid()}"
        seconds = max(1.0, deadline - time.monotonic())
        answer = group._request(Join(rank, size, process), seconds, watches=False).head
        if not answer.get("has_left") or time.monotonic() > over_by:
            break
        group.channel.close()  # the meeting before, which the first member is about to end, if it meets here again
        time.sleep(LOOK_SECONDS)
    if "size" in answer:
        raise ReshardError(
            f"rank {rank} expects {size} members at {address}, another {answer['size']}: give all the same number"
        )
    if answer.get("has_left"):
        raise ReshardError(
            f"rank {rank} has joined at {address} before ({answer['taken_by']}) and has left, and rank 0 "
            "still serves that meeting: call close() on rank 0's group, or meet at another port"
        )
    if "taken_by" in answer:
        raise ReshardError(
            f"rank {rank} has joined at {address} before ({answer['taken_by']}): give each process a rank "
            "of its own, and meet at another port after a restart"
        )
    group.meeting = str(answer.get("meeting", ""))
    group.local_address = group.channel.connection.getsockname()[0]
    return group


def _connected(
    address: str, secret: bytes, rank: int, size: int, timeout: float, deadline: float
) -> RefitGroup:
    """Return a group with a connection to the hub, which has not joined."""
    host, port = parsed(address)
    try:
        channel = connect(host, port, secret, deadline)
    except WrongSecretError as error:
        raise ReshardError(
            f"rank {rank} is not let in at {address} ({error}, or the meeting is over): {HOW}"
        ) from error
    except (OSError, ValueError, OverflowError) as error:
        raise ReshardError(f"rank {rank} found no member 0 at {address} ({first_line(error)})") from error
    return RefitGroup(channel, address, secret, rank, size, timeout)


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
    """Raise ReshardError unless `rank` is one of `size` members."""
    if not (isinstance(rank, int) and isinstance(size, int)) or size > MOST_MEMBERS:
        raise ReshardError(
            f"rank {rank!r} of {size!r:.40} members is not a whole number of at most {MOST_MEMBERS:,}"
        )
    if not 0 <= rank < size:
        raise ReshardError(f"rank {rank} is not one of {size} members, which count from 0")
