"""A transaction as the hub sees it: who has come, what has been posted, and the outcome.

A connect or a refit is one, in which all members take part in the same order. It is prepared once
all members are there, and committed once all have what they need; from either state it may fail
instead, for good. So no member can keep what another has given up, however late it comes.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from reshard.comm.channel import digest_of
from reshard.comm.protocol import COMMIT, PREPARE, Failure, Prepare, Prepared, posted_number


class Posted(NamedTuple):
    """A payload that a member has posted, with its digest."""

    payload: bytes
    digest: bytes


@dataclass(eq=False)
class Wait:
    """A request that is answered once no rank of `missing` is left, its time is over, or the
    transaction fails.

    `rank` waits until `ranks` have posted under `key`, or have come to a step; `what` is what late
    ranks did not do. With `count` they have to post a number that is at least as large.
    """

    rank: int
    request: int
    transaction: int
    key: str
    ranks: list[int]
    what: str
    seconds: float
    deadline: float
    count: int | None = None
    missing: set[int] = field(default_factory=set)  # one set for all who wait for the same
    answered: bool = False


@dataclass(eq=False)
class Awaited:
    """The ranks that have yet to post, or to come, and all requests that wait for them."""

    missing: set[int]
    waits: list[Wait] = field(default_factory=list)


class Transaction:
    """One transaction, by its number."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.kind = self.what = ""  # of the call that began it
        self.committed = False
        self.failure: Failure | None = None
        self.arrived: dict[str, set[int]] = {PREPARE: set(), COMMIT: set()}  # ranks by step
        self.version: tuple[int, int] | None = None  # and the rank that asked for it first
        self.last_version = 0  # the highest that a member has
        self.verify = self.anew = False
        self.notes: dict[int, str] = {}
        self.posts: dict[str, dict[int, Posted]] = {}
        # Posts of all ranks, put together once: these ranks, then as `body_of` returns it.
        self.joined: dict[str, tuple[list[int], tuple[list[int], bytes, bytes]]] = {}
        # By key, then by ranks and count: in a gather each member waits for each, and a post must not look at all.
        self.waits: dict[str, dict[tuple[tuple[int, ...], int | None], Awaited]] = {}

    @property
    def decided(self) -> bool:
        """True once it has failed or is committed."""
        return self.failure is not None or self.committed

    def begin(self, what: str, kind: str) -> str:
        """Count a call in. Returns why it does not belong to the calls that came before; empty if it does."""
        if not self.kind:
            self.what, self.kind = what, kind
        if kind == self.kind:
            return ""
        other = self.what if self.what != what else f"that of another connection ({self.what})"
        return f"one member calls {what}, others {other}: all make the same calls in the same order"

    def prepare(self, rank: int, request: Prepare) -> tuple[int, int] | None:
        """Count a member in. Returns the version that another asked for before it, and its rank,
        where this one asks for another."""
        if request.version is not None:
            self.version = self.version or (request.version, rank)
            if self.version[0] != request.version:
                return self.version
        self.verify |= request.verify
        self.anew |= request.anew
        self.last_version = max(self.last_version, request.last_version or 0)
        if request.note:
            self.notes[rank] = request.note
        self.arrived[PREPARE].add(rank)
        return None

    def prepared(self) -> tuple[Prepared, bytes]:
        """Return the answer to all members once they are there, and its body."""
        version = self.version[0] if self.version is not None else self.last_version + 1
        notes = json.dumps(self.notes).encode() if self.notes else b""
        return Prepared(version, self.verify, self.anew), notes

    def post(self, key: str, rank: int, posted: Posted) -> None:
        """Keep what a member posts, in place of what it posted under this key before."""
        self.posts.setdefault(key, {})[rank] = posted
        self.joined.pop(key, None)

    def all_waits(self) -> Iterator[Wait]:
        """Yield the requests that wait."""
        for of_key in self.waits.values():
            for awaited in of_key.values():
                yield from awaited.waits

    def add(self, wait: Wait, posts_itself: bool = False) -> bool:
        """Let a request wait for posts; one that `posts_itself` does that next. Returns False where nobody is missing,
        and it need not wait."""
        of_key, identity = self.waits.get(wait.key, {}), (tuple(wait.ranks), wait.count)
        awaited = of_key.get(identity) or Awaited(self.lacking(wait.key, wait.ranks, wait.count))
        if posts_itself:
            awaited.missing.add(wait.rank)
        if not awaited.missing:
            return False
        wait.missing = awaited.missing
        awaited.waits.append(wait)
        self.waits.setdefault(wait.key, of_key)[identity] = awaited
        return True

    def add_to_step(self, wait: Wait) -> list[Wait]:
        """Let a request wait for all to come to a step; return all that do."""
        awaited = self.waits.setdefault(wait.key, {}).setdefault(((), None), Awaited(set()))
        awaited.waits.append(wait)
        return awaited.waits

    def counts_posts_of(self, key: str, rank: int) -> bool:
        """Return whether somebody waits for a number that a rank posts under a key."""
        return any(count is not None and rank in ranks for ranks, count in self.waits.get(key, {}))

    def take_complete(self, key: str, rank: int) -> list[Wait]:
        """Note that a rank has posted under a key; return the requests that wait for nobody any more, and forget
        them."""
        of_key = self.waits.get(key, {})
        complete: list[Wait] = []
        for identity, awaited in list(of_key.items()):
            if rank in awaited.missing and not self.lacking(key, [rank], identity[1]):
                awaited.missing.discard(rank)
            if not awaited.missing:
                complete += of_key.pop(identity).waits
        if not of_key:
            self.waits.pop(key, None)
        return complete

    def lacking(self, key: str, ranks: list[int], count: int | None) -> set[int]:
        """Return those of these ranks that have not posted under a key, or no number as large as `count`."""
        posts = self.posts.get(key, {})
        lacking = {rank for rank in ranks if rank not in posts}
        if count is not None:
            numbers = {rank: posted_number(posts[rank].payload) for rank in ranks if rank in posts}
            lacking |= {rank for rank, number in numbers.items() if number is None or number < count}
        return lacking

    def without_number(self, key: str, ranks: list[int]) -> list[int]:
        """Return those of these ranks that have posted something other than a number under a key."""
        posts = self.posts.get(key, {})
        return [rank for rank in ranks if rank in posts and posted_number(posts[rank].payload) is None]

    def body_of(self, key: str, ranks: list[int]) -> tuple[list[int], bytes, bytes | None]:
        """Return the lengths of what these ranks have posted, all of it as one body, and that
        body's digest where it is known."""
        posts = self.posts[key]
        if len(ranks) == 1:
            posted = posts[ranks[0]]
            return [len(posted.payload)], posted.payload, posted.digest
        payloads = [posts[rank].payload for rank in ranks]
        if len(ranks) < len(posts):
            return [*map(len, payloads)], b"".join(payloads), None
        known, joined = self.joined.get(key, (None, None))
        if joined is None or known != ranks:
            body = b"".join(payloads)
            joined = [*map(len, payloads)], body, digest_of(body)
            self.joined[key] = ranks, joined
        return joined

    def clear(self) -> None:
        """Free what was posted: nobody reads it any more."""
        self.posts.clear()
        self.joined.clear()
