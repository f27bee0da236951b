"""The report of a refit that was begun."""

from dataclasses import asdict, dataclass
from typing import Any

from reshard.refit.reporting.report import RefitDelta


@dataclass(frozen=True)
class BegunReport:
    """A refit that was begun, as a member saw it.

    `is_pending` is True where the engines have the changes of `version` beside what they serve; where it is False they
    have nothing of it, `reason` says why, and the next refit brings all. Seconds are those in which this trainer's
    rank packed what changed (`packing_seconds`), and of all from the call on (`total_seconds`). `packed_bytes` are kept
    until they are sent; `received_bytes` have arrived here, and are kept. `delta` is what the packing found, and
    `before` the version that engines serve until they switch.
    """

    version: int
    is_pending: bool
    reason: str
    packing_seconds: float
    total_seconds: float
    packed_bytes: int = 0
    received_bytes: int = 0
    delta: RefitDelta | None = None
    before: int | None = None

    @property
    def transfer_seconds(self) -> float:
        """The seconds in which the changes travelled, while both sides went on."""
        return self.total_seconds - self.packing_seconds

    def to_dict(self) -> dict[str, Any]:
        """Return it for logs and metrics, without nesting; see `RefitReport.to_dict`."""
        fields = asdict(self)
        delta = fields.pop("delta") or {}
        return fields | {name if "delta" in name else f"delta_{name}": value for name, value in delta.items()}
