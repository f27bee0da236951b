"""Calls of an engine's server by HTTP, with JSON."""

import json
import os
import socket
import time
from functools import cache
from http.client import HTTPConnection, HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, getproxies, proxy_bypass, urlopen

from reshard.core.errors import ReshardError, first_line

MOST_ANSWER = 1 << 28  # bytes
MOST_OF_ERROR = 4096  # bytes that are read of it
# How long a connection is kept for the next call. Servers close theirs too, uvicorn after 5 s, and a call that is
# sent at that moment is lost.
KEPT_SECONDS = 2.0
# Connections to servers that have answered, by host and port, and when they did.
_kept: dict[str, tuple[HTTPConnection, float]] = {}
os.register_at_fork(after_in_child=_kept.clear)  # the parent goes on to use them


class RefusedError(ReshardError):
    """The answer of a server that refuses a call; `code` is HTTP's."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class EngineServer:
    """A server of an engine, called by its routes.

    `timeout` is in seconds; `start_it` says in an error how to start it so that it has the routes that are called.
    """

    def __init__(self, url: str, timeout: float, start_it: str) -> None:
        self.url, self.timeout, self._start_it = checked_url(url), timeout, start_it

    def _call(self, method: str, route: str, body: dict[str, Any] | None = None) -> Any:
        """Return a route's answer. Raises ReshardError, with the server's text, if it refuses or does not answer."""
        try:
            return call_route(self.url, route, body, timeout=self.timeout, method=method)
        except RefusedError as error:
            if error.code != 404:
                raise
            raise ReshardError(f"{self.url} answers /{route} with 404: {self._start_it}") from error


def checked_url(url: Any) -> str:
    """Return the address of a server without a slash at its end. Raises ReshardError for what is none."""
    if not isinstance(url, str) or not url.startswith(("http://", "https://")):
        raise ReshardError(f"{url!r:.200} is no address of a server such as http://127.0.0.1:8000")
    return url.rstrip("/")


def call_route(
    url: str,
    route: str,
    body: dict[str, Any] | None = None,
    *,
    timeout: float = 60.0,
    method: str | None = None,
) -> Any:
    """Return the answer of a server's route: to a POST of the `body`, or without one to a GET.

    Raises ReshardError, with the server's text, if it refuses (`RefusedError`) or does not answer, and where `url`
    is no address.
    """
    url = checked_url(url)
    data = None if body is None else json.dumps(body).encode()
    request = Request(f"{url}/{route}", data, {"Content-Type": "application/json"}, method=method)
    try:
        code, answer = _sent(request, timeout)
    except (HTTPException, OSError, ValueError) as error:
        raise ReshardError(f"{url} does not answer /{route} ({first_line(error)})") from error
    if code >= 400:
        text = answer[:MOST_OF_ERROR].decode(errors="replace").strip()
        raise RefusedError(f"{url} answers /{route} with {code}: {text[:300]}", code)
    try:
        if len(answer) > MOST_ANSWER:
            raise ValueError(f"more than {MOST_ANSWER:,} bytes")
        return json.loads(answer or b"{}")
    except (ValueError, RecursionError) as error:
        raise ReshardError(f"{url} answers /{route} with something else than JSON") from error


def _sent(request: Request, timeout: float) -> tuple[int, bytes]:
    """Send a request; return the status of the answer, and its bytes."""
    if request.type == "http" and ("http" not in _proxies() or proxy_bypass(request.host)):
        code, answer = _sent_directly(request, timeout)
        if not 300 <= code < 400:
            return code, answer
    try:  # over TLS, or by way of a proxy or a redirection
        with urlopen(request, timeout=timeout) as response:
            return response.status, response.read(MOST_ANSWER + 1)
    except HTTPError as error:
        return error.code, error.read(MOST_OF_ERROR)


def _sent_directly(request: Request, timeout: float) -> tuple[int, bytes]:
    """Send a request over the connection of the last call, if that was a moment ago, or over a new one. A call
    over a new one takes twice as long to arrive."""
    connection = _take_kept(request.host)
    connection.timeout = timeout
    try:
        if connection.sock is not None:
            connection.sock.settimeout(timeout)
        connection.request(request.get_method(), request.selector, request.data, request.headers)
        response = connection.getresponse()
        answer = response.read(MOST_ANSWER + 1 if response.status < 400 else MOST_OF_ERROR)
    except BaseException:
        connection.close()
        raise
    if connection.sock is None or not response.isclosed():  # the server keeps none, or has more to say
        connection.close()
    else:
        _keep(request.host, connection)
    return response.status, answer


def _take_kept(host: str) -> HTTPConnection:
    """Return the connection that is kept to a host, for the caller alone; a new one if there is none that is
    fresh, and that the server has left open."""
    kept = _kept.pop(host, None)
    if kept is None:
        return HTTPConnection(host)
    connection, since = kept
    if time.monotonic() - since < KEPT_SECONDS:
        try:
            connection.sock.settimeout(0)
            connection.sock.recv(1, socket.MSG_PEEK)  # nothing is to come, but an end
        except BlockingIOError:
            return connection
        except OSError:
            pass
    connection.close()
    return connection  # which connects anew


def _keep(host: str, connection: HTTPConnection) -> None:
    """Keep a connection for the next call, and close those that are kept for too long."""
    now = time.monotonic()
    for other, (_, since) in list(_kept.items()):
        if other == host or now - since >= KEPT_SECONDS:
            kept = _kept.pop(other, None)
            if kept is not None:
                kept[0].close()
    _kept[host] = connection, now


@cache
def _proxies() -> dict[str, str]:
    """Return the environment's proxies as they were at the first call, as urllib does."""
    return getproxies()
