"""A server of authenticated messages: one thread that takes what an entrance of a door has admitted, reads whole
messages and writes what clients can take."""

import logging
import selectors
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from contextlib import ExitStack
from typing import Any

from reshard.comm.channel import (
    READ_BYTES,
    BrokenChannelError,
    FrameReader,
    FrameWriter,
    Keys,
    Message,
    prepare,
)
from reshard.comm.door import Entrance

TICK_SECONDS, SWEEP_SECONDS = 1.0, 0.05  # between two looks at the clock: at rest, and while somebody waits
log = logging.getLogger("reshard")


class Client:
    """A connection to the hub: a member's once it has joined, or one that only asks for values or aborts."""

    def __init__(self, connection: socket.socket, keys: Keys) -> None:
        self.connection = connection
        self.writer, self.reader = FrameWriter(keys.of_server), FrameReader(keys.of_client)
        self.out: deque[memoryview] = deque()
        self.rank: int | None = None
        self.transaction = 0  # the last one that it has come to
        self.was_told = False  # its last call came late to a transaction that had failed
        self.informed = 0  # the last transaction whose outcome it has been sent
        self.alive = float("-inf")  # when it last said so


class Server(ABC):
    """Serves clients that know the secret. Everything in it belongs to the thread that runs `serve`.

    Closes the `entrance` if it cannot begin: raises OSError.
    """

    def __init__(self, entrance: Entrance) -> None:
        self.entrance = entrance
        with ExitStack() as taken:  # and given back where something fails, as with too many open files
            taken.callback(entrance.close)
            self.selector = selectors.DefaultSelector()
            taken.callback(self.selector.close)
            self.selector.register(entrance, selectors.EVENT_READ)
            taken.pop_all()
        self.clients: dict[socket.socket, Client] = {}
        self.swept = time.monotonic()
        self.stopped = False
        self.closing = False  # set by another thread: nobody is to be admitted any more
        self.closed = threading.Event()  # nobody is, and the port is free, unless others are admitted at it

    @abstractmethod
    def handle(self, client: Client, message: Message) -> None:
        """Carry out what a message asks for; an error ends the client's connection."""

    @abstractmethod
    def disconnected(self, client: Client) -> None:
        """Note that a client's connection has ended."""

    @abstractmethod
    def sweep(self, now: float) -> None:
        """Answer the requests whose time is over."""

    @abstractmethod
    def is_waited_for(self) -> bool:
        """Return True while somebody waits for an answer that only time brings."""

    @abstractmethod
    def is_over(self) -> bool:
        """Return True once nobody needs the server."""

    def start(self) -> None:
        """Serve in a thread that ends when nobody needs the server any more."""
        try:
            threading.Thread(target=self.serve, name="reshard hub", daemon=True).start()
        except BaseException:
            self._close()
            raise

    def stop(self) -> None:
        """End the thread soon; for another thread."""
        self.stopped = True

    def serve(self) -> None:
        """Answer clients until `is_over`."""
        try:
            while not self.stopped and not self.is_over():
                self._serve_once()
        except Exception:
            log.exception("the hub of a refit has failed")
        finally:
            self._close()

    def _serve_once(self) -> None:
        if self.closing and not self.closed.is_set():
            self._close_entrance()
        for key, events in self.selector.select(SWEEP_SECONDS if self.is_waited_for() else TICK_SECONDS):
            if key.fileobj is self.entrance:
                for connection, keys in self.entrance.admitted():
                    self._admit(connection, keys)
                continue
            if events & selectors.EVENT_WRITE:
                self._flush(key.data)
            if events & selectors.EVENT_READ:
                self._receive(key.data)
        now = time.monotonic()
        if now - self.swept > SWEEP_SECONDS:
            self.swept = now
            self.sweep(now)

    def _close(self) -> None:
        for client in list(self.clients.values()):
            client.connection.close()
        self._close_entrance()
        self.selector.close()

    def _close_entrance(self) -> None:
        if not self.closed.is_set():
            self.selector.unregister(self.entrance)
            self.entrance.close()
            self.closed.set()

    def _admit(self, connection: socket.socket, keys: Keys) -> None:
        prepare(connection)
        client = self.clients[connection] = Client(connection, keys)
        self.selector.register(connection, selectors.EVENT_READ, client)

    def _receive(self, client: Client) -> None:
        if client.connection not in self.clients:
            return
        try:
            data = client.connection.recv(READ_BYTES)
            if not data:
                raise BrokenChannelError("the connection has ended")
            for message in client.reader.feed(data):
                self.handle(client, message)
        except BlockingIOError:
            return
        except Exception as error:  # it has ended, or makes no sense: that is nobody else's failure
            self._drop(client, error)

    def _drop(self, client: Client, why: BaseException) -> None:
        """Forget a connection that has ended or makes no sense."""
        if self.clients.pop(client.connection, None) is None:
            return
        log.debug("a connection to the hub has ended (%s)", why)
        self.selector.unregister(client.connection)
        client.connection.close()
        self.disconnected(client)

    def send(
        self, client: Client, head: dict[str, Any], body: bytes = b"", digest: bytes | None = None
    ) -> None:
        """Send a message to a client, as soon as it can take it; nothing if its connection has ended."""
        if client.connection not in self.clients:
            return
        client.out.append(memoryview(client.writer.frame(head, body, digest)))
        if body:
            client.out.append(memoryview(body))
        self._flush(client)

    def _flush(self, client: Client) -> None:
        if client.connection not in self.clients:
            return
        try:
            while client.out:
                sent = client.connection.send(client.out[0])
                if sent < len(client.out[0]):
                    client.out[0] = client.out[0][sent:]
                else:
                    client.out.popleft()
        except BlockingIOError:
            pass
        except OSError:
            client.out.clear()  # its end is read like any other's
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.out else 0)
        if self.selector.get_key(client.connection).events != events:
            self.selector.modify(client.connection, events, client)
