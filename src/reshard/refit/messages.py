"""What members tell each other through the store: a key for each message, which begins with the number of the turn.

Nothing here waits for anybody. Payloads are JSON and raw arrays; nothing is unpickled.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from reshard.core.errors import ReshardError, first_line


class Messages:
    """Those of one member, `rank` of `size`, in the turn that it is in."""

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self.store, self.rank, self.size = store, rank, size
        self.names = {r: f"rank {r}" for r in range(size)}
        self.turns = self._tidied = 0
        self._posted: list[str] = []
        self._lost = ""  # why the store is not asked any more

    def post(self, key: str, payload: bytes = b"") -> None:
        """Publish a payload under a key of this rank."""
        name = self._key(f"{key}/{self.rank}")
        self._call(self.store.set, name, payload or b"-")
        if name not in self._posted:
            self._posted.append(name)

    def count(self, key: str, value: int) -> None:
        """Publish how far this rank has come: a number that grows."""
        self.post(key, str(value).encode())

    def posted(self, key: str, ranks: Iterable[int]) -> list[bytes]:
        """What these ranks have published under `key`, which all have."""
        names = [self._key(f"{key}/{rank}") for rank in ranks]
        found = self._call(self.store.multi_get, names) if names else []
        return [b"" if payload == b"-" else payload for payload in found]

    def have_posted(self, key: str, ranks: Iterable[int]) -> bool:
        """Whether all of these ranks have published under `key`."""
        return self._call(self.store.check, [self._key(f"{key}/{rank}") for rank in ranks])

    def lacking(self, key: str, ranks: Iterable[int]) -> list[int]:
        """Those of these ranks that have not published under `key`."""
        return self._absent([*ranks], lambda rank: self._key(f"{key}/{rank}"))

    def _absent(self, ranks: Sequence[int], key: Callable[[int], str]) -> list[int]:
        """The ranks whose key is not there; where that is so of few, few calls find them."""
        if not ranks or self._call(self.store.check, [*map(key, ranks)]):
            return []
        if len(ranks) == 1:
            return [*ranks]
        half = len(ranks) // 2
        return self._absent(ranks[:half], key) + self._absent(ranks[half:], key)

    def tally(self, key: str, more: int = 0) -> int:
        """A number that all members add to in a turn, from 0 on: what it is now, with `more`."""
        return int(self._call(self.store.add, self._key(key), more))

    def raise_tally(self, key: str, known: int) -> int:
        """One more than a tally that was `known`, unless another member has raised it since; what it is now."""
        return int(self._swap(self._key(key), str(known), str(known + 1)))

    def write(self, key: str, line: str) -> None:
        """Add a line to those that all members write under `key` in a turn."""
        self._call(self.store.append, self._key(key), line + "\n")  # type: ignore[attr-defined]

    def written(self, key: str) -> list[str]:
        """The lines that members have written under `key`, of which this one has written one."""
        return self._call(self.store.get, self._key(key)).decode().splitlines()

    def forget(self) -> None:
        """Delete what this member has left of earlier turns, which all have ended once all have come to this one. Done once
        a turn, when there is time for it, or at its end.

        Who serves the store may be gone by then, after the last refit of a job; the next wait would say so.
        """
        if self._tidied == self.turns:
            return
        self._tidied = self.turns
        earlier = [name for name in self._posted if not name.startswith(self._key(""))]
        self._posted = self._posted[len(earlier) :]
        with suppress(RuntimeError, dist.DistError):
            for name in [*earlier, *self._left_by_all()]:
                self.store.delete_key(name)

    def _left_by_all(self) -> list[str]:
        """The keys of earlier turns that are no member's own, and that this one deletes."""
        return []

    def _key(self, name: str) -> str:
        return f"{self.turns}/{name}"

    def _swap(self, key: str, expected: str, desired: str) -> str:
        """Compare and set; the value that the key has then."""
        return self._call(self.store.compare_set, key, expected, desired).decode()

    def _call(self, function: Callable, *args: Any) -> Any:
        server, me = self.names[0], self.names[self.rank]
        who = f"{server}, which serves the store that the members meet at, does not answer {me}"
        if self._lost:
            raise ReshardError(f"{who} ({self._lost}): meet again to go on")
        try:
            return function(*args)
        except (RuntimeError, dist.DistError) as error:
            self._lost = first_line(error)
            raise ReshardError(f"{who} ({self._lost})") from error
