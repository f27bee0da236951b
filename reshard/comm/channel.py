"""Authenticated messages over a socket.

Both ends prove that they know a secret before either says anything else. These messages have fixed
sizes, so that a stranger cannot choose how much is read:

    server: magic, nonce                                   40 bytes
    client: nonce, proof of the client                     64 bytes
    server: proof of the server, or zeros for a refusal    32 bytes

After that each direction has a key of its own, and every frame carries a code over its place in the
sequence and all of its bytes: a frame that was altered, replayed, left out or taken from another
connection ends the connection. Heads are JSON, bodies bytes; nothing is unpickled. Nothing is
encrypted.
"""

import hashlib
import hmac
import json
import math
import os
import secrets
import select
import socket
import struct
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

from reshard.core.errors import ReshardError, first_line

MAGIC = b"reshard1"
NONCE_BYTES = PROOF_BYTES = 32
CHALLENGE_BYTES, ANSWER_BYTES = len(MAGIC) + NONCE_BYTES, NONCE_BYTES + PROOF_BYTES
REFUSAL = bytes(PROOF_BYTES)
HANDSHAKE_SECONDS = 10.0  # that a stranger may take, however slowly it speaks
CODE_BYTES = 16
PREFIX = struct.Struct(f"<IQ{CODE_BYTES}s")
MOST_HEAD_BYTES, MOST_BODY_BYTES = 1 << 24, 1 << 36
READ_BYTES = 1 << 20
_open: "weakref.WeakSet[socket.socket]" = weakref.WeakSet()


class WrongSecretError(ReshardError):
    """The two ends of a connection do not know the same secret."""


class BrokenChannelError(Exception):
    """A connection has ended, or its other end has sent bytes that are not a message."""


class Keys(NamedTuple):
    """The keys of a connection's two directions."""

    of_client: bytes
    of_server: bytes


class Message(NamedTuple):
    """A head, a body, and the body's digest, by which it can be passed on without another look at it."""

    head: dict[str, Any]
    body: bytes
    digest: bytes


def digest_of(body: bytes | bytearray | memoryview) -> bytes:
    """Return the digest of a body; that of an empty one is empty."""
    return hashlib.sha256(body).digest() if len(body) else b""


def _proof(secret: bytes, label: bytes, challenge: bytes, nonce: bytes) -> bytes:
    return hmac.digest(secret, label + challenge + nonce, "sha256")


def _keys(secret: bytes, challenge: bytes, nonce: bytes) -> Keys:
    return Keys(
        _proof(secret, b"frames of the client", challenge, nonce),
        _proof(secret, b"frames of the server", challenge, nonce),
    )


class FrameWriter:
    """Makes the frames of one direction."""

    def __init__(self, key: bytes) -> None:
        self.key, self.sequence = key, 0

    def frame(self, head: dict[str, Any], body: bytes = b"", digest: bytes | None = None) -> bytes:
        """Return prefix and head; the body follows them on the wire. `digest` is the body's, where
        it is known."""
        text = json.dumps(head, separators=(",", ":")).encode()
        code = frame_code(
            self.key, self.sequence, text, len(body), digest_of(body) if digest is None else digest
        )
        self.sequence += 1
        return PREFIX.pack(len(text), len(body), code) + text


def frame_code(key: bytes, sequence: int, head: bytes, body_bytes: int, digest: bytes) -> bytes:
    """Return the code that only a holder of the key can make for a frame in this place."""
    hashed = hashlib.blake2b(key=key, digest_size=CODE_BYTES)
    hashed.update(struct.pack("<QIQ", sequence, len(head), body_bytes) + digest + head)
    return hashed.digest()


class FrameReader:
    """Reads the messages in the bytes of one direction. Its buffer grows with what arrives,
    whatever a frame says of its length."""

    def __init__(self, key: bytes) -> None:
        self.key, self.sequence, self.buffer = key, 0, bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        """Yield the messages that are whole now. Raises BrokenChannelError for a frame that the
        other end has not made."""
        self.buffer += data
        while (message := self._next()) is not None:
            yield message

    def _next(self) -> Message | None:
        if len(self.buffer) < PREFIX.size:
            return None
        head_bytes, body_bytes, code = PREFIX.unpack_from(self.buffer)
        if head_bytes > MOST_HEAD_BYTES or body_bytes > MOST_BODY_BYTES:
            raise BrokenChannelError("what it sent is not a message")
        start, end = PREFIX.size + head_bytes, PREFIX.size + head_bytes + body_bytes
        if len(self.buffer) < end:
            return None
        with memoryview(self.buffer) as view:
            text, body = bytes(view[PREFIX.size : start]), bytes(view[start:end])
        del self.buffer[:end]
        digest = digest_of(body)
        if not hmac.compare_digest(code, frame_code(self.key, self.sequence, text, body_bytes, digest)):
            raise BrokenChannelError("a message was altered, replayed or lost")
        self.sequence += 1
        try:
            head = json.loads(text)
        except ValueError as error:
            raise BrokenChannelError("what it sent is not a message") from error
        if not isinstance(head, dict):
            raise BrokenChannelError("what it sent is not a message")
        return Message(head, body, digest)


