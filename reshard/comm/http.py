"""Calls of an engine's server by HTTP, with JSON."""

import json
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from reshard.core.errors import ReshardError, first_line

MOST_ANSWER = 1 << 28  # bytes


class RefusedError(ReshardError):
    """The answer of a server that refuses a call; `code` is HTTP's."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def call_route(
    url: str,
    route: str,
    body: dict[str, Any] | None = None,
    *,
    timeout: float = 60.0,
    method: str | None = None,
) -> Any:
    """Return the answer of a server's route: to a POST of the `body`, or without one to a GET.

    Raises ReshardError, with the server's text, if it refuses (`RefusedError`) or does not answer.
    """
    data = None if body is None else json.dumps(body).encode()
    request = Request(f"{url}/{route}", data, {"Content-Type": "application/json"}, method=method)
    try:
        with urlopen(request, timeout=timeout) as response:
            answer = response.read(MOST_ANSWER + 1)
    except HTTPError as error:
        text = error.read(4096).decode(errors="replace").strip()
        raise RefusedError(f"{url} answers /{route} with {error.code}: {text[:300]}", error.code) from error
    except (HTTPException, OSError, ValueError) as error:
        raise ReshardError(f"{url} does not answer /{route} ({first_line(error)})") from error
    try:
        if len(answer) > MOST_ANSWER:
            raise ValueError(f"more than {MOST_ANSWER:,} bytes")
        return json.loads(answer or b"{}")
    except (ValueError, RecursionError) as error:
        raise ReshardError(f"{url} answers /{route} with something else than JSON") from error
