"""A torch store over the hub, by which process groups of members find each other: addresses and
NCCL's id travel authenticated."""

import threading
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from reshard.comm.channel import BrokenChannelError, connect
from reshard.comm.hosts import parsed
from reshard.comm.protocol import GetValues, Request, SetValue, encode

LONGEST_SECONDS = 1e9
GRACE_SECONDS = 3.0  # beyond the time limit, within which a hub that lives answers


class HubStore(dist.Store):
    """The part of a store that torch's process groups use, over a connection of its own, since its
    calls wait.

    Waits end if the transaction in which the store was made fails. Torch does not keep a reference to it, so
    whoever makes a process group with it must.
    """

    def __init__(self, address: str, secret: bytes, timeout: float, transaction: int) -> None:
        super().__init__()
        self.seconds, self.transaction = timeout, transaction
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
        self._request(SetValue(key), value.encode() if isinstance(value, str) else bytes(value), self.seconds)

    def get(self, key: str) -> bytes:
        """Return a value; waits for it."""
        return self._get_values([key], self.seconds)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until these keys have values."""
        self._get_values(keys, self.seconds if timeout is None else timeout.total_seconds())

    def check(self, keys: list[str]) -> bool:
        """Return True if these keys have values."""
        head, _ = self._request(GetValues(keys, 0), b"", self.seconds)
        return "absent" not in head

    def set_timeout(self, timeout: timedelta) -> None:
        """Bound the waits that come."""
        self.seconds = timeout.total_seconds()

    def _get_values(self, keys: list[str], seconds: float) -> bytes:
        seconds = min(seconds, LONGEST_SECONDS)
        head, body = self._request(GetValues(keys, seconds), b"", seconds)
        if head.get("failed") is not None:
            raise RuntimeError("another member has failed")
        if "absent" in head:
            raise dist.DistStoreError(f"{', '.join(keys)} did not come within {seconds:g} s")
        return body

    def _request(self, request: Request, body: bytes, seconds: float) -> tuple[dict[str, Any], bytes]:
        with self.lock:
            self.requests += 1
            envelope = {"id": self.requests, "transaction": self.transaction}
            try:
                self.channel.send(encode(request) | envelope, body)
                deadline = time.monotonic() + seconds + GRACE_SECONDS
                while (message := self.channel.receive(max(0.0, deadline - time.monotonic()))) is not None:
                    if message.head.get("id") == self.requests:
                        return message.head, message.body
            except BrokenChannelError as error:
                raise RuntimeError(f"the hub does not answer ({error})") from error
        raise RuntimeError("the hub does not answer")
