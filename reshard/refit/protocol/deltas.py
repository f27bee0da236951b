"""The state of each member's deltas, exchanged before a refit (``delta``): whose weights it has, and what refits took."""

import math
from dataclasses import dataclass
from typing import Any

from reshard.comm.group import RefitGroup
from reshard.core.errors import ReshardError
from reshard.refit.protocol.encoding import MOST_ADDRESS, exchange_json, is_number, is_word


@dataclass(frozen=True)
class DeltaState:
    """A member's weights: those that a trainer's rank keeps as it sent them, or an engine's serves.

    `holds` is the transaction that brought them; None where they are not whole or not known, and `why` says
    why. `whole_seconds` is what a refit that sends all and keeps nothing takes, `delta_seconds` what one that sends
    what changed does; None where that was not measured.
    """

    holds: int | None
    why: str
    whole_seconds: float | None = None
    delta_seconds: float | None = None


def exchange_states(group: RefitGroup, own: DeltaState) -> list[DeltaState]:
    """Tell all members this one's state, and return each one's, by rank."""
    states = []
    for rank, fields in enumerate(exchange_json(group, "delta", vars(own))):
        if not makes_sense(fields):
            raise ReshardError(f"{group.names[rank]} says {fields!r:.80} of its deltas, which makes no sense")
        states.append(DeltaState(**fields))
    return states


def makes_sense(fields: Any) -> bool:
    """Return True for the fields of a `DeltaState`, each within its bounds."""
    if not isinstance(fields, dict) or fields.keys() != DeltaState.__dataclass_fields__.keys():
        return False
    seconds = (fields["whole_seconds"], fields["delta_seconds"])
    return (
        (fields["holds"] is None or is_number(fields["holds"], 0, MOST_ADDRESS))
        and is_word(fields["why"])
        and all(value is None or (type(value) is float and 0 <= value < math.inf) for value in seconds)
    )
