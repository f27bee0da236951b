"""Whether members live whom nobody there can ask: each holds a connection to the first one, which the system closes when its
process ends, however it does."""

import secrets
import selectors
import socket
from contextlib import suppress

from reshard.comm.hosts import family_of

MAX_NAME_BYTES = 200
MAX_WAITING = 4096  # members that connect before the first one looks
CONNECT_SECONDS = 10.0


class Lifelines:
    """The end of the first member, which listens on this host's address `host`. Whoever connects is a member if it says
    `token` before its name."""

    def __init__(self, host: str) -> None:
        self.listener = socket.create_server((host, 0), family=family_of(host), backlog=MAX_WAITING)
        self.listener.setblocking(False)
        self.address, self.token = (host, self.listener.getsockname()[1]), secrets.token_hex(16)
        self.watched = selectors.DefaultSelector()
        self.watched.register(self.listener, selectors.EVENT_READ, "")
        self.last: dict[str, socket.socket] = {}  # of each member the last connection
        self.ended: dict[str, None] = {}

    def failed(self) -> str:
        """Who has ended, in a sentence; empty while nobody has."""
        while self._accept():
            pass
        for key, _ in self.watched.select(0):
            if key.fileobj is not self.listener:
                self._hear(key)
        return f"{next(iter(self.ended))} has ended" if self.ended else ""

    def close(self) -> None:
        """Hear nobody any more."""
        for key in list(self.watched.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self.watched.close()

    def _accept(self) -> bool:
        try:
            connection, _ = self.listener.accept()
        except OSError:  # nobody else waits
            return False
        connection.setblocking(False)
        self.watched.register(connection, selectors.EVENT_READ, "")
        return True

    def _hear(self, key: selectors.SelectorKey) -> None:
        """A member's name, or that its process is gone."""
        connection, name = key.fileobj, key.data
        assert isinstance(connection, socket.socket)
        try:
            said = connection.recv(MAX_NAME_BYTES).decode(errors="replace")
        except OSError:
            said = ""
        token, _, name_said = said.partition(" ")
        if not name and token == self.token and name_said:
            self.watched.modify(connection, selectors.EVENT_READ, name_said)
            self.last[name_said] = connection
            self.ended.pop(name_said, None)
            return
        self.watched.unregister(connection)
        connection.close()
        if name and self.last.get(name) is connection:  # not one who has come again
            self.ended[name] = None


def hold(address: tuple[str, int], token: str, name: str) -> socket.socket | None:
    """A member's end, open for as long as this is kept. None where the first one cannot be reached there: then only time
    tells that this member is gone."""
    connection = None
    try:
        connection = socket.create_connection(address, CONNECT_SECONDS)
        connection.sendall(f"{token} {name}".encode()[:MAX_NAME_BYTES])
    except OSError:
        if connection is not None:
            with suppress(OSError):
                connection.close()
        return None
    return connection
