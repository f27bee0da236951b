"""A weight sync that is begun when a step of the trainer ends: what changed travels while both sides work, and the sync
only switches.

    train step   BegunSync.begin: returns when the changes are packed, and engines go on serving
    sync         BegunSync.switch: all engines serve what was begun, or none; where nothing is, `WeightSync.run`
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol

import torch.distributed as dist

from reshard.comm.ranks import error_line, first_said, on_first_rank
from reshard.core.errors import ReshardError, listed
from reshard.integrations.options import SyncOptions
from reshard.integrations.sync import Calls, RemoteEngine, WeightSync
from reshard.refit.pending.refits import Begun
from reshard.refit.pending.report import BegunReport

log = logging.getLogger("reshard")


class SwitchedEngine(RemoteEngine, Protocol):
    """A `RemoteEngine` that can serve a version while another arrives. Of vLLM's workers these are
    ``reshard_begin_refit``, ``reshard_switch`` and ``reshard_roll_back``."""

    def begin(self, version: int | None, verify: bool) -> Future[Any]:
        """Have all its ranks take part in a refit that is begun, and go on serving."""

    def switch(self, version: int | None) -> Future[Any]:
        """Have all its ranks serve the version that was begun, or none, and say so."""

    def roll_back(self, version: int | None) -> Future[Any]:
        """Have all its ranks serve this version again, and say so, if they have switched."""


class _Started(NamedTuple):
    """A sync that was begun, with the version that it brings."""

    version: int | None
    begun: Begun
    calls: Calls


class BegunSync(WeightSync):
    """A trainer rank's link to engines on other GPUs, whose syncs may be begun (`SyncOptions.begin`)."""

    def __init__(self, options: SyncOptions) -> None:
        super().__init__(options)
        self._started: _Started | None = None

    def begin(self, engines: Sequence[SwitchedEngine], version: int | None = None, group: Any = None) -> str:
        """Begin a sync of these engines from all ranks of torch's process group, which may change their weights when
        this returns; `group` is as in `agreed_meeting`. Return, on all, why nothing was begun, as far as that is known
        now; empty where something was. Then the next `switch` finds nothing, and `run` sends all.
        """
        self._started = None
        if not self.options.begin:
            return "it is not to be begun (begin=True)"
        why = first_said("" if self.link is not None else "engines are to be connected", group)
        if not why:
            why = first_said(self._begin(engines if dist.get_rank() == 0 else (), version), group)
        if why:
            self._log(f"all weights are sent at the next sync: {why}")
        return why

    def _begin(self, engines: Sequence[SwitchedEngine], version: int | None) -> str:
        """Begin, as a rank that is connected; return why that cannot be."""
        link = self.link
        assert link is not None
        try:
            link.begun.settle()  # before an engine hears of another
            calls = Calls({engine.name: engine.begin(version, self.options.verify) for engine in engines})
            begun = link.begin_refit(version, self.options.verify, called=calls.first_failure)
        except Exception as error:  # whatever it is, the other ranks wait for the answer
            return error_line(error)
        self._started = _Started(version, begun, calls)
        return begun.why

    def switch(
        self, engines: Sequence[SwitchedEngine], version: int | None = None, group: Any = None
    ) -> BegunReport | None:
        """Have all these engines serve the version that was begun, or none; all ranks call it. Return None where there
        is nothing to switch to: then `run` sends all.

        Raises ReshardError where an engine has not switched: then all serve again what they did before, and the next
        sync connects again.
        """
        if not self.options.begin:
            return None
        started, self._started = self._started, None
        report, why, failure = self._arrived(started, version)
        if failure := first_said(failure, group):
            self.close()  # all connect again: how far each one was is not known
        if why := failure or first_said(why, group):
            self._log(f"all weights are sent: {why}")
            return None
        assert report is not None
        with self.dropped_on_failure():
            on_first_rank(lambda: self._switch_all(engines, report.version, report.before), group)
        self._log(f"all engines serve version {report.version}, which was begun")
        return report

    def _arrived(self, started: _Started | None, version: int | None) -> tuple[BegunReport | None, str, str]:
        """Wait for what becomes of what was begun: its report; or why it cannot be switched to; or how it failed."""
        if started is None:
            return None, "nothing was begun", ""
        try:
            report = started.begun.wait()
            started.calls.wait_all(
                self.options.timeout
            )  # an engine must not hear of it after what comes next
        except ReshardError as error:
            return None, "", str(error)
        if not report.is_pending:
            return None, report.reason, ""
        if started.version != version:
            return None, f"it was begun as version {started.version}, and not {version}", ""
        return report, "", ""

    def _switch_all(self, engines: Sequence[SwitchedEngine], version: int, before: int | None) -> None:
        """Have all switch, or none; see `all_or_none`."""
        all_or_none(
            lambda: {engine.name: engine.switch(version) for engine in engines},
            lambda: {engine.name: engine.roll_back(before) for engine in engines},
            version,
            before,
            self.options.timeout,
        )

    def _log(self, what: str) -> None:
        if dist.get_rank() == 0:
            log.info("%s", what)

    def close(self) -> None:
        """Unmap the engines' memory, and forget them and what was begun."""
        self._started = None
        super().close()


def all_or_none(
    switch: Callable[[], Mapping[str, Future[Any]]],
    roll_back: Callable[[], Mapping[str, Future[Any]]],
    version: int,
    before: int | None,
    seconds: float,
) -> None:
    """Have all engines switch to a version, or none: `switch` and `roll_back` call all of them, and return the calls by
    their names, which may take so many seconds. Where one has failed all go back to the version `before`, since how far
    that one had come is not known.

    Raises ReshardError naming those that have failed.
    """
    failed = Calls(switch()).errors(seconds)
    if not failed:
        return
    back = Calls(roll_back()).errors(seconds)
    said = listed([f"{name} ({why})" for name, why in failed.items()], 3)
    stays = f", but for {listed([*back], 3)}, which did not go back" if back else ""
    raise ReshardError(f"{said} did not switch to version {version}: all serve version {before} again{stays}")
