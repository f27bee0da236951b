"""A registry: a server where others, who know its secret, look who is there, and put themselves down or cross
themselves off."""

import errno
import time
from collections.abc import Callable, Mapping
from typing import Any

from reshard.comm.channel import BrokenChannelError, Message, WrongSecretError, connect
from reshard.comm.door import entrance_at
from reshard.comm.hosts import parsed
from reshard.comm.secret import HOW, secret_for
from reshard.comm.server import Client, Server
from reshard.core.errors import ReshardError, first_line

CLOSE_SECONDS = 5.0


class Registry(Server):
    """Serves `calls` by name at an address, in a thread of its own, until it is closed. A call gets its caller's
    arguments, returns what JSON can say, and is short, since others wait meanwhile."""

    def __init__(self, address: str, secret: str | None, calls: Mapping[str, Callable[..., Any]]) -> None:
        host, port = parsed(address)
        key = secret_for(host, secret)
        try:
            super().__init__(entrance_at(host, port, key))
        except (OSError, ValueError) as error:
            taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
            hint = ": where another server of this process is there, it has the same secret: give secret= another"
            raise ReshardError(
                f"no registry can serve at {address} ({first_line(error)}){hint if taken else ''}"
            ) from error
        self.calls = calls
        self.start()

    def close(self) -> None:
        """End the server, and wait until its port is free, unless others are admitted at it."""
        self.stop()
        self.closed.wait(CLOSE_SECONDS)

    def handle(self, client: Client, message: Message) -> None:
        """Carry out a call, and answer with what it returns, or why it does not. Raises ReshardError for what is no
        call, as of a member that takes this for its meeting."""
        if "call" not in message.head:
            raise ReshardError("what it sent is no call of a registry")
        name, arguments = str(message.head.get("call")), message.head.get("arguments", {})
        try:
            if name not in self.calls:
                raise ReshardError(f"there is no call {name!r:.80}: give both the same reshard")
            answer = {"result": self.calls[name](**arguments)}
        except (ReshardError, TypeError) as error:
            answer = {"error": first_line(error)}
        self.send(client, answer)

    def disconnected(self, client: Client) -> None:
        """Nothing: a caller leaves nothing behind."""

    def sweep(self, now: float) -> None:
        """Nothing: nobody waits for anything."""

    def is_waited_for(self) -> bool:
        return False

    def is_over(self) -> bool:
        return False


def ask(address: str, call: str, timeout: float = 10.0, secret: str | None = None, **arguments: Any) -> Any:
    """Return what the registry at an address says to a call. Raises ReshardError with what it raises, and if it does
    not answer within `timeout` seconds."""
    host, port = parsed(address)
    key = secret_for(host, secret)
    try:
        channel = connect(host, port, key, time.monotonic() + timeout)
        try:
            channel.send({"call": call, "arguments": arguments})
            message = channel.receive(timeout)
        finally:
            channel.close()
    except WrongSecretError as error:
        raise ReshardError(
            f"the registry at {address} lets nobody in ({error}, or no registry is served there): {HOW}"
        ) from error
    except (OSError, ValueError, BrokenChannelError) as error:
        why = getattr(error, "strerror", None) or first_line(error)
        raise ReshardError(
            f"no registry answers at {address} ({why}): a trainer opens one with Fleet(source, ADDRESS, registry=True)"
        ) from error
    if message is None:
        raise ReshardError(f"the registry at {address} does not answer within {timeout:g} s")
    if "error" in message.head:
        raise ReshardError(str(message.head["error"]))
    return message.head.get("result")
