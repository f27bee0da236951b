"""A version of a chain of deltas into several servers, which switch together or not at all."""

import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from reshard.comm.http import checked_url
from reshard.core.errors import ReshardError, first_line, listed
from reshard.core.limits import MOST_BUCKET_BYTES, PENDING_BYTES, check_number, check_switch
from reshard.engines.kinds import is_sglang
from reshard.engines.sglang.delta_calls import drop_deltas, read_deltas, write_deltas
from reshard.engines.sglang.delta_calls import roll_back as roll_back_sglang

SGLANG_SECONDS = 600.0  # for which its ranks wait for each other


class _Following(Protocol):
    """A server on its way to a version."""

    def prepare(self) -> None:
        """Have it read and check what leads to the version, while it serves."""

    def write(self) -> None:
        """Have it write and serve that."""

    def drop(self) -> bool:
        """Have it write nothing any more; return whether it had written other weights."""

    def go_back(self) -> None:
        """Have it serve again what it did before."""


class _Vllm:
    def __init__(self, url: str, chain: str, version: int, verify: bool, pending_bytes: int) -> None:
        from reshard.delta.serving import ServerDeltas  # which needs more packages than a refit

        self._url, self._deltas = url, ServerDeltas(url, chain, version, verify, pending_bytes)

    def prepare(self) -> None:
        self._deltas.prepare()

    def write(self) -> None:
        self._deltas.write()

    def drop(self) -> bool:
        return self._deltas.drop()

    def go_back(self) -> None:
        from reshard.delta.serving import roll_back

        roll_back(self._url)


class _Sglang:
    def __init__(self, url: str, chain: str, version: int, verify: bool, pending_bytes: int) -> None:
        self._url, self._session, self._version = url, uuid.uuid4().hex, version
        self._options = chain, version, verify, None, SGLANG_SECONDS, pending_bytes
        self._before: int | None = None

    def prepare(self) -> None:
        read_deltas(self._url, self._session, *self._options)

    def write(self) -> None:
        write_deltas(self._url, self._session, self._version, SGLANG_SECONDS)

    def drop(self) -> bool:
        wrote, self._before = drop_deltas(self._url, self._session)
        return wrote

    def go_back(self) -> None:
        if self._before is None:
            raise ReshardError("it keeps no version to go back to")
        roll_back_sglang(self._url, self._before, timeout=SGLANG_SECONDS)


def apply_deltas_together(
    urls: Sequence[str],
    chain: str | Path,
    version: int | None = None,
    verify: bool = False,
    pending_bytes: int = PENDING_BYTES,
) -> int:
    """Bring several servers to a version of a chain, by default the newest, or none of them; return that version.

    `urls` are addresses of ``vllm serve`` and of SGLang's servers, which reach the chain by the same path or URL; the
    other arguments are those of `reshard.delta.apply_deltas`. All read and check the deltas while they serve, and none
    writes before all have that. Then all write at once; where one cannot, those that have go back to what they served,
    bit for bit, and those that have not, as where a call was not answered in time, are kept from it.

    Raises ReshardError, naming the servers, if one cannot read or write the version, and says which could not go back,
    and of which it is not known what they serve.
    """
    from reshard.delta.chain import Chain, target_of  # which need more packages than a refit

    check_switch(verify, "verify")
    check_number(pending_bytes, "pending_bytes", MOST_BUCKET_BYTES, 0)
    places = [checked_url(url) for url in ([urls] if isinstance(urls, str) else urls)]
    if not places or len({*places}) < len(places):
        raise ReshardError("give the address of each server once, and of one at least")
    with Chain(chain) as opened:
        target, _ = target_of(opened, version)
    servers: dict[str, _Following] = {}
    wrote: list[str] = []

    def meet(url: str) -> None:
        kind = _Sglang if is_sglang(url) else _Vllm
        servers[url] = kind(url, str(chain), target, verify, pending_bytes)
        servers[url].prepare()

    def drop(url: str) -> None:
        if url in servers and servers[url].drop():
            wrote.append(url)

    with ThreadPoolExecutor(len(places)) as threads:

        def failed(call: Callable[[str], None], of: Sequence[str]) -> dict[str, str]:
            """Return which of these servers' calls have failed, with why."""
            calls = {url: threads.submit(call, url) for url in of}
            errors = {url: made.exception() for url, made in calls.items()}
            return {url: first_line(error) for url, error in errors.items() if error is not None}

        unread = failed(meet, places)
        unwritten = {} if unread else failed(lambda url: servers[url].write(), places)
        if not unread and not unwritten:
            return target
        unknown = failed(drop, places)
        stuck = failed(lambda url: servers[url].go_back(), wrote)
    if unread:
        raise ReshardError(f"no server was written: {_said(unread)}")
    back = [url for url in places if url in wrote and url not in stuck]
    raise ReshardError(
        f"version {target} is not served by all: {_said(unwritten)}"
        + (f"; {listed(back)} went back" if back else "")
        + (f"; these serve it, and cannot go back: {_said(stuck)}" if stuck else "")
        + (f"; it is not known what these serve: {_said(unknown)}" if unknown else "")
    )


def _said(errors: dict[str, str]) -> str:
    return "; ".join(f"{url}: {error}" for url, error in errors.items())
