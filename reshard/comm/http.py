"""Calls of an engine's server by HTTP, with JSON."""

import json
import socket
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from reshard.core.errors import ReshardError, first_line

MOST_ANSWER = 1 << 28  # bytes


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


def is_address(place: Any) -> bool:
    """Return True for the address of a server, such as ``http://127.0.0.1:8000``."""
    return isinstance(place, str) and place.startswith(("http://", "https://"))


def _why(error: Exception) -> str:
    """Return why a server does not answer, without what urllib puts around it: ``Connection refused``."""
    reason = error.reason if isinstance(error, URLError) and isinstance(error.reason, Exception) else error
    return getattr(reason, "strerror", None) or first_line(reason)


def checked_url(url: Any) -> str:
    """Return the address of a server without a trailing slash. Raises ReshardError if it is not an
    address."""
    if not is_address(url):
        raise ReshardError(f"{url!r:.200} is not the address of a server such as http://127.0.0.1:8000")
    return url.rstrip("/")


def is_closed(url: str, timeout: float = 5.0) -> bool:
    """Return True if a server has ended: its host answers, within so many seconds, that nothing listens there. False
    also where the host does not answer."""
    at = urlsplit(url)
    try:
        port = at.port or (443 if at.scheme == "https" else 80)
        socket.create_connection((at.hostname or "", port), timeout).close()
    except ConnectionRefusedError:
        return bool(at.hostname)
    except (OSError, ValueError):  # a port that is none
        pass
    return False


def call_route(
    url: str,
    route: str,
    body: dict[str, Any] | None = None,
    *,
    timeout: float = 60.0,
    method: str | None = None,
) -> Any:
    """Return the answer of a server's route: to a POST of the `body`, or without one to a GET.

    Raises ReshardError, with the server's text, if it refuses (`RefusedError`) or does not answer, and if `url`
    is no address.
    """
    url = checked_url(url)
    data = None if body is None else json.dumps(body).encode()
    request = Request(f"{url}/{route}", data, {"Content-Type": "application/json"}, method=method)
    try:
        with urlopen(request, timeout=timeout) as response:
            answer = response.read(MOST_ANSWER + 1)
    except HTTPError as error:
        try:
            text = error.read(4096).decode(errors="replace").strip()
        except (HTTPException, OSError) as cut_off:
            text = first_line(cut_off)
        raise RefusedError(f"{url} answers /{route} with {error.code}: {text[:300]}", error.code) from error
    except (HTTPException, OSError, ValueError) as error:
        raise ReshardError(f"{url} does not answer /{route} ({_why(error)})") from error
    try:
        if len(answer) > MOST_ANSWER:
            raise ValueError(f"more than {MOST_ANSWER:,} bytes")
        return json.loads(answer or b"{}")
    except (ValueError, RecursionError) as error:
        raise ReshardError(f"{url} answers /{route} with something else than JSON") from error