class Channel:
    """An authenticated connection whose user waits for messages. Several threads may send, one receives."""

    def __init__(self, connection: socket.socket, sending: bytes, receiving: bytes) -> None:
        self.connection, self.writer, self.reader = connection, FrameWriter(sending), FrameReader(receiving)
        self.lock = threading.Lock()
        self.received: list[Message] = []
        prepare(connection)
        connection.settimeout(None)

    def limit_sending(self, seconds: float) -> None:
        """Break the channel if the other end does not read a message within `seconds`; 0 means no limit."""
        limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def send(self, head: dict[str, Any], body: bytes = b"") -> None:
        """Send a message. Raises BrokenChannelError if the other end is gone, or takes nothing in."""
        with self.lock:
            try:
                frame = self.writer.frame(head, body)
                self.connection.sendall(frame if len(body) > READ_BYTES else frame + body)
                if len(body) > READ_BYTES:
                    self.connection.sendall(body)
            except OSError as error:
                raise BrokenChannelError(first_line(error)) from error

    def receive(self, within: float | None = None) -> Message | None:
        """Return the next message, or None if none arrives `within` so many seconds; None and infinity mean
        no limit. Raises BrokenChannelError."""
        deadline = None if within is None or within == math.inf else time.monotonic() + within
        while not self.received:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                poll = select.poll()
                poll.register(self.connection, select.POLLIN)
                if not poll.poll(None if left is None else left * 1000):
                    return None
                data = self.connection.recv(READ_BYTES)
            except (OSError, ValueError) as error:
                raise BrokenChannelError(first_line(error)) from error
            if not data:
                raise BrokenChannelError("the connection has ended")
            self.received.extend(self.reader.feed(data))
        return self.received.pop(0)

    def close(self) -> None:
        """End the connection, which the other end sees."""
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        self.connection.close()


def prepare(connection: socket.socket) -> None:
    """Probe the other host after 20 silent seconds, and give up after 30 more.

    A host that is only busy answers, also where its process is stopped and takes nothing in.
    TCP_USER_TIMEOUT would count that against it.
    """
    options = {
        socket.TCP_KEEPIDLE: 20,
        socket.TCP_KEEPINTVL: 10,
        socket.TCP_KEEPCNT: 3,
        socket.TCP_NODELAY: 1,
    }
    for option, value in options.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    keep_from_forks(connection)


def keep_from_forks(connection: socket.socket) -> None:
    """Close this socket in every process that is forked from here: else the other end would not see
    this one's end."""
    _open.add(connection)


def _close_all() -> None:
    for connection in list(_open):
        connection.close()
    _open.clear()


os.register_at_fork(after_in_child=_close_all)


def connect(host: str, port: int, secret: bytes, deadline: float) -> Channel:
    """Connect to a server that knows the secret, as soon as there is one.

    Raises WrongSecretError if it knows another one, OSError where none answers by `deadline`.
    """
    while True:
        try:
            connection = socket.create_connection((host, port), timeout=max(0.1, deadline - time.monotonic()))
            try:
                keys = _introduce(connection, secret, deadline)
            except BaseException:
                connection.close()
                raise
            return Channel(connection, keys.of_client, keys.of_server)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def _introduce(connection: socket.socket, secret: bytes, deadline: float) -> Keys:
    """Carry out the client's end of a handshake."""
    challenge = _read(connection, CHALLENGE_BYTES, deadline)
    if not challenge.startswith(MAGIC):
        raise ConnectionError("what serves there is not reshard, or another version of it")
    nonce = secrets.token_bytes(NONCE_BYTES)
    connection.sendall(nonce + _proof(secret, b"client", challenge, nonce))
    proof = _read(connection, PROOF_BYTES, deadline)
    if not hmac.compare_digest(proof, _proof(secret, b"server", challenge, nonce)):
        raise WrongSecretError("what serves there does not know the same secret")
    return _keys(secret, challenge, nonce)


def _read(connection: socket.socket, length: int, deadline: float) -> bytes:
    data = b""
    while len(data) < length:
        connection.settimeout(max(0.1, deadline - time.monotonic()))
        part = connection.recv(length - len(data))
        if not part:
            raise ConnectionError("the connection has ended")
        data += part
    return data


class Handshake:
    """The server's end of a handshake, which takes bytes as they come."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection, self.deadline = connection, time.monotonic() + HANDSHAKE_SECONDS
        self.challenge, self.answer = MAGIC + secrets.token_bytes(NONCE_BYTES), b""
        connection.send(self.challenge)

    def go_on(self, among: Iterable[bytes]) -> tuple[bytes, Keys] | None:
        """Read what has come. Once the other end has proved that it knows one of these secrets, return that and the
        keys. Raises OSError, or WrongSecretError if it knows none of them."""
        part = self.connection.recv(ANSWER_BYTES - len(self.answer))
        if not part:
            raise ConnectionError("the connection has ended")
        self.answer += part
        if len(self.answer) < ANSWER_BYTES:
            return None
        nonce, proof = self.answer[:NONCE_BYTES], self.answer[NONCE_BYTES:]
        known = [
            secret
            for secret in among
            if hmac.compare_digest(proof, _proof(secret, b"client", self.challenge, nonce))
        ]
        if not known:
            self.connection.send(REFUSAL)
            raise WrongSecretError("it does not know the secret")
        secret = known[0]
        self.connection.send(_proof(secret, b"server", self.challenge, nonce))
        return secret, _keys(secret, self.challenge, nonce)
