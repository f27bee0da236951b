"""A trainer rank's part of a weight sync: all ranks meet the engines, connect and refit beside their calls, and connect
again after a sync that failed. A framework says how one of its engines is called (`RemoteEngine`)."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import torch.distributed as dist

from reshard.comm.group import RefitGroup
from reshard.comm.hosts import free_address
from reshard.comm.ranks import error_line, on_first_rank
from reshard.comm.secret import new_secret
from reshard.core.errors import ReshardError, listed
from reshard.integrations.options import SyncOptions
from reshard.refit.connecting import connect
from reshard.refit.engine import Engine
from reshard.refit.link import Link, RefitReport
from reshard.refit.trainer import Trainer

Result = TypeVar("Result")
# How long an engine may take to say why it has failed, once others have given it up.
ANSWER_SECONDS = 1.0
# Time limits, one after the other, that a call of an engine may take in all: to meet, to connect, to refit.
WAITS = 3


@dataclass(frozen=True)
class Meeting:
    """An address where `size` members meet: the trainer's ranks, and after these the ranks of each engine. `timeout`
    is how many seconds they wait for one another."""

    address: str
    size: int
    timeout: float
    secret: str | None = field(repr=False)

    def join(self, rank: int) -> RefitGroup:
        """Join as member `rank`; see `RefitGroup.join`."""
        return RefitGroup.join(self.address, rank, self.size, self.timeout, self.secret)

    def arguments(self, first_rank: int) -> dict[str, Any]:
        """Return what an engine is called with to connect: what this is, and `first_rank`, the member that the
        engine's first worker is."""
        return vars(self) | {"first_rank": first_rank}


def ray_address() -> str:
    """Return an address of this host that other hosts of Ray's reach, with a port that is free now."""
    import ray  # which the frameworks have that meet there, and others may lack

    return free_address(str(ray.util.get_node_ip_address()).strip("[]"))


class RemoteEngine(Protocol):
    """An engine elsewhere, by the way in which a framework calls it: a call returns at once, with a future. Errors
    call it by its `name`; `ranks` is how many it has.

    Of vLLM's workers these are ``reshard_connect`` and ``reshard_refit`` (`reshard.engines.vllm.worker`), of SGLang's
    the requests that `reshard.engines.sglang.calls` makes.
    """

    name: str
    ranks: int

    def connect(self, meeting: dict[str, Any]) -> Future[Any]:
        """Have all its ranks connect, with the arguments that `Meeting.arguments` returns."""

    def refit(self, version: int | None, verify: bool) -> Future[Any]:
        """Have all its ranks take the trainer's weights."""


class WeightSync:
    """A trainer rank's link to the engines: made at the first sync, and anew after one that failed.

    `run` is a whole sync. A framework that meets in a way of its own, or whose calls have to be awaited, uses the
    steps of `run`.
    """

    def __init__(self, options: SyncOptions) -> None:
        self.options = options
        self.link: Link | None = None

    def run(
        self,
        engines: Sequence[RemoteEngine],
        source: Trainer | Callable[[], Trainer],
        version: int | None = None,
        *,
        adapter: str | None = None,
        place: Callable[[], str] = ray_address,
        group: Any = None,
    ) -> RefitReport:
        """Refit these engines from all ranks of torch's process group, the first of which calls them; connect before
        if a rank is not connected. For `place` and `group` see `agreed_meeting`.

        Raises ReshardError, as the engines do, if it fails; the next sync connects again.
        """
        rank, trainers = dist.get_rank(), dist.get_world_size()
        called = engines if rank == 0 else ()
        with self.dropped_on_failure():
            size = trainers + sum(engine.ranks for engine in engines)
            meeting = self.agreed_meeting(size, place, group)
            if meeting is not None:
                connecting, first_rank = {}, trainers
                for engine in called:
                    connecting[engine.name] = engine.connect(meeting.arguments(first_rank))
                    first_rank += engine.ranks
                self.connect(meeting.join(rank), source, calls=Calls(connecting), adapter=adapter)
            refitting = {engine.name: engine.refit(version, self.options.verify) for engine in called}
            return self.refit(version, Calls(refitting))

    def agreed_meeting(
        self, size: int, place: Callable[[], str] = ray_address, group: Any = None
    ) -> Meeting | None:
        """Return where `size` members meet, the same on all ranks of torch's process group; None if all these ranks
        are connected.

        `place` returns an address with a free port, on the first rank; by default one of a host that Ray knows.
        `group` is the process group that carries what they tell each other, by default torch's.
        """
        are_new: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(are_new, self.link is None, group=group)
        if not any(are_new):
            return None
        address, secret = on_first_rank(lambda: (place(), new_secret()), group)
        return Meeting(address, size, self.options.timeout, secret)

    def connect(
        self,
        members: RefitGroup,
        source: Trainer | Callable[[], Trainer],
        destination: Engine | Callable[[], Engine] | None = None,
        *,
        calls: "Calls | None" = None,
        adapter: str | None = None,
    ) -> None:
        """Connect, while `calls` of engines are under way; see `reshard.refit.connect`."""
        options = replace(self.options, adapter=adapter)
        self.link = (calls or Calls()).alongside(
            members, lambda: connect(members, source, destination, options)
        )

    def refit(self, version: int | None = None, calls: "Calls | None" = None) -> RefitReport:
        """Refit the engines, while `calls` of them are under way; see `reshard.refit.Link.refit`."""
        link = self.link
        assert link is not None, "connect comes first"
        return (calls or Calls()).alongside(link.group, lambda: link.refit(version, self.options.verify))

    @contextmanager
    def dropped_on_failure(self) -> Iterator[None]:
        """Give up the link if what is done inside fails, so that the next sync connects again."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def reads_host_memory(self, source: Trainer) -> bool:
        """Return True if the next refit needs nothing of a trainer's rank on the GPU: it can read its
        parameters from host memory, and engines read no more of them over PCIe so than loading and
        offloading them would move. False before a connection is made, which finds out who can map the
        GPU's memory."""
        sender = self.link.sender if self.link is not None else None
        return sender is not None and sender.times_read <= 2 and source.is_readable_from_host()

    def close(self) -> None:
        """Unmap the engines' memory, and forget them."""
        link, self.link = self.link, None
        if link is not None:
            with suppress(ReshardError):
                link.close()


