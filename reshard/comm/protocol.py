"""Messages between the members of a group and its hub (`reshard.comm.hub`), in the order in which
they travel.

    member sends                                            hub answers
    Join             once, when it connects                 {meeting}, or {size}, or {taken_by, has_left}
    Begin            a call begins                          {transaction}
    Post             a payload of this transaction          nothing
    PostAll          payloads under several keys            nothing
    Read             payloads of other ranks                {lengths}, and the payloads as body
    Gather           Post and Read of all ranks in one      {lengths}, and the payloads as body
    WaitForCount     a number that another rank posts       {}
    Prepare          all are there                          Prepared, and the notes as body, or {conflict}
    Commit           all have what they need                {}
    Alive            from within a long call                nothing
    Liveness         who does not respond                   {unresponsive}
    Fail             it gives this transaction up           {}
    SetValue, GetValues   torch's store                     {}; {lengths} and the values, or {absent}
    Abort            a process that is no member            {}

The hub numbers transactions: a member that missed one takes part in the next. Every request carries the
number of its `transaction` and an `id`, which its answer repeats. An answer, and a message of its own to
every member, carries a `Failure` under ``failed`` once the transaction has failed. How messages are framed
and authenticated is `reshard.comm.channel`'s.
"""

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeVar

from reshard.core.errors import listed

PREPARE, COMMIT = "prepare", "commit"
MOST_DIGITS = 18


class Request:
    """A message of a member."""


@dataclass(frozen=True)
class Join(Request):
    """A process takes part as `rank` of `size`; `process` names it for people."""

    rank: int
    size: int
    process: str


@dataclass(frozen=True)
class Begin(Request):
    """A call begins, `what` in words; only calls of the same `kind` belong together. `number` is that of the
    transaction for which it was asked, where the caller knows."""

    what: str
    kind: str
    timeout: float
    number: int | None = None


@dataclass(frozen=True)
class Post(Request):
    """The body is published under this rank and `key`."""

    key: str


@dataclass(frozen=True)
class PostAll(Request):
    """The body is as many payloads, of these lengths, as there are `keys`, each of which is published under this rank
    and its key: one message to each of many ranks, sent as one."""

    keys: list[str]
    lengths: list[int]

    def payloads(self, body: bytes) -> list[bytes]:
        """Return the payloads in a message's body. Raises ValueError if it is not made of them."""
        ends = [0, *itertools.accumulate(self.lengths)]
        if len(self.keys) != len(self.lengths) or min(self.lengths, default=0) < 0 or ends[-1] != len(body):
            raise ValueError(f"{len(body):,} bytes, which are no payloads of {len(self.keys):,} keys")
        return [body[start:end] for start, end in itertools.pairwise(ends)]


@dataclass(frozen=True)
class Waiting(Request):
    """A request that is answered once others have done their part; `what` is what late ranks did
    not do, for the error."""

    timeout: float
    what: str


@dataclass(frozen=True)
class Read(Waiting):
    """The payloads of these ranks under `key`; None: of all."""

    key: str
    ranks: list[int] | None


@dataclass(frozen=True)
class Gather(Waiting):
    """The body is published under this rank and `key`, and the payloads of all ranks are asked for.

    In one message: once the last member's is there, all have their answer, and one that fails right
    afterward fails what comes next.
    """

    key: str


@dataclass(frozen=True)
class WaitForCount(Waiting):
    """The number that `rank` posts under `key` is at least `count`."""

    key: str
    rank: int
    count: int


@dataclass(frozen=True)
class Prepare(Waiting):
    """This member is ready for the first byte. `version` is the one it wants, `last_version` the
    one that it has, `note` is passed on to the others, and one member's `verify`, or `anew`, counts for all."""

    version: int | None
    last_version: int | None
    note: str
    verify: bool
    anew: bool = False


@dataclass(frozen=True)
class Commit(Waiting):
    """This member has what it needs."""


@dataclass(frozen=True)
class Alive(Request):
    """This member is in a call that takes long."""


@dataclass(frozen=True)
class Liveness(Request):
    """Which members respond is asked; the answer comes after `timeout` seconds."""

    timeout: float


@dataclass(frozen=True)
class Fail(Request):
    """This member gives the transaction up; `resumable` says that what was done so far is worth keeping."""

    reason: str
    resumable: bool = False


@dataclass(frozen=True)
class Abort(Request):
    """No transaction will succeed: a process that should have come will not."""

    reason: str


@dataclass(frozen=True)
class SetValue(Request):
    """The body is kept under `key`."""

    key: str


@dataclass(frozen=True)
class GetValues(Request):
    """The values of these keys, once all are there; with a timeout of 0, at once."""

    keys: list[str]
    timeout: float


