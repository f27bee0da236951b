"""The processes that share a conversion: one, or those that ``torchrun`` started, over a common
file system.

Each process writes whole destination files. They meet before the first byte, so that all have the
same plan, and after the last, so that the first one can publish. Between, they may be hours apart:
a meeting has no time limit.

Every process has an authenticated connection (`reshard.comm.channel`) to the first one, which
passes answers on. So all learn at once when one fails or dies. A host that is gone is noticed
within a minute, or, where a message was on its way to it, in a quarter of an hour. A refit's group
(`reshard.comm.group`) bounds every wait instead, and so is another thing.
"""

import contextlib
import json
import os
import queue
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from reshard.comm.channel import BrokenChannelError, Channel, Door, WrongSecretError, connect
from reshard.comm.hosts import listener_for
from reshard.comm.secret import HOW, given_secret, new_secret, secret_for
from reshard.core.errors import ReshardError, first_line, is_resumable, listed
from reshard.core.extras import importing

# Time limits: for the others to start, for all to stop once one has failed, and for a connection to
# the first process, which listens before it says where.
JOIN_SECONDS, STOP_SECONDS, CONNECT_SECONDS = 600, 60, 60
_teams_made = 0  # tells conversions of one program apart that meet at the same store


class Team:
    """`process` of `size` processes. The first has a link to each of the others, these have one to
    it."""

    def __init__(self, process: int = 0, size: int = 1, links: "dict[int, _Link] | None" = None) -> None:
        self.process, self.size, self.links = process, size, links or {}
        self.failure: ReshardError | None = None
        self.lost: set[int] = set()
        self.has_stopped = False
        self.lock = threading.Lock()
        self.inboxes: dict[int, queue.SimpleQueue] = {other: queue.SimpleQueue() for other in self.links}
        self.listeners = [
            threading.Thread(target=self._listen, args=(other,), daemon=True) for other in self.links
        ]
        for thread in self.listeners:
            thread.start()

    @staticmethod
    def from_environment() -> "Team":
        """Return the team that torchrun's environment variables describe; one process without them.

        Raises ReshardError where these make no sense, or the others cannot be reached.
        """
        if os.environ.get("WORLD_SIZE", "1") == "1" or "RANK" not in os.environ:
            return Team()
        process, size = _number("RANK"), _number("WORLD_SIZE")
        if not 0 <= process < size:
            raise ReshardError(
                f"RANK={process} and WORLD_SIZE={size} in the environment are no process and "
                f"number of processes"
            )
        try:
            return Team(process, size, _links(process, size))
        except (OSError, RuntimeError, ValueError) as error:
            raise ReshardError(
                f"process {process} of {size} cannot reach the others: {first_line(error)}"
            ) from error

    @staticmethod
    def of_process_group() -> "Team":
        """Return the ranks of torch's default process group as a team; one process where there is
        none.

        The group carries one small message, which says where the first rank is; all else goes
        through connections of the team's own, so that a team may work in a thread while training
        goes on.
        """
        import torch.distributed as dist

        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return Team()
        process, size = dist.get_rank(), dist.get_world_size()
        try:
            return Team(process, size, _links(process, size))
        except (OSError, RuntimeError, ValueError) as error:
            raise ReshardError(
                f"rank {process} of {size} cannot reach the others: {first_line(error)}"
            ) from error

    def check(self) -> None:
        """Raise ReshardError where another process has failed or ended."""
        if self.failure is not None:
            raise self.failure

    def exchange(self, value: Any) -> list[Any]:
        """Return every process's value (JSON), by process. Waits for all, however long they take."""
        if self.size == 1:
            return [value]
        if self.process:
            self.links[0].send({"value": value})
            return self._receive(0)["values"]
        values = [value, *(self._receive(other)["value"] for other in range(1, self.size))]
        for link in self.links.values():
            link.send({"values": values})
        return values

    def gather(self, value: Any) -> list[Any]:
        """Return every process's value (JSON), by process, in the first process; nothing in the
        others."""
        if self.process:
            self.links[0].send({"value": value})
            return []
        return [value, *(self._receive(other)["value"] for other in range(1, self.size))]

    def scatter(self, values: list[Any]) -> Any:
        """Return this process's item of `values`, which the first process has and the others leave
        empty."""
        if self.process:
            return self._receive(0)["value"]
        for other, link in self.links.items():
            link.send({"value": values[other]})
        return values[0]

    def together(self, step: Callable[[], Any]) -> list[Any]:
        """Run `step` here, and meet: return every process's result, or raise in all an error as
        soon as it has failed in one."""
        try:
            return self.exchange(step())
        except BaseException as error:
            self.fail(error)
            raise

    def conclude(self, step: Callable[[], Any]) -> Any:
        """Run `step` in the first process once all others have done their part; return its result
        everywhere.

        What becomes of the others meanwhile or afterward changes nothing of that: only the first
        one's failure is one.
        """
        if self.process == 0:
            try:
                value = step()
            except BaseException as error:
                self.fail(error)
                raise
            for link in self.links.values():
                link.send({"concluded": value})
            return value
        while True:
            message = self.inboxes[0].get()
            if "concluded" in message:
                return message["concluded"]
            if 0 in self.lost or "stopped" in message:
                self.check()
                raise ReshardError(
                    f"process 0 of {self.size} ended before the others; run again with --resume",
                    resumable=True,
                )

    def fail(self, error: BaseException) -> None:
        """Tell the others that this process gives up, and why."""
        if self.failure is None or self.process == 0:
            reason = "it was interrupted" if isinstance(error, KeyboardInterrupt) else first_line(error)
            self._failed(f"process {self.process} of {self.size} failed: {reason}", is_resumable(error), None)

    def stop(self) -> None:
        """Tell the others that this process writes no more. The first one waits until that is so of
        all, since it may remove what they have written."""
        if not self.has_stopped:
            self.has_stopped = True
            for link in self.links.values():
                link.send({"stopped": True})
        if self.process == 0:
            self._wait()

    def close(self) -> None:
        """Close the connections, once the other ends have nothing more to say."""
        self.stop()
        self._wait()
        for link in self.links.values():
            link.close()

    def _wait(self) -> None:
        deadline = time.monotonic() + STOP_SECONDS
        for thread in self.listeners:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _listen(self, other: int) -> None:
        """Put the messages of a process into its inbox until it stops. A failure is passed on to
        all."""
        while True:
            message = self.links[other].receive()
            if message is None:
                self.lost.add(other)
                return self._failed(
                    f"process {other} of {self.size} was ended; run again with --resume", True, other
                )
            if "failed" in message:
                self.lost.update([0] if message.get("of") == other == 0 else [])
                self._failed(message["failed"], message["resumable"], other)
            else:
                self.inboxes[other].put(message)
            if "stopped" in message:
                return None

    def _failed(self, sentence: str, resumable: bool, heard_from: int | None) -> None:
        with self.lock:
            # A failure of this process itself is sent in any case.
            first = self.failure is None or heard_from is None
            self.failure = self.failure or ReshardError(sentence, resumable)
        for other, link in self.links.items():
            self.inboxes[other].put({})  # wakes a waiting thread
            if first and other != heard_from:
                link.send(
                    {
                        "failed": sentence,
                        "resumable": resumable,
                        "of": self.process if heard_from is None else heard_from,
                    }
                )

    def _receive(self, other: int) -> dict[str, Any]:
        message = self.inboxes[other].get()
        self.check()
        if "stopped" in message:
            raise ReshardError(
                f"process {other} of {self.size} ended before the others; run again with --resume",
                resumable=True,
            )
        return message

    def __enter__(self) -> "Team":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, *exc: object) -> None:
        if error is not None:
            self.fail(error)
        self.close()

    def share(self, sizes: dict[Any, int]) -> set[Any]:
        """Return the files (name to bytes) that this process writes: contiguous runs of about equal
        bytes."""
        total, names, position = sum(sizes.values()) or 1, set(), 0
        for name, n in sizes.items():
            middle = position + n // 2
            if min(self.size - 1, middle * self.size // total) == self.process:
                names.add(name)
            position += n
        return names


def _number(name: str) -> int:
    text = os.environ.get(name, "")
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise ReshardError(
            f"{name}={text} in the environment is not a number: torchrun sets it; unset it "
            f"for a single process"
        )
    return int(text)


class _Link:
    """A connection to another process that knows the same secret, on which JSON messages travel."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel

    def send(self, message: dict[str, Any]) -> None:
        """Send a message; where the other end is gone, `receive` says so."""
        with contextlib.suppress(BrokenChannelError):
            self.channel.send({}, json.dumps(message).encode())

    def receive(self) -> dict[str, Any] | None:
        """Return the next message, None where the other end is gone or says what is no message."""
        try:
            message = self.channel.receive()
            return None if message is None else json.loads(message.body)
        except (BrokenChannelError, ValueError):
            return None

    def close(self) -> None:
        """Close the connection."""
        self.channel.close()


def _links(process: int, size: int) -> dict[int, _Link]:
    """Connect to the first process, or as the first one with all others; they find each other through
    torchrun's store, or the process group."""
    publish, look_up, store = _notice_board(process, size)
    own_secret = given_secret()
    if process:
        notice = json.loads(look_up())
        if own_secret is None and notice["secret"] is None:
            raise ReshardError(f"process 0 has a secret of its own: {HOW}")
        secret = secret_for("", own_secret if own_secret is not None else notice["secret"])
        return {0: _connect(notice["host"], notice["port"], secret, process)}
    shared_secret = new_secret() if own_secret is None else None
    listener = listener_for(store)
    host, port = listener.getsockname()[:2]
    publish(json.dumps({"host": host, "port": port, "secret": shared_secret}))
    door = Door(listener, secret_for("", shared_secret if own_secret is None else own_secret))
    try:
        return _admit_others(door, size)
    finally:
        door.close()


def _admit_others(door: Door, size: int) -> dict[int, _Link]:
    """Admit all other processes, in whatever order they come. One that is slow or silent holds up
    nobody."""
    links: dict[int, _Link] = {}
    arriving: list[Channel] = []
    deadline = time.monotonic() + JOIN_SECONDS
    while len(links) < size - 1:
        if time.monotonic() > deadline:
            absent = sorted(set(range(1, size)) - set(links))
            raise RuntimeError(f"{listed(absent)} of them did not start within {JOIN_SECONDS} s")
        for connection, keys in door.admitted(within=0.05):
            arriving.append(Channel(connection, keys.of_server, keys.of_client))
        for channel in list(arriving):
            try:
                if (hello := channel.receive(0)) is None:
                    continue
                process = int(hello.head.get("process", 0))
                if process not in range(1, size) or process in links:
                    raise BrokenChannelError("it is not another process of this run")
                links[process] = _Link(channel)
                channel.send({"welcome": True})
            except BrokenChannelError:
                channel.close()
            arriving.remove(channel)
    return links


def _connect(host: str, port: int, secret: bytes, process: int) -> _Link:
    deadline = time.monotonic() + CONNECT_SECONDS
    try:
        channel = connect(host, port, secret, deadline)
        channel.send({"process": process})
        if channel.receive(max(0.0, deadline - time.monotonic())) is None:
            raise BrokenChannelError("it does not answer")
    except WrongSecretError as error:
        raise ReshardError(
            f"process {process} is not let in by process 0 at {host} ({error}): {HOW}"
        ) from error
    except (OSError, BrokenChannelError) as error:
        raise RuntimeError(f"process 0 at {host}: {first_line(error)}") from error
    return _Link(channel)


def _notice_board(process: int, size: int) -> tuple[Callable[[str], None], Callable[[], str], Any]:
    """Return how the first process says where it is: `publish(text)` there, `look_up()` in the
    others; and torch's store, whose address they all reach."""
    global _teams_made
    with importing("megatron"):
        import torch.distributed as dist
        from torch.distributed.rendezvous import rendezvous

    if dist.is_initialized():
        values: list[Any] = [None]

        def publish(text: str) -> None:
            dist.broadcast_object_list([text], 0)

        def look_up() -> str:
            dist.broadcast_object_list(values, 0)
            return values[0]

        return publish, look_up, dist.distributed_c10d._get_default_store()
    _teams_made += 1
    key = f"reshard/{_teams_made}"
    store, _, _ = next(
        rendezvous("env://", rank=process, world_size=size, timeout=timedelta(seconds=JOIN_SECONDS))
    )
    return lambda text: store.set(key, text), lambda: store.get(key).decode(), store
