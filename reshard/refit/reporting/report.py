"""The report of a refit."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class RefitDelta:
    """The changes that a refit of a connection with deltas sent, as a member saw it.

    `is_delta` is True where changes were sent, False where all was; `reason` says since which version, or why.
    On a trainer's rank `changed` is the share of its words of 2 bytes that had other bits than when they were
    last sent, None where that was not measured, `delta_bytes` and `whole_bytes` what these changes, and all,
    take on their way to each engine with weights of its own, and `kept_bytes` the memory in which it keeps
    what it sent.
    """

    is_delta: bool
    reason: str
    changed: float | None = None
    delta_bytes: int = 0
    whole_bytes: int = 0
    kept_bytes: int = 0


@dataclass(frozen=True)
class RefitReport:
    """One refit as a member saw it.

    `version` is the one that the engine now has. Seconds are those of waiting for the others, of
    moving bytes, and in all. `received_bytes` are those that came here by route (``local``,
    ``cuda_ipc``, ``staged``, ``nixl``, ``nccl``). `launches` are the kernels of ours that copied them, sent
    them off, and made blocks of them; not those of a verification, of torch, or of an engine that
    processes its layers anew. `delta` is None in a connection without deltas. `digest` is the short form of that of
    the weights that engines serve, as `reshard.digest` gives it in their dtype (``bf16``), where the refit was
    verified; None where it was not, or they serve a form that has none.
    """

    version: int
    wait_seconds: float
    transfer_seconds: float
    total_seconds: float
    received_bytes: Mapping[str, int] = field(default_factory=dict)
    launches: int = 0
    delta: RefitDelta | None = None
    digest: str | None = None

    @property
    def reason(self) -> str:
        """Why all was sent, or since which version changes were; empty in a connection without deltas."""
        return self.delta.reason if self.delta is not None else ""

    def to_dict(self) -> dict[str, Any]:
        """Return it for logs and metrics, without nesting: `received_bytes` is the sum over all routes, and
        ``received_bytes_nccl`` and its like are those of each.

        ``digest`` is there where it is known. In a connection with deltas there are ``is_delta``, ``delta_bytes`` and
        ``delta_`` before the other fields of `RefitDelta`.
        """
        fields = asdict(self)
        delta, received = fields.pop("delta"), fields.pop("received_bytes")
        if self.digest is None:
            del fields["digest"]
        fields["received_bytes"] = sum(received.values())
        fields |= {f"received_bytes_{route}": size for route, size in received.items()}
        return fields | {
            name if "delta" in name else f"delta_{name}": value for name, value in (delta or {}).items()
        }
