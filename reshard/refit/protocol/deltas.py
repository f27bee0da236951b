"""The state of each member's deltas, exchanged before a refit (``delta``): whose weights it has."""

from dataclasses import dataclass
from typing import Any

from reshard.comm.group import RefitGroup
from reshard.core.errors import ReshardError
from reshard.refit.protocol.encoding import MOST_ADDRESS, exchange_json, is_number, is_word


@dataclass(frozen=True)
class DeltaState:
    """A member's weights: those that a trainer's rank keeps as it sent them, or an engine's serves.

    `holds` is the transaction that brought them; None where they are not whole or not known, and `why` says
    why.
    """

    holds: int | None
    why: str


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
    return (fields["holds"] is None or is_number(fields["holds"], 0, MOST_ADDRESS)) and is_word(fields["why"])
