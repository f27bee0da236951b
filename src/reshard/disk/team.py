"""The processes that share a conversion: one, or those that ``torchrun`` started, over a common file system.

Each takes whole destination files. They meet before the first byte, so that all have the same plan, and after
the last, so that the first one can publish. Between, they may be hours apart: a meeting has no time limit.
Every process is connected to the first one, which passes answers on, and learns at once when another fails or
dies. A host that is gone is noticed within a minute, or, where a message was on its way to it, in a quarter
of an hour.
"""

import contextlib
import hmac
import json
import os
import queue
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from reshard.core.errors import ReshardError, first_line, is_resumable, listed
from reshard.core.extras import importing

# How long the others may take to start, and to stop once one has failed.
JOIN_SECONDS, STOP_SECONDS = 600, 60
_made = 0  # a program may convert several times over the same store


class Team:
    """`process` of `size` processes, with `links` to others: the first has one to each of them, these have
    one to it."""

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
        """The team that torchrun's environment variables describe; one process without them.

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
        """The ranks of torch's default process group; one process where there is none.

        The group carries one small message, which says where the first rank is; all else goes through
        connections of the team's own, so that a team may work in a thread while training goes on.
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
        """Raise ReshardError where another process has failed or is gone."""
        if self.failure is not None:
            raise self.failure

    def exchange(self, value: Any) -> list[Any]:
        """Everybody's value (what JSON holds), by process; waits for all, however long they take."""
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
        """In the first process everybody's value (what JSON holds), by process; nothing in the others."""
        if self.process:
            self.links[0].send({"value": value})
            return []
        return [value, *(self._receive(other)["value"] for other in range(1, self.size))]

    def scatter(self, values: list[Any]) -> Any:
        """What the first process has for this one: its item of `values`, which the others leave empty."""
        if self.process:
            return self._receive(0)["value"]
        for other, link in self.links.items():
            link.send({"value": values[other]})
        return values[0]

    def together(self, step: Callable[[], Any]) -> list[Any]:
        """Run `step` here, and meet: everybody's result, or everywhere an error as soon as it has failed in
        one process."""
        try:
            return self.exchange(step())
        except BaseException as error:
            self.fail(error)
            raise

    def conclude(self, step: Callable[[], Any]) -> Any:
        """Run `step` in the first process, once all others have done their part; its result, everywhere.

        What becomes of the others meanwhile or afterwards changes nothing of that: only the first one's
        failure is one.
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
        """This process writes no more. The first one waits until that is so of all, since it may remove what
        they have written."""
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
        """Put what a process says into its inbox until it stops; that it has failed goes to all."""
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
            # what this process says of itself, it says in any case
            first = self.failure is None or heard_from is None
            self.failure = self.failure or ReshardError(sentence, resumable)
        for other, link in self.links.items():
            self.inboxes[other].put({})  # wakes who waits
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
        """The files (name to bytes) that this process writes: contiguous runs of about equal bytes."""
        total, mine, position = sum(sizes.values()) or 1, set(), 0
        for name, n in sizes.items():
            middle = position + n // 2
            if min(self.size - 1, middle * self.size // total) == self.process:
                mine.add(name)
            position += n
        return mine


def _number(name: str) -> int:
    text = os.environ.get(name, "")
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise ReshardError(
            f"{name}={text} in the environment is not a number: torchrun sets it; unset it "
            f"for a single process"
        )
    return int(text)


class _Link:
    """A connection on which JSON messages travel, each behind its length."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection, self.lock = connection, threading.Lock()
        # A host that is gone says nothing: ask after 20 silent seconds, and give up after 30 more. One that
        # is only busy answers, also where its process is stopped and takes nothing in: so no
        # TCP_USER_TIMEOUT, which would count that against it.
        options = {
            socket.TCP_KEEPIDLE: 20,
            socket.TCP_KEEPINTVL: 10,
            socket.TCP_KEEPCNT: 3,
            socket.TCP_NODELAY: 1,
        }
        for option, value in options.items():
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def send(self, message: dict[str, Any]) -> None:
        """Send a message; where the other end is gone, `receive` says so."""
        data = json.dumps(message).encode()
        with self.lock, contextlib.suppress(OSError):
            self.connection.sendall(struct.pack("<Q", len(data)) + data)

    def receive(self, limit: int = 1 << 40) -> dict[str, Any] | None:
        """The next message, None where the other end is gone or says what is no message of at most `limit`
        bytes."""
        try:
            head = self._read(8)
            (length,) = struct.unpack("<Q", head or bytes(8))
            data = self._read(length) if 0 < length <= limit else None
            return None if data is None else json.loads(data)
        except (OSError, ValueError):
            return None

    def _read(self, length: int) -> bytes | None:
        data = bytearray()
        while len(data) < length:
            part = self.connection.recv(min(length - len(data), 1 << 20))
            if not part:
                return None
            data += part
        return bytes(data)

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()


def _links(process: int, size: int) -> dict[int, _Link]:
    """Connect to the first process, or as the first one with all others; they find each other through
    torchrun's store."""
    publish, look_up = _notice_board(process, size)
    if process:
        where = json.loads(look_up())
        return {0: _connect(where, process)}
    token = secrets.token_hex(16)
    links: dict[int, _Link] = {}
    with _server() as server:
        hosts = [os.environ.get("MASTER_ADDR"), socket.gethostname(), "127.0.0.1"]
        publish(
            json.dumps(
                {"hosts": [host for host in hosts if host], "port": server.getsockname()[1], "token": token}
            )
        )
        deadline = time.monotonic() + JOIN_SECONDS
        while len(links) < size - 1:
            server.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                connection, _ = server.accept()
            except TimeoutError:
                absent = sorted(set(range(1, size)) - set(links))
                raise RuntimeError(
                    f"{listed(absent)} of them did not start within {JOIN_SECONDS} s"
                ) from None
            connection.settimeout(10)
            link = _Link(connection)
            hello = link.receive(1 << 10) or {}
            if not (
                isinstance(hello, dict)
                and hmac.compare_digest(str(hello.get("token")).encode(), token.encode())
                and hello.get("process") in range(1, size)
            ):
                link.close()
                continue
            connection.settimeout(None)
            link.send({"welcome": True})
            links[hello["process"]] = link
    return links


def _connect(where: dict[str, Any], process: int) -> _Link:
    problem: object = "no address"
    for host in where["hosts"]:
        try:
            connection = socket.create_connection((host, where["port"]), timeout=20)
        except OSError as error:
            problem = error
            continue
        link = _Link(connection)
        link.send({"token": where["token"], "process": process})
        if link.receive(1 << 10) == {"welcome": True}:
            connection.settimeout(None)
            return link
        problem = f"{host} is not the host of process 0"
        link.close()
    raise RuntimeError(f"process 0 at {where['hosts'][0]}: {problem}")


def _server() -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def _notice_board(process: int, size: int) -> tuple[Callable[[str], None], Callable[[], str]]:
    """How the first process says where it is: `publish(text)` there, `look_up()` in the others."""
    global _made
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

        return publish, look_up
    _made += 1
    key = f"reshard/{_made}"
    store, _, _ = next(
        rendezvous("env://", rank=process, world_size=size, timeout=timedelta(seconds=JOIN_SECONDS))
    )
    return lambda text: store.set(key, text), lambda: store.get(key).decode()