class Calls:
    """Calls of engines under way, by the names of these; none on ranks that have called none.

    An engine that has died, or refuses before it has joined the members, cannot tell them so; but
    its call has ended, which this process sees.
    """

    def __init__(self, calls: "Mapping[str, Future[Any]] | None" = None) -> None:
        self.calls = dict(calls or {})

    def first_failure(self, within: float = 0.0) -> str:
        """Return a sentence on the first call that has failed, or fails `within` so many seconds;
        empty if none does."""
        wait(self.calls.values(), within, FIRST_EXCEPTION)
        return next(self._failures(), "")

    def alongside(self, members: RefitGroup, part: Callable[[], Result]) -> Result:
        """Return the result of this process's `part`, a connect or a refit with these members; all
        give up when a call fails.

        Raises ReshardError if either fails. If both do, its text is the sentence that all members
        agree on, followed by what an engine says that never joined them.
        """
        if not self.calls:
            return part()
        try:
            with members.watching(self.first_failure):
                result = part()
        except ReshardError as error:
            wait(self.calls.values(), ANSWER_SECONDS)
            others = [text for text in self._failures() if str(error) not in text and text not in str(error)]
            raise ReshardError(f"{error} ({others[0]})" if others else str(error)) from error
        self.wait_all(members.timeout)
        return result

    def wait_all(self, seconds: float) -> None:
        """Wait until all calls have returned.

        Raises ReshardError naming the first that fails, or those that do not return within so many
        seconds.
        """
        wait(self.calls.values(), seconds, FIRST_EXCEPTION)
        if failure := self.first_failure():
            raise ReshardError(failure)
        if late := [name for name, call in self.calls.items() if not call.done()]:
            raise late_error(late, seconds)

    def errors(self, seconds: float) -> dict[str, str]:
        """Wait until all calls have ended, for so many seconds at most; return why some have failed, or are late, by
        name."""
        wait(self.calls.values(), seconds)
        late = ReshardError(f"it did not answer within {seconds:g} s")
        errors = {name: call.exception() if call.done() else late for name, call in self.calls.items()}
        return {name: error_line(error) for name, error in errors.items() if error is not None}

    def _failures(self) -> Iterator[str]:
        for name, call in self.calls.items():
            error = call.exception() if call.done() and not call.cancelled() else None
            if error is not None:
                yield f"{name} has failed: {error_line(error)}"


def late_error(names: Iterable[str], seconds: float) -> ReshardError:
    """Return the error for calls, by the names of whom they were made to, that have not returned in time."""
    return ReshardError(f"{listed(names)} did not answer within {seconds:g} s: dead or stalled")
