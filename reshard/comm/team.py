"""The processes that share a conversion, or a load or save of a live model: one, or those that a
launcher started.

They meet before the first byte, so that all have the same plan, and after the last, so that the first one can
publish. In between, they may be hours apart. So a team is a `RefitGroup` in one transaction whose waits have
no time limit: it ends when all have done their part, or when one fails or dies, which the others learn at
once. If a host disappears, the others notice within a minute.
"""

import contextlib
import itertools
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

from reshard.comm.client import HubLostError, TransactionFailedError
from reshard.comm.group import RefitGroup
from reshard.comm.protocol import Failure
from reshard.core.errors import ReshardError, first_line, is_resumable
from reshard.core.extras import importing

# Time limits: for the others to start, and for all to stop once one has failed. Before the first is
# over, it is said who is waited for: a launcher's variables may be there without its processes.
JOIN_SECONDS, STOP_SECONDS, NOTICE_SECONDS = 600.0, 60.0, 30.0
AGAIN = "run again with --resume"
log = logging.getLogger("reshard")


class Team:
    """`process` of `size` processes; without a group there is one."""

    def __init__(self, process: int = 0, size: int = 1, group: RefitGroup | None = None) -> None:
        self.process, self.size, self.group = process, size, group
        self._steps = itertools.count()
        self._did_its_part = self._has_stopped = False
        if group is not None:
            group.names = {other: f"process {other} of {size}" for other in range(size)}
            group.begin("the start")
            group.prepare()
            group.wait_without_limit()

    @staticmethod
    def from_environment() -> "Team":
        """Return the team that torchrun's environment variables describe; one process without them.

        Raises ReshardError if these make no sense, or the others cannot be reached.
        """
        if os.environ.get("WORLD_SIZE", "1") == "1" or "RANK" not in os.environ:
            return Team()
        process, size = _number("RANK"), _number("WORLD_SIZE")
        if not 0 <= process < size:
            raise ReshardError(
                f"RANK={process} and WORLD_SIZE={size} in the environment are not a process and "
                f"number of processes"
            )
        alone = "unset RANK and WORLD_SIZE in the environment for a single process"
        waiting = f"process {process} of {size} waits for the others to start; {alone}"
        notice = threading.Timer(NOTICE_SECONDS, log.warning, [waiting])
        notice.daemon = True
        notice.start()
        try:
            return _meet(process, size, f"; {alone}")
        finally:
            notice.cancel()

    @staticmethod
    def of_process_group() -> "Team":
        """Return the ranks of torch's default process group as a team; one process where there is
        none.

        The group's store says where the first rank is; all else goes through connections of the
        team's own, so that a team may work in a thread while training goes on.
        """
        import torch.distributed as dist

        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return Team()
        return _meet(dist.get_rank(), dist.get_world_size())

    def check(self) -> None:
        """Raise ReshardError if another process has failed or ended."""
        if self.group is not None:
            with self._as_processes():
                self.group.check()

    def exchange(self, value: Any) -> list[Any]:
        """Return every process's value (JSON), by process. Waits for all, however long they take."""
        if self.group is None:
            return [value]
        with self._as_processes():
            return [json.loads(answer) for answer in self.group.gather(self._key(), _payload(value))]

    def gather(self, value: Any) -> list[Any]:
        """Return every process's value (JSON), by process, in the first process; nothing in the
        others."""
        if self.group is None:
            return [value]
        key = self._key()
        with self._as_processes():
            self.group.post(key, _payload(value))
            if self.process:
                return []
            return [json.loads(answer) for answer in self.group.read_all(key)]

    def scatter(self, values: list[Any]) -> Any:
        """Return this process's item of `values`, which the first process has and the others leave
        empty."""
        if self.group is None:
            return values[0]
        key = self._key()
        with self._as_processes():
            if self.process:
                return json.loads(self.group.read(f"{key} for {self.process}", 0))
            for other in range(1, self.size):
                self.group.post(f"{key} for {other}", _payload(values[other]))
        return values[0]

    def together(self, step: Callable[[], Any]) -> list[Any]:
        """Run `step` here, and meet: return every process's result, or raise in all an error as
        soon as it has failed in one."""
        try:
            return self.exchange(step())
        except BaseException as error:
            self.fail(error)
            raise

    def conclude(self, step: Callable[[], Any]) -> None:
        """Run `step` in the first process once all others have done their part; all wait for it.

        What becomes of the others meanwhile or afterward changes nothing of that: only the first
        one's failure is one.
        """
        if self.process:
            self._did_its_part = True
            if self.group is not None:
                with self._as_processes():
                    self.group.commit()
            return
        try:
            step()
        except BaseException as error:
            self.fail(error)
            raise
        self._did_its_part = True
        if self.group is not None:
            self.group.timeout = JOIN_SECONDS  # for the others to hear of it
            with contextlib.suppress(ReshardError):
                self.group.commit()

    def fail(self, error: BaseException) -> None:
        """Tell the others that this process gives up, and why."""
        if self.group is None or self._did_its_part or self._has_stopped:
            return
        reason = "it was interrupted" if isinstance(error, KeyboardInterrupt) else first_line(error)
        self.group.fail(ReshardError(reason, is_resumable(error)))

    def stop(self) -> None:
        """Tell the others that this process has stopped writing. The first process waits until all have,
        since it may remove what they have written."""
        if self.group is None or self._has_stopped:
            return
        self._has_stopped = True
        if self.process:
            self.group.channel.close()
            return
        assert self.group.hub is not None
        deadline = time.monotonic() + STOP_SECONDS
        while len(self.group.hub.gone) < self.size - 1 and time.monotonic() < deadline:
            time.sleep(0.01)

    def close(self) -> None:
        """Leave, once all have done their part."""
        if self.group is None:
            return
        if not (self._did_its_part or self._has_stopped):
            self._did_its_part = True
            with contextlib.suppress(ReshardError):
                self.group.commit()
        self.stop()
        self.group.channel.close()

    def _key(self) -> str:
        return f"step {next(self._steps)}"

    @contextlib.contextmanager
    def _as_processes(self) -> Iterator[None]:
        """Reword failures so that they name processes, and say how to continue."""
        try:
            yield
        except TransactionFailedError as error:
            raise self._error_of(error.failure) from error
        except HubLostError as error:
            raise self._ended(0) from error

    def _error_of(self, failure: Failure) -> ReshardError:
        if failure.gone:
            return self._ended(failure.gone[0])
        by = failure.by if failure.by is not None else self.process
        sentence = failure.sentence(self.group.names if self.group is not None else {}, by)
        if by != self.process:
            sentence = f"process {by} of {self.size} failed: {sentence}"
        return ReshardError(sentence, failure.resumable)

    def _ended(self, process: int) -> ReshardError:
        return ReshardError(f"process {process} of {self.size} was ended; {AGAIN}", resumable=True)

    def __enter__(self) -> "Team":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, *exc: object) -> None:
        if error is not None:
            self.fail(error)
        self.close()


def _payload(value: Any) -> bytes:
    return json.dumps(value).encode()


def _number(name: str) -> int:
    text = os.environ.get(name, "")
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise ReshardError(
            f"{name}={text} in the environment is not a number: torchrun sets it; unset it "
            f"for a single process"
        )
    return int(text)


def _meet(process: int, size: int, hint: str = "") -> Team:
    """Meet by torchrun's store, or that of the process group. Raises ReshardError, which ends with
    the `hint`, where the others cannot be reached."""
    try:
        store = _store(process, size)
        return Team(process, size, RefitGroup.of_store(store, process, size, "reshard-team", JOIN_SECONDS))
    except (OSError, RuntimeError, ValueError, ReshardError) as error:
        raise ReshardError(
            f"process {process} of {size} cannot reach the others: {first_line(error)}{hint}"
        ) from error


def _store(process: int, size: int) -> Any:
    with importing("megatron"):
        import torch.distributed as dist
        from torch.distributed.rendezvous import rendezvous

    if dist.is_initialized():
        return dist.distributed_c10d._get_default_store()
    timeout = timedelta(seconds=JOIN_SECONDS)
    store, _, _ = next(rendezvous("env://", rank=process, world_size=size, timeout=timeout))
    return store
