"""A door: one listening socket of a process, at which several servers admit those who know their secrets.

    door = held_door("10.0.0.1", 29600)                         shared until it is released
    secret = door.invite(60)
    RefitGroup.join("10.0.0.1:29600", 0, 3, secret=secret)      its hub has an entrance of the door
    Registry("10.0.0.1:29600", None, calls)                     has another

Which of them a connection is for shows from the secret that it proves to know; no name of a meeting is sent, so a
stranger learns nothing of what there is. Handshakes run beside each other in a thread of the door, each with its own
deadline, so that slow, silent or numerous strangers do not delay members. What is said afterward is no business of the
door: a server that ends, or is slow, takes nothing from the others.
"""

import errno
import logging
import math
import os
import selectors
import socket
import threading
import time
from collections import deque
from contextlib import ExitStack, suppress
from typing import Any

from reshard.comm.channel import Handshake, Keys, keep_from_forks
from reshard.comm.hosts import BACKLOG, address_of, family_of
from reshard.comm.secret import new_secret, secret_for
from reshard.core.errors import ReshardError

MOST_STRANGERS = 256  # connections whose handshake goes on at once; the oldest gives way
TICK_SECONDS = 1.0  # between two looks at the clock
REST_SECONDS = 0.01  # after which a process that has too many open files tries to take one in again
log = logging.getLogger("reshard")
_doors: "dict[tuple[str, int], Door]" = {}  # of this process, by host and port
_lock = threading.Lock()  # of all doors, and of who is before them or at their entrances


def _forget() -> None:
    """A forked process has neither the sockets nor the threads of its parent's doors."""
    global _lock
    _lock = threading.Lock()
    for door in _doors.values():
        door.is_closed = True
    _doors.clear()


os.register_at_fork(after_in_child=_forget)


class Entrance:
    """The part of a `door` that one server has: who has proved there that it knows the `secret`.

    Before a server has it, until `invited_until`, it keeps those who come.
    """

    def __init__(self, door: "Door", secret: bytes, invited_until: float | None = None) -> None:
        self.door, self.secret, self.invited_until = door, secret, invited_until
        self._admitted: deque[tuple[socket.socket, Keys]] = deque()
        self._woken, self._waker = _wakers()

    def fileno(self) -> int:
        """Return a file descriptor that is readable when `admitted` has something to return."""
        return self._woken.fileno()

    def admitted(self) -> list[tuple[socket.socket, Keys]]:
        """Return the connections, not blocking, that have come since the last call."""
        _quiet(self._woken)
        with _lock:
            admitted = [*self._admitted]
            self._admitted.clear()
        return admitted

    def close(self) -> None:
        """Admit nobody any more. Closes the door if nobody else needs it."""
        self.door._leave(self)

    def _admit(self, connection: socket.socket, keys: Keys) -> None:
        self._admitted.append((connection, keys))
        _wake(self._waker)

    def _discard(self) -> None:
        """End those whom no server has taken."""
        for connection, _ in self._admitted:
            connection.close()
        self._admitted.clear()
        self._woken.close()
        self._waker.close()


