"""A torch store over the hub, by which process groups of members find each other: addresses and NCCL's id travel
authenticated."""

import threading
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from reshard.comm.channel import BrokenChannelError, connect
from reshard.comm.hosts import parsed

LONGEST_SECONDS = 1e9


class HubStore(dist.Store):
    """The part of a store that torch's process groups use, over a connection of its own, since their calls wait.

    Waits end with the transaction in which it was made, where that fails. Torch does not keep it: whoever has made a process
    group with it does.
    """

    def __init__(self, address: str, secret: bytes, timeout: float, turn: int) -> None:
        super().__init__()
        self.seconds, self.turn = timeout, turn
        host, port = parsed(address)
        try:
            self.channel = connect(host, port, secret, time.monotonic() + timeout)
        except OSError as error:
            raise RuntimeError(f"the hub at {address} cannot be reached ({error})") from error
        self.lock, self.requests = threading.Lock(), 0

    def __del__(self) -> None:
        if hasattr(self, "channel"):
            self.channel.close()

    def set(self, key: str, value: Any) -> None:
        """Keep a value under a key."""
        self._ask(
            {"op": "set", "key": key},
            value.encode() if isinstance(value, str) else bytes(value),
            self.seconds,
        )

    def get(self, key: str) -> bytes:
        """Return a value; waits for it."""
        return self._wanted([key], self.seconds)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until these keys have values."""
        self._wanted(keys, self.seconds if timeout is None else timeout.total_seconds())

    def check(self, keys: list[str]) -> bool:
        """Return True where these keys have values."""
        head, _ = self._ask({"op": "get", "keys": keys, "timeout": 0}, b"", self.seconds)
        return "absent" not in head

    def set_timeout(self, timeout: timedelta) -> None:
        """Bound the waits that come."""
        self.seconds = timeout.total_seconds()

    def _wanted(self, keys: list[str], seconds: float) -> bytes:
        seconds = min(seconds, LONGEST_SECONDS)
        head, body = self._ask({"op": "get", "keys": keys, "timeout": seconds}, b"", seconds)
        if head.get("failed") is not None:
            raise RuntimeError("another member has failed")
        if "absent" in head:
            raise dist.DistStoreError(f"{', '.join(keys)} did not come within {seconds:g} s")
        return body

    def _ask(self, request: dict[str, Any], body: bytes, seconds: float) -> tuple[dict[str, Any], bytes]:
        with self.lock:
            self.requests += 1
            try:
                self.channel.send(request | {"id": self.requests, "turn": self.turn}, body)
                deadline = time.monotonic() + seconds + 3.0
                while (message := self.channel.receive(max(0.0, deadline - time.monotonic()))) is not None:
                    if message.head.get("id") == self.requests:
                        return message.head, message.body
            except BrokenChannelError as error:
                raise RuntimeError(f"the hub does not answer ({error})") from error
        raise RuntimeError("the hub does not answer")
