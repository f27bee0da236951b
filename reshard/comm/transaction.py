"""A transaction as the hub sees it: who has come, what has been published, and how it ended.

A connect or a refit is one, in which all members take part in the same order. It goes from nothing to `GO` (all are here), from
there to `DONE` (all have what they need), or, from either, to failed, once and for good: so no member can take for good what
another has given up, however late it comes.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

GO, DONE = "go", "done"
HERE = "here"
MOST_DIGITS = 18


def number_in(payload: bytes) -> int | None:
    """Return the number that a member has published for a count; None where what it published is none."""
    return int(payload) if payload.isdigit() and len(payload) <= MOST_DIGITS else None


class Posted(NamedTuple):
    """A payload that a member has published, with its digest."""

    payload: bytes
    digest: bytes


@dataclass
class Wait:
    """A request that is answered later: once none of `missing` is left, when its time is over, or when the transaction fails.

    `rank` waits for others to publish under `key`, or to come to a step; `what` says in a sentence what those who are late did
    not do. With `count` a number has to be published that is not smaller.
    """

    rank: int
    request: int
    number: int
    key: str
    ranks: list[int]
    missing: set[int]
    what: str
    seconds: float
    deadline: float
    count: int | None = None
    answered: bool = False
    answer: dict[str, Any] = field(default_factory=dict)


class Transaction:
    """One of them, by its number."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.verdict = ""
        self.failure: dict[str, Any] | None = None
        self.arrived: dict[str, set[int]] = {HERE: set(), DONE: set()}
        self.version: tuple[int, int] | None = None  # with the rank that said it first
        self.last_version = 0  # that a member has had
        self.verify = False
        self.notes: dict[int, str] = {}
        self.posts: dict[str, dict[int, Posted]] = {}
        self.joined: dict[
            str, tuple[list[int], bytes, bytes]
        ] = {}  # what all have published under a key, as one body
        self.waits: dict[str, list[Wait]] = {}

    def is_decided(self) -> bool:
        """Return True once it has failed, or is done."""
        return self.failure is not None or self.verdict == DONE

    def come(self, step: str, rank: int, head: dict[str, Any]) -> dict[str, Any] | None:
        """Count a member in at a step. Returns why it cannot be, where it says another version than one before it."""
        if step == HERE:
            version = head.get("version")
            if version is not None:
                self.version = self.version or (int(version), rank)
                if self.version[0] != int(version):
                    return {"version": self.version[0], "who": self.version[1]}
            self.verify |= bool(head.get("verify"))
            self.last_version = max(self.last_version, int(head.get("last") or 0))
            if note := head.get("note"):
                self.notes[rank] = str(note)
        self.arrived[step].add(rank)
        return None

    def go_answer(self) -> dict[str, Any]:
        """Return what all are told once they are here."""
        version = self.version[0] if self.version is not None else self.last_version + 1
        return {
            "version": version,
            "verify": self.verify,
            "notes": [[rank, note] for rank, note in self.notes.items()],
        }

    def post(self, key: str, rank: int, posted: Posted) -> None:
        """Take what a member publishes, in the place of what it had published under this key."""
        self.posts.setdefault(key, {})[rank] = posted
        self.joined.pop(key, None)

    def lacking(self, key: str, ranks: list[int], count: int | None) -> set[int]:
        """Return those of these ranks that have not published under a key, or no such number."""
        posts = self.posts.get(key, {})
        lacking = {rank for rank in ranks if rank not in posts}
        if count is not None:
            numbers = {rank: number_in(posts[rank].payload) for rank in ranks if rank in posts}
            lacking |= {rank for rank, number in numbers.items() if number is None or number < count}
        return lacking

    def without_number(self, key: str, ranks: list[int]) -> list[int]:
        """Return those of these ranks that have published something else than a number under a key."""
        posts = self.posts.get(key, {})
        return [rank for rank in ranks if rank in posts and number_in(posts[rank].payload) is None]

    def body_of(self, key: str, ranks: list[int]) -> tuple[list[int], bytes, bytes | None]:
        """Return what these ranks have published, one behind the other, its lengths before it and its digest behind it."""
        posts = self.posts[key]
        if len(ranks) == 1:
            posted = posts[ranks[0]]
            return [len(posted.payload)], posted.payload, posted.digest
        if len(ranks) < len(posts):
            return (
                [len(posts[rank].payload) for rank in ranks],
                b"".join(posts[rank].payload for rank in ranks),
                None,
            )
        if key not in self.joined:
            from reshard.comm.channel import digest_of

            body = b"".join(posts[rank].payload for rank in ranks)
            self.joined[key] = [len(posts[rank].payload) for rank in ranks], body, digest_of(body)
        return self.joined[key]

    def clear(self) -> None:
        """Let go of what was published: nobody reads it any more."""
        self.posts.clear()
        self.joined.clear()
