"""The line that each side logs of a refit."""

import logging

from reshard.comm.group import RefitGroup
from reshard.core.errors import first_line, listed
from reshard.refit.agreement import Agreement
from reshard.refit.pending.report import BegunReport
from reshard.refit.reporting.report import RefitReport
from reshard.refit.routes import NCCL

GLOO = "Gloo"


class RefitLog:
    """The log of a member's refits: one line for each, if it is the first rank of a side.

    A worker of an engine has a logger of its own, which the engine shows, and says whether it is the first.
    """

    def __init__(self, group: RefitGroup, agreed: Agreement) -> None:
        self.group, self.agreed = group, agreed
        self.logger = logging.getLogger("reshard")
        self.is_first = group.rank in (*agreed.trainers[:1], *agreed.engines[:1])
        self.what = "refit"

    def way(self, route: str) -> str:
        """Return a route's name, which on a CPU is Gloo where it is NCCL on a GPU."""
        return GLOO if route == NCCL and self.agreed.peers[self.group.rank].device == "cpu" else route

    def succeeded(
        self, report: RefitReport, before: int | None, partners: list[str], sent_bytes: int
    ) -> None:
        """Log a refit that brought the weights of a version after those of the version `before`.

        `partners` are the routes to or from each rank of the other side. A version that goes back is warned of.
        """
        if not self.is_first:
            return
        ways = listed(sorted({self.way(route) for route in partners})) or "nothing"
        received = sum(report.received_bytes.values())
        if received or self.group.rank in self.agreed.engines:
            moved = f"{_size(received)} from {_ranks(len(partners), 'trainer')} by {ways}"
        else:
            moved = f"{_size(sent_bytes)} of this rank to {_ranks(len(partners), 'inference')} by {ways}"
        reason = report.reason
        self.logger.info(
            "reshard: %s to version %d: %s in %.3f s (%.3f s of it waiting for others, %.3f s moving bytes)%s",
            self.what, report.version, moved, report.total_seconds, report.wait_seconds, report.transfer_seconds,
            f"; {reason}" if reason else "",
        )  # fmt: skip
        if before is not None and report.version < before:
            self.logger.warning(
                "reshard: %s to version %d after version %d: versions go back, and who tells samples by them takes new "
                "weights for old ones",
                self.what, report.version, before,
            )  # fmt: skip

    def begun(self, report: BegunReport) -> None:
        """Log what has become of a refit that was begun."""
        if not self.is_first:
            return
        if not report.is_pending:
            self.logger.info("reshard: nothing is pending, and the next refit brings all: %s", report.reason)
            return
        moved = (
            f"{_size(report.received_bytes)} arrived"
            if self.group.rank in self.agreed.engines
            else (f"{_size(report.packed_bytes)} of this rank packed in {report.packing_seconds:.3f} s")
        )
        self.logger.info(
            "reshard: version %d is pending: %s, %.3f s in all; %s", report.version, moved, report.total_seconds,
            report.reason,
        )  # fmt: skip

    def switched(self, version: int, before: int, seconds: float) -> None:
        """Log that an engine serves another version, which was pending."""
        if self.is_first:
            self.logger.info("reshard: switched from version %d to %d in %.4f s", before, version, seconds)

    def failed(self, which: str, seconds: float, error: BaseException) -> None:
        """Log a refit that failed, in words."""
        if self.is_first:
            reason = first_line(error)
            self.logger.warning("reshard: %s failed after %.1f s: %s", which, seconds, reason)


def _ranks(count: int, side: str) -> str:
    return f"{count} {side} rank{'s' * (count != 1)}"


def _size(count: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} bytes"