class Door:
    """Listens at a `place`, a host and a port, until its last entrance is closed and nobody holds it."""

    ACCEPTED_AT_ONCE = 64

    def __init__(self, listener: socket.socket) -> None:
        host, port = listener.getsockname()[:2]
        self.place = (host, port)
        self.listener, self.holders = listener, 0
        self.entrances: dict[bytes, Entrance] = {}
        self.handshakes: dict[socket.socket, Handshake] = {}  # the oldest first
        self.is_closed = False
        with ExitStack() as made:  # which is closed again where something fails, as with too many open files
            made.callback(listener.close)
            self.selector = selectors.DefaultSelector()
            made.callback(self.selector.close)
            self._woken, self._waker = _wakers()
            made.callback(self._woken.close)
            made.callback(self._waker.close)
            listener.setblocking(False)
            keep_from_forks(listener)
            self.selector.register(listener, selectors.EVENT_READ)
            self.selector.register(self._woken, selectors.EVENT_READ)
            threading.Thread(target=self._serve, name="reshard door", daemon=True).start()
            made.pop_all()
        _doors[self.place] = self

    def entrance(self, secret: bytes) -> Entrance:
        """Return the entrance of a server that admits those who know a secret. Raises OSError if another server has
        that, or if the door is not held, and has a server."""
        with _lock:
            return self._entrance(secret)

    def _entrance(self, secret: bytes) -> Entrance:
        entrance = self.entrances.get(secret)
        if entrance is not None and entrance.invited_until is not None:
            entrance.invited_until = None
            return entrance
        if entrance is not None or self.is_closed or (self.entrances and not self.holders):
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        entrance = self.entrances[secret] = Entrance(self, secret)
        return entrance

    def invite(self, seconds: float) -> str:
        """Return a new secret by which members can meet here. Those who come before the first one wait for it, for so
        many seconds at most. Whoever calls this holds the door. Raises ReshardError if it is closed,
        and OSError where this process has too many open files."""
        secret = new_secret()
        key = secret_for("", secret)
        with _lock:
            if self.is_closed:
                raise ReshardError(f"nobody can meet at {address_of(*self.place)}, which is closed")
            self.entrances[key] = Entrance(self, key, time.monotonic() + seconds)
        return secret

    def release(self) -> None:
        """End one hold of this door. Closes it if nobody else needs it."""
        with _lock:
            self.holders -= 1
            self._close_unless_needed()

    def _leave(self, entrance: Entrance) -> None:
        with _lock:
            if self.entrances.get(entrance.secret) is entrance:
                del self.entrances[entrance.secret]
                entrance._discard()
            self._close_unless_needed()

    def _close_unless_needed(self) -> None:
        """Close the door if nobody holds it and no server has an entrance."""
        served = any(entrance.invited_until is None for entrance in self.entrances.values())
        if not (self.holders or served or self.is_closed):
            self._close()

    def _close(self) -> None:
        """Close the port, and leave the rest to the thread, which may be using it."""
        self.is_closed = True
        self._withdraw(math.inf)
        for connection in list(self.handshakes):
            self._turn_away(connection)
        self.listener.close()
        _doors.pop(self.place, None)
        _wake(self._waker)

    def _withdraw(self, now: float) -> None:
        """Drop the invitations whose time is over."""
        for secret, entrance in list(self.entrances.items()):
            if entrance.invited_until is not None and now >= entrance.invited_until:
                self.entrances.pop(secret)._discard()

    # What its thread does

    def _serve(self) -> None:
        try:
            while not self.is_closed:
                self._serve_once()
        except Exception:
            log.exception("the door at %s, port %d, has failed", *self.place)
            with _lock:
                if not self.is_closed:
                    self._close()
        finally:
            self.selector.close()
            self._woken.close()
            self._waker.close()

    def _serve_once(self) -> None:
        events = self.selector.select(TICK_SECONDS)
        takes_in = True
        with _lock:
            if self.is_closed:
                return
            for key, _ in events:
                if key.fileobj is self.listener:
                    takes_in = self._accept()
                elif key.fileobj is not self._woken:
                    self._go_on(key.fileobj)
            now = time.monotonic()
            for connection in [one for one, handshake in self.handshakes.items() if now > handshake.deadline]:
                self._turn_away(connection)
            self._withdraw(now)
        if not takes_in:
            time.sleep(REST_SECONDS)

    def _accept(self) -> bool:
        """Take in strangers who wait; return False if there is no room for one now."""
        for _ in range(self.ACCEPTED_AT_ONCE):
            try:
                connection, _ = self.listener.accept()
            except BlockingIOError:
                break
            except OSError:  # too many open files, or one that has gone again
                if not self.handshakes:
                    return False
                self._turn_away(next(iter(self.handshakes)))
                continue
            connection.setblocking(False)
            keep_from_forks(connection)
            try:
                self.handshakes[connection] = Handshake(connection)
                self.selector.register(connection, selectors.EVENT_READ)
            except OSError:
                self.handshakes.pop(connection, None)
                connection.close()
            if len(self.handshakes) > MOST_STRANGERS:
                self._turn_away(next(iter(self.handshakes)))
        return True

    def _go_on(self, connection: Any) -> None:
        """Take what a stranger has sent; let it in once it has proved that it knows a secret."""
        if connection not in self.handshakes:  # turned away meanwhile
            return
        try:
            proved = self.handshakes[connection].go_on(self.entrances)
        except (OSError, ReshardError):
            self._turn_away(connection)
            return
        if proved is not None:
            secret, keys = proved
            del self.handshakes[connection]
            self.selector.unregister(connection)
            self.entrances[secret]._admit(connection, keys)

    def _turn_away(self, connection: socket.socket) -> None:
        del self.handshakes[connection]
        with suppress(KeyError, ValueError):
            self.selector.unregister(connection)
        connection.close()


def held_door(host: str, port: int) -> Door:
    """Return this process's door at a host and port, or any free port for 0, which servers may share until
    `Door.release`. Raises OSError if nothing can listen there."""
    place = _place(host, port)
    with _lock:
        door = _door_at(place)
        door.holders += 1
        return door


def entrance_at(host: str, port: int, secret: bytes) -> Entrance:
    """Return an entrance at a host and port for a server that admits those who know a secret: of the door that is held
    there, or of one that is its own. Raises OSError if nothing can listen there, or a server of this secret does."""
    place = _place(host, port)
    with _lock:
        return _entrance_of(_door_at(place), secret)


def entrance_behind(listener: socket.socket, secret: bytes) -> Entrance:
    """Return an entrance of a door of its own, which listens by this socket, and closes it if that fails."""
    with _lock:
        return _entrance_of(Door(listener), secret)


def _entrance_of(door: Door, secret: bytes) -> Entrance:
    try:
        return door._entrance(secret)
    except BaseException:
        door._close_unless_needed()
        raise


def _place(host: str, port: int) -> tuple[str, int]:
    """Return an address of a host by its number, and the port: that of a door, if any, since a name may have several
    addresses, in an order that changes."""
    found = socket.getaddrinfo(host, port, family_of(host), socket.SOCK_STREAM)
    places = [(str(place[0]), port) for *_, place in found]
    return next((place for place in places if place in _doors), places[0])


def _door_at(place: tuple[str, int]) -> Door:
    return _doors.get(place) or Door(socket.create_server(place, family=family_of(place[0]), backlog=BACKLOG))


def _wakers() -> tuple[socket.socket, socket.socket]:
    """Return both ends of what wakes a thread, the first of which it reads."""
    woken, waker = socket.socketpair()
    for end in (woken, waker):
        end.setblocking(False)
        keep_from_forks(end)
    return woken, waker


def _wake(waker: socket.socket) -> None:
    with suppress(OSError):  # it has been woken often enough, or has gone
        waker.send(b"!")


def _quiet(woken: socket.socket) -> None:
    with suppress(BlockingIOError):
        while woken.recv(4096):
            pass