REQUESTS: dict[str, type[Request]] = {
    kind.__name__: kind
    for kind in (
        Join, Begin, Post, PostAll, Read, Gather, WaitForCount, Prepare, Commit, Alive, Liveness, Fail, Abort, SetValue,
        GetValues,
    )
}  # fmt: skip
_FITS: dict[Any, Callable[[Any], bool]] = {
    int: lambda value: type(value) is int,
    int | None: lambda value: value is None or type(value) is int,
    bool: lambda value: type(value) is bool,
    str: lambda value: isinstance(value, str),
    float: lambda value: type(value) in (int, float) and not math.isnan(value),
    list[str]: lambda value: isinstance(value, list) and all(isinstance(item, str) for item in value),
    list[int]: lambda value: isinstance(value, list) and all(type(item) is int for item in value),
    list[int] | None: lambda value: value is None or _FITS[list[int]](value),
}
Record = TypeVar("Record")


def encode(request: Request) -> dict[str, Any]:
    """Return the head of a request's message."""
    return {"op": type(request).__name__, **vars(request)}


def decode(head: Mapping[str, Any]) -> Request:
    """Return the request in a message's head. Raises ValueError if it is not a request."""
    kind = REQUESTS.get(str(head.get("op")))
    if kind is None:
        raise ValueError("an unknown request")
    return _record(kind, head)


def _record(kind: type[Record], values: Mapping[str, Any]) -> Record:
    names = {field.name: field.type for field in fields(kind)}  # type: ignore[arg-type]
    for name, type_ in names.items():
        if not _FITS[type_](values.get(name)):
            raise ValueError(f"{kind.__name__} with {name} {values.get(name)!r:.80}")
    return kind(**{name: values[name] for name in names if name in values})


@dataclass(frozen=True)
class Prepared:
    """The answer to Prepare once all members are there: the version that all agree on. Its body has the members'
    notes by rank, in JSON, which the hub encodes once for all."""

    version: int
    verify: bool
    anew: bool


@dataclass(frozen=True)
class Failure:
    """Why a transaction has failed: members that are gone, a `reason` that a member gives,
    `resumable` or not, or ranks that are late.

    `by` is the rank that reports it. `late` ranks did not do `what` within `seconds`; of these, and
    of those that they wait for, the `unresponsive` ones neither wait nor say that they are alive. Of both, `absent`
    ranks have never joined, and `away` ones have not begun the `call`.
    """

    by: int | None = None
    reason: str | None = None
    gone: list[int] | None = None
    late: list[int] | None = None
    unresponsive: list[int] | None = None
    absent: list[int] | None = None
    away: list[int] | None = None
    call: str = ""
    what: str = ""
    seconds: float = 0.0
    resumable: bool = False
    OVER: ClassVar[str] = "this transaction is over"

    @staticmethod
    def from_json(values: Any) -> "Failure":
        """Return the failure that a message carries. Raises ValueError if it carries none."""
        if not isinstance(values, dict):
            raise ValueError("a failure that is none")
        kinds = {field.name: field.type for field in fields(Failure)}
        kinds["reason"] = str if values.get("reason") is not None else None
        for name, kind in kinds.items():
            if kind is not None and not _FITS[kind](values.get(name)):
                raise ValueError(f"a failure with {name} {values.get(name)!r:.80}")
        return Failure(**{name: values[name] for name in kinds})

    def to_json(self) -> dict[str, Any]:
        """Return it for a message."""
        return dict(vars(self))

    def sentence(self, names: Mapping[int, str], rank: int) -> str:
        """Return the error message for `rank`; a failure that another reports follows that one's name."""
        if self.gone is not None:
            be = "is" if len(self.gone) == 1 else "are"
            gone = listed(names[member] for member in self.gone)
            return f"{gone} {be} gone: the process has ended, or has let go of this connection"
        text = self.reason if self.reason is not None else self._late_sentence(names)
        return text if self.by is None or self.by == rank else f"{names[self.by]}: {text}"

    def _late_sentence(self, names: Mapping[int, str]) -> str:
        """Return which ranks are late, or for which unresponsive ranks they wait."""
        late, unresponsive = self.late or [], self.unresponsive or []
        within = f"within {self.seconds:g} s: dead, stalled or not started"
        if unresponsive and not set(unresponsive) & set(late):
            blamed, waiting = (listed(names[rank] for rank in ranks) for ranks in (unresponsive, late))
            return f"{blamed} is silent, and {waiting}, which waits for it, {self.what} {within}"
        absent, away = self.absent or [], self.away or []
        done: dict[str, list[int]] = {}
        for rank in late:
            if rank in unresponsive or not unresponsive:
                step = "has not joined" if rank in absent else self.what
                step = f"did not come to {self.call}" if rank in away else step
                done.setdefault(step, []).append(rank)
        clauses = [f"{listed(names[rank] for rank in ranks)} {step}" for step, ranks in done.items()]
        return f"{' and '.join(clauses)} {within}"


def posted_number(payload: bytes) -> int | None:
    """Return the number that a member has posted as a count, None for any other payload."""
    return int(payload) if payload.isdigit() and len(payload) <= MOST_DIGITS else None
