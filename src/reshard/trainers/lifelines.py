"""Whether members live whom nobody there can ask: each holds a connection to the first one, which the system closes when its
process ends, however it does."""

import selectors
import socket
from contextlib import suppress

MAX_NAME_BYTES = 200
CONNECT_SECONDS = 10.0


class Lifelines:
    """The end of the first member, which listens on this host's address `host`."""

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.listener = socket.create_server((host, 0), family=family)
        self.listener.setblocking(False)
        self.address = (host, self.listener.getsockname()[1])
        self.watched = selectors.DefaultSelector()
        self.watched.register(self.listener, selectors.EVENT_READ, "")
        self.ended: list[str] = []

    def failed(self) -> str:
        """Who has ended, in a sentence; empty while nobody has."""
        while ready := self.watched.select(0):
            for key, _ in ready:
                if key.fileobj is self.listener:
                    self._accept()
                else:
                    self._hear(key)
        return f"{self.ended[0]} has ended" if self.ended else ""

    def close(self) -> None:
        """Hear nobody any more."""
        for key in list(self.watched.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self.watched.close()

    def _accept(self) -> None:
        with suppress(OSError):
            connection, _ = self.listener.accept()
            connection.setblocking(False)
            self.watched.register(connection, selectors.EVENT_READ, "")

    def _hear(self, key: selectors.SelectorKey) -> None:
        """A member's name, or that its process is gone."""
        connection, name = key.fileobj, key.data
        assert isinstance(connection, socket.socket)
        try:
            said = connection.recv(MAX_NAME_BYTES)
        except OSError:
            said = b""
        if said:
            self.watched.modify(
                connection, selectors.EVENT_READ, (name + said.decode(errors="replace"))[:MAX_NAME_BYTES]
            )
            return
        self.watched.unregister(connection)
        connection.close()
        if name:  # whoever else connects here is none of the members
            self.ended.append(name)


def hold(address: tuple[str, int], name: str) -> socket.socket | None:
    """A member's end, open for as long as this is kept. None where the first one cannot be reached there: then only time
    tells that this member is gone."""
    try:
        connection = socket.create_connection(address, CONNECT_SECONDS)
        connection.sendall(name.encode()[:MAX_NAME_BYTES])
    except OSError:
        return None
    return connection
