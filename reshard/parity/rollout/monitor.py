"""Watch a training run: check each step's rollout, and append its figures to a file that `reshard monitor` reads."""

import json
import logging
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reshard.core.version import __version__
from reshard.parity.limits import Limits
from reshard.parity.metrics import Metrics
from reshard.parity.rollout.check import Verdict, check_rollout
from reshard.parity.rollout.tokens import UnscoredError
from reshard.parity.rollout.weights import BOUNDS, checked_bounds

FORMAT = 1
# The limits that a rollout's logprobs can be held against.
LIMITED = ("max_abs", "mean_abs", "token_mult_prob_error", "kl_estimate_reverse")
# The end of a file in which the last step is looked for: more than a few lines.
TAIL = 1 << 16
NAN = float("nan")
NOTHING = Metrics(0, NAN, NAN, NAN, None, 0, NAN, NAN, NAN, None, NAN, NAN, NAN)
log = logging.getLogger("reshard.monitor")


class RolloutMonitor:
    """Checks the rollout of each step of a run and appends its figures to a file, a line of JSON a step.

    Make one in the process that has the whole rollout, or that stands for the others (`path` None writes nothing).
    It keeps no history. A line is one append: after a crash the file has each step that was checked, or all but the
    last, and a run that goes on adds to it. A file that cannot be written is a warning in the log, not the end of the
    run.

    >>> monitor = RolloutMonitor(None)
    >>> verdict = monitor.step([[-1.0, -2.0]], [[-1.01, -2.0]])
    >>> verdict.ok, monitor.next_step
    (True, 1)
    """

    def __init__(
        self,
        path: str | Path | None,
        limits: Limits | None = None,
        bounds: Sequence[float] = BOUNDS,
    ) -> None:
        """`limits` and `bounds` are those of `check_rollout`. Raises OptionError for wrong ones."""
        self.path = None if path is None else Path(path)
        self.limits = limits or Limits.of_rollout()
        self.limits.check()
        self.bounds = checked_bounds(bounds)
        self.next_step = 0 if self.path is None else last_step(self.path) + 1
        self._began = False

    def step(
        self, train: Any, inference: Any, mask: Any = None, *, step: int | None = None, **known: Any
    ) -> Verdict:
        """Check a rollout; `known` are further arguments of `check_rollout`. Steps are numbered from 0, or go on from
        the last in the file, unless their number is given.

        A rollout without a token that counts, or with a logprob that is not finite, has a verdict that is not ok,
        without figures, and the run goes on. Raises ReshardError for shapes that differ and other wrong arguments.
        """
        number = self.next_step if step is None else int(step)
        try:
            verdict = check_rollout(train, inference, mask, self.limits, bounds=self.bounds, **known)
        except UnscoredError as error:
            verdict = Verdict(NOTHING, [str(error)])
        if not verdict.ok:
            log.warning("step %d: %s", number, "; ".join(verdict.exceeded))
        self._write({"step": number, "time": round(time.time(), 3)}, verdict)
        self.next_step = number + 1
        return verdict

    def _write(self, line: dict[str, Any], verdict: Verdict) -> None:
        if self.path is None:
            return
        lines = [line | verdict.to_dict() | {"exceeded": verdict.exceeded}]
        if not self._began:
            limits = {n: v for n, v in self.limits.to_dict().items() if n in LIMITED and v is not None}
            lines.insert(
                0, {"monitor": FORMAT, "reshard": __version__, "limits": limits, "bounds": self.bounds}
            )
        try:
            append(self.path, lines)
            self._began = True
        except OSError as error:
            log.warning("step %d is not in %s: %s", line["step"], self.path, error.strerror)


def append(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    """Append lines of JSON to a file in one write, on a line of their own even where the last one was torn.

    Raises OSError if it cannot be written."""
    data = b"".join(json.dumps(_finite(line), separators=(",", ":")).encode() + b"\n" for line in lines)
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o666)
    with open(descriptor, "r+b", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        if end:
            file.seek(end - 1)
            data = data if file.read(1) == b"\n" else b"\n" + data
        while data:
            data = data[file.write(data) :]


def last_step(path: Path) -> int:
    """Return the number of the last step in a file; -1 if there is none."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
            lines = file.read().splitlines()
    except OSError:
        return -1
    for line in reversed(lines):
        try:
            return int(json.loads(line)["step"])
        except (ValueError, KeyError, TypeError):
            continue  # torn, or what a run says of itself
    return -1


def _finite(line: dict[str, Any]) -> dict[str, Any]:
    """Return a line with text in the place of what JSON lacks, as ``--json`` has it."""
    return {
        name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in line.items()
    }
